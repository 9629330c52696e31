"""The soak's validator: it accepts a correct history and finds exactly each planted violation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ecomp.failpoints import PLACES
from tests.faults import soak_plan
from tests.faults.history import History, Line, read
from tests.faults.soak_account import Account
from tests.faults.validator import main, violations

FAKE, REAL = (f'{number}0000000-0000-4000-8000-000000000000' for number in (1, 2))
KEPT, DOOMED, BROKEN, RESUMED, OFF, REFUSED, NOBODY = (f'{n}aaaaaaa-0000-4000-8000-000000000000' for n in range(1, 8))
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
AWAY = 'eschedule: etcd at ds1:2379 cannot be reached\n'


def ask(number: int, t: float, kind: str, instance: str | None, *argv: str, **more: Any) -> Line:
    facts = {'image': 'idle', 'proxied': False, 'trouble': '', 'frozen': 0.0, **more}
    return {'t': t, 'what': 'ask', 'id': number, 'kind': kind, 'argv': argv or [QUERY], 'instance': instance, **facts}


def answer(number: int, t: float, code: int | None, stdout: str = '', stderr: str = '') -> Line:
    reply = {'code': code, 'stdout': stdout, 'stderr': stderr, 'seconds': 0.5}
    return {'t': t, 'what': 'answer', 'id': number, **reply}


def notified(compute: str, instance: str) -> str:
    return f'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}\n'


def fault(number: int, t: float, kind: str, target: str, over: float, **more: Any) -> list[Line]:
    start = {'t': t, 'what': 'fault', 'id': number, 'kind': kind, 'target': target, 'seconds': over - t, **more}
    return [start, *([{'t': over, 'what': 'over', 'id': number}] if over > t else [])]


def state(t: float, instance: str, name: str) -> Line:
    return {'t': t, 'what': 'state', 'instance': instance, 'state': name, 'compute': FAKE}


def changes(*transactions: Mapping[str, dict[str, Any] | None], since: int = 1) -> list[Line]:
    """Make the lines of etcd's changes; None as a value deletes the key."""
    lines: list[Line] = []
    for revision, transaction in enumerate(transactions, since):
        for key, value in transaction.items():
            text = None if value is None else json.dumps({'version': 1, **value})
            lease = int(key.startswith('/requests/') or (value or {}).get('state') in ('gone', 'error'))
            facts = {'revision': revision, 'key': key, 'value': text, 'lease': lease}
            lines.append({'t': 1.0, 'what': 'change', **facts})
    return lines


