"""eschedule audit: each defect planted on a real etcd, a real placement and pretended guests, and found as just that.

What only a hypervisor can have (a base volume that is gone, foreign domains) is in test_lab_audit.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ecomp.conf import EtcdConfig
from ecomp.model.findings import CODES
from ecomp.placement.client import Placement
from ecomp.scheduler.operating import repair
from ecomp.scheduler.operating.audit import Report, audit
from ecomp.store.client import Store
from tests.kit.audit import audit_clean
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests
from tests.kit.invariants import Kept, allocations, everything
from tests.kit.servers import Etcd, PlacementServer, b64, until
from tests.kit.story import SMALL, addressed, notified, one_line, place, reached, record

BIG = 'VCPU:64,DISK_GB:64,MEMORY_MB:65536'
SOON = 30.0
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
MAC = '52:54:00:00:00:01'
NAME = 'audited'
GROUP = 'web'


@dataclass
class Scene:
    """Two computes, an active instance on the first, and one that is gone; and hands to plant with."""

    control: Control
    one: Ecompute
    two: Ecompute
    instance: str
    gone: str
    store: Store
    placement: Placement

    def audit(self, again: float = 0.3) -> Report:
        """One audit, in this process."""
        return audit(self.store, self.placement, again)

    def found(self) -> list[tuple[str, str]]:
        """The code and subject of each finding."""
        return [(each.code, each.subject) for each in self.audit().findings]

    def put(self, key: str, value: object, seconds: int = 0) -> None:
        """Write a key, JSON unless it is text, on a lease if `seconds` say so."""
        text = value if isinstance(value, str) else json.dumps(value)
        body: dict[str, Any] = {'key': b64(key), 'value': b64(text)}
        if seconds:
            body['lease'] = self.control.etcd.call('lease/grant', {'TTL': seconds})['ID']
        self.control.etcd.call('kv/put', body)

    def hold(self, consumer: str, held: dict[str, dict[str, int]]) -> None:
        """Make a consumer hold exactly this of each provider."""
        now = self.control.placement.call('GET', f'/allocations/{consumer}')
        body = {
            'allocations': {name: {'resources': each} for name, each in held.items()},
            'user_id': 'u',
            'project_id': 'p',
            'consumer_generation': now.get('consumer_generation'),
            'consumer_type': 'INSTANCE',
        }
        self.control.placement.call('PUT', f'/allocations/{consumer}', body)

    def hold_on(self, consumer: str, *computes: str, **changed: int) -> None:
        """Make it hold a small guest's size, changed so, on each of the computes."""
        self.hold(consumer, {each: {**SIZE, **changed} for each in computes})

    def inventory(self, compute: str, **totals: int) -> None:
        """Set a compute's inventory."""
        path = f'/resource_providers/{compute}'
        generation = self.control.placement.call('GET', path)['generation']
        inventories = {name: {'total': total} for name, total in totals.items()}
        body = {'resource_provider_generation': generation, 'inventories': inventories}
        self.control.placement.call('PUT', f'{path}/inventories', body)

    def guest(self, on: Ecompute, instance: str, **changed: Any) -> None:
        """Change what a compute has of an instance, while its ecompute is down."""
        guests = {each['instance']: each for each in json.loads(guests_file(on).read_text())}
        whole = {'instance': instance, 'compute': on.uuid, 'defined': True, 'running': True, 'disk': True}
        guests[instance] = {**whole, **guests.get(instance, {}), **changed}
        on.stop()
        guests_file(on).write_text(json.dumps(list(guests.values())))
        on.start()

    def rewrite(self, instance: str, seconds: int = 0, **changed: Any) -> None:
        """Change a record behind its ecompute's back."""
        found = record(self.control, instance)
        assert found is not None
        self.put(self.control.etcd.record_key(instance), {**found, **changed}, seconds)


    def join(self, members: dict[str, str]) -> None:
        """Make the instance one of a group, of these members."""
        rule = {'policy': 'affinity', 'strict': True}
        key = f'/hosts/{self.one.uuid}/{self.instance}'
        request = json.loads(self.control.etcd.get(key) or b'')
        self.put(key, {**request, 'group': {'name': GROUP, **rule}})
        self.put(f'/groups/{GROUP}', {'version': 1, **rule, 'members': members})

    def restore(self, before: Before) -> None:
        """Everything is as it was, and the audit says so."""
        mine = {f'/computes/{each.uuid}' for each in (self.one, self.two)}
        for each in (self.one, self.two):
            if each.is_running:
                each.resume()
        changed = [each for each in (self.one, self.two) if guests_file(each).read_text() != before.guests[each.uuid]]
        for each in changed:
            each.stop()
            guests_file(each).write_text(before.guests[each.uuid])
        now = everything(self.control)
        for key in (now.keys() | before.etcd.keys()) - mine:
            if key not in before.etcd:
                self.control.etcd.delete(key)
            elif now.get(key) != before.etcd[key]:
                value, lease = before.etcd[key]
                self.control.etcd.call('kv/put', {'key': b64(key), 'value': b64(value), 'lease': lease})
        for consumer in allocations(self.control).keys() - before.held.keys():
            self.control.placement.call('DELETE', f'/allocations/{consumer}')
        for provider in self.control.placement.call('GET', '/resource_providers')['resource_providers']:
            if provider['uuid'] not in (self.one.uuid, self.two.uuid):
                self.control.placement.call('DELETE', f'/resource_providers/{provider["uuid"]}')
        for each in (self.one, self.two):
            if not each.is_running:
                each.start()
        for each in (self.one, self.two):
            if not self.control.placement.inventory(each.uuid):
                with contextlib.suppress(urllib.error.HTTPError):  # it is there, without an inventory
                    body = {'uuid': each.uuid, 'name': each.uuid}
                    self.control.placement.call('POST', '/resource_providers', body)
            self.inventory(each.uuid, VCPU=64, DISK_GB=64, MEMORY_MB=65536)
        for consumer, held in before.held.items():
            self.hold(consumer, held)
        for path in (*self.one.directory.glob('state/images/*.part'), self.seed()):
            path.unlink(missing_ok=True)
        until(lambda: self.found() == [], SOON, f'all is as it was; {self.found()}')

    def seed(self) -> Path:
        """Where the first compute keeps metadata of MAC."""
        return self.one.directory / 'state' / 'metadata' / f'{MAC}.json'


