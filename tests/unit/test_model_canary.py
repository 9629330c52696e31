"""What is said of canaries, and what is found by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecomp.model.canary import CHECKED, CURES, ENTERED, Canary, check_names_no_host, how_far, line, of_canaries
from ecomp.model.health import Ailment
from ecomp.model.record import ACTIVE, BUILDING, ERROR, SCHEDULED, STAGES, Failure, Record

HOST, INSTANCE = 'c0000000-0000-4000-8000-000000000001', '1a5c0de0-0000-4000-8000-000000000001'
NONE = Canary(HOST, 'hv1', 'hv1', why='it is disabled')
CANARY = Canary(HOST, 'hv1', 'hv1', INSTANCE, 'canary-1a5c0de0', 'addressed', 4.25, 'no ssh key')
ENTERED_ONE = CANARY._replace(reached=ENTERED, why='')
BROKEN = CANARY._replace(reached='scheduled', seconds=None, why='no such image', broken='image')
LEFT = ENTERED_ONE._replace(left='etcd is away')


@pytest.mark.parametrize(
    ('canary', 'says'),
    [
        (NONE, 'no canary: it is disabled'),
        (CANARY, 'canary-1a5c0de0 booted after 4.2 s, not entered: no ssh key; gone'),
        (CANARY._replace(reached='disk'), 'canary-1a5c0de0 reached disk after 4.2 s, not entered: no ssh key; gone'),
        (ENTERED_ONE, 'canary-1a5c0de0 was entered after 4.2 s; gone'),
        (BROKEN, 'canary-1a5c0de0: no such image; gone'),
        (LEFT, 'canary-1a5c0de0 was entered after 4.2 s; it may be left: etcd is away'),
    ],
)
def test_each_is_a_line(canary: Canary, says: str) -> None:
    assert line(canary) == f'{HOST}: {says}'


def test_what_broke_is_found_and_what_is_left() -> None:
    assert of_canaries([NONE, CANARY, ENTERED_ONE], False) == []
    assert of_canaries([BROKEN, LEFT], False) == [
        Ailment('canary', 'on hv1 a canary did not come through: no such image', CURES['image']),
        Ailment('canary', 'canary-1a5c0de0 on hv1 may be left: etcd is away', f'eschedule destroy --wait {INSTANCE}'),
    ]
    assert of_canaries([BROKEN._replace(broken='disk')], False)[0].cure == CHECKED


def test_that_there_was_none_is_found_unless_somebody_ended_it() -> None:
    for none in ([], [NONE]):
        assert [each.check for each in of_canaries(none, False)] == ['canary']
        assert of_canaries(none, True) == []


def test_for_programs() -> None:
    said = LEFT.to_dict()
    assert (said['reached'], said['seconds'], said['said'], said['gone']) == (ENTERED, 4.25, None, False)
    assert (CANARY.to_dict()['gone'], NONE.to_dict()['gone'], NONE.to_dict()['said']) == (True, None, 'it is disabled')


def test_how_far_it_came() -> None:
    taken = Record(INSTANCE, HOST, BUILDING, stages=dict.fromkeys(STAGES[:3], 'then'))
    assert how_far(None) == ('requested', 'requested')
    waits = replace(taken, state=SCHEDULED, stages=dict.fromkeys(STAGES[:2], 'then'))
    assert how_far(waits) == ('scheduled', SCHEDULED)
    assert how_far(taken) == ('image', 'disk')
    assert how_far(replace(taken, state=ERROR, error=Failure('started', 'x', 'y'))) == ('image', 'started')
    assert how_far(replace(taken, state=ACTIVE, stages=dict.fromkeys(STAGES, 'then'))) == ('ready', 'ready')


def test_a_query_names_no_host() -> None:
    check_names_no_host('resources=VCPU:1&required=in_tree')
    for key in ('in_tree', 'in_tree_1'):
        with pytest.raises(ValueError, match='--on'):
            check_names_no_host(f'resources=VCPU:1&{key}=')
