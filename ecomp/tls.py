"""Classify TLS failures by OpenSSL's reason, with a sentence for each."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any


class TlsFailure(Enum):
    """A reason why TLS failed, with OWN_ if the server refuses our certificate."""

    EXPIRED = auto()
    NOT_YET_VALID = auto()
    OTHER_NAME = auto()
    OTHER_ADDRESS = auto()
    NO_KEY_IDENTIFIER = auto()
    TOO_WEAK = auto()
    UNTRUSTED = auto()
    OWN_EXPIRED = auto()
    OWN_MISSING = auto()
    OWN_REFUSED = auto()
    PLAIN_TEXT = auto()
    HUNG_UP = auto()
    UNUSABLE_FILES = auto()
    OTHER = auto()


# For servers whose configuration has ca_cert, cert_cert and cert_key.
SENTENCES: Mapping[TlsFailure, str] = {
    TlsFailure.EXPIRED: 'its certificate has expired',
    TlsFailure.NOT_YET_VALID: 'its certificate is not valid yet (the clock may be wrong)',
    TlsFailure.OTHER_NAME: 'its certificate is for another name',
    TlsFailure.OTHER_ADDRESS: 'its certificate is for another name',
    TlsFailure.NO_KEY_IDENTIFIER: 'its certificate has no Authority Key Identifier, which Python 3.13 requires',
    TlsFailure.TOO_WEAK: (
        'its certificate, or that of its authority, has a key or a digest that OpenSSL refuses as too weak'
    ),
    TlsFailure.UNTRUSTED: 'its certificate is not signed by the authority in ca_cert (if not set: by a public one)',
    TlsFailure.OWN_EXPIRED: 'it reports that our certificate (cert_cert) has expired',
    TlsFailure.OWN_MISSING: 'it wants a certificate of ours: cert_cert and cert_key',
    TlsFailure.OWN_REFUSED: 'it refuses our certificate (cert_cert), which may not be signed for it',
    TlsFailure.PLAIN_TEXT: 'it does not speak TLS (its endpoint may be http://)',
    TlsFailure.HUNG_UP: 'it closed the connection (it may refuse our certificate: cert_cert, cert_key)',
    TlsFailure.UNUSABLE_FILES: (
        'ca_cert, cert_cert or cert_key is not a certificate or key, or cert_key does not belong to cert_cert'
    ),
    TlsFailure.OTHER: 'TLS failed',
}
_OWN_CERTIFICATE_FAILURES = (TlsFailure.OWN_EXPIRED, TlsFailure.OWN_MISSING, TlsFailure.OWN_REFUSED)
# For etcd, whose alerts tell less about our certificate.
ETCD_SENTENCES: Mapping[TlsFailure, str] = {
    **SENTENCES,
    **dict.fromkeys(
        _OWN_CERTIFICATE_FAILURES,
        'it refuses our certificate (cert_cert), which may be missing, expired, or not signed for it',
    ),
    **dict.fromkeys((TlsFailure.PLAIN_TEXT, TlsFailure.OTHER), 'it does not speak TLS as this host does'),
    TlsFailure.HUNG_UP: 'it closes TLS connections (it may expect plain text, without ca_cert)',
}
# Where the server runs at this address, but something else is wrong. After HUNG_UP it may as well be shutting down.
CURES: Mapping[Enum | None, str] = {
    TlsFailure.NOT_YET_VALID: 'run `timedatectl set-ntp true` here and on the control host',
    TlsFailure.EXPIRED: 'run `elab certs DIR` on the control host, and check that the clock of this machine is right',
    **dict.fromkeys(
        _OWN_CERTIFICATE_FAILURES,
        'run `elab certs DIR` on the control host, copy the new files here, and name them in `{section}:`',
    ),
}

# Named in https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/; the numbers are in OpenSSL's x509_vfy.h.
_BY_VERIFY_CODE = {
    9: TlsFailure.NOT_YET_VALID,
    10: TlsFailure.EXPIRED,
    62: TlsFailure.OTHER_NAME,
    64: TlsFailure.OTHER_ADDRESS,
    **dict.fromkeys((66, 67, 68), TlsFailure.TOO_WEAK),
    85: TlsFailure.NO_KEY_IDENTIFIER,
}
_BY_REASON = {
    'SSLV3_ALERT_CERTIFICATE_EXPIRED': TlsFailure.OWN_EXPIRED,
    'TLSV13_ALERT_CERTIFICATE_REQUIRED': TlsFailure.OWN_MISSING,
    'TLSV1_ALERT_PROTOCOL_VERSION': TlsFailure.OTHER,
    'WRONG_VERSION_NUMBER': TlsFailure.PLAIN_TEXT,
}


def classify_tls_error(error: ssl.SSLError) -> TlsFailure:
    """Classify a TLS error by its type, code or reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _BY_VERIFY_CODE.get(getattr(error, 'verify_code', 0), TlsFailure.UNTRUSTED)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return TlsFailure.HUNG_UP
    reason = getattr(error, 'reason', None) or ''
    return _BY_REASON.get(reason, TlsFailure.OWN_REFUSED if '_ALERT_' in reason else TlsFailure.OTHER)


def decode_certificate(path: Path) -> Mapping[str, Any]:
    """Return the first certificate in a PEM file, as SSLSocket.getpeercert() would, or {}."""
    import _ssl  # the public functions decode only certificates of authorities and of a connection's peer

    with suppress(OSError, ValueError):
        return dict(_ssl._test_decode_cert(str(path)))  # type: ignore[attr-defined]
    return {}
