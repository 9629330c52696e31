"""Losses: power, a record, writes to a state directory, hours of etcd, messages, leases."""

from __future__ import annotations

from contextlib import suppress

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.queue import QueueTaker
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import destroy
from ecomp.store.client import Delete, Entry, Put
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, A, B, Cloud, S, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios
from tests.model.scenarios_operators import add_drain, first_quota, forget_during_destroy
from tests.model.scenarios_pairs import make_active

ONE_KILL = Bounds(2, 1, kills=1)


def _plan_and_wait(host: Compute) -> None:
    for _ in range(4):
        host.run_all(host.planner.retry_now, host.plan)
        host.world.clock += 30.0


def _take_and_wait(host: Compute) -> None:
    for _ in range(3):
        host.run_all(host.read_presence, host.read_requests, host.read_queues, host.pull, host.plan)
        host.world.clock += 1.0


def fail_power(host: Compute, boot: str = 'second') -> None:
    host.hypervisor.lose_power(host.uuid)
    host.disk.files['boot_id'] = boot
    host.restart()


def _make_running_check(host: Compute) -> Check:
    def check() -> list[str]:
        _plan_and_wait(host)
        guest = host.hypervisor.list_guests().get(U)
        return [] if guest is not None and guest.running else ['U ran when the power failed, and is off']

    return check


def restore_etcd(cloud: Cloud, saved: dict[str, Entry]) -> None:
    """Restore the saved entries of etcd, except presence keys, which stay as they are."""
    added = [key for key in cloud.etcd.entries if key not in saved and not key.startswith(keys.COMPUTES)]
    restored = [
        Put(key, entry.value.decode(), entry.lease if entry.lease in cloud.etcd.leases else 0)
        for key, entry in saved.items()
        if not key.startswith(keys.COMPUTES)
    ]
    cloud.store.commit([], [*map(Delete, added), *restored])


def off_before_it_was_active(cloud: Cloud) -> None:
    """A guest turns itself off before its record is active: its disk is recognised as its own."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    cloud.add_compute_actor(A, '', host.repeat(1, host.plan))

    def turn_off() -> None:
        cloud.world.wait('U to run', lambda: host.hypervisor.is_running(U))
        host.hypervisor._step_before('turns itself off:', U)
        if host.hypervisor.is_running(U):
            host.hypervisor.switch_off(U, A)

    cloud.add_actor('the guest', turn_off, mortal=False)


def power_fails_in_a_build(cloud: Cloud) -> Check:
    """An ecompute is killed in a build, then all power fails: the guest is completed."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    first = cloud.add_compute_actor(A, '', host.repeat(1, host.plan))

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not first.is_active)
        fail_power(host)
        _plan_and_wait(host)

    cloud.add_actor('the host', come_back, mortal=False)
    return _make_running_check(host)


def power_fails_without_a_record(cloud: Cloud) -> Check:
    """A running instance's record is deleted, then all power fails: it runs again."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    _plan_and_wait(host)
    cloud.store.commit([], [Delete(keys.record(A, U))])
    fail_power(host)
    cloud.add_compute_actor(A, '', lambda: _plan_and_wait(host))
    return _make_running_check(host)


def older_state_directory(cloud: Cloud) -> Check:
    """The state directory is older than U, and a minute later power fails: U is started again."""
    host = cloud.add_host(A)
    saved = dict(host.disk.files)
    cloud.deliver(U, A, 'web')
    _plan_and_wait(host)
    host.disk.files.clear()
    host.disk.files.update(saved)
    host.restart()
    _plan_and_wait(host)
    host.planner.recheck()
    fail_power(host)
    cloud.add_compute_actor(A, '', lambda: _plan_and_wait(host))
    return _make_running_check(host)


def state_directory_behind(cloud: Cloud) -> Check:
    """Power fails as U is active, and etcd is restored to that moment: U runs again."""
    host = cloud.add_host(A)
    host.hypervisor.without_addresses.add(U)  # a reported address would also record that U is active
    cloud.deliver(U, A)
    first = cloud.add_compute_actor(A, '', host.repeat(1, host.plan))

    def later() -> None:
        cloud.world.wait('the first to end', lambda: not first.is_active)
        host.restart()
        host.plan()
        saved = dict(cloud.etcd.entries)
        host.hypervisor.lose_power(A)
        host.disk.files['boot_id'] = 'second'
        restore_etcd(cloud, saved)
        host.start(republishes=True)
        _plan_and_wait(host)

    cloud.add_actor('later', later, mortal=False)
    return _make_running_check(host)


def destroyed_and_queued_again(cloud: Cloud) -> Check:
    """U was destroyed, and etcd is restored to when U was queued: U is not taken again."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web')
    saved = dict(cloud.etcd.entries)
    _take_and_wait(host)
    destroy(cloud.store, U)
    _plan_and_wait(host)
    restore_etcd(cloud, saved)
    host.republishes = True

    def come_back() -> None:
        for _ in range(4):  # a start that gets no answer is repeated
            with suppress(EcompError):
                host.restart()
                break
        _take_and_wait(host)

    cloud.add_actor('A', come_back, mortal=False)
    return lambda: ['U was destroyed here, and lives again'] if U in host.hypervisor.list_guests() else []