class Before(NamedTuple):
    """What a test found."""

    etcd: dict[str, Kept]
    held: dict[str, dict[str, dict[str, int]]]
    guests: dict[str, str]


def guests_file(compute: Ecompute) -> Path:
    """Where a pretended compute keeps its guests."""
    return compute.directory / 'state' / 'fake.json'


@pytest.fixture(scope='module')
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One scene for all these tests: each of them leaves it as it found it."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    with Etcd() as etcd, PlacementServer() as server, contextlib.ExitStack() as at_exit:
        control = Control(etcd, server, tmp_path_factory.mktemp('audit'), at_exit)
        one, two = control.ecompute(BIG), control.ecompute(BIG)
        here = f'{SMALL}&in_tree={one.uuid}'
        instance, gone = place(control, here, '--name', NAME)[1], place(control, here)[1]
        addressed(control, instance)
        reached(control, gone, 'active')
        assert control.eschedule('destroy', '--wait', gone).code == 0
        guests_file(two).write_text('[]')
        store, placement = Store(EtcdConfig((etcd.endpoint,))), Placement(server.url)
        at_exit.callback(store.close)
        at_exit.callback(placement.close)
        yield Scene(control, one, two, instance, gone, store, placement)


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    guests = {each.uuid: guests_file(each).read_text() for each in (made.one, made.two)}
    before = Before(everything(made.control), allocations(made.control), guests)
    assert made.found() == []
    yield made
    made.restore(before)


def new() -> str:
    return str(uuid.uuid4())


# Each defect, as it is planted; whom it is about.


def provider_missing(scene: Scene) -> str:
    scene.control.placement.call('DELETE', f'/resource_providers/{scene.two.uuid}')
    return scene.two.uuid


def inventory_missing(scene: Scene) -> str:
    scene.inventory(scene.two.uuid)
    return scene.two.uuid