def lives(compute: str, instance: str, *states: str) -> list[dict[str, dict[str, Any] | None]]:
    """Make an instance's transactions: attempt, delivery, and its record in each of these states."""
    request, host = f'/requests/{instance}', f'/hosts/{compute}/{instance}'
    request_value = {'instance': instance, 'project_id': 'p', 'allocations': {compute: {'resources': SIZE}}}
    transactions: list[dict[str, dict[str, Any] | None]] = [
        {request: {'instances': [instance], 'pid': 5}}, {request: None, host: request_value}
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


def record(compute: str, name: str, reason: str | None = None) -> dict[str, Any]:
    return {'compute': compute, 'state': name, 'resources': SIZE, 'error': reason and {'reason': reason}}


def process(when: str, **more: int) -> Line:
    return {'t': 0.0, 'what': 'process', 'compute': FAKE, 'pid': 7, 'when': when, 'fds': 12, 'threads': 12, **more}


def good() -> list[Line]:
    """Make a correct history, which every test starts with."""
    computes = {
        FAKE: {'name': 'fake1', 'slots': 3, 'real': False},
        REAL: {'name': 'hv1', 'slots': 3, 'real': True},
    }
    planes = {
        'records': {
            KEPT: record(FAKE, 'active'),
            DOOMED: record(REAL, 'gone'),
            BROKEN: record(REAL, 'error', 'HTTP 404'),
            RESUMED: record(FAKE, 'active'),
            OFF: record(REAL, 'stopped'),
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
        process('start'),
        ask(1, 1.0, 'create', KEPT),
        answer(1, 2.0, 0, notified(FAKE, KEPT)),
        ask(2, 1.5, 'create', KEPT),
        answer(2, 3.0, 0, notified(FAKE, KEPT), f'eschedule: {KEPT} was requested before: nothing is changed\n'),
        state(2.5, KEPT, 'building'),
        state(3.0, KEPT, 'active'),
        ask(3, 3.0, 'create', None),
        answer(3, 4.0, 0, notified(REAL, DOOMED)),
        ask(4, 5.0, 'destroy', DOOMED, 'destroy', DOOMED),
        answer(4, 6.0, 0, '', f'eschedule: {DOOMED}: destroy accepted, hv1 carries it out\n'),
        state(7.0, DOOMED, 'gone'),
        ask(5, 8.0, 'destroy', NOBODY, 'destroy', NOBODY),
        answer(5, 9.0, 4, '', f'eschedule: {NOBODY}: no such instance\n'),
        ask(6, 8.0, 'create', BROKEN, image='missing'),
        answer(6, 9.0, 0, notified(REAL, BROKEN)),
        state(10.0, BROKEN, 'error'),
        *fault(50, 100.0, 'host-kill', 'hv1', 103.0),
        ask(7, 101.0, 'create', REFUSED, f'{QUERY}&in_tree={REAL}'),
        answer(7, 102.0, 3, 'NO ALLOCATIONS LEFT\n', 'eschedule: none of them is alive\n'),
        ask(8, 110.0, 'create', RESUMED, trouble='at:claimed'),
        answer(8, 111.0, -9),
        ask(9, 112.0, 'create', RESUMED),
        answer(9, 113.0, 0, notified(FAKE, RESUMED), 'eschedule: another one was at it: taking over\n'),
        ask(10, 112.0, 'create', OFF),
        answer(10, 113.0, 0, notified(REAL, OFF)),
        *fault(51, 120.0, 'qemu-kill', 'hv1', 120.0, instance=OFF),
        *fault(52, 130.0, 'etcd-kill', 'etcd', 134.0),
        ask(11, 131.0, 'create', None),
        answer(11, 132.0, 7, '', AWAY),
        *changes(
            *lives(FAKE, KEPT, 'building', 'active'),
            *lives(REAL, DOOMED, 'building', 'active', 'destroying', 'gone'),
            *lives(REAL, BROKEN, 'building', 'error'),
            *lives(FAKE, RESUMED, 'building', 'active'),
            *lives(REAL, OFF, 'building', 'active', 'stopped'),
        ),
        {'t': 135.0, 'what': 'exit', 'part': 'fake1', 'code': 7, 'ready': False},
        process('end', fds=20),
        {'t': 200.0, 'what': 'final', 'planes': planes, 'audit': []},
    ]


def planes(lines: list[Line]) -> dict[str, Any]:
    final_planes: dict[str, Any] = lines[-1]['planes']
    return final_planes


def line(lines: list[Line], what: str, number: int | str) -> Line:
    return next(row for row in lines if row['what'] == what and number in (row.get('id'), row.get('instance')))


def changed(what: str, number: int, **facts: Any) -> Callable[[list[Line]], None]:
    return lambda lines: line(lines, what, number).update(facts)


def forget(lines: list[Line], instance: str) -> None:
    """Remove an instance from all planes."""
    final_planes = planes(lines)
    for plane in ('records', 'booted', 'allocations'):
        final_planes[plane].pop(instance, None)
    final_planes['hosts'] = [row for row in final_planes['hosts'] if row[1] != instance]
    for guests in final_planes['guests'].values():
        guests.pop(instance, None)
    for leftovers in final_planes['left'].values():
        leftovers['guest data'] = [name for name in leftovers['guest data'] if name != instance]


def ends(compute: str, instance: str) -> Callable[[list[Line]], None]:
    """Make a change that ends an instance: etcd says gone, and nothing is left on any plane."""

    def change(lines: list[Line]) -> None:
        forget(lines, instance)
        planes(lines)['records'][instance] = record(compute, 'gone')
        added(*changes(*lives(compute, instance, 'gone')[2:], since=100))(lines)

    return change


def lives_of_nothing(lines: list[Line]) -> None:
    lines[-1:-1] = [ask(20, 140.0, 'create', NOBODY, image='missing'), answer(20, 141.0, 0, notified(REAL, NOBODY))]
    added(*changes(*lives(REAL, NOBODY, 'building', 'active'), since=100))(lines)
    final_planes = planes(lines)
    final_planes['records'][NOBODY] = record(REAL, 'active')
    final_planes['hosts'].append([REAL, NOBODY, True])
    final_planes['allocations'][NOBODY] = {REAL: SIZE}
    final_planes['guests'][REAL][NOBODY] = {'running': True, 'disk': True}


def added(*more: Line) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        lines[-1:-1] = copy.deepcopy(more)

    return change


def plane(name: str, *path: str, value: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        container = planes(lines)[name]
        for key in path[:-1]:
            container = container[key]
        if isinstance(container, list):
            container.append(value)
        elif value is None:
            del container[path[-1]]
        else:
            container[path[-1]] = value

    return change


def without(what: str, number: int | str) -> Callable[[list[Line]], None]:
    return lambda lines: lines.remove(line(lines, what, number))


WRONG: list[tuple[str, str, Callable[[list[Line]], object]]] = [
    ('lost', 'nobody asked for that', ends(FAKE, KEPT)),
    ('lost', 'nobody switched it off', changed('fault', 51, instance=KEPT)),
    ('lost', 'its guest there is None', plane('guests', FAKE, KEPT, value=None)),
    ('lost', 'its guest there is', plane('guests', FAKE, KEPT, value={'running': True, 'disk': False})),
    ('lost', 'its guest there is', plane('guests', REAL, OFF, value={'running': True, 'disk': True})),
    ('lost', 'it is not known, and', added(
        ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT), answer(20, 141.0, 4, '', 'eschedule: no such instance\n'))),
    ('lost', 'it is gone, and nobody', added(
        ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT), answer(20, 141.0, 4, '', 'eschedule: gone since 1999\n'))),
    ('lost', 'the run ended before', lambda lines: lines.pop()),
    ('doubled', 'guests on', plane('guests', REAL, KEPT, value={'running': True, 'disk': True})),
    ('history', 'was delivered to', changed('answer', 2, stdout=notified(REAL, KEPT))),
    ('history', 'none of them that it was there before', changed('answer', 2, stderr='')),
    ('history', 'is active at the end', added(ask(20, 140.0, 'destroy', KEPT, 'destroy', KEPT), answer(
        20, 141.0, 0, '', f'eschedule: {KEPT}: destroy accepted, fake1 carries it out\n'))),
    ('leaked', 'a guest, and no instance', plane('guests', REAL, DOOMED, value={'running': False, 'disk': True})),
    ('leaked', 'guest data', plane('left', REAL, 'guest data', 'x', value=BROKEN)),
    ('leaked', 'a.part', plane('left', REAL, 'parts', 'x', value='a.part')),
    ('answer', 'exit 1 means nothing here', changed('answer', 11, code=1)),
    ('answer', 'exit 2 means nothing here', changed('answer', 5, code=2)),
    ('answer', 'ended by signal 11', changed('answer', 11, code=-11)),
    ('answer', 'ended by signal 9', changed('ask', 8, trouble='')),
    ('answer', 'on stdout', changed('answer', 7, stdout=notified(FAKE, REFUSED)[:8])),
    ('answer', 'on stdout', changed('answer', 5, stdout='hello\n')),
    ('answer', 'not lines for a person', changed('answer', 5, stderr='eschedule: no such instance\nTraceback:\n')),
    ('answer', 'without a reason', changed('answer', 11, stderr='')),
    ('answer', 'nothing was wrong with it', lambda lines: lines.remove(line(lines, 'fault', 52))),
    ('answer', 'a conflict with nobody', changed('answer', 11, code=5, stderr='eschedule: exists\n')),
    ('answer', 'nobody destroyed what it waits for', lambda lines: (
        line(lines, 'answer', 1).update(code=4, stderr='eschedule: destroyed while waiting for it\n'),
        line(lines, 'ask', 1).update(argv=[QUERY, '--wait=started', '--timeout', '30']))),
    ('answer', 'from an image that is not there', lives_of_nothing),
    ('late', 'took 61', changed('answer', 1, seconds=61.0)),
    ('late', 'did not end', without('answer', 11)),
    ('late', 'did not end when asked to', added({'t': 150.0, 'what': 'stuck', 'part': 'fake1'})),
    ('refused', 'room for 3', without('fault', 50)),
    ('crash', 'ended by itself', added({'t': 150.0, 'what': 'exit', 'part': 'fake1', 'code': 1, 'ready': True})),
    ('crash', 'Traceback', plane('logs', REAL, value=['Traceback (most'])),
    ('growth', '12 fds at the start, 40', lambda lines: lines[-2].update(fds=40)),
    ('growth', '12 threads at the start, 40', lambda lines: lines[-2].update(threads=40)),
    ('audit', 'A7', lambda lines: lines[-1]['audit'].append({'code': 'A7'})),
]


def test_a_good_history_passes() -> None:
    assert violations(good()) == []


@pytest.mark.parametrize(('kind', 'words', 'change'), WRONG, ids=[f'{kind}: {words}' for kind, words, _ in WRONG])
def test_one_wrong_thing_is_found_and_it_alone(
    kind: str, words: str, change: Callable[[list[Line]], object]
) -> None:
    lines = good()
    change(lines)
    found_violations = violations(lines)
    assert [violation.kind for violation in found_violations] == [kind], found_violations
    assert words in found_violations[0].text


def test_what_a_fault_explains_is_no_violation() -> None:
    lines = good()
    added(
        *fault(60, 150.0, 'placement-freeze', 'placement', 152.0),
        ask(20, 151.0, 'destroy', KEPT, 'destroy', KEPT),
        answer(20, 154.0, 7, '', AWAY),
    )(lines)
    # The destroy's answer was lost, so it may have been accepted or not.
    assert violations(lines) == []
    ends(FAKE, KEPT)(lines)
    assert violations(lines) == []


def test_a_history_is_read_back_also_when_its_last_line_is_torn(tmp_path: Path) -> None:
    history = History(tmp_path / 'history.jsonl')
    history.write('ask', id=history.next_id())
    history.write('answer', id=1)
    history.close()
    lines = read(tmp_path / 'history.jsonl')
    assert [line_read['what'] for line_read in lines] == ['ask', 'answer']
    text = (tmp_path / 'history.jsonl').read_text()
    (tmp_path / 'history.jsonl').write_text(text[:-5])
    assert read(tmp_path / 'history.jsonl') == lines[:1]


def test_the_validator_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / 'history.jsonl'
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in good()))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == ''
    lines = good()
    forget(lines, KEPT)
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in lines))
    assert main([str(path)]) == 1
    assert KEPT in capsys.readouterr().out


