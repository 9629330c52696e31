"""The client of placement, whose calls return a value or raise one of ecomp's errors.

A GET is retried. A write is not: its caller first reads what placement has.
Answers are checked where their parts are used. To check them while parsing would cost as much again.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn, TypeVar

from ecomp import errors
from ecomp.conf import PlacementConfig
from ecomp.metrics import TALLY
from ecomp.model.json_object import is_utf8_text
from ecomp.placement.http_client import DEFAULT_LIMITS, MICROVERSION, Answer, AnswerLimits, Connections

# More than placement can answer, which multiplies 2**31 by a single-precision ratio; a float holds its square.
MAX_NUMBER = 10**50
# Maximum commas and brackets of an answer that is parsed: each may become an object of up to 230 bytes. Ten thousand
# candidates with 150 traits each have 1.8 million.
MAX_ANSWER_PARTS = 2_000_000
# Errors from taking an answer of another shape apart: each means that the answer is not placement's.
PARSE_ERRORS = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, and raise ValueError for anything else, NaN or an infinity."""
    if sum(map(body.count, (b',', b'[', b'{'))) > MAX_ANSWER_PARTS:
        raise ValueError(f'it has more than {MAX_ANSWER_PARTS} parts')
    try:
        data = _DECODER.decode(body.decode())
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def check_integer(value: object) -> int:
    """Return the value, or raise ValueError if it is not an int within MAX_NUMBER of 0."""
    if type(value) is not int or not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError('not a whole number')
    return value


def check_number(value: object) -> float:
    """Return the value, or raise ValueError if it is not a number within MAX_NUMBER of 0."""
    if type(value) is float and math.isfinite(value) and -MAX_NUMBER <= value <= MAX_NUMBER:
        return value
    return check_integer(value)


def check_text(value: object) -> str:
    """Return the value, or raise ValueError if it is not text that UTF-8 can encode."""
    if not isinstance(value, str) or not is_utf8_text(value):
        raise ValueError('not text')
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not a number')


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
# Seconds to connect, and between two bytes of an answer.
TIMEOUTS_SECONDS = (3.05, 30.0)
# Seconds that an answer may take, and a callback for a slower one: it gets placement's name and the seconds, in a
# thread of its own.
SlowAnswerReport = tuple[float, Callable[[str, float], None]]
Extracted = TypeVar('Extracted')
# Maximum characters of placement's error detail.
MAX_DETAIL_CHARACTERS = 900
# The beginning of each 400's detail, and of its part for placement's developers. Both are cut off if more remains.
DETAIL_PREAMBLE = 'The server could not comply with the request since it is either malformed or otherwise incorrect.'
DETAIL_SCHEMA_START = 'Failed validating'


class ServerInfo(NamedTuple):
    """Placement's newest microversion, and its time with a zone, or None if that is invalid."""

    version: str
    clock: datetime | None


