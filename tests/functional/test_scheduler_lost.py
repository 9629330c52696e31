"""Create with lost requests, lost answers and reset streams loses and doubles nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple, Self

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import H2Error

from ecomp.conf import EtcdConfig
from ecomp.errors import UnknownOutcome
from ecomp.model import keys
from ecomp.model.record import make_record
from ecomp.model.stack import Stack
from ecomp.model.states import GONE
from ecomp.model.stored import decode, encode
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.scheduler.placing.stack import write_stack
from ecomp.store.client import Put, Store, Unchanged
from tests.functional.cloud import Cloud, make_uuid
from tests.kit.listening import ThreadedServer
from tests.kit.proxy import Proxy
from tests.kit.servers import Etcd
from tests.kit.store_client import read_entry

# Messages to etcd


def test_lost_delivery_of_what_has_ended_since_is_reported_as_done(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store
) -> None:
    """Its compute carried it out, and a destroy, before eschedule read whether it was delivered."""
    compute, order = cloud.make_order()
    request_key = keys.request(compute, order.instance)

    def end_once_delivered() -> bool:
        if cloud.etcd.get(request_key) is None:
            return False
        gone = make_record(compute, cloud.read_request(compute, order.instance), 'now').enter_state(GONE, 'now', 'gone')
        cloud.etcd.put_record(encode(gone))
        cloud.etcd.delete(request_key)
        return True

    etcd_proxy.lose_answer(request_key.encode(), end_once_delivered)
    assert cloud.create(order, store=shaky_store) == DeliveryOutcome(compute)
    assert etcd_proxy.has_lost
    assert cloud.etcd.get(keys.attempt(order.instance)) is None


@pytest.mark.parametrize('is_ours', [True, False])
def test_key_of_a_new_stack_is_read_back_after_a_lost_message(
    cloud: Cloud, etcd_proxy: Proxy, shaky_store: Store, is_ours: bool
) -> None:
    """Of two first applies of a stack, the one whose write was lost finds the key of the other."""
    ours, theirs = (Stack(f's{make_uuid()[:8]}', epoch=make_uuid()) for _ in range(2))
    theirs = theirs._replace(name=ours.name)
    key = keys.stack(ours.name)
    if is_ours:
        etcd_proxy.lose_answer(key.encode(), lambda: cloud.etcd.get(key))
        assert write_stack(shaky_store, ours, 0) > 0
    else:
        assert write_stack(cloud.store, theirs, 0) > 0
        etcd_proxy.lose_request(key.encode())
        with pytest.raises(UnknownOutcome, match=f'it is unknown whether {key} was changed'):
            write_stack(shaky_store, ours, 0)
    assert etcd_proxy.has_lost
    entry = cloud.store.get(key)
    assert entry is not None
    found = decode(Stack, entry.value, name=ours.name)._replace(written_at='')
    assert found == (ours if is_ours else theirs)


# Messages to placement


# Streams that etcd resets after the call took effect: a write is never sent twice.


ANSWER_HEADERS = [(':status', '200'), ('content-type', 'application/grpc')]
# The timeout of a call to etcd.
TIMEOUT_SECONDS = 10.0
# Bytes before a gRPC message: a flag and the length.
PREFIX_BYTES = 5


class Reset(NamedTuple):
    """Reset the stream of the next call that contains `pattern`, once the call is carried out.

    `sends_answer`: first send the message of the answer, without the status that would end the stream.
    """

    pattern: bytes
    code: ErrorCodes
    sends_answer: bool


class ResettingProxy(ThreadedServer):
    """Passes calls on to the etcd at `endpoint`, and keeps their paths and messages in `calls`."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint)
        self._resets: list[Reset] = []
        self.calls: list[tuple[str, bytes]] = []
        super().__init__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._channel.close()

    def reset(self, pattern: bytes, code: ErrorCodes, sends_answer: bool = False) -> None:
        self._resets.append(Reset(pattern, code, sends_answer))

    def count(self, pattern: bytes) -> int:
        return sum(pattern in message for _, message in self.calls)

    @property
    def has_reset(self) -> bool:
        return not self._resets

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        http = H2Connection(H2Configuration(client_side=False, header_encoding='utf-8'))
        http.initiate_connection()
        paths: dict[int, str] = {}
        bodies: dict[int, bytes] = {}
        with suppress(H2Error):
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for event in http.receive_data(data):
                    if isinstance(event, RequestReceived):
                        paths[event.stream_id] = str(dict(event.headers)[':path'])
                        bodies[event.stream_id] = b''
                    elif isinstance(event, DataReceived):
                        bodies[event.stream_id] += event.data
                        http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        self._pass_on(
                            http, event.stream_id, paths[event.stream_id], bodies[event.stream_id][PREFIX_BYTES:]
                        )
                connection.sendall(http.data_to_send())

    def _pass_on(self, http: H2Connection, stream: int, path: str, message: bytes) -> None:
        self.calls.append((path, message))
        reset = next((candidate for candidate in self._resets if candidate.pattern in message), None)
        status, details = 0, ''
        answer = b''
        try:
            answer = self._call_etcd(path, message)
        except grpc.RpcError as error:
            status, details = error.code().value[0], error.details()
        if reset is None or reset.sends_answer:
            http.send_headers(stream, ANSWER_HEADERS)
            if not status:
                http.send_data(stream, b'\0' + len(answer).to_bytes(4, 'big') + answer)
        if reset is None:
            http.send_headers(stream, [('grpc-status', str(status)), ('grpc-message', details)], end_stream=True)
        else:
            self._resets.remove(reset)
            http.reset_stream(stream, reset.code)

    def _call_etcd(self, path: str, message: bytes) -> Any:
        if path.endswith('LeaseKeepAlive'):
            return next(self._channel.stream_stream(path)(iter([message]), timeout=TIMEOUT_SECONDS))
        return self._channel.unary_unary(path)(message, timeout=TIMEOUT_SECONDS)


CODES = [
    ErrorCodes.NO_ERROR,
    ErrorCodes.INTERNAL_ERROR,
    # It means "not processed", but a proxy may send it for a call that its etcd has carried out.
    ErrorCodes.REFUSED_STREAM,
    ErrorCodes.CANCEL,
    ErrorCodes.ENHANCE_YOUR_CALM,
]


@pytest.fixture
def front(etcd: Etcd) -> Iterator[ResettingProxy]:
    with ResettingProxy(etcd.endpoint) as server:
        yield server


@pytest.fixture
def store(front: ResettingProxy) -> Iterator[Store]:
    with closing(Store(EtcdConfig((front.address,), timeout=5.0))) as resetting_store:
        yield resetting_store


@pytest.mark.parametrize('code', CODES, ids=lambda code: code.name)
@pytest.mark.parametrize('sends_answer', [False, True], ids=['before the answer', 'behind the message'])
def test_reset_write_is_sent_once_and_read_back(
    front: ResettingProxy, store: Store, prefix: str, code: ErrorCodes, sends_answer: bool
) -> None:
    key = f'{prefix}x'
    front.reset(key.encode(), code, sends_answer)
    revision = store.commit([Unchanged(key, 0)], [Put(key, 'written')])
    assert front.has_reset
    assert front.count(b'written') == 1
    entry = read_entry(store, key)
    assert (entry.value, entry.create_revision) == (b'written', revision)


def test_reset_read_is_sent_again(front: ResettingProxy, store: Store, prefix: str) -> None:
    key = f'{prefix}x'
    store.commit([], [Put(key, 'written')])
    front.reset(key.encode(), ErrorCodes.INTERNAL_ERROR)
    assert read_entry(store, key).value == b'written'
    assert front.has_reset
