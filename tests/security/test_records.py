"""Records, requests and stacks written by others: foreign, malformed or too large."""

from __future__ import annotations

import json
import logging
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, Unreadable
from ecomp.model import keys, stack
from ecomp.model.flavor import parse_flavor
from ecomp.model.order import MAX_REQUEST_BYTES, InvalidRequest, parse_request
from ecomp.model.queue import Backlog, QueueEntry, WaitingEntry, update_backlog
from ecomp.model.stored import decode, encode, nested
from ecomp.scheduler.queries.stacks import load_stack
from ecomp.shared.places import find_by_listing, read_index
from ecomp.store import connection as paging
from ecomp.store import http2_client
from ecomp.store import watch as keeping
from ecomp.store.client import Entry, Put, Unchanged
from ecomp.store.watch import SMALL_VALUE_BYTES, EntryCache, Follower
from tests.kit import story
from tests.kit.audit import run_audit
from tests.kit.by_hand import make_request, put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import read_guests
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER_UUID
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.servers import Etcd, wait_until
from tests.kit.stacks import list_instances, write_stack
from tests.kit.store_client import open_store
from tests.kit.story import IMAGE as IMAGE_URL
from tests.kit.story import SMALL_QUERY as QUERY
from tests.kit.story import SMALL_QUERY as SMALL_QUERY
from tests.kit.story import find_log_lines, place, read_record, run_in_process, wait_address, wait_log_lines, wait_state
from tests.kit.tuned import make_tuned

# A follower limits the size of each value and of all values together; each message from etcd is limited, too.


LARGE_VALUE_BYTES = 1_400_000
States = list[Mapping[str, Entry]]


@pytest.fixture
def prefix(etcd: Etcd) -> Iterator[str]:
    prefix = f'/followed/{uuid.uuid4()}/'
    yield prefix
    for key in etcd.list_keys(prefix):
        etcd.delete(key)
    etcd.compact()


@pytest.fixture
def start_follower(etcd: Etcd, prefix: str) -> Iterator[Callable[..., States]]:
    """Starts a follower, and returns its states, a list that grows."""
    followers = []

    def start(**limits: float) -> States:
        states: States = []
        followers.append(Follower(EtcdConfig((etcd.endpoint,)), [(prefix, states.append)], **limits))  # type: ignore[arg-type]
        followers[-1].start()
        wait_until(lambda: states, 20, 'it follows')
        return states

    yield start
    for follower in followers:
        follower.stop()


def count_bytes(state: Mapping[str, Entry]) -> int:
    return sum(len(stored.value) for stored in state.values())


def test_follower_drops_values_that_are_too_large(
    etcd: Etcd, prefix: str, start_follower: Callable[..., States], caplog: pytest.LogCaptureFixture
) -> None:
    """150 values of 1.4 MB raised every compute from 81 to 909 MiB (ENEMY 13)."""
    caplog.set_level(logging.INFO)
    before, after = f'{prefix}before', f'{prefix}later'
    etcd.put(before, 'x' * LARGE_VALUE_BYTES)
    states = start_follower(max_value_bytes=1000)
    assert (states[-1][before].value, states[-1][before].dropped_bytes) == (b'', LARGE_VALUE_BYTES)
    for _ in range(5):
        revision = etcd.put(after, 'y' * 1001)
    wait_until(lambda: after in states[-1] and states[-1][after].revision == revision, 20, 'each event is heard')
    assert (states[-1][after].value, states[-1][after].dropped_bytes) == (b'', 1001)
    lines = [line for line in caplog.messages if 'is ignored: it' in line]
    assert len(lines) == 2, 'one line for a key, not one for each event'
    assert f'the value of {after} is ignored: it has 1001 bytes, but the limit is 1000' in lines[1]
    # A later, smaller value is kept again.
    etcd.put(after, 'z' * 1000)
    wait_until(lambda: states[-1][after].value == b'z' * 1000, 20, 'it is kept')
    assert states[-1][after].dropped_bytes == 0


