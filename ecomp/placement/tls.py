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
    ('[', 'ca_cert, cert_cert or cert_key is no certificate or key, or they do not belong together'),
)


def reason(error: BaseException) -> tuple[bool, str]:
    """Say of a TLS error whether the request certainly was not sent, and why TLS failed.

    Whoever does not believe the other's certificate has not spoken yet; what comes later may come after the call.
    """
    found = next((each for each in _all(error) if isinstance(each, ssl.SSLError)), None)
    text = str(found if found is not None else error)
    why = next((words for said, words in _WORDS if said in text), 'TLS failed')
    return isinstance(found, ssl.SSLCertVerificationError), why


def _all(error: BaseException) -> list[BaseException]:
    """It, and all that it was raised of, whoever wrapped that."""
    found = [error]
    for each in found:  # grows as it goes
        for inner in (each.__cause__, each.__context__, *each.args, getattr(each, 'reason', None)):
            if isinstance(inner, BaseException) and not any(inner is other for other in found):
                found.append(inner)
    return found
