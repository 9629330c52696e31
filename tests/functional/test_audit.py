"""The audit: its answers, and how long it waits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from ecomp.agent.host.digest import Answerer, look, parts
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.images.cache import LOCK
from ecomp.agent.turns import Threads
from ecomp.conf import EtcdConfig
from ecomp.errors import StrangeEtcd, Unreachable
from ecomp.files import try_lock
from ecomp.model import keys
from ecomp.model.guest import BaseImage, Guest, GuestSpec, mac_address
from ecomp.model.order import Request, name_to_json
from ecomp.model.planes import Digest, Leftover, clearance_to_json, from_pages, to_pages
from ecomp.model.quota import Quota, to_json
from ecomp.model.record import ACTIVE, new_record
from ecomp.model.record import to_json as record_to_json
from ecomp.scheduler.operating import audit as auditing
from ecomp.scheduler.operating.audit import Report, answers, asking, audit, fix
from ecomp.store.client import Entry, Put, Store, Unchanged
from ecomp.store.watch import Follower
from ecomp.virt.fake import FakeHypervisor
from tests.functional.cloud import Cloud, new
from tests.functional.present import start_and_stop
from tests.kit.servers import until
from tests.kit.store_client import read_entry

# What ecompute answers an audit: on its lease, however much it is, and only what it looked at itself is removed.


MAC = '52:54:00:00:00:01'
BASE = BaseImage('/base', 'qcow2', 0)


class Pretended(FakeHypervisor):
    """Pretended guests, which lie on base volumes and may have other users."""

    bases: Mapping[str, str] = {}
    others: frozenset[str] = frozenset()
    away = False

    def guests(self) -> Mapping[str, Guest]:
        if self.away:
            raise Unreachable('libvirt is away')
        return super().guests()

    def without_base(self) -> Mapping[str, str]:
        return self.bases

    def users(self, instance: str) -> frozenset[str]:
        return self.others if instance in self.guests() else frozenset()


class Host:
    """A compute that only answers audits."""

    def __init__(self, cloud: Cloud, state: Path) -> None:
        self.compute = cloud.server.make_provider(VCPU=2, MEMORY_MB=512, DISK_GB=10)
        self.state = state
        self.token = 'mine'
        self.read_only = False
        self.remembered: set[str] = set()
        self.hypervisor = Pretended(state)
        self.hypervisor.prepare()
        self.data = GuestData(state / 'metadata')
        config = EtcdConfig((cloud.etcd.endpoint,))
        self.threads, self.store = Threads(1, 1), Store(config)
        self.answerer = self.answers_as(self.token, self.hypervisor, state, self.may_remove)
        self.follower = Follower(config, [(keys.AUDIT, self.answerer.on_audits)])
        lease = cloud.store.grant(3600)
        put = Put(keys.compute(self.compute), json.dumps({'token': self.token}), lease)
        assert cloud.store.commit([], [put])
        self.answerer.start()
        self.follower.start()

    def answers_as(
        self, token: str, hypervisor: FakeHypervisor, state: Path, may_remove: Callable[[str], bool]
    ) -> Answerer:
        data = GuestData(state / 'metadata')
        return Answerer(self.compute, token, self.store, hypervisor, data, state, may_remove, self.threads)

    def close(self) -> None:
        self.follower.stop()
        self.answerer.stop()
        self.threads.close()
        self.store.close()

    def may_remove(self, instance: str) -> bool:
        return not self.read_only and instance not in self.remembered

    def disk(self) -> str:
        """An instance of which a disk is here."""
        instance = str(uuid4())
        self.hypervisor.create_disk(GuestSpec(instance, self.compute, 1, 64, 1, BASE, 'qemu'))
        return instance

    def domain(self) -> str:
        """An instance that runs here."""
        instance = self.disk()
        self.hypervisor.start(GuestSpec(instance, self.compute, 1, 64, 1, BASE, 'qemu'))
        return instance

    def clear(self, store: Store, *leftovers: Leftover) -> list[str]:
        """Ask for these to be removed; what was done."""
        with asking(store) as (name, lease):
            key = keys.clearance(name, self.compute)
            assert store.commit([Unchanged(key, 0)], [Put(key, clearance_to_json(leftovers), lease)])
            assert answers(store, name, {self.compute}, 'clearing', 'cleared') == {self.compute}
            return list(json.loads(read_entry(store, keys.digest(name, self.compute, 'cleared')).value))


@pytest.fixture
def host(cloud: Cloud, tmp_path: Path) -> Iterator[Host]:
    made = Host(cloud, tmp_path)
    yield made
    made.close()
    cloud.etcd.delete(keys.compute(made.compute))


def codes(cloud: Cloud, host: Host) -> list[tuple[str, str]]:
    """What an audit finds of this host: others on the shared servers have nothing to do with it."""
    found = audit(cloud.store, cloud.placement, 0.1).findings
    return [(each.code, each.subject) for each in found if host.compute in (each.subject, each.compute)]


def ask(store: Store, host: Host) -> dict[str, bytes]:
    """One compute's whole answer, by the part's name, each seen to be on a lease, and removed with the question."""
    with asking(store) as (name, lease):
        assert store.commit([Unchanged(keys.audit(name), 0)], [Put(keys.audit(name), '{}', lease)])
        assert answers(store, name, {host.compute}, 'heard', '0') == {host.compute}
        entries = store.snapshot(keys.digest_prefix(name, host.compute)).entries
        assert all(each.lease not in (0, lease) for each in entries.values())
    assert not store.snapshot(keys.digest_prefix(name, host.compute)).entries
    assert store.get(keys.audit(name)) is None
    return {keys.last(key): each.value for key, each in entries.items()}


def test_ten_thousand_guests(cloud: Cloud, host: Host) -> None:
    guests = {each: Guest(each, host.compute, True, True, True) for each in (str(uuid4()) for _ in range(10_000))}
    host.hypervisor._guests = guests
    answer = ask(cloud.store, host)
    assert answer.pop('heard') == b''
    assert len(answer) > 2
    assert max(map(len, answer.values())) < 512 * 1024
    assert from_pages([answer[str(number)] for number in range(len(answer))]).guests == guests


def test_a_base_volume_that_is_gone(cloud: Cloud, host: Host) -> None:
    wanted = cloud.wanted(host.compute)
    instance = wanted.instance
    cloud.create(wanted)
    record = new_record(host.compute, cloud.delivered(host.compute, instance), 'now')
    cloud.etcd.put_record(record_to_json(record.at(ACTIVE, 'now', 'started')))
    host.hypervisor.create_disk(spec := GuestSpec(instance, host.compute, 1, 64, 1, BASE, 'qemu'))
    host.hypervisor.start(spec)
    assert codes(cloud, host) == []
    host.hypervisor.bases = {instance: '/images/base-x.qcow2'}
    assert codes(cloud, host) == [('base-missing', instance)]
    for key in (keys.request(host.compute, instance), keys.record(host.compute, instance)):
        cloud.etcd.delete(key)
    cloud.server.call('DELETE', f'/allocations/{instance}')


def test_a_hypervisor_that_is_away_is_said_to_be(cloud: Cloud, host: Host) -> None:
    host.hypervisor.away = True
    found = audit(cloud.store, cloud.placement, 0.1).findings
    (mute,) = [each for each in found if each.subject == host.compute]
    assert mute.code == 'compute-mute'
    assert 'libvirt is away' in mute.sentence


def test_what_a_compute_calls_a_page_ends_no_audit(cloud: Cloud, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    put = host.answerer._put

    def more(entry: Entry, audit: str, part: int | str, value: str) -> None:
        for other in ('1' * 5_000, '\u0663', '\u00b2') if part == 0 else ():
            put(entry, audit, other, value)
        put(entry, audit, part, value)

    monkeypatch.setattr(host.answerer, '_put', more)
    assert codes(cloud, host) == []


@pytest.mark.parametrize('length', [0, 256, 100_000])
def test_a_quota_of_no_project_that_placement_takes_ends_no_audit(cloud: Cloud, length: int) -> None:
    key = keys.quota('x' * length)
    cloud.etcd.put(key, to_json(Quota('x' * length, {'VCPU': 1})))
    try:
        found = audit(cloud.store, cloud.placement, 0.1).findings
    finally:
        cloud.etcd.delete(key)
    assert [each for each in found if each.subject == 'x' * length] == []


def test_one_in_an_etcd_that_it_does_not_know_says_so_and_not_what_it_has(cloud: Cloud, host: Host) -> None:
    """Nobody asks for its guests there: they would be called orphaned, with `virsh destroy` for a cure."""
    host.domain()
    host.answerer.may_remove = lambda _: (_ for _ in ()).throw(StrangeEtcd('another etcd'))
    report = audit(cloud.store, cloud.placement, 0.1)
    (found,) = [each for each in report.findings if host.compute in (each.subject, each.compute)]
    assert (found.code, 'another etcd' in found.sentence) == ('compute-mute', True)


def test_another_ecompute_that_is_this_compute_now_answers_alone(cloud: Cloud, host: Host, tmp_path: Path) -> None:
    mine = host.disk()
    other = Pretended(tmp_path / 'other')
    other.prepare()
    theirs = str(uuid4())
    other.create_disk(GuestSpec(theirs, host.compute, 1, 64, 1, BASE, 'qemu'))
    config = EtcdConfig((cloud.etcd.endpoint,))
    second = host.answers_as('theirs', other, tmp_path / 'other', lambda _: True)
    follower = Follower(config, [(keys.AUDIT, second.on_audits)])
    with start_and_stop(second), start_and_stop(follower):
        for token, instance in (('mine', mine), ('theirs', theirs)) * 3:
            cloud.etcd.put(keys.compute(host.compute), json.dumps({'token': token}), cloud.etcd.grant())
            assert set(from_pages([ask(cloud.store, host)['0']]).guests) == {instance}


def test_a_read_only_one_or_one_that_remembers_answers_and_removes_nothing(cloud: Cloud, host: Host) -> None:
    host.read_only = True
    instance = host.disk()
    assert '0' in ask(cloud.store, host)
    assert host.clear(cloud.store, Leftover('disk', instance)) == [
        f'disk {instance}: not removed: this compute is read-only, or remembers that it lives'
    ]
    host.read_only, host.remembered = False, {instance}
    assert 'remembers' in host.clear(cloud.store, Leftover('disk', instance))[0]
    assert 'remembers' in host.clear(cloud.store, Leftover('seed', MAC, instance))[0]
    assert instance in host.hypervisor.guests()
    host.remembered = set()
    assert host.clear(cloud.store, Leftover('disk', instance)) == [f'disk {instance}: removed']


# Removing


def test_an_orphaned_disk_and_seed_are_removed(cloud: Cloud, host: Host) -> None:
    instance, data = host.disk(), GuestData(host.state / 'metadata')
    data.write(Request(instance, {}), [mac_address(instance, 0)])
    mac = mac_address(instance, 0)
    assert host.clear(cloud.store, Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: removed',
        f'seed {mac}: removed',
    ]
    assert host.hypervisor.guests() == {}
    assert data.all() == {}
    assert host.clear(cloud.store, Leftover('disk', instance), Leftover('seed', mac, instance)) == [
        f'disk {instance}: is gone already',
        f'seed {mac}: is gone already',
    ]
    # Of a removal that was killed in the middle: the word that it is ready, alone.
    (data.directory / f'{instance}.ready').touch()
    assert look(host.hypervisor, host.data, host.state).metadata == {instance: instance}
    assert host.clear(cloud.store, Leftover('seed', instance, instance)) == [f'seed {instance}: removed']
    assert list(data.directory.iterdir()) == []


def test_an_orphaned_nocloud_disk_is_removed(cloud: Cloud, host: Host) -> None:
    alone, beside, running = str(uuid4()), host.disk(), host.domain()
    for each in (alone, beside):
        host.hypervisor.create_seed(each, {})
    assert look(host.hypervisor, host.data, host.state).seeds.keys() == {alone, beside}
    found = codes(cloud, host)
    assert {('iso-orphaned', alone), ('disk-orphaned', beside)} <= set(found)
    assert ('iso-orphaned', beside) not in found
    cloud.etcd.put(keys.request(host.compute, alone), '{}')
    assert host.clear(cloud.store, Leftover('iso', alone)) == [f'iso {alone}: not removed: it is wanted now']
    cloud.etcd.delete(keys.request(host.compute, alone))
    for each, said in ((running, 'not removed: its domain is there'), (alone, 'removed'), (alone, 'is gone already')):
        assert host.clear(cloud.store, Leftover('iso', each)) == [f'iso {each}: {said}']
    assert host.clear(cloud.store, Leftover('disk', beside)) == [f'disk {beside}: removed']
    assert host.hypervisor.seeds() == set()


def test_what_is_no_leftover_stays(cloud: Cloud, host: Host) -> None:
    running, used, asked, lives, tried = host.domain(), host.disk(), host.disk(), host.disk(), host.disk()
    cloud.etcd.put(keys.request(host.compute, asked), '{}')
    cloud.etcd.put(keys.record(host.compute, lives), json.dumps({'state': 'who knows'}))
    cloud.etcd.put(keys.attempt(tried), json.dumps({'instances': [tried]}), cloud.etcd.grant())
    data = GuestData(host.state / 'metadata')
    data.write(Request(asked, {}), [MAC])
    before = host.hypervisor.guests()
    wanted = 'not removed: it is wanted now'
    try:
        assert host.clear(
            cloud.store,
            *(Leftover('disk', each) for each in (running, asked, lives, tried)),
            *(Leftover('seed', MAC, asked), Leftover('seed', MAC, used), Leftover('reservations', running)),
            *(Leftover('disk', '../../etc'), Leftover('domain', used), Leftover('seed', '../../x', 'y')),
        ) == [
            f'disk {running}: not removed: its domain is there',
            *(f'disk {each}: {wanted}' for each in (asked, lives, tried)),
            *(f'seed {MAC}: {wanted}', f'seed {MAC}: is gone already'),
            f'reservations {running}: not removed: its domain is there',
            'disk ../../etc: not removed: it names no instance',
            f'domain {used}: not removed: it names no instance',
            'seed ../../x: not removed: it names no instance',
        ]
        host.hypervisor.others = frozenset({'somebodys'})
        assert host.clear(cloud.store, Leftover('disk', used)) == [f'disk {used}: not removed: domain somebodys has it']
        assert host.hypervisor.guests() == before
        assert data.all() == {MAC: asked}
    finally:
        for key in (keys.request(host.compute, asked), keys.record(host.compute, lives), keys.attempt(tried)):
            cloud.etcd.delete(key)


def test_half_written_files(cloud: Cloud, host: Host) -> None:
    images = host.state / 'images'
    images.mkdir()
    for path in (images / 'base-aa.part', host.state / 'metadata' / '.x.json.part', host.state / '.token.part'):
        path.write_text('half')
    (images / 'base-bb.part').write_text('being downloaded')
    lock = try_lock(images / LOCK, 'base-bb')
    assert lock is not None
    found = parts(host.state)
    assert set(found) == {'images/base-aa.part', 'metadata/.x.json.part', '.token.part'}
    assert look(host.hypervisor, host.data, host.state).parts == found

    named = [Leftover('part', name, mark) for name, mark in found.items()]
    (images / 'base-aa.part').write_text('written again')
    named += [Leftover('part', 'images/base-bb.part', 'x'), Leftover('part', '../uuid', '')]
    done = host.clear(cloud.store, *named)

    assert sorted(done) == [
        'part ../uuid: not removed: it was written again, or is gone',
        'part .token.part: removed',
        'part images/base-aa.part: not removed: it was written again, or is gone',
        'part images/base-bb.part: not removed: it was written again, or is gone',
        'part metadata/.x.json.part: removed',
    ]
    assert {path.name for path in images.glob('*.part')} == {'base-aa.part', 'base-bb.part'}
    os.close(lock)
    assert set(parts(host.state)) == {'images/base-aa.part', 'images/base-bb.part'}


def test_nonsense_is_answered(cloud: Cloud, host: Host) -> None:
    with asking(cloud.store) as (name, lease):
        for key in (keys.clearance(name, host.compute), f'{keys.AUDIT}{name}/x/y'):
            cloud.store.commit([], [Put(key, 'nonsense', lease)])
        assert answers(cloud.store, name, {host.compute}, 'clearing', 'cleared') == {host.compute}
        entry = read_entry(cloud.store, keys.digest(name, host.compute, 'cleared'))
        assert 'nothing is removed' in json.loads(entry.value)[0]
    until(lambda: '0' in ask(cloud.store, host), 10, 'it answers still')


# How long an audit waits for the computes: for who goes on, however slowly, and not for ever for who says so.


class Clock:
    """Time that passes where it is slept, and then the compute may answer."""

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
    """One that lives, and something that an audit finds and mends."""
    compute, name = new(), f'n{new()[:8]}'
    lease = cloud.store.grant(600)
    cloud.store.commit([], [Put(keys.compute(compute), '{}', lease), Put(keys.name(name), name_to_json(new()))])
    yield compute
    cloud.store.revoke(lease)
    cloud.etcd.delete(keys.name(name))


def codes_of(found: Report, compute: str) -> set[str]:
    return {each.code for each in found.findings if each.subject == compute}


def asked(cloud: Cloud) -> list[str]:
    """The audits under way."""
    return [keys.last(name) for name in cloud.store.snapshot(keys.AUDIT, keys_only=True).entries]


def test_who_says_that_it_heard_and_no_more_is_waited_for_once(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four minutes each of the three audits of --fix."""

    def heard(_: float) -> None:
        for asked_for in asked(cloud):
            cloud.etcd.put(keys.digest(asked_for, compute, 'heard'), '')

    clock = Clock(heard)
    monkeypatch.setattr(auditing, 'time', clock)
    told: list[str] = []
    found = fix(cloud.store, cloud.placement, told.append, apart=0.1)
    assert 'compute-mute' in codes_of(found, compute)
    assert any(line.startswith('name-orphaned') for line in told)
    assert auditing.ANSWER_SECONDS < clock.now < 2 * auditing.ANSWER_SECONDS


def test_who_was_late_once_is_not_mute_for_telling_slowly(
    cloud: Cloud, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was starting when the audit first looked, and its ten thousand domains take libvirt a minute."""
    first: set[str] = set()
    since: dict[str, float] = {}

    def tells(now: float) -> None:
        for asked_for in asked(cloud):
            first.update([] if first else [asked_for])
            if asked_for in first:
                continue
            cloud.etcd.put(keys.digest(asked_for, compute, 'heard'), '')
            if now - since.setdefault(asked_for, now) > 60:
                for number, page in enumerate(to_pages(Digest())):
                    cloud.etcd.put(keys.digest(asked_for, compute, str(number)), page)

    monkeypatch.setattr(auditing, 'time', Clock(tells))
    found = auditing.audit(cloud.store, cloud.placement, 0.1)
    assert 'compute-mute' not in codes_of(found, compute)
    assert len(since) > 0
