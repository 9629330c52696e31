"""A host looks at itself: what it publishes and removes, and what an audit makes of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from ecomp.agent.host import upkeep
from ecomp.agent.host.claims import ClaimKeeper
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.state import Memory
from ecomp.agent.host.upkeep import Upkeep, find_abandoned_parts
from ecomp.agent.images.cache import LOCK_FILE
from ecomp.agent.jobs import Loop
from ecomp.conf import EtcdConfig
from ecomp.errors import StrangeEtcd, Unreachable
from ecomp.files import try_lock
from ecomp.model import keys
from ecomp.model.audit import MAX_REPORT_BYTES, HostReport, encode_report, find_all, parse_report
from ecomp.model.finding import Leftover
from ecomp.model.guest import BaseImage, Guest, GuestSpec, Usage, make_mac_address
from ecomp.model.order import Request
from ecomp.model.quota import Quota
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE
from ecomp.model.stored import encode
from ecomp.model.usage import HOST
from ecomp.placement.allocations import read_provider_allocations
from ecomp.scheduler.operations import audit as auditing
from ecomp.scheduler.operations import usage
from ecomp.scheduler.operations.audit import audit, fix, repair_hosts
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.operations.usage import UseReader
from ecomp.shared.names import load_quota
from ecomp.store.client import Delete, Put, Store
from ecomp.store.watch import Follower
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, make_uuid
from tests.functional.present import make_presence
from tests.kit.servers import wait_until

MAC = '52:54:00:00:00:01'
BASE = BaseImage('/base', 'qcow2', 0)


class FakeHost(FakeHypervisor):
    other_users: frozenset[str] = frozenset()
    is_away = False
    measured_count = 0

    def read_usage(self) -> Mapping[str, Usage]:
        self.measured_count += 1
        return super().read_usage()

    def list_guests(self) -> Mapping[str, Guest]:
        if self.is_away:
            raise Unreachable('libvirt is away')
        return super().list_guests()

    def list_disk_users(self, instance: str) -> frozenset[str]:
        return self.other_users if instance in self.list_guests() else frozenset()


class Host:
    """A compute that only looks at itself."""

    def __init__(self, cloud: Cloud, state: Path) -> None:
        self.compute = cloud.server.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)
        self.state = state
        self.read_only = False
        self.remembered: set[str] = set()
        self.hypervisor = FakeHost(state)
        self.hypervisor.prepare()
        self.data = GuestData(state / 'metadata')
        config = EtcdConfig((cloud.etcd.endpoint,))
        self.store = Store(config)
        self.presence = make_presence(self.store, keys.compute(self.compute), 'mine')
        memory = Memory(state, self.compute, lambda: '2026-01-01T00:00:00.000Z')
        prefix = keys.request_prefix(self.compute)
        self.upkeep = Upkeep(
            *(self.compute, self.store, cloud.placement, ClaimKeeper(self.compute, self.store, cloud.placement)),
            *(self.hypervisor.list_guests, self.hypervisor, self.data, state, memory),
            publish=partial(self.presence.publish, is_urgent=True),
            may_remove=self.may_remove,
            read_requests=lambda: self.store.snapshot(prefix).entries,
        )
        self.follower = Follower(config, [(keys.AUDIT, self.upkeep.on_questions)])
        self.presence.start()
        self.follower.start()

    def close(self) -> None:
        self.follower.stop()
        self.upkeep.stop()
        self.presence.stop()
        self.store.close()

    def may_remove(self, instance: str) -> bool:
        return not self.read_only and instance not in self.remembered

    def create_disk(self) -> str:
        instance = str(uuid4())
        self.hypervisor.create_disk(GuestSpec(instance, self.compute, 1, 64, 1, BASE, 'qemu'))
        return instance

    def start_guest(self) -> str:
        instance = self.create_disk()
        self.hypervisor.start(GuestSpec(instance, self.compute, 1, 64, 1, BASE, 'qemu'))
        return instance

    def clear(self, *leftovers: Leftover) -> list[str]:
        return [f'{each.kind} {each.name}: {self.upkeep._remove(each)}' for each in leftovers]

    def repair(self, store: Store) -> list[str]:
        return [line.removeprefix(f'compute {self.compute}: ') for line in repair_hosts(store, [self.compute])]


@pytest.fixture
def host(cloud: Cloud, tmp_path: Path) -> Iterator[Host]:
    with closing(Host(cloud, tmp_path)) as audited:
        yield audited


def audit_host(cloud: Cloud, host: Host) -> list[tuple[str, str]]:
    """Run an audit, and return its findings about this host: the servers are shared."""
    findings = audit(cloud.store, cloud.placement, 0.1, is_now=True).findings
    return [(row.code, row.subject) for row in findings if host.compute in (row.subject, row.compute)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two looks confirm each other without a pause, also for a repair."""
    monkeypatch.setattr(upkeep, 'LOOK_SECONDS', 0.05)
    monkeypatch.setattr(upkeep, 'CONFIRMATION_SECONDS', 0.05)