def capacity_exceeded(scene: Scene) -> str:
    scene.inventory(scene.one.uuid, VCPU=64, DISK_GB=64, MEMORY_MB=64)
    return scene.one.uuid


def allocation_orphaned(scene: Scene) -> str:
    scene.hold_on(nobody := new(), scene.two.uuid)
    return nobody


def allocation_missing(scene: Scene) -> str:
    scene.control.placement.call('DELETE', f'/allocations/{scene.instance}')
    return scene.instance


def allocation_differs(scene: Scene) -> str:
    scene.hold_on(scene.instance, scene.one.uuid, VCPU=2)
    return scene.instance


def allocation_doubled(scene: Scene) -> str:
    scene.hold_on(scene.instance, scene.one.uuid, scene.two.uuid)
    return scene.instance


def request_doubled(scene: Scene) -> str:
    value = scene.control.etcd.get(f'/hosts/{scene.one.uuid}/{scene.instance}')
    assert value is not None
    # Of a compute that is not there: a living one drops it.
    scene.put(f'/hosts/{(other := new())}/{scene.instance}', value.decode().replace(scene.one.uuid, other))
    return scene.instance


def request_misplaced(scene: Scene) -> str:
    request_doubled(scene)
    return request_missing(scene)


def request_missing(scene: Scene) -> str:
    scene.control.etcd.delete(f'/hosts/{scene.one.uuid}/{scene.instance}')
    return scene.instance


def request_ended(scene: Scene) -> str:
    other = new()
    request = {
        'version': 1, 'instance': scene.gone, 'image': 'http://images.invalid/i',
        'allocations': {other: {'resources': SIZE}},
    }  # fmt: skip
    found = record(scene.control, scene.gone)
    assert found is not None
    scene.control.etcd.delete(scene.control.etcd.record_key(scene.gone))
    scene.put(f'/instances/{other}/{scene.gone}', {**found, 'compute': other}, 3600)
    scene.put(f'/hosts/{other}/{scene.gone}', request)
    return scene.gone


def request_unreadable(scene: Scene) -> str:
    scene.put(f'/hosts/{new()}/{(nobody := new())}', 'no request')
    return nobody


def waits(scene: Scene, instance: str, flavor: str) -> str:
    """Let it wait, for a flavor that is there if its name is small."""
    waiting = {
        'version': 1, 'instance': instance, 'flavor': flavor, 'query': SMALL, 'image': 'http://images.invalid/i',
        'user_id': 'u', 'project_id': 'p', 'stages': {},
    }  # fmt: skip
    scene.put(f'/queues/{flavor}/{instance}', waiting)
    scene.put('/flavors/small', {'resources': SIZE})
    return instance


def queued_unreadable(scene: Scene) -> str:
    scene.put(f'/queues/small/{(nobody := new())}', 'no request')
    return nobody


def queued_flavorless(scene: Scene) -> str:
    return waits(scene, new(), 'none')


def queued_doubled(scene: Scene) -> str:
    return waits(scene, scene.instance, 'small')


def taker_unleased(scene: Scene) -> str:
    nobody = waits(scene, new(), 'small')
    scene.put(f'/queues/small/{nobody}/taker', {'version': 1, 'compute': new()})
    return nobody


def record_doubled(scene: Scene) -> str:
    found = record(scene.control, scene.instance)
    assert found is not None
    other = scene.two.uuid
    scene.put(f'/instances/{other}/{scene.instance}', {**found, 'compute': other})
    return scene.instance


def record_missing(scene: Scene) -> str:
    scene.control.etcd.delete(scene.control.etcd.record_key(scene.instance))
    return scene.instance


def record_unreadable(scene: Scene) -> str:
    scene.put(f'/instances/{scene.one.uuid}/{(nobody := new())}', {'version': 99})
    return nobody


def record_unleased(scene: Scene) -> str:
    scene.rewrite(scene.gone)
    return scene.gone


def record_leased(scene: Scene) -> str:
    scene.rewrite(scene.instance, seconds=3600)
    return scene.instance


def booted_orphaned(scene: Scene) -> str:
    scene.put(f'/booted/{scene.gone}', '10.1.2.3')
    return scene.gone


