"""Test the planner, and the daemon's threads around it."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.compute import PlanningLoop
from ecomp.agent.host import state
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.instance.plan import DOMAIN_AND_DISK_GONE
from ecomp.agent.planner import CHECKING_CLAIMS, FIRST_POLL_SECONDS, PLAN_INTERVAL_SECONDS, choose_poll_interval
from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.guest import Address, BaseImage, GuestSpec, make_mac_address
from ecomp.model.record import UNSEEN_END_FAULT, from_json
from ecomp.model.states import ACTIVE, ERROR, GONE, STOPPED
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.changes.wait import Deadline, Wait, wait_for_stage
from ecomp.store.client import Delete, Put
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, make_uuid
from tests.functional.toy import NOW, ToyCompute, make_toy_compute
from tests.kit.servers import wait_until

# Single steps of one compute without threads. A failure of one instance must not affect the others.

pytestmark = pytest.mark.fast


def test_instance_is_built_addressed_and_destroyed(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance = toy_compute.place()
    assert toy_compute.step() == [f'build {instance}']
    assert toy_compute.step() == [f'address {instance}']
    assert toy_compute.step() == []
    assert toy_compute.read_record(instance).state == ACTIVE
    destroy(cloud.store, instance)
    (work,) = toy_compute.plan()
    toy_compute.planner.begin(work)
    assert toy_compute.plan() == [], 'it is in work'
    assert toy_compute.planner.get_in_flight()
    toy_compute.planner.carry_out(work)
    assert not toy_compute.planner.get_in_flight()
    assert toy_compute.step() == []
    assert cloud.server.read_allocations(instance) == {}
    assert toy_compute.hypervisor.list_guests() == {}


def test_refused_metadata_is_a_fault_until_it_is_served(toy_compute: ToyCompute, cloud: Cloud) -> None:
    instance, other = toy_compute.build(), toy_compute.build()
    refused = toy_compute.host.guest_data.directory / f'{make_mac_address(instance, 0)}.refused'
    unknown = toy_compute.host.guest_data.directory / f'{make_mac_address(make_uuid(), 0)}.refused'
    for path in (refused, unknown):
        path.write_text('no current DHCP lease for 10.0.0.9')
    assert toy_compute.step() == [f'power {instance}']
    assert toy_compute.step() == []
    assert not unknown.exists()
    fault = 'the metadata server refuses it: no current DHCP lease for 10.0.0.9'
    assert (toy_compute.read_record(instance).fault, toy_compute.read_record(other).fault) == (fault, None)
    waiting = Wait(EtcdConfig((cloud.etcd.endpoint,)), instance, Deadline(0), str)
    with pytest.raises(StillGoing, match=f'cloud-init to finish \\({fault}\\)'):
        wait_for_stage(waiting, 'ready')
    refused.unlink()
    assert toy_compute.step() == [f'power {instance}']
    assert toy_compute.read_record(instance).fault is None
    refused.write_text('no current DHCP lease for 10.0.0.9')
    destroy(cloud.store, instance)
    assert toy_compute.step() == [f'destroy {instance}']
    assert not refused.exists()


class FailingHypervisor(FakeHypervisor):
    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, EcompError] = {}

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        if instance in self.failures:
            raise self.failures[instance]
        return super().find_addresses(instance)


def test_unreachable_hypervisor_is_not_a_guest_s_fault(cloud: Cloud, tmp_path: Path) -> None:
    hypervisor = FailingHypervisor()
    with make_toy_compute(cloud, tmp_path, hypervisor) as toy_compute:
        instance = toy_compute.place()
        assert toy_compute.step() == [f'build {instance}']
        hypervisor.failures[instance] = Unreachable('libvirt is gone', 'libvirt')
        with pytest.raises(Unreachable):
            toy_compute.step()
        hypervisor.failures.clear()
        assert toy_compute.step() == [f'address {instance}']


def test_returned_task_is_planned_again_later(toy_compute: ToyCompute) -> None:
    instance = toy_compute.place()
    (work,) = toy_compute.plan()
    toy_compute.planner.begin(work)
    toy_compute.planner.hand_back(work, 'no thread')
    assert not toy_compute.planner.get_in_flight()
    assert toy_compute.plan() == [], 'it is put off'
    assert toy_compute.hypervisor.list_guests() == {}
    toy_compute.planner.retry_now()
    assert toy_compute.step() == [f'build {instance}']
    assert toy_compute.step() == [f'address {instance}']


def test_finished_task_and_settled_complaint_wake_the_planner(toy_compute: ToyCompute) -> None:
    wake_ups: list[int] = []
    toy_compute.place()
    toy_compute.planner.wake_up('nobody looks yet')
    toy_compute.planner.on_wake_up = lambda: wake_ups.append(len(toy_compute.planner.get_in_flight()))
    (work,) = toy_compute.plan()
    toy_compute.planner.begin(work)
    toy_compute.planner.carry_out(work)
    assert wake_ups == [0], 'by then it is not in work any more'
    toy_compute.complaints.report_failure('one', Unreachable('libvirt is gone', 'libvirt'))
    toy_compute.complaints.report_success('two')
    assert len(wake_ups) == 1
    toy_compute.complaints.report_success('one')
    assert len(wake_ups) == 2


def test_removed_requests_leave_no_complaint_behind(toy_compute: ToyCompute, cloud: Cloud) -> None:
    unreadable, junk = make_uuid(), keys.request(toy_compute.compute, 'no-uuid')
    cloud.etcd.put(keys.request(toy_compute.compute, unreadable), '{}')
    cloud.etcd.put(keys.record(toy_compute.compute, unreadable), '{"version": 99}')
    cloud.etcd.put(junk, '{}')
    assert toy_compute.step() == ['refuse no-uuid']
    assert toy_compute.step() == []
    assert toy_compute.complaints._failing.keys() == {f'reading the record of {unreadable}'}
    cloud.etcd.delete(keys.request(toy_compute.compute, unreadable))
    cloud.etcd.delete(junk)
    assert toy_compute.step() == []
    assert (toy_compute.complaints._failing, toy_compute.planner._refused_revisions) == ({}, {})
    cloud.etcd.put(junk, '{}')
    assert toy_compute.step() == ['refuse no-uuid'], 'another one of that name is said again'
    cloud.etcd.delete(junk)


def test_unmanaged_guest_is_logged_each_time_it_appears(
    toy_compute: ToyCompute, caplog: pytest.LogCaptureFixture
) -> None:
    instance = make_uuid()
    spec = GuestSpec(instance, toy_compute.compute, 1, 64, 1, BaseImage('', '', 0), 'qemu')
    for _ in range(2):
        toy_compute.hypervisor.create_disk(spec)
        toy_compute.step()
        toy_compute.step()
        toy_compute.hypervisor.delete_disk(instance)
        toy_compute.step()
    assert caplog.text.count(f'instance {instance} has a guest but no request: the guest is kept') == 2


@pytest.mark.parametrize(
    ('state', 'fault', 'is_removed'),
    [
        (GONE, UNSEEN_END_FAULT, True),
        (GONE, DOMAIN_AND_DISK_GONE, False),
        (GONE, None, False),
        (ERROR, UNSEEN_END_FAULT, False),
        (ERROR, None, False),
    ],
)
def test_guest_without_a_request_is_removed_only_if_its_end_was_accepted_unseen(
    toy_compute: ToyCompute, cloud: Cloud, state: str, fault: str | None, is_removed: bool
) -> None:
    instance = toy_compute.build()
    final = replace(toy_compute.read_record(instance).enter_state(state, NOW, state), fault=fault)
    request, record, address = toy_compute.list_keys(instance)
    cloud.store.commit([], [Put(record, encode(final)), Delete(request), Delete(address)])
    toy_compute.restart()
    assert toy_compute.step() == ([f'destroy as accepted {instance}'] if is_removed else [])
    assert (instance in toy_compute.hypervisor.list_guests()) is not is_removed
    assert (instance in toy_compute.memory.get_ended()) is is_removed
    assert (cloud.server.read_allocations(instance) == {}) is is_removed
    assert toy_compute.step() == []


def test_failed_removal_after_a_forget_is_retried(
    toy_compute: ToyCompute, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = toy_compute.build()
    gone = replace(toy_compute.read_record(instance).enter_state(GONE, NOW, 'gone'), fault=UNSEEN_END_FAULT)
    request, record, _ = toy_compute.list_keys(instance)
    cloud.store.commit([], [Put(record, encode(gone)), Delete(request)])
    toy_compute.restart()
    with monkeypatch.context() as patch:
        patch.setattr(toy_compute.hypervisor, 'destroy', raise_unreachable)
        assert toy_compute.step() == [f'destroy as accepted {instance}']
    assert toy_compute.hypervisor.is_running(instance)
    toy_compute.planner.retry_now()
    assert toy_compute.step() == [f'destroy as accepted {instance}']
    assert instance not in toy_compute.hypervisor.list_guests()


def raise_unreachable(*_: object) -> None:
    raise Unreachable('libvirt does not answer', 'libvirt')


def test_guest_running_before_a_reboot_is_resumed_once(toy_compute: ToyCompute) -> None:
    """Check that a guest that goes off later stays off after a restart of ecompute."""
    instance = toy_compute.build()
    toy_compute.reboot()
    assert toy_compute.step() == [f'resume {instance}']
    toy_compute.step()
    toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
    toy_compute.restart()
    assert toy_compute.step() == [f'power {instance}']
    assert toy_compute.read_record(instance).state == STOPPED


def test_guest_built_after_a_reboot_is_not_resumed(toy_compute: ToyCompute) -> None:
    toy_compute.reboot()
    instance = toy_compute.place()
    for _ in range(3):
        toy_compute.step()
    toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
    toy_compute.restart()
    assert toy_compute.step() == [f'power {instance}']


def test_malformed_record_after_a_reboot_blocks_no_other_guest(toy_compute: ToyCompute, cloud: Cloud) -> None:
    unreadable, running, off = (toy_compute.build() for _ in range(3))
    toy_compute.hypervisor.switch_off(off, toy_compute.compute)
    toy_compute.step()
    key = keys.record(toy_compute.compute, unreadable)
    value = cloud.etcd.get(key)
    assert value is not None
    cloud.etcd.put(key, '{"version": 99}')
    toy_compute.reboot()
    for instance in (running, off):  # resumed outside ecomp
        toy_compute.hypervisor.start_existing(instance, toy_compute.compute)
    for _ in range(2):
        toy_compute.step()
    for instance in (running, off):
        toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
    assert sorted(toy_compute.step()) == sorted([f'power {running}', f'power {off}'])
    toy_compute.restart()
    assert toy_compute.step() == []
    cloud.etcd.put(key, value)
    assert toy_compute.step() == [f'resume {unreadable}']
    toy_compute.step()
    toy_compute.restart()
    toy_compute.hypervisor.switch_off(unreadable, toy_compute.compute)
    assert toy_compute.step() == [f'power {unreadable}']


def test_task_in_flight_after_a_reboot_blocks_no_other_guest(toy_compute: ToyCompute) -> None:
    """Check that a guest in work that is seen running for a moment is still resumed."""
    instances = [toy_compute.build() for _ in range(2)]
    toy_compute.reboot()
    starting, other = toy_compute.plan()
    for work in (starting, other):
        toy_compute.planner.begin(work)
    toy_compute.planner.carry_out(other)
    toy_compute.hypervisor.start_existing(starting.instance, toy_compute.compute)
    toy_compute.step()
    toy_compute.hypervisor.switch_off(other.instance, toy_compute.compute)
    toy_compute.hypervisor.switch_off(starting.instance, toy_compute.compute)  # and ecompute is killed
    toy_compute.restart()
    expected = [f'power {other.instance}', f'resume {starting.instance}']
    assert sorted(toy_compute.step()) == sorted(expected), instances


def test_full_disk_after_a_reboot_is_logged_once_and_retried(
    toy_compute: ToyCompute, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = toy_compute.build()
    toy_compute.reboot()

    def raise_no_space(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))

    with monkeypatch.context() as patched:
        patched.setattr(state, 'write_durably', raise_no_space)
        assert toy_compute.step() == [f'resume {instance}']
        for _ in range(2):
            toy_compute.step()
        assert caplog.text.count('boot: No space left on device') == 1
    toy_compute.step()
    toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
    toy_compute.restart()
    assert toy_compute.step() == [f'power {instance}']


@pytest.fixture
def frozen_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, unlink(2) in the state directory fails, even for a missing file."""
    read_only, unlink = threading.Event(), Path.unlink

    def fail_unlink(path: Path, missing_ok: bool = False) -> None:
        if read_only.is_set() and path.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, 'Read-only file system', str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, 'unlink', fail_unlink)
    return read_only


