"""No plain text by accident."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import Unreachable
from ecomp.store.client import Store
from tests.kit.certificates import Authority


def first_bytes(**settings: Path) -> bytes:
    """What whoever answers at the endpoint hears first."""
    heard: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen()

        def listen() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(24))

        thread = threading.Thread(target=listen)
        thread.start()
        store = Store(EtcdConfig((f'127.0.0.1:{listener.getsockname()[1]}',), timeout=2.0, **settings))  # type: ignore[arg-type]
        try:
            with pytest.raises(Unreachable):
                store.get('/x')
        finally:
            store.close()
            thread.join()
    return heard[0]


def test_certificates_without_an_authority_are_not_plain_text(tmp_path: Path) -> None:
    """etcd3 takes them, and speaks in clear text to whoever answers"""
    authority = Authority(tmp_path)
    certificate, key = authority.issue(tmp_path / 'own', 'ecomp')
    assert first_bytes().startswith(b'PRI * HTTP/2.0')
    assert first_bytes(ca_cert=authority.certificate).startswith(b'\x16\x03')
    assert first_bytes(cert_cert=certificate, cert_key=key).startswith(b'\x16\x03')
