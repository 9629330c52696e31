"""ecompute and eschedule as they are run, each with its own certificate, behind an etcd that holds it to its role."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ecomp.store.client import Entry, Store
from tests.kit.behind_roles import BehindRoles
from tests.kit.commands import Ecompute, Result, eschedule
from tests.kit.hands import BIG
from tests.kit.invariants import without_room
from tests.kit.secured import certify
from tests.kit.servers import PlacementServer, until
from tests.kit.story import SOON, log_of, notified

SCHEDULER, OPERATOR = 'scheduler-shell', 'operator-ann'
WRONG = re.compile('denied|refuses|does not let|Traceback')
"""What nobody's log says of what is its own to do."""


class Held(Ecompute):
    """`ecompute --fake` with the certificate of a user; an operator looks whether it is there."""

    def __init__(self, cloud: BehindRoles, user: str, placement: PlacementServer, inventory: str) -> None:
        directory = cloud.certs.parent / user
        super().__init__(cloud.etcd.endpoint, placement.url, inventory, directory, uuid=cloud.computes[user])
        settings = {'uuid': self.uuid, 'state': str(directory / 'state'), 'queues': True}
        self.config = cloud.configured(user, placement.url, **settings)
        self._operator = cloud.stores[OPERATOR]

    def is_ready(self) -> bool:
        """Its key is there, and its log says that this very process put it."""
        there = self._operator.get(f'/computes/{self.uuid}') is not None
        return there and f' {self.pid} ready: ' in self.last_words(1000)


class Product:
    """A cluster of two computes behind roles, with the flavor small; `computes` by their users."""

    def __init__(self, directory: Path, placement: PlacementServer, at_exit: ExitStack) -> None:
        self.cloud, self.placement, self._at_exit = BehindRoles(directory, at_exit), placement, at_exit
        self.cloud.enable()
        self._started: list[Held] = []
        self.computes = {user: self.compute(user) for user in ('compute-hv1', 'compute-hv2')}

    @property
    def operator(self) -> Store:
        return self.cloud.stores[OPERATOR]

    def compute(self, user: str) -> Held:
        self._started.append(Held(self.cloud, user, self.placement, BIG))
        return self._at_exit.enter_context(self._started[-1])

    def another(self, name: str) -> Held:
        """One more compute: its certificate, its role and its ecompute."""
        certify(self.cloud.certs, self.cloud.etcd.port, (name,))
        config = (self.cloud.certs / f'compute-{name}/compute.yaml').read_text()
        self.cloud.computes[f'compute-{name}'] = config.rpartition('uuid: ')[2].strip()
        self.cloud.enable()
        return self.compute(f'compute-{name}')

    def asks(self, *words: str, user: str = SCHEDULER) -> Result:
        return eschedule(self.cloud.configured(user, self.placement.url), *words)

    def does(self, *words: str, user: str = SCHEDULER) -> str:
        """The same, which is this user's to do; what it prints."""
        done = self.asks(*words, user=user)
        assert done.code == 0, (words, done)
        assert not WRONG.search(done.stderr), (words, done)
        return done.stdout

    def place(self, *words: str) -> tuple[str, str]:
        """A new instance that has its address: its compute and its uuid."""
        placed = notified(self.asks(*words))
        until(lambda: self.record(placed[1])['stages'].get('addressed'), SOON, f'{placed[1]} has an address')
        return placed

    def record(self, instance: str) -> dict[str, Any]:
        found = [each.value for key, each in self.entries('/instances/').items() if key.endswith(f'/{instance}')]
        return dict(json.loads(found[0])) if found else {'state': '', 'stages': {}}

    def entries(self, prefix: str = '/') -> Mapping[str, Entry]:
        return self.operator.snapshot(prefix).entries

    def kept(self) -> Mapping[str, bytes]:
        """All that is in etcd, but for the room that computes hint: it follows what they were asked for before."""
        values = {key: each.value for key, each in self.entries().items()}
        return {key: without_room(value) if key.startswith('/computes/') else value for key, value in values.items()}

    def reached(self, instance: str, state: str) -> None:
        until(lambda: self.record(instance)['state'] == state, SOON, f'{instance} is {state}')

    def audit(self, user: str = SCHEDULER) -> list[tuple[str, str]]:
        done = self.asks('audit', '-f', 'json', user=user)
        assert done.code in (0, 8), done
        return [(each['code'], each['subject']) for each in json.loads(done.stdout)]

    def is_well(self) -> None:
        """Nobody was refused what is its own, and the planes agree."""
        for each in self._started:
            wrong = [line for line in log_of(each) if WRONG.search(line)]
            assert wrong == [], wrong
        until(lambda: self.audit() == [], SOON, 'the audit finds nothing')
        left = [key for key in self.entries() if key.startswith(('/audit/', '/digests/', '/requests/'))]
        assert left == [], left


@contextmanager
def product(directory: Path, placement: PlacementServer) -> Iterator[Product]:
    """One in which the flavor small is."""
    with ExitStack() as at_exit:
        yield Product(directory, placement, at_exit)
