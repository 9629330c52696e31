"""Audits: what ecompute answers, and how long an audit waits for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from ecomp.agent.host.digest import AuditAnswerer, find_abandoned_parts, read_digest
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.images.cache import LOCK_FILE
from ecomp.agent.jobs import Threads
from ecomp.conf import EtcdConfig
from ecomp.errors import StrangeEtcd, Unreachable
from ecomp.files import try_lock
from ecomp.model import keys
from ecomp.model.guest import BaseImage, Guest, GuestSpec, Usage, make_mac_address
from ecomp.model.order import NameOwner, Request
from ecomp.model.planes import Clearance, Digest, Leftover, from_pages, to_pages
from ecomp.model.quota import Quota
from ecomp.model.stored import encode
from ecomp.model.usage import HOST
from ecomp.scheduler.operations import audit as auditing
from ecomp.scheduler.operations.audit import Report, audit, fix, open_audit_session, wait_for_answers
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.operations.usage import UseReader
from ecomp.store.client import Entry, Put, Store, Unchanged
from ecomp.store.sharing import load_quota
from ecomp.store.watch import Follower
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, make_uuid
from tests.functional.present import start_and_stop
from tests.kit.servers import wait_until
from tests.kit.store_client import read_entry

# ecompute answers an audit on a lease, in as many pages as needed. It removes only what it has checked itself.


MAC = '52:54:00:00:00:01'
BASE = BaseImage('/base', 'qcow2', 0)


class FakeHost(FakeHypervisor):
    """Fake guests whose disks may have other users."""

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
    """A compute that only answers audits."""

    def __init__(self, cloud: Cloud, state: Path) -> None:
        self.compute = cloud.server.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)
        self.state = state
        self.token = 'mine'
        self.read_only = False
        self.remembered: set[str] = set()
        self.hypervisor = FakeHost(state)
        self.hypervisor.prepare()
        self.data = GuestData(state / 'metadata')
        config = EtcdConfig((cloud.etcd.endpoint,))
        self.threads, self.store = Threads(1, 1), Store(config)
        self.answerer = self.make_answerer(self.token, self.hypervisor, state, self.may_remove)
        self.follower = Follower(config, [(keys.AUDIT, self.answerer.on_audits)])
        lease = cloud.store.grant(3600)
        put = Put(keys.compute(self.compute), json.dumps({'token': self.token}), lease)
        assert cloud.store.commit([], [put])
        self.answerer.start()
        self.follower.start()

    def make_answerer(
        self, token: str, hypervisor: FakeHypervisor, state: Path, may_remove: Callable[[str], bool]
    ) -> AuditAnswerer:
        data = GuestData(state / 'metadata')
        return AuditAnswerer(self.compute, token, self.store, hypervisor, data, state, may_remove, self.threads)

    def close(self) -> None:
        self.follower.stop()
        self.answerer.stop()
        self.threads.close()
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

    def clear(self, store: Store, *leftovers: Leftover) -> list[str]:
        """Ask the compute to remove these leftovers; return its report."""
        with open_audit_session(store) as (name, lease):
            key = keys.clearance(name, self.compute)
            assert store.commit([Unchanged(key, 0)], [Put(key, encode(Clearance(leftovers)), lease)])
            assert wait_for_answers(store, name, {self.compute}, 'clearing', 'cleared') == {self.compute}
            return list(json.loads(read_entry(store, keys.digest(name, self.compute, 'cleared')).value))


@pytest.fixture
def host(cloud: Cloud, tmp_path: Path) -> Iterator[Host]:
    with closing(Host(cloud, tmp_path)) as audited:
        yield audited
    cloud.etcd.delete(keys.compute(audited.compute))


def audit_host(cloud: Cloud, host: Host) -> list[tuple[str, str]]:
    """Run an audit and return its findings about this host.

    The servers are shared: findings about other hosts are not this test's.
    """
    findings = audit(cloud.store, cloud.placement, 0.1).findings
    return [(row.code, row.subject) for row in findings if host.compute in (row.subject, row.compute)]


def read_answer(store: Store, host: Host) -> dict[str, bytes]:
    """Return one compute's whole answer by part name.

    Each part must be on a lease, and must be removed with the question.
    """
    with open_audit_session(store) as (name, lease):
        assert store.commit([Unchanged(keys.audit(name), 0)], [Put(keys.audit(name), '{}', lease)])
        assert wait_for_answers(store, name, {host.compute}, 'heard', '0') == {host.compute}
        entries = store.snapshot(keys.digest_prefix(name, host.compute)).entries
        assert all(entry.lease not in (0, lease) for entry in entries.values())
    assert not store.snapshot(keys.digest_prefix(name, host.compute)).entries
    assert store.get(keys.audit(name)) is None
    return {keys.get_last_part(key): entry.value for key, entry in entries.items()}


def test_answer_with_ten_thousand_guests_has_several_pages(cloud: Cloud, host: Host) -> None:
    guests = {uuid: Guest(uuid, host.compute, True, True, True) for uuid in (str(uuid4()) for _ in range(10_000))}
    host.hypervisor._guests = guests
    answer = read_answer(cloud.store, host)
    assert answer.pop('heard') == b''
    assert len(answer) > 2
    assert max(map(len, answer.values())) < 512 * 1024
    assert from_pages([answer[str(number)] for number in range(len(answer))]).guests == guests


def test_audit_reports_unreachable_hypervisor(cloud: Cloud, host: Host) -> None:
    host.hypervisor.is_away = True
    findings = audit(cloud.store, cloud.placement, 0.1).findings
    (mute_finding,) = [finding for finding in findings if finding.subject == host.compute]
    assert mute_finding.code == 'compute-mute'
    assert 'libvirt is away' in mute_finding.sentence


def test_audit_ignores_malformed_page_names(cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    put = host.answerer._write_answer

    def put_extra_pages(entry: Entry, audit: str, part: int | str, value: str) -> None:
        for page in ('1' * 5_000, '\u0663', '\u00b2') if part == 0 else ():
            put(entry, audit, page, value)
        put(entry, audit, part, value)

    monkeypatch.setattr(host.answerer, '_write_answer', put_extra_pages)
    assert audit_host(cloud, host) == []


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


def test_compute_in_foreign_etcd_reports_that_instead_of_its_guests(cloud: Cloud, host: Host) -> None:
    """Without requests in that etcd, its guests would be reported as orphans to destroy."""
    host.start_guest()
    host.answerer.may_remove = lambda _: (_ for _ in ()).throw(StrangeEtcd('another etcd'))
    report = audit(cloud.store, cloud.placement, 0.1)
    (finding,) = [listed for listed in report.findings if host.compute in (listed.subject, listed.compute)]
    assert (finding.code, 'another etcd' in finding.sentence) == ('compute-mute', True)


def test_only_ecompute_with_current_token_answers(cloud: Cloud, host: Host, tmp_path: Path) -> None:
    own_instance = host.create_disk()
    other_hypervisor = FakeHost(tmp_path / 'other')
    other_hypervisor.prepare()
    other_instance = str(uuid4())
    other_hypervisor.create_disk(GuestSpec(other_instance, host.compute, 1, 64, 1, BASE, 'qemu'))
    config = EtcdConfig((cloud.etcd.endpoint,))
    other_answerer = host.make_answerer('theirs', other_hypervisor, tmp_path / 'other', lambda _: True)
    follower = Follower(config, [(keys.AUDIT, other_answerer.on_audits)])
    with start_and_stop(other_answerer), start_and_stop(follower):
        for token, instance in (('mine', own_instance), ('theirs', other_instance)) * 3:
            cloud.etcd.put(keys.compute(host.compute), json.dumps({'token': token}), cloud.etcd.grant())
            assert set(from_pages([read_answer(cloud.store, host)['0']]).guests) == {instance}


def test_read_only_or_remembering_compute_answers_but_removes_nothing(cloud: Cloud, host: Host) -> None:
    host.read_only = True
    instance = host.create_disk()
    assert '0' in read_answer(cloud.store, host)
    assert host.clear(cloud.store, Leftover('disk', instance)) == [
        f'disk {instance}: not removed: this compute is read-only, or its state directory still lists the instance'
    ]
    host.read_only, host.remembered = False, {instance}
    assert 'its state directory still lists the instance' in host.clear(cloud.store, Leftover('disk', instance))[0]
    assert 'its state directory still lists the instance' in host.clear(cloud.store, Leftover('seed', MAC, instance))[0]
    assert instance in host.hypervisor.list_guests()
    host.remembered = set()
    assert host.clear(cloud.store, Leftover('disk', instance)) == [f'disk {instance}: removed']


# What a compute uses, which `eschedule top` asks


def test_compute_measures_once_a_question_and_never_without_one(cloud: Cloud, host: Host) -> None:
    instance, reader = host.start_guest(), make_reader(cloud, host)
    audit_host(cloud, host)
    assert host.hypervisor.measured_count == 0
    for count in (1, 2):
        used = reader.read().used[host.compute]
        assert host.hypervisor.measured_count == count
        assert used[instance]['resident_memory_bytes'] == 64 * 2**20
        assert used[HOST]['disk_bytes'] > used[HOST]['disk_used_bytes'] > 0
        assert ('cpu_seconds_per_second' in used[HOST]) == ('vcpu_seconds_per_second' in used[instance]) == (count == 2)
    assert used[HOST]['cpu_seconds_per_second'] >= 0
    audit_host(cloud, host)
    assert host.hypervisor.measured_count == 2
    for prefix in (keys.AUDIT, keys.DIGESTS):
        assert not any(host.compute in key for key in cloud.store.snapshot(prefix).entries)


def test_compute_that_is_not_among_the_selected_ones_does_not_measure(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, 'HEARD_TIMEOUT_SECONDS', 0.5)
    other = cloud.make_compute()
    assert UseReader(cloud.store, [other]).read().used.keys() == {other}
    assert make_reader(cloud, host).read().reasons == {}
    assert host.hypervisor.measured_count == 1  # the questions are answered in their order


def test_several_users_look_while_an_audit_runs(cloud: Cloud, host: Host) -> None:
    host.start_guest()
    with ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(make_reader(cloud, host).read) for _ in range(3)]
        findings = audit_host(cloud, host)
    assert all(host.compute not in look.result().reasons for look in looks)
    assert not [finding for finding in findings if finding[0] == 'compute-mute']
    assert host.hypervisor.measured_count == 3


def test_older_or_frozen_compute_is_unknown_and_others_are_not(
    cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one takes the question for one about a compute of that name, and does nothing."""
    monkeypatch.setattr(auditing, 'HEARD_TIMEOUT_SECONDS', 0.5)
    older = cloud.make_compute()
    use = make_reader(cloud, host, older).read()
    assert (use.used[older], use.reasons.keys()) == ({}, {older})
    assert use.reasons[older].startswith('its ecompute does not answer')
    assert HOST in use.used[host.compute]


