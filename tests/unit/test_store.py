"""etcd: its messages, its pages, and checks of its identity and version."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import cluster
from ecomp.model.cluster import Header, KnownCluster
from ecomp.model.stored import encode
from ecomp.store import messages
from ecomp.store.connection import TARGET_PAGE_BYTES, AnswerTooLong, read_pages
from ecomp.store.messages import (
    Delete,
    Exists,
    Grant,
    KeepAlive,
    Put,
    Range,
    Revoke,
    Status,
    Touch,
    Transaction,
    Unchanged,
    WatchCreate,
    WatchProgress,
    encode_key,
    parse_answer,
)
from tests.kit.gateway import etcdrpc

# Our messages equal those of etcd3's generated code, in both directions; junk is refused.

NUMBERS = st.integers(-(2**63), 2**63 - 1)
UNSIGNED = st.integers(0, 2**64 - 1)
KEYS = st.binary(max_size=300)
TEXTS = st.text(max_size=300)
NAMES = st.text(st.characters(), max_size=100)  # with lone surrogates

RANGES = st.builds(Range, KEYS, KEYS, NUMBERS, NUMBERS, st.booleans(), st.booleans(), NUMBERS)
WRITES = st.builds(Put, NAMES, TEXTS, NUMBERS) | st.builds(Touch, NAMES)
REMOVALS = st.builds(Delete, NAMES)
COMPARISONS = st.builds(Unchanged, NAMES, NUMBERS) | st.builds(Exists, NAMES)
OPERATIONS = st.lists(RANGES | WRITES | REMOVALS, max_size=4)
TRANSACTIONS = st.builds(Transaction, st.lists(COMPARISONS, max_size=4), OPERATIONS, OPERATIONS)
LEASES = st.builds(Grant, NUMBERS) | st.builds(KeepAlive, NUMBERS) | st.builds(Revoke, NUMBERS)


def convert_to_etcd3(request: Any) -> Any:
    match request:
        case Range(key, end, limit, revision, keys_only, count_only, since):
            return etcdrpc.RangeRequest(
                key=key, range_end=end, limit=limit, revision=revision, keys_only=keys_only, count_only=count_only,
                min_mod_revision=since,
            )  # fmt: skip
        case Put(key, value, lease):
            return etcdrpc.PutRequest(key=encode_key(key), value=value.encode(), lease=lease)
        case Touch(key):
            return etcdrpc.PutRequest(key=encode_key(key), ignore_value=True, ignore_lease=True)
        case Delete(key):
            return etcdrpc.DeleteRangeRequest(key=encode_key(key))
        case Unchanged(key, revision):
            target, result = etcdrpc.Compare.MOD, etcdrpc.Compare.EQUAL
            return etcdrpc.Compare(key=encode_key(key), target=target, result=result, mod_revision=revision)
        case Exists(key):
            target, result = etcdrpc.Compare.MOD, etcdrpc.Compare.GREATER
            return etcdrpc.Compare(key=encode_key(key), target=target, result=result, mod_revision=0)
        case Transaction(compare, success, failure):
            return etcdrpc.TxnRequest(
                compare=[convert_to_etcd3(part) for part in compare],
                success=[convert_to_operation(part) for part in success],
                failure=[convert_to_operation(part) for part in failure],
            )
        case Grant(seconds):
            return etcdrpc.LeaseGrantRequest(TTL=seconds)
        case KeepAlive(lease):
            return etcdrpc.LeaseKeepAliveRequest(ID=lease)
        case Revoke(lease):
            return etcdrpc.LeaseRevokeRequest(ID=lease)
        case Status():
            return etcdrpc.StatusRequest()
        case WatchCreate(key, end, revision, previous):
            creation = etcdrpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision, prev_kv=previous)
            return etcdrpc.WatchRequest(create_request=creation)
    raise AssertionError(request)


def convert_to_operation(request: Any) -> Any:
    kinds = {Range: 'request_range', Put: 'request_put', Touch: 'request_put', Delete: 'request_delete_range'}
    return etcdrpc.RequestOp(**{kinds[type(request)]: convert_to_etcd3(request)})


WATCHES = st.builds(WatchCreate, KEYS, KEYS, NUMBERS, st.booleans(), st.just(False))


@given(RANGES | WRITES | REMOVALS | COMPARISONS | TRANSACTIONS | LEASES | WATCHES | st.just(Status()))
def test_our_requests_equal_those_of_etcd3(request: Any) -> None:
    assert request.to_bytes() == convert_to_etcd3(request).SerializeToString()


@given(WATCHES)
def test_fields_newer_than_etcd3_are_written(request: WatchCreate) -> None:
    """The numbers of these fields are those of rpc.proto in etcd 3.4."""
    from google.protobuf.unknown_fields import UnknownFieldSet  # only after the module above has loaded protobuf

    creation = etcdrpc.WatchRequest.FromString(request._replace(fragment=True).to_bytes()).create_request
    assert [(field.field_number, field.data) for field in UnknownFieldSet(creation)] == [(8, 1)]
    creation.DiscardUnknownFields()
    assert creation == convert_to_etcd3(request).create_request
    progress = etcdrpc.WatchRequest.FromString(WatchProgress().to_bytes())
    assert [(field.field_number, field.data) for field in UnknownFieldSet(progress)] == [(3, b'')]


HEADERS = st.builds(
    etcdrpc.ResponseHeader, cluster_id=UNSIGNED, member_id=UNSIGNED, revision=NUMBERS, raft_term=UNSIGNED
)
KVS = st.builds(
    type(etcdrpc.RangeResponse().kvs.add()),
    **{'key': KEYS, 'value': KEYS, 'lease': NUMBERS, 'version': NUMBERS},
    **{'create_revision': NUMBERS, 'mod_revision': NUMBERS},
)
RANGED = st.builds(
    etcdrpc.RangeResponse, header=HEADERS, kvs=st.lists(KVS, max_size=4), more=st.booleans(), count=NUMBERS
)
PUT = st.builds(etcdrpc.PutResponse, header=HEADERS)
DONE = st.builds(etcdrpc.ResponseOp, response_range=RANGED) | st.builds(etcdrpc.ResponseOp, response_put=PUT)
ANSWERS = st.one_of(
    RANGED,
    st.builds(etcdrpc.TxnResponse, header=HEADERS, succeeded=st.booleans(), responses=st.lists(DONE, max_size=4)),
    st.builds(etcdrpc.LeaseGrantResponse, header=HEADERS, ID=NUMBERS, TTL=NUMBERS, error=st.text(max_size=50)),
    st.builds(etcdrpc.LeaseKeepAliveResponse, header=HEADERS, ID=NUMBERS, TTL=NUMBERS),
    st.builds(etcdrpc.LeaseRevokeResponse, header=HEADERS),
    st.builds(etcdrpc.StatusResponse, header=HEADERS, version=st.text(max_size=50), dbSize=NUMBERS, leader=UNSIGNED),
)


EVENTS = st.builds(type(etcdrpc.WatchResponse().events.add()), type=st.sampled_from((0, 1)), kv=KVS, prev_kv=KVS)
WATCHED = st.builds(
    etcdrpc.WatchResponse, header=HEADERS, watch_id=NUMBERS, created=st.booleans(), canceled=st.booleans(),
    compact_revision=NUMBERS, events=st.lists(EVENTS, max_size=4),
)  # fmt: skip


def check_same(ours: Any, other: Any) -> None:
    """Check that our message equals etcd3's, field by field."""
    for name, value in vars(ours).items():
        if isinstance(value, list):
            assert len(value) == len(getattr(other, name))
            for item, other_item in zip(value, getattr(other, name), strict=True):
                check_same(item, other_item)
        elif hasattr(value, '__dict__'):
            check_same(value, getattr(other, name))
        else:
            assert (type(value), value) == (type(getattr(other, name)), getattr(other, name)), name


