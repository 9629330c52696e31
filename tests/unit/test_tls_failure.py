"""Why TLS failed is told by OpenSSL's own reason, and has a sentence."""

from __future__ import annotations

import ssl

import pytest

from ecomp.tls import ETCD_SENTENCES, SENTENCES, TlsFailure, tls_failure


def test_each_failure_has_a_sentence() -> None:
    assert SENTENCES.keys() == ETCD_SENTENCES.keys() == set(TlsFailure)


@pytest.mark.parametrize(
    ('code', 'failure'),
    [
        (9, TlsFailure.NOT_YET_VALID),
        (10, TlsFailure.EXPIRED),
        (20, TlsFailure.UNTRUSTED),
        (62, TlsFailure.OTHER_NAME),
        (64, TlsFailure.OTHER_ADDRESS),
        (66, TlsFailure.TOO_WEAK),
        (85, TlsFailure.NO_KEY_IDENTIFIER),
        (None, TlsFailure.UNTRUSTED),
    ],
)
def test_certificate_that_does_not_verify_is_told_by_its_number(code: int | None, failure: TlsFailure) -> None:
    error = ssl.SSLCertVerificationError('whatever the server says')
    if code is not None:
        error.verify_code = code
    assert tls_failure(error) is failure


@pytest.mark.parametrize(
    ('reason', 'failure'),
    [
        ('SSLV3_ALERT_CERTIFICATE_EXPIRED', TlsFailure.OWN_EXPIRED),
        ('TLSV13_ALERT_CERTIFICATE_REQUIRED', TlsFailure.OWN_MISSING),
        ('TLSV1_ALERT_UNKNOWN_CA', TlsFailure.OWN_REFUSED),
        ('SSLV3_ALERT_BAD_CERTIFICATE', TlsFailure.OWN_REFUSED),
        ('TLSV1_ALERT_ACCESS_DENIED', TlsFailure.OWN_REFUSED),
        ('TLSV1_ALERT_PROTOCOL_VERSION', TlsFailure.OTHER),
        ('WRONG_VERSION_NUMBER', TlsFailure.PLAIN_TEXT),
        ('UNSUPPORTED_PROTOCOL', TlsFailure.OTHER),
        (None, TlsFailure.OTHER),
    ],
)
def test_other_failure_is_told_by_its_reason(reason: str | None, failure: TlsFailure) -> None:
    error = ssl.SSLError('whatever the server says')
    if reason is not None:
        error.reason = reason
    assert tls_failure(error) is failure


@pytest.mark.parametrize('kind', [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_end_of_the_connection_is_told_by_its_kind(kind: type[ssl.SSLError]) -> None:
    assert tls_failure(kind('whatever the server says')) is TlsFailure.HUNG_UP