def test_follower_limits_the_total_size(etcd: Etcd, prefix: str, start_follower: Callable[..., States]) -> None:
    names = [f'{prefix}{number:03d}' for number in range(60)]
    for name in names[:30]:
        etcd.put(name, 'x' * 50_000)
    states = start_follower(max_total_bytes=1_000_000, resync_seconds=0.5)
    large_kept = {key for key, stored in states[-1].items() if stored.value}
    assert count_bytes(states[-1]) <= 1_000_000
    assert len(large_kept) == 19
    for name in names[30:]:
        etcd.put(name, 'y' * 50_000)
    # Small requests are kept even so. Values that were kept stay after each new listing.
    etcd.put(f'{prefix}-first', 't' * SMALL_VALUE_BYTES)
    wait_until(lambda: len(states[-1]) == 61 and states[-1][f'{prefix}-first'].value, 20, 'all keys are there')
    count = len(states)
    wait_until(lambda: len(states) > count + 2, 20, 'it was listed again')
    assert {key for key, stored in states[-1].items() if len(stored.value) == 50_000} == large_kept
    for name in sorted(large_kept)[:10]:
        etcd.delete(name)
    wait_until(lambda: sum(len(each.value) == 50_000 for each in states[-1].values()) >= 18, 20, 'there is room again')
    assert count_bytes(states[-1]) <= 1_000_000 + SMALL_VALUE_BYTES


def make_entry(key: str, size: int, revision: int = 1) -> Entry:
    return Entry(key, b'x' * size, revision)


def test_cache_counts_the_bytes_it_keeps() -> None:
    cache = EntryCache(100_000, 200_000)
    for number in range(1000):
        cache.store(make_entry(f'{number:04d}', 7000))
    assert sum(len(stored.value) for stored in cache.entries.values()) == 28 * 7000
    assert len(cache.entries) == 1000
    for number in range(1000):
        cache.store(make_entry(f's{number:04d}', SMALL_VALUE_BYTES))
    assert cache._size <= 400_000
    for number in range(1000):
        cache.store(make_entry(f'{number:04d}', 1, 2))
    cache.end_list([f'{number:04d}' for number in range(500)])
    assert cache._size == sum(len(stored.key) + len(stored.value) for stored in cache.entries.values()) == 2500
    for number in range(500):
        cache.forget(f'{number:04d}')
        cache.forget(f'{number:04d}')
    assert (cache._size, cache.entries) == (0, {})


@pytest.mark.parametrize('part', [b'"1f"', b'"1f":""', b'CUSTOM_1F:1'], ids=['keys', 'stages', 'classes'])
def test_cache_counts_parsed_size_of_many_short_parts(part: bytes) -> None:
    """211 requests with 46,000 three-letter keys raised every compute from 100 to 760 MiB."""
    value = b','.join([part] * 46_000)[:MAX_REQUEST_BYTES]
    cache = EntryCache(MAX_REQUEST_BYTES, keeping.MAX_TOTAL_BYTES)
    for number in range(200):
        cache.store(Entry(f'{number:04d}', value, 1))
    parts = sum(stored.value.count(b',') for stored in cache.entries.values())
    assert 800_000 < parts < 1_100_000
    for number in range(200):
        cache.store(Entry(f'{number:04d}', b'1,2', 2))
        cache.forget(f'{number:04d}')
    assert cache._size == 0


def test_cache_limits_keys_and_log_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(keeping, 'MAX_KEYS', 300)
    cache = EntryCache(10, 100_000)
    results = [cache.store(make_entry(f'{number:04d}', 100)) for number in range(400)]
    assert sum(stored is not None for stored in results) == 300
    assert cache.store(make_entry('k' * 20_000, 1)) is None
    assert cache.store(make_entry('0001', 5, 2)) == make_entry('0001', 5, 2)
    assert len(caplog.messages) == 101
    assert 'further ones are not logged' in caplog.messages[-1]


def test_cache_replaces_a_different_value_at_the_same_revision() -> None:
    """A wiped or restored etcd may have another value of the same key at the same revision."""
    cache = EntryCache(1000, 1000)
    cache.store(Entry('a', b'1', 7))
    assert cache.store(Entry('a', b'2', 7)) == Entry('a', b'2', 7)


