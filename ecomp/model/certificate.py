"""When a certificate ends, read out of its file: of X.509's DER only what comes before that is stepped over. Pure."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime

_PEM = re.compile(rb'-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----')
VERSION, UTC_TIME, GENERALIZED_TIME = 0xA0, 0x17, 0x18


def ends(content: bytes) -> datetime:
    """When the first certificate in a PEM file is not valid any more. ValueError if there is none.

    RFC 5280, 4.1: Certificate, in it TBSCertificate, in it (version), serial, signature, issuer and validity.
    """
    found = _PEM.search(content)
    if found is None:
        raise ValueError('there is no certificate in it')
    try:
        _, certificate, _ = _next(base64.b64decode(found[1]))
        _, rest, _ = _next(certificate)
        tag, _, after = _next(rest)
        rest = after if tag == VERSION else rest
        for _ in ('serial', 'signature', 'issuer'):
            _, _, rest = _next(rest)
        _, validity, _ = _next(rest)
        _, _, after = _next(validity)
        tag, when, _ = _next(after)
        form = {UTC_TIME: '%y%m%d%H%M%SZ', GENERALIZED_TIME: '%Y%m%d%H%M%SZ'}[tag]
        return datetime.strptime(when.decode('ascii'), form).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError('what is in it is no certificate') from error


def _next(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first element, and what comes after it."""
    tag, length, start = der[0], der[1], 2
    if length > 0x7F:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start], 'big')
    return tag, der[start : start + length], der[start + length :]
