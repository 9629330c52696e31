"""Failures of a host: a copy, no thread, no answer from libvirt, a full etcd, no power."""

from __future__ import annotations

import json

from ecomp.model import keys
from ecomp.scheduler.changes.change import destroy
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT
from tests.model.cloud import ANTI_AFFINITY, A, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios

NEXT_DAY = '2030-01-02T01:00:00Z'
LATER = '2030-01-01T00:00:01Z'


def uuid_reused_and_rebooted(cloud: Cloud) -> Check:
    """A uuid is used again; a day later the host's power fails: U is started again."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    host.plan(4)
    destroy(cloud.store, U)
    host.plan(4)
    cloud.store.commit([], [Delete(keys.record(A, U))])  # as after a day, when the record expires
    for instance in (U, V):
        cloud.deliver(instance, A)
    host.plan(4)
    host.now = NEXT_DAY
    cloud.add_destroy('destroy', V)
    before = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not before.is_active)
        host.hypervisor.lose_power(A)
        host.disk.files['boot_id'] = 'second'
        host.restart()
        host.plan(4)

    cloud.add_actor('the host', come_back, mortal=False)
    return lambda: [] if host.hypervisor.list_guests()[U].running else ['U ran when the power failed, and is off']


def refused(cloud: Cloud) -> None:
    """A request of a newer version is refused and destroyed: what it shared is released."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web', ANTI_AFFINITY)
    key = keys.request(A, U)
    newer = {**json.loads(cloud.etcd.entries[key].value), 'version': 99}
    cloud.store.commit([], [Put(key, json.dumps(newer))])
    cloud.allowed_to_fail.add(U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_destroy('destroy', U)


def no_thread(cloud: Cloud) -> None:
    """No thread can be started for the first task: a later step runs it."""
    host = cloud.add_host(A)
    host.missing_threads = 1
    cloud.deliver(U, A)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)


def addresses_unavailable(cloud: Cloud) -> None:
    """One guest has no addresses in libvirt: the others are built and destroyed nevertheless."""
    host = cloud.add_host(A)
    host.hypervisor.without_addresses.add(U)
    for instance in (U, V):
        cloud.deliver(instance, A)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', V)


def copied_host(cloud: Cloud) -> Check:
    """A host was copied with its state directory and both run: exactly one stays active."""
    computes = cloud.add_host(A), Compute(A, cloud.world, cloud.etcd, cloud.placement, since=LATER)
    cloud.machines.append(computes[1])
    cloud.deliver(U, A)
    for name, compute in zip(('A', 'the copy of A'), computes, strict=True):
        work = compute.repeat(2, compute.keep_presence, compute.plan)
        cloud.add_actor(name, work, process=compute.process)

    def check() -> list[str]:
        for compute in computes * 2:
            compute.run_all(compute.keep_presence)
        active = [compute for compute in computes if not compute.is_read_only]
        if len(active) != 1:
            return [f'{len(active)} of two computes with one uuid go on']
        cloud.computes[A] = active[0]
        return []

    return check


def etcd_full(cloud: Cloud) -> Check:
    """A full etcd, and an expired lease: an accepted destroy is carried out, which frees space."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    host.plan(4)
    destroy(cloud.store, U)
    cloud.etcd.is_full = True
    cloud.etcd.end_lease(host.presence.lease)
    cloud.add_compute_actor(A, '', host.repeat(3, host.keep_presence, host.plan))

    def check() -> list[str]:
        waits = keys.request(A, U) in cloud.etcd.entries
        cloud.etcd.is_full = False
        return ['a destroy waits for the room that it would make'] if waits and cloud.is_unharmed else []

    return check


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT, uuid_reused_and_rebooted, refused, no_thread, addresses_unavailable, copied_host, etcd_full
    ),
]
