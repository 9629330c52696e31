"""The soak's validator: it accepts a correct history and finds exactly each planted violation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ecomp.failpoints import FAILPOINT_STATES
from tests.faults import soak_plan
from tests.faults.history import History, Line, read_history
from tests.faults.soak_account import HistoryIndex
from tests.faults.validator import find_violations, main

FAKE, REAL = (f'{number}0000000-0000-4000-8000-000000000000' for number in (1, 2))
KEPT, DOOMED, BROKEN, RESUMED, OFF, REFUSED, NOBODY = (f'{n}aaaaaaa-0000-4000-8000-000000000000' for n in range(1, 8))
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
ETCD_AWAY_MESSAGE = 'eschedule: etcd at ds1:2379 cannot be reached\n'


def make_ask(number: int, t: float, kind: str, instance: str | None, *argv: str, **more: Any) -> Line:
    facts = {'image': 'idle', 'proxied': False, 'trouble': '', 'frozen': 0.0, **more}
    return {'t': t, 'what': 'ask', 'id': number, 'kind': kind, 'argv': argv or [QUERY], 'instance': instance, **facts}


def make_answer(number: int, t: float, code: int | None, stdout: str = '', stderr: str = '') -> Line:
    reply = {'code': code, 'stdout': stdout, 'stderr': stderr, 'seconds': 0.5}
    return {'t': t, 'what': 'answer', 'id': number, **reply}


def format_notified(compute: str, instance: str) -> str:
    return f'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}\n'


def make_fault(number: int, t: float, kind: str, target: str, over: float, **more: Any) -> list[Line]:
    start = {'t': t, 'what': 'fault', 'id': number, 'kind': kind, 'target': target, 'seconds': over - t, **more}
    return [start, *([{'t': over, 'what': 'over', 'id': number}] if over > t else [])]


def make_state(t: float, instance: str, name: str) -> Line:
    return {'t': t, 'what': 'state', 'instance': instance, 'state': name, 'compute': FAKE}


def make_changes(*transactions: Mapping[str, dict[str, Any] | None], since: int = 1) -> list[Line]:
    """Make the lines of etcd's changes; None as a value deletes the key."""
    lines: list[Line] = []
    for revision, transaction in enumerate(transactions, since):
        for key, value in transaction.items():
            text = None if value is None else json.dumps({'version': 1, **value})
            lease = int(key.startswith('/requests/') or (value or {}).get('state') in ('gone', 'error'))
            facts = {'revision': revision, 'key': key, 'value': text, 'lease': lease}
            lines.append({'t': 1.0, 'what': 'change', **facts})
    return lines


def make_life(compute: str, instance: str, *states: str) -> list[dict[str, dict[str, Any] | None]]:
    """Make an instance's transactions: attempt, delivery, and its record in each of these states."""
    request, host = f'/requests/{instance}', f'/hosts/{compute}/{instance}'
    request_value = {'instance': instance, 'project_id': 'p', 'allocations': {compute: {'resources': SIZE}}}
    transactions: list[dict[str, dict[str, Any] | None]] = [
        {request: {'instances': [instance], 'pid': 5}},
        {request: None, host: request_value},
    ]
    for name in states:
        stages = dict.fromkeys(('scheduled', 'image', 'disk', *(['started'] if name != 'error' else [])), 'T')
        error = {'reason': 'HTTP 404'} if name == 'error' else None
        facts = {'instance': instance, 'compute': compute, 'state': name, 'stages': stages, 'error': error}
        if name == 'destroying':
            transactions.append({host: {**request_value, 'allocations': {}, 'resources': SIZE}})
        end_changes: dict[str, dict[str, Any] | None] = {host: None} if name in ('gone', 'error') else {}
        transactions.append({f'/instances/{compute}/{instance}': facts, **end_changes})
    return transactions


def make_record(compute: str, name: str, reason: str | None = None) -> dict[str, Any]:
    return {'compute': compute, 'state': name, 'resources': SIZE, 'error': reason and {'reason': reason}}


