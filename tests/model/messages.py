"""Random messages, sent both to a real member of etcd and to the one in memory.

Revisions and leases differ between the two: numbers are equal if both were returned for the same message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ecomp.store.client import get_prefix_range_end
from ecomp.store.messages import (
    EVENT_DELETE,
    CallFailure,
    Delete,
    Exists,
    Grant,
    KeepAlive,
    Put,
    Range,
    Request,
    Revoke,
    TimeToLive,
    Touch,
    Transaction,
    Unchanged,
    WatchCreate,
)
from tests.model.alike import format_difference

NAMES = ('a', 'a/1', 'ab', 'b', 'c', 'd\xff', 'd')
# A revision that no etcd of the tests reaches, and a lease that none granted.
FUTURE_REVISION = 10**12
UNKNOWN_LEASE = 10**12
MAX_SHOWN_CHARACTERS = 400
Numbers = list[tuple[int, int]]


@dataclass
class MemberPair:
    real: Any
    memory: Any
    prefix: bytes
    rng: random.Random
    revisions: Numbers = field(default_factory=list)
    leases: Numbers = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.put()

    def step(self) -> None:
        reads = [self.read_key, self.read_range, self.read_range, self.read_lease]
        self.rng.choice([*reads, self.put, *[self.change] * 3, self.rewrite, self.grant, self.renew, self.revoke])()

    def send(self, *requests: Request) -> tuple[Any, Any]:
        """Send the real member the first request and the one in memory the last, and compare."""
        self.messages.append(repr(requests[0])[:MAX_SHOWN_CHARACTERS])
        answers = tuple(
            get_answer(member, request) for member, request in ((self.real, requests[0]), (self.memory, requests[-1]))
        )
        described = [self.describe(answer, which) for which, answer in enumerate(answers)]
        assert described[0] == described[1], format_difference(self.messages, *described)
        return answers  # type: ignore[return-value]

    def send_pair(self, make: Callable[[int], Request]) -> tuple[Any, Any]:
        return self.send(make(0), make(1))

    def describe(self, answer: Any, which: int) -> object:
        """Return what an answer says, with numbers that are comparable."""
        if isinstance(answer, CallFailure):
            return answer.code, answer.details
        described: list[object] = [type(answer.header.raft_term)]
        for name in ('succeeded', 'count', 'more', 'TTL', 'grantedTTL'):
            described.append(getattr(answer, name, None))
        for response in getattr(answer, 'responses', ()):
            described.append([self.describe_kv(kv, which) for kv in response.response_range.kvs])
        described.append([self.describe_kv(kv, which) for kv in getattr(answer, 'kvs', ())])
        return described

    def describe_kv(self, kv: Any, which: int) -> object:
        created, changed = (
            self.get_index(self.revisions, number, which) for number in (kv.create_revision, kv.mod_revision)
        )
        return kv.key, kv.value, created, changed, self.get_index(self.leases, kv.lease, which)

    def get_index(self, numbers: Numbers, number: int, which: int) -> int:
        known = [pair[which] for pair in [(0, 0), *numbers]]
        assert number in known, format_difference([*self.messages, f'{number} is unknown'], known, which)
        return known.index(number)

    def pick_key(self) -> str:
        return self.prefix.decode() + self.rng.choice(NAMES)

    def pick_revision(self) -> tuple[int, int]:
        return self.rng.choice([(0, 0), *self.revisions[-20:]])

    def pick_lease(self) -> tuple[int, int]:
        return self.rng.choice([(UNKNOWN_LEASE, UNKNOWN_LEASE), *self.leases])

    def read_key(self) -> None:
        self.send(Range(self.pick_key().encode()))

    def read_range(self) -> None:
        self.send_pair(self.make_range())

    def make_range(self) -> Callable[[int], Range]:
        start, end = self.rng.choice(
            [
                (self.prefix, get_prefix_range_end(self.prefix)),
                (self.prefix + b'a', get_prefix_range_end(self.prefix + b'a')),
                (self.pick_key().encode(), get_prefix_range_end(self.prefix)),
                (self.prefix + b'a/1', self.prefix + b'c'),
            ]
        )
        limit, revision = self.rng.choice([0, 0, 1, 2, 3]), (0, 0)
        if self.rng.random() < 0.3:
            revision = self.rng.choice([(FUTURE_REVISION, FUTURE_REVISION), *self.revisions[-10:]])
        since = self.pick_revision() if self.rng.random() < 0.2 else (0, 0)
        kind = self.rng.choice(['', '', 'keys', 'count'])
        return lambda which: Range(start, end, limit, revision[which], kind == 'keys', kind == 'count', since[which])

    def put(self) -> None:
        # Several keys may be on the newest lease, and end with it.
        key, value, lease = self.pick_key(), str(self.rng.randint(0, 9)), [(0, 0), *self.leases][-1]
        self.commit(lambda which: Transaction(success=[Put(key, value, lease[which])]))

    def rewrite(self) -> None:
        """Write a key as it is, which may not exist."""
        kvs = self.memory.call(Range(self.prefix, get_prefix_range_end(self.prefix))).kvs
        rewrite = Touch(self.rng.choice([kv.key.decode() for kv in kvs if kv.lease] or [self.pick_key()]))
        self.commit(lambda _: Transaction(success=[rewrite]))

    def change(self) -> None:
        """Send a transaction whose conditions may not hold, and which etcd may refuse."""
        comparisons = [self.make_comparison() for _ in range(self.rng.randint(0, 2))]
        success = self.make_operations(self.rng.choice([0, 1, 1, 2, 3, 3, 129]))
        failure = self.make_operations(self.rng.choice([0, 0, 1]))
        self.commit(
            lambda which: Transaction(
                [make(which) for make in comparisons],
                [make(which) for make in success],
                [make(which) for make in failure],
            )
        )

    def commit(self, make: Callable[[int], Transaction | Revoke]) -> None:
        """Send what may change keys. Both servers must have a new revision, or none of them."""
        before = self.read_revisions()
        self.send_pair(make)
        after = self.read_revisions()
        new = [number - old for number, old in zip(after, before, strict=True)]
        assert new[0] == new[1], format_difference([*self.messages, 'new revisions'], *new)
        if new[0]:
            self.revisions.append(after)

    def read_revisions(self) -> tuple[int, int]:
        real, memory = (member.call(Range(self.prefix), 10.0).header.revision for member in (self.real, self.memory))
        return real, memory

    def make_comparison(self) -> Callable[[int], Unchanged | Exists]:
        key = self.pick_key()
        if self.rng.random() < 0.3:
            return lambda _: Exists(key)
        found = [kv.mod_revision for kv in self.memory.call(Range(key.encode())).kvs] or [0]
        current = next(pair for pair in [(0, 0), *self.revisions] if pair[1] == found[0])
        revision = current if self.rng.random() < 0.8 else self.pick_revision()
        return lambda which: Unchanged(key, revision[which])

    def make_operations(self, number: int) -> list[Callable[[int], Range | Put | Delete]]:
        # No request of ecomp has both in one branch.
        if self.rng.random() < 0.2:
            return [self.make_range() for _ in range(number)]
        return [self.make_write() for _ in range(number)]

    def make_write(self) -> Callable[[int], Put | Delete]:
        key = self.pick_key()
        if self.rng.random() < 0.3:
            return lambda _: Delete(key)
        value = str(self.rng.randint(0, 9))
        lease = self.pick_lease() if self.rng.random() < 0.3 else (0, 0)
        return lambda which: Put(key, value, lease[which])

    def grant(self) -> None:
        seconds = self.rng.randint(9000, 9999)  # longer than the test takes on a busy machine
        answers = self.send(Grant(seconds))
        self.leases.append((answers[0].ID, answers[1].ID))

    def renew(self) -> None:
        lease = self.pick_lease()
        self.send_pair(lambda which: KeepAlive(lease[which]))

    def revoke(self) -> None:
        lease = self.pick_lease()
        self.commit(lambda which: Revoke(lease[which]))

    def read_lease(self) -> None:
        # The lease was just renewed, so both have its whole time.
        lease = self.pick_lease()
        self.send_pair(lambda which: KeepAlive(lease[which]))
        answers = [get_answer(each, TimeToLive(lease[which])) for which, each in enumerate((self.real, self.memory))]
        described = [(answer.TTL >= 0, answer.grantedTTL) for answer in answers]
        assert described[0] == described[1], format_difference([*self.messages, 'time to live'], *described)

    def compare_watches(self) -> None:
        last, end = Put(f'{self.prefix.decode()}last', ''), get_prefix_range_end(self.prefix)
        self.commit(lambda _: Transaction(success=[last]))
        reported: list[list[object]] = [[], []]
        for which, member in enumerate((self.real, self.memory)):
            request = WatchCreate(self.prefix, end, self.revisions[0][which], with_previous=True)
            stream = member.watch([request], 60.0)
            for answer in stream:
                reported[which] += [self.describe_event(event, which) for event in answer.events]
                if any(event.kv.key == last.key.encode() for event in answer.events):
                    break
            stream.cancel()
        assert reported[0] == reported[1], format_difference([*self.messages, 'watch'], *reported)

    def describe_event(self, event: Any, which: int) -> object:
        changed = self.get_index(self.revisions, event.kv.mod_revision, which)
        if event.type == EVENT_DELETE:
            return 'deleted', event.kv.key, changed, self.describe_kv(event.prev_kv, which)
        return 'put', self.describe_kv(event.kv, which), self.describe_kv(event.prev_kv, which)


def get_answer(member: Any, request: Request) -> Any:
    try:
        return member.call(request, 10.0)
    except CallFailure as failure:
        return failure
