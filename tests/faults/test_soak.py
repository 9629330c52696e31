"""The soak of bench/soak: its validator finds planted violations, and a short run has none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.soak.history import History, Line, read_history
from bench.soak.plan import CONTROL_FAULTS, CREATE_PLACES, FAKE_FAULTS, FAKE_PLACES, HOST_FAULTS, HOST_PLACES, Size
from bench.soak.plan import make_plan as make_soak_plan
from bench.soak.soak import compute_figures, print_report, run_soak
from bench.soak.validator import find_violations
from ecomp.failpoints import FAILPOINT_STATES
from tests.kit.lab import make_lab_name

SEED = 11
# Two cores carry this size in about two minutes, including the start and removal of the lab. Every client asks again
# after a lost answer, because a claim without a client is released only after two checks a minute apart.
SIZE = Size(seconds=80, operations=100, clients=12, fakes=10, hosts=2, fault_every=3, longest=6, patient=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root')
def test_random_faults_lose_double_or_leak_nothing(tmp_path: Path) -> None:
    """F33: the short soak: 100 operations on 12 hosts, a fault every three seconds (libvirt)."""
    path = run_soak(make_soak_plan(SEED, SIZE), make_lab_name('soak'), tmp_path)
    assert print_report(path) == [], f'the history is {path}'
    # A soak without faults or answers would prove nothing.
    results = compute_figures(read_history(path))
    assert results['acknowledged'] >= 40, results
    assert results['faults'] >= 20, results
    assert len(results['by kind']) >= 15, results
    assert results['states']['gone'] >= 10, results


def test_plan_has_all_kinds_and_faults_of_one_target_do_not_overlap() -> None:
    plan = make_soak_plan(5, Size(1800, 1000, 50, 50, 5, 4.0, 40.0, guests=True))
    assert plan == make_soak_plan(5, Size(1800, 1000, 50, 50, 5, 4.0, 40.0, guests=True))
    assert {fault.kind for fault in plan.faults} == {*CONTROL_FAULTS, *FAKE_FAULTS, *HOST_FAULTS}
    free_at: dict[str, float] = {}
    for fault in plan.faults:
        assert free_at.get(fault.target, 0.0) <= fault.at, fault
        free_at[fault.target] = fault.at + fault.seconds
    assert {*CREATE_PLACES, *FAKE_PLACES, *HOST_PLACES} <= FAILPOINT_STATES.keys()


FAKE, REAL = (f'{number}0000000-0000-4000-8000-000000000000' for number in (1, 2))
KEPT, DOOMED, REFUSED = (f'{number}aaaaaaa-0000-4000-8000-000000000000' for number in (1, 2, 3))
SIZES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'


def make_command(number: int, t: float, kind: str, instance: str, code: int, **more: Any) -> list[Line]:
    """Make a command of half a second with its answer. `more` changes either."""
    ask = {'argv': ['destroy', instance] if kind == 'destroy' else [QUERY], 'kind': kind, 'instance': instance}
    ask |= {'image': 'idle', 'proxied': False, 'trouble': '', 'frozen': 0.0}
    answer = {'code': code, 'stdout': '', 'stderr': '', 'seconds': 0.5}
    return [
        {'t': t, 'what': 'ask', 'id': number, **{name: more.get(name, value) for name, value in ask.items()}},
        {'t': t + 0.5, 'what': 'answer', 'id': number, **{name: more.get(name, answer[name]) for name in answer}},
    ]


def make_changes(compute: str, instance: str, revision: int, *states: str) -> list[Line]:
    """Make the changes of etcd in an instance's life: attempt, delivery, and records."""
    request, host = f'/requests/{instance}', f'/hosts/{compute}/{instance}'
    order = {'instance': instance, 'project_id': 'p', 'allocations': {compute: {'resources': SIZES}}}
    transactions: list[dict[str, Any]] = [{request: {'instances': [instance], 'pid': 5}}, {request: None, host: order}]
    for state in states:
        if state == 'destroying':
            transactions.append({host: {**order, 'allocations': {}, 'resources': SIZES}})
        record = {'instance': instance, 'compute': compute, 'state': state, 'error': None}
        record |= {'stages': dict.fromkeys(('scheduled', 'image', 'disk', 'started'), 'T')}
        transactions.append({f'/instances/{compute}/{instance}': record} | ({host: None} if state == 'gone' else {}))
    return [
        {
            **{'t': 1.0, 'what': 'change', 'revision': number, 'key': key},
            'value': value and json.dumps({'version': 1, **value}),
            'lease': int(key == request or (value or {}).get('state') == 'gone'),
        }
        for number, transaction in enumerate(transactions, revision)
        for key, value in transaction.items()
    ]


