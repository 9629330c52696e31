"""What a transaction's keys prove without an answer, and how a delivery is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from ecomp.errors import Conflict, UnknownOutcome, Unreachable
from ecomp.model import keys
from ecomp.model.order import Request
from ecomp.model.stored import encode
from ecomp.shared.ends import find_delivery
from ecomp.shared.names import Change, commit_with_shared
from ecomp.shared.notes import note_released, read_highest_released
from ecomp.store import client
from ecomp.store.client import Delete, Entry, Evidence, Fence, Put, Settlement, Store, Touch, Unchanged, find_evidence
from tests.kit.memory_etcd import Etcd, MemoryMember, NoWorld

# The transaction of a delivery: it ends the attempt at revision 5, and takes a name that is free.
CONDITIONS = [Unchanged('/attempt', 5), Unchanged('/record', 0), Unchanged('/name', 0), client.Exists('/flavor')]
OPERATIONS = [Delete('/attempt'), Put('/request', 'r'), Put('/name', 'n', 7)]
REQUEST, NAME = Entry('/request', b'r', 9), Entry('/name', b'n', 9, 7)
ATTEMPT = Entry('/attempt', b'a', 5)
NOTHING = Evidence(0, is_refuted=False, can_land=False, has_changed=True)


def find(*entries: Entry) -> Evidence:
    return find_evidence(CONDITIONS, OPERATIONS, {entry.key: entry for entry in entries})


def test_puts_of_one_new_revision_prove_the_commit() -> None:
    assert find(REQUEST, NAME).revision == 9


@pytest.mark.parametrize(
    'entries',
    [
        (REQUEST,), (Entry('/request', b'other', 9), NAME), (REQUEST, Entry('/name', b'n', 9, 8)),
        # Equal values that two other transactions wrote, or one that deleted nothing.
        (REQUEST, Entry('/name', b'n', 8, 7)), (Entry('/attempt', b'a', 6), REQUEST, NAME),
    ],
    ids=['missing', 'other value', 'other lease', 'two revisions', 'nothing deleted'],
)  # fmt: skip
def test_other_entries_prove_nothing(entries: tuple[Entry, ...]) -> None:
    evidence = find(*entries)
    assert not evidence.revision
    assert not evidence.is_refuted


def test_value_that_was_there_before_proves_nothing() -> None:
    conditions, operations = [Unchanged('/key', 5)], [Put('/key', 'same')]
    before = find_evidence(conditions, operations, {'/key': Entry('/key', b'same', 5)})
    assert before == Evidence(0, is_refuted=True, can_land=True, has_changed=False)


def test_compared_key_that_it_would_change_refutes_the_commit() -> None:
    assert find(ATTEMPT) == Evidence(0, is_refuted=True, can_land=True, has_changed=False)


def test_missing_key_does_not_refute_a_commit_as_it_may_have_existed() -> None:
    absent = find_evidence([Unchanged('/name', 0)], [Put('/name', 'n')], {})
    assert absent == Evidence(0, is_refuted=False, can_land=True, has_changed=False)


def test_compared_key_that_has_changed_forbids_a_later_commit() -> None:
    assert find() == NOTHING


def test_deletes_alone_prove_no_commit() -> None:
    assert find_evidence([Unchanged('/key', 5)], [Delete('/key')], {}) == NOTHING


def test_delivery_is_found_by_its_request_or_its_record() -> None:
    request = Request('i', {'c': {}}, replaces='old')
    request_key, record_key = keys.request('c', 'i'), keys.record('c', 'i')
    stopped = Entry(request_key, encode(request).encode(), 11)
    foreign = Entry(request_key, encode(Request('i', {'c': {}})).encode(), 11)
    record = Entry(record_key, b'{}', 12)
    assert find_delivery('c', request, {request_key: stopped}) == 11
    assert find_delivery('c', request, {request_key: foreign, record_key: record}) is None
    assert find_delivery('c', request, {record_key: record}) == 12
    assert find_delivery('c', request, {}) is None


class UnansweredConnection:
    """A connection to an etcd in memory that loses the first write, or its answer."""

    def __init__(self, etcd: Etcd, afterwards: Callable[[], object], arrives: bool = True) -> None:
        self.member = MemoryMember(etcd)
        self.afterwards: Callable[[], object] | None = afterwards
        self.arrives = arrives

    def ask(self, request: Any, error: type[Unreachable], _about: Sequence[str]) -> Any:
        if error is not UnknownOutcome or (afterwards := self.afterwards) is None:
            return self.member.call(request)
        if self.arrives:
            self.member.call(request)
        self.afterwards = None
        afterwards()
        raise UnknownOutcome('no answer', 'etcd')


def make_store(etcd: Etcd, afterwards: Callable[[], object], arrives: bool = True) -> Store:
    store, connection = Store.__new__(Store), cast(Any, UnansweredConnection(etcd, afterwards, arrives))
    store._connection, store._guard, store.fence = connection, None, None
    return store


@pytest.mark.parametrize('settlement', [Settlement(Touch('/request')), Settlement(Delete('/request'))])
def test_key_on_its_own_lease_stays_although_a_shared_key_changed_before_the_read(settlement: Settlement) -> None:
    etcd = Etcd(NoWorld())
    etcd.write([Put('/request', 'r'), Put('/quota', '2')])
    store = make_store(etcd, lambda: etcd.write([Put('/quota', '0')]))
    lease = store.grant(60)

    def make_change() -> Change:
        entry = store.get('/quota')
        return [Unchanged('/quota', entry.revision if entry else 0)], [Put('/quota', '1')]

    operations: list[Put | Delete] = [Put('/record', 'gone', lease), Delete('/request')]
    written = commit_with_shared(store, [Unchanged('/request', 2)], operations, make_change, lease, settlement)

    assert etcd.entries['/record'].lease == lease
    assert written == etcd.entries['/record'].revision


def test_lost_write_is_repeated_if_only_the_fence_was_replaced() -> None:
    etcd = Etcd(NoWorld())
    etcd.write([Put('/presence', 'p'), Put('/record', 'old')])

    def replace_presence() -> None:
        store.fence = Fence(Unchanged('/presence', etcd.write([Put('/presence', 'p')])), lambda: None)

    store = make_store(etcd, replace_presence, arrives=False)
    store.fence = Fence(Unchanged('/presence', 2), lambda: None)

    # A refusal would mean that the instance has changed, which cancels its build.
    assert store.commit([Unchanged('/record', 2)], [Put('/record', 'new')]) == etcd.revision
    assert etcd.entries['/record'].value == b'new'


def test_lost_answer_of_placement_is_followed_by_another_try() -> None:
    outcomes = iter([UnknownOutcome('no answer', 'placement'), None])

    def attempt() -> bool:
        if (error := next(outcomes)) is not None:
            raise error
        return True

    assert client.retry_until_committed(attempt, Conflict('lost'), 3)


def test_note_of_a_release_is_written_again_if_it_was_lost() -> None:
    store, instance = make_store(Etcd(NoWorld()), lambda: None, arrives=False), '00000000-0000-4000-8000-000000000001'
    note_released(store, {instance: 4})
    assert read_highest_released(store, [instance]) == 4