def make_process(when: str, **more: int) -> Line:
    return {'t': 0.0, 'what': 'process', 'compute': FAKE, 'pid': 7, 'when': when, 'fds': 12, 'threads': 12, **more}


def make_good_history() -> list[Line]:
    """Make a correct history, which every test starts with."""
    computes = {
        FAKE: {'name': 'fake1', 'slots': 3, 'real': False},
        REAL: {'name': 'hv1', 'slots': 3, 'real': True},
    }
    planes = {
        'records': {
            KEPT: make_record(FAKE, 'active'),
            DOOMED: make_record(REAL, 'gone'),
            BROKEN: make_record(REAL, 'error', 'HTTP 404'),
            RESUMED: make_record(FAKE, 'active'),
            OFF: make_record(REAL, 'stopped'),
        },
        'hosts': [[FAKE, KEPT, True], [FAKE, RESUMED, True], [REAL, OFF, True]],
        'requests': [],
        'booted': {},
        'capacity': {compute: {name: 9 * amount for name, amount in SIZE.items()} for compute in (FAKE, REAL)},
        'allocations': {KEPT: {FAKE: SIZE}, RESUMED: {FAKE: SIZE}, OFF: {REAL: SIZE}},
        'guests': {
            FAKE: {KEPT: {'running': True, 'disk': True}, RESUMED: {'running': True, 'disk': True}},
            REAL: {OFF: {'running': False, 'disk': True}},
        },
        'left': {REAL: {'guest data': [OFF], 'parts': []}},
        'logs': {FAKE: [], REAL: []},
    }
    return [
        {'t': 0.0, 'what': 'plan', 'computes': computes},
        make_process('start'),
        make_ask(1, 1.0, 'create', KEPT),
        make_answer(1, 2.0, 0, format_notified(FAKE, KEPT)),
        make_ask(2, 1.5, 'create', KEPT),
        make_answer(
            2,
            3.0,
            0,
            format_notified(FAKE, KEPT),
            f'eschedule: {KEPT} was requested before: this command changed nothing\n',
        ),
        make_state(2.5, KEPT, 'building'),
        make_state(3.0, KEPT, 'active'),
        make_ask(3, 3.0, 'create', None),
        make_answer(3, 4.0, 0, format_notified(REAL, DOOMED)),
        make_ask(4, 5.0, 'destroy', DOOMED, 'destroy', DOOMED),
        make_answer(4, 6.0, 0, '', f'eschedule: {DOOMED}: destroy accepted; hv1 carries it out\n'),
        make_state(7.0, DOOMED, 'gone'),
        make_ask(5, 8.0, 'destroy', NOBODY, 'destroy', NOBODY),
        make_answer(5, 9.0, 4, '', f'eschedule: {NOBODY}: no such instance\n'),
        make_ask(6, 8.0, 'create', BROKEN, image='missing'),
        make_answer(6, 9.0, 0, format_notified(REAL, BROKEN)),
        make_state(10.0, BROKEN, 'error'),
        *make_fault(50, 100.0, 'host-kill', 'hv1', 103.0),
        make_ask(7, 101.0, 'create', REFUSED, f'{QUERY}&in_tree={REAL}'),
        make_answer(7, 102.0, 3, 'NO ALLOCATIONS LEFT\n', 'eschedule: none of them is alive\n'),
        make_ask(8, 110.0, 'create', RESUMED, trouble='at:claimed'),
        make_answer(8, 111.0, -9),
        make_ask(9, 112.0, 'create', RESUMED),
        make_answer(
            9,
            113.0,
            0,
            format_notified(FAKE, RESUMED),
            'eschedule: taking over the attempt of another eschedule with this uuid\n',
        ),
        make_ask(10, 112.0, 'create', OFF),
        make_answer(10, 113.0, 0, format_notified(REAL, OFF)),
        *make_fault(51, 120.0, 'qemu-kill', 'hv1', 120.0, instance=OFF),
        *make_fault(52, 130.0, 'etcd-kill', 'etcd', 134.0),
        make_ask(11, 131.0, 'create', None),
        make_answer(11, 132.0, 7, '', ETCD_AWAY_MESSAGE),
        *make_changes(
            *make_life(FAKE, KEPT, 'building', 'active'),
            *make_life(REAL, DOOMED, 'building', 'active', 'destroying', 'gone'),
            *make_life(REAL, BROKEN, 'building', 'error'),
            *make_life(FAKE, RESUMED, 'building', 'active'),
            *make_life(REAL, OFF, 'building', 'active', 'stopped'),
        ),
        {'t': 135.0, 'what': 'exit', 'part': 'fake1', 'code': 7, 'ready': False},
        make_process('end', fds=20),
        {'t': 200.0, 'what': 'final', 'planes': planes, 'audit': []},
    ]


