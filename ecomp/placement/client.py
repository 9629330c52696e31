"""One session with placement; every answer is a value or one error of ours.

Errors are told apart by HTTP status and placement's own stable codes (its errors.py: "Do not change the string
values"), never by message text. A GET is tried again; a write never is: its caller reads back first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import requests
from requests.auth import AuthBase
from urllib3.exceptions import NewConnectionError, ReadTimeoutError
from urllib3.util.retry import Retry

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
from ecomp.placement import answers, limited, tls
from ecomp.placement.limited import LIMITS, AnswerLimits, LimitedAdapter

# 1.28 made consumer generations safe, 1.38 made consumer_type required. Pinned rather than `latest`, which
# changed the request under the 2019 code: an older server answers 406 at the first call.
MICROVERSION = '1.39'

HEADERS = {
    'openstack-api-version': f'placement {MICROVERSION}',
    'accept': 'application/json',
    # What is packed may be a thousand times as long.
    'accept-encoding': 'identity',
}

# http_proxy is for the way out of the building, and placement is in it. Not trust_env=False, for that also forgets
# REQUESTS_CA_BUNDLE.
NO_PROXY: dict[str, Any] = {'http': None, 'https': None, 'all': None}

TIMEOUT = (3.05, 30.0)
"""Seconds to connect, and between two bytes of an answer."""

SLOW = 3.0
"""Seconds without an answer after which whoever waits for it is told so."""

POOL = 16
"""Connections that are kept for the next call."""

DETAIL = 900
"""Characters of what placement says is wrong, at most."""


PREAMBLE = 'The server could not comply with the request since it is either malformed or otherwise incorrect.'
SCHEMA = 'Failed validating'
"""What placement begins each 400 with, and the beginning of what only its developers want to see."""


def in_short(detail: str) -> str:
    """What placement says of a request that it refuses, without what it says of all, and without its schema."""
    said = detail.removeprefix(PREAMBLE).strip().partition(SCHEMA)[0].strip()
    return f'placement refuses it: {said or detail}'


class _Retry(Retry):
    """urllib3's, but who gives no answer in time, or one without an end, is not asked a second time."""

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: Any = None,
    ) -> Self:
        if error is not None and (isinstance(error, ReadTimeoutError) or limited.is_overlong(error)):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)


def _token_in(path: Path, placement: str) -> str:
    """The token in a file. Unreachable for one that cannot be read, is empty or is none of a header's words.

    Unreachable, because a file that is being exchanged is missing or empty for a moment, and the next call may do. Its
    `backend` names the file too: who logs a backend's loss once must not take it for a loss of placement before.
    """
    backend = f'{placement} (token_file {path})'
    try:
        token = path.read_text(encoding='ascii').strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else 'not ASCII'
        raise Unreachable(f'token_file {path}: {why}', backend) from error
    if not token or not token.isprintable() or ' ' in token:
        raise Unreachable(f'token_file {path}: must hold one word', backend)
    return token


