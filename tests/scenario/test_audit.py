"""eschedule audit: each planted defect is found as itself and nothing else.

etcd and placement are real, the guests are fakes. The plants are in audit_plants.py. Defects that need a hypervisor
(a missing base volume, foreign domains) are in tests/faults/test_audit_lab.py.
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
    """Provide one scene for the whole module; each test restores it."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    with Etcd() as etcd, PlacementServer() as server, contextlib.ExitStack() as at_exit:
        control = Control(etcd, server, tmp_path_factory.mktemp('audit'), at_exit)
        first, second = control.ecompute(BIG), control.ecompute(BIG)
        query = f'{SMALL}&in_tree={first.uuid}'
        instance, gone = place(control, query, '--name', NAME)[1], place(control, query)[1]
        addressed(control, instance)
        reached(control, gone, 'active')
        assert control.eschedule('destroy', '--wait', gone).code == 0
        guests_file(second).write_text('[]')
        store, placement = Store(EtcdConfig((etcd.endpoint,))), Placement(server.url)
        at_exit.callback(store.close)
        at_exit.callback(placement.close)
        yield Scene(control, first, second, instance, gone, store, placement)


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    guest_files = {compute.uuid: guests_file(compute).read_text() for compute in (made.one, made.two)}
    before = Before(everything(made.control), allocations(made.control), guest_files)
    assert made.found() == []
    yield made
    made.restore(before)


def test_every_code_is_planted_somewhere() -> None:
    assert {*map(code_of, PLANTS), *ON_A_HYPERVISOR} == set(CODES)


@pytest.mark.parametrize('plant', PLANTS, ids=code_of)
def test_a_planted_defect_is_found_as_itself_and_nothing_else(scene: Scene, plant: Plant) -> None:
    subject = plant(scene)
    expected = [(code_of(plant), subject)]
    findings: list[object] = []

    def is_as_expected() -> bool:
        findings[:] = scene.found()
        if findings == [] and plant in NOTICED:
            plant(scene)
        return findings == expected

    # An ecompute that was started with the defect may record it only after a while.
    try:
        until(is_as_expected, SOON, f'the audit finds {expected}')
    except AssertionError as error:
        logs = '\n'.join(compute.last_words() for compute in (scene.one, scene.two))
        raise AssertionError(f'{error}; it found {findings}\n{logs}') from None


def test_an_instance_is_named_beside_its_uuid(scene: Scene) -> None:
    plants.booted_differs(scene)
    document = scene.control.eschedule('audit', '-f', 'json').stdout
    assert [(finding['subject'], finding['name']) for finding in json.loads(document)] == [(scene.instance, NAME)]
    assert f'{scene.instance}  {NAME}  ' in scene.control.eschedule('audit').stdout


def test_a_clean_cluster(scene: Scene) -> None:
    clean = scene.control.eschedule('audit')
    assert clean.stdout == ''
    one_line(clean, 0, '2 computes, 1 living instance and 1 allocation were compared: no findings')
    assert scene.control.eschedule('audit', '-f', 'json').stdout == '[]\n'
    # Neither the audit's requests nor the digests of the computes remain.
    assert [key for key in everything(scene.control) if key.startswith(('/audit', '/digests'))] == []


def test_nothing_at_all(cluster: Control) -> None:
    one_line(cluster.eschedule('audit'), 0, '0 computes', 'no findings')
    assert everything(cluster) == {}


def test_the_words_and_the_exit_code(scene: Scene) -> None:
    orphan, booted = plants.allocation_orphaned(scene), plants.booted_differs(scene)
    before = everything(scene.control)

    table, parsed = scene.control.eschedule('audit'), scene.control.eschedule('audit', '-f', 'json')

    assert (table.code, parsed.code) == (8, 8)
    head, *rows = table.stdout.splitlines()
    assert head.split() == ['CODE', 'SUBJECT', 'NAME', 'FINDING']
    assert {tuple(row.split()[:2]) for row in rows} == {('allocation-orphaned', orphan), ('booted-differs', booted)}
    messages = table.stderr.splitlines()
    assert all(line.startswith('eschedule: ') for line in messages), table
    assert 'eschedule: allocation-orphaned: --fix releases it' in messages
    assert any(line.startswith('eschedule: booted-differs: by hand: ') for line in messages)
    assert messages[-1].endswith(': 2 findings')
    findings_by_code = {finding['code']: finding for finding in json.loads(parsed.stdout)}
    assert set(findings_by_code) == {'allocation-orphaned', 'booted-differs'}
    for finding in findings_by_code.values():
        assert set(finding) == {'code', 'subject', 'name', 'compute', 'host', 'sentence', 'fix', 'how'}
        assert bool(finding['fix']) != bool(finding['how'])
    assert findings_by_code['allocation-orphaned']['subject'] == orphan
    assert scene.two.uuid in findings_by_code['allocation-orphaned']['sentence']
    assert everything(scene.control) == before, 'it changes nothing'
    assert orphan in allocations(scene.control)