def test_snapshot_reads_large_values_in_small_pages(etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small values come first, so that a large page is requested for the large ones."""
    for number in range(120):
        etcd.put(f'{prefix}a{number:03d}', 'x')
    for number in range(50):
        etcd.put(f'{prefix}b{number:03d}', 'y' * LARGE_VALUE_BYTES)
    with open_store(etcd.endpoint, 60) as store:  # the time of a call is not under test
        sizes: list[int] = []
        real = store._read

        def read(ask: object, linearizable: bool = True, about: Sequence[str] = ()) -> object:
            try:
                reply = real(ask, linearizable, about)  # type: ignore[arg-type]
            except paging.AnswerTooLong:
                sizes.append(-1)
                raise
            sizes.append(sum(len(kv.value) for kv in reply.kvs))  # type: ignore[attr-defined]
            return reply

        monkeypatch.setattr(store, '_read', read)
        entries = store.snapshot(prefix).entries
        assert [len(stored.value) for stored in entries.values()] == [1] * 120 + [LARGE_VALUE_BYTES] * 50
        assert max(sizes) < 64 * 1024**2
        assert -1 in sizes, 'a page of many was too long, and was asked for again in parts'
        assert len(store.snapshot(prefix, keys_only=True).entries) == 170


def limit_answers(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    monkeypatch.setattr(http2_client, 'MAX_ANSWER_BYTES', max_bytes)


def test_read_splits_large_values_at_one_revision(etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading many groups or records of a megabyte each failed: the answer was too long."""
    limit_answers(monkeypatch, 200_000)
    names = [f'{prefix}{number:02d}' for number in range(20)]
    for name in names:
        etcd.put(name, 'y' * 50_000)
    with open_store(etcd.endpoint) as store:
        real = store._read
        answered: list[object] = []

        def read(ask: object, linearizable: bool = True, about: Sequence[str] = ()) -> object:
            answered.append(real(ask, linearizable, about))  # type: ignore[arg-type]
            etcd.put(names[-1], 'later')
            return answered[-1]

        monkeypatch.setattr(store, '_read', read)
        assert {name: len(stored.value) for name, stored in store.read(names).items()} == dict.fromkeys(names, 50_000)
        assert len(answered) > 1


def test_message_that_is_too_long_raises_a_readable_error(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_answers(monkeypatch, 200_000)
    for number in range(10):
        etcd.put(f'{prefix}{number}', 'y' * 100_000)
    with open_store(etcd.endpoint) as store:
        with pytest.raises(EcompError, match='larger than max') as caught:
            store.snapshot(prefix)
        assert '\n' not in str(caught.value)
        entry = store.get(f'{prefix}1')
        assert entry is not None
        assert store.commit([Unchanged(entry.key, entry.revision)], [Put(entry.key, 'x')])


def test_dropped_request_reports_the_reason() -> None:
    key = keys.request(COMPUTE, INSTANCE)
    parsed = parse_request(COMPUTE, key, b'', MAX_REQUEST_BYTES + 7)
    assert isinstance(parsed, InvalidRequest)
    assert parsed.reason == f'the request has {MAX_REQUEST_BYTES + 7} bytes; the limit is {MAX_REQUEST_BYTES}'
    parsed = parse_request(COMPUTE, key, b'', 1000)
    assert isinstance(parsed, InvalidRequest)
    assert 'too many together with the other requests to this compute' in parsed.reason
    parsed = parse_request(COMPUTE, keys.request(COMPUTE, 'x'), b'', 10**6)
    assert isinstance(parsed, InvalidRequest)
    assert 'is not a uuid' in parsed.reason


def test_dropped_queued_request_is_read_once_there_is_room() -> None:
    flavor = parse_flavor('f', 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1')
    waiting = QueueEntry(INSTANCE, flavor, image=IMAGE, user_id='u', project_id='p')
    complete = Entry(waiting.key, encode(waiting).encode(), 5)
    first = update_backlog({waiting.key: Entry(waiting.key, b'', 5, dropped_bytes=len(complete.value))}, Backlog())
    assert first.entries == {}
    assert update_backlog({waiting.key: complete}, first).entries == {waiting.key: WaitingEntry(5, waiting)}


def test_compute_works_despite_large_and_junk_requests(cluster: Control) -> None:
    """Valid requests are built, large ones refused for their size, junk keys logged once."""
    compute = cluster.ecompute('VCPU:8,DISK_GB:10,MEMORY_MB:1024')
    _, instance = story.parse_notice(cluster.eschedule(QUERY))
    wait_address(cluster, instance)
    large, junk = [str(uuid.uuid4()) for _ in range(3)], [f'junk{number}' for number in range(8)]
    for name in (*large, *junk):
        cluster.etcd.put(f'/hosts/{compute.uuid}/{name}', 'x' * LARGE_VALUE_BYTES)
    for name in large:
        failed = wait_state(cluster, name, 'error')
        assert (
            failed['error']['reason'] == f'the request has {LARGE_VALUE_BYTES} bytes; the limit is {MAX_REQUEST_BYTES}'
        )
    for _ in range(3):
        cluster.etcd.put(f'/hosts/{compute.uuid}/junk0', 'y' * LARGE_VALUE_BYTES)
    _, other = story.parse_notice(cluster.eschedule(QUERY))
    wait_address(cluster, other)
    assert set(read_guests(compute)) == {instance, other}
    for name in junk:
        wait_log_lines(compute, f'{name} is ignored: it has {LARGE_VALUE_BYTES} bytes')
        assert len(find_log_lines(compute, f"'{name}' is not a uuid")) + len(find_log_lines(compute, f'/{name}: ')) <= 2
        assert len(find_log_lines(compute, f'/{name} is ignored: it has {LARGE_VALUE_BYTES} bytes')) == 1
    for name in junk:
        cluster.etcd.delete(f'/hosts/{compute.uuid}/{name}')
    cluster.etcd.compact()


# A record is trusted only if it comes from the compute in its key: a compromised compute cannot end guests of others.


STATES = ('active', 'stopped', 'building', 'destroying', 'error', 'gone')
OTHER_COMPUTE = '66666666-0000-4000-8000-000000000000'
LARGE_INVENTORY = 'VCPU:8,DISK_GB:10,MEMORY_MB:1024'


def forge(cluster: Control, instance: str, state: str, key: str) -> None:
    value = {**(read_record(cluster, instance) or {}), 'compute': OTHER_COMPUTE, 'state': state}
    cluster.etcd.put(key, json.dumps(value))
    cluster.etcd.put(f'/booted/{instance}', '10.66.66.66')


@pytest.mark.parametrize('down', [False, True])
def test_forged_record_of_a_guest_is_not_trusted(cluster: Control, down: bool) -> None:
    """The victim's own compute dropped its request and allocation within a minute (ENEMY 2)."""
    compute = make_tuned(cluster, LARGE_INVENTORY, numbers={'PLAN_INTERVAL_SECONDS': 1})
    instances = [place(cluster, SMALL_QUERY, '--name', f'n{number}')[1] for number, _ in enumerate(STATES)]
    before = {uid: (wait_address(cluster, uid), cluster.placement.read_allocations(uid)) for uid in instances}
    running, records = read_guests(compute), {uid: cluster.etcd.read_record(uid) for uid in instances}
    if down:
        compute.stop()
    for instance, state in zip(instances, STATES, strict=True):
        forge(cluster, instance, state, keys.record(OTHER_COMPUTE, instance))
    if down:
        compute.start()
    # Once this instance has an address, a periodic check has run.
    later_address = wait_address(cluster, place(cluster, SMALL_QUERY)[1])
    for instance, (address, allocation) in before.items():
        assert cluster.eschedule(instance).stdout == f'{address}\n' != f'{later_address}\n'
        assert f'compute      {compute.uuid}' in cluster.eschedule('show', instance).stdout
        assert cluster.placement.read_allocations(instance) == allocation
        assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') is not None
        assert cluster.etcd.get(f'/instances/{compute.uuid}/{instance}') == records[instance]
    assert read_guests(compute).items() >= running.items()
    report = cluster.eschedule('check', '--now')
    assert report.code == 8
    assert report.stdout.count('record-doubled') == 4
    assert report.stdout.count('booted-differs') == 6
    for number, instance in enumerate(instances):
        assert cluster.eschedule('destroy', '--wait', f'n{number}').code == 0
        wait_until(lambda instance=instance: instance not in read_guests(compute), 20, 'it is gone')  # type: ignore[misc]
        cluster.etcd.delete(keys.record(OTHER_COMPUTE, instance))
        wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)


def test_keys_with_more_levels_belong_to_no_instance(etcd: Etcd) -> None:
    """Seventy 1 MB keys that end in an instance made it impossible to show or destroy it."""
    instance, compute = str(uuid4()), str(uuid4())
    good = [keys.request(compute, instance), keys.record(compute, instance)]
    forged = [
        f'/{family}/{OTHER_COMPUTE}/{part}/{instance}' for family in ('hosts', 'instances') for part in ('', '1', '1/2')
    ]
    forged += [f'/hosts/{instance}', f'/instances/{instance}']
    for key in (*good, *forged):
        etcd.put(key, 'x')
    with open_store(etcd.endpoint) as store:
        instance_index = read_index(store)
        assert {*instance_index.requests[instance], *instance_index.records[instance]} == set(good)
        assert find_by_listing(store, instance).requests.keys() == {compute}
    for key in (*good, *forged):
        etcd.delete(key)


def test_forged_record_under_its_own_key_is_not_trusted(cluster: Control) -> None:
    """A writer of the compute's own key may break the record (rule: shown-not-acted-on)."""
    compute = make_tuned(cluster, LARGE_INVENTORY, numbers={'PLAN_INTERVAL_SECONDS': 1})
    instance = place(cluster, SMALL_QUERY)[1]
    address, allocation = wait_address(cluster, instance), cluster.placement.read_allocations(instance)
    key = cluster.etcd.find_record_key(instance)
    forge(cluster, instance, 'gone', key)
    wait_log_lines(compute, key, f"compute: '{OTHER_COMPUTE}' differs")
    story.assert_one_line(cluster.eschedule('show', instance), 1, f'etcdctl del {key}')
    assert cluster.placement.read_allocations(instance) == allocation
    assert read_guests(compute)[instance]['running']
    # Deleting the key, as the error suggests, repairs it.
    cluster.etcd.delete(key)
    compute.restart()
    wait_state(cluster, instance, 'active')
    # An existing guest is adopted first; its addresses are queried afterwards.
    wait_until(lambda: wait_address(cluster, instance) == address, 20, 'its own address is back')
    forge(cluster, instance, 'gone', key)
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_invariants(cluster, compute)


# An instance with a malformed record is shown as such, does not affect others, and can be destroyed.


DEEP_JSON = '[' * 100_000
INFINITE_WEIGHT = '{"version": 1, "why": {"weigh": "spread", "weight": Infinity, "of": 3}}'
MALFORMED_RECORDS = ['', 'null', DEEP_JSON, INFINITE_WEIGHT, '{"version": "new"}']
GROUP_OPTIONS = ['--group', 'web', '--policy', 'anti-affinity', '--soft']


@pytest.fixture
def compute(cluster: Control) -> Ecompute:
    return cluster.ecompute('VCPU:16,DISK_GB:100,MEMORY_MB:8192')


def put_record(cluster: Control, compute: Ecompute, instance: str, value: str) -> None:
    cluster.etcd.put(f'/instances/{compute.uuid}/{instance}', value)


def test_infinite_weight_ends_in_error(cluster: Control, compute: Ecompute) -> None:
    """Such an instance once ran forever: it could not be shown or destroyed (ENEMY 6)."""
    instance = str(uuid.uuid4())
    put_claim(cluster, instance, compute.uuid)
    why = {'weigh': 'spread', 'weight': 'HERE', 'of': 3}
    value = json.dumps({**make_request(compute.uuid, instance), 'why': why}).replace('"HERE"', '1e999')
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', value)
    failed = wait_state(cluster, instance, 'error')
    assert 'the number 1e999 is too large' in failed['error']['reason']
    for words in (['show'], ['why'], ['show', '-f', 'json'], ['show', '--timeline']):
        assert run_in_process(cluster, *words, instance).code == 0
    assert run_in_process(cluster, 'list').code == 0
    assert run_in_process(cluster, 'destroy', '--wait', instance).code == 0
    assert read_guests(compute) == {}
    check_invariants(cluster, compute)


def test_destroy_works_with_a_malformed_record(cluster: Control, compute: Ecompute) -> None:
    """The request's key names the compute and the instance, so the record does not matter."""
    damaged = {}
    for number, value in enumerate(MALFORMED_RECORDS):
        _, instance = place(cluster, SMALL_QUERY, '--name', f'n{number}', *GROUP_OPTIONS)
        wait_address(cluster, instance)
        damaged[instance] = value
    _, good = place(cluster)
    wait_address(cluster, good)
    compute.stop()
    for instance, value in damaged.items():
        put_record(cluster, compute, instance, value)
    compute.start()
    for instance in damaged:
        wait_log_lines(compute, f'/instances/{compute.uuid}/{instance}', 'trying again')
        story.assert_one_line(run_in_process(cluster, 'show', instance), 1, f'/instances/{compute.uuid}/{instance}')
    # One line of error for each malformed record, and the valid one.
    both = run_in_process(cluster, 'show', *damaged, good)
    assert (both.code, len(both.stderr.splitlines())) == (1, len(damaged))
    assert good in both.stdout
    listed = run_in_process(cluster, 'list')
    assert (listed.code, len(listed.stderr.splitlines()), len(listed.stdout.splitlines())) == (1, len(damaged), 2)
    assert set(read_guests(compute)) == {*damaged, good}
    for number, instance in enumerate(damaged):
        # By its uuid, or by its name, which etcd stores separately.
        result = run_in_process(
            cluster, 'destroy', '--wait', *(('--timeout', '60', instance) if number else (f'n{number}',))
        )
        assert result.code == 0, result
        word = instance if number else f'n{number}'
        assert result.stderr.splitlines() == [
            f'eschedule: {word}: destroy accepted; {socket.gethostname()} carries it out',
            f'eschedule: {word}: gone',
        ]
        assert (read_record(cluster, instance) or {})['state'] == 'gone'
        assert run_in_process(cluster, 'destroy', instance).code == 4
    assert set(read_guests(compute)) == {good}
    assert cluster.etcd.list_keys('/names/') == cluster.etcd.list_keys('/groups/') == []
    check_invariants(cluster, compute)


def test_repeated_destroy_does_not_rewrite_the_tombstone(cluster: Control, compute: Ecompute) -> None:
    _, instance = place(cluster)
    wait_address(cluster, instance)
    compute.stop()
    put_record(cluster, compute, instance, 'null')
    assert 'destroy accepted' in run_in_process(cluster, 'destroy', instance).stderr
    before = cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}')
    assert 'is already being destroyed' in run_in_process(cluster, 'destroy', instance).stderr
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') == before
    compute.start()
    wait_until(lambda: cluster.etcd.read_record(instance) != b'null', 20, 'it is carried out')
    wait_state(cluster, instance, 'gone')
    assert len(find_log_lines(compute, f'/instances/{compute.uuid}/{instance}')) == 1
    check_invariants(cluster, compute)


def test_destroy_needs_a_request_if_the_record_is_malformed(cluster: Control, compute: Ecompute) -> None:
    instance = str(uuid.uuid4())
    put_record(cluster, compute, instance, 'null')
    for words in (['destroy', instance], ['destroy', '--wait', instance], ['show', instance], [instance]):
        story.assert_one_line(run_in_process(cluster, *words), 1, f'etcdctl del /instances/{compute.uuid}/{instance}')
    cluster.etcd.delete(cluster.etcd.find_record_key(instance))
    check_invariants(cluster, compute)


@pytest.mark.parametrize('whose', ['ours', 'theirs'])
def test_record_of_a_newer_ecomp_is_not_overwritten(cluster: Control, compute: Ecompute, whose: str) -> None:
    instance, other = str(uuid.uuid4()), str(uuid.uuid4())
    newer = json.dumps({'version': 2, 'compute': compute.uuid if whose == 'ours' else other, 'instance': instance})
    put_record(cluster, compute, instance, newer)
    tombstone = {'allocations': {}, 'instance': instance, 'image': None, 'user_id': 'u', 'project_id': 'p'}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(tombstone))
    wait_log_lines(compute, f'/instances/{compute.uuid}/{instance}', 'version 2', 'trying again')
    _, good = place(cluster)
    wait_address(cluster, good)
    assert cluster.etcd.read_record(instance) == newer.encode()
    assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') is not None
    for key in (f'/hosts/{compute.uuid}/{instance}', f'/instances/{compute.uuid}/{instance}'):
        cluster.etcd.delete(key)
    check_invariants(cluster, compute)


