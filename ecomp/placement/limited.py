"""Answers that end: after so many bytes and so many seconds in all, heads included.

A socket's time limit is between two bytes, and http.client has no limit of bytes: a server that sends a byte a second,
or never stops, would hold a thread, or fill the memory, for ever. So each read of an answer looks at both.
"""

from __future__ import annotations

import http.client
import io
import time
from contextvars import ContextVar
from typing import Any, NamedTuple


class AnswerLimits(NamedTuple):
    """Limits of one answer, over all the tries it takes."""

    size: int
    seconds: float


LIMITS = AnswerLimits(64 * 1024**2, 60.0)
"""Ten thousand candidates are 10 MB."""


class Overlong(OSError):
    """The answer has more bytes than are taken."""


class _Left(NamedTuple):
    """What is left of a call: bytes of each answer, and until when on the monotonic clock."""

    size: int
    until: float


_LEFT: ContextVar[_Left] = ContextVar('what is left of the call of this thread')


def begin(limits: AnswerLimits) -> float:
    """Start these limits for the next call of this thread, retries included; return when its time is up."""
    left = _Left(limits.size, time.monotonic() + limits.seconds)
    _LEFT.set(left)
    return left.until


class _Reader(io.RawIOBase):
    """The bytes of one answer, from its head on."""

    def __init__(self, raw: io.RawIOBase, sock: Any) -> None:
        self._raw, self._sock = raw, sock
        self._left, self._until = _LEFT.get()
        self._patience = sock.gettimeout() or self._until

    def readable(self) -> bool:
        """It is there for nothing else."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See io.RawIOBase. TimeoutError, Overlong."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError('no whole answer in time')
        if left < self._patience:
            self._sock.settimeout(left)
        count: int | None = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._left -= count or 0
        if self._left < 0:
            raise Overlong('the answer is too long')
        return count

    def close(self) -> None:
        """The socket stays with its connection."""
        self._raw.close()
        super().close()


class Response(http.client.HTTPResponse):
    """http.client's, with limits. Call begin() before each request."""

    def __init__(self, sock: Any, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock))
