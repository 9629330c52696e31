"""What a process keeps of what it follows has a limit, for each value and in all; and so has each message of etcd's."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.flavor import parse_flavor
from ecomp.model.order import SIZE_LIMIT, Invalid, parse_request
from ecomp.model.queue import Backlog, InvalidEntry, Place, QueueEntry, backlog_of, to_json
from ecomp.store import by_h2
from ecomp.store import connection as paging
from ecomp.store import watch as keeping
from ecomp.store.client import Entry, Put, Unchanged
from ecomp.store.watch import SMALL, Cache, Follower
from tests.kit.commands import Control
from tests.kit.hands import guests
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE
from tests.kit.servers import Etcd, until
from tests.kit.store_client import connected
from tests.kit.story import SMALL as QUERY
from tests.kit.story import addressed, logged, logs, notified, reached

BIG = 1_400_000
States = list[Mapping[str, Entry]]


@pytest.fixture
def prefix(etcd: Etcd) -> Iterator[str]:
    """Of the test's own; what it put there is removed."""
    prefix = f'/followed/{uuid.uuid4()}/'
    yield prefix
    for key in etcd.keys(prefix):
        etcd.delete(key)
    etcd.compact()


@pytest.fixture
def follow(etcd: Etcd, prefix: str) -> Iterator[Callable[..., States]]:
    """Starts a follower; the states that it hands on, as a list that grows."""
    followers = []

    def start(**limits: float) -> States:
        states: States = []
        followers.append(Follower(EtcdConfig((etcd.endpoint,)), [(prefix, states.append)], **limits))  # type: ignore[arg-type]
        followers[-1].start()
        until(lambda: states, 20, 'it follows')
        return states

    yield start
    for each in followers:
        each.stop()


def held(state: Mapping[str, Entry]) -> int:
    return sum(len(each.value) for each in state.values())


def test_a_value_that_is_too_large_is_not_kept(
    etcd: Etcd, prefix: str, follow: Callable[..., States], caplog: pytest.LogCaptureFixture
) -> None:
    """150 values of 1.4 MB took every compute from 81 to 909 MiB (ENEMY 13)."""
    caplog.set_level(logging.INFO)
    before, after = f'{prefix}before', f'{prefix}later'
    etcd.put(before, 'x' * BIG)
    states = follow(largest=1000)
    assert (states[-1][before].value, states[-1][before].dropped) == (b'', BIG)
    for _ in range(5):
        revision = etcd.put(after, 'y' * 1001)
    until(lambda: after in states[-1] and states[-1][after].revision == revision, 20, 'each event is heard')
    assert (states[-1][after].value, states[-1][after].dropped) == (b'', 1001)
    said = [line for line in caplog.messages if 'not kept' in line]
    assert len(said) == 2, 'one line for a key, not one for each event'
    assert f'{after} has 1001 bytes, and 1000 is the limit' in said[1]
    # A later smaller value counts again.
    etcd.put(after, 'z' * 1000)
    until(lambda: states[-1][after].value == b'z' * 1000, 20, 'it is kept')
    assert states[-1][after].dropped == 0


def test_all_together_has_a_limit(etcd: Etcd, prefix: str, follow: Callable[..., States]) -> None:
    names = [f'{prefix}{number:03d}' for number in range(60)]
    for each in names[:30]:
        etcd.put(each, 'x' * 50_000)
    states = follow(most=1_000_000, resync=0.5)
    first = {key for key, each in states[-1].items() if each.value}
    assert held(states[-1]) <= 1_000_000
    assert len(first) == 19
    for each in names[30:]:
        etcd.put(each, 'y' * 50_000)
    # What is asked in few words is heard all the same; whoever was kept stays, list after list.
    etcd.put(f'{prefix}-first', 't' * SMALL)
    until(lambda: len(states[-1]) == 61 and states[-1][f'{prefix}-first'].value, 20, 'all keys are there')
    count = len(states)
    until(lambda: len(states) > count + 2, 20, 'it was listed again')
    assert {key for key, each in states[-1].items() if len(each.value) == 50_000} == first
    for each in sorted(first)[:10]:
        etcd.delete(each)
    until(lambda: sum(len(each.value) == 50_000 for each in states[-1].values()) >= 18, 20, 'there is room again')
    assert held(states[-1]) <= 1_000_000 + SMALL