@given(ANSWERS)
def test_answers_of_etcd3_are_parsed_equally(message: Any) -> None:
    check_same(parse_answer(type(message).__name__, message.SerializeToString()), message)


@given(WATCHED, st.sampled_from([(b'', False), (b'\x38\0', False), (b'\x38\1', True)]))
def test_watch_answer_is_parsed_like_etcd3(message: Any, piece: tuple[bytes, bool]) -> None:
    """The answer ends with `fragment`, a field that etcd3's code does not know."""
    data, fragment = message.SerializeToString() + piece[0], piece[1]
    ours, other = parse_answer('WatchResponse', data), etcdrpc.WatchResponse.FromString(data)
    assert ours.fragment == fragment
    del ours.fragment
    check_same(ours, other)


@given(st.sampled_from([name for _, name in messages.METHODS.values()]), st.binary(max_size=200))
def test_junk_is_a_value_error_or_a_message(name: str, junk: bytes) -> None:
    """Junk may parse as a message, whose revision is then below 2**63."""
    try:
        message = parse_answer(name, junk)
    except ValueError:
        return
    assert message.header.revision < 2**63


@pytest.mark.parametrize(
    'junk',
    [
        *(b'\x0a', b'\x0a\x05abc', b'\xff' * 11, b'\x02\x01', b'\x0b', b'\x08\x01', b'\x12\x02\x08\x01'),
        *(b'\x1a\x01x', b'\x22\x01x', b'\x0a\x02\x1a\x00', b'\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01'),
    ],
)
def test_malformed_message_is_refused(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r'.'):
        parse_answer('RangeResponse', junk)


