"""Certificates for etcds, placements and their clients in tests.

Not by the openssl command: that of OpenSSL 3.5 makes none that has expired. Nor by `elab certs`, which is tested with
what does not come from it. https://cryptography.io/en/latest/x509/reference/
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PURPOSES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
SIGNS = x509.KeyUsage(
    digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


class Authority:
    """A certificate authority in a directory of its own; `certificate` is what its trusters read."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate = directory / 'ca.crt'
        self._name, self._key = _name(directory.name), ec.generate_private_key(ec.SECP256R1())
        made = (
            _dated(self._name, self._name, self._key, 10)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(SIGNS, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        )
        _write(self.certificate, made.sign(self._key, hashes.SHA256()))

    def issue(self, directory: Path, name: str, *hosts: str, days: int = 10) -> tuple[Path, Path]:
        """A certificate and key, <directory>/<name>.crt and .key, valid for these names and addresses.

        `days` -1: it expired yesterday. One that is there is replaced, as a rotation does.
        """
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = directory / f'{name}.crt', directory / f'{name}.key'
        own = ec.generate_private_key(ec.SECP256R1())
        made = (
            _dated(_name(name), self._name, own, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(PURPOSES, critical=False)
            # Python 3.13 believes none without.
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            names = [x509.IPAddress(ip_address(each)) if each[0].isdigit() else x509.DNSName(each) for each in hosts]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        key.touch(0o600)
        key.write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        _write(certificate, made.sign(self._key, hashes.SHA256()))
        return certificate, key


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _dated(
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


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
