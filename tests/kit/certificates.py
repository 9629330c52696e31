"""Certificates made with the openssl command, for etcds and their clients in tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """A certificate authority in a directory of its own; `certificate` is what its trusters read."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate, self._key = directory / 'ca.crt', directory / 'ca.key'
        self._serial = 0
        _openssl(
            *('req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '10'),
            *('-subj', f'/CN={directory.name}', '-keyout', self._key, '-out', self.certificate),
        )

    def issue(self, directory: Path, name: str, *hosts: str, days: int = 10) -> tuple[Path, Path]:
        """A certificate and key, <directory>/<name>.crt and .key, valid for these names and addresses.

        `days` -1: it expired yesterday. One that is there is replaced, as a rotation does.
        """
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key, request = (directory / f'{name}.{each}' for each in ('crt', 'key', 'csr'))
        _openssl(
            *('req', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes'),
            *('-subj', f'/CN={name}', '-keyout', key, '-out', request),
        )
        alternatives = [f'IP:{host}' if host[0].isdigit() else f'DNS:{host}' for host in hosts]
        extensions = directory / f'{name}.ext'
        lines = ['basicConstraints=CA:FALSE', 'extendedKeyUsage=serverAuth,clientAuth']
        lines += [f'subjectAltName={",".join(alternatives)}'] if alternatives else []
        extensions.write_text('\n'.join(lines) + '\n')
        self._serial += 1
        _openssl(
            *('x509', '-req', '-in', request, '-CA', self.certificate, '-CAkey', self._key, '-days', str(days)),
            *('-set_serial', str(self._serial), '-extfile', extensions, '-out', certificate),
        )
        request.unlink()
        extensions.unlink()
        return certificate, key


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(['openssl', *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
