"""lease-to-booted: from the DHCP lease in dnsmasq's file to /booted/<instance> at a watch.

udhcpc requests the lease with the guest's MAC on the guests' bridge: the guest itself boots nothing. The time starts at
the write of the file and ends in a watch's callback. The floor is the minimum of a program: inotify on the file, one
put, and the same watch. Both sides run in turn on one lab host. Target: 90 of 100 under 50 ms.

    python bench/lease_to_booted.py [ROUNDS] [--quick] [--json]    (as root; it makes a lab of its own and removes it)
"""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from statistics import quantiles

from lab import Lab, main
from result import Result, make_result, paired

from ecomp.compute_conf import load_compute
from ecomp.model import keys
from ecomp.model.guest import make_mac_address
from ecomp.model.order import Request
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged
from ecomp.store.watch import Follower
from ecomp.virt.libvirt_host import Libvirt
from ecomp.virt.networks import LEASES_DIRECTORY, read_lease_file

LAB = Lab('benchl')
SHARE = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
STATUS = LEASES_DIRECTORY / 'virbr0.status'
TIMEOUT_SECONDS = 60.0
TARGET = 0.05
# Seconds without a write of the status file: a reservation makes dnsmasq write all leases again.
QUIET_SECONDS = 0.5


class FirstSeen:
    """The times at which keys under /booted/ were first seen, in seconds since the epoch."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._changed = threading.Condition()

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """Record the keys, as the callback of the follower."""
        now = time.time()
        with self._changed:
            self._times = {key: self._times.get(key, now) for key in state}
            self._changed.notify_all()

    def wait_for(self, key: str) -> float:
        """Wait for a key and return its time; exit after TIMEOUT_SECONDS."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._times, TIMEOUT_SECONDS):
                raise SystemExit(f'{key} did not come in {TIMEOUT_SECONDS:g} s')
            return self._times[key]


class Floor:
    """Puts a key as soon as a MAC has a lease."""

    def __init__(self, store: Store) -> None:
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        self.mac = self.key = ''

        def look(event: FileSystemEvent) -> None:
            leases = read_addresses() if event.event_type == 'moved' else {}
            if self.mac in leases:
                store.commit([], [Put(self.key, leases[self.mac])])
                self.mac = ''

        handler = FileSystemEventHandler()
        handler.on_any_event = look  # type: ignore[method-assign]
        observer = Observer()
        observer.schedule(handler, str(LEASES_DIRECTORY))
        observer.daemon = True
        observer.start()


def read_addresses() -> dict[str, str]:
    """Read the address of each MAC with a lease."""
    return {mac: address for mac, address, _ in read_lease_file(STATUS) or ()}


def request_lease(mac: str) -> float:
    """Request a lease with this MAC; return the time of its write, in seconds since the epoch."""
    wait_until(lambda: time.time() - STATUS.stat().st_mtime > QUIET_SECONDS)
    run('ip', 'link', 'add', 'bench0', 'address', mac, 'type', 'veth', 'peer', 'name', 'bench1')
    try:
        run('ip', 'link', 'set', 'bench1', 'master', 'virbr0', 'up')
        run('ip', 'link', 'set', 'bench0', 'up')
        run('busybox', 'udhcpc', '-i', 'bench0', '-f', '-q', '-n', '-t', '20', '-T', '1', '-s', '/bin/true')
        wait_until(lambda: mac in read_addresses())
        return STATUS.stat().st_mtime
    finally:
        run('ip', 'link', 'del', 'bench0')


def measure(pairs: int, images: str) -> Iterator[Result]:
    """Measure on the lab host."""
    config = load_compute(LAB.compute_yaml)
    compute = (config.state / 'uuid').read_text().strip()
    store, placement, booted = Store(config.etcd), Placement(config.placement), FirstSeen()
    follower, floor_program = Follower(config.etcd, [(keys.BOOTED, booted.on_state)]), Floor(Store(config.etcd))
    follower.start()
    libvirt = Libvirt(config.state)

    def ours() -> float:
        instance = str(uuid.uuid4())
        allocations.replace_allocations(placement, instance, {compute: SHARE}, 'bench', 'bench')
        key = keys.request(compute, instance)
        request = Request(instance, {compute: SHARE}, image=images + 'blank.raw', user_id='bench', project_id='bench')
        store.commit([], [Put(key, encode(request))])
        wait_until(
            lambda: (entry := store.get(keys.record(compute, instance))) is not None and b'"active"' in entry.value
        )
        seconds = -request_lease(make_mac_address(instance, 0)) + booted.wait_for(keys.address(instance))
        store.commit([], [Put(key, encode(Request(instance, {}, image=None, user_id='bench', project_id='bench')))])
        wait_until(lambda: store.get(key) is None)
        store.commit([Unchanged(key, 0)], [Delete(keys.record(compute, instance))])
        return seconds

    def floor() -> float:
        consumer = str(uuid.uuid4())
        mac = make_mac_address(consumer, 0)
        libvirt.reserve_address(consumer, mac, 'default')  # dnsmasq serves only reserved MACs
        floor_program.key, floor_program.mac = keys.address(consumer), mac
        seconds = -request_lease(mac) + booted.wait_for(floor_program.key)
        libvirt.release_addresses(consumer)
        store.commit([], [Delete(floor_program.key)])
        return seconds

    ours(), floor()  # the first of each fetches the image and warms caches
    taken = [(ours(), floor()) for _ in range(pairs)]
    mine, floors = [pair[0] for pair in taken], [pair[1] for pair in taken]
    yield paired('lease-to-booted', 'the median', mine, floors, None)
    yield make_result('lease-to-booted', 'the ninetieth of a hundred', [quantiles(mine, n=10)[8]], TARGET)
    follower.stop()
    libvirt.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition between two measurements; exit after TIMEOUT_SECONDS."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit('it did not get where it should')
        time.sleep(0.01)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


if __name__ == '__main__':
    main(LAB, measure, LAB.add_blank, 30, quick=6)
