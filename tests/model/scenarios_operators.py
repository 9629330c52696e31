"""Operators' commands during those of users, and failures of a host."""

from __future__ import annotations

import json
from collections.abc import Callable

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.order import NameOwner
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.changes.wait import Deadline
from ecomp.scheduler.operations.audit import audit, fix, repair_findings
from ecomp.scheduler.operations.decommission import disable, enable, wait_until_drained
from ecomp.scheduler.operations.forget import forget
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.cloud import ANTI_AFFINITY, A, B, Cloud, U, V, W
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.virtual import NOW


def make_forget(cloud: Cloud, compute: str, fenced: bool = True) -> Callable[[], None]:
    return lambda: forget(
        ModelStore(cloud.etcd), cloud.placement, compute, compute, lambda: NOW, lambda _: None, fenced
    )


def add_forget(cloud: Cloud, compute: str, after: Actor) -> Actor:
    """Add a `host forget` that begins when its compute is silent."""
    run_forget = make_forget(cloud, compute)

    def work() -> None:
        cloud.world.wait('the compute to be silent', lambda: not after.is_active)
        run_forget()

    return cloud.add_actor('host forget', work, retry=run_forget, command='forget', subjects=(compute,))


def add_compute_end(cloud: Cloud, compute: str) -> Actor:
    def work() -> None:
        ModelStore(cloud.etcd).revoke(cloud.computes[compute].presence.lease)
        cloud.computes[compute].is_dead = True

    return cloud.add_actor(f'compute {cloud.world.names[compute]}', work, mortal=False)


def add_fix(cloud: Cloud) -> Actor:
    """Add a `check --fix` whose two checks are done before the schedule begins."""
    first, second = (audit(cloud.store, cloud.placement, is_now=True) for _ in range(2))
    assert [finding for finding in second.findings if finding.fix]

    def run() -> list[str]:
        return repair_findings(ModelStore(cloud.etcd), cloud.placement, first, second)

    def repeat() -> None:
        fix(cloud.store, cloud.placement, lambda _: None)

    return cloud.add_actor('audit --fix', run, retry=repeat, command='fix')


def add_quota_set(cloud: Cloud, name: str, *arguments: str) -> Actor:
    def run() -> str:
        return set_limits(ModelStore(cloud.etcd), 'p', arguments)

    return cloud.add_actor(name, run, retry=run, command='quota', subjects=('p',))


def add_drain(cloud: Cloud, compute: str) -> Actor:
    def work() -> None:
        store = ModelStore(cloud.etcd)
        disable(cloud.placement, compute, compute)
        wait_until_drained(store, cloud.placement, compute, compute, Deadline(5.0), lambda _: None)

    return cloud.add_actor('host drain', work, command='drain', subjects=(compute,))


def drain_and_create(cloud: Cloud) -> None:
    """`host drain --wait` of an empty compute, during a create that queried placement earlier."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.add_create('eschedule', U, asks_first=True)
    add_drain(cloud, A)


def forget_and_create(cloud: Cloud) -> None:
    """A compute ends and is forgotten during a create that may use it."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.add_create('eschedule', U)
    add_forget(cloud, A, add_compute_end(cloud, A))


def forget_with_another(cloud: Cloud) -> None:
    """The same where another compute has room for the request."""
    cloud.add_hosts(A, B)
    cloud.add_create('eschedule', U, weigh='first')
    add_forget(cloud, A, add_compute_end(cloud, A))


def forget_during_destroy(cloud: Cloud) -> None:
    """A compute is dead, and its last instance is destroyed while the compute is forgotten."""
    cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, name='web')
    silent = add_compute_end(cloud, A)
    cloud.add_destroy('destroy', U)
    add_forget(cloud, A, silent)


def add_keeper(cloud: Cloud, instance: str) -> None:
    """Add the releasing check of an orphaned claim on A, a minute after the first one."""
    host = cloud.computes[A]
    cloud.claim(instance, A)
    host.reconcile()
    cloud.world.clock += 61.0
    cloud.add_compute_actor(A, 'looking at claims', host.reconcile)


def keeper_and_create(cloud: Cloud) -> None:
    """A compute releases an orphaned claim while its --uuid is created again."""
    cloud.add_host(A)
    add_keeper(cloud, U)
    cloud.add_create('eschedule', U, resume=True)


def fix_drift(cloud: Cloud) -> None:
    """`check --fix` repairs a wrong quota, name and group during a create and a destroy."""
    host = cloud.add_host(A)
    cloud.starts_inconsistent = True
    cloud.set_instance_limit(5)
    membership = Membership('g', 'affinity', True)
    cloud.deliver(U, A, 'web', membership)
    host.plan(2)
    wrong_group = Group('g', 'affinity', True, {U: A, W: A})
    cloud.store.commit([], [Put(keys.name('old'), encode(NameOwner(W))), Put(keys.group('g'), encode(wrong_group))])
    add_fix(cloud)
    cloud.add_create('eschedule', V, name='db')
    cloud.add_destroy('destroy', U)


def first_quota_twice(cloud: Cloud) -> None:
    """A project's first quota is set twice concurrently, during a delivery."""
    cloud.add_host(A)
    cloud.add_create('eschedule', U)
    for number in (1, 2):
        add_quota_set(cloud, f'quota set {number}', 'instances=5')


def first_quota(cloud: Cloud) -> None:
    """A project's first quota is set during a delivery."""
    cloud.add_host(A)
    cloud.add_create('eschedule', U)
    add_quota_set(cloud, 'quota set', 'instances=5')


def quota_and_destroy(cloud: Cloud) -> None:
    """A project's first quota is set while its instance is destroyed."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    host.plan(2)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    add_quota_set(cloud, 'quota set', 'instances=5')


def disable_and_enable(cloud: Cloud) -> Check:
    """Run `host drain` and `host enable` concurrently, during a claim: both succeed."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    host_drain = cloud.add_actor('host drain', lambda: disable(cloud.placement, A, A), command='disable', subjects=(A,))
    store = ModelStore(cloud.etcd)
    enable_command = cloud.add_actor(
        'host enable', lambda: enable(store, cloud.placement, A, A), command='enable', subjects=(A,)
    )
    cloud.add_create('eschedule', U)

    def check() -> list[str]:
        errors = [
            command.outcome for command in (host_drain, enable_command) if isinstance(command.outcome, EcompError)
        ]
        return [f'disable or enable fails: {error}' for error in errors if cloud.is_unharmed]

    return check


SCENARIOS = [
    *make_scenarios(
        Bounds(2, 0), drain_and_create, forget_and_create, forget_with_another, keeper_and_create, first_quota_twice
    ),
    *make_scenarios(SINGLE_FAULT, forget_during_destroy, fix_drift, first_quota, disable_and_enable),
    *make_scenarios(Bounds(2, 1, answers=1), quota_and_destroy),
]


# Failures of a host: a copy, no thread, no answer from libvirt, a full etcd, no power.


NEXT_DAY = '2030-01-02T01:00:00Z'
LATER = '2030-01-01T00:00:01Z'


def uuid_reused_and_rebooted(cloud: Cloud) -> Check:
    """A uuid is used again, and a day later the host's power fails: U is started again."""
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


SCENARIOS += [
    *make_scenarios(
        SINGLE_FAULT, uuid_reused_and_rebooted, refused, no_thread, addresses_unavailable, copied_host, etcd_full
    )
]