def test_guest_going_off_is_recorded_on_a_read_only_disk(
    toy_compute: ToyCompute, frozen_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    instances = [toy_compute.build() for _ in range(2)]
    (toy_compute.host.guest_data.directory / f'{instances[0]}.ready').write_text('{}')
    toy_compute.step()
    frozen_disk.set()
    for instance in instances:
        toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
    toy_compute.step()
    assert [toy_compute.read_record(instance).state for instance in instances] == [STOPPED] * 2
    assert toy_compute.step() == []
    assert [line.levelname for line in caplog.records if 'Read-only' in line.message] == ['WARNING']
    assert f'instance {instances[0]} will seem ready' in caplog.text


def test_destroy_on_a_read_only_disk_is_logged_once_and_retried(
    toy_compute: ToyCompute, cloud: Cloud, frozen_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    instance = toy_compute.build()
    destroy(cloud.store, instance)
    frozen_disk.set()
    for _ in range(2):
        assert toy_compute.step() == [f'destroy {instance}']
        toy_compute.planner.retry_now()
    warnings = [line for line in caplog.records if 'Read-only' in line.message]
    assert [(line.levelname, line.exc_info) for line in warnings] == [('WARNING', None)]
    frozen_disk.clear()
    assert toy_compute.step() == [f'destroy {instance}']
    assert toy_compute.step() == []
    assert toy_compute.complaints._failing == {}


def test_address_is_recorded_after_the_clock_was_set_back(cloud: Cloud, tmp_path: Path) -> None:
    """Check a guest that is turned off while the host's clock is an hour ahead."""

    class Leases(FakeHypervisor):
        def find_addresses(self, instance: str) -> Mapping[str, Address]:
            return {mac: address._replace(since=NOW) for mac, address in super().find_addresses(instance).items()}

    with make_toy_compute(cloud, tmp_path, Leases()) as toy_compute:
        instance = toy_compute.build()
        correct_clock, toy_compute.instances.now = toy_compute.instances.now, lambda: NOW.replace('T09', 'T10')
        toy_compute.hypervisor.switch_off(instance, toy_compute.compute)
        assert toy_compute.step() == [f'power {instance}']
        toy_compute.hypervisor.start_existing(instance, toy_compute.compute)
        assert toy_compute.step() == [f'power {instance}']
        toy_compute.instances.now = correct_clock
        assert toy_compute.step() == [f'address {instance}']
        assert toy_compute.step() == []


# The daemon's threads in this process: a blocked thread must not block the others.


class BlockingClaimKeeper(ClaimKeeper):
    """A claim keeper whose check blocks while `may_answer` is clear, like a frozen placement."""

    def __init__(self, toy_compute: ToyCompute) -> None:
        super().__init__(toy_compute.compute, toy_compute.cloud.store, toy_compute.cloud.placement)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def reconcile(self, guests: Collection[str], now: float) -> None:
        self.is_asked.set()
        self.may_answer.wait()
        super().reconcile(guests, now)


@contextmanager
def start_daemon(toy_compute: ToyCompute, keeper: BlockingClaimKeeper, max_tasks: int = 2) -> Iterator[PlanningLoop]:
    periodic = {CHECKING_CLAIMS: lambda: keeper.reconcile(toy_compute.hypervisor.list_guests(), time.monotonic())}
    daemon = PlanningLoop(
        toy_compute.host,
        toy_compute.planner,
        periodic,
        max_tasks,
        on_planned=lambda: None,
        check_troubles=lambda: None,
    )
    daemon.begin()
    try:
        yield daemon
    finally:
        daemon.stop()
        daemon.drain()


def send_requests(daemon: PlanningLoop, toy_compute: ToyCompute) -> None:
    daemon.on_state(toy_compute.cloud.store.snapshot(keys.request_prefix(toy_compute.compute)).entries)


def wait_for_state(toy_compute: ToyCompute, instance: str, state: str) -> None:
    def is_reached() -> bool:
        value = toy_compute.cloud.etcd.read_record(instance)
        return value is not None and from_json(value).state == state

    wait_until(is_reached, 20, f'{instance} is {state}')


def test_silent_placement_blocks_nothing_else(toy_compute: ToyCompute, cloud: Cloud) -> None:
    keeper = BlockingClaimKeeper(toy_compute)
    keeper.may_answer.clear()
    with start_daemon(toy_compute, keeper) as daemon:
        first = toy_compute.place()
        send_requests(daemon, toy_compute)
        wait_for_state(toy_compute, first, ACTIVE)
        assert keeper.is_asked.wait(60), 'it is asked once a minute, and first at the start'
        second = toy_compute.place()
        destroy(cloud.store, first)
        send_requests(daemon, toy_compute)
        wait_for_state(toy_compute, second, ACTIVE)
        wait_until(
            lambda: cloud.etcd.get(keys.request(toy_compute.compute, first)) is None, 20, 'the destroy is carried out'
        )
    assert not keeper.may_answer.is_set(), 'nor does its end wait for placement'
    keeper.may_answer.set()


def test_guests_are_plugged_in_after_a_network_restart(cloud: Cloud, tmp_path: Path) -> None:
    class Plugged(FakeHypervisor):
        def __init__(self) -> None:
            super().__init__()
            self.plugged: queue.SimpleQueue[None] = queue.SimpleQueue()
            self.look: Callable[[str], None] | None = None

        def watch_changes(
            self, notify: Callable[[str], None], on_network_change: Callable[[str], None] | None = None
        ) -> None:
            super().watch_changes(notify, on_network_change)
            self.look = on_network_change

        def replug_interfaces(self) -> None:
            self.plugged.put(None)

    hypervisor = Plugged()
    with (
        make_toy_compute(cloud, tmp_path, hypervisor) as toy_compute,
        start_daemon(toy_compute, BlockingClaimKeeper(toy_compute)) as daemon,
    ):
        send_requests(daemon, toy_compute)
        hypervisor.plugged.get(timeout=20)
        assert hypervisor.look is not None
        hypervisor.look('libvirt: network default was started or stopped')
        hypervisor.plugged.get(timeout=20)
        instance = toy_compute.place()
        send_requests(daemon, toy_compute)
        wait_for_state(toy_compute, instance, ACTIVE)
        assert hypervisor.plugged.empty(), 'once, until a minute has passed'


def test_missing_address_is_polled_less_and_less_often() -> None:
    assert [choose_poll_interval(minutes * 60) for minutes in (0, 1, 2, 10, 30, 10_000)] == [
        FIRST_POLL_SECONDS,
        FIRST_POLL_SECONDS,
        4,
        20,
        PLAN_INTERVAL_SECONDS,
        PLAN_INTERVAL_SECONDS,
    ]


class BlockingHypervisor(FakeHypervisor):
    def __init__(self) -> None:
        super().__init__()
        self.is_creating = threading.Event()
        self.may_create = threading.Event()

    def create_disk(self, spec: GuestSpec) -> None:
        self.is_creating.set()
        assert self.may_create.wait(60)
        super().create_disk(spec)


def test_read_only_compute_undoes_the_build_in_work(cloud: Cloud, tmp_path: Path) -> None:
    """Check a compute that was frozen, and that another process replaced in the meantime."""
    hypervisor = BlockingHypervisor()
    with (
        make_toy_compute(cloud, tmp_path, hypervisor) as toy_compute,
        start_daemon(toy_compute, BlockingClaimKeeper(toy_compute)) as daemon,
    ):
        toy_compute.place()
        send_requests(daemon, toy_compute)
        assert hypervisor.is_creating.wait(60)
        daemon.become_read_only('another one is this compute')
        hypervisor.may_create.set()
        wait_until(lambda: not toy_compute.planner.get_in_flight(), 20, 'it has ended')
        assert hypervisor.list_guests() == {}


@pytest.mark.parametrize('asked', ['to end', 'to be read-only'])
def test_queued_builds_do_not_begin_after_a_stop(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr('ecomp.agent.compute.MIN_BUILD_THREADS', 1)
    hypervisor = BlockingHypervisor()
    with make_toy_compute(cloud, tmp_path, hypervisor) as toy_compute:
        with start_daemon(toy_compute, BlockingClaimKeeper(toy_compute), max_tasks=1) as daemon:
            instances = [toy_compute.place() for _ in range(3)]
            send_requests(daemon, toy_compute)
            assert hypervisor.is_creating.wait(60)
            if asked == 'to end':
                daemon.stop()
                monkeypatch.setattr(toy_compute.host.runner, 'tend', lambda _: hypervisor.may_create.set())
            else:
                daemon.become_read_only('another one is this compute')
                hypervisor.may_create.set()
                wait_until(lambda: not toy_compute.planner.get_in_flight(), 20, 'it has ended')
        assert hypervisor.list_guests() == {}
        begun = [instance for instance in instances if cloud.etcd.read_record(instance) is not None]
        assert len(begun) == 1, 'of the others nothing is begun'


def test_tasks_keep_to_their_limit_and_one_without_a_thread_is_retried(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.agent.compute.MIN_BUILD_THREADS', 2)
    hypervisor, refusals, real = BlockingHypervisor(), [1], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == 'task' and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    with (
        make_toy_compute(cloud, tmp_path, hypervisor) as toy_compute,
        start_daemon(toy_compute, BlockingClaimKeeper(toy_compute), max_tasks=1) as daemon,
    ):
        instances = [toy_compute.place() for _ in range(4)]
        send_requests(daemon, toy_compute)
        wait_until(lambda: len(toy_compute.planner.get_in_flight()) == 2, 20, 'two builds begin')
        daemon.planner.retry_now()
        daemon.planner.wake_up('another plan begins no third one')
        assert hypervisor.is_creating.wait(60)
        assert len(toy_compute.planner.get_in_flight()) == 2
        hypervisor.may_create.set()
        for instance in instances:
            wait_for_state(toy_compute, instance, ACTIVE)
    assert not refusals


def test_new_tasks_start_before_those_that_failed(toy_compute: ToyCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.agent.compute.MIN_BUILD_THREADS', 3)
    begun, planner, begin = list[str](), toy_compute.planner, toy_compute.planner.begin
    with start_daemon(toy_compute, BlockingClaimKeeper(toy_compute)) as daemon:
        failed_last, failed_first, first, second = [toy_compute.place() for _ in range(4)]
        planner.deferrals.defer(failed_first, 0)
        planner.deferrals.defer(failed_last, 0)
        monkeypatch.setattr(planner, 'begin', lambda work: (begun.append(work.instance), begin(work)))
        monkeypatch.setattr(planner, 'carry_out', planner._finish)
        daemon._start_tasks(toy_compute.plan())
    assert begun == [first, second, failed_first]
