"""Test the planner, and the daemon's threads around it."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.compute import Daemon
from ecomp.agent.host import state
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.instance.records import Superseded
from ecomp.agent.planner import EVERY, LOOKING, POLL, Planner, poll_after
from ecomp.agent.turns import Threads
from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.guest import Address, BaseImage, Guest, GuestSpec, mac_address
from ecomp.model.record import ACTIVE, GONE, STOPPED, from_json
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.changing.wait import Deadline, Wait, wait_for_stage
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, new
from tests.functional.toy import NOW, Toy, toy
from tests.kit.servers import until

# Single steps of one compute without threads. A failure of one instance must not affect the others.

pytestmark = pytest.mark.fast


def test_made_addressed_and_destroyed(one: Toy, cloud: Cloud) -> None:
    instance = one.place()
    assert one.step() == [f'build {instance}']
    assert one.step() == [f'address {instance}']
    assert one.step() == []
    assert one.record(instance).state == ACTIVE
    destroy(cloud.store, instance)
    (work,) = one.planned()
    one.planner.begin(work)
    assert one.planned() == [], 'it is in work'
    assert one.planner.in_work()
    one.planner.carry_out(work)
    assert not one.planner.in_work()
    assert one.step() == []
    assert cloud.server.allocations(instance) == {}
    assert one.hypervisor.guests() == {}


def test_a_guest_that_is_refused_metadata_has_a_fault_until_it_is_answered(one: Toy, cloud: Cloud) -> None:
    instance, other = one.build(), one.build()
    refused = one.host.guest_data.directory / f'{mac_address(instance, 0)}.refused'
    unknown = one.host.guest_data.directory / f'{mac_address(new(), 0)}.refused'
    for path in (refused, unknown):
        path.write_text('no current DHCP lease for 10.0.0.9')
    assert one.step() == [f'power {instance}']
    assert one.step() == []
    assert not unknown.exists()
    fault = 'the metadata server refuses it: no current DHCP lease for 10.0.0.9'
    assert (one.record(instance).fault, one.record(other).fault) == (fault, None)
    waiting = Wait(EtcdConfig((cloud.etcd.endpoint,)), instance, Deadline(0), str)
    with pytest.raises(StillGoing, match=f'cloud-init to finish \\({fault}\\)'):
        wait_for_stage(waiting, 'ready')
    refused.unlink()
    assert one.step() == [f'power {instance}']
    assert one.record(instance).fault is None
    refused.write_text('no current DHCP lease for 10.0.0.9')
    destroy(cloud.store, instance)
    assert one.step() == [f'destroy {instance}']
    assert not refused.exists()


class Odd(FakeHypervisor):
    """A fake hypervisor that fails when it is queried for the addresses of some guests."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: dict[str, EcompError] = {}

    def addresses(self, instance: str) -> Mapping[str, Address]:
        if instance in self.odd:
            raise self.odd[instance]
        return super().addresses(instance)


