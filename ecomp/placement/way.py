"""Requests to placement and its answers, who asks, and words for what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ecomp.errors import Unreachable
from ecomp.model import allocation
from ecomp.tls import SENTENCES, TlsFailure

MICROVERSION = '.'.join(map(str, allocation.MICROVERSION))

POOL = 16
"""Connections to placement that a process keeps for the next call."""

HEADERS = {
    'openstack-api-version': f'placement {MICROVERSION}',
    'accept': 'application/json',
    # What is packed may be a thousand times as long.
    'accept-encoding': 'identity',
}


class Asked(NamedTuple):
    """A request: the path with its query; `body` goes as JSON, None is none."""

    method: str
    path: str
    body: dict[str, Any] | None = None


class Answer(NamedTuple):
    """An answer. Of `headers` each is there by its name in small letters."""

    status_code: int
    content: bytes
    headers: Mapping[str, str]


class Words:
    """What is said of placement at an endpoint. `seconds` are without a byte, and in all."""

    def __init__(self, endpoint: str, token_file: Path | None, seconds: tuple[float, float]) -> None:
        self.endpoint = endpoint.rstrip('/')
        self.name = f'placement at {self.endpoint}'
        self._token_file = token_file
        self._seconds = seconds

    def token(self) -> str:
        """What the file has at each call, or `admin`, which placement takes without authentication. Unreachable."""
        return 'admin' if self._token_file is None else _token_in(self._token_file, self.name)

    def foreign(self, kind: type[Unreachable] = Unreachable) -> Unreachable:
        """Make the error for an answer that placement does not give, so that something else is listening there."""
        return kind(f'{self.endpoint} answers, but not as placement does: is `placement:` right?', self.name)

    def lost(self, kind: type[Unreachable], why: str) -> Unreachable:
        """Make the error for a call that got no answer, and why."""
        return kind(f'{self.name} cannot be reached: {why}', self.name)

    def no_tls(self, kind: type[Unreachable], failure: TlsFailure) -> Unreachable:
        """Make the error for a call for which TLS failed."""
        return self.lost(kind, SENTENCES[failure])

    def broken(self, kind: type[Unreachable]) -> Unreachable:
        """Make the error for a call whose connection broke."""
        # Whoever does not take our certificate often hangs up before its word about that arrives.
        question = ': does it take our certificate?' if self.endpoint.startswith('https:') else ''
        return self.lost(kind, f'the connection broke{question}')

    def late(self, kind: type[Unreachable], until: float) -> Unreachable:
        """Make the error for an answer that did not come, or not whole; `until` is when its time is up."""
        between, whole = self._seconds
        if time.monotonic() < until:
            return kind(f'{self.name} gave no answer in {between:g} s', self.name)
        return kind(f'{self.name} gave no whole answer in {whole:g} s', self.name)


def _token_in(path: Path, placement: str) -> str:
    """The token in a file. Unreachable for one that cannot be read, is empty or is none of a header's words.

    Unreachable, because a file that is being exchanged is missing or empty for a moment, and the next call may do. Its
    `backend` names the file too: who logs a backend's loss once must not take it for a loss of placement before.
    """
    backend = f'{placement} (token_file {path})'
    try:
        token = path.read_bytes().decode('ascii').strip()  # read_text() would load a codec
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else 'not ASCII'
        raise Unreachable(f'token_file {path}: {why}', backend) from error
    if not token or not token.isprintable() or ' ' in token:
        raise Unreachable(f'token_file {path}: must hold one word', backend)
    return token