# A host looks twice, publishes what both looks saw, and says which question it answers.


def test_host_publishes_what_two_looks_saw(cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(upkeep, 'time', SimpleNamespace(monotonic=lambda: now))
    disk = host.create_disk()
    host.upkeep.step()
    assert host.upkeep.report == HostReport()
    now += 60
    other = host.create_disk()
    host.upkeep.step()
    (finding,) = host.upkeep.report.findings
    assert (finding.code, finding.subject) == ('disk-orphaned', disk)
    host.hypervisor.delete_disk(disk)
    now += 60
    host.upkeep.step()
    assert [each.subject for each in host.upkeep.report.findings] == [other]
    wait_until(lambda: [each for _, each in audit_host_without_question(cloud, host)] == [other], 15, 'it is published')
    assert disk not in host.hypervisor.list_guests(), 'nothing is removed without a person'


def audit_host_without_question(cloud: Cloud, host: Host) -> list[tuple[str, str]]:
    findings = audit(cloud.store, cloud.placement, 0.1).findings
    return [(row.code, row.subject) for row in findings if host.compute in (row.subject, row.compute)]


def test_host_looks_twice_when_asked(cloud: Cloud, host: Host) -> None:
    disk, began = host.create_disk(), time.monotonic()
    assert audit_host(cloud, host) == [('disk-orphaned', disk)]
    assert time.monotonic() - began > upkeep.LOOK_SECONDS
    cloud.placement.write('DELETE', f'/resource_providers/{host.compute}', None)
    assert set(audit_host(cloud, host)) == {('disk-orphaned', disk), ('provider-missing', host.compute)}


def test_look_that_failed_for_placement_fails_until_placement_answers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = host.upkeep.claims
    claims.reconcile((), time.monotonic())

    def fail(*_: object) -> None:
        raise Unreachable('placement does not answer', 'placement')

    with monkeypatch.context() as patch:
        patch.setattr(upkeep.providers, 'read_raw_inventory', fail)
        for claims.is_current in (True, False):  # the next check of claims has failed, too
            with pytest.raises(Unreachable):
                host.upkeep.step()
    host.upkeep.step()


@pytest.mark.usefixtures('soon')
def test_host_releases_reservations_without_disk_by_itself(host: Host) -> None:
    """A reservation with a disk stays: after a restore of etcd the disk is the guest."""
    alone, with_disk = str(uuid4()), host.create_disk()
    for instance in (alone, with_disk):
        host.hypervisor.reserve_address(instance, make_mac_address(instance, 0), 'default')
    for _ in range(2):
        host.upkeep.step()
        time.sleep(0.06)
    host.upkeep.step()
    assert {each.instance for each in host.hypervisor.list_reservations().values()} == {with_disk}
    assert with_disk in host.hypervisor.list_guests()


@pytest.mark.usefixtures('soon')
def test_host_repairs_what_it_has_found_for_a_minute_when_asked(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = host.create_disk()
    assert host.repair(cloud.store) == [f'disk-orphaned {disk}: removed']
    assert audit_host(cloud, host) == []
    monkeypatch.setattr(upkeep, 'CONFIRMATION_SECONDS', 60)
    disk = host.create_disk()
    (line,) = host.repair(cloud.store)
    assert line.startswith(f'disk-orphaned {disk}: not repaired: the finding is only 0 s old')
    assert disk in host.hypervisor.list_guests()


@pytest.mark.usefixtures('soon')
def test_host_claims_again_when_asked(cloud: Cloud, host: Host) -> None:
    instance, size = host.start_guest(), {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
    request = Request(instance, {host.compute: size}, image='http://x/i', user_id='u', project_id='p')
    record = Record(instance, host.compute, ACTIVE, image='http://x/i', resources=size)
    pairs = {keys.request(host.compute, instance): request, keys.record(host.compute, instance): record}
    cloud.store.commit([], [Put(key, encode(value)) for key, value in pairs.items()])
    assert audit_host(cloud, host) == [('allocation-missing', instance)]
    assert host.repair(cloud.store) == [f'allocation-missing {instance}: claimed again on {host.compute}']
    assert read_provider_allocations(cloud.placement, host.compute) == {instance: size}
    cloud.store.commit([], list(map(Delete, pairs)))


def test_audit_reports_unreachable_hypervisor(cloud: Cloud, host: Host) -> None:
    host.hypervisor.is_away = True
    findings = audit(cloud.store, cloud.placement, 0.1, is_now=True).findings
    (mute_finding,) = [finding for finding in findings if finding.subject == host.compute]
    assert mute_finding.code == 'compute-mute'
    assert 'libvirt is away' in mute_finding.sentence


def test_host_in_foreign_etcd_or_read_only_does_not_answer(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without requests in that etcd, its guests would be reported as orphans to destroy."""
    monkeypatch.setattr(auditing, 'ANSWER_TIMEOUT_SECONDS', 3.0)
    host.start_guest()
    host.read_only = True
    assert audit_host(cloud, host) == [('compute-mute', host.compute)]
    host.upkeep.may_remove = lambda _: (_ for _ in ()).throw(StrangeEtcd('another etcd'))
    assert audit_host(cloud, host) == [('compute-mute', host.compute)]


def test_report_of_a_hostile_host_is_its_own_damage(cloud: Cloud, host: Host) -> None:
    sentence, victim = 'its disk\n\x1b[2J is gone', make_uuid()
    finding = {'code': 'disk-orphaned', 'subject': f'{victim}\r', 'sentence': sentence, 'compute': 'another'}
    lease, key = host.presence.lease, keys.findings(host.compute)
    for value, codes in (
        (json.dumps({'findings': [finding]}), {'disk-orphaned'}),
        (json.dumps({'findings': [{**finding, 'code': 'compute-silent'}]}), {'compute-mute'}),
        (json.dumps({'findings': [finding] * 1000}), {'compute-mute'}),
        ('{"findings": [[]]}', {'compute-mute'}),
        ('\x00' * 1000, {'compute-mute'}),
    ):
        cloud.store.commit([], [Put(key, value, lease)])
        report = audit(cloud.store, cloud.placement, 0.1)
        own = [each for each in report.findings if host.compute in (each.compute, each.subject)]
        assert {each.code for each in own} == codes, value[:100]
        assert all(each.sentence.isprintable() and each.subject.isprintable() for each in own)
        assert not [each for each in report.own_findings if victim in each.subject]


def test_report_has_a_limit(host: Host) -> None:
    guests = {uuid: Guest(uuid, host.compute, True, True, True) for uuid in (str(uuid4()) for _ in range(10_000))}
    host.hypervisor._guests = guests
    found = find_all(host.upkeep.read_world(is_asked=False))
    assert len(found) == len(guests)
    value = encode_report(HostReport(tuple(found), error='x')).encode()
    report = parse_report(host.compute, value)
    assert len(value) <= MAX_REPORT_BYTES
    assert len(report.findings) + report.omitted == len(guests)


@pytest.mark.parametrize('length', [0, 256, 100_000])
def test_audit_tolerates_quota_of_invalid_project_id(cloud: Cloud, length: int) -> None:
    key = keys.quota('x' * length)
    cloud.etcd.put(key, encode(Quota('x' * length, {'VCPU': 1})))
    try:
        findings = audit(cloud.store, cloud.placement, 0.1).findings
    finally:
        cloud.etcd.delete(key)
    assert [finding for finding in findings if finding.subject == 'x' * length] == []


def test_fix_counts_an_evacuated_instance_once(cloud: Cloud) -> None:
    """A quota that lacks the charge which the replacement has is counted again."""
    project, old_compute, new_compute = make_uuid(), make_uuid(), make_uuid()
    replaced, instance, size = make_uuid(), make_uuid(), {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
    former = Request(replaced, {old_compute: size}, image='http://x/i', project_id=project)
    tombstone = replace(former, allocations={}, image=None, former_resources=size, replaced_by=instance)
    moved = replace(former, instance=instance, allocations={new_compute: size}, replaces=replaced)
    old_key, new_key = keys.request(old_compute, replaced), keys.request(new_compute, instance)
    puts = [Put(old_key, encode(tombstone)), Put(new_key, encode(moved))]
    cloud.store.commit([], puts)
    set_limits(cloud.store, project, ['instances=5'])
    used = {**size, 'instances': 1}
    assert load_quota(cloud.store, project)[0] == Quota(project, {'instances': 5}, used), 'only one of the two counts'
    cloud.etcd.put(keys.quota(project), encode(Quota(project, {'instances': 5}, {})))
    lines: list[str] = []
    fix(cloud.store, cloud.placement, lines.append, interval_seconds=0.1)
    assert f'quota-differs {project}: recounted' in lines
    assert load_quota(cloud.store, project)[0] == Quota(project, {'instances': 5}, used)
    for key in (old_key, new_key, keys.quota(project)):
        cloud.etcd.delete(key)


def test_read_only_or_remembering_compute_removes_nothing(host: Host) -> None:
    host.read_only = True
    instance = host.create_disk()
    refusal = 'not removed: this compute is read-only, or its state directory still lists the instance'
    assert host.clear(Leftover('disk', instance)) == [f'disk {instance}: {refusal}']
    host.read_only, host.remembered = False, {instance}
    for leftover in (Leftover('disk', instance), Leftover('seed', MAC, instance)):
        assert refusal in host.clear(leftover)[0]
    assert instance in host.hypervisor.list_guests()
    host.remembered = set()
    assert host.clear(Leftover('disk', instance)) == [f'disk {instance}: removed']


# What a compute uses, which `eschedule top` asks


def test_compute_measures_once_a_question_and_never_without_one(cloud: Cloud, host: Host) -> None:
    instance, reader = host.start_guest(), make_reader(cloud, host)
    audit_host(cloud, host)
    assert host.hypervisor.measured_count == 0
    for count in (1, 2):
        used = reader.read().measurements[host.compute]
        assert host.hypervisor.measured_count == count
        assert used[instance]['resident_memory_bytes'] == 64 * 2**20
        assert used[HOST]['disk_bytes'] > used[HOST]['disk_used_bytes'] > 0
        assert ('cpu_seconds_per_second' in used[HOST]) == ('vcpu_seconds_per_second' in used[instance]) == (count == 2)
    assert used[HOST]['cpu_seconds_per_second'] >= 0
    audit_host(cloud, host)
    assert host.hypervisor.measured_count == 2
    key = keys.usage(host.compute)
    wait_until(lambda: cloud.store.get(key) is None, 10, 'it removes its answer')


def test_compute_that_is_not_among_the_selected_ones_does_not_measure(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, 'ANSWER_TIMEOUT_SECONDS', 0.5)
    other = cloud.make_compute()
    assert UseReader(cloud.store, [other]).read().measurements.keys() == {other}
    assert make_reader(cloud, host).read().reasons == {}
    assert host.hypervisor.measured_count == 1  # the questions are answered in their order


def test_several_users_look_while_an_audit_runs(cloud: Cloud, host: Host) -> None:
    host.start_guest()
    with ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(make_reader(cloud, host).read) for _ in range(3)]
        findings = audit_host(cloud, host)
    assert all(host.compute not in look.result().reasons for look in looks)
    assert not [finding for finding in findings if finding[0] == 'compute-mute']
    assert 1 <= host.hypervisor.measured_count <= 3


def test_older_or_frozen_compute_is_unknown_and_others_are_not(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, 'ANSWER_TIMEOUT_SECONDS', 2.0)  # enough for the other's answer on a busy machine
    older = cloud.make_compute()
    use = make_reader(cloud, host, older).read()
    assert (use.measurements[older], use.reasons.keys()) == ({}, {older})
    assert use.reasons[older].startswith('its ecompute does not answer')
    assert HOST in use.measurements[host.compute]


def test_unreachable_hypervisor_is_the_reason_why_nothing_is_known(cloud: Cloud, host: Host) -> None:
    host.hypervisor.is_away = True
    use = make_reader(cloud, host).read()
    assert (use.measurements, use.reasons) == ({host.compute: {}}, {host.compute: 'libvirt is away'})
    host.hypervisor.is_away = False
    assert make_reader(cloud, host).read().reasons == {}


def test_malformed_question_is_not_answered(cloud: Cloud, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.audit('x') + keys.USAGE_QUESTION, '{"some": ["other"]}', lease)])
    make_reader(cloud, host).read()
    cloud.store.revoke(lease)
    assert (host.hypervisor.measured_count, caplog.records) == (1, [])


def test_question_that_found_no_thread_is_answered_later(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower lists again after an error of its callback."""
    real, failures = Loop.schedule, [RuntimeError("can't start new thread")]

    def schedule(loop: Loop, moment: float = 0.0) -> None:
        if failures:
            raise failures.pop()
        real(loop, moment)

    monkeypatch.setattr(Loop, 'schedule', schedule)
    assert host.compute in make_reader(cloud, host).read().measurements
    assert (failures, host.hypervisor.measured_count) == ([], 1)


def make_reader(cloud: Cloud, host: Host, *others: str) -> UseReader:
    return UseReader(cloud.store, [host.compute, *others])


# Removing


def test_orphaned_disk_and_seed_are_removed(host: Host) -> None:
    instance, data = host.create_disk(), GuestData(host.state / 'metadata')
    data.write(Request(instance, {}), [make_mac_address(instance, 0)])
    mac = make_mac_address(instance, 0)
    assert host.clear(Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: removed',
        f'seed {mac}: removed',
    ]
    assert host.hypervisor.list_guests() == {}
    assert data.read_instances() == {}
    assert host.clear(Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: already gone',
        f'seed {mac}: already gone',
    ]
    # A removal that was killed midway leaves only the ready report.
    (data.directory / f'{instance}.ready').touch()
    assert host.upkeep._read_facts().metadata == {instance: instance}
    assert host.clear(Leftover('seed', instance, instance)) == [f'seed {instance}: removed']
    assert list(data.directory.iterdir()) == []


def test_orphaned_nocloud_disk_is_removed(cloud: Cloud, host: Host) -> None:
    lone, with_disk, running = str(uuid4()), host.create_disk(), host.start_guest()
    for uuid in (lone, with_disk):
        host.hypervisor.create_seed(uuid, {})
    assert host.upkeep._read_facts().seeds == {lone, with_disk}
    findings = audit_host(cloud, host)
    assert {('iso-orphaned', lone), ('disk-orphaned', with_disk)} <= set(findings)
    assert ('iso-orphaned', with_disk) not in findings
    cloud.etcd.put(keys.request(host.compute, lone), '{}')
    assert host.clear(Leftover('iso', lone)) == [f'iso {lone}: not removed: its instance is requested or alive']
    cloud.etcd.delete(keys.request(host.compute, lone))
    for uuid, text in ((running, 'not removed: its domain exists'), (lone, 'removed'), (lone, 'already gone')):
        assert host.clear(Leftover('iso', uuid)) == [f'iso {uuid}: {text}']
    assert host.clear(Leftover('disk', with_disk)) == [f'disk {with_disk}: removed']
    assert host.hypervisor.list_seeds() == set()


def test_used_or_unknown_leftovers_are_not_removed(cloud: Cloud, host: Host) -> None:
    running, used, queried, recorded, tried = (
        host.start_guest(),
        host.create_disk(),
        host.create_disk(),
        host.create_disk(),
        host.create_disk(),
    )
    cloud.etcd.put(keys.request(host.compute, queried), '{}')
    cloud.etcd.put(keys.record(host.compute, recorded), json.dumps({'state': 'who knows'}))
    cloud.etcd.put(keys.attempt(tried), json.dumps({'instances': [tried]}), cloud.etcd.grant())
    data = GuestData(host.state / 'metadata')
    data.write(Request(queried, {}), [MAC])
    before = host.hypervisor.list_guests()
    refusal = 'not removed: its instance is requested or alive'
    try:
        assert host.clear(
            *(Leftover('disk', instance) for instance in (running, queried, recorded, tried)),
            *(Leftover('seed', MAC, queried), Leftover('seed', MAC, used), Leftover('reservations', running)),
            *(Leftover('disk', '../../etc'), Leftover('domain', used), Leftover('seed', '../../x', 'y')),
        ) == [
            f'disk {running}: not removed: its domain exists',
            *(f'disk {instance}: {refusal}' for instance in (queried, recorded, tried)),
            *(f'seed {MAC}: {refusal}', f'seed {MAC}: already gone'),
            f'reservations {running}: not removed: its domain exists',
            'disk ../../etc: not removed: its instance is not a valid uuid',
            f'domain {used}: not removed: its instance is not a valid uuid',
            'seed ../../x: not removed: its instance is not a valid uuid',
        ]
        host.hypervisor.other_users = frozenset({'somebodys'})
        assert host.clear(Leftover('disk', used)) == [f'disk {used}: not removed: in use by domain somebodys']
        assert host.hypervisor.list_guests() == before
        assert data.read_instances() == {MAC: queried}
    finally:
        for key in (keys.request(host.compute, queried), keys.record(host.compute, recorded), keys.attempt(tried)):
            cloud.etcd.delete(key)


def test_partial_files_are_removed_if_unchanged(host: Host) -> None:
    images = host.state / 'images'
    images.mkdir()
    for path in (images / 'base-aa.part', host.state / 'metadata' / '.x.json.part', host.state / '.token.part'):
        path.write_text('half')
    (images / 'base-bb.part').write_text('being downloaded')
    lock = try_lock(images / LOCK_FILE, 'base-bb')
    assert lock is not None
    partial_files = find_abandoned_parts(host.state)
    assert set(partial_files) == {'images/base-aa.part', 'metadata/.x.json.part', '.token.part'}
    assert host.upkeep._read_facts().parts == partial_files

    leftovers = [Leftover('part', name, mark) for name, mark in partial_files.items()]
    (images / 'base-aa.part').write_text('written again')
    leftovers += [Leftover('part', 'images/base-bb.part', 'x'), Leftover('part', '../uuid', '')]
    report = host.clear(*leftovers)

    assert sorted(report) == [
        'part ../uuid: not removed: the file has changed since it was found, or is gone',
        'part .token.part: removed',
        'part images/base-aa.part: not removed: the file has changed since it was found, or is gone',
        'part images/base-bb.part: not removed: the file has changed since it was found, or is gone',
        'part metadata/.x.json.part: removed',
    ]
    assert {path.name for path in images.glob('*.part')} == {'base-aa.part', 'base-bb.part'}
    os.close(lock)
    assert set(find_abandoned_parts(host.state)) == {'images/base-aa.part', 'images/base-bb.part'}