def test_what_one_guest_s_addresses_fail_with_hinders_no_other(
    cloud: Cloud, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hypervisor = Odd()
    with toy(cloud, tmp_path, hypervisor) as toy_compute:
        failing = toy_compute.place()
        hypervisor.odd[failing] = EcompError("libvirt: asking for the DHCP: no network with matching name 'lan'")
        assert toy_compute.step() == [f'build {failing}']
        other = toy_compute.place()
        assert toy_compute.step() == [f'build {other}']
        assert toy_compute.step() == [f'address {other}']
        waiting, since = toy_compute.planner.without_addresses
        assert waiting == {failing, other}
        toy_compute.step()
        assert toy_compute.planner.without_addresses[0] == {failing}
        assert since < toy_compute.planner.without_addresses[1]
        since = toy_compute.planner.without_addresses[1]
        toy_compute.step()
        assert toy_compute.planner.without_addresses == ({failing}, since), 'it is looked for ever less often'
        assert [line.levelname for line in caplog.records if 'no network' in line.message] == ['WARNING'], 'said once'
        destroy(cloud.store, failing)
        assert toy_compute.step() == [f'destroy {failing}']
        assert toy_compute.step() == []


def test_a_hypervisor_that_is_away_is_no_guest_s_fault(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = Odd()
    with toy(cloud, tmp_path, hypervisor) as toy_compute:
        instance = toy_compute.place()
        assert toy_compute.step() == [f'build {instance}']
        hypervisor.odd[instance] = Unreachable('libvirt is gone', 'libvirt')
        with pytest.raises(Unreachable):
            toy_compute.step()
        hypervisor.odd.clear()
        assert toy_compute.step() == [f'address {instance}']


def test_what_is_handed_back_is_planned_again_later(one: Toy) -> None:
    instance = one.place()
    (work,) = one.planned()
    one.planner.begin(work)
    one.planner.hand_back(work, 'no thread')
    assert not one.planner.in_work()
    assert one.planned() == [], 'it is put off'
    assert one.hypervisor.guests() == {}
    one.planner.works_again()
    assert one.step() == [f'build {instance}']
    assert one.step() == [f'address {instance}']


def test_the_end_of_a_task_and_what_works_again_are_worth_a_step(one: Toy) -> None:
    wake_ups: list[int] = []
    one.place()
    one.planner.nudge('nobody looks yet')
    one.planner.on_nudge = lambda: wake_ups.append(len(one.planner.in_work()))
    (work,) = one.planned()
    one.planner.begin(work)
    one.planner.carry_out(work)
    assert wake_ups == [0], 'by then it is not in work any more'
    one.complaints.complain('one', Unreachable('libvirt is gone', 'libvirt'))
    one.complaints.settle('two')
    assert len(wake_ups) == 1
    one.complaints.settle('one')
    assert len(wake_ups) == 2


def test_nothing_is_kept_of_what_is_not_asked_for_any_more(one: Toy, cloud: Cloud) -> None:
    unreadable, junk = new(), keys.request(one.compute, 'no-uuid')
    cloud.etcd.put(keys.request(one.compute, unreadable), '{}')
    cloud.etcd.put(keys.record(one.compute, unreadable), '{"version": 99}')
    cloud.etcd.put(junk, '{}')
    assert one.step() == ['refuse no-uuid']
    assert one.step() == []
    assert one.complaints._open.keys() == {f'reading {unreadable}'}
    cloud.etcd.delete(keys.request(one.compute, unreadable))
    cloud.etcd.delete(junk)
    assert one.step() == []
    assert (one.complaints._open, one.planner._refused) == ({}, {})
    cloud.etcd.put(junk, '{}')
    assert one.step() == ['refuse no-uuid'], 'another one of that name is said again'
    cloud.etcd.delete(junk)


def test_a_guest_nobody_asks_for_is_said_each_time_it_comes(one: Toy, caplog: pytest.LogCaptureFixture) -> None:
    instance = new()
    spec = GuestSpec(instance, one.compute, 1, 64, 1, BaseImage('', '', 0), 'qemu')
    for _ in range(2):
        one.hypervisor.create_disk(spec)
        one.step()
        one.step()
        one.hypervisor.delete_disk(instance)
        one.step()
    assert caplog.text.count(f'instance {instance} is here but nobody asks for it') == 2


def test_an_end_that_comes_late_leaves_no_lease(one: Toy, cloud: Cloud) -> None:
    """Check that a refused end does not leave a lease of a day or a week behind on every try."""

    def leases() -> set[str]:
        return {lease['ID'] for lease in cloud.etcd.call('lease/leases', {}).get('leases', [])}

    instance = one.place()
    one.step()
    destroy(cloud.store, instance)
    (work,) = one.planned()
    before = leases()
    key = keys.request(one.compute, instance)
    value = cloud.etcd.get(key)
    assert value is not None
    cloud.etcd.put(key, value)  # changes the request after it was planned
    record = replace(one.record(instance), state=GONE)
    with pytest.raises(Superseded):
        one.instances.records.end(record, work.revision)
    assert leases() <= before
    assert one.step() == [f'destroy {instance}']


def test_what_ran_when_the_host_went_down_is_started_again_once(one: Toy) -> None:
    """Check that a guest that goes off later stays off after a restart of ecompute."""
    instance = one.build()
    one.reboot()
    assert one.step() == [f'resume {instance}']
    one.step()
    one.hypervisor.switch_off(instance, one.compute)
    one.restart()
    assert one.step() == [f'power {instance}']
    assert one.record(instance).state == STOPPED


def test_what_is_made_after_a_reboot_did_not_run_before_it(one: Toy) -> None:
    one.reboot()
    instance = one.place()
    for _ in range(3):
        one.step()
    one.hypervisor.switch_off(instance, one.compute)
    one.restart()
    assert one.step() == [f'power {instance}']


def test_one_that_waits_after_a_reboot_holds_up_no_other(one: Toy, cloud: Cloud) -> None:
    unreadable, running, off = (one.build() for _ in range(3))
    one.hypervisor.switch_off(off, one.compute)
    one.step()
    key = keys.record(one.compute, unreadable)
    value = cloud.etcd.get(key)
    assert value is not None
    cloud.etcd.put(key, '{"version": 99}')
    one.reboot()
    for instance in (running, off):  # resumed outside ecomp
        one.hypervisor.resume(instance, one.compute)
    for _ in range(2):
        one.step()
    for instance in (running, off):
        one.hypervisor.switch_off(instance, one.compute)
    assert sorted(one.step()) == sorted([f'power {running}', f'power {off}'])
    one.restart()
    assert one.step() == []
    cloud.etcd.put(key, value)
    assert one.step() == [f'resume {unreadable}']
    one.step()
    one.restart()
    one.hypervisor.switch_off(unreadable, one.compute)
    assert one.step() == [f'power {unreadable}']


def test_a_guest_in_work_after_a_reboot_holds_up_no_other(one: Toy) -> None:
    """Check that a guest in work that is seen running for a moment is still resumed."""
    instances = [one.build() for _ in range(2)]
    one.reboot()
    starting, other = one.planned()
    for work in (starting, other):
        one.planner.begin(work)
    one.planner.carry_out(other)
    one.hypervisor.resume(starting.instance, one.compute)
    one.step()
    one.hypervisor.switch_off(other.instance, one.compute)
    one.hypervisor.switch_off(starting.instance, one.compute)  # and ecompute is killed
    one.restart()
    expected = [f'power {other.instance}', f'resume {starting.instance}']
    assert sorted(one.step()) == sorted(expected), instances


def test_where_nothing_can_be_written_after_a_reboot_it_is_said_and_tried_again(
    one: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = one.build()
    one.reboot()

    def raise_no_space(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))

    with monkeypatch.context() as patched:
        patched.setattr(state, 'write_durably', raise_no_space)
        assert one.step() == [f'resume {instance}']
        for _ in range(2):
            one.step()
        assert caplog.text.count('boot: No space left on device') == 1
    one.step()
    one.hypervisor.switch_off(instance, one.compute)
    one.restart()
    assert one.step() == [f'power {instance}']


@pytest.fixture
def frozen_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Provide an event: while it is set, unlink(2) in the state directory fails with EROFS.

    The call fails for a missing file, too.
    """
    read_only, unlink = threading.Event(), Path.unlink

    def fail_unlink(path: Path, missing_ok: bool = False) -> None:
        if read_only.is_set() and path.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, 'Read-only file system', str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, 'unlink', fail_unlink)
    return read_only


def test_a_guest_that_goes_off_is_noted_on_a_read_only_disk_too(
    one: Toy, frozen_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    instances = [one.build() for _ in range(2)]
    (one.host.guest_data.directory / f'{instances[0]}.ready').write_text('{}')
    one.step()
    frozen_disk.set()
    for instance in instances:
        one.hypervisor.switch_off(instance, one.compute)
    one.step()
    assert [one.record(instance).state for instance in instances] == [STOPPED] * 2
    assert one.step() == []
    assert [line.levelname for line in caplog.records if 'Read-only' in line.message] == ['WARNING']
    assert f'instance {instances[0]} will be called ready' in caplog.text


def test_what_cannot_be_removed_on_a_read_only_disk_is_said_once_and_removed_later(
    one: Toy, cloud: Cloud, frozen_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    instance = one.build()
    destroy(cloud.store, instance)
    frozen_disk.set()
    for _ in range(2):
        assert one.step() == [f'destroy {instance}']
        one.planner.works_again()
    warnings = [line for line in caplog.records if 'Read-only' in line.message]
    assert [(line.levelname, line.exc_info) for line in warnings] == [('WARNING', None)]
    frozen_disk.clear()
    assert one.step() == [f'destroy {instance}']
    assert one.step() == []
    assert one.complaints._open == {}


def test_a_clock_that_was_put_back_keeps_no_address_from_being_written_down(cloud: Cloud, tmp_path: Path) -> None:
    """Check a guest that is turned off while the host's clock is an hour ahead."""

    class Leases(FakeHypervisor):
        def addresses(self, instance: str) -> Mapping[str, Address]:
            return {mac: address._replace(since=NOW) for mac, address in super().addresses(instance).items()}

    with toy(cloud, tmp_path, Leases()) as toy_compute:
        instance = toy_compute.build()
        correct_clock, toy_compute.instances.now = toy_compute.instances.now, lambda: NOW.replace('T09', 'T10')
        toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
        assert toy_compute.step() == [f'power {instance}']
        toy_compute.hypervisor.resume(instance, toy_compute.compute)
        assert toy_compute.step() == [f'power {instance}']
        toy_compute.instances.now = correct_clock
        assert toy_compute.step() == [f'address {instance}']
        assert toy_compute.step() == []


# The daemon's threads in this process: a blocked thread must not block the others.


class Keeper(ClaimKeeper):
    """A claim keeper whose check blocks while `may_answer` is clear, like a frozen placement."""

    def __init__(self, one: Toy) -> None:
        super().__init__(one.compute, one.cloud.store, one.cloud.placement)
        self.asks = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def look(self, guests: Collection[str], now: float) -> None:
        self.asks.set()
        self.answers.wait()
        super().look(guests, now)


@contextmanager
def running(one: Toy, keeper: Keeper, shared: Threads | None = None) -> Iterator[Daemon]:
    """Start the daemon of a compute, which send_requests() feeds, and drain it at the end.

    Several daemons may share the threads in `shared`; without it, the daemon has its own.
    """
    periodic = {LOOKING: lambda: keeper.look(one.hypervisor.guests(), time.monotonic())}
    threads = shared or Threads(1, 2)
    daemon = Daemon(one.host, one.planner, periodic, threads, first=0.0, on_planned=lambda: None)
    daemon.begin()
    try:
        yield daemon
    finally:
        daemon.stop()
        daemon.drain()
        if shared is None:
            threads.close()


def tell(daemon: Daemon, one: Toy) -> None:
    """Pass the compute's requests to the daemon, as its watch would."""
    daemon.on_state(one.cloud.store.snapshot(keys.request_prefix(one.compute)).entries)


def reached(one: Toy, instance: str, state: str) -> None:
    def there() -> bool:
        value = one.cloud.etcd.record(instance)
        return value is not None and from_json(value).state == state

    until(there, 20, f'{instance} is {state}')


def test_a_placement_that_gives_no_answer_holds_up_nothing_else(one: Toy, cloud: Cloud) -> None:
    keeper = Keeper(one)
    keeper.answers.clear()
    with running(one, keeper) as daemon:
        first = one.place()
        tell(daemon, one)
        reached(one, first, ACTIVE)
        assert keeper.asks.wait(60), 'it is asked once a minute, and first at the start'
        second = one.place()
        destroy(cloud.store, first)
        tell(daemon, one)
        reached(one, second, ACTIVE)
        until(lambda: cloud.etcd.get(keys.request(one.compute, first)) is None, 20, 'the destroy is carried out')
    assert not keeper.answers.is_set(), 'nor does its end wait for placement'
    keeper.answers.set()


def test_guests_are_plugged_in_as_soon_as_a_network_was_restarted(cloud: Cloud, tmp_path: Path) -> None:
    class Plugged(FakeHypervisor):
        def __init__(self) -> None:
            super().__init__()
            self.plugged: queue.SimpleQueue[None] = queue.SimpleQueue()
            self.look: Callable[[str], None] | None = None

        def on_change(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
            super().on_change(notify, look)
            self.look = look

        def plug_in(self) -> None:
            self.plugged.put(None)

    hypervisor = Plugged()
    with toy(cloud, tmp_path, hypervisor) as toy_compute, running(toy_compute, Keeper(toy_compute)) as daemon:
        tell(daemon, toy_compute)
        hypervisor.plugged.get(timeout=20)
        assert hypervisor.look is not None
        hypervisor.look('libvirt: network default was started or stopped')
        hypervisor.plugged.get(timeout=20)
        instance = toy_compute.place()
        tell(daemon, toy_compute)
        reached(toy_compute, instance, ACTIVE)
        assert hypervisor.plugged.empty(), 'once, until a minute has passed'


def test_of_those_that_share_threads_one_that_waits_holds_up_no_other(cloud: Cloud, tmp_path: Path) -> None:
    """Check that one compute builds while another waits for placement and a third for libvirt."""
    threads, hangs = Threads(8, 2), threading.Event()

    class Hung(FakeHypervisor):
        def guests(self) -> Mapping[str, Guest]:
            hangs.wait()
            return super().guests()

    with ExitStack() as at_exit:
        at_exit.callback(threads.close)
        working, frozen, silent = (
            at_exit.enter_context(toy(cloud, tmp_path / name, hypervisor))
            for name, hypervisor in (('one', None), ('frozen', Hung()), ('silent', None))
        )
        keepers = [Keeper(compute) for compute in (working, frozen, silent)]
        keepers[2].answers.clear()
        at_exit.callback(keepers[2].answers.set)
        daemons = [
            at_exit.enter_context(running(compute, keeper, threads))
            for compute, keeper in zip((working, frozen, silent), keepers, strict=True)
        ]
        at_exit.callback(hangs.set)
        instances = [compute.place() for compute in (working, frozen, silent)]
        for daemon, compute in zip(reversed(daemons), (silent, frozen, working), strict=True):
            tell(daemon, compute)
        assert keepers[2].asks.wait(60)
        reached(working, instances[0], ACTIVE)
        reached(silent, instances[2], ACTIVE)
        assert keepers[0].asks.wait(60)
        destroy(cloud.store, instances[0])
        tell(daemons[0], working)
        until(lambda: cloud.etcd.get(keys.request(working.compute, instances[0])) is None, 20, 'it is carried out')
        assert frozen.hypervisor._guests == {}
        hangs.set()
        reached(frozen, instances[1], ACTIVE)


def test_a_thread_that_cannot_be_started_is_tried_again(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, tried, exhausted = threading.Thread.start, threading.Event(), threading.Event()

    def start(thread: threading.Thread) -> None:
        if exhausted.is_set() and thread.name.startswith(('build', 'task')):
            tried.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    with toy(cloud, tmp_path) as toy_compute, running(toy_compute, Keeper(toy_compute)) as daemon:
        exhausted.set()
        instance = toy_compute.place()
        tell(daemon, toy_compute)
        assert tried.wait(60)
        until(lambda: 'no thread can be started' in caplog.text, 20, 'it says so')
        exhausted.clear()
        reached(toy_compute, instance, ACTIVE)
        assert caplog.text.count('no thread can be started') <= 2, 'said once, and that it works again'
        assert toy_compute.hypervisor.guests().keys() == {instance}


def test_a_planner_that_meets_what_nobody_thought_of_goes_on(
    one: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check an error in due(), which only computes the time of the next step."""
    real, failures = Planner.due, [MemoryError('none'), MemoryError('none')]

    def due(planner: Planner) -> list[float]:
        if failures:
            raise failures.pop()
        return real(planner)

    monkeypatch.setattr(Planner, 'due', due)
    with running(one, Keeper(one)) as daemon:
        instance = one.place()
        tell(daemon, one)
        reached(one, instance, ACTIVE)
    assert failures == []
    assert 'unexpected error while planning' in caplog.text


def test_an_address_that_never_comes_is_looked_for_ever_less_often() -> None:
    assert [poll_after(minutes * 60) for minutes in (0, 1, 2, 10, 30, 10_000)] == [POLL, POLL, 4, 20, EVERY, EVERY]


class Held(FakeHypervisor):
    """A fake hypervisor whose create_disk() blocks until `may_create` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.may = threading.Event()

    def create_disk(self, spec: GuestSpec) -> None:
        self.asked.set()
        assert self.may.wait(60)
        super().create_disk(spec)


def test_who_becomes_read_only_starts_nothing_that_is_in_work(cloud: Cloud, tmp_path: Path) -> None:
    """Check a compute that was frozen, and that another process replaced in the meantime."""
    hypervisor = Held()
    with toy(cloud, tmp_path, hypervisor) as toy_compute, running(toy_compute, Keeper(toy_compute)) as daemon:
        toy_compute.place()
        tell(daemon, toy_compute)
        assert hypervisor.asked.wait(60)
        daemon.become_read_only('another one is this compute')
        hypervisor.may.set()
        until(lambda: not toy_compute.planner.in_work(), 20, 'it has ended')
        assert hypervisor.guests() == {}


@pytest.mark.parametrize('asked', ['to end', 'to be read-only'])
def test_no_build_that_waits_for_a_thread_is_begun_once_all_are_to_stop(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(Threads, 'BUILDS', 1)
    hypervisor, threads = Held(), Threads(1, 1)
    with toy(cloud, tmp_path, hypervisor) as toy_compute:
        with running(toy_compute, Keeper(toy_compute), threads) as daemon:
            instances = [toy_compute.place() for _ in range(3)]
            tell(daemon, toy_compute)
            assert hypervisor.asked.wait(60)
            if asked == 'to end':
                daemon.stop()
                monkeypatch.setattr(toy_compute.host.runner, 'tend', lambda _: hypervisor.may.set())
            else:
                daemon.become_read_only('another one is this compute')
                hypervisor.may.set()
                until(lambda: not toy_compute.planner.in_work(), 20, 'it has ended')
        threads.close()
        assert hypervisor.guests() == {}
        begun = [instance for instance in instances if cloud.etcd.record(instance) is not None]
        assert len(begun) == 1, 'of the others nothing is begun'
