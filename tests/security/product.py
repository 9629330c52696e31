"""ecompute and eschedule as users run them, each with its own certificate and role in etcd."""

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

SCHEDULER = 'scheduler-shell'
OPERATOR = 'operator-ann'
# Log lines that must not appear when a process writes its own keys.
WRONG = re.compile('denied|refuses|does not let|Traceback')


class Held(Ecompute):
    """`ecompute --fake` with the certificate of a user; an operator checks its presence."""

    def __init__(self, cloud: BehindRoles, user: str, placement: PlacementServer, inventory: str) -> None:
        directory = cloud.certs.parent / user
        super().__init__(cloud.etcd.endpoint, placement.url, inventory, directory, uuid=cloud.computes[user])
        settings = {'uuid': self.uuid, 'state': str(directory / 'state'), 'queues': True}
        self.config = cloud.configured(user, placement.url, **settings)
        self._operator = cloud.stores[OPERATOR]

    def is_ready(self) -> bool:
        """True if its presence exists and this process has logged that it is ready."""
        has_presence = self._operator.get(f'/computes/{self.uuid}') is not None
        return has_presence and f' {self.pid} ready: ' in self.last_words(1000)


class Product:
    """A cluster of two computes with roles; `computes` are by user."""

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
        """Add a compute: its certificate, its role and its ecompute."""
        certify(self.cloud.certs, self.cloud.etcd.port, (name,))
        config = (self.cloud.certs / f'compute-{name}/compute.yaml').read_text()
        self.cloud.computes[f'compute-{name}'] = config.rpartition('uuid: ')[2].strip()
        self.cloud.enable()
        return self.compute(f'compute-{name}')

    def asks(self, *words: str, user: str = SCHEDULER) -> Result:
        return eschedule(self.cloud.configured(user, self.placement.url), *words)

    def does(self, *words: str, user: str = SCHEDULER) -> str:
        """Run an eschedule that must succeed for this user, and return its output."""
        result = self.asks(*words, user=user)
        assert result.code == 0, (words, result)
        assert not WRONG.search(result.stderr), (words, result)
        return result.stdout

    def place(self, *words: str) -> tuple[str, str]:
        """Place an instance, wait for its address, and return its compute and its uuid."""
        placed = notified(self.asks(*words))
        until(lambda: self.record(placed[1])['stages'].get('addressed'), SOON, f'{placed[1]} has an address')
        return placed

    def record(self, instance: str) -> dict[str, Any]:
        values = [entry.value for key, entry in self.entries('/instances/').items() if key.endswith(f'/{instance}')]
        return dict(json.loads(values[0])) if values else {'state': '', 'stages': {}}

    def entries(self, prefix: str = '/') -> Mapping[str, Entry]:
        return self.operator.snapshot(prefix).entries

    def kept(self) -> Mapping[str, bytes]:
        """Return all of etcd without the hints of computes, which follow earlier requests."""
        values = {key: entry.value for key, entry in self.entries().items()}
        return {key: without_room(value) if key.startswith('/computes/') else value for key, value in values.items()}

    def reached(self, instance: str, state: str) -> None:
        until(lambda: self.record(instance)['state'] == state, SOON, f'{instance} is {state}')

    def audit(self, user: str = SCHEDULER) -> list[tuple[str, str]]:
        result = self.asks('audit', '-f', 'json', user=user)
        assert result.code in (0, 8), result
        return [(finding['code'], finding['subject']) for finding in json.loads(result.stdout)]

    def is_well(self) -> None:
        """Assert that nothing was refused to its owner, and that the planes agree."""
        for compute in self._started:
            wrong_lines = [line for line in log_of(compute) if WRONG.search(line)]
            assert wrong_lines == [], wrong_lines
        until(lambda: self.audit() == [], SOON, 'the audit finds nothing')
        leftover_keys = [key for key in self.entries() if key.startswith(('/audit/', '/digests/', '/requests/'))]
        assert leftover_keys == [], leftover_keys


@contextmanager
def product(directory: Path, placement: PlacementServer) -> Iterator[Product]:
    """Start a cluster of two computes with roles."""
    with ExitStack() as at_exit:
        yield Product(directory, placement, at_exit)
