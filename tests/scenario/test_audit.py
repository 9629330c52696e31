"""eschedule audit: each defect planted on a real etcd, a real placement and pretended guests, and found as just that.

What is planted is in audit_plants.py. What only a hypervisor can have (a base volume that is gone, foreign domains) is
in tests/faults/test_audit_lab.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.conf import EtcdConfig
from ecomp.model.audit import CODES
from ecomp.placement.client import Placement
from ecomp.scheduler.operating.audit import audit, fix, mend
from ecomp.store.client import Store
from tests.kit.audit import audit_clean
from tests.kit.commands import Control
from tests.kit.hands import guests
from tests.kit.invariants import allocations, everything
from tests.kit.servers import Etcd, PlacementServer, until
from tests.kit.story import SMALL, addressed, notified, one_line, place, reached, record
from tests.scenario import audit_plants as plants
from tests.scenario.audit_plants import NOTICED, ON_A_HYPERVISOR, PLANTS, Plant, code_of, new
from tests.scenario.audited import MAC, NAME, SOON, Before, Scene, guests_file

BIG = 'VCPU:64,DISK_GB:64,MEMORY_MB:65536'


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


def test_every_code_is_planted_somewhere() -> None:
    assert {*map(code_of, PLANTS), *ON_A_HYPERVISOR} == set(CODES)


@pytest.mark.parametrize('plant', PLANTS, ids=code_of)
def test_a_planted_defect_is_found_as_itself_and_nothing_else(scene: Scene, plant: Plant) -> None:
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


def test_an_instance_is_named_beside_its_uuid(scene: Scene) -> None:
    plants.booted_differs(scene)
    found = scene.control.eschedule('audit', '-f', 'json').stdout
    assert [(each['subject'], each['name']) for each in json.loads(found)] == [(scene.instance, NAME)]
    assert f'{scene.instance}  {NAME}  ' in scene.control.eschedule('audit').stdout


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
    orphan, wrong = plants.allocation_orphaned(scene), plants.booted_differs(scene)
    before = everything(scene.control)

    table, parsed = scene.control.eschedule('audit'), scene.control.eschedule('audit', '-f', 'json')

    assert (table.code, parsed.code) == (8, 8)
    head, *rows = table.stdout.splitlines()
    assert head.split() == ['CODE', 'SUBJECT', 'NAME', 'FINDING']
    assert {tuple(row.split()[:2]) for row in rows} == {('allocation-orphaned', orphan), ('booted-differs', wrong)}
    said = table.stderr.splitlines()
    assert all(line.startswith('eschedule: ') for line in said), table
    assert 'eschedule: allocation-orphaned: --fix releases it' in said
    assert any(line.startswith('eschedule: booted-differs: by hand: ') for line in said)
    assert said[-1].endswith(': 2 findings')
    found = {each['code']: each for each in json.loads(parsed.stdout)}
    assert set(found) == {'allocation-orphaned', 'booted-differs'}
    for each in found.values():
        assert set(each) == {'code', 'subject', 'name', 'compute', 'host', 'sentence', 'fix', 'how'}
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


def test_a_backend_that_is_away(own_control: Control) -> None:
    own_control.placement.kill()
    one_line(own_control.eschedule('audit'), 7, 'placement')
    own_control.etcd.kill()
    one_line(own_control.eschedule('audit'), 7, 'etcd')


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


MENDED = [each for each in PLANTS if CODES[code_of(each)].fix]


@pytest.mark.parametrize('plant', MENDED, ids=code_of)
def test_what_fix_mends(scene: Scene, plant: Plant) -> None:
    before = {'instance': record(scene.control, scene.instance), 'held': allocations(scene.control)[scene.instance]}
    subject = plant(scene)
    told: list[str] = []

    report = fix(scene.store, scene.placement, told.append, apart=0.2)

    assert report.findings == [], told
    assert 'looking again in 0.2 s' in told[0]
    assert len(told) == 2, told
    assert not any(word in told[1] for word in ('left alone', 'not removed', 'not known')), told
    assert scene.found() == []
    if plant is not plants.part_orphaned:
        assert subject in told[1] or MAC in told[1]
    if plant is plants.record_unleased:
        assert everything(scene.control)[scene.control.etcd.record_key(scene.gone)].lease
    # Nothing else is touched.
    assert record(scene.control, scene.instance) == before['instance']
    assert allocations(scene.control) == {scene.instance: before['held']}


def test_what_only_one_audit_saw_is_left_alone(scene: Scene) -> None:
    first = scene.audit()
    orphan, booted, part = plants.allocation_orphaned(scene), plants.booted_orphaned(scene), plants.part_orphaned(scene)
    second = scene.audit()
    assert {each.subject for each in second.findings} == {orphan, booted, part}
    assert mend(scene.store, scene.placement, first, second) == []
    third = scene.audit()
    assert third.findings == second.findings
    # The same file, written again since: another one, and no older than its last writing.
    plants.part_orphaned(scene)
    lines = mend(scene.store, scene.placement, second, scene.audit())
    assert len(lines) == 2, lines
    assert {each.subject for each in scene.audit().findings} == {part}


def test_a_name_that_somebody_took_meanwhile_is_not_given_back(scene: Scene) -> None:
    plants.name_missing(scene)
    plants.name_orphaned(scene)
    first, second = scene.audit(), scene.audit()
    assert len(second.findings) == 2
    scene.put(f'/names/{NAME}', {'version': 1, 'instance': (other := new())})
    scene.put('/names/of-nobody', {'version': 1, 'instance': other})
    lines = mend(scene.store, scene.placement, first, second)
    assert len(lines) == 2, lines
    assert all('left alone: it has changed since' in line for line in lines), lines
    for name in (NAME, 'of-nobody'):
        assert json.loads(scene.control.etcd.get(f'/names/{name}') or b'')['instance'] == other


def test_what_changes_after_the_second_audit_is_left_alone(scene: Scene) -> None:
    """A request for the very uuid arrives between the second audit and the mending."""
    orphan = plants.allocation_orphaned(scene)
    disk = plants.disk_orphaned(scene)
    first, second = scene.audit(), scene.audit()
    assert {each.subject for each in second.findings} == {orphan, disk}
    plants.booted_orphaned(scene)
    for instance in (orphan, disk):
        scene.put(f'/requests/{instance}', {'version': 1, 'instances': [instance], 'pid': 1}, seconds=60)
    lines = mend(scene.store, scene.placement, first, second)
    assert len(lines) == 2, lines
    assert any('left alone: it has changed since' in line for line in lines), lines
    assert any('not removed: it is wanted now' in line for line in lines), lines
    assert orphan in allocations(scene.control)


def test_fix_touches_nothing_it_does_not_understand(scene: Scene) -> None:
    """Domains, running or not, and what lives."""
    guest, off = plants.domain_orphaned(scene), new()
    scene.guest(scene.two, off, running=False)
    doubled = plants.domain_doubled(scene)
    before = scene.audit().findings
    assert {each.subject for each in before} == {guest, off, doubled}
    told: list[str] = []
    after = fix(scene.store, scene.placement, told.append, apart=0.2)
    assert told == []
    assert after.findings == before


@pytest.mark.slow
def test_the_command_with_fix_takes_its_minute(scene: Scene) -> None:
    plants.booted_orphaned(scene)
    done = scene.control.eschedule('audit', '--fix', timeout=180)
    assert done.code == 0, done
    assert done.stdout == ''
    lines = done.stderr.splitlines()
    assert len(lines) == 3, lines
    assert 'looking again in 60 s' in lines[0]
    assert f'booted-orphaned {scene.gone}: /booted/{scene.gone} is deleted' in lines[1]
    assert lines[2].endswith('no findings')