class _Token(AuthBase):
    """Says who asks: what the file has at each call, or `admin`, which placement takes without authentication.

    With it requests leaves the .netrc of whoever calls alone.
    """

    def __init__(self, path: Path | None, backend: str) -> None:
        self._path, self._backend = path, backend

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers['x-auth-token'] = 'admin' if self._path is None else _token_in(self._path, self._backend)
        return request


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
        slow: Callable[[str, float], None] | None = None,
    ) -> None:
        """`slow`, if given, is told, from a thread, of an answer that takes longer than SLOW seconds: name, seconds."""
        config = where if isinstance(where, PlacementConfig) else PlacementConfig(where)
        self.endpoint = config.endpoint.rstrip('/')
        self.name = f'placement at {self.endpoint}'
        self._timeout = timeout
        self._limits = limits
        self._slow = slow
        self._session = requests.Session()
        self._session.headers.update(HEADERS)
        self._session.auth = _Token(config.token_file, self.name)
        # Paths, not what is in them: each connection reads them anew, so what was exchanged counts from the next on.
        self._verify = None if config.ca_cert is None else str(config.ca_cert)
        self._session.cert = None if config.cert_cert is None else (str(config.cert_cert), str(config.cert_key))
        retry = _Retry(
            total=2,
            connect=0,
            other=0,  # of TLS: urllib3 would send a write a second time
            backoff_factor=0.2,
            backoff_jitter=0.2,
            status_forcelist=(502, 503, 504),
            allowed_methods={'GET'},
            raise_on_status=False,
            # Or a gateway's "come back in an hour" is an hour in which nobody is told anything.
            respect_retry_after_header=False,
        )
        adapter = LimitedAdapter(max_retries=retry, pool_maxsize=POOL)
        self._session.mount('http://', adapter)
        self._session.mount('https://', adapter)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path (with its query)."""
        answer = self._send('GET', path, None, Unreachable)
        try:
            return answers.parse(answer.content)
        except ValueError as error:
            raise self.foreign() from error

    def about(self) -> About:
        """The newest microversion it has, and its clock. Its own database is not asked for this."""
        answer = self._send('GET', '/', None, Unreachable)
        try:
            version = answers.text(answers.parse(answer.content)['versions'][0]['max_version'])
        except (*answers.WRONG, IndexError) as error:
            raise self.foreign() from error
        try:
            clock = parsedate_to_datetime(answer.headers.get('date', ''))
        except ValueError:
            return About(version, None)
        return About(version, clock if clock.tzinfo is not None else clock.replace(tzinfo=UTC))

    def foreign(self) -> Unreachable:
        """Make the error for an answer that placement does not give, so that something else is listening there."""
        return Unreachable(f'{self.endpoint} answers, but not as placement does: is `placement:` right?', self.name)

    def write(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        """Carry out a POST, PUT or DELETE. No answer: UnknownOutcome, unless nothing was ever sent."""
        answer = self._send(method, path, body, UnknownOutcome)
        # Where placement has something to say about what it wrote, the generation is in it; else it is a proxy's word.
        if answer.status_code == 200 and b'generation' not in answer.content:
            raise UnknownOutcome(str(self.foreign()), self.name)

    def close(self) -> None:
        """Let the connections go."""
        self._session.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, unanswered: type[Unreachable]
    ) -> requests.Response:
        until = limited.begin(self._limits)
        with self._noticed():
            return self._sent(method, path, body, unanswered, until)

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        if self._slow is None:
            yield
            return
        timer = threading.Timer(SLOW, self._slow, (self.name, SLOW))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _sent(
        self, method: str, path: str, body: dict[str, Any] | None, unanswered: type[Unreachable], until: float
    ) -> requests.Response:
        try:
            answer = self._session.request(
                *(method, self.endpoint + path),
                json=body,
                timeout=self._timeout,
                allow_redirects=False,
                proxies=NO_PROXY,
                verify=self._verify,  # a session's own gives way to REQUESTS_CA_BUNDLE
                stream=True,
            )
            try:
                if answer.headers.get('content-encoding', 'identity') != 'identity':
                    raise unanswered(str(self.foreign()), self.name)
                answer.content  # noqa: B018  read here, where what comes of it is understood
            finally:
                answer.close()
        except requests.RequestException as error:
            raise self._lost(error, until, unanswered) from error
        except OSError as error:
            # requests raises plain ones of a file of ours that is not there, before it connects. It is a loss of its
            # own, as that of a token is.
            if type(error) is OSError:
                raise Unreachable(f'{self.name} cannot be asked: {error}', f'{self.name} (its certificates)') from error
            raise unanswered(f'{self.name} cannot be asked: {error}', self.name) from error
        except (ValueError, OverflowError) as error:  # of a piece's length that is below zero, or beyond all memory
            raise unanswered(str(self.foreign()), self.name) from error
        # A proxy's welcome page is a 200 as well, and no claim.
        json = answer.headers.get('content-type', '').startswith('application/json')
        if answer.status_code in (201, 204) or (answer.status_code == 200 and json):
            return answer
        raise self._error(answer, unanswered)

    def _lost(self, error: requests.RequestException, until: float, unanswered: type[Unreachable]) -> Unreachable:
        """What became of a call without an answer, or without a whole one."""
        first = error.args[0] if error.args else None
        reason = getattr(first, 'reason', None)
        if isinstance(error, requests.ConnectTimeout) or isinstance(reason, NewConnectionError):
            return Unreachable(f'{self.name} cannot be reached: no connection', self.name)
        if isinstance(error, requests.exceptions.SSLError):
            was_not_sent, why = tls.reason(error)
            return (Unreachable if was_not_sent else unanswered)(f'{self.name} cannot be reached: {why}', self.name)
        if limited.is_overlong(error):
            return unanswered(str(self.foreign()), self.name)
        if isinstance(error, requests.Timeout) or ReadTimeoutError in (type(first), type(reason)):
            if time.monotonic() < until:
                return unanswered(f'{self.name} gave no answer in {self._timeout[1]:g} s', self.name)
            return unanswered(f'{self.name} gave no whole answer in {self._limits.seconds:g} s', self.name)
        if isinstance(error, requests.ConnectionError):
            # Whoever does not take our certificate often hangs up before its word about that arrives.
            question = ': does it take our certificate?' if self.endpoint.startswith('https:') else ''
            return unanswered(f'{self.name} cannot be reached: the connection broke{question}', self.name)
        return unanswered(f'{self.name} cannot be reached: {type(error).__name__}', self.name)

    def _error(self, answer: requests.Response, unanswered: type[Unreachable]) -> EcompError:
        status = answer.status_code
        if status >= 500:
            return unanswered(f'{self.name} fails with HTTP {status}: see its log', self.name)
        try:
            first = answers.parse(answer.content)['errors'][0]
            code, detail = str(first.get('code', '')), ' '.join(answers.text(first['detail']).split())[:DETAIL]
        except (*answers.WRONG, IndexError):
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
