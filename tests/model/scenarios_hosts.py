"""What befalls a host: a copy of it, no thread, a libvirt that says nothing, a full etcd, power that fails."""

from __future__ import annotations

import json

from ecomp.model import keys
from ecomp.scheduler.changing.change import destroy
from ecomp.store.client import Delete, Put
from tests.model.acting import SHAKY
from tests.model.cloud import APART, A, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, within

NEXT_DAY, LATER = '2030-01-02T01:00:00Z', '2030-01-01T00:00:01Z'


def used_again_and_rebooted(cloud: Cloud) -> Check:
    """A uuid is used again; a day later another instance ends, and the host goes down: what ran is started again."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(4)
    destroy(cloud.store, U)
    host.plan(4)
    cloud.store.commit([], [Delete(keys.record(A, U))])  # its record's day is over
    for each in (U, V):
        cloud.delivered(each, A)
    host.plan(4)
    host.now = NEXT_DAY
    cloud.destroys('destroy', V)
    before = cloud.works(A, '', host.rounds(2, host.plan))

    def comes_back() -> None:
        cloud.world.wait('the power to fail', lambda: not before.is_at_it)
        host.hypervisor.lose_power(A)
        host.disk.files['boot_id'] = 'second'
        host.restart()
        host.plan(4)

    cloud.act('the host', comes_back, mortal=False)
    return lambda: [] if host.hypervisor.guests()[U].running else ['U ran when the power failed, and is off']


def refused(cloud: Cloud) -> None:
    """A request of a newer version is refused, and destroyed: what it shared is free again."""
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
    """No thread can be started for the first task: it is done by another one, later."""
    host = cloud.host(A)
    host.threads_lacking = 1
    cloud.delivered(U, A)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', U)


def unheard(cloud: Cloud) -> None:
    """Of one guest libvirt says no addresses: the others are built and destroyed all the same."""
    host = cloud.host(A)
    host.hypervisor.unheard.add(U)
    for each in (U, V):
        cloud.delivered(each, A)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', V)


def cloned(cloud: Cloud) -> Check:
    """A host was copied with its state directory, and both run: one of them goes on, and builds what is asked for."""
    both = cloud.host(A), Compute(A, cloud.world, cloud.etcd, cloud.placement, since=LATER)
    cloud.machines.append(both[1])
    cloud.delivered(U, A)
    for name, each in zip(('A', 'the copy of A'), both, strict=True):
        work = each.rounds(2, each.look_after_presence, each.plan)
        cloud.act(name, work, process=each.process)

    def check() -> list[str]:
        for each in both * 2:
            each.do(each.look_after_presence)
        left = [each for each in both if not each.is_read_only]
        if len(left) != 1:
            return [f'{len(left)} of two computes with one uuid go on']
        cloud.computes[A] = left[0]
        return []

    return check


def full(cloud: Cloud) -> Check:
    """etcd is full, and the compute's lease has ended: a destroy that was accepted is carried out, which makes room."""
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
