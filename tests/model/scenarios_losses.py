"""Losses: power, a record, the last write to a state directory, the last hour of an etcd."""

from __future__ import annotations

from contextlib import suppress

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.queue import mark_to_json
from ecomp.scheduler.changing.change import destroy
from ecomp.store.client import Delete, Entry, Put
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import A, B, Cloud, U
from tests.model.compute import Compute
from tests.model.explorer import Check, within

KILLED = Bounds(2, 1, kills=1)


def _plans(host: Compute) -> None:
    for _ in range(4):
        host.do(host.planner.works_again, host.plan)
        host.world.clock += 30.0


def _takes(host: Compute) -> None:
    for _ in range(3):
        host.do(host.hear_computes, host.hear_hosts, host.hear_queues, host.pull, host.plan)
        host.world.clock += 1.0


def fails(host: Compute, boot: str = 'second') -> None:
    """Fail all power of a host, and start it again."""
    host.hypervisor.lose_power(host.uuid)
    host.disk.files['boot_id'] = boot
    host.restart()


def _is_on(host: Compute) -> Check:
    def check() -> list[str]:
        _plans(host)
        guest = host.hypervisor.guests().get(U)
        return [] if guest is not None and guest.running else ['U ran when the power failed, and is off']

    return check


def restore(cloud: Cloud, saved: dict[str, Entry]) -> None:
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
    host = cloud.host(A)
    cloud.delivered(U, A)
    cloud.works(A, '', host.rounds(1, host.plan))

    def turn_off() -> None:
        cloud.world.wait('U to run', lambda: host.hypervisor.runs(U))
        host.hypervisor._before('turns itself off:', U)
        if host.hypervisor.runs(U):
            host.hypervisor.switch_off(U, A)

    cloud.act('the guest', turn_off, mortal=False)


def power_fails_in_a_build(cloud: Cloud) -> Check:
    """An ecompute is killed in a build, then all power fails: the guest is completed."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    first = cloud.works(A, '', host.rounds(1, host.plan))

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not first.is_at_it)
        fails(host)
        _plans(host)

    cloud.act('the host', come_back, mortal=False)
    return _is_on(host)


def power_fails_without_a_record(cloud: Cloud) -> Check:
    """A running instance's record is deleted, then all power fails: it runs again."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    _plans(host)
    cloud.store.commit([], [Delete(keys.record(A, U))])
    fails(host)
    cloud.works(A, '', lambda: _plans(host))
    return _is_on(host)


def older_state_directory(cloud: Cloud) -> Check:
    """The state directory is older than U; a minute later all power fails: U is started again."""
    host = cloud.host(A)
    saved = dict(host.disk.files)
    cloud.delivered(U, A, 'web')
    _plans(host)
    host.disk.files.clear()
    host.disk.files.update(saved)
    host.restart()
    _plans(host)
    host.planner.recheck()
    fails(host)
    cloud.works(A, '', lambda: _plans(host))
    return _is_on(host)


def state_directory_behind(cloud: Cloud) -> Check:
    """An ecompute is killed as U becomes active, then all power fails: U runs again.

    etcd is restored to that moment, too.
    """
    host = cloud.host(A)
    host.hypervisor.unheard.add(U)  # a reported address would also record that U is active
    cloud.delivered(U, A)
    first = cloud.works(A, '', host.rounds(1, host.plan))

    def later() -> None:
        cloud.world.wait('the first to end', lambda: not first.is_at_it)
        host.restart()
        host.plan()
        saved = dict(cloud.etcd.entries)
        host.hypervisor.lose_power(A)
        host.disk.files['boot_id'] = 'second'
        restore(cloud, saved)
        host.start(republishes=True)
        _plans(host)

    cloud.act('later', later, mortal=False)
    return _is_on(host)


def destroyed_and_waiting_again(cloud: Cloud) -> Check:
    """U was destroyed; etcd is restored to when U was queued: U is not taken again."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web')
    saved = dict(cloud.etcd.entries)
    _takes(host)
    destroy(cloud.store, U)
    _plans(host)
    restore(cloud, saved)
    host.republishes = True

    def come_back() -> None:
        for _ in range(4):  # a start that gets no answer is repeated
            with suppress(EcompError):
                host.restart()
                break
        _takes(host)

    cloud.act('A', come_back, mortal=False)
    return lambda: ['U was destroyed here, and lives again'] if U in host.hypervisor.guests() else []


def runs_and_waits_again(cloud: Cloud) -> Check:
    """U runs on A; etcd is restored to when U was queued: A keeps U although B reads it first."""
    return _runs_and_waits(cloud, marked=False)


def runs_and_waits_marked(cloud: Cloud) -> Check:
    """The same, and at that time B had a taker key at U, which it released later."""
    return _runs_and_waits(cloud, marked=True)


def _runs_and_waits(cloud: Cloud, marked: bool) -> Check:
    host, other = cloud.host(A), cloud.host(B)
    cloud.limited(5)
    taker_key = keys.taker(cloud.waiting(U, 'web').waiting.key)
    if marked:
        cloud.store.commit([], [Put(taker_key, mark_to_json(B), other.presence.lease)])
    saved = dict(cloud.etcd.entries)
    cloud.store.commit([], [Delete(taker_key)])
    _takes(host)
    assert U in host.hypervisor.guests()
    restore(cloud, saved)
    cloud.is_ample = False
    host.republishes = other.republishes = True
    other.start(republishes=True)
    other.republishes = False  # later starts are without the option

    def come_back() -> None:
        host.start(republishes=True)
        host.rounds(2, host.plan)()

    cloud.act('A', come_back, process=A)
    steps = other.hear_computes, other.hear_hosts, other.hear_queues, other.pull, other.plan

    def read_and_restart() -> None:
        other.rounds(1, *steps)()
        other.restart()
        other.rounds(2, *steps)()

    cloud.act('B', read_and_restart, process=B)
    return lambda: ['U runs on two computes'] if other.hypervisor.guests() else []


SCENARIOS = [
    *within(
        KILLED,
        *(off_before_it_was_active, power_fails_in_a_build, power_fails_without_a_record, older_state_directory),
        state_directory_behind,
    ),
    *within(SHAKY, destroyed_and_waiting_again),
    *within(Bounds(2, 0), runs_and_waits_again, runs_and_waits_marked),
]
