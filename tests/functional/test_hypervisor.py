"""Tests that both hypervisors pass, the fake one and libvirt.

The guests' disks have a boot signature and no system: the guests run, which is all that these tests need.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from ecomp.errors import BuildFailed, Conflict
from ecomp.model.guest import PAUSED, UNLIKE, Guest, GuestSpec, GuestTrouble, ReservedAddress, make_mac_address
from ecomp.virt import Hypervisor
from ecomp.virt.fake import FakeHypervisor
from tests.functional.guest import COMPUTE, SAME_MAC_INSTANCES, MakeSpec, build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.boot_sectors import POWER_BUTTON, make_boot_disk
from tests.kit.servers import wait_until

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")


@pytest.fixture(params=['fake', 'libvirt'])
def hypervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Hypervisor:
    if request.param == 'libvirt':
        return request.getfixturevalue('real_libvirt')
    fake = FakeHypervisor(tmp_path)
    fake.prepare()
    return fake


# For tests whose guests on real libvirt the usual run does without: other tests start enough there.
REAL_IS_SLOW = pytest.mark.parametrize(
    'hypervisor', ['fake', pytest.param('libvirt', marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def power_off(hypervisor: Hypervisor, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], object]:
    if isinstance(hypervisor, FakeHypervisor):
        return partial(change_fake_guest, hypervisor, tmp_path / 'fake.json', running=False)
    host: LibvirtHost = request.getfixturevalue('host')
    return lambda instance: host.run_inside(['virsh', '-q', 'destroy', instance])


@pytest.fixture
def pause(hypervisor: Hypervisor, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], object]:
    if isinstance(hypervisor, FakeHypervisor):
        return partial(change_fake_guest, hypervisor, tmp_path / 'fake.json', troubles=[[PAUSED]])
    host: LibvirtHost = request.getfixturevalue('host')
    return lambda instance: host.run_inside(['virsh', '-q', 'suspend', instance])


def change_fake_guest(fake: FakeHypervisor, path: Path, instance: str, **changed: object) -> None:
    guests = json.loads(path.read_text())
    path.write_text(json.dumps([guest | changed if guest['instance'] == instance else guest for guest in guests]))
    fake.prepare()


def test_guest_is_created_started_and_destroyed(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    instance = spec.instance
    assert hypervisor.list_guests() == {}
    for _ in range(2):
        hypervisor.create_disk(spec)
        assert hypervisor.list_guests() == {instance: Guest(instance, None, defined=False, running=False, disk=True)}
        assert not hypervisor.is_running(instance)
    for _ in range(2):
        hypervisor.start(spec)
        # A guest of another compute is left alone.
        with pytest.raises(Conflict, match=COMPUTE):
            hypervisor.start(replace(spec, compute=str(uuid4())))
        with pytest.raises(Conflict, match=COMPUTE):
            hypervisor.destroy(instance, str(uuid4()))
        assert hypervisor.list_guests() == {instance: Guest(instance, COMPUTE, defined=True, running=True, disk=True)}
        assert hypervisor.is_running(instance)
    for _ in range(2):
        hypervisor.destroy(instance, COMPUTE)
        assert hypervisor.list_guests() == {instance: Guest(instance, None, defined=False, running=False, disk=True)}
    for _ in range(2):
        hypervisor.delete_disk(instance)
        assert hypervisor.list_guests() == {}


@REAL_IS_SLOW
def test_started_guest_has_the_size_of_its_specification(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    build(hypervisor, spec)
    assert spec.disk_gb is not None
    claim = {'VCPU': spec.vcpus, 'MEMORY_MB': spec.memory_mb, 'DISK_GB': spec.disk_gb}
    guest = hypervisor.list_guests()[spec.instance]
    assert guest.size == {**claim, 'MEMORY_MB now': spec.memory_mb}
    assert guest.describe_trouble(claim) == ''
    assert guest.describe_trouble({**claim, 'VCPU': 9}) == f'{UNLIKE}: VCPU:{spec.vcpus} for 9'
    hypervisor.switch_off(spec.instance, COMPUTE)
    assert hypervisor.list_guests()[spec.instance].describe_trouble(claim) == ''


@REAL_IS_SLOW
def test_usage_of_a_guest_is_read_while_it_runs(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.create_disk(spec)
    assert hypervisor.read_usage() == {}
    hypervisor.start(spec)
    # libvirt may be busy with it, and its firmware takes a moment to read the disk.
    is_fake = isinstance(hypervisor, FakeHypervisor)
    usage = wait_until(
        lambda: [each for each in hypervisor.read_usage().values() if is_fake or each.disk_read_bytes_total],
        30,
        'the guest has read its disk',
    )
    assert usage[0].resident_memory_bytes > 2**20
    assert is_fake or (usage[0].vcpu_seconds_total or 0) > 0  # also of an emulated guest
    assert hypervisor.read_usage().keys() <= {spec.instance}
    hypervisor.switch_off(spec.instance, COMPUTE)
    assert hypervisor.read_usage() == {}


@REAL_IS_SLOW
def test_paused_guest_is_reported_until_it_is_switched_off(
    hypervisor: Hypervisor, pause: Callable[[str], object], spec: GuestSpec
) -> None:
    build(hypervisor, spec)
    for end in (hypervisor.switch_off, hypervisor.destroy):
        pause(spec.instance)
        guest = hypervisor.list_guests()[spec.instance]
        assert (guest.running, guest.troubles) == (True, (GuestTrouble(PAUSED),))
        end(spec.instance, COMPUTE)
        assert hypervisor.list_guests()[spec.instance].troubles == ()
        if end == hypervisor.switch_off:
            hypervisor.start_existing(spec.instance, COMPUTE)
    hypervisor.delete_disk(spec.instance)
    assert hypervisor.list_guests() == {}


@REAL_IS_SLOW
def test_seed_is_removed_with_the_disk(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    instance = spec.instance
    seeded = replace(spec, seed={'meta-data': b'{}', 'user-data': b''})
    assert seeded.seed is not None
    assert hypervisor.list_seeds() == set()
    hypervisor.create_disk(seeded)
    with pytest.raises(BuildFailed) as caught:
        hypervisor.start(seeded)
    assert caught.value.stage == 'started'
    assert '\n' not in caught.value.reason
    hypervisor.destroy(instance, COMPUTE)
    for _ in range(2):
        hypervisor.create_seed(instance, seeded.seed)
        assert hypervisor.list_seeds() == {instance}
    hypervisor.start(seeded)
    running_guest = Guest(instance, COMPUTE, defined=True, running=True, disk=True)
    assert hypervisor.list_guests() == {instance: running_guest}
    assert hypervisor.list_disk_users(instance) == {instance}
    assert hypervisor.list_missing_bases() == {}
    with pytest.raises(BuildFailed, match='disk: .*not replaced'):
        hypervisor.create_seed(instance, seeded.seed)
    with pytest.raises(Conflict, match='not removed'):
        hypervisor.delete_seed(instance)
    hypervisor.switch_off(instance, COMPUTE)
    hypervisor.start_existing(instance, COMPUTE)
    assert hypervisor.list_guests() == {instance: running_guest}
    hypervisor.destroy(instance, COMPUTE)
    assert hypervisor.list_seeds() == {instance}
    for _ in range(2):
        hypervisor.delete_disk(instance)
        assert hypervisor.list_seeds() == set()
        assert hypervisor.list_guests() == {}


def test_seed_without_a_disk_is_removed(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    for remove in (hypervisor.delete_seed, hypervisor.delete_disk):
        hypervisor.create_seed(spec.instance, {'meta-data': b'{}', 'user-data': b''})
        assert hypervisor.list_guests() == {}
        assert hypervisor.list_seeds() == {spec.instance}
        for _ in range(2):
            remove(spec.instance)
            assert hypervisor.list_seeds() == set()


def test_address_is_reserved_until_it_is_released(hypervisor: Hypervisor, make_spec: MakeSpec) -> None:
    spec, other = make_spec(), make_spec()
    (mac,), (other_mac,) = spec.macs, other.macs
    hypervisor.release_addresses(spec.instance)
    address = hypervisor.reserve_address(spec.instance, mac, 'default')
    assert address is not None
    other_address = hypervisor.reserve_address(other.instance, other_mac, 'default')
    assert other_address not in (None, address)
    for _ in range(2):
        assert hypervisor.reserve_address(spec.instance, mac, 'default') == address
        both = {mac: ReservedAddress(spec.instance, address), other_mac: ReservedAddress(other.instance, other_address)}
        assert hypervisor.list_reservations() == both
    for _ in range(2):
        hypervisor.release_addresses(spec.instance)
        assert hypervisor.list_reservations() == {other_mac: ReservedAddress(other.instance, other_address)}
    assert hypervisor.reserve_address(spec.instance, mac, 'default') == address, 'the same one again, while it is free'
    for released in (spec, other):
        hypervisor.release_addresses(released.instance)
    assert hypervisor.list_reservations() == {}


def test_mac_collision_is_refused_while_the_first_instance_exists(hypervisor: Hypervisor) -> None:
    """A MAC contains 24 bits of the uuid's hash: some pair of 5,000 instances has the same."""
    first, second = SAME_MAC_INSTANCES
    mac = make_mac_address(first, 0)
    assert make_mac_address(second, 0) == mac
    address = hypervisor.reserve_address(first, mac, 'default')
    assert address is not None
    try:
        with pytest.raises(
            BuildFailed,
            match=f'scheduled: its MAC {mac} is also that of instance {first} on this host. '
            'Fix: create the instance with another uuid',
        ):
            hypervisor.reserve_address(second, mac, 'default')
        hypervisor.release_addresses(second)
        assert hypervisor.reserve_address(first, mac, 'default') == address
        assert hypervisor.list_reservations() == {mac: ReservedAddress(first, address)}
        hypervisor.release_addresses(first)
        assert hypervisor.reserve_address(second, mac, 'default') is not None
    finally:
        for instance in SAME_MAC_INSTANCES:
            hypervisor.release_addresses(instance)