def running_and_queued_again(cloud: Cloud) -> Check:
    """U runs on A, and etcd is restored to when U was queued: A keeps U, B reads it first."""
    return _restore_running_instance(cloud, has_taker=False)


def running_and_queued_with_taker(cloud: Cloud) -> Check:
    """The same, and at that time B had a taker key at U, which it released later."""
    return _restore_running_instance(cloud, has_taker=True)


def _restore_running_instance(cloud: Cloud, has_taker: bool) -> Check:
    host, other = cloud.add_host(A), cloud.add_host(B)
    cloud.set_instance_limit(5)
    taker_key = keys.taker(cloud.enqueue_request(U, 'web').entry.key)
    if has_taker:
        cloud.store.commit([], [Put(taker_key, encode(QueueTaker(B)), other.presence.lease)])
    saved = dict(cloud.etcd.entries)
    cloud.store.commit([], [Delete(taker_key)])
    _take_and_wait(host)
    assert U in host.hypervisor.list_guests()
    restore_etcd(cloud, saved)
    cloud.has_ample_room = False
    host.republishes = other.republishes = True
    other.start(republishes=True)
    other.republishes = False  # later starts are without the option

    def come_back() -> None:
        host.start(republishes=True)
        host.repeat(2, host.plan)()

    cloud.add_actor('A', come_back, process=A)
    steps = other.read_presence, other.read_requests, other.read_queues, other.pull, other.plan

    def read_and_restart() -> None:
        other.repeat(1, *steps)()
        other.restart()
        other.repeat(2, *steps)()

    cloud.add_actor('B', read_and_restart, process=B)
    return lambda: ['U runs on two computes'] if other.hypervisor.list_guests() else []


SCENARIOS = [
    *make_scenarios(
        ONE_KILL,
        *(off_before_it_was_active, power_fails_in_a_build, power_fails_without_a_record, older_state_directory),
        state_directory_behind,
    ),
    *make_scenarios(SINGLE_FAULT, destroyed_and_queued_again),
    *make_scenarios(Bounds(2, 0), running_and_queued_again, running_and_queued_with_taker),
]


# Lost messages and expired leases under each command: its report stays true (truth.py).


def create_with_losses(cloud: Cloud) -> None:
    """An instance with a name, a group and a quota is created, built and its claim checked."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.add_create('eschedule', U, name='web', group=ANTI_AFFINITY)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.reconcile))


def resume_with_losses(cloud: Cloud) -> None:
    """The same uuid is created twice, with --uuid."""
    cloud.add_host(A)
    cloud.set_instance_limit(5)
    for number in (1, 2):
        cloud.add_create(f'eschedule {number}', U, resume=True, seed=number, name='web')


def set_with_losses(cloud: Cloud) -> None:
    """A set of two is created."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    cloud.add_create('the set', S, count=2, minimum=2)


def queue_with_losses(cloud: Cloud) -> None:
    """An instance is queued, taken and built."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.add_enqueue('eschedule --queue', U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))


def destroy_with_losses(cloud: Cloud) -> None:
    """An active instance is destroyed."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def destroy_of_queued_with_losses(cloud: Cloud) -> None:
    """A queued instance is destroyed while it is taken."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))


def stop_with_losses(cloud: Cloud) -> None:
    """An active instance is stopped."""
    host = make_active(cloud)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def forget_with_losses(cloud: Cloud) -> None:
    """A dead compute is forgotten while its last instance is destroyed."""
    forget_during_destroy(cloud)


def drain_with_losses(cloud: Cloud) -> None:
    """A compute is drained during a create."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.add_create('eschedule', U)
    add_drain(cloud, A)


def quota_with_losses(cloud: Cloud) -> None:
    """A project's first quota is set beside a create."""
    first_quota(cloud)


def keeper_with_losses(cloud: Cloud) -> None:
    """The claim keeper checks a claim twice, a minute apart, while its uuid is created again."""
    host = cloud.add_host(A)
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.reconcile, lambda: cloud.world.sleep(61.0)))
    cloud.add_create('eschedule', V, resume=True)


LOSSY = Bounds(1, 3, requests=1, answers=2, expiries=1, reads=2)
SCENARIOS += [
    *make_scenarios(
        LOSSY,
        *(create_with_losses, resume_with_losses, set_with_losses, queue_with_losses, destroy_with_losses),
        *(destroy_of_queued_with_losses, stop_with_losses, forget_with_losses, drain_with_losses),
        *(quota_with_losses, keeper_with_losses),
    )
]
