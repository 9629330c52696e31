"""Random calls, made both to a real etcd and to the model.

The two have different revisions and leases. Numbers are equal if both were returned by the same call.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ecomp.store.client import Delete, Entry, Exists, Put, Snapshot, Store, Unchanged
from tests.model.alike import Query, format_difference, get_answer
from tests.model.etcd import ModelStore


@dataclass
class StorePair:
    """A real store and the model, which get the same calls, and the pairs of their numbers."""

    real: Store
    model: ModelStore
    prefix: str
    rng: random.Random
    revisions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    leases: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    calls: list[str] = field(default_factory=list)

    def pick_key(self) -> str:
        return self.prefix + self.rng.choice(['a', 'a/1', 'ab', 'b', 'c'])

    def step(self) -> None:
        reads = [self.read, self.list_, self.list_, self.count, self.around]
        ask = self.rng.choice([*reads, *[self.commit] * 4, self.grant, self.revoke])
        ask()

    def compare(self, description: str, real: Query, model: Query) -> tuple[object, object]:
        """Make a call to both; AssertionError if the answers have different meanings."""
        self.calls.append(description)
        answers = get_answer(real, self.real), get_answer(model, self.model)
        if isinstance(answers[0], int) and isinstance(answers[1], int) and description.startswith('commit'):
            self.revisions.append((answers[0], answers[1]))
        meanings = self.normalize(answers[0], 0), self.normalize(answers[1], 1)
        assert meanings[0] == meanings[1], format_difference(self.calls, *meanings)
        return answers

    def normalize(self, answer: object, which: int) -> object:
        """Return the answer with its numbers replaced by ones that are equal in both."""
        if isinstance(answer, Entry):
            revision = [pair[which] for pair in self.revisions].index(answer.revision)
            lease = [pair[which] for pair in self.leases].index(answer.lease)
            return answer.key, answer.value, revision, lease
        if isinstance(answer, list):
            return [self.normalize(item, which) for item in answer]
        if isinstance(answer, Snapshot):
            return [self.normalize(entry, which) for entry in answer.entries.values()]
        return 'a number' if isinstance(answer, int) else answer

    def read(self) -> None:
        key = self.pick_key()
        self.compare(f'get {key}', lambda store: store.get(key), lambda store: store.get(key))

    def list_(self) -> None:
        prefix, keys_only = self.rng.choice([self.prefix, self.prefix + 'a']), self.rng.random() < 0.3

        def ask(store: Store) -> Snapshot:
            return store.snapshot(prefix, keys_only)

        self.compare(f'list {prefix}', ask, ask)

    def around(self) -> None:
        start, limit = self.pick_key() + self.rng.choice(['', '0']), self.rng.randint(1, 6)

        def ask(store: Store) -> list[object]:
            entries, number = store.sample(self.prefix, start, limit)
            return [*entries, str(number)]

        self.compare(f'around {start}, {limit}', ask, ask)

    def count(self) -> None:
        self.calls.append('count')
        real, model = self.real.count(self.prefix), self.model.count(self.prefix)
        assert real == model, format_difference(self.calls, real, model)

    def commit(self) -> None:
        """Commit a random transaction: a condition may fail, a lease may be missing."""
        pairs = [self.make_condition() for _ in range(self.rng.randint(0, 2))]
        operations = [self.make_operation() for _ in range(self.rng.randint(1, 3))]
        description = f'commit if {pairs}: {operations}'
        asks = [
            lambda store, which=which: store.commit(
                [pair[which] for pair in pairs], [pair[which] for pair in operations]
            )
            for which in (0, 1)
        ]
        self.compare(description, *asks)

    def make_condition(self) -> tuple[Unchanged | Exists, Unchanged | Exists]:
        """Return a pair of conditions that mostly holds."""
        key = self.pick_key()
        if self.rng.random() < 0.2:
            return Exists(key), Exists(key)
        entry = self.model.get(key)
        index = [pair[1] for pair in self.revisions].index(entry.revision if entry else 0)
        real, model = self.revisions[index] if self.rng.random() < 0.8 else self.rng.choice(self.revisions)
        return Unchanged(key, real), Unchanged(key, model)

    def make_operation(self) -> tuple[Put | Delete, Put | Delete]:
        key = self.pick_key()
        if self.rng.random() < 0.3:
            return Delete(key), Delete(key)
        real, model = self.rng.choice([(0, 0), self.rng.choice(self.leases)])
        value = str(self.rng.randint(0, 9))
        return Put(key, value, real), Put(key, value, model)

    def grant(self) -> None:
        self.leases.append((self.real.grant(600), self.model.grant(600)))
        self.calls.append(f'grant: {self.leases[-1]}')

    def revoke(self) -> None:
        """Revoke a lease, which may have expired already, and check that it cannot be renewed."""
        leases = self.rng.choice(self.leases[1:] or [(0, 0)])
        if not leases[0]:
            return
        asks = [lambda store, lease=number: store.revoke(lease) for number in leases]
        self.compare(f'revoke {leases}', *asks)
        self.calls.append('keep alive')
        assert self.real.keep_alive(leases[0]) == self.model.keep_alive(leases[1]) == 0
