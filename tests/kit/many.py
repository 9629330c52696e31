"""Many fake computes in one process, each with its own presence.

    python -m tests.kit.many CONFIG INVENTORY COUNT LEASE_SECONDS

With `state:` in CONFIG their uuids last, in its subdirectories 1 to COUNT.
"""

from __future__ import annotations

import copy
import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ecomp import log as logs
from ecomp.agent import compute
from ecomp.agent.compute import Compute, now
from ecomp.agent.host import troubles
from ecomp.agent.host.state import Identity, verify_or_adopt
from ecomp.agent.queue import Queues
from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.model import keys
from ecomp.model.cluster import KnownCluster
from ecomp.placement.client import Placement
from ecomp.shared import presence
from ecomp.store.client import Entry, Guard, Store
from ecomp.store.watch import Follower, State, Subscription
from ecomp.virt.fake import Fake
from tests.kit.commands import Control, write_config
from tests.kit.servers import TOP, Server

TOY_INVENTORY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'
# Seconds between periodic checks, which a thousand hosts would make on processors of their own.
CHECK_INTERVAL_SECONDS = 600.0
# Computes that start or stop concurrently.
MAX_CONCURRENT = 16

log = logging.getLogger('ecomp')


class ManyServer(Server):
    name = 'many'

    def __init__(
        self, config: Path, count: int, inventory: str = TOY_INVENTORY, lease_seconds: int = presence.LEASE_SECONDS
    ) -> None:
        super().__init__()
        self._config, self.count, self._inventory, self._lease_seconds = config, count, inventory, lease_seconds

    def command(self) -> list[str]:
        words = str(self._config), self._inventory, str(self.count), str(self._lease_seconds)
        return [sys.executable, '-m', 'tests.kit.many', *words]

    def environment(self) -> dict[str, str]:
        # The directory of this server is removed even if it is killed.
        return {**super().environment(), 'TMPDIR': str(self.directory), 'PYTHONPATH': str(TOP)}

    def is_ready(self) -> bool:
        # The process works on waiting requests at once, so other lines may follow. The pid excludes an earlier process.
        return f' {self.pid} ready computes: {self.count}' in self.log.read_text(errors='replace')


class ManyComputes(ManyServer):
    def __init__(self, cluster: Control, count: int, inventory: str = TOY_INVENTORY, **settings: Any) -> None:
        etcd, placement = cluster.etcd.endpoint, cluster.placement.url
        config = write_config(cluster.directory / 'many.yaml', etcd, placement, **settings)
        super().__init__(config, count, inventory)
        cluster.at_exit.callback(self.close)


class Crowd:
    # All computes follow etcd together, because each watch costs a connection.
    def __init__(self, config: ComputeConfig, count: int, at_exit: ExitStack) -> None:
        self._requests: State = {}
        guard = Guard(KnownCluster(), lambda _: None)
        store, placement = Store(config.etcd, guard), Placement(config.placement)
        at_exit.callback(store.close)
        at_exit.callback(placement.close)
        assert verify_or_adopt(guard, store, now())
        revision = guard.known_cluster.revision
        self._queues = Queues(revision, revision)
        self._end_following = at_exit.enter_context(ExitStack())
        self._computes: dict[str, Compute] = {}
        at_exit.callback(self._stop)

        def make(number: int) -> None:
            own = replace(config, state=config.state / str(number))
            identity, own_store = Identity(own.state), copy.copy(store)
            at_exit.callback(identity.close)
            own_store.fence = None  # that of its own presence (rule: single-owner)
            made = Compute(
                config=own,
                identity=identity,
                store=own_store,
                guard=guard,
                placement=placement,
                queues=self._queues,
                fake=Fake('', None),
                accepts_new_etcd=False,
                is_familiar_etcd=True,
            )
            self._computes[made.uuid] = made
            made.register()
            made.start()

        with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
            list(threads.map(make, range(1, count + 1)))
        subscriptions: list[Subscription] = [(keys.HOSTS, self._on_hosts)]
        if config.queues:
            subscriptions += [(keys.ACCEPTED, self._queues.on_accepted)]
        subscriptions.append((keys.COMPUTES, self._on_computes))
        subscriptions += [(keys.QUEUES, self._on_queues)] if config.queues else []
        follower = Follower(config.etcd, [*subscriptions, (keys.AUDIT, self._on_questions)], guard=guard)
        follower.start()
        self._end_following.callback(follower.stop)

    def _on_hosts(self, state: State) -> None:
        before, self._requests = self._requests, state
        changed = {_get_compute(key) for key in before.keys() ^ state.keys()}
        changed |= {_get_compute(key) for key in before.keys() & state.keys() if before[key] is not state[key]}
        own: dict[str, dict[str, Entry]] = {each: {} for each in (changed if before else self._computes)}
        for key, entry in state.items():
            if (uuid := _get_compute(key)) in own:
                own[uuid][key] = entry
        for uuid, requests in own.items():
            if uuid in self._computes:
                self._computes[uuid].on_requests(requests)

    def _on_computes(self, state: State) -> None:
        self._queues.on_computes(state)
        for each in self._computes.values():
            each.on_computes(state)

    def _on_queues(self, state: State) -> None:
        if self._queues.on_queues(state):
            for each in self._computes.values():
                each.wake_taker('requests are queued')

    def _on_questions(self, state: Mapping[str, Entry]) -> None:
        for each in self._computes.values():
            each.upkeep.on_questions(state)

    def _stop(self) -> None:
        with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
            list(threads.map(Compute.stop, self._computes.values()))


def _get_compute(key: str) -> str:
    return key.removeprefix(keys.HOSTS).partition('/')[0]


def main() -> None:
    logs.configure()
    for name in ('ecomp.compute', 'ecomp.agent.compute', 'ecomp.agent.host.provider'):
        logging.getLogger(name).setLevel(logging.WARNING)
    path, inventory, count, lease_seconds = sys.argv[1:]
    config = replace(load_compute(Path(path)), inventory=parse_inventory(inventory), networks=ComputeConfig.networks)
    presence.LEASE_SECONDS = int(lease_seconds)
    compute.PLAN_INTERVAL_SECONDS = troubles.CHECK_INTERVAL_SECONDS = CHECK_INTERVAL_SECONDS
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with ExitStack() as at_exit:
        if config.state == ComputeConfig().state:
            directory = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='many-'))
            config = replace(config, state=Path(directory))
        Crowd(config, int(count), at_exit)
        log.info('ready computes: %s', count)
        ended.wait()


if __name__ == '__main__':
    main()
