"""Guests of a lab's host, made and removed in two ways: by requests to its ecompute, and by bare libvirt-python.

The floor makes the same overlay on the same base volume, and defines and starts the same XML, on one open connection,
with a thread for each guest. Each service that a guest is kept from is a rule of its filter, and some 20 ms of a start.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import Lab

from ecomp.agent.images.connections import reach_of
from ecomp.compute_conf import load_compute
from ecomp.model import keys
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.model.order import Request, to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Put, Store
from ecomp.store.watch import Follower
from ecomp.virt import xml
from ecomp.virt.connection import Connection
from ecomp.virt.libvirt_host import Filters

SHARE = {'VCPU': 1, 'MEMORY_MB': 32, 'DISK_GB': 1}
SECONDS = 120.0


def together(count: int, do: Callable[[int], object]) -> None:
    """Call do(0), do(1) and so on, each in a thread of its own."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(do, range(count)))


class Seen:
    """When things were first seen, in monotonic seconds, each by its name."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._changed = threading.Condition()

    def note(self, names: Iterable[str]) -> None:
        """They are seen now."""
        now = time.monotonic()
        with self._changed:
            for name in names:
                self._times.setdefault(name, now)
            self._changed.notify_all()

    def last(self, names: Sequence[str], what: str) -> float:
        """When the last of these was seen, once all are."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(each in self._times for each in names), SECONDS):
                raise SystemExit(f'not {what} in {SECONDS:g} s: {[each for each in names if each not in self._times]}')
            return max(self._times[each] for each in names)


def prepare(lab: Lab) -> None:
    """What a lab needs before its script runs on its host."""
    lab.add_blank()
    lab.overcommit()


class Bench:
    """Both ways, on the one host of `lab`; `images` is the URL of its image server, which has blank.raw."""

    def __init__(self, lab: Lab, images: str) -> None:
        import libvirt

        self._config = load_compute(lab.compute_yaml)
        self.state = self._config.state
        self.compute = (self.state / 'uuid').read_text().strip()
        self._store, self._placement = Store(self._config.etcd), Placement(self._config.placement)
        self._image = images + 'blank.raw'
        self._started, self._active, self._gone = Seen(), Seen(), Seen()
        self._asked: set[str] = set()
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=self._loop, daemon=True).start()
        self.connection = libvirt.open('qemu:///system')
        self.connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_event, None)
        self._pool = self.connection.storagePoolLookupByName('ecompute')
        self._control = Filters(Connection('qemu:///system'), reach_of(self._config).control).services()
        followed: list[Any] = [(keys.request_prefix(self.compute), self._on_requests)]
        followed.append((keys.record(self.compute, ''), self._on_records))
        self._follower = Follower(self._config.etcd, followed)
        self._follower.start()

    def close(self) -> None:
        """End what follows etcd."""
        self._follower.stop()

    # By requests

    def start(self, count: int) -> tuple[list[str], float]:
        """So many instances asked for in one transaction, and the seconds until the last one's domain runs."""
        instances = [str(uuid.uuid4()) for _ in range(count)]
        for each in instances:
            allocations.claim_once(self._placement, each, {self.compute: SHARE}, 'bench', 'bench')
        puts = [self._put(each, SHARE) for each in instances]
        began = time.monotonic()
        self._store.commit([], puts)
        return instances, self._started.last(instances, 'started') - began

    def settle(self, instances: Sequence[str]) -> None:
        """Return when they are recorded as active."""
        self._active.last(instances, 'active')

    def destroy(self, instances: Sequence[str]) -> float:
        """Seconds from the transaction that asks for their end until the last one's key is gone."""
        self._asked |= set(instances)
        tombstones = [self._put(each, None) for each in instances]
        began = time.monotonic()
        self._store.commit([], tombstones)
        return self._gone.last(instances, 'gone') - began

    def check_gone(self, instances: Sequence[str]) -> None:
        """See that nothing is left of them, and remove their records."""
        domains = {each.UUIDString() for each in self.connection.listAllDomains()}
        for each in instances:
            held = allocations.consumer(self._placement, each).allocations
            left = each in domains or (self.state / f'images/{each}.qcow2').exists() or held
            if left:
                raise SystemExit(f'{each} is not gone: {held}')
        self._store.commit([], [Delete(keys.record(self.compute, each)) for each in instances])

    def _put(self, instance: str, share: Mapping[str, int] | None) -> Put:
        allocations = {self.compute: share} if share else {}
        image = self._image if share else None
        request = Request(instance, allocations, image=image, user_id='bench', project_id='bench')
        return Put(keys.request(self.compute, instance), to_json(request))

    # By libvirt alone

    def start_bare(self, count: int) -> tuple[list[str], float]:
        """The same without ecompute."""
        instances = [str(uuid.uuid4()) for _ in range(count)]
        base = next((self.state / 'images').glob('base-*.raw'))
        image = BaseImage(str(base), 'raw', base.stat().st_size)

        def make(number: int) -> None:
            instance = instances[number]
            disk, console = self._files(instance)
            # Another compute's mark: nothing here is ecompute's business.
            # Any address: what the filter lets pass is not what takes time.
            spec = GuestSpec(instance, 'bench', 1, SHARE['MEMORY_MB'], 1, image, 'qemu', reserved=('10.0.0.1',))
            self._pool.createXML(xml.volume_xml(disk.name, 2**30, image.path, image.format))
            description = xml.domain_xml(spec, str(disk), str(console), control=self._control)
            self.connection.defineXML(description).create()

        began = time.monotonic()
        together(count, make)
        return instances, self._started.last(instances, 'started') - began

    def destroy_bare(self, instances: Sequence[str]) -> float:
        """Domain destroyed and undefined, volume deleted: seconds until that is so of all."""

        def end(number: int) -> None:
            domain = self.connection.lookupByUUIDString(instances[number])
            domain.destroy()
            domain.undefine()
            self._pool.storageVolLookupByName(self._files(instances[number])[0].name).delete()

        began = time.monotonic()
        together(len(instances), end)
        seconds = time.monotonic() - began
        for each in instances:
            self._files(each)[1].unlink(missing_ok=True)
        return seconds

    def _files(self, instance: str) -> tuple[Path, Path]:
        return self.state / f'images/{instance}.qcow2', self.state / f'console/{instance}.log'

    # What is heard

    def _loop(self) -> None:
        import libvirt

        while True:
            libvirt.virEventRunDefaultImpl()

    def _on_event(self, _connection: object, domain: Any, event: int, *_: object) -> None:
        import libvirt

        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            self._started.note([domain.UUIDString()])

    def _on_requests(self, state: Mapping[str, Entry]) -> None:
        there = {keys.last(key) for key in state}
        self._gone.note([each for each in self._asked if each not in there])

    def _on_records(self, state: Mapping[str, Entry]) -> None:
        self._active.note([keys.last(key) for key, entry in state.items() if b'"active"' in entry.value])
