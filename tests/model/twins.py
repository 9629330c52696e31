"""Calls of etcd by chance, made of a real one and of the model.

A number is told in both by what it was the answer to: revisions and leases of two etcds differ, and mean the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ecomp.store.client import Delete, Entry, Exists, Put, Snapshot, Store, Unchanged
from tests.model.alike import Ask, answer, differ
from tests.model.etcd import ModelStore


@dataclass
class Twins:
    """A real store and the model's, and what numbers of the one are in the other: a call is made of (real, model)."""

    real: Store
    model: ModelStore
    prefix: str
    rng: random.Random
    revisions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    leases: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    calls: list[str] = field(default_factory=list)

    def key(self) -> str:
        return self.prefix + self.rng.choice(['a', 'a/1', 'ab', 'b', 'c'])

    def step(self) -> None:
        reads = [self.read, self.list_, self.list_, self.count, self.around]
        ask = self.rng.choice([*reads, *[self.commit] * 4, self.grant, self.end])
        ask()

    def same(self, what: str, real: Ask, model: Ask) -> tuple[object, object]:
        """Ask both; AssertionError where the answers do not mean the same."""
        self.calls.append(what)
        both = answer(real, self.real), answer(model, self.model)
        if isinstance(both[0], int) and isinstance(both[1], int) and what.startswith('commit'):
            self.revisions.append((both[0], both[1]))
        meant = self.meaning(both[0], 0), self.meaning(both[1], 1)
        assert meant[0] == meant[1], differ(self.calls, *meant)
        return both

    def meaning(self, found: object, which: int) -> object:
        """The answer, with numbers that are the same in both."""
        if isinstance(found, Entry):
            revision = [each[which] for each in self.revisions].index(found.revision)
            lease = [each[which] for each in self.leases].index(found.lease)
            return found.key, found.value, revision, lease
        if isinstance(found, list):
            return [self.meaning(each, which) for each in found]
        if isinstance(found, Snapshot):
            return [self.meaning(each, which) for each in found.entries.values()]
        return 'a number' if isinstance(found, int) else found

    def read(self) -> None:
        key = self.key()
        self.same(f'get {key}', lambda store: store.get(key), lambda store: store.get(key))

    def list_(self) -> None:
        prefix, keys_only = self.rng.choice([self.prefix, self.prefix + 'a']), self.rng.random() < 0.3

        def ask(store: Store) -> Snapshot:
            return store.snapshot(prefix, keys_only)

        self.same(f'list {prefix}', ask, ask)

    def around(self) -> None:
        start, limit = self.key() + self.rng.choice(['', '0']), self.rng.randint(1, 6)

        def ask(store: Store) -> list[object]:
            entries, number = store.around(self.prefix, start, limit)
            return [*entries, str(number)]

        self.same(f'around {start}, {limit}', ask, ask)

    def count(self) -> None:
        self.calls.append('count')
        real, model = self.real.count(self.prefix), self.model.count(self.prefix)
        assert real == model, differ(self.calls, real, model)

    def commit(self) -> None:
        """A transaction, of which a condition may not hold, a lease be gone, or a key be there twice."""
        pairs = [self.condition() for _ in range(self.rng.randint(0, 2))]
        operations = [self.operation() for _ in range(self.rng.randint(1, 3))]
        what = f'commit if {pairs}: {operations}'
        asks = [
            lambda store, which=which: store.commit(
                [each[which] for each in pairs], [each[which] for each in operations]
            )
            for which in (0, 1)
        ]
        self.same(what, *asks)

    def condition(self) -> tuple[Unchanged | Exists, Unchanged | Exists]:
        """Mostly one that holds."""
        key = self.key()
        if self.rng.random() < 0.2:
            return Exists(key), Exists(key)
        entry = self.model.get(key)
        now = [each[1] for each in self.revisions].index(entry.revision if entry else 0)
        real, model = self.revisions[now] if self.rng.random() < 0.8 else self.rng.choice(self.revisions)
        return Unchanged(key, real), Unchanged(key, model)

    def operation(self) -> tuple[Put | Delete, Put | Delete]:
        key = self.key()
        if self.rng.random() < 0.3:
            return Delete(key), Delete(key)
        real, model = self.rng.choice([(0, 0), self.rng.choice(self.leases)])
        value = str(self.rng.randint(0, 9))
        return Put(key, value, real), Put(key, value, model)

    def grant(self) -> None:
        self.leases.append((self.real.grant(600), self.model.grant(600)))
        self.calls.append(f'grant: {self.leases[-1]}')

    def end(self) -> None:
        """One of the leases ends; one that has ended is fine, and is not kept."""
        both = self.rng.choice(self.leases[1:] or [(0, 0)])
        if not both[0]:
            return
        asks = [lambda store, lease=each: store.revoke(lease) for each in both]
        self.same(f'revoke {both}', *asks)
        self.calls.append('keep alive')
        assert self.real.keep_alive(both[0]) == self.model.keep_alive(both[1]) == 0