def booted_differs(scene: Scene) -> str:
    scene.put(f'/booted/{scene.instance}', '10.1.2.3')
    return scene.instance


def name_orphaned(scene: Scene) -> str:
    scene.put('/names/of-nobody', {'version': 1, 'instance': scene.gone})
    return 'of-nobody'


def name_missing(scene: Scene) -> str:
    scene.control.etcd.delete(f'/names/{NAME}')
    return scene.instance


def group_unreadable(scene: Scene) -> str:
    scene.put('/groups/newer', {'version': 99})
    return 'newer'


def group_broken(scene: Scene) -> str:
    other = new()
    scene.put(f'/requests/{other}', {'version': 1, 'instances': [other], 'pid': 1}, seconds=600)  # it is no orphan
    scene.join({scene.instance: scene.one.uuid, other: scene.two.uuid})
    return GROUP


def group_orphaned(scene: Scene) -> str:
    scene.join({scene.instance: scene.one.uuid, new(): scene.one.uuid, new(): scene.one.uuid})
    return GROUP


def group_missing(scene: Scene) -> str:
    scene.join({scene.instance: scene.one.uuid})
    scene.control.etcd.delete(f'/groups/{GROUP}')
    return scene.instance


def quota_unreadable(scene: Scene) -> str:
    scene.put('/quotas/newer', {'version': 99})
    return 'newer'


def quota_differs(scene: Scene) -> str:
    scene.put('/quotas/project', {'version': 1, 'limits': {'VCPU': 9}, 'used': {'VCPU': 7}})
    return 'project'


def usage_differs(scene: Scene) -> str:
    storage, call = new(), scene.control.placement.call
    call('POST', '/resource_providers', {'uuid': storage, 'name': 'tapes'})
    inventories = {'resource_provider_generation': 0, 'inventories': {'DISK_GB': {'total': 9}}}
    call('PUT', f'/resource_providers/{storage}/inventories', inventories)
    body = {'allocations': {storage: {'resources': {'DISK_GB': 1}}}, 'project_id': 'tapes', 'user_id': 'x'}
    body |= {'consumer_generation': None, 'consumer_type': 'INSTANCE'}
    call('PUT', f'/allocations/{new()}', body)
    scene.put('/quotas/tapes', {'version': 1, 'limits': {'VCPU': 9}, 'used': {}})
    return 'tapes'


def attempt_unleased(scene: Scene) -> str:
    scene.put(f'/requests/{(nobody := new())}', {'version': 1, 'instances': [nobody], 'pid': 1})
    return nobody


def presence_unleased(scene: Scene) -> str:
    other = scene.control.placement.make_provider(VCPU=1)
    scene.put(f'/computes/{other}', {'token': 'x'})
    return other


def hostname_orphaned(scene: Scene) -> str:
    scene.put(f'/hostnames/{(nobody := new())}', {'version': 1, 'hostname': 'hv9'})
    return nobody


def compute_mute(scene: Scene) -> str:
    scene.two.pause()
    return scene.two.uuid


def domain_missing(scene: Scene) -> str:
    scene.guest(scene.one, scene.instance, compute=None, defined=False, running=False)
    return scene.instance


def domain_off(scene: Scene) -> str:
    if any(each['running'] for each in json.loads(guests_file(scene.one).read_text())):
        scene.guest(scene.one, scene.instance, running=False)
    reached(scene.control, scene.instance, 'stopped')
    scene.rewrite(scene.instance, state='active')
    return scene.instance


def domain_running(scene: Scene) -> str:
    scene.rewrite(scene.instance, state='stopped')
    return scene.instance


def domain_undefined(scene: Scene) -> str:
    scene.guest(scene.one, scene.instance, defined=False)
    return scene.instance


def domain_orphaned(scene: Scene) -> str:
    scene.guest(scene.two, nobody := new())
    return nobody


def domain_misplaced(scene: Scene) -> str:
    scene.guest(scene.two, nobody := new(), compute=scene.one.uuid)
    return nobody


def domain_doubled(scene: Scene) -> str:
    scene.guest(scene.two, scene.instance)
    return scene.instance


def disk_missing(scene: Scene) -> str:
    scene.guest(scene.one, scene.instance, disk=False)
    return scene.instance