def get_planes(lines: list[Line]) -> dict[str, Any]:
    final_planes: dict[str, Any] = lines[-1]['planes']
    return final_planes


def find_line(lines: list[Line], what: str, number: int | str) -> Line:
    return next(row for row in lines if row['what'] == what and number in (row.get('id'), row.get('instance')))


def make_line_change(what: str, number: int, **facts: Any) -> Callable[[list[Line]], None]:
    return lambda lines: find_line(lines, what, number).update(facts)


def remove_instance(lines: list[Line], instance: str) -> None:
    """Remove an instance from all planes."""
    final_planes = get_planes(lines)
    for plane in ('records', 'booted', 'allocations'):
        final_planes[plane].pop(instance, None)
    final_planes['hosts'] = [row for row in final_planes['hosts'] if row[1] != instance]
    for guests in final_planes['guests'].values():
        guests.pop(instance, None)
    for leftovers in final_planes['left'].values():
        leftovers['guest data'] = [name for name in leftovers['guest data'] if name != instance]


def make_end(compute: str, instance: str) -> Callable[[list[Line]], None]:
    """Make a change that ends an instance: etcd says gone, and nothing is left on any plane."""

    def change(lines: list[Line]) -> None:
        remove_instance(lines, instance)
        get_planes(lines)['records'][instance] = make_record(compute, 'gone')
        make_insertion(*make_changes(*make_life(compute, instance, 'gone')[2:], since=100))(lines)

    return change


def add_guest_without_image(lines: list[Line]) -> None:
    lines[-1:-1] = [
        make_ask(20, 140.0, 'create', NOBODY, image='missing'),
        make_answer(20, 141.0, 0, format_notified(REAL, NOBODY)),
    ]
    make_insertion(*make_changes(*make_life(REAL, NOBODY, 'building', 'active'), since=100))(lines)
    final_planes = get_planes(lines)
    final_planes['records'][NOBODY] = make_record(REAL, 'active')
    final_planes['hosts'].append([REAL, NOBODY, True])
    final_planes['allocations'][NOBODY] = {REAL: SIZE}
    final_planes['guests'][REAL][NOBODY] = {'running': True, 'disk': True}


def make_insertion(*more: Line) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        lines[-1:-1] = copy.deepcopy(more)

    return change


