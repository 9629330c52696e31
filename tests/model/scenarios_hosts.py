"""Failures of a host: a copy, no thread, no answer from libvirt, a full etcd, no power."""

from __future__ import annotations

import json

from ecomp.model import keys
from ecomp.scheduler.changing.change import destroy
from ecomp.store.client import Delete, Put
from tests.model.acting import SHAKY
from tests.model.cloud import APART, A, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, within

NEXT_DAY = '2030-01-02T01:00:00Z'
LATER = '2030-01-01T00:00:01Z'


def used_again_and_rebooted(cloud: Cloud) -> Check:
    """A uuid is used again; a day later the host's power fails: U is started again."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(4)
    destroy(cloud.store, U)
    host.plan(4)
    cloud.store.commit([], [Delete(keys.record(A, U))])  # as after a day, when the record expires
    for instance in (U, V):
        cloud.delivered(instance, A)
    host.plan(4)
    host.now = NEXT_DAY
    cloud.destroys('destroy', V)
    before = cloud.works(A, '', host.rounds(2, host.plan))

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not before.is_at_it)
        host.hypervisor.lose_power(A)
        host.disk.files['boot_id'] = 'second'
        host.restart()
        host.plan(4)

    cloud.act('the host', come_back, mortal=False)
    return lambda: [] if host.hypervisor.guests()[U].running else ['U ran when the power failed, and is off']


def refused(cloud: Cloud) -> None:
    """A request of a newer version is refused and destroyed: what it shared is released."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A, 'web', APART)
    key = keys.request(A, U)
    newer = {**json.loads(cloud.etcd.entries[key].value), 'version': 99}
    cloud.store.commit([], [Put(key, json.dumps(newer))])
    cloud.may_fail.add(U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.destroys('destroy', U)


def no_thread(cloud: Cloud) -> None:
    """No thread can be started for the first task: a later step runs it."""
    host = cloud.host(A)
    host.threads_lacking = 1
    cloud.delivered(U, A)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', U)


def unheard(cloud: Cloud) -> None:
    """One guest has no addresses in libvirt: the others are built and destroyed nevertheless."""
    host = cloud.host(A)
    host.hypervisor.unheard.add(U)
    for instance in (U, V):
        cloud.delivered(instance, A)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', V)


def cloned(cloud: Cloud) -> Check:
    """A host was copied with its state directory and both run: exactly one stays active."""
    computes = cloud.host(A), Compute(A, cloud.world, cloud.etcd, cloud.placement, since=LATER)
    cloud.machines.append(computes[1])
    cloud.delivered(U, A)
    for name, compute in zip(('A', 'the copy of A'), computes, strict=True):
        work = compute.rounds(2, compute.look_after_presence, compute.plan)
        cloud.act(name, work, process=compute.process)

    def check() -> list[str]:
        for compute in computes * 2:
            compute.do(compute.look_after_presence)
        active = [compute for compute in computes if not compute.is_read_only]
        if len(active) != 1:
            return [f'{len(active)} of two computes with one uuid go on']
        cloud.computes[A] = active[0]
        return []

    return check


def full(cloud: Cloud) -> Check:
    """A full etcd, and an expired lease: an accepted destroy is carried out, which frees space."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    host.plan(4)
    destroy(cloud.store, U)
    cloud.etcd.is_full = True
    cloud.etcd.end(host.presence.lease)
    cloud.works(A, '', host.rounds(3, host.look_after_presence, host.plan))

    def check() -> list[str]:
        waits = keys.request(A, U) in cloud.etcd.entries
        cloud.etcd.is_full = False
        return ['a destroy waits for the room that it would make'] if waits and cloud.is_unharmed else []

    return check


SCENARIOS = [
    *within(SHAKY, used_again_and_rebooted, refused, no_thread, unheard, cloned, full),
]