def disk_orphaned(scene: Scene) -> str:
    scene.guest(scene.two, nobody := new(), compute=None, defined=False, running=False)
    return nobody


def seed_orphaned(scene: Scene) -> str:
    data = {'version': 1, 'instance': (nobody := new()), 'mac': MAC}
    scene.seed().write_text(json.dumps(data))
    return nobody


def part_orphaned(scene: Scene) -> str:
    (scene.one.directory / 'state' / 'images').mkdir(exist_ok=True)
    (scene.one.directory / 'state' / 'images' / 'base-0123.part').write_bytes(b'half')
    return scene.one.uuid


PLANTS: list[Callable[[Scene], str]] = [
    *(provider_missing, inventory_missing, capacity_exceeded),
    *(allocation_orphaned, allocation_missing, allocation_differs, allocation_doubled),
    *(request_doubled, request_misplaced, request_missing, request_ended, request_unreadable),
    *(record_doubled, record_missing, record_unreadable, record_unleased, record_leased),
    *(booted_orphaned, booted_differs),
    *(group_unreadable, group_broken, group_orphaned, group_missing, quota_unreadable, quota_differs, usage_differs),
    *(name_orphaned, name_missing, hostname_orphaned, attempt_unleased, presence_unleased, compute_mute),
    *(queued_unreadable, queued_flavorless, queued_doubled, taker_unleased),
    *(domain_missing, domain_off, domain_running, domain_undefined),
    *(domain_orphaned, domain_misplaced, domain_doubled),
    *(disk_missing, disk_orphaned, seed_orphaned, part_orphaned),
]
NOTICED = [domain_off, domain_running, record_missing, provider_missing, inventory_missing, capacity_exceeded]
"""What an ecompute mends itself, once a minute: then it is planted again."""
ON_A_HYPERVISOR = {
    *('base-missing', 'iso-orphaned', 'reservation-orphaned', 'reservation-missing', 'reservation-differs'),
    *('base-differs', 'dhcp-open'),
}
"""What is planted, and mended, in faults/test_audit_lab.py."""


def code_of(plant: Callable[[Scene], str]) -> str:
    return plant.__name__.replace('_', '-')


def test_every_code_is_planted_somewhere() -> None:
    assert {*map(code_of, PLANTS), *ON_A_HYPERVISOR} == set(CODES)


@pytest.mark.parametrize('plant', PLANTS, ids=code_of)
def test_a_planted_defect_is_found_as_itself_and_nothing_else(scene: Scene, plant: Callable[[Scene], str]) -> None:
    subject = plant(scene)
    wanted = [(code_of(plant), subject)]
    seen: list[object] = []

    def found() -> bool:
        seen[:] = scene.found()
        if seen == [] and plant in NOTICED:
            plant(scene)
        return seen == wanted

    # An ecompute that was started with the defect writes down first what it sees.
    try:
        until(found, SOON, f'the audit finds {wanted}')
    except AssertionError as error:
        logs = '\n'.join(each.last_words() for each in (scene.one, scene.two))
        raise AssertionError(f'{error}; it found {seen}\n{logs}') from None


# What the command says


def test_a_clean_cluster(scene: Scene) -> None:
    clean = scene.control.eschedule('audit')
    assert clean.stdout == ''
    one_line(clean, 0, '2 computes, 1 living instance and 1 allocation were compared: no findings')
    assert scene.control.eschedule('audit', '-f', 'json').stdout == '[]\n'
    # Nothing is left of what the computes were asked, and what they said.
    assert [key for key in everything(scene.control) if key.startswith(('/audit', '/digests'))] == []


def test_nothing_at_all(cluster: Control) -> None:
    one_line(cluster.eschedule('audit'), 0, '0 computes', 'no findings')
    assert everything(cluster) == {}


