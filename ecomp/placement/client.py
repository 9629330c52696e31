"""Calls to placement; every answer is a value or one error of ours.

Errors are told apart by HTTP status and placement's own stable codes (its errors.py: "Do not change the string
values"), never by message text. A GET is tried again; a write never is: its caller reads back first. An answer's kind
and bounds are looked at where it is taken, and not while it is parsed: that would cost as much again.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn, TypeVar

from ecomp.conf import PlacementConfig
from ecomp.errors import (
    Conflict,
    ConsumerConflict,
    EcompError,
    GenerationConflict,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.model.json_object import is_text
from ecomp.placement.by_http import LIMITS, MICROVERSION, Answer, AnswerLimits, Connections

MOST = 10**50
"""More than placement can say, which multiplies 2**31 by a ratio of single precision; any float holds it squared."""

PARTS = 2_000_000
"""Commas and brackets of an answer; what has more is not parsed: each may become an object, of up to 230 bytes.

Ten thousand candidates with 150 traits each have 1.8 million.
"""

WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What taking things out of an answer of another shape raises: each is an answer that is none of placement's."""


def parse(body: bytes) -> dict[str, Any]:
    """Parse an answer's body as a JSON object. ValueError for anything else."""
    if sum(map(body.count, (b',', b'[', b'{'))) > PARTS:
        raise ValueError(f'it has more than {PARTS} parts')
    try:
        data = _DECODER.decode(body.decode())
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def whole(value: object) -> int:
    """Return the value if it is a whole number from -MOST to MOST; ValueError if not."""
    if type(value) is not int or not -MOST <= value <= MOST:
        raise ValueError('not a whole number')
    return value


def number(value: object) -> float:
    """Return the value if it is a number from -MOST to MOST, whole or not; ValueError if not."""
    if type(value) is float and math.isfinite(value) and -MOST <= value <= MOST:
        return value
    return whole(value)


def text(value: object) -> str:
    """Return the value if it is text that may become part of a key or a path; ValueError if not."""
    if not isinstance(value, str) or not is_text(value):
        raise ValueError('not a text')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not a number')


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


TIMEOUT = (3.05, 30.0)
"""Seconds to connect, and between two bytes of an answer."""

Slow = tuple[float, Callable[[str, float], None]]
"""Seconds that an answer may take, and what is called, from a thread, if it takes longer: placement's name, seconds."""

Taken = TypeVar('Taken')

DETAIL = 900
"""Characters of what placement says is wrong, at most."""


PREAMBLE = 'The server could not comply with the request since it is either malformed or otherwise incorrect.'
SCHEMA = 'Failed validating'
"""What placement begins each 400 with, and the beginning of what only its developers want to see."""


def in_short(detail: str) -> str:
    """What placement says of a request that it refuses, without what it says of all, and without its schema."""
    said = detail.removeprefix(PREAMBLE).strip().partition(SCHEMA)[0].strip()
    return f'placement refuses it: {said or detail}'


class About(NamedTuple):
    """What placement says of itself: its newest microversion, and the time, None if it does not say that."""

    version: str
    clock: datetime | None


