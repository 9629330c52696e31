"""Placement over SQLite for a lab or a single machine, as a program.

Run `python -m ecomp.lab.placement_server ADDRESS PORT`, or `... SOCKET TOKEN_FILE`. docker.sh copies this file into its
image and serves `application` with gunicorn over PostgreSQL. So nothing of ecomp is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MAX_CONNECTIONS = 2000  # concurrent ones; further clients wait
LOCAL_NAMES = ('localhost', '127.0.0.1', '::1')
# A WSGI application (PEP 3333).
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def main(argv: Sequence[str]) -> int:
    first, second = argv
    # Placement requires this file; it is empty, since all settings are in the environment.
    Path(os.environ['OS_PLACEMENT_CONFIG_DIR'], 'placement.conf').touch()
    # Imported here: the tests run without waitress.
    import waitress

    if second.isdecimal():
        bind: dict[str, Any] = {'host': first, 'port': int(second)}
        placement = application(*LOCAL_NAMES, first)
    else:
        bind = {'unix_socket': first, 'unix_socket_perms': '600'}
        placement = application(token_file=second)
    # The objects of the start stay: repeated garbage collections of them would take a twelfth of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # Each ecompute keeps a connection for each concurrent build; above the limit new clients get no answer. Only poll()
    # supports descriptors from 1024 on.
    limits = {'connection_limit': MAX_CONNECTIONS, 'asyncore_use_poll': True}
    # With more threads SQLite answers "database is locked", and half of all concurrent claims get a 500.
    waitress.serve(placement, **bind, threads=1, ident='placement', **limits)
    return 0


def application(*names: str, token_file: str | None = None) -> Application:
    """Load placement, and restrict it to these Host names and the token in the file, if given."""
    # Imported here: placement reads its environment and makes its tables at import.
    from placement.wsgi import api

    cache_schema_checks()
    placement = api.application if token_file is None else require_token(api.application, Path(token_file))
    return restrict_hosts(placement, tuple(dict.fromkeys(names))) if names else placement


def restrict_hosts(application: Application, names: Collection[str]) -> Application:
    """Wrap `application` to answer 421 to a request for a Host that is not among `names`."""

    # A malicious web page can point its own host name here and is then of the same origin (DNS rebinding).
    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host, name = environ.get('HTTP_HOST'), None
        with contextlib.suppress(ValueError):
            name = urlsplit(f'//{host}').hostname
        if host is None or name in names:
            return application(environ, start_response)
        start_response('421 Misdirected Request', [('content-type', 'text/plain; charset=utf-8')])
        return [f'placement accepts only these host names here: {" and ".join(names)}\n'.encode()]

    return serve


def require_token(application: Application, token_file: Path) -> Application:
    """Wrap `application` to answer 401 without the token in the file, read for each request."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        sent_token, token = environ.get('HTTP_X_AUTH_TOKEN', '').encode('latin-1', 'replace'), b''
        with contextlib.suppress(OSError):
            token = token_file.read_bytes().strip()
        # An empty or unreadable file admits no client.
        if token and hmac.compare_digest(sent_token, token):
            # Placement without authentication takes the token `admin` as the administrator, and other X- headers as the
            # client's identity. https://docs.openstack.org/placement/latest/configuration/config.html
            environment = {name: value for name, value in environ.items() if not name.startswith('HTTP_X_')}
            return application({**environment, 'HTTP_X_AUTH_TOKEN': 'admin'}, start_response)
        start_response('401 Unauthorized', [('content-type', 'application/json')])
        return [b'{"errors": [{"status": 401, "title": "Unauthorized", "detail": "token_file has another token"}]}']

    return serve


def cache_schema_checks() -> None:
    """Patch jsonschema's default validator, for this process, to check each schema once."""
    # Schemas never change, and checking them for each request takes a third of placement's time.
    # https://python-jsonschema.readthedocs.io/en/stable/validate/#jsonschema.validate
    from jsonschema.validators import validator_for

    validator: Any = validator_for({})
    check = validator.check_schema
    checked: dict[int, object] = {}

    def validate_once(schema: object, *rest: Any, **options: Any) -> None:
        if id(schema) not in checked:
            check(schema, *rest, **options)
            # The schema is kept, so that no other gets its id.
            checked[id(schema)] = schema

    validator.check_schema = validate_once


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
