"""Placement over SQLite, for a lab or a single machine: `python -m ecomp.lab.placement_server ADDRESS PORT`.

Or `... SOCKET TOKEN_FILE`, on a socket of this machine's, for those alone who know the word in the file.
The settings come in the environment (`ecomp.lab.control.placement_environment`). Exactly one thread: with more, SQLite
answers "database is locked", and half of all concurrent claims get a 500.

docker.sh has this file in its image and serves `application` with gunicorn over PostgreSQL: nothing of ecomp is
imported here.
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

CONNECTIONS = 2000  # at once; further clients wait
NAMES = ('localhost', '127.0.0.1', '::1')

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""WSGI: PEP 3333."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    first, second = argv
    # A directory to be looked in has to have the file, and ours says nothing: all is in the environment.
    Path(os.environ['OS_PLACEMENT_CONFIG_DIR'], 'placement.conf').touch()
    # Imported here, where the tests need no waitress.
    import waitress

    if second.isdecimal():
        where_to: dict[str, Any] = {'host': first, 'port': int(second)}
        placement = application(*NAMES, first)
    else:
        where_to = {'unix_socket': first, 'unix_socket_perms': '600'}
        placement = application(token_file=second)
    # What is there now stays: looking through all of it for garbage, again and again, is a twelfth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # Each ecompute keeps as many connections as it builds instances; above the limit nobody new is heard. Only poll()
    # takes descriptors from 1024 on.
    limits = {'connection_limit': CONNECTIONS, 'asyncore_use_poll': True}
    waitress.serve(placement, **where_to, threads=1, ident='placement', **limits)
    return 0


def application(*names: str, token_file: str | None = None) -> Application:
    """Placement for clients that call it by one of these `names` or addresses and send the word in `token_file`.

    Without names it may be called by any; None means that no word is needed.
    """
    # Imported here: placement reads its environment and makes its tables when this is imported.
    from placement.wsgi import api

    check_schemas_once()
    placement = api.application if token_file is None else known(api.application, Path(token_file))
    return named(placement, tuple(dict.fromkeys(names))) if names else placement


def named(application: Application, names: Collection[str]) -> Application:
    """The application for requests whose Host is one of these names or addresses, or missing; 421 for the others.

    A page in somebody's browser can have a name of its own lead here, and is then of the same origin (DNS rebinding).
    """

    def asked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host, name = environ.get('HTTP_HOST'), None
        with contextlib.suppress(ValueError):
            name = urlsplit(f'//{host}').hostname
        if host is None or name in names:
            return application(environ, start_response)
        start_response('421 Misdirected Request', [('content-type', 'text/plain; charset=utf-8')])
        return [f'placement answers here by {" and ".join(names)} alone\n'.encode()]

    return asked


def known(application: Application, token_file: Path) -> Application:
    """The application for requests that send the word in the file, read anew for each; 401 for the others.

    Placement without authentication takes the token `admin` for the administrator and other X- headers for who asks:
    a client's own never reach it. https://docs.openstack.org/placement/latest/configuration/config.html
    """

    def asked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        said, word = environ.get('HTTP_X_AUTH_TOKEN', '').encode('latin-1', 'replace'), b''
        with contextlib.suppress(OSError):
            word = token_file.read_bytes().strip()
        # A file that is empty is nobody's leave.
        if word and hmac.compare_digest(said, word):
            own = {name: value for name, value in environ.items() if not name.startswith('HTTP_X_')}
            return application({**own, 'HTTP_X_AUTH_TOKEN': 'admin'}, start_response)
        start_response('401 Unauthorized', [('content-type', 'application/json')])
        return [b'{"errors": [{"status": 401, "title": "Unauthorized", "detail": "token_file has another word"}]}']

    return asked


def check_schemas_once() -> None:
    """Have jsonschema check each of placement's schemas at its first use alone, not at every request.

    The schemas never change, and checking them anew is a third of the processor time of placement's answers.
    https://python-jsonschema.readthedocs.io/en/stable/validate/#jsonschema.validate
    """
    from jsonschema.validators import validator_for

    validator: Any = validator_for({})
    check = validator.check_schema
    checked: dict[int, object] = {}

    def check_once(schema: object, *rest: Any, **named: Any) -> None:
        if id(schema) not in checked:
            check(schema, *rest, **named)
            # Kept, or another could be given its id.
            checked[id(schema)] = schema

    validator.check_schema = check_once


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