def test_the_words_and_the_exit_code(scene: Scene) -> None:
    orphan, wrong = allocation_orphaned(scene), booted_differs(scene)
    before = everything(scene.control)

    table, parsed = scene.control.eschedule('audit'), scene.control.eschedule('audit', '-f', 'json')

    assert (table.code, parsed.code) == (8, 8)
    head, *rows = table.stdout.splitlines()
    assert head.split() == ['CODE', 'SUBJECT', 'FINDING']
    assert {tuple(row.split()[:2]) for row in rows} == {('allocation-orphaned', orphan), ('booted-differs', wrong)}
    said = table.stderr.splitlines()
    assert all(line.startswith('eschedule: ') for line in said), table
    assert 'eschedule: allocation-orphaned: --fix releases it' in said
    assert any(line.startswith('eschedule: booted-differs: by hand: ') for line in said)
    assert said[-1].endswith(': 2 findings')
    found = {each['code']: each for each in json.loads(parsed.stdout)}
    assert set(found) == {'allocation-orphaned', 'booted-differs'}
    for each in found.values():
        assert set(each) == {'code', 'subject', 'compute', 'host', 'sentence', 'fix', 'how'}
        assert bool(each['fix']) != bool(each['how'])
    assert found['allocation-orphaned']['subject'] == orphan
    assert scene.two.uuid in found['allocation-orphaned']['sentence']
    assert everything(scene.control) == before, 'it changes nothing'
    assert orphan in allocations(scene.control)


def test_a_silent_compute_is_a_note_and_no_finding(scene: Scene) -> None:
    scene.two.stop()
    said = scene.control.eschedule('audit')
    assert (said.code, said.stdout) == (0, '')
    called = f'{socket.gethostname()} ({scene.two.uuid})'  # it has the other one's name
    assert f'eschedule: compute {called} is closed: what it has was not compared' in said.stderr.splitlines()


def test_wrong_arguments(cluster: Control) -> None:
    one_line(cluster.eschedule('audit', 'x'), 2, 'audit takes no further words')
    one_line(cluster.eschedule('audit', '--all'), 2, '--all does not go with this form')
    one_line(cluster.eschedule('list', '--fix'), 2, '--fix does not go with this form')


def test_a_backend_that_is_away(own_control: Control) -> None:
    own_control.placement.kill()
    one_line(own_control.eschedule('audit'), 7, 'placement')
    own_control.etcd.kill()
    one_line(own_control.eschedule('audit'), 7, 'etcd')


# A cluster at work


def test_what_is_in_work_is_never_a_finding(cluster: Control) -> None:
    computes = [cluster.ecompute(BIG) for _ in range(2)]
    store, placement = Store(EtcdConfig((cluster.etcd.endpoint,))), Placement(cluster.placement.url)
    audits = 0
    with _working(cluster) as made:
        while audits < 4 or len(made()) < 20:
            assert audit(store, placement, 0.5).findings == []
            audits += 1
    audit_clean(cluster)
    assert allocations(cluster) == {}
    for compute in computes:
        assert guests(compute) == {}
    store.close()
    placement.close()


@contextlib.contextmanager
def _working(cluster: Control) -> Iterator[Callable[[], list[str]]]:
    """Instances are made and destroyed, several at a time, while the block runs; those made so far."""
    instances: list[str] = []
    over = threading.Event()

    def lives() -> None:
        while not over.is_set():
            instance = notified(cluster.eschedule(SMALL))[1]
            instances.append(instance)
            done = cluster.eschedule('destroy', '--wait', instance)
            assert done.code == 0, done

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(lives) for _ in range(4)]

        def made() -> list[str]:
            for each in working:
                assert not each.done(), each.result()
            return instances

        try:
            yield made
        finally:
            over.set()
        for each in working:
            each.result()


# Mending

MENDED: list[Callable[[Scene], str]] = [
    *(allocation_orphaned, allocation_missing, booted_orphaned, record_unleased, request_ended),
    *(group_orphaned, group_missing, quota_differs),
    *(queued_doubled, name_orphaned, name_missing, hostname_orphaned, disk_orphaned, seed_orphaned, part_orphaned),
]


def test_every_code_that_fix_mends_is_mended_here() -> None:
    assert {*map(code_of, MENDED)} == {code for code, each in CODES.items() if each.fix} - ON_A_HYPERVISOR


