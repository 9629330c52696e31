"""Why TLS failed is told by OpenSSL's own reason, and has a sentence."""

from __future__ import annotations

import ssl

import pytest

from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, tls_failure


def test_each_failure_has_a_sentence() -> None:
    assert SENTENCES.keys() == ETCD_SENTENCES.keys() == set(TlsFailure)


@pytest.mark.parametrize(
    ('kind', 'said', 'failure'),
    [
        *((ssl.SSLCertVerificationError, {'verify_code': code}, failure) for code, failure in (
            (9, TlsFailure.NOT_YET_VALID), (10, TlsFailure.EXPIRED), (20, TlsFailure.UNTRUSTED),
            (62, TlsFailure.OTHER_NAME), (64, TlsFailure.OTHER_ADDRESS), (66, TlsFailure.TOO_WEAK),
            (85, TlsFailure.NO_KEY_IDENTIFIER),
        )),
        (ssl.SSLCertVerificationError, {}, TlsFailure.UNTRUSTED),
        *((ssl.SSLError, {'reason': reason}, failure) for reason, failure in (
            ('SSLV3_ALERT_CERTIFICATE_EXPIRED', TlsFailure.OWN_EXPIRED),
            ('TLSV13_ALERT_CERTIFICATE_REQUIRED', TlsFailure.OWN_MISSING),
            ('TLSV1_ALERT_UNKNOWN_CA', TlsFailure.OWN_REFUSED),
            ('SSLV3_ALERT_BAD_CERTIFICATE', TlsFailure.OWN_REFUSED),
            ('TLSV1_ALERT_ACCESS_DENIED', TlsFailure.OWN_REFUSED),
            ('TLSV1_ALERT_PROTOCOL_VERSION', TlsFailure.OTHER),
            ('WRONG_VERSION_NUMBER', TlsFailure.PLAIN_TEXT),
            ('UNSUPPORTED_PROTOCOL', TlsFailure.OTHER),
        )),
        (ssl.SSLError, {}, TlsFailure.OTHER),
        *((kind, {}, TlsFailure.HUNG_UP) for kind in (ssl.SSLEOFError, ssl.SSLZeroReturnError)),
    ],
)
def test_failure_is_told_by_its_number_its_reason_or_its_kind(
    kind: type[ssl.SSLError], said: dict[str, object], failure: TlsFailure
) -> None:
    error = kind('whatever the server says')
    for name, value in said.items():
        setattr(error, name, value)
    assert tls_failure(error) is failure