def test_tombstone_of_a_request_with_long_query_is_small(cluster: Control, compute: Ecompute) -> None:
    """With its UTF-8 query escaped the tombstone would be too large, and refused."""
    instance = str(uuid.uuid4())
    put_claim(cluster, instance, compute.uuid)
    value: dict[str, Any] = {**make_request(compute.uuid, instance), 'image': IMAGE_URL, 'query': 'é' * 150_000}
    cluster.etcd.put(f'/hosts/{compute.uuid}/{instance}', json.dumps(value, ensure_ascii=False))
    wait_address(cluster, instance)
    compute.stop()
    assert run_in_process(cluster, 'destroy', instance).code == 0
    key = f'/hosts/{compute.uuid}/{instance}'
    tombstone = cluster.etcd.get(key) or b''
    assert len(tombstone) < MAX_REQUEST_BYTES
    assert not isinstance(parse_request(compute.uuid, key, tombstone), InvalidRequest)
    compute.start()
    wait_until(lambda: read_guests(compute) == {}, 20, 'it is gone')
    wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)


# Malformed values of /stacks/<name>, and stacks in requests: refused in one sentence, and no instance is harmed.


KEY = keys.stack('shop')
ENTRY = {'incarnation': 1, 'compute': COMPUTE}
PLACE = stack.Stack('shop', OTHER_UUID).make_place('web/2', 7)


