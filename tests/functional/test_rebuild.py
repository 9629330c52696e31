"""A rebuild: done once, whatever fails or ends in the middle, and never by an older etcd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.pool import InlineRunner
from ecomp.conf import EtcdConfig
from ecomp.errors import BuildFailed, Conflict, EcompError, NotFound
from ecomp.model import keys
from ecomp.model.guest import BaseImage, GuestSpec, make_mac_address
from ecomp.model.order import REBUILD_FAILED, START, PowerAction
from ecomp.model.record import Record, from_json
from ecomp.model.states import ACTIVE, STOPPED
from ecomp.model.stored import encode
from ecomp.model.user_data import SharedUserData
from ecomp.scheduler.changes.change import change_power, destroy
from ecomp.scheduler.changes.wait import Deadline, Wait, wait_for_rebuild
from ecomp.scheduler.placing.modify import protect, rebuild, rename, resize
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import IMAGE, OWNER, SMALL, Cloud, make_uuid
from tests.functional.toy import NOW, ToyCompute, make_toy_compute

pytestmark = pytest.mark.fast

OTHER = 'http://images.example/other.qcow2'
HOST_KEYS = ('ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f',)


class Killed(BaseException):
    """The process ends: nothing is undone."""


class Host(FakeHypervisor):
    """A fake host whose process is killed around a step, or at which a step fails."""

    def __init__(self) -> None:
        super().__init__()
        self.disks: list[tuple[int, str]] = []
        self.fails_at = self.dies_before = self.dies_after = ''
        self.is_dead = False

    def _run(self, step: str, run: Callable[[], None]) -> None:
        self.is_dead |= step == self.dies_before
        if self.is_dead:
            raise Killed
        if step == self.fails_at:
            raise BuildFailed('disk', 'it was told to')
        run()
        if step == self.dies_after:
            self.is_dead = True
            raise Killed

    def switch_off(self, instance: str, compute: str) -> None:
        self._run('switch_off', lambda: super(Host, self).switch_off(instance, compute))

    def delete_disk(self, instance: str) -> None:
        self._run('delete_disk', lambda: super(Host, self).delete_disk(instance))

    def create_disk(self, spec: GuestSpec) -> None:
        self.disks.append((spec.rebuilt, spec.base.path))
        self._run('create_disk', lambda: super(Host, self).create_disk(spec))

    def start(self, spec: GuestSpec) -> None:
        self._run('start', lambda: super(Host, self).start(spec))


class BrokenImages(FakeImages):
    """Images of which some cannot be had, and others are large."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual_size = 0
        self.on_hold: Callable[[], object] = lambda: None

    @contextmanager
    def hold(self, url: str, *others: object) -> Iterator[BaseImage]:
        self.on_hold()
        if 'missing' in url:
            raise BuildFailed('image', f'{url}: answers 404')
        with super().hold(url, *others) as base:  # type: ignore[arg-type]
            yield base._replace(virtual_size=self.virtual_size)


class Rebuilt:
    """An instance on a toy compute that was built, addressed and is ready."""

    def __init__(self, cloud: Cloud, toy_compute: ToyCompute, host: Host, images: BrokenImages) -> None:
        self.cloud, self.toy, self.host, self.images = cloud, toy_compute, host, images
        self.instance = toy_compute.build()
        rename(cloud.store, self.instance, 'web1')
        toy_compute.settle()
        self.toy.instances.records.write(replace(self.record, host_keys=HOST_KEYS), self.revision)
        self.before, self.reservations = self.record, host.list_reservations()
        self.marks = [0]

    @property
    def record(self) -> Record:
        self.toy.instances.records.forget(self.instance)
        return self.toy.read_record(self.instance)

    @property
    def revision(self) -> int:
        entry = self.cloud.store.get(keys.request(self.toy.compute, self.instance))
        assert entry is not None
        return entry.revision

    def request(self, image: str | None = OTHER) -> int:
        sentence, number = rebuild(self.cloud.store, self.instance, image)
        assert sentence.startswith(f'{self.instance}: rebuild accepted; {self.toy.compute} carries it out')
        return number

    def restart(self) -> None:
        self.host.dies_before = self.host.dies_after = self.host.fails_at = ''
        self.host.is_dead = False
        self.toy.restart()

    def wait(self, number: int) -> None:
        config = EtcdConfig((self.cloud.etcd.endpoint,))
        wait_for_rebuild(Wait(config, self.instance, Deadline(0), str), number)

    def require_holdings(self) -> None:
        assert self.cloud.server.read_allocations(self.instance) == {self.toy.compute: SMALL}
        assert self.host.list_reservations() == self.reservations
        reservations = [each.reservation for each in self.before.addresses]
        assert [each.reservation for each in self.record.addresses] == reservations
        assert self.record.name == 'web1'

    def require_done(self, number: int, image: str = OTHER) -> None:
        self.require_holdings()
        guest, record = self.host.list_guests()[self.instance], self.record
        assert (guest.rebuilt, guest.running, guest.disk) == (number, True, True)
        assert (record.state, record.fault, record.rebuilt) == (ACTIVE, None, str(number))
        assert (record.image, record.host_keys, record.address) == (image, (), self.before.address)
        assert record.last_boot is not None
        assert (record.last_boot.reason, record.last_boot.previous_stop) == ('rebuild', NOW)
        assert self.toy.memory.get_entries()[self.instance].record == record
        assert self.toy.step() == []
        self.wait(number)


