"""Whom the lab's placement answers: by which names, and who says which word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ecomp.lab.placement_server import Application, known, named


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """An application that answers with who asks, as placement would see it."""
    start_response('200 OK', [])
    return [repr(sorted((name, value) for name, value in environ.items() if name.startswith('HTTP_X'))).encode()]


def asked(application: Application, **environ: str) -> tuple[str, bytes]:
    """The status and the body."""
    said: list[str] = []
    body = b''.join(application(environ, lambda status, _headers: said.append(status)))
    return said[0], body


def test_by_its_own_names_and_by_no_other() -> None:
    application = named(echo, ('localhost', '127.0.0.1', '::1', '10.0.0.5'))
    for host in ('localhost', 'LocalHost:8080', '127.0.0.1:1', '[::1]:8080', '10.0.0.5'):
        assert asked(application, HTTP_HOST=host)[0] == '200 OK', host
    assert asked(application)[0] == '200 OK'  # no browser
    application = named(echo, ('localhost', '127.0.0.1'))
    refused = '421 Misdirected Request', b'placement answers here by localhost and 127.0.0.1 alone\n'
    for host in ('', 'evil.example', 'localhost.evil.example', '[', 'localhost@evil', '127.0.0.1.x'):
        assert asked(application, HTTP_HOST=host) == refused, host


def test_who_says_the_word_is_the_administrator_and_nobody_s_else(tmp_path: Path) -> None:
    token = tmp_path / 'token'
    token.write_text('the-word\n')
    application = known(echo, token)
    spoken = {'HTTP_X_ROLES': 'admin', 'HTTP_X_USER_ID': 'root', 'HTTP_X_AUTH_TOKEN': 'the-word'}
    assert asked(application, **spoken) == ('200 OK', b"[('HTTP_X_AUTH_TOKEN', 'admin')]")
    for word in ('admin', '', 'the-wor', 'the-word ', 'é'):
        assert asked(application, **{**spoken, 'HTTP_X_AUTH_TOKEN': word})[0] == '401 Unauthorized'
    assert asked(application)[0] == '401 Unauthorized'
    token.write_text('another')
    assert asked(application, **spoken)[0] == '401 Unauthorized'
    for nothing in (b'', b'\n'):
        token.write_bytes(nothing)
        for word in ('', ' ', 'admin'):
            assert asked(application, **{**spoken, 'HTTP_X_AUTH_TOKEN': word})[0] == '401 Unauthorized'
        assert asked(application)[0] == '401 Unauthorized'
    token.unlink()
    assert asked(application)[0] == '401 Unauthorized'
