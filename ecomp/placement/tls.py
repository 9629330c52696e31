"""What went wrong with TLS, in plain words: who has to do what."""

from __future__ import annotations

import ssl

# What OpenSSL says, and what there is to do about it; the first that is found counts.
_WORDS = (
    ('certificate has expired', 'its certificate has expired'),
    ('certificate is not yet valid', 'its certificate is not valid yet: is the clock right?'),
    ('mismatch, certificate is not valid for', 'its certificate is made out to another name'),
    ('Missing Authority Key Identifier', 'its certificate has no Authority Key Identifier, which Python 3.13 asks for'),
    ('CERTIFICATE_VERIFY_FAILED', 'its certificate is not signed by the authority in ca_cert (none: a public one)'),
    ('ALERT_CERTIFICATE_EXPIRED', 'it says that our certificate (cert_cert) has expired'),
    ('CERTIFICATE_REQUIRED', 'it wants a certificate of ours: cert_cert and cert_key'),
    ('ALERT_', 'it refuses our certificate: is cert_cert signed for it?'),
    ('WRONG_VERSION_NUMBER', 'it does not speak TLS: is it http:// there?'),
    ('EOF', 'it hung up: does it take our certificate (cert_cert, cert_key)?'),
)

NO_CERTIFICATE = 'ca_cert, cert_cert or cert_key is no certificate or key, or they do not belong together'
"""Why there is no TLS where these files cannot be loaded."""


def reason(error: ssl.SSLError) -> str:
    """Say why TLS failed."""
    text = str(error)
    return next((words for said, words in _WORDS if said in text), 'TLS failed')