@pytest.fixture
def break_host(hypervisor: Hypervisor, request: pytest.FixtureRequest) -> Callable[[bool], object]:
    if isinstance(hypervisor, FakeHypervisor):
        fake = hypervisor
        return lambda is_off: fake.troubles.__setitem__(slice(None), ['network default is off'] * is_off)
    host: LibvirtHost = request.getfixturevalue('host')
    return lambda is_off: host.run_inside(['virsh', '-q', 'net-destroy' if is_off else 'net-start', 'default'])


def test_trouble_of_the_host_lasts_as_long_as_its_cause(
    hypervisor: Hypervisor, break_host: Callable[[bool], object]
) -> None:
    assert hypervisor.find_troubles() == []
    break_host(True)
    try:
        assert hypervisor.find_troubles() == ['network default is off']
    finally:
        break_host(False)
    assert hypervisor.find_troubles() == []


@REAL_IS_SLOW
def test_users_of_a_disk(hypervisor: Hypervisor, make_spec: MakeSpec) -> None:
    running, disk_only = make_spec(), make_spec()
    build(hypervisor, running)
    hypervisor.create_disk(disk_only)
    assert hypervisor.list_disk_users(running.instance) == {running.instance}
    assert hypervisor.list_disk_users(disk_only.instance) == set()
    assert hypervisor.list_disk_users(str(uuid4())) == set()
    assert hypervisor.list_missing_bases() == {}