WHOLE = soak_plan.Size(1800, 1000, 50, 50, 5, 4.0, 40.0, guests=True)


def test_the_same_seed_makes_the_same_plan_and_another_seed_another() -> None:
    assert soak_plan.make(5, WHOLE) == soak_plan.make(5, WHOLE)
    assert soak_plan.make(5, WHOLE) != soak_plan.make(6, WHOLE)


@pytest.mark.parametrize('seed', range(5))
def test_a_plan_has_all_kinds_and_no_target_twice_at_once(seed: int) -> None:
    plan = soak_plan.make(seed, WHOLE)
    assert len(plan.operations) == 1000
    kinds = {*soak_plan.OF_CONTROL, *soak_plan.OF_FAKES, *soak_plan.OF_HOSTS}
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


def test_the_failpoints_of_a_plan_are_places_of_the_processes_they_are_for() -> None:
    assert {PLACES[name].partition(':')[0] for name in soak_plan.CREATE_PLACES} == {'eschedule'}
    places = {*soak_plan.FAKE_PLACES, *soak_plan.HOST_PLACES}
    assert {PLACES[name].partition(':')[0] for name in places} == {'ecompute', 'worker'}


def test_an_account_of_nothing_is_empty() -> None:
    account = Account([])
    assert account.asks == []
    assert account.final is None
