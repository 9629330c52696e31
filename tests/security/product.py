"""ecompute and eschedule as users run them, each with its own certificate and role in etcd."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ecomp.store.client import Entry, Store
from tests.kit.behind_roles import EtcdWithRoles
from tests.kit.commands import Ecompute, Result, run_eschedule_process
from tests.kit.hands import LARGE_INVENTORY
from tests.kit.secured import certify
from tests.kit.servers import PlacementServer, wait_until
from tests.kit.story import REACTION_SECONDS, parse_notice, read_log

SCHEDULER = 'scheduler-shell'
OPERATOR = 'operator-ann'
# Log lines that must not appear when a process writes its own keys.
WRONG_LOG_PATTERN = re.compile('denied|refuses|does not let|Traceback')


class RoleEcompute(Ecompute):
    """`ecompute --fake` with the certificate of a user, whose presence an operator checks."""

    def __init__(self, cloud: EtcdWithRoles, user: str, placement: PlacementServer, inventory: str) -> None:
        directory = cloud.certs.parent / user
        super().__init__(cloud.etcd.endpoint, placement.url, inventory, directory, uuid=cloud.computes[user])
        settings = {'uuid': self.uuid, 'state': str(directory / 'state'), 'queues': True}
        self.config = cloud.write_config(user, placement.url, **settings)
        self._operator = cloud.stores[OPERATOR]

    def is_ready(self) -> bool:
        has_presence = self._operator.get(f'/computes/{self.uuid}') is not None
        return has_presence and f' {self.pid} ready: ' in self.tail_log(1000)


class Product:
    """A cluster of two computes with roles, whose `computes` are by user."""

    def __init__(self, directory: Path, placement: PlacementServer, at_exit: ExitStack) -> None:
        self.cloud, self.placement, self._at_exit = EtcdWithRoles(directory, at_exit), placement, at_exit
        self.cloud.enable()
        self._started: list[RoleEcompute] = []
        self.computes = {user: self.start_compute(user) for user in ('compute-hv1', 'compute-hv2')}

    @property
    def operator(self) -> Store:
        return self.cloud.stores[OPERATOR]

    def start_compute(self, user: str) -> RoleEcompute:
        self._started.append(RoleEcompute(self.cloud, user, self.placement, LARGE_INVENTORY))
        return self._at_exit.enter_context(self._started[-1])

    def add_compute(self, name: str) -> RoleEcompute:
        certify(self.cloud.certs, self.cloud.etcd.port, (name,))
        config = (self.cloud.certs / f'compute-{name}/compute.yaml').read_text()
        self.cloud.computes[f'compute-{name}'] = config.rpartition('uuid: ')[2].strip()
        self.cloud.enable()
        return self.start_compute(f'compute-{name}')

    def run_eschedule(self, *words: str, user: str = SCHEDULER) -> Result:
        return run_eschedule_process(self.cloud.write_config(user, self.placement.url), *words)

    def run_successfully(self, *words: str, user: str = SCHEDULER) -> str:
        result = self.run_eschedule(*words, user=user)
        assert result.code == 0, (words, result)
        assert not WRONG_LOG_PATTERN.search(result.stderr), (words, result)
        return result.stdout

    def place(self, *words: str) -> tuple[str, str]:
        placed = parse_notice(self.run_eschedule(*words))
        wait_until(
            lambda: self.read_record(placed[1])['stages'].get('addressed'),
            REACTION_SECONDS,
            f'{placed[1]} has an address',
        )
        return placed

    def read_record(self, instance: str) -> dict[str, Any]:
        values = [each.value for key, each in self.read_entries('/instances/').items() if key.endswith(f'/{instance}')]
        return dict(json.loads(values[0])) if values else {'state': '', 'stages': {}}

    def read_entries(self, prefix: str = '/') -> Mapping[str, Entry]:
        return self.operator.snapshot(prefix).entries

    def read_lasting_values(self) -> Mapping[str, bytes]:
        """Return all of etcd without the hints of computes, which follow earlier requests."""
        values = {key: entry.value for key, entry in self.read_entries().items()}
        return {key: value for key, value in values.items() if not key.startswith(('/facts/', '/findings/'))}

    def wait_state(self, instance: str, state: str) -> None:
        wait_until(lambda: self.read_record(instance)['state'] == state, REACTION_SECONDS, f'{instance} is {state}')

    def list_findings(self, user: str = SCHEDULER) -> list[tuple[str, str]]:
        result = self.run_eschedule('check', '--now', '-f', 'json', user=user)
        assert result.code in (0, 8), result
        findings = [each for each in json.loads(result.stdout) if each['code'] != 'etcd-version']
        return [(finding['code'], finding['subject']) for finding in findings]

    def assert_well(self) -> None:
        """Assert that nothing was refused to its owner, and that the planes agree."""
        for compute in self._started:
            wrong_lines = [line for line in read_log(compute) if WRONG_LOG_PATTERN.search(line)]
            assert wrong_lines == [], wrong_lines
        wait_until(lambda: self.list_findings() == [], REACTION_SECONDS, 'the audit finds nothing')
        leftover_keys = [key for key in self.read_entries() if key.startswith(('/audit/', '/usage/', '/requests/'))]
        assert leftover_keys == [], leftover_keys


@contextmanager
def start_product(directory: Path, placement: PlacementServer) -> Iterator[Product]:
    with ExitStack() as at_exit:
        yield Product(directory, placement, at_exit)
