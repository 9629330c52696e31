"""domain-start: from the request's put to the domain running, against bare libvirt-python doing the same.

The floor makes the same overlay over the same base volume and defines and starts the same XML on an open connection.
Both ends are libvirt's own `started` event, and both sides run in turn on one lab host. Aim: at most 1.15.

    python bench/domain_start.py [PAIRS]         (as root; it makes a lab of its own and removes it)
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from statistics import median

from lab import BLANK, Lab, main

from ecomp.conf import load_compute
from ecomp.model import keys
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.model.instance import Request, to_json
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.virt import xml

LAB = Lab('benchd')
SHARE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
SECONDS = 60.0


class Started:
    """Waits for libvirt's event that a domain runs."""

    def __init__(self) -> None:
        import libvirt

        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=self._loop, daemon=True).start()
        self.connection = libvirt.open('qemu:///system')
        self._seen: dict[str, float] = {}
        self._changed = threading.Condition()
        self.connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._event, None)

    def after(self, instance: str, do: Callable[[], object]) -> float:
        """Seconds from the beginning of do() until the domain is started."""
        began = time.monotonic()
        do()
        with self._changed:
            if not self._changed.wait_for(lambda: instance in self._seen, SECONDS):
                raise SystemExit(f'{instance} was not started in {SECONDS:g} s')
            return self._seen[instance] - began

    def _loop(self) -> None:
        import libvirt

        while True:
            libvirt.virEventRunDefaultImpl()

    def _event(self, _connection: object, domain: object, event: int, *_: object) -> None:
        import libvirt

        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            with self._changed:
                self._seen[domain.UUIDString()] = time.monotonic()  # type: ignore[attr-defined]
                self._changed.notify_all()


def inside(pairs: int, images: str) -> None:
    """The measuring itself, on the lab host."""
    config = load_compute(LAB.compute_yaml)
    compute = (config.state / 'uuid').read_text().strip()
    store, placement, started = Store(config.etcd), Placement(config.placement), Started()
    pool = started.connection.storagePoolLookupByName('ecompute')

    def ours() -> float:
        instance = str(uuid.uuid4())
        allocations.claim(placement, instance, {compute: SHARE}, 'bench', 'bench')
        request = Request(instance, {compute: SHARE}, image=images + 'blank.raw', user_id='bench', project_id='bench')
        key = keys.request(compute, instance)
        taken = started.after(instance, lambda: store.commit([], [Put(key, to_json(request))]))
        until(lambda: b'"active"' in value(store, keys.record(compute, instance)))
        store.commit([], [Put(key, to_json(Request(instance, {}, image=None, user_id='bench', project_id='bench')))])
        until(lambda: store.get(key) is None)
        store.commit([Unchanged(key, 0)], [Delete(keys.record(compute, instance))])
        return taken

    def floor() -> float:
        instance = str(uuid.uuid4())
        base = next((config.state / 'images').glob('base-*.raw'))
        image = BaseImage(str(base), 'raw', base.stat().st_size)
        # Another compute's mark: nothing here is ecompute's business.
        # Any address: what the filter lets pass is not what takes time.
        spec = GuestSpec(instance, 'bench', 1, 128, 1, image, 'qemu', reserved=('10.0.0.1',))
        disk, log = config.state / f'images/{instance}.qcow2', config.state / f'console/{instance}.log'
        volume = xml.volume_xml(disk.name, 2**30, image.path, image.format)
        domain = xml.domain_xml(spec, str(disk), str(log))

        def make() -> None:
            pool.createXML(volume)
            started.connection.defineXML(domain).create()

        taken = started.after(instance, make)
        there = started.connection.lookupByUUIDString(instance)
        there.destroy()
        there.undefine()
        pool.storageVolLookupByName(disk.name).delete()
        log.unlink(missing_ok=True)
        return taken

    ours(), floor()  # the first of each fetches the image and warms caches
    taken = [(ours(), floor()) for _ in range(pairs)]
    mine, floors = [pair[0] for pair in taken], [pair[1] for pair in taken]
    print(f'domain-start, {pairs} pairs:', end=' ')
    print(f'ecompute {median(mine) * 1000:.0f} ms (least {min(mine) * 1000:.0f}),', end=' ')
    print(f'bare libvirt {median(floors) * 1000:.0f} ms (least {min(floors) * 1000:.0f}),', end=' ')
    print(f'ratio {median(a / b for a, b in taken):.2f} (aim: at most 1.15)')


def value(store: Store, key: str) -> bytes:
    """The key's value, nothing if it is not there."""
    entry = store.get(key)
    return entry.value if entry else b''


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition between two measurements."""
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit('the instance did not get where it should')
        time.sleep(0.02)


def make(pairs: int) -> None:
    """Measure in a lab."""
    LAB.run(__file__, pairs, lambda: LAB.image('blank.raw').write_bytes(BLANK))


if __name__ == '__main__':
    main(inside, make, 20)