def test_unreachable_hypervisor_is_the_reason_why_nothing_is_known(cloud: Cloud, host: Host) -> None:
    host.hypervisor.is_away = True
    use = make_reader(cloud, host).read()
    assert (use.used, use.reasons) == ({host.compute: {}}, {host.compute: 'libvirt is away'})
    host.hypervisor.is_away = False
    assert make_reader(cloud, host).read().reasons == {}


def test_malformed_question_is_not_answered(cloud: Cloud, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    lease = cloud.store.grant(60)
    cloud.store.commit([], [Put(keys.clearance('x', keys.USAGE), '{"some": ["other"]}', lease)])
    make_reader(cloud, host).read()
    cloud.store.revoke(lease)
    assert (host.hypervisor.measured_count, caplog.records) == (1, [])


def make_reader(cloud: Cloud, host: Host, *others: str) -> UseReader:
    return UseReader(cloud.store, [host.compute, *others])


# Removing


def test_orphaned_disk_and_seed_are_removed(cloud: Cloud, host: Host) -> None:
    instance, data = host.create_disk(), GuestData(host.state / 'metadata')
    data.write(Request(instance, {}), [make_mac_address(instance, 0)])
    mac = make_mac_address(instance, 0)
    assert host.clear(cloud.store, Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: removed',
        f'seed {mac}: removed',
    ]
    assert host.hypervisor.list_guests() == {}
    assert data.read_instances() == {}
    assert host.clear(cloud.store, Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: already gone',
        f'seed {mac}: already gone',
    ]
    # A removal that was killed midway leaves only the ready report.
    (data.directory / f'{instance}.ready').touch()
    assert read_digest(host.hypervisor, host.data, host.state).metadata == {instance: instance}
    assert host.clear(cloud.store, Leftover('seed', instance, instance)) == [f'seed {instance}: removed']
    assert list(data.directory.iterdir()) == []


def test_orphaned_nocloud_disk_is_removed(cloud: Cloud, host: Host) -> None:
    lone, with_disk, running = str(uuid4()), host.create_disk(), host.start_guest()
    for uuid in (lone, with_disk):
        host.hypervisor.create_seed(uuid, {})
    assert read_digest(host.hypervisor, host.data, host.state).seeds.keys() == {lone, with_disk}
    findings = audit_host(cloud, host)
    assert {('iso-orphaned', lone), ('disk-orphaned', with_disk)} <= set(findings)
    assert ('iso-orphaned', with_disk) not in findings
    cloud.etcd.put(keys.request(host.compute, lone), '{}')
    assert host.clear(cloud.store, Leftover('iso', lone)) == [
        f'iso {lone}: not removed: its instance is requested or alive'
    ]
    cloud.etcd.delete(keys.request(host.compute, lone))
    for uuid, text in ((running, 'not removed: its domain exists'), (lone, 'removed'), (lone, 'already gone')):
        assert host.clear(cloud.store, Leftover('iso', uuid)) == [f'iso {uuid}: {text}']
    assert host.clear(cloud.store, Leftover('disk', with_disk)) == [f'disk {with_disk}: removed']
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
            cloud.store,
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
        assert host.clear(cloud.store, Leftover('disk', used)) == [
            f'disk {used}: not removed: in use by domain somebodys'
        ]
        assert host.hypervisor.list_guests() == before
        assert data.read_instances() == {MAC: queried}
    finally:
        for key in (keys.request(host.compute, queried), keys.record(host.compute, recorded), keys.attempt(tried)):
            cloud.etcd.delete(key)


def test_partial_files_are_removed_if_unchanged(cloud: Cloud, host: Host) -> None:
    images = host.state / 'images'
    images.mkdir()
    for path in (images / 'base-aa.part', host.state / 'metadata' / '.x.json.part', host.state / '.token.part'):
        path.write_text('half')
    (images / 'base-bb.part').write_text('being downloaded')
    lock = try_lock(images / LOCK_FILE, 'base-bb')
    assert lock is not None
    partial_files = find_abandoned_parts(host.state)
    assert set(partial_files) == {'images/base-aa.part', 'metadata/.x.json.part', '.token.part'}
    assert read_digest(host.hypervisor, host.data, host.state).parts == partial_files

    leftovers = [Leftover('part', name, mark) for name, mark in partial_files.items()]
    (images / 'base-aa.part').write_text('written again')
    leftovers += [Leftover('part', 'images/base-bb.part', 'x'), Leftover('part', '../uuid', '')]
    report = host.clear(cloud.store, *leftovers)

    assert sorted(report) == [
        'part ../uuid: not removed: it has changed since the audit listed it, or is gone',
        'part .token.part: removed',
        'part images/base-aa.part: not removed: it has changed since the audit listed it, or is gone',
        'part images/base-bb.part: not removed: it has changed since the audit listed it, or is gone',
        'part metadata/.x.json.part: removed',
    ]
    assert {path.name for path in images.glob('*.part')} == {'base-aa.part', 'base-bb.part'}
    os.close(lock)
    assert set(find_abandoned_parts(host.state)) == {'images/base-aa.part', 'images/base-bb.part'}


def test_malformed_audit_and_clearance_are_answered(cloud: Cloud, host: Host) -> None:
    with open_audit_session(cloud.store) as (name, lease):
        for key in (keys.clearance(name, host.compute), f'{keys.AUDIT}{name}/x/y'):
            cloud.store.commit([], [Put(key, 'nonsense', lease)])
        assert wait_for_answers(cloud.store, name, {host.compute}, 'clearing', 'cleared') == {host.compute}
        entry = read_entry(cloud.store, keys.digest(name, host.compute, 'cleared'))
        assert 'nothing is removed' in json.loads(entry.value)[0]
    wait_until(lambda: '0' in read_answer(cloud.store, host), 10, 'it answers still')


# An audit waits for computes that make progress, even slow progress, but not for ever after an acknowledgement.


class Clock:
    """A clock that advances when a test sleeps, and then lets the compute answer."""

    def __init__(self, answers: Callable[[float], None]) -> None:
        self._answers = answers
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._answers(self.now)


@pytest.fixture
def compute(cloud: Cloud) -> Iterator[str]:
    """A live compute, and a repairable finding."""
    compute, name = make_uuid(), f'n{make_uuid()[:8]}'
    lease = cloud.store.grant(600)
    cloud.store.commit(
        [], [Put(keys.compute(compute), '{}', lease), Put(keys.name(name), encode(NameOwner(make_uuid())))]
    )
    yield compute
    cloud.store.revoke(lease)
    cloud.etcd.delete(keys.name(name))


def list_codes(report: Report, compute: str) -> set[str]:
    return {finding.code for finding in report.findings if finding.subject == compute}


def list_audits(cloud: Cloud) -> list[str]:
    return [keys.get_last_part(name) for name in cloud.store.snapshot(keys.AUDIT, keys_only=True).entries]


def test_fix_waits_once_for_compute_that_only_acknowledges(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--fix runs three audits; waiting in each would take four minutes every time."""

    def acknowledge(_: float) -> None:
        for audit_name in list_audits(cloud):
            cloud.etcd.put(keys.digest(audit_name, compute, 'heard'), '')

    clock = Clock(acknowledge)
    monkeypatch.setattr(auditing, 'time', clock)
    lines: list[str] = []
    report = fix(cloud.store, cloud.placement, lines.append, interval_seconds=0.1)
    assert 'compute-mute' in list_codes(report, compute)
    assert any(line.startswith('name-orphaned') for line in lines)
    assert auditing.ANSWER_TIMEOUT_SECONDS < clock.now < 2 * auditing.ANSWER_TIMEOUT_SECONDS


def test_late_and_slow_compute_is_not_reported_as_mute(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute starts during the audit, and libvirt takes a minute to list its domains."""
    first_audit: set[str] = set()
    heard_at: dict[str, float] = {}

    def answer_late(now: float) -> None:
        for audit_name in list_audits(cloud):
            first_audit.update([] if first_audit else [audit_name])
            if audit_name in first_audit:
                continue
            cloud.etcd.put(keys.digest(audit_name, compute, 'heard'), '')
            if now - heard_at.setdefault(audit_name, now) > 60:
                for number, page in enumerate(to_pages(Digest())):
                    cloud.etcd.put(keys.digest(audit_name, compute, str(number)), page)

    monkeypatch.setattr(auditing, 'time', Clock(answer_late))
    report = auditing.audit(cloud.store, cloud.placement, 0.1)
    assert 'compute-mute' not in list_codes(report, compute)
    assert len(heard_at) > 0
