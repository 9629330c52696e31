"""evacuate: a hundred guests of one dead host among 20 hosts, and among 1,000.

`eschedule evacuate HOST --fenced --yes` with its process start. The computes are keys and providers: nothing is built.
The guests have names and four queries; half of them are in a strict affinity group or a soft anti-affinity group. The
etcd has its default limits. Needs PostgreSQL. Targets: 2 s among 20 hosts, 4 s among 1,000.

    python bench/evacuate.py [ROUNDS] [--quick] [--json]       12 rounds
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.apply import KINDS  # noqa: E402
from bench.comparison import IMAGE  # noqa: E402
from bench.result import arguments, asked, make_result, tell  # noqa: E402
from bench.secured import measure_seconds  # noqa: E402
from bench.singles import FakeCluster  # noqa: E402
from ecomp.conf import EtcdConfig, ScheduleConfig  # noqa: E402
from ecomp.model import keys  # noqa: E402
from ecomp.model.group import Group, Membership  # noqa: E402
from ecomp.model.order import NameOwner, Request, parse_request  # noqa: E402
from ecomp.model.query import parse_query  # noqa: E402
from ecomp.model.stored import encode  # noqa: E402
from ecomp.store.client import Delete, Put, Store  # noqa: E402

GUESTS = 100
TARGET_SECONDS = {20: 2.0, 1000: 4.0}
NOW = '2026-01-01T00:00:00.000Z'


class Bench:
    """A cluster, and one of its computes, which is dead."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.dead = cluster.computes[0]
        self.store = Store(EtcdConfig((cluster.etcd.endpoint,)))
        self.store.commit([], [Delete(keys.compute(self.dead))])
        provider = f'/resource_providers/{self.dead}/inventories'
        inventories = cluster.placement.call('GET', provider)
        for inventory in inventories['inventories'].values():
            inventory['total'] = inventory['max_unit'] = 1_000_000
        cluster.placement.call('PUT', provider, inventories)

    def write_guests(self) -> None:
        """Write the guests of the dead compute, with their claims, names and groups."""
        config, puts, claims = ScheduleConfig(), list[Put](), {}
        members: dict[Membership, dict[str, str]] = {}
        for number in range(GUESTS):
            query, policy = list(KINDS.items())[number % len(KINDS)]
            group = Membership(policy, policy, False) if policy else None
            instance, amounts = str(uuid.uuid4()), {each.name: each.amount for each in parse_query(query)}
            request = Request(
                instance, {self.dead: amounts}, image=IMAGE, query=query, name=f'guest-{number}', group=group,
                stages={'requested': NOW, 'scheduled': NOW}, user_id=config.user_id, project_id=config.project_id,
            )  # fmt: skip
            if group is not None:
                members.setdefault(group, {})[instance] = self.dead
            puts += [Put(keys.request(self.dead, instance), encode(request))]
            puts += [Put(keys.name(f'guest-{number}'), encode(NameOwner(instance)))]
            body = {'allocations': {self.dead: {'resources': amounts}}, 'consumer_generation': None}
            owner = {'user_id': config.user_id, 'project_id': config.project_id, 'consumer_type': 'INSTANCE'}
            claims[instance] = body | owner
        puts += [Put(keys.group(group.name), encode(Group(*group, places))) for group, places in members.items()]
        for start in range(0, len(puts), 100):
            assert self.store.commit([], puts[start : start + 100]) is not None
        self._cluster.placement.call('POST', '/allocations', claims)

    def measure(self) -> float:
        """Return how long an evacuation takes; check that all guests moved, and remove them."""
        self.write_guests()
        seconds = measure_seconds(self.evacuate)
        entries = self.store.snapshot(keys.HOSTS).entries
        parsed = [parse_request(key.split('/')[2], key, entry.value) for key, entry in entries.items()]
        moved = [request for request in parsed if isinstance(request, Request) and request.replaces]
        assert len(moved) == GUESTS, len(moved)
        shared = [key for family in ('/names/', '/groups/') for key in self.store.snapshot(family).entries]
        removed = [*entries, *shared]
        for start in range(0, len(removed), 100):
            assert self.store.commit([], [Delete(key) for key in removed[start : start + 100]]) is not None
        for request in moved:
            for consumer in (request.instance, request.replaces):
                self._cluster.placement.call('DELETE', f'/allocations/{consumer}')
        return seconds

    def evacuate(self) -> None:
        command = [str(Path(sys.executable).with_name('eschedule')), '--config', str(self._cluster.config)]
        words = ['evacuate', self.dead, '--fenced', '--yes', '-f', 'json']
        subprocess.run([*command, *words], check=True, capture_output=True, text=True)


def main() -> None:
    options = asked(arguments(__doc__, 12))
    for size, target in TARGET_SECONDS.items():
        with FakeCluster(size) as cluster:
            bench = Bench(cluster)
            bench.measure()  # reads modules and pages from the disk
            seconds = [bench.measure() for _ in range(options.rounds)]
            tell(make_result('evacuate', f'{GUESTS} guests of 1 of {size} hosts', seconds, target), options.json)
            bench.store.close()


if __name__ == '__main__':
    main()