def entry(key: str, size: int, revision: int = 1) -> Entry:
    return Entry(key, b'x' * size, revision)


def test_what_is_kept_is_counted() -> None:
    kept = Cache(100_000, 200_000)
    for number in range(1000):
        kept.keep(entry(f'{number:04d}', 7000))
    assert sum(len(each.value) for each in kept.entries.values()) == 28 * 7000
    assert len(kept.entries) == 1000
    for number in range(1000):
        kept.keep(entry(f's{number:04d}', SMALL))
    assert kept._size <= 400_000
    for number in range(1000):
        kept.keep(entry(f'{number:04d}', 1, 2))
    kept.end([f'{number:04d}' for number in range(500)])
    assert kept._size == sum(len(each.key) + len(each.value) for each in kept.entries.values()) == 2500
    for number in range(500):
        kept.forget(f'{number:04d}')
        kept.forget(f'{number:04d}')
    assert (kept._size, kept.entries) == (0, {})


@pytest.mark.parametrize('part', [b'"1f"', b'"1f":""', b'CUSTOM_1F:1'], ids=['keys', 'stages', 'classes'])
def test_many_short_parts_count_for_what_is_made_of_them(part: bytes) -> None:
    """211 requests with 46,000 keys of three letters each took every compute from 100 to 760 MiB."""
    value = b','.join([part] * 46_000)[:SIZE_LIMIT]
    kept = Cache(SIZE_LIMIT, keeping.MOST)
    for number in range(200):
        kept.keep(Entry(f'{number:04d}', value, 1))
    parts = sum(each.value.count(b',') for each in kept.entries.values())
    assert 800_000 < parts < 1_100_000
    for number in range(200):
        kept.keep(Entry(f'{number:04d}', b'1,2', 2))
        kept.forget(f'{number:04d}')
    assert kept._size == 0


def test_keys_and_lines_have_a_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(keeping, 'KEYS', 300)
    kept = Cache(10, 100_000)
    found = [kept.keep(entry(f'{number:04d}', 100)) for number in range(400)]
    assert sum(each is not None for each in found) == 300
    assert kept.keep(entry('k' * 20_000, 1)) is None
    assert kept.keep(entry('0001', 5, 2)) == entry('0001', 5, 2)
    assert len(caplog.messages) == 101
    assert 'more values' in caplog.messages[-1]


def test_another_etcd_s_value_is_not_taken_for_ours() -> None:
    """Of the same key at the same revision: it was wiped, or restored."""
    kept = Cache(1000, 1000)
    kept.keep(Entry('a', b'1', 7))
    assert kept.keep(Entry('a', b'2', 7)) == Entry('a', b'2', 7)


