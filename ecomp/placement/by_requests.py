"""Placement by requests: where the light way cannot make sense of what it meets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NewConnectionError, ReadTimeoutError
from urllib3.util.retry import Retry

from ecomp.errors import Unreachable
from ecomp.placement import limited, tls
from ecomp.placement.limited import Response
from ecomp.placement.way import HEADERS, POOL, Answer, Asked, Words

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig

# http_proxy is for the way out of the building, and placement is in it. Not trust_env=False, for that also forgets
# REQUESTS_CA_BUNDLE.
NO_PROXY: dict[str, Any] = {'http': None, 'https': None, 'all': None}


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


class _Token(AuthBase):
    """Says who asks. With it requests leaves the .netrc of whoever calls alone."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers['x-auth-token'] = self._token()
        return request


class Session:
    """requests' session with placement. May be shared by threads."""

    def __init__(self, config: PlacementConfig, timeout: tuple[float, float], words: Words) -> None:
        self._timeout = timeout
        self._words = words
        self._session = requests.Session()
        self._session.headers.update(HEADERS)
        self._session.auth = _Token(words.token)
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

    def close(self) -> None:
        """Let the connections go."""
        self._session.close()

    def send(self, asked: Asked, unanswered: type[Unreachable], until: float) -> Answer:
        """The answer, whatever its status. Unreachable, or `unanswered` where it may have been carried out."""
        words = self._words
        try:
            answer = self._session.request(
                *(asked.method, words.endpoint + asked.path),
                json=asked.body,
                timeout=self._timeout,
                allow_redirects=False,
                proxies=NO_PROXY,
                verify=self._verify,  # a session's own gives way to REQUESTS_CA_BUNDLE
                stream=True,
            )
            try:
                if answer.headers.get('content-encoding', 'identity') != 'identity':
                    raise words.foreign(unanswered)
                answer.content  # noqa: B018  read here, where what comes of it is understood
            finally:
                answer.close()
        except requests.RequestException as error:
            raise self._lost(error, until, unanswered) from error
        except OSError as error:
            # requests raises plain ones of a file of ours that is not there, before it connects. It is a loss of its
            # own, as that of a token is.
            if type(error) is OSError:
                name = f'{words.name} (its certificates)'
                raise Unreachable(f'{words.name} cannot be asked: {error}', name) from error
            raise unanswered(f'{words.name} cannot be asked: {error}', words.name) from error
        except (ValueError, OverflowError) as error:  # of a piece's length that is below zero, or beyond all memory
            raise words.foreign(unanswered) from error
        return Answer(answer.status_code, answer.content, answer.headers)

    def _lost(self, error: requests.RequestException, until: float, unanswered: type[Unreachable]) -> Unreachable:
        """What became of a call without an answer, or without a whole one."""
        words = self._words
        first = error.args[0] if error.args else None
        reason = getattr(first, 'reason', None)
        if isinstance(error, requests.ConnectTimeout) or isinstance(reason, NewConnectionError):
            return words.lost(Unreachable, 'no connection')
        if isinstance(error, requests.exceptions.SSLError):
            was_not_sent, why = tls.reason(error)
            return words.lost(Unreachable if was_not_sent else unanswered, why)
        if limited.is_overlong(error):
            return words.foreign(unanswered)
        if isinstance(error, requests.Timeout) or ReadTimeoutError in (type(first), type(reason)):
            return words.late(unanswered, until)
        if isinstance(error, requests.ConnectionError):
            return words.broken(unanswered)
        return words.lost(unanswered, type(error).__name__)


class LimitedAdapter(HTTPAdapter):
    """requests' adapter, with limits on each answer. Call begin() before each request."""

    def init_poolmanager(self, *given: Any, **named: Any) -> None:
        """See HTTPAdapter."""
        super().init_poolmanager(*given, **named)
        # Of a head that is none it logs a traceback; what is wrong with an answer we say in our own words.
        logging.getLogger('urllib3.connection').setLevel(logging.ERROR)
        self.poolmanager.pool_classes_by_scheme = {'http': _HttpPool, 'https': _HttpsPool}


class _Http(HTTPConnection):
    response_class = Response


class _Https(HTTPSConnection):
    response_class = Response


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https