@pytest.mark.parametrize('plant', MENDED, ids=code_of)
def test_what_fix_mends(scene: Scene, plant: Callable[[Scene], str]) -> None:
    before = {'instance': record(scene.control, scene.instance), 'held': allocations(scene.control)[scene.instance]}
    subject = plant(scene)
    told: list[str] = []

    report = repair.fix(scene.store, scene.placement, told.append, apart=0.2)

    assert report.findings == [], told
    assert 'looking again in 0.2 s' in told[0]
    assert len(told) == 2, told
    assert not any(word in told[1] for word in ('left alone', 'not removed', 'not known')), told
    assert scene.found() == []
    if plant is not part_orphaned:
        assert subject in told[1] or MAC in told[1]
    if plant is record_unleased:
        assert everything(scene.control)[scene.control.etcd.record_key(scene.gone)].lease
    # Nothing else is touched.
    assert record(scene.control, scene.instance) == before['instance']
    assert allocations(scene.control) == {scene.instance: before['held']}


def test_what_only_one_audit_saw_is_left_alone(scene: Scene) -> None:
    first = scene.audit()
    orphan, booted, part = allocation_orphaned(scene), booted_orphaned(scene), part_orphaned(scene)
    second = scene.audit()
    assert {each.subject for each in second.findings} == {orphan, booted, part}
    assert repair.mend(scene.store, scene.placement, first, second) == []
    third = scene.audit()
    assert third.findings == second.findings
    # The same file, written again since: another one, and no older than its last writing.
    part_orphaned(scene)
    lines = repair.mend(scene.store, scene.placement, second, scene.audit())
    assert len(lines) == 2, lines
    assert {each.subject for each in scene.audit().findings} == {part}


def test_a_name_that_somebody_took_meanwhile_is_not_given_back(scene: Scene) -> None:
    name_missing(scene)
    name_orphaned(scene)
    first, second = scene.audit(), scene.audit()
    assert len(second.findings) == 2
    scene.put(f'/names/{NAME}', {'version': 1, 'instance': (other := new())})
    scene.put('/names/of-nobody', {'version': 1, 'instance': other})
    lines = repair.mend(scene.store, scene.placement, first, second)
    assert len(lines) == 2, lines
    assert all('left alone: it has changed since' in line for line in lines), lines
    for name in (NAME, 'of-nobody'):
        assert json.loads(scene.control.etcd.get(f'/names/{name}') or b'')['instance'] == other


def test_what_changes_after_the_second_audit_is_left_alone(scene: Scene) -> None:
    """A request for the very uuid arrives between the second audit and the mending."""
    orphan = allocation_orphaned(scene)
    disk = disk_orphaned(scene)
    first, second = scene.audit(), scene.audit()
    assert {each.subject for each in second.findings} == {orphan, disk}
    booted_orphaned(scene)
    for instance in (orphan, disk):
        scene.put(f'/requests/{instance}', {'version': 1, 'instances': [instance], 'pid': 1}, seconds=60)
    lines = repair.mend(scene.store, scene.placement, first, second)
    assert len(lines) == 2, lines
    assert any('left alone: it has changed since' in line for line in lines), lines
    assert any('not removed: it is wanted now' in line for line in lines), lines
    assert orphan in allocations(scene.control)


def test_fix_touches_nothing_it_does_not_understand(scene: Scene) -> None:
    """Domains, running or not, and what lives."""
    guest, off = domain_orphaned(scene), new()
    scene.guest(scene.two, off, running=False)
    doubled = domain_doubled(scene)
    before = scene.audit().findings
    assert {each.subject for each in before} == {guest, off, doubled}
    told: list[str] = []
    after = repair.fix(scene.store, scene.placement, told.append, apart=0.2)
    assert told == []
    assert after.findings == before


@pytest.mark.slow
def test_the_command_with_fix_takes_its_minute(scene: Scene) -> None:
    booted_orphaned(scene)
    done = scene.control.eschedule('audit', '--fix', timeout=180)
    assert done.code == 0, done
    assert done.stdout == ''
    lines = done.stderr.splitlines()
    assert len(lines) == 3, lines
    assert 'looking again in 60 s' in lines[0]
    assert f'booted-orphaned {scene.gone}: /booted/{scene.gone} is deleted' in lines[1]
    assert lines[2].endswith('no findings')
