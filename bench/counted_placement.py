"""Placement with its calls counted.

    python bench/counted_placement.py PROCESSES THREADS PORT...

Several processes serve each of the ports, so its database must be PostgreSQL. GET /counts, at any port, returns {port:
{kind: calls}}; give each client to be distinguished its own port. A kind is a method and its subject, `claims` meaning
POST and PUT of allocations; `409` and `5xx` count answers with such a status.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# `held`: the allocations of one consumer or provider; `upkeep`: everything about providers themselves.
KINDS = ('candidates', 'claims', 'held', 'upkeep', '409', '5xx')


def classify_call(method: str, path: str) -> str:
    """Return the kind of a call."""
    if path == '/allocation_candidates':
        return 'candidates'
    if 'allocations' in path:
        return 'held' if method == 'GET' else 'claims'
    return 'upkeep'


class CallCounter:
    """A WSGI application that counts calls; all forked processes share the counts."""

    def __init__(self, ports: Sequence[str]) -> None:
        self._numbers = {(port, name): i for i, (port, name) in enumerate((p, k) for p in ports for k in KINDS)}
        self._counts = multiprocessing.Array('q', len(self._numbers))
        self.application: Callable[..., Iterable[bytes]] | None = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Serve a request (PEP 3333), or the counts."""
        port = str(environ['SERVER_PORT'])
        if environ['PATH_INFO'] == '/counts':
            counts: dict[str, dict[str, int]] = {}
            for (name, kind_), i in self._numbers.items():
                counts.setdefault(name, {})[kind_] = self._counts[i]
            start('200 OK', [('content-type', 'application/json')])
            return [json.dumps(counts).encode()]
        self._count(port, classify_call(environ['REQUEST_METHOD'], environ['PATH_INFO']))

        def started(status: str, *rest: Any) -> Any:
            if status.startswith('409'):
                self._count(port, '409')
            elif status.startswith('5'):
                self._count(port, '5xx')
            return start(status, *rest)

        assert self.application is not None
        return self.application(environ, started)

    def _count(self, port: str, what: str) -> None:
        with self._counts.get_lock():
            self._counts[self._numbers[port, what]] += 1


def main(processes: int, threads: int, ports: Sequence[str]) -> None:
    """Serve until a signal ends it."""
    import waitress

    counted = CallCounter(ports)
    sockets = []
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(('127.0.0.1', int(port)))
        sockets.append(listener)
    # Importing it makes the tables: once, because two concurrent imports would conflict.
    if (child := os.fork()) == 0:
        import placement.wsgi.api

        assert placement.wsgi.api.application

        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit('placement could not make its tables')
    children = []
    read_end, write_end = os.pipe()
    for _ in range(processes):
        if (child := os.fork()) == 0:
            from placement.wsgi import api

            # When this process ends, in any way, the pipe is closed, and the child exits.
            os.close(write_end)
            threading.Thread(target=lambda: os._exit(len(os.read(read_end, 1))), daemon=True).start()
            counted.application = api.application
            waitress.serve(counted, sockets=sockets, threads=threads, connection_limit=4000, asyncore_use_poll=True)
            os._exit(0)
        children.append(child)

    def end(*_: object) -> None:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    os.wait()
    end()


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
