"""eschedule check: each planted defect is found as itself and nothing else.

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
from ecomp.model.audit import CHECKS
from ecomp.model.finding import CLUSTER, Repair
from ecomp.model.stack import Stack
from ecomp.model.stored import decode
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import audit, fix, repair_findings
from ecomp.store.client import Store
from tests.kit.audit import wait_audit_clean
from tests.kit.commands import Control, write_config
from tests.kit.hands import read_guests
from tests.kit.invariants import read_allocations, read_lasting_keys
from tests.kit.servers import Etcd, PlacementServer, wait_until
from tests.kit.story import SMALL_QUERY, parse_notice, place, read_record, wait_address, wait_state
from tests.kit.tuned import make_tuned
from tests.scenario import audit_plants as plants
from tests.scenario.audit_plants import BATCHES, HYPERVISOR_CODES, PLANTS, SELF_REPAIRED, Plant, get_code, make_uuid
from tests.scenario.audited import AUDIT_TIMEOUT_SECONDS, NAME, Baseline, Scene, get_guests_path

QUICK_LOOKS = {'host.upkeep.LOOK_SECONDS': 0.2}
BIG_INVENTORY = 'VCPU:64,DISK_GB:64,MEMORY_MB:65536'


@pytest.fixture(scope='module')
def shared_scene(tmp_path_factory: pytest.TempPathFactory, usual_placement: type[PlacementServer]) -> Iterator[Scene]:
    """Provide one scene for the whole module, which each test restores."""
    with Etcd() as etcd, usual_placement() as server, contextlib.ExitStack() as at_exit:
        control = Control(etcd, server, tmp_path_factory.mktemp('audit'), at_exit)
        write_config(control.schedule_yaml, etcd.endpoint, server.url, ignore_warnings=['etcd-version'])
        first, second = (make_tuned(control, BIG_INVENTORY, numbers=QUICK_LOOKS) for _ in range(2))
        query = f'{SMALL_QUERY}&in_tree={first.uuid}'
        instance, gone = place(control, query, '--name', NAME)[1], place(control, query)[1]
        wait_address(control, instance)
        wait_state(control, gone, 'active')
        assert control.eschedule('destroy', '--wait', gone).code == 0
        get_guests_path(second).write_text('[]')
        store, placement = Store(EtcdConfig((etcd.endpoint,))), Placement(server.url)
        at_exit.callback(store.close)
        at_exit.callback(placement.close)
        yield Scene(control, first, second, instance, gone, store, placement)


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    guest_files = {
        compute.uuid: get_guests_path(compute).read_text() for compute in (shared_scene.first, shared_scene.second)
    }
    before = Baseline(read_lasting_keys(shared_scene.control), read_allocations(shared_scene.control), guest_files)
    assert shared_scene.list_findings() == []
    yield shared_scene
    shared_scene.restore(before)


def test_every_code_has_a_plant() -> None:
    assert {*map(get_code, PLANTS), *HYPERVISOR_CODES} == set(CHECKS)


def is_repaired_by_eschedule(plant: Plant) -> bool:
    """Return whether --fix repairs it without a host: of keys without a lease only a record."""
    check = CHECKS[get_code(plant)]
    is_record = check.repair is not Repair.PUT_ON_LEASE or plant is plants.record_unleased
    return check.repair is not None and check.scope == CLUSTER and is_record


@pytest.mark.parametrize('batch', BATCHES, ids=lambda batch: f'{get_code(batch[0])}-{len(batch)}')
def test_planted_defects_are_the_only_findings_and_are_repaired(scene: Scene, batch: list[Plant]) -> None:
    """Only defects of some codes are repaired: then nothing else is changed."""
    record, held = read_record(scene.control, scene.instance), read_allocations(scene.control)[scene.instance]
    planted = {plant: plant(scene) for plant in batch}
    expected = sorted((get_code(plant), subject) for plant, subject in planted.items())
    findings: list[object] = []

    def is_as_expected() -> bool:
        findings[:] = sorted(scene.list_findings())
        if findings == [] and batch[0] in SELF_REPAIRED:
            batch[0](scene)
        return findings == expected

    # An ecompute that was started with the defect may record it only after a while.
    try:
        wait_until(is_as_expected, AUDIT_TIMEOUT_SECONDS, f'the audit finds {expected}')
    except AssertionError as error:
        logs = '\n'.join(compute.tail_log() for compute in (scene.first, scene.second))
        raise AssertionError(f'{error}; it found {findings}\n{logs}') from None
    repaired = {plant: subject for plant, subject in planted.items() if is_repaired_by_eschedule(plant)}
    if not repaired:
        return
    messages: list[str] = []

    report = fix(scene.store, scene.placement, messages.append, interval_seconds=0.2)

    remaining = {(finding.code, finding.subject) for finding in report.findings}
    assert remaining == {(get_code(plant), subject) for plant, subject in planted.items() if plant not in repaired}
    assert 'the check is repeated in 0.2 s' in messages[0]
    assert len(messages) == 1 + len(repaired), messages
    text = '\n'.join(messages)
    assert not any(word in text for word in ('not repaired', 'not removed', 'not confirmed')), messages
    assert all(subject in text for subject in repaired.values()), messages
    if plants.record_unleased in repaired:
        assert read_lasting_keys(scene.control)[scene.control.etcd.find_record_key(scene.gone)].lease
    if plants.stack_mismatch in repaired:
        restored = decode(Stack, scene.control.etcd.get('/stacks/shop') or b'', name='shop')
        assert restored.make_place('web/1').incarnation > restored.floor > 1
    if batch == [*repaired]:
        assert read_record(scene.control, scene.instance) == record
        assert read_allocations(scene.control) == {scene.instance: held}


def test_audit_of_a_clean_cluster_finds_nothing(scene: Scene) -> None:
    clean = scene.control.eschedule('check', '--now')
    assert clean.stdout == ''
    compared, summary = clean.stderr.splitlines()
    assert (clean.code, compared) == (0, 'eschedule: 2 computes and 1 living instance were compared, as of now')
    assert summary.startswith('eschedule: no findings; etcd at ')
    assert scene.control.eschedule('check', '-f', 'json').stdout == '[]\n'
    # No question remains.
    assert [key for key in read_lasting_keys(scene.control) if key.startswith('/audit')] == []


def test_audit_prints_findings_and_exits_with_8(scene: Scene) -> None:
    orphan, booted = plants.allocation_orphaned(scene), plants.booted_differs(scene)
    before = read_lasting_keys(scene.control)

    words = 'check', '--now'
    table, parsed = scene.control.eschedule(*words), scene.control.eschedule(*words, '-f', 'json')

    assert (table.code, parsed.code) == (8, 8)
    head, *rows = table.stdout.splitlines()
    assert head.split() == ['CODE', 'SUBJECT', 'NAME', 'HOST', 'FINDING']
    assert {tuple(row.split()[:2]) for row in rows} == {('allocation-orphaned', orphan), ('booted-differs', booted)}
    messages = table.stderr.splitlines()
    assert all(line.startswith('eschedule: ') for line in messages), table
    assert 'eschedule: allocation-orphaned. Fix: eschedule check --fix, which releases the claim' in messages
    assert any(line.startswith('eschedule: booted-differs. Fix: ') for line in messages)
    assert messages[-1].startswith('eschedule: 2 findings; ')
    findings_by_code = {finding['code']: finding for finding in json.loads(parsed.stdout)}
    assert set(findings_by_code) == {'allocation-orphaned', 'booted-differs'}
    for finding in findings_by_code.values():
        assert set(finding) == {'code', 'subject', 'name', 'compute', 'host', 'sentence', 'fix', 'how', 'level'}
        assert bool(finding['fix']) != bool(finding['how'])
    assert findings_by_code['allocation-orphaned']['subject'] == orphan
    assert findings_by_code['booted-differs']['name'] == NAME
    assert scene.second.uuid in findings_by_code['allocation-orphaned']['sentence']
    assert read_lasting_keys(scene.control) == before, 'it changes nothing'
    assert orphan in read_allocations(scene.control)


def test_closed_compute_is_a_finding_whose_guests_are_not_compared(scene: Scene) -> None:
    scene.second.stop()
    result = scene.control.eschedule('check')
    assert (result.code, [line.split()[0] for line in result.stdout.splitlines()]) == (8, ['CODE', 'compute'])
    display_name = f'{socket.gethostname()} ({scene.second.uuid})'  # both computes have this host name
    note = f'eschedule: compute {display_name} is closed: its guests and disks were not compared'
    assert note in result.stderr.splitlines()


@pytest.mark.slow
def test_work_in_flight_is_never_a_finding(cluster: Control) -> None:
    computes = [cluster.ecompute(BIG_INVENTORY) for _ in range(2)]
    store, placement = Store(EtcdConfig((cluster.etcd.endpoint,))), Placement(cluster.placement.url)
    audits = 0
    with _create_and_destroy_concurrently(cluster) as list_instances:
        while audits < 4 or len(list_instances()) < 4:
            assert audit(store, placement, 0.5, is_now=True).findings == []
            audits += 1
    wait_audit_clean(cluster)
    assert read_allocations(cluster) == {}
    for compute in computes:
        assert read_guests(compute) == {}
    store.close()
    placement.close()


@contextlib.contextmanager
def _create_and_destroy_concurrently(cluster: Control) -> Iterator[Callable[[], list[str]]]:
    """Create and destroy instances during the block, and yield a list of them so far."""
    instances: list[str] = []
    stopping = threading.Event()

    def create_and_destroy() -> None:
        while not stopping.is_set():
            instance = parse_notice(cluster.eschedule(SMALL_QUERY))[1]
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


def test_repair_skips_what_only_one_audit_found(scene: Scene) -> None:
    first = scene.audit()
    booted, name = plants.booted_orphaned(scene), plants.name_orphaned(scene)
    second = scene.audit()
    assert {finding.subject for finding in second.findings} == {booted, name}
    assert repair_findings(scene.store, scene.placement, first, second) == []
    third = scene.audit()
    assert third.findings == second.findings
    assert len(repair_findings(scene.store, scene.placement, second, third)) == 2
    assert scene.audit().findings == []


def test_fix_leaves_domains_alone(scene: Scene) -> None:
    guest, stopped = plants.domain_orphaned(scene), make_uuid()
    scene.change_guest(scene.second, stopped, running=False)
    doubled = plants.domain_doubled(scene)
    before = scene.audit().findings
    assert {finding.subject for finding in before} == {guest, stopped, doubled}
    messages: list[str] = []
    after = fix(scene.store, scene.placement, messages.append, interval_seconds=0.2)
    assert messages == []
    assert after.findings == before