@REAL_IS_SLOW
def test_disk_of_a_running_guest_is_not_replaced_or_removed(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    build(hypervisor, spec)
    with pytest.raises(BuildFailed) as caught:
        hypervisor.create_disk(spec)
    assert caught.value.stage == 'disk'
    with pytest.raises(Conflict, match='not removed'):
        hypervisor.delete_disk(spec.instance)
    assert hypervisor.list_guests()[spec.instance].running


# On libvirt, test_filters.py::test_guest_has_these_filter_rules shows it in the usual run.
@REAL_IS_SLOW
def test_resume_starts_a_guest_that_is_off(
    hypervisor: Hypervisor, spec: GuestSpec, power_off: Callable[[str], object]
) -> None:
    """A guest that is off, as after a reboot of its host, runs again as it was defined."""
    instance = spec.instance
    build(hypervisor, spec)
    running_guest = Guest(instance, COMPUTE, defined=True, running=True, disk=True)
    hypervisor.start_existing(instance, COMPUTE)
    assert hypervisor.list_guests() == {instance: running_guest}
    power_off(instance)
    assert not hypervisor.list_guests()[instance].running
    with pytest.raises(Conflict, match=COMPUTE):
        hypervisor.start_existing(instance, str(uuid4()))
    assert not hypervisor.list_guests()[instance].running
    for _ in range(2):
        hypervisor.start_existing(instance, COMPUTE)
        assert hypervisor.list_guests() == {instance: running_guest}


@REAL_IS_SLOW
def test_switch_off_keeps_the_domain(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    instance = spec.instance
    build(hypervisor, spec)
    with pytest.raises(Conflict, match=COMPUTE):
        hypervisor.switch_off(instance, str(uuid4()))
    assert hypervisor.list_guests()[instance].running
    for _ in range(2):
        hypervisor.switch_off(instance, COMPUTE)
        assert hypervisor.list_guests() == {instance: Guest(instance, COMPUTE, defined=True, running=False, disk=True)}
        assert not hypervisor.is_running(instance)
    hypervisor.start_existing(instance, COMPUTE)
    assert hypervisor.list_guests()[instance].running


@REAL_IS_SLOW
def test_shutdown_presses_the_power_button(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    instance = spec.instance
    image = Path(spec.base.path).with_name('power-button.raw')
    image.write_bytes(make_boot_disk(POWER_BUTTON))
    build(hypervisor, replace(spec, base=spec.base._replace(path=str(image))))
    with pytest.raises(Conflict, match=COMPUTE):
        hypervisor.shutdown(instance, str(uuid4()))

    def shut_down() -> bool:
        hypervisor.shutdown(instance, COMPUTE)  # repeat it: a guest ignores the button while its firmware starts
        return not hypervisor.list_guests()[instance].running

    for _ in range(2):
        wait_until(shut_down, 60, 'the guest has turned itself off')
        assert hypervisor.list_guests() == {instance: Guest(instance, COMPUTE, defined=True, running=False, disk=True)}
        hypervisor.shutdown(instance, COMPUTE)
        hypervisor.start_existing(instance, COMPUTE)


def test_operations_without_a_guest_are_no_ops(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.destroy(spec.instance, COMPUTE)
    hypervisor.delete_disk(spec.instance)
    assert hypervisor.find_addresses(spec.instance) == {}
    hypervisor.shutdown(spec.instance, COMPUTE)
    hypervisor.switch_off(spec.instance, COMPUTE)
    assert hypervisor.list_guests() == {}
    hypervisor.create_disk(spec)
    before = hypervisor.list_guests()
    hypervisor.shutdown(spec.instance, COMPUTE)
    hypervisor.switch_off(spec.instance, COMPUTE)
    assert hypervisor.list_guests() == before


def test_resume_without_a_domain_fails(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed, match='started: its domain is gone'):
        hypervisor.start_existing(spec.instance, COMPUTE)
    hypervisor.create_disk(spec)
    with pytest.raises(BuildFailed, match='started: its domain is gone'):
        hypervisor.start_existing(spec.instance, COMPUTE)
    assert not hypervisor.list_guests()[spec.instance].defined


def test_image_larger_than_the_disk_is_refused(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed, match=r'image: the image is 3.0 GiB, but DISK_GB is 1'):
        hypervisor.create_disk(replace(spec, base=spec.base._replace(virtual_size=3 * 2**30)))
    assert hypervisor.list_guests() == {}


def test_start_without_a_disk_fails(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed) as caught:
        hypervisor.start(spec)
    assert caught.value.stage == 'started'
    assert '\n' not in caught.value.reason


# On libvirt, test_libvirt.py::test_driver_reconnects_after_libvirtd_was_killed shows it in the usual run.
@REAL_IS_SLOW
def test_changes_are_reported(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    changes: queue.Queue[str] = queue.Queue()
    hypervisor.watch_changes(changes.put)
    hypervisor.create_disk(spec)
    hypervisor.start(spec)
    wait_until(lambda: spec.instance in changes.get(timeout=60), 60, 'the start is told')


@REAL_IS_SLOW
def test_concurrent_builds_and_destroys(hypervisor: Hypervisor, make_spec: MakeSpec) -> None:
    specs = [make_spec() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda spec: build(hypervisor, spec), specs))
        assert {instance for instance, guest in hypervisor.list_guests().items() if guest.running} == {
            spec.instance for spec in specs
        }
        list(pool.map(lambda spec: hypervisor.destroy(spec.instance, COMPUTE), specs))
        list(pool.map(lambda spec: hypervisor.delete_disk(spec.instance), specs))
    assert hypervisor.list_guests() == {}
