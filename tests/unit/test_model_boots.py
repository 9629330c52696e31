"""The boots of a guest: begun, reached, ended, five of them kept; and read with care."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ecomp.agent.instance.plan import news, pending, unready
from ecomp.model.boots import AFTER_HOST, BY_HAND, CREATED, KEPT, Boot, numbered, off_until, parse
from ecomp.model.guest import Address, GuestFailure
from ecomp.model.order import Power
from ecomp.model.record import ACTIVE, GONE, STOPPED, Interface, Record, from_json, to_json
from ecomp.scheduler.changing.wait import is_before_boot, is_pending

INSTANCE, COMPUTE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', 'b8756be5-a30d-4311-920c-0ad996367a8e'
MAC = '52:54:00:00:00:01'
NEW = Record(INSTANCE, COMPUTE, 'building', image='http://h/i', stages={'requested': '2026-01-31T12:00:00.000Z'})
REBOOT, STOP = Power('reboot', COMPUTE), Power('stop', INSTANCE)


def at(minute: int) -> str:
    return f'2026-01-31T12:{minute:02}:00.000Z'


FIRST = NEW.on(CREATED, at(1)).has('addressed', at(2)).has('ready', at(3))
OFF = FIRST.off(at(4))
SECOND = OFF.on('reboot', at(5))


def test_a_guest_that_is_seen_on_and_off_has_a_boot_for_each_time() -> None:
    assert FIRST.boots == (Boot(1, CREATED, {'started': at(1), 'addressed': at(2), 'ready': at(3)}),)
    assert (OFF.state, OFF.boots[-1].stages['stopped']) == (STOPPED, at(4))
    assert SECOND.state == ACTIVE
    assert SECOND.boots == (OFF.boots[0], Boot(2, 'reboot', {'started': at(5)}))
    # Seen once more, or off once more, it is the same boot; and the first time counts.
    assert SECOND.on(BY_HAND, at(6)) == SECOND
    assert OFF.off(at(9)).boots == OFF.boots
    assert FIRST.has('ready', at(9)) == FIRST


def test_the_stages_are_those_of_the_last_boot_and_the_record_s_of_the_first() -> None:
    assert SECOND.reached == {'requested': at(0), 'started': at(5)}
    assert SECOND.has('addressed', at(7)).reached['addressed'] == at(7)
    assert SECOND.has('addressed', at(7)).stages['addressed'] == at(2)


def test_five_are_kept() -> None:
    record = FIRST
    for number in range(2, KEPT + 4):
        record = record.off(at(number)).on(AFTER_HOST, at(number))
    assert [each.number for each in record.boots] == list(range(4, KEPT + 4))
    assert numbered(record.boots, 3) is None
    assert numbered(record.boots, 4) == record.boots[0]
    assert numbered(record.boots, None) == record.boots[-1] == record.boot
    assert from_json(to_json(record).encode()) == record


def test_what_an_older_ecompute_wrote_has_its_first_boot_in_its_stages() -> None:
    older = replace(FIRST, boots=(), stages={**FIRST.stages, 'started': at(1)})
    assert 'boots' not in json.loads(to_json(older))
    assert older.known_boots == FIRST.boots
    assert older.off(at(4)).on('reboot', at(5)).boots == SECOND.boots
    # It says of one that is off that it is off, and not since when.
    again = replace(older, state=STOPPED).on('start', at(5))
    assert [each.number for each in again.boots] == [1, 2]
    assert again.boots[0].stages['stopped'] == at(5)
    assert NEW.known_boots == ()


def test_a_new_boot_is_ready_and_addressed_anew() -> None:
    interface = Interface('default', MAC, '10.0.0.1', 'lease')
    first, second = replace(FIRST, addresses=(interface,)), replace(SECOND, addresses=(interface,))
    assert (pending(first), unready(first)) == (False, False)
    assert (pending(second), unready(second)) == (True, True)
    assert off_until(second.boots) == at(4)
    known = {'10.0.0.1 of before': (at(3), False), '10.0.0.1 since': (at(5), True), 'unknown': ('', True)}
    for since, new in known.values():
        assert news(second, {MAC: Address('10.0.0.1', 'lease', since)}) is new
    assert news(second, {MAC: Address('10.0.0.2', 'lease', at(3))})
    assert not news(first, {MAC: Address('10.0.0.1', 'lease', at(5))})
    assert not news(second, {})
    # Put back since it was off, the clock does not say what came after that.
    assert news(second, {MAC: Address('10.0.0.1', 'lease', at(2))}, at(3))
    assert not news(second, {MAC: Address('10.0.0.1', 'lease', at(2))}, at(5))


def test_who_waits_after_a_reboot_waits_for_the_boot_it_brings() -> None:
    asked = replace(FIRST, power=REBOOT.at('asked'))
    done = replace(SECOND, power=REBOOT.id)
    assert is_before_boot('ready', FIRST, FIRST, REBOOT)
    assert is_before_boot('ready', FIRST, asked, REBOOT)
    assert not is_before_boot('ready', FIRST, done, REBOOT)
    # What does not come with a boot is there; a stop brings none.
    assert not is_before_boot('disk', FIRST, FIRST, REBOOT)
    assert not is_before_boot('ready', FIRST, FIRST, STOP)
    assert not is_before_boot('ready', FIRST, FIRST, None)
    # Somebody else's action in its place is carried out instead.
    assert not is_pending(REBOOT, FIRST, replace(SECOND, power=STOP.id))


def test_who_waits_for_one_that_is_off_waits_for_its_next_boot() -> None:
    assert is_before_boot('addressed', OFF, OFF, None)
    assert not is_before_boot('addressed', OFF, SECOND, None)
    # It got there while somebody waited, and is off again.
    assert not is_before_boot('ready', FIRST, OFF, None)
    assert not is_before_boot('ready', OFF, SECOND.has('ready', at(6)).off(at(7)), None)


def test_a_failure_of_cloud_init_is_of_its_boot() -> None:
    failed = replace(FIRST, cloud_init=GuestFailure('init', 'no'))
    assert not unready(failed)
    assert failed.on(BY_HAND, at(4)).cloud_init == failed.cloud_init
    again = failed.off(at(4)).on('reboot', at(5))
    assert again.cloud_init is None
    assert unready(again)


def test_a_console_is_no_more_once_it_has_ended() -> None:
    assert replace(FIRST, console='hv1:/c').at(GONE, at(9), 'gone').console is None
    assert replace(FIRST, console='hv1:/c').off(at(9)).console == 'hv1:/c'


@pytest.mark.parametrize(
    'junk',
    [
        1, 'x', {}, [1], [{}], [{'number': 1}], [{'number': True, 'reason': 'x', 'stages': {}}],
        [{'number': 0, 'reason': 'x', 'stages': {}}], [{'number': 1, 'reason': 1, 'stages': {}}],
        [{'number': 1, 'reason': 'x' * 41, 'stages': {}}], [{'number': 1, 'reason': 'x', 'stages': {'started': 1}}],
        [{'number': 10**99, 'reason': 'x', 'stages': {}}], [{'number': 1, 'reason': 'x', 'stages': {}}] * 2,
    ],
)  # fmt: skip
def test_what_is_no_list_of_boots_is_refused(junk: Any) -> None:
    with pytest.raises(ValueError, match='not a record: boots'):
        parse(junk)


def test_of_many_boots_the_last_are_read_and_of_a_boot_what_is_known() -> None:
    many = [{'number': number, 'reason': 'later', 'stages': {'started': 'T', 'more': 7}} for number in range(1, 99)]
    assert parse(many) == tuple(Boot(number, 'later', {'started': 'T'}) for number in range(94, 99))
    assert parse(None) == ()