def test_a_list_of_large_values_comes_in_small_pages(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones first, so that a page of many is asked for: then the large ones are in it."""
    for number in range(120):
        etcd.put(f'{prefix}a{number:03d}', 'x')
    for number in range(50):
        etcd.put(f'{prefix}b{number:03d}', 'y' * BIG)
    with connected(etcd.endpoint, 60) as store:  # a call's time is not what is looked at
        sizes: list[int] = []
        real = store._read

        def read(ask: object, linearizable: bool = True, about: Sequence[str] = ()) -> object:
            try:
                reply = real(ask, linearizable, about)  # type: ignore[arg-type]
            except paging.TooLong:
                sizes.append(-1)
                raise
            sizes.append(sum(len(each.value) for each in reply.kvs))  # type: ignore[attr-defined]
            return reply

        monkeypatch.setattr(store, '_read', read)
        there = store.snapshot(prefix).entries
        assert [len(each.value) for each in there.values()] == [1] * 120 + [BIG] * 50
        assert max(sizes) < 64 * 1024**2
        assert -1 in sizes, 'a page of many was too long, and was asked for again in parts'
        assert len(store.snapshot(prefix, keys_only=True).entries) == 170


def limit_answers(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """Have no answer of etcd's that is longer than so many bytes taken."""
    monkeypatch.setattr(by_h2, 'LONGEST', longest)


def test_large_values_are_read_a_few_at_once_as_they_were_at_one_moment(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups or records of a megabyte each that somebody puts: who reads many of them was told that it is too long."""
    limit_answers(monkeypatch, 200_000)
    names = [f'{prefix}{number:02d}' for number in range(20)]
    for name in names:
        etcd.put(name, 'y' * 50_000)
    with connected(etcd.endpoint) as store:
        real = store._read
        answered: list[object] = []

        def read(ask: object, linearizable: bool = True, about: Sequence[str] = ()) -> object:
            answered.append(real(ask, linearizable, about))  # type: ignore[arg-type]
            etcd.put(names[-1], 'later')
            return answered[-1]

        monkeypatch.setattr(store, '_read', read)
        assert {name: len(each.value) for name, each in store.read(names).items()} == dict.fromkeys(names, 50_000)
        assert len(answered) > 1


def test_a_message_that_is_too_long_is_an_error_in_words(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_answers(monkeypatch, 200_000)
    for number in range(10):
        etcd.put(f'{prefix}{number}', 'y' * 100_000)
    with connected(etcd.endpoint) as store:
        with pytest.raises(EcompError, match='larger than max') as caught:
            store.snapshot(prefix)
        assert '\n' not in str(caught.value)
        entry = store.get(f'{prefix}1')
        assert entry is not None
        assert store.commit([Unchanged(entry.key, entry.revision)], [Put(entry.key, 'x')])


def test_a_request_that_was_dropped_says_why() -> None:
    key = keys.request(COMPUTE, INSTANCE)
    found = parse_request(COMPUTE, key, b'', SIZE_LIMIT + 7)
    assert isinstance(found, Invalid)
    assert found.reason == f'the request has {SIZE_LIMIT + 7} bytes; the limit is {SIZE_LIMIT}'
    found = parse_request(COMPUTE, key, b'', 1000)
    assert isinstance(found, Invalid)
    assert 'with what else is asked of this compute that is too much' in found.reason
    found = parse_request(COMPUTE, keys.request(COMPUTE, 'x'), b'', 10**6)
    assert isinstance(found, Invalid)
    assert 'is not a uuid' in found.reason


def test_what_waits_is_read_once_there_is_room_for_it() -> None:
    flavor = parse_flavor('f', 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1')
    waiting = QueueEntry(INSTANCE, flavor, image=IMAGE, user_id='u', project_id='p')
    whole = Entry(waiting.key, to_json(waiting).encode(), 5)
    first = backlog_of({waiting.key: Entry(waiting.key, b'', 5, dropped=len(whole.value))}, Backlog())
    assert first.parsed == {waiting.key: InvalidEntry(5)}
    second = backlog_of({waiting.key: whole}, first)
    assert second.parsed == second.places == {waiting.key: Place(5, waiting)}


def test_a_compute_under_a_flood(cluster: Control) -> None:
    """Its own requests are carried out; each large one is refused for its size, each junk key named once."""
    compute = cluster.ecompute('VCPU:8,DISK_GB:10,MEMORY_MB:1024')
    _, instance = notified(cluster.eschedule(QUERY))
    addressed(cluster, instance)
    large, junk = [str(uuid.uuid4()) for _ in range(3)], [f'junk{number}' for number in range(8)]
    for name in (*large, *junk):
        cluster.etcd.put(f'/hosts/{compute.uuid}/{name}', 'x' * BIG)
    for name in large:
        found = reached(cluster, name, 'error')
        assert found['error']['reason'] == f'the request has {BIG} bytes; the limit is {SIZE_LIMIT}'
    for _ in range(3):
        cluster.etcd.put(f'/hosts/{compute.uuid}/junk0', 'y' * BIG)
    _, other = notified(cluster.eschedule(QUERY))
    addressed(cluster, other)
    assert set(guests(compute)) == {instance, other}
    for name in junk:
        logs(compute, f'{name} has {BIG} bytes')
        assert len(logged(compute, f"'{name}' is not a uuid")) + len(logged(compute, f'/{name}: ')) <= 2
        assert len(logged(compute, f'/{name} has {BIG} bytes')) == 1
    for name in junk:
        cluster.etcd.delete(f'/hosts/{compute.uuid}/{name}')
    cluster.etcd.compact()