def make_value(**fields: Any) -> bytes:
    return json.dumps({'version': 1, 'epoch': OTHER_UUID, 'entries': {}, **fields}).encode()


def make_entries(name: str, **fields: Any) -> bytes:
    return make_value(entries={name: {**ENTRY, **fields}})


@pytest.mark.fast
@pytest.mark.parametrize('name', ['', 'a' * 31, 'my-shop', '../x', 'shop\n', '\ud800', 'Shop'])
def test_stack_of_an_invalid_name_is_refused(name: str) -> None:
    """Its key can be written by anybody, and its name would be part of the names of instances."""
    with pytest.raises(ValueError, match='not a valid stack name'):
        decode(stack.Stack, make_value(), name=name)
    with pytest.raises(ValueError, match='not a valid stack name'):
        nested(stack.Place)({**PLACE._asdict(), 'name': name})


@pytest.mark.usefixtures('compute')
def test_malformed_stack_is_refused_by_all_commands_and_harms_no_instance(cluster: Control) -> None:
    path = write_stack(cluster, {'db': {}, 'web': {}})
    assert cluster.eschedule('apply', path, '--wait').code == 0
    before, good = list_instances(cluster), cluster.etcd.get(KEY) or b''
    commands = [
        ('apply', path), ('apply', path, '--dry-run'), ('apply', path, '--prune', '--replace-all', '--yes'),
        ('list', '--stack', 'shop'), ('stop', '--stack', 'shop'), ('destroy', '--file', path, '--yes'),
        ('destroy', '--stack', 'shop', '--yes'),
    ]  # fmt: skip
    for value in (b'x' * 1_500_000, b'[' * 100_000, b'\xff', make_entries('\x1b]0;x\x07\x1b[2J/1')):
        cluster.etcd.put(KEY, value)
        with open_store(cluster.etcd.endpoint) as store, pytest.raises(Unreadable):
            load_stack(store, 'shop')
        for words in commands:
            result = cluster.eschedule(*words)
            line = story.assert_one_line(result, 1, KEY)
            assert (line.isprintable(), len(line) < 400, result.stdout) == (True, True, ''), result
        (finding,) = run_audit(cluster)
        assert (finding['code'], finding['subject']) == ('malformed', 'shop')
        assert finding['sentence'].startswith(f'{KEY} is malformed: ')
        assert finding['sentence'].isprintable()
        assert cluster.eschedule('list').code == 0
    assert list_instances(cluster) == before
    assert read_allocations(cluster).keys() == set(before.values())
    # A malformed stack keeps nobody from destroying its instances.
    assert cluster.eschedule('destroy', 'shop-db', '--wait').code == 0
    # As the audit says: without the key, the stack is restored.
    cluster.etcd.delete(KEY)
    assert cluster.eschedule('apply', path, '--wait').code == 0
    after = list_instances(cluster)
    assert (after.keys(), after['shop-web']) == (before.keys(), before['shop-web'])
    assert json.loads(cluster.etcd.get(KEY) or b'')['epoch'] == json.loads(good)['epoch']
