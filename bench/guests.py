"""Guests of a lab's host, made by requests to its ecompute or by bare libvirt-python.

The floor makes the same overlay on the same base volume, and defines and starts the same XML, on one open connection
with a thread for each guest. Each service that a guest may not reach is a rule of its filter and adds some 20 ms.
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

from ecomp.agent.images.sources import make_egress_policy
from ecomp.compute_conf import load_compute
from ecomp.model import keys
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.model.order import Request
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Put, Store
from ecomp.store.watch import Follower
from ecomp.virt import xml
from ecomp.virt.connection import Connection
from ecomp.virt.libvirt_host import Filters

SHARE = {'VCPU': 1, 'MEMORY_MB': 32, 'DISK_GB': 1}
TIMEOUT_SECONDS = 120.0


def run_concurrently(count: int, call: Callable[[int], object]) -> None:
    """Call do(0), do(1) and so on, each in its own thread."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(call, range(count)))


class FirstSeen:
    """The times at which names were first seen, in monotonic seconds."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._changed = threading.Condition()

    def record(self, names: Iterable[str]) -> None:
        """Record that these names are seen now."""
        now = time.monotonic()
        with self._changed:
            for name in names:
                self._times.setdefault(name, now)
            self._changed.notify_all()

    def wait_for_all(self, names: Sequence[str], what: str) -> float:
        """Wait until all names are seen, and return the last time; exit after TIMEOUT_SECONDS."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(name in self._times for name in names), TIMEOUT_SECONDS):
                raise SystemExit(
                    f'not {what} in {TIMEOUT_SECONDS:g} s: {[name for name in names if name not in self._times]}'
                )
            return max(self._times[name] for name in names)


def prepare(lab: Lab) -> None:
    """Prepare a lab before its script runs on its host."""
    lab.add_blank()
    lab.allow_overcommit()


class Bench:
    """Both sides on the one host of `lab`; `images` is the URL of its image server."""

    def __init__(self, lab: Lab, images: str) -> None:
        import libvirt

        self._config = load_compute(lab.compute_yaml)
        self.state = self._config.state
        self.compute = (self.state / 'uuid').read_text().strip()
        self._store, self._placement = Store(self._config.etcd), Placement(self._config.placement)
        self._image = images + 'blank.raw'
        self._started, self._active, self._gone = FirstSeen(), FirstSeen(), FirstSeen()
        self._asked: set[str] = set()
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=self._loop, daemon=True).start()
        self.connection = libvirt.open('qemu:///system')
        self.connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_event, None)
        self._pool = self.connection.storagePoolLookupByName('ecompute')
        self._control = Filters(
            Connection('qemu:///system'), make_egress_policy(self._config).control_endpoints
        ).resolve_services()
        followed: list[Any] = [(keys.request_prefix(self.compute), self._on_requests)]
        followed.append((keys.record(self.compute, ''), self._on_records))
        self._follower = Follower(self._config.etcd, followed)
        self._follower.start()

    def close(self) -> None:
        """Stop following etcd."""
        self._follower.stop()

    # By requests

    def start(self, count: int) -> tuple[list[str], float]:
        """Request instances in one transaction; return the seconds until the last domain runs."""
        instances = [str(uuid.uuid4()) for _ in range(count)]
        for instance in instances:
            allocations.replace_allocations(self._placement, instance, {self.compute: SHARE}, 'bench', 'bench')
        puts = [self._put(instance, SHARE) for instance in instances]
        start = time.monotonic()
        self._store.commit([], puts)
        return instances, self._started.wait_for_all(instances, 'started') - start

    def wait_active(self, instances: Sequence[str]) -> None:
        """Wait until they are recorded as active."""
        self._active.wait_for_all(instances, 'active')

    def destroy(self, instances: Sequence[str]) -> float:
        """Return the seconds from the transaction of the tombstones until the last key is gone."""
        self._asked |= set(instances)
        tombstones = [self._put(each, None) for each in instances]
        start = time.monotonic()
        self._store.commit([], tombstones)
        return self._gone.wait_for_all(instances, 'gone') - start

    def check_gone(self, instances: Sequence[str]) -> None:
        """Exit if anything of them is left; remove their records."""
        domains = {instance.UUIDString() for instance in self.connection.listAllDomains()}
        for instance in instances:
            held = allocations.read_consumer(self._placement, instance).allocations
            is_left = instance in domains or (self.state / f'images/{instance}.qcow2').exists() or held
            if is_left:
                raise SystemExit(f'{instance} is not gone: {held}')
        self._store.commit([], [Delete(keys.record(self.compute, instance)) for instance in instances])

    def _put(self, instance: str, share: Mapping[str, int] | None) -> Put:
        allocations = {self.compute: share} if share else {}
        image = self._image if share else None
        request = Request(instance, allocations, image=image, user_id='bench', project_id='bench')
        return Put(keys.request(self.compute, instance), encode(request))

    # By bare libvirt

    def start_bare(self, count: int) -> tuple[list[str], float]:
        """Do the same as start() without ecompute."""
        instances = [str(uuid.uuid4()) for _ in range(count)]
        base = next((self.state / 'images').glob('base-*.raw'))
        image = BaseImage(str(base), 'raw', base.stat().st_size)

        def make(number: int) -> None:
            instance = instances[number]
            disk, console = self._files(instance)
            # Without this compute's owner mark ecompute ignores the domain. Any address will do: what the filter allows
            # does not affect the time.
            spec = GuestSpec(
                instance, 'bench', 1, SHARE['MEMORY_MB'], 1, image, 'qemu', reserved_addresses=('10.0.0.1',)
            )
            self._pool.createXML(xml.make_volume_xml(disk.name, 2**30, image.path, image.format))
            description = xml.make_domain_xml(spec, str(disk), str(console), blocked_services=self._control)
            self.connection.defineXML(description).create()

        start = time.monotonic()
        run_concurrently(count, make)
        return instances, self._started.wait_for_all(instances, 'started') - start

    def destroy_bare(self, instances: Sequence[str]) -> float:
        """Remove the domains and volumes, and return the seconds that it takes."""

        def end(number: int) -> None:
            domain = self.connection.lookupByUUIDString(instances[number])
            domain.destroy()
            domain.undefine()
            self._pool.storageVolLookupByName(self._files(instances[number])[0].name).delete()

        start = time.monotonic()
        run_concurrently(len(instances), end)
        seconds = time.monotonic() - start
        for instance in instances:
            self._files(instance)[1].unlink(missing_ok=True)
        return seconds

    def _files(self, instance: str) -> tuple[Path, Path]:
        return self.state / f'images/{instance}.qcow2', self.state / f'console/{instance}.log'

    # Callbacks

    def _loop(self) -> None:
        import libvirt

        while True:
            libvirt.virEventRunDefaultImpl()

    def _on_event(self, _connection: object, domain: Any, event: int, *_: object) -> None:
        import libvirt

        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            self._started.record([domain.UUIDString()])

    def _on_requests(self, state: Mapping[str, Entry]) -> None:
        present = {keys.get_last_part(key) for key in state}
        self._gone.record([instance for instance in self._asked if instance not in present])

    def _on_records(self, state: Mapping[str, Entry]) -> None:
        self._active.record([keys.get_last_part(key) for key, entry in state.items() if b'"active"' in entry.value])