def make_good_history() -> list[Line]:
    """Make a correct history: an instance placed, one destroyed, one refused."""
    computes = {FAKE: {'name': 'fake1', 'slots': 3, 'real': False}, REAL: {'name': 'hv1', 'slots': 3, 'real': True}}
    process = {'t': 0.0, 'what': 'process', 'compute': FAKE, 'pid': 7, 'fds': 12, 'threads': 12}
    record = {'resources': SIZES, 'error': None}
    planes = {
        'records': {
            KEPT: {**record, 'compute': FAKE, 'state': 'active'},
            DOOMED: {**record, 'compute': REAL, 'state': 'gone'},
        },
        **{'hosts': [[FAKE, KEPT, True]], 'requests': [], 'booted': {}, 'allocations': {KEPT: {FAKE: SIZES}}},
        'capacity': {compute: {name: 9 * amount for name, amount in SIZES.items()} for compute in (FAKE, REAL)},
        'guests': {FAKE: {KEPT: {'running': True, 'disk': True}}, REAL: {}},
        **{'left': {REAL: {'guest data': [], 'parts': []}}, 'logs': {FAKE: [], REAL: []}},
    }
    refusal = {'stdout': 'NO ALLOCATIONS LEFT\n', 'stderr': 'eschedule: none of them is alive\n'}
    accepted = f'eschedule: {DOOMED}: destroy accepted; hv1 carries it out\n'
    return [
        {'t': 0.0, 'what': 'plan', 'computes': computes},
        {**process, 'when': 'start'},
        *make_command(1, 1.0, 'create', KEPT, 0, stdout=f'NOTIFIED TARGET, {FAKE}, OF INSTANCE {KEPT}\n'),
        *make_command(2, 3.0, 'create', DOOMED, 0, stdout=f'NOTIFIED TARGET, {REAL}, OF INSTANCE {DOOMED}\n'),
        *make_command(3, 5.0, 'destroy', DOOMED, 0, stderr=accepted),
        {'t': 7.0, 'what': 'state', 'instance': DOOMED, 'state': 'gone', 'compute': REAL},
        {'t': 100.0, 'what': 'fault', 'id': 50, 'kind': 'host-kill', 'target': 'hv1', 'seconds': 3.0},
        {'t': 103.0, 'what': 'over', 'id': 50},
        *make_command(4, 101.0, 'create', REFUSED, 3, argv=[f'{QUERY}&in_tree={REAL}'], **refusal),
        *make_changes(FAKE, KEPT, 1, 'building', 'active'),
        *make_changes(REAL, DOOMED, 5, 'building', 'active', 'destroying', 'gone'),
        {**process, 'when': 'end', 'fds': 20},
        {'t': 200.0, 'what': 'final', 'planes': planes, 'audit': []},
    ]


def find_line(lines: list[Line], what: str, number: int) -> Line:
    return next(line for line in lines if line['what'] == what and line['id'] == number)


VIOLATIONS: list[tuple[str, str, Callable[[list[Line]], object]]] = [
    ('lost', 'its guest there is None', lambda lines: lines[-1]['planes']['guests'][FAKE].clear()),
    ('lost', 'the run ended before', lambda lines: lines.pop()),
    ('lost', 'it is not known', lambda lines: lines.extend(make_lost_answer(lines))),
    (
        'doubled',
        'guests on',
        lambda lines: lines[-1]['planes']['guests'][REAL].update(lines[-1]['planes']['guests'][FAKE]),
    ),
    ('history', 'is active at the end', lambda lines: lines.extend(make_accepted_destroy(lines))),
    ('leaked', 'a.part', lambda lines: lines[-1]['planes']['left'][REAL]['parts'].append('a.part')),
    ('answer', 'exit 1 means nothing here', lambda lines: find_line(lines, 'answer', 3).update(code=1)),
    ('late', 'took 61', lambda lines: find_line(lines, 'answer', 1).update(seconds=61.0)),
    ('late', 'did not end', lambda lines: lines.remove(find_line(lines, 'answer', 4))),
    ('refused', 'room for 3', lambda lines: lines.remove(find_line(lines, 'fault', 50))),
    ('crash', 'Traceback', lambda lines: lines[-1]['planes']['logs'][REAL].append('Traceback (most')),
    ('growth', '12 threads at the start, 40', lambda lines: lines[-2].update(threads=40)),
    ('audit', 'A7', lambda lines: lines[-1]['audit'].append({'code': 'A7'})),
]


def make_lost_answer(lines: list[Line]) -> list[Line]:
    return [*make_command(20, 140.0, 'destroy', KEPT, 4, stderr='eschedule: no such instance\n'), lines.pop()]


def make_accepted_destroy(lines: list[Line]) -> list[Line]:
    accepted = f'eschedule: {KEPT}: destroy accepted; fake1 carries it out\n'
    return [*make_command(20, 140.0, 'destroy', KEPT, 0, stderr=accepted), lines.pop()]


def test_good_history_has_no_violations() -> None:
    assert find_violations(make_good_history()) == []


@pytest.mark.parametrize(('kind', 'words', 'plant'), VIOLATIONS, ids=[words for _, words, _ in VIOLATIONS])
def test_planted_violation_is_found_alone(kind: str, words: str, plant: Callable[[list[Line]], object]) -> None:
    lines = make_good_history()
    plant(lines)
    (violation,) = find_violations(lines)
    assert violation.kind == kind
    assert words in violation.text


def test_history_with_a_cut_off_last_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / 'history.jsonl'
    history = History(path)
    history.write('ask', id=history.next_id())
    history.write('answer', id=1)
    history.close()
    lines = read_history(path)
    assert [line['what'] for line in lines] == ['ask', 'answer']
    path.write_text(path.read_text()[:-5])
    assert read_history(path) == lines[:1]