@pytest.fixture
def rebuilt(cloud: Cloud, tmp_path: Path) -> Iterator[Rebuilt]:
    host, images = Host(), BrokenImages()
    with make_toy_compute(cloud, tmp_path, host) as toy_compute:
        toy_compute.host = replace(toy_compute.host, runner=InlineRunner(host, images))
        toy_compute.restart()
        yield Rebuilt(cloud, toy_compute, host, images)


def test_rebuild_replaces_the_disk_and_keeps_the_rest(rebuilt: Rebuilt) -> None:
    assert rebuilt.host.disks == [(0, IMAGE)]
    number = rebuilt.request()
    assert rebuilt.toy.step() == [f'rebuild {rebuilt.instance}']
    rebuilt.toy.settle()
    rebuilt.require_done(number)
    data = rebuilt.toy.host.guest_data.directory / f'{make_mac_address(rebuilt.instance, 0)}.json'
    assert json.loads(data.read_text())['hostname'] == 'web1', 'its present name'
    again = rebuilt.request(None)
    assert again > number
    rebuilt.toy.settle()
    rebuilt.require_done(again)
    assert rebuilt.host.disks == [(0, IMAGE), (number, OTHER), (again, OTHER)]


def test_report_of_the_guest_before_is_not_taken_for_the_new_one(rebuilt: Rebuilt) -> None:
    report = rebuilt.toy.host.guest_data.get_report_path(rebuilt.instance)
    rebuilt.images.on_hold = lambda: report.write_text(json.dumps({'host_keys': list(HOST_KEYS)}))
    number = rebuilt.request()
    rebuilt.toy.settle()
    rebuilt.require_done(number)
    assert 'ready' not in rebuilt.record.reached_stages


def test_stopped_instance_runs_after_a_rebuild(rebuilt: Rebuilt) -> None:
    rebuilt.host.switch_off(rebuilt.instance, rebuilt.toy.compute)
    rebuilt.toy.settle()
    assert rebuilt.record.state == STOPPED
    number = rebuilt.request()
    rebuilt.toy.settle()
    rebuilt.require_done(number)


@pytest.mark.parametrize('problem', ['missing', 'large', 'user-data', 'claim'])
def test_rebuild_refused_before_the_removal_changes_nothing(rebuilt: Rebuilt, problem: str) -> None:
    rebuilt.images.virtual_size = 2**31 if problem == 'large' else 0
    number = rebuilt.request('http://images.example/missing' if problem == 'missing' else OTHER)
    key = keys.request(rebuilt.toy.compute, rebuilt.instance)
    value = json.loads(rebuilt.cloud.etcd.get(key) or b'')
    if problem == 'user-data':  # it expired after the command
        value['user_data_sha256'] = SharedUserData.from_bytes(b'expired').sha256
    if problem == 'claim':
        value['allocations'][rebuilt.toy.compute]['resources']['VCPU'] = 2
    rebuilt.cloud.etcd.put(key, json.dumps(value))
    guest = rebuilt.host.list_guests()[rebuilt.instance]
    rebuilt.toy.settle()
    rebuilt.require_holdings()
    record = rebuilt.record
    assert (record.state, record.image, record.host_keys) == (ACTIVE, IMAGE, HOST_KEYS)
    assert record.last_boot == rebuilt.before.last_boot
    reasons = {'missing': '404', 'large': 'DISK_GB is 1', 'user-data': 'user-data is no longer', 'claim': 'VCPU'}
    reason = reasons[problem]
    assert (record.fault or '').startswith(REBUILD_FAILED)
    assert reason in (record.fault or '')
    assert rebuilt.host.list_guests()[rebuilt.instance] == guest
    assert rebuilt.host.disks == [(0, IMAGE)]
    with pytest.raises(EcompError, match=reason):
        rebuilt.wait(number)
    rebuilt.restart()
    assert rebuilt.toy.step() == [], 'it is not tried for ever'
    # The fault ends with the next start.
    change_power(rebuilt.cloud.store, rebuilt.instance, PowerAction('reboot', make_uuid()))
    rebuilt.toy.settle()
    assert (rebuilt.record.state, rebuilt.record.fault) == (ACTIVE, None)