class Placement(Connections):
    """Placement at one endpoint, which threads may share.

    Raises:
        PlacementRefusal: 400, with placement's own text.
        NotFound: 404.
        GenerationConflict: 409 placement.concurrent_update.
        ConsumerConflict: the same, about a consumer.
        Conflict: 409 for a duplicate name or something in use.
        NoCapacity: any other 409.
        Unreachable: nothing was changed. No request was sent, a GET had no valid answer, or another server answered.
        UnknownOutcome: a write had no complete answer, a 5xx, or a 200 of JSON without a generation.
        EcompError: any other status, such as 401, 403 or 406.
    """

    def __init__(
        self,
        endpoint_or_config: PlacementConfig | str,
        timeout: tuple[float, float] = TIMEOUTS_SECONDS,
        limits: AnswerLimits = DEFAULT_LIMITS,
        slow: SlowAnswerReport | None = None,
    ) -> None:
        if not isinstance(endpoint_or_config, PlacementConfig):
            endpoint_or_config = PlacementConfig(endpoint_or_config)
        super().__init__(endpoint_or_config, timeout, limits)
        self._slow = slow

    def get(self, path: str) -> dict[str, Any]:
        answer = self._send('GET', path, None, errors.Unreachable)
        try:
            return parse_object(answer.content)
        except ValueError as error:
            raise self.make_foreign_error() from error

    def get_parsed(self, path: str, extract: Callable[[dict[str, Any]], Extracted]) -> Extracted:
        """Return what `extract` takes from a path's object, or raise Unreachable for PARSE_ERRORS."""
        data = self.get(path)
        try:
            return extract(data)
        except PARSE_ERRORS as error:
            raise self.make_foreign_error() from error

    def read_server_info(self) -> ServerInfo:
        """Read placement's newest microversion and clock, for which it needs no database."""
        answer = self._send('GET', '/', None, errors.Unreachable)
        try:
            version = check_text(parse_object(answer.content)['versions'][0]['max_version'])
        except (*PARSE_ERRORS, IndexError) as error:
            raise self.make_foreign_error() from error
        from email.utils import parsedate_to_datetime  # imported here: only `eschedule check` uses it

        try:
            clock = parsedate_to_datetime(answer.headers.get('date', ''))
        except ValueError:
            return ServerInfo(version, None)
        return ServerInfo(version, clock if clock.tzinfo is not None else clock.replace(tzinfo=UTC))

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        """Send a POST, PUT or DELETE once, with `body` as JSON."""
        answer = self._send(method, path, body, errors.UnknownOutcome)
        # placement's answer to a write contains the generation; a 200 without it is from a proxy.
        if answer.status_code == 200 and b'generation' not in answer.content:
            raise self.make_foreign_error(errors.UnknownOutcome)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, loss: type[errors.Unreachable]) -> Answer:
        with TALLY.measure('placement'), self._report_if_slow():
            answer = self.send(method, path, body, loss)
            # A proxy's welcome page is a 200 as well, and confirms no claim.
            is_json = answer.headers.get('content-type', '').startswith('application/json')
            if answer.status_code in (201, 204) or (answer.status_code == 200 and is_json):
                return answer
            raise self._make_error(answer, loss)

    @contextmanager
    def _report_if_slow(self) -> Iterator[None]:
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

    def _make_error(self, answer: Answer, no_answer_error: type[errors.Unreachable]) -> errors.EcompError:
        status = answer.status_code
        if status >= 500:
            return no_answer_error(f'{self.name} returned HTTP {status} (see its log)', self.name)
        try:
            first = parse_object(answer.content)['errors'][0]
            # Codes are stable: placement's errors.py says "Do not change the string values".
            code = str(first.get('code', ''))
            detail = ' '.join(check_text(first['detail']).split())[:MAX_DETAIL_CHARACTERS]
        except (*PARSE_ERRORS, IndexError):
            code, detail = '', ''
        if not detail:
            # A server in front of placement rejects a certificate or token in this way; nginx answers 400.
            is_secured = self.endpoint.startswith('https:') and status in (400, 401, 403)
            settings = 'token_file, cert_cert and `placement:`' if is_secured else '`placement:`'
            why = f'returned HTTP {status}, but not as placement does ({settings} may be wrong)'
            return errors.Unreachable(f'{self.endpoint} {why}', self.name)
        if status == 400:
            reason = detail.removeprefix(DETAIL_PREAMBLE).strip().partition(DETAIL_SCHEMA_START)[0].strip()
            return errors.PlacementRefusal(f'placement refuses the request: {reason or detail}')
        if status == 404:
            return errors.NotFound(detail)
        if status == 409:
            if code == 'placement.concurrent_update':
                # placement has one code for providers and consumers; the texts are in its handlers/util.py.
                of_consumer = 'consumer generation' in detail
                return errors.ConsumerConflict(detail) if of_consumer else errors.GenerationConflict(detail)
            if code in ('placement.duplicate_name', 'placement.inventory.inuse', 'placement.resource_provider.inuse'):
                return errors.Conflict(detail)
            return errors.NoCapacity(detail)
        if status == 406:
            return errors.EcompError(f'{self.name} is too old: ecomp needs microversion {MICROVERSION}')
        return errors.EcompError(f'{self.name} returned HTTP {status}: {detail}')