def test_a_silent_compute_is_a_note_and_no_finding(scene: Scene) -> None:
    scene.two.stop()
    result = scene.control.eschedule('audit')
    assert (result.code, result.stdout) == (0, '')
    display_name = f'{socket.gethostname()} ({scene.two.uuid})'  # both computes have this host name
    assert f'eschedule: compute {display_name} is closed: what it has was not compared' in result.stderr.splitlines()


def test_a_backend_that_is_away(own_control: Control) -> None:
    own_control.placement.kill()
    one_line(own_control.eschedule('audit'), 7, 'placement')
    own_control.etcd.kill()
    one_line(own_control.eschedule('audit'), 7, 'etcd')


def test_what_is_in_work_is_never_a_finding(cluster: Control) -> None:
    computes = [cluster.ecompute(BIG) for _ in range(2)]
    store, placement = Store(EtcdConfig((cluster.etcd.endpoint,))), Placement(cluster.placement.url)
    audits = 0
    with _working(cluster) as list_instances:
        while audits < 4 or len(list_instances()) < 20:
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
    """Create and destroy instances concurrently during the block; yield a list of them so far."""
    instances: list[str] = []
    stopping = threading.Event()

    def create_and_destroy() -> None:
        while not stopping.is_set():
            instance = notified(cluster.eschedule(SMALL))[1]
            instances.append(instance)
            done = cluster.eschedule('destroy', '--wait', instance)
            assert done.code == 0, done

    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(create_and_destroy) for _ in range(4)]

        def list_instances() -> list[str]:
            for future in futures:
                assert not future.done(), future.result()
            return instances

        try:
            yield list_instances
        finally:
            stopping.set()
        for future in futures:
            future.result()


MENDED = [each for each in PLANTS if CODES[code_of(each)].fix]


@pytest.mark.parametrize('plant', MENDED, ids=code_of)
def test_what_fix_mends(scene: Scene, plant: Plant) -> None:
    before = {'instance': record(scene.control, scene.instance), 'held': allocations(scene.control)[scene.instance]}
    subject = plant(scene)
    messages: list[str] = []

    report = fix(scene.store, scene.placement, messages.append, apart=0.2)

    assert report.findings == [], messages
    assert 'looking again in 0.2 s' in messages[0]
    assert len(messages) == 2, messages
    assert not any(word in messages[1] for word in ('left alone', 'not removed', 'not known')), messages
    assert scene.found() == []
    if plant is not plants.part_orphaned:
        assert subject in messages[1] or MAC in messages[1]
    if plant is plants.record_unleased:
        assert everything(scene.control)[scene.control.etcd.record_key(scene.gone)].lease
    # Nothing else is changed.
    assert record(scene.control, scene.instance) == before['instance']
    assert allocations(scene.control) == {scene.instance: before['held']}


def test_what_only_one_audit_saw_is_left_alone(scene: Scene) -> None:
    first = scene.audit()
    orphan, booted, part = plants.allocation_orphaned(scene), plants.booted_orphaned(scene), plants.part_orphaned(scene)
    second = scene.audit()
    assert {finding.subject for finding in second.findings} == {orphan, booted, part}
    assert mend(scene.store, scene.placement, first, second) == []
    third = scene.audit()
    assert third.findings == second.findings
    # The same file, written again: a newer file than the one that was found.
    plants.part_orphaned(scene)
    lines = mend(scene.store, scene.placement, second, scene.audit())
    assert len(lines) == 2, lines
    assert {finding.subject for finding in scene.audit().findings} == {part}


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
    """An attempt for the same uuid starts between the second audit and the repair."""
    orphan = plants.allocation_orphaned(scene)
    disk = plants.disk_orphaned(scene)
    first, second = scene.audit(), scene.audit()
    assert {finding.subject for finding in second.findings} == {orphan, disk}
    plants.booted_orphaned(scene)
    for instance in (orphan, disk):
        scene.put(f'/requests/{instance}', {'version': 1, 'instances': [instance], 'pid': 1}, seconds=60)
    lines = mend(scene.store, scene.placement, first, second)
    assert len(lines) == 2, lines
    assert any('left alone: it has changed since' in line for line in lines), lines
    assert any('not removed: it is wanted now' in line for line in lines), lines
    assert orphan in allocations(scene.control)


def test_fix_touches_nothing_it_does_not_understand(scene: Scene) -> None:
    """Domains are left alone, running or not."""
    guest, stopped = plants.domain_orphaned(scene), new()
    scene.guest(scene.two, stopped, running=False)
    doubled = plants.domain_doubled(scene)
    before = scene.audit().findings
    assert {finding.subject for finding in before} == {guest, stopped, doubled}
    messages: list[str] = []
    after = fix(scene.store, scene.placement, messages.append, apart=0.2)
    assert messages == []
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