def make_plane_change(name: str, *path: str, value: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        container = get_planes(lines)[name]
        for key in path[:-1]:
            container = container[key]
        if isinstance(container, list):
            container.append(value)
        elif value is None:
            del container[path[-1]]
        else:
            container[path[-1]] = value

    return change


def make_removal(what: str, number: int | str) -> Callable[[list[Line]], None]:
    return lambda lines: lines.remove(find_line(lines, what, number))


VIOLATIONS: list[tuple[str, str, Callable[[list[Line]], object]]] = [
    ('lost', 'nobody asked for that', make_end(FAKE, KEPT)),
    ('lost', 'nobody switched it off', make_line_change('fault', 51, instance=KEPT)),
    ('lost', 'its guest there is None', make_plane_change('guests', FAKE, KEPT, value=None)),
    ('lost', 'its guest there is', make_plane_change('guests', FAKE, KEPT, value={'running': True, 'disk': False})),
    ('lost', 'its guest there is', make_plane_change('guests', REAL, OFF, value={'running': True, 'disk': True})),
    (
        'lost',
        'it is not known, and',
        make_insertion(
            make_ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT),
            make_answer(20, 141.0, 4, '', 'eschedule: no such instance\n'),
        ),
    ),
    (
        'lost',
        'it is gone, and nobody',
        make_insertion(
            make_ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT),
            make_answer(20, 141.0, 4, '', 'eschedule: gone since 1999\n'),
        ),
    ),
    ('lost', 'the run ended before', lambda lines: lines.pop()),
    ('doubled', 'guests on', make_plane_change('guests', REAL, KEPT, value={'running': True, 'disk': True})),
    ('history', 'was delivered to', make_line_change('answer', 2, stdout=format_notified(REAL, KEPT))),
    ('history', 'none of them that it was there before', make_line_change('answer', 2, stderr='')),
    (
        'history',
        'is active at the end',
        make_insertion(
            make_ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT),
            make_answer(20, 141.0, 0, '', f'eschedule: {KEPT}: destroy accepted; fake1 carries it out\n'),
        ),
    ),
    (
        'leaked',
        'a guest, and no instance',
        make_plane_change('guests', REAL, DOOMED, value={'running': False, 'disk': True}),
    ),
    ('leaked', 'guest data', make_plane_change('left', REAL, 'guest data', 'x', value=BROKEN)),
    ('leaked', 'a.part', make_plane_change('left', REAL, 'parts', 'x', value='a.part')),
    ('answer', 'exit 1 means nothing here', make_line_change('answer', 11, code=1)),
    ('answer', 'exit 2 means nothing here', make_line_change('answer', 5, code=2)),
    ('answer', 'ended by signal 11', make_line_change('answer', 11, code=-11)),
    ('answer', 'ended by signal 9', make_line_change('ask', 8, trouble='')),
    ('answer', 'on stdout', make_line_change('answer', 7, stdout=format_notified(FAKE, REFUSED)[:8])),
    ('answer', 'on stdout', make_line_change('answer', 5, stdout='hello\n')),
    (
        'answer',
        'not lines for a person',
        make_line_change('answer', 5, stderr='eschedule: no such instance\nTraceback:\n'),
    ),
    ('answer', 'without a reason', make_line_change('answer', 11, stderr='')),
    ('answer', 'nothing was wrong with it', lambda lines: lines.remove(find_line(lines, 'fault', 52))),
    ('answer', 'a conflict with nobody', make_line_change('answer', 11, code=5, stderr='eschedule: exists\n')),
    (
        'answer',
        'nobody destroyed what it waits for',
        lambda lines: (
            find_line(lines, 'answer', 1).update(code=4, stderr='eschedule: destroyed during the wait\n'),
            find_line(lines, 'ask', 1).update(argv=[QUERY, '--wait=started', '--timeout', '30']),
        ),
    ),
    ('answer', 'from an image that is not there', add_guest_without_image),
    ('late', 'took 61', make_line_change('answer', 1, seconds=61.0)),
    ('late', 'did not end', make_removal('answer', 11)),
    ('late', 'did not end when asked to', make_insertion({'t': 150.0, 'what': 'stuck', 'part': 'fake1'})),
    ('refused', 'room for 3', make_removal('fault', 50)),
    (
        'crash',
        'ended by itself',
        make_insertion({'t': 150.0, 'what': 'exit', 'part': 'fake1', 'code': 1, 'ready': True}),
    ),
    ('crash', 'Traceback', make_plane_change('logs', REAL, value=['Traceback (most'])),
    ('growth', '12 fds at the start, 40', lambda lines: lines[-2].update(fds=40)),
    ('growth', '12 threads at the start, 40', lambda lines: lines[-2].update(threads=40)),
    ('audit', 'A7', lambda lines: lines[-1]['audit'].append({'code': 'A7'})),
]


def test_good_history_has_no_violations() -> None:
    assert find_violations(make_good_history()) == []