@pytest.mark.parametrize('step', ['create_disk', 'start'])
def test_failed_rebuild_leaves_a_stopped_instance_with_its_claim(rebuilt: Rebuilt, step: str) -> None:
    rebuilt.host.fails_at = step
    number = rebuilt.request()
    rebuilt.toy.settle()
    fault = f'{REBUILD_FAILED}: it was told to'
    assert (rebuilt.record.state, rebuilt.record.fault, rebuilt.record.host_keys) == (STOPPED, fault, ())
    rebuilt.require_holdings()
    with pytest.raises(EcompError, match=fault):
        rebuilt.wait(number)
    rebuilt.restart()
    assert rebuilt.toy.step() == []
    assert rebuilt.record.fault == fault
    again = rebuilt.request(None)
    rebuilt.toy.settle()
    rebuilt.require_done(again)


def test_guest_that_could_not_be_started_can_be_started_later(rebuilt: Rebuilt) -> None:
    rebuilt.host.fails_at = 'start'
    rebuilt.request()
    rebuilt.toy.settle()
    change_power(rebuilt.cloud.store, rebuilt.instance, PowerAction(START, make_uuid()))
    rebuilt.toy.settle()
    assert (rebuilt.record.state, rebuilt.record.fault) == (ACTIVE, None)


STEPS = ['switch_off', 'delete_disk', 'create_disk', 'start']


@pytest.mark.parametrize('when', ['dies_before', 'dies_after'])
@pytest.mark.parametrize('step', STEPS)
def test_rebuild_goes_on_after_a_restart(rebuilt: Rebuilt, step: str, when: str) -> None:
    setattr(rebuilt.host, when, step)
    number = rebuilt.request()
    with pytest.raises(Killed):
        rebuilt.toy.step()
    begun = rebuilt.record
    assert (begun.rebuilt, begun.host_keys, begun.state) == (f'{number}:begun', (), ACTIVE)
    rebuilt.restart()
    assert rebuilt.toy.step() == [f'rebuild {rebuilt.instance}']
    rebuilt.toy.settle()
    rebuilt.require_done(number)
    # What was started is not rebuilt once more.
    has_two_tries = step == 'create_disk' or (step, when) == ('start', 'dies_before')
    assert len(rebuilt.host.disks) == (3 if has_two_tries else 2)


def test_defined_guest_is_only_started_after_a_restart(rebuilt: Rebuilt) -> None:
    rebuilt.host.dies_after = 'start'
    number = rebuilt.request()
    with pytest.raises(Killed):
        rebuilt.toy.step()
    rebuilt.restart()
    rebuilt.host.switch_off(rebuilt.instance, rebuilt.toy.compute)
    rebuilt.toy.settle()
    rebuilt.require_done(number)
    assert len(rebuilt.host.disks) == 2


def test_domain_and_disk_missing_in_the_middle_do_not_end_the_instance(rebuilt: Rebuilt) -> None:
    rebuilt.host.dies_after = 'delete_disk'
    number = rebuilt.request()
    with pytest.raises(Killed):
        rebuilt.toy.step()
    rebuilt.restart()
    rebuilt.host.destroy(rebuilt.instance, rebuilt.toy.compute)
    assert rebuilt.host.list_guests() == {}
    rebuilt.toy.planner._missing_since = {rebuilt.instance: 0.0}
    rebuilt.toy.settle()
    rebuilt.require_done(number)


@pytest.mark.parametrize('loss', ['memory', 'record', 'both'])
def test_older_etcd_repeats_no_rebuild(rebuilt: Rebuilt, loss: str, tmp_path: Path) -> None:
    number = rebuilt.request()
    pending = {key: rebuilt.cloud.etcd.get(key) for key in rebuilt.toy.list_keys(rebuilt.instance)[:2]}
    rebuilt.toy.settle()
    for key, value in pending.items():
        rebuilt.cloud.etcd.put(key, value or b'')
    if loss != 'memory':
        rebuilt.cloud.etcd.delete(keys.record(rebuilt.toy.compute, rebuilt.instance))
    if loss != 'record':
        rebuilt.toy.state = tmp_path / 'new'
    rebuilt.restart()
    if loss == 'record':
        rebuilt.toy.republish({rebuilt.instance})
    rebuilt.toy.settle()
    assert (rebuilt.record.rebuilt, rebuilt.record.state, rebuilt.record.image) == (str(number), ACTIVE, OTHER)
    assert len(rebuilt.host.disks) == 2
    again = rebuilt.request(IMAGE)
    rebuilt.toy.settle()
    rebuilt.require_done(again, IMAGE)