def test_unknown_fields_are_ignored() -> None:
    unknown = b'\x78\x05' + b'\x79' + b'8 bytes!' + b'\x7d' + b'four' + b'\x7a\x03abc'
    message = parse_answer('RangeResponse', unknown + etcdrpc.RangeResponse(count=7).SerializeToString() + unknown)
    assert (message.count, message.kvs, message.header.revision) == (7, [], 0)


TINY_PARTS = {
    'empty keys': ('RangeResponse', b'\x12\0'),
    'empty events': ('WatchResponse', b'\x5a\0'),
    'empty results': ('TxnResponse', b'\x1a\0'),
    'keys in results': ('TxnResponse', b'\x1a\x04\x0a\x02\x12\0'),
    'one number again and again': ('RangeResponse', b'\x20\x01'),
    'fields that are not known': ('StatusResponse', b'\x78\x01'),
}


def test_fields_of_each_answer_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, 'MAX_FIELDS', 1000)
    for message, part in TINY_PARTS.values():
        with pytest.raises(ValueError, match='more than 1000 fields'):
            parse_answer(message, part * 1001)


def test_answer_of_too_many_fields_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB of empty keys used to take 1.1 GiB of memory, and now take 400 MiB at most."""
    monkeypatch.setattr(messages, 'MAX_FIELDS', messages.MAX_FIELDS // 16)
    message, part = TINY_PARTS['keys in results']
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f'more than {messages.MAX_FIELDS} fields'):
            parse_answer(message, part * (2**20 // len(part)))
        assert tracemalloc.get_traced_memory()[1] < 400 * 2**20 / 16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize('name', TINY_PARTS)
def test_parsing_calls_its_check_repeatedly(name: str) -> None:
    message, part = TINY_PARTS[name]
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        parse_answer(message, part * 100_000, check)


def test_answer_of_the_most_keys_is_parsed() -> None:
    kvs = [{'key': b'k', 'value': b'v', 'lease': 1, 'version': 1, 'create_revision': 1, 'mod_revision': 1}]
    data = etcdrpc.RangeResponse(kvs=20_000 * kvs).SerializeToString()
    assert len(parse_answer('RangeResponse', data).kvs) == 20_000


# Lists in pages: the size of the pages, and that each key is in exactly one.


class FakeEtcd:
    """A fake etcd with `count` values of `size` bytes, whose answers are at most `longest`."""

    def __init__(self, count: int, size: int, longest: int) -> None:
        self.keys = [f'/instances/{number:032x}/{number:032x}'.encode() for number in range(count)]
        self.size = size
        self.longest = longest
        self.limits: list[int] = []

    def read_page(self, range_request: Range) -> Any:
        self.limits.append(range_request.limit)
        assert range_request.revision in (0, 7)
        assert (range_request.revision == 7) == (range_request.key > self.keys[0])
        matches = [key for key in self.keys if range_request.key <= key < range_request.end]
        value = b'' if range_request.keys_only else b'.' * self.size
        kvs = [SimpleNamespace(key=key, value=value) for key in matches[: range_request.limit]]
        if sum(len(kv.key) + len(kv.value) for kv in kvs) > self.longest:
            raise AnswerTooLong('too long')
        return SimpleNamespace(header=SimpleNamespace(revision=7), kvs=kvs, more=len(matches) > len(kvs))


@pytest.mark.parametrize(
    ('count', 'size', 'keys_only', 'limits'),
    [
        pytest.param(20_000, 2000, True, [500, 2000, 5000, 5000, 5000, 5000], id='names'),
        pytest.param(1500, 200, False, [10, 40, 160, 500, 500, 500], id='small values'),
        pytest.param(30, TARGET_PAGE_BYTES // 20, False, [10, 19, 19], id='larger ones'),
        pytest.param(25, TARGET_PAGE_BYTES, False, [10, 10, 10], id='large ones'),
    ],
)
def test_pages_contain_each_key_once(count: int, size: int, keys_only: bool, limits: list[int]) -> None:
    etcd = FakeEtcd(count, size, 64 * 1024**2)
    found_keys = [
        kv.key for page in read_pages(etcd.read_page, b'/instances/', b'/instances0', keys_only) for kv in page.kvs
    ]
    assert found_keys == etcd.keys
    assert etcd.limits == limits


def test_too_long_page_is_read_again_in_small_pages() -> None:
    etcd = FakeEtcd(40, 100, 20 * 200)
    found_keys = [
        kv.key for page in read_pages(etcd.read_page, b'/instances/', b'/instances0', False) for kv in page.kvs
    ]
    assert found_keys == etcd.keys
    assert etcd.limits == [10, 40, 10, 40], 'all that is left, in vain, and after a small page once more'
    etcd = FakeEtcd(40, 100, 10)
    with pytest.raises(AnswerTooLong):
        list(read_pages(etcd.read_page, b'/instances/', b'/instances0', False))
    assert etcd.limits == [10]


# Checks of etcd's identity, as functions of values.


IDENTITY = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
numbers = st.integers(0, 2**64 - 1)
headers = st.builds(Header, st.integers(1, 3), st.integers(1, 50), st.integers(1, 9))


@given(st.lists(headers, max_size=20), headers)
def test_unfamiliar_notices_a_step_back(before: list[Header], header: Header) -> None:
    cluster_seen = KnownCluster(IDENTITY)
    for earlier in before:
        cluster_seen = cluster_seen.with_header(earlier)
    goes_back = any(header.revision < earlier.revision or header.term < earlier.term for earlier in before)
    moved = bool(before) and header.cluster != before[-1].cluster
    assert (cluster.explain_header_mismatch(cluster_seen, header) is not None) == (goes_back or moved)


def test_unknown_cluster_accepts_any_header() -> None:
    assert cluster.explain_header_mismatch(KnownCluster(), Header(7, 1, 1)) is None


def test_reason_contains_the_actual_and_the_expected_value() -> None:
    expected = KnownCluster(IDENTITY, 0xABC, 345, 7)
    assert cluster.explain_header_mismatch(expected, Header(0xABC, 12, 7)) == 'its revision is 12, and was 345 before'
    assert cluster.explain_header_mismatch(expected, Header(0xABC, 400, 2)) == 'its raft term is 2, and was 7 before'
    assert (
        cluster.explain_header_mismatch(expected, Header(0xDEF, 400, 7)) == 'its cluster id is def, not abc as before'
    )
    assert (
        cluster.explain_identity_mismatch(expected, None)
        == f'its /cluster is missing, and had identity {IDENTITY} before'
    )
    other = encode(cluster.ClusterIdentity(OTHER, 'now')).encode()
    assert cluster.explain_identity_mismatch(expected, other) == f'its identity is {OTHER}, not {IDENTITY} as before'
    assert (
        cluster.explain_identity_mismatch(expected, encode(cluster.ClusterIdentity(IDENTITY, 'later')).encode()) is None
    )


class WrittenKey(NamedTuple):
    """A key in etcd, with the fields that find_accepted_revision() reads."""

    value: bytes
    revision: int
    create_revision: int = 1
    lease: int = 0


def test_highest_acceptance_counts_up_to_its_own_revision() -> None:
    assert cluster.find_accepted_revision([]) == 0
    assert cluster.find_accepted_revision([WrittenKey(b'5', 9), WrittenKey(b'8', 9), WrittenKey(b'7', 9)]) == 8
    assert cluster.find_accepted_revision([WrittenKey(b'9' * 19, 4), WrittenKey(b'9' * 5000, 6)]) == 4
    rubbish = b'', b'x', b'-1', b'1.5', '٣'.encode(), b'\xff', b'{}'
    assert cluster.find_accepted_revision([WrittenKey(value, 9) for value in rubbish]) == 0
