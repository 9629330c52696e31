"""Certificates for etcd, placement and their clients in tests.

OpenSSL 3.5's command makes no expired certificates, and `elab certs` is itself tested against certificates made
elsewhere. https://cryptography.io/en/latest/x509/reference/
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KEY_PURPOSES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
CA_KEY_USAGE = x509.KeyUsage(
    digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


class Authority:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / 'ca.crt'
        self._name, self._key = _make_name(directory.name), ec.generate_private_key(ec.SECP256R1())
        builder = (
            _make_builder(self._name, self._name, self._key, 10)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(CA_KEY_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        _write_certificate(self.certificate, builder.sign(self._key, hashes.SHA256()))

    def issue(self, directory: Path, name: str, *hosts: str, days: int = 10) -> tuple[Path, Path]:
        """Write <directory>/<name>.crt and .key for these host names and addresses.

        With `days` -1 the certificate expired yesterday.
        """
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = directory / f'{name}.crt', directory / f'{name}.key'
        private_key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _make_builder(_make_name(name), self._name, private_key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(KEY_PURPOSES, critical=False)
            # Python 3.13 rejects a certificate without it.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            names = [x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        key.touch(0o600)
        key.write_bytes(
            private_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        _write_certificate(certificate, builder.sign(self._key, hashes.SHA256()))
        return certificate, key


def _make_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _make_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=5))
        .not_valid_after(now + timedelta(days=days))
    )


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