def test_etcd_from_before_a_rebuild_learns_of_it(rebuilt: Rebuilt) -> None:
    before = {key: rebuilt.cloud.etcd.get(key) for key in rebuilt.toy.list_keys(rebuilt.instance)[:2]}
    rebuilt.host.dies_after = 'delete_disk'
    number = rebuilt.request()
    with pytest.raises(Killed):
        rebuilt.toy.step()
    for key, value in before.items():
        rebuilt.cloud.etcd.put(key, value or b'')
    rebuilt.restart()
    rebuilt.toy.republish({rebuilt.instance})
    rebuilt.toy.settle()
    rebuilt.require_done(number)
    assert rebuilt.cloud.read_request(rebuilt.toy.compute, rebuilt.instance).image == OTHER


def test_lost_record_destroys_no_guest_whose_rebuild_has_failed(rebuilt: Rebuilt, tmp_path: Path) -> None:
    rebuilt.request('http://images.example/missing')
    rebuilt.toy.settle()
    rebuilt.cloud.etcd.delete(keys.record(rebuilt.toy.compute, rebuilt.instance))
    rebuilt.toy.state = tmp_path / 'new'
    rebuilt.restart()
    rebuilt.toy.settle()
    assert rebuilt.record.state == ACTIVE
    assert rebuilt.host.disks == [(0, IMAGE)]


def test_destroy_ends_a_rebuild_that_was_interrupted(rebuilt: Rebuilt) -> None:
    rebuilt.host.dies_after = 'create_disk'
    rebuilt.request()
    with pytest.raises(Killed):
        rebuilt.toy.step()
    rebuilt.restart()
    destroy(rebuilt.cloud.store, rebuilt.instance)
    rebuilt.toy.settle()
    assert rebuilt.host.list_guests() == {}
    assert rebuilt.cloud.server.read_allocations(rebuilt.instance) == {}
    assert from_json(rebuilt.cloud.etcd.get(keys.record(rebuilt.toy.compute, rebuilt.instance)) or b'').state == 'gone'


def test_rebuild_of_a_guest_with_a_pending_size_gives_it_that_size(rebuilt: Rebuilt) -> None:
    store, placement, amounts = rebuilt.cloud.store, rebuilt.cloud.placement, {'VCPU': 2, 'MEMORY_MB': 32}
    resize(store, placement, rebuilt.instance, amounts, OWNER)
    rebuilt.toy.settle()
    assert rebuilt.cloud.server.read_allocations(rebuilt.instance) == {rebuilt.toy.compute: {**SMALL, 'VCPU': 2}}
    rebuilt.request()
    rebuilt.toy.settle()
    assert rebuilt.cloud.server.read_allocations(rebuilt.instance) == {rebuilt.toy.compute: SMALL | amounts}
    request, record = rebuilt.cloud.read_request(rebuilt.toy.compute, rebuilt.instance), rebuilt.record
    assert (request.resize, record.resize, record.fault) == (None, None, None)
    assert request.resources == record.resources == SMALL | amounts


def test_rebuild_is_refused_in_words(rebuilt: Rebuilt) -> None:
    store, instance, key = rebuilt.cloud.store, rebuilt.instance, keys.request(rebuilt.toy.compute, rebuilt.instance)
    with pytest.raises(NotFound, match='no such instance'):
        rebuild(store, make_uuid(), None)
    protect(store, instance, is_protected=True)
    with pytest.raises(Conflict, match='is protected, and is kept. Fix: eschedule unprotect'):
        rebuild(store, instance, None)
    protect(store, instance, is_protected=False)
    value = json.loads(rebuilt.cloud.etcd.get(key) or b'')
    expired = {**value, 'user_data_sha256': SharedUserData.from_bytes(b'expired').sha256}
    rebuilt.cloud.etcd.put(key, json.dumps(expired))
    with pytest.raises(Conflict, match='its user-data is no longer in etcd'):
        rebuild(store, instance, OTHER)
    rebuilt.cloud.etcd.put(key, json.dumps({**value, 'adopted': True, 'image': None}))
    with pytest.raises(Conflict, match='is adopted'):
        rebuild(store, instance, OTHER)
    rebuilt.cloud.etcd.put(key, json.dumps(value))
    rebuilt.cloud.etcd.put_record(encode(replace(rebuilt.record, state='building')))
    with pytest.raises(Conflict, match='is being built'):
        rebuild(store, instance, None)