class Placement:
    """Placement at one endpoint. May be shared by threads: each call is one request.

    Errors: PlacementRefusal (400, placement's own words), NotFound (404), GenerationConflict (409
    placement.concurrent_update; ConsumerConflict where it is about a consumer), Conflict (409 duplicate name or in
    use), NoCapacity (any other 409), Unreachable (nothing was changed), UnknownOutcome (a write without an answer),
    EcompError (401, 403, 406).
    """

    def __init__(
        self,
        where: PlacementConfig | str,
        timeout: tuple[float, float] = TIMEOUT,
        limits: AnswerLimits = LIMITS,
        slow: Slow | None = None,
    ) -> None:
        config = where if isinstance(where, PlacementConfig) else PlacementConfig(where)
        self._slow = slow
        self._connections = Connections(config, timeout, limits)
        self.endpoint, self.name = self._connections.endpoint, self._connections.name

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path (with its query)."""
        answer = self._send('GET', path, None, Unreachable)
        try:
            return parse(answer.content)
        except ValueError as error:
            raise self.foreign() from error

    def take(self, path: str, read: Callable[[dict[str, Any]], Taken]) -> Taken:
        """What `read` takes out of the JSON object at a path (with its query); Unreachable where that is WRONG."""
        data = self.get(path)
        try:
            return read(data)
        except WRONG as error:
            raise self.foreign() from error

    def about(self) -> About:
        """The newest microversion it has, and its clock. Its own database is not asked for this."""
        answer = self._send('GET', '/', None, Unreachable)
        try:
            version = text(parse(answer.content)['versions'][0]['max_version'])
        except (*WRONG, IndexError) as error:
            raise self.foreign() from error
        from email.utils import parsedate_to_datetime  # the doctor alone asks

        try:
            clock = parsedate_to_datetime(answer.headers.get('date', ''))
        except ValueError:
            return About(version, None)
        return About(version, clock if clock.tzinfo is not None else clock.replace(tzinfo=UTC))

    def foreign(self) -> Unreachable:
        """Make the error for an answer that placement does not give, so that something else is listening there."""
        return self._connections.foreign()

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        """Carry out a POST, PUT or DELETE. No answer: UnknownOutcome, unless nothing was ever sent."""
        answer = self._send(method, path, body, UnknownOutcome)
        # Where placement has something to say about what it wrote, the generation is in it; else it is a proxy's word.
        if answer.status_code == 200 and b'generation' not in answer.content:
            raise self._connections.foreign(UnknownOutcome)

    def close(self) -> None:
        """Let the connections go."""
        self._connections.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None, unanswered: type[Unreachable]) -> Answer:
        with self._noticed():
            answer = self._connections.send(method, path, body, unanswered)
        # A proxy's welcome page is a 200 as well, and no claim.
        json = answer.headers.get('content-type', '').startswith('application/json')
        if answer.status_code in (201, 204) or (answer.status_code == 200 and json):
            return answer
        raise self._error(answer, unanswered)

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        if self._slow is None:
            yield
            return
        seconds, tell = self._slow
        timer = threading.Timer(seconds, tell, (self.name, seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _error(self, answer: Answer, unanswered: type[Unreachable]) -> EcompError:
        status = answer.status_code
        if status >= 500:
            return unanswered(f'{self.name} fails with HTTP {status}: see its log', self.name)
        try:
            first = parse(answer.content)['errors'][0]
            code, detail = str(first.get('code', '')), ' '.join(text(first['detail']).split())[:DETAIL]
        except (*WRONG, IndexError):
            code, detail = '', ''
        if not detail:
            # What stands before it says so of a certificate or a token that it does not take; nginx says 400.
            secure = self.endpoint.startswith('https:') and status in (400, 401, 403)
            wrong = 'token_file, cert_cert and `placement:`' if secure else '`placement:`'
            why = f'answers HTTP {status}, but not as placement does: is {wrong} right?'
            return Unreachable(f'{self.endpoint} {why}', self.name)
        if status == 400:
            return PlacementRefusal(in_short(detail))
        if status == 404:
            return NotFound(detail)
        if status == 409:
            if code == 'placement.concurrent_update':
                # One code for providers and consumers; placement's handlers/util.py has the words.
                return (ConsumerConflict if 'consumer generation' in detail else GenerationConflict)(detail)
            if code in ('placement.duplicate_name', 'placement.inventory.inuse', 'placement.resource_provider.inuse'):
                return Conflict(detail)
            return NoCapacity(detail)
        if status == 406:
            return EcompError(f'placement at {self.endpoint} is too old: microversion {MICROVERSION} is needed')
        return EcompError(f'placement at {self.endpoint} refuses with HTTP {status}: {detail}')