@pytest.mark.parametrize(
    ('kind', 'words', 'change'), VIOLATIONS, ids=[f'{kind}: {words}' for kind, words, _ in VIOLATIONS]
)
def test_each_violation_is_found_alone(kind: str, words: str, change: Callable[[list[Line]], object]) -> None:
    lines = make_good_history()
    change(lines)
    found_violations = find_violations(lines)
    assert [violation.kind for violation in found_violations] == [kind], found_violations
    assert words in found_violations[0].text


def test_effect_of_a_fault_is_not_a_violation() -> None:
    lines = make_good_history()
    make_insertion(
        *make_fault(60, 150.0, 'placement-freeze', 'placement', 152.0),
        make_ask(20, 151.0, 'destroy', KEPT, 'destroy', KEPT),
        make_answer(20, 154.0, 7, '', ETCD_AWAY_MESSAGE),
    )(lines)
    # The destroy's answer was lost, so it may have been accepted or not.
    assert find_violations(lines) == []
    make_end(FAKE, KEPT)(lines)
    assert find_violations(lines) == []


def test_history_with_a_cut_off_last_line_is_read(tmp_path: Path) -> None:
    history = History(tmp_path / 'history.jsonl')
    history.write('ask', id=history.next_id())
    history.write('answer', id=1)
    history.close()
    lines = read_history(tmp_path / 'history.jsonl')
    assert [line_read['what'] for line_read in lines] == ['ask', 'answer']
    text = (tmp_path / 'history.jsonl').read_text()
    (tmp_path / 'history.jsonl').write_text(text[:-5])
    assert read_history(tmp_path / 'history.jsonl') == lines[:1]


def test_main_prints_violations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / 'history.jsonl'
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in make_good_history()))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == ''
    lines = make_good_history()
    remove_instance(lines, KEPT)
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in lines))
    assert main([str(path)]) == 1
    assert KEPT in capsys.readouterr().out


FULL_SIZE = soak_plan.Size(1800, 1000, 50, 50, 5, 4.0, 40.0, guests=True)


def test_plan_depends_on_its_seed_only() -> None:
    assert soak_plan.make_plan(5, FULL_SIZE) == soak_plan.make_plan(5, FULL_SIZE)
    assert soak_plan.make_plan(5, FULL_SIZE) != soak_plan.make_plan(6, FULL_SIZE)


@pytest.mark.parametrize('seed', range(5))
def test_plan_has_all_kinds_and_no_overlapping_faults(seed: int) -> None:
    plan = soak_plan.make_plan(seed, FULL_SIZE)
    assert len(plan.operations) == 1000
    kinds = {*soak_plan.CONTROL_FAULTS, *soak_plan.FAKE_FAULTS, *soak_plan.HOST_FAULTS}
    assert {item.kind for item in plan.faults} == kinds
    free_at: dict[str, float] = {}
    for item in plan.faults:
        assert free_at.get(item.target, 0.0) <= item.at, item
        free_at[item.target] = item.at + item.seconds
    creates = {item.number: item for item in plan.operations if item.kind == 'create'}
    destroys = [item for item in plan.operations if item.kind == 'destroy']
    assert {item.trouble.partition(':')[0] for item in creates.values()} == {'', 'kill', 'freeze', 'at', 'stop'}
    assert {item.image for item in creates.values()} == {'idle', 'guest', 'missing'}
    assert any(item.of is None for item in destroys)
    targets = [item.of for item in destroys if item.of is not None]
    assert len(targets) > len(set(targets))  # some are destroyed twice
    assert all(creates[number].kind == 'create' for number in targets)
    twins = [item for item in creates.values() if item.of is not None]
    assert any(item.client != creates[item.of].client for item in twins if item.of is not None)


def test_plan_failpoints_belong_to_their_processes() -> None:
    assert {FAILPOINT_STATES[name].partition(':')[0] for name in soak_plan.CREATE_PLACES} == {'eschedule'}
    places = {*soak_plan.FAKE_PLACES, *soak_plan.HOST_PLACES}
    assert {FAILPOINT_STATES[name].partition(':')[0] for name in places} == {'ecompute', 'worker'}


def test_index_of_an_empty_history_is_empty() -> None:
    account = HistoryIndex([])
    assert account.commands == []
    assert account.final is None
