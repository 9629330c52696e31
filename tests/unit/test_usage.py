"""What hosts and guests use: rates from two measurements, and the tables of `eschedule top`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from ecomp.cli.terminal import Drawing, redraw
from ecomp.cli.top import make_guest_listing, make_host_listing
from ecomp.errors import Unreachable
from ecomp.model.host import Computes
from ecomp.model.record import ACTIVE, BUILDING, STOPPED, Record
from ecomp.model.usage import HOST, Measurement, compute_use, parse_answer
from ecomp.scheduler.operations.usage import Use

HV1, HV2 = (f'c0000000-0000-4000-8000-00000000000{number}' for number in (1, 2))
WEB, DB, NEW = (f'{number}a5c0de0-0000-4000-8000-00000000000{number}' for number in (1, 2, 3))
COMPUTES = Computes(stored_hostnames={HV1: 'hv1', HV2: 'hv2'})


def make_measurement(seconds: float, cpu: float, **guests: Mapping[str, float]) -> Measurement:
    return {HOST: {'seconds': seconds, 'cpu_seconds_total': cpu}, **guests}


# Rates


def test_rate_is_the_increase_of_a_counter_by_the_time_in_between() -> None:
    before = make_measurement(100, 50, web={'vcpu_seconds_total': 1, 'disk_read_bytes_total': 4096})
    used = {'vcpu_seconds_total': 2.5, 'disk_read_bytes_total': 4096, 'resident_memory_bytes': 7}
    after = compute_use(before, make_measurement(102, 53, web=used))
    assert after[HOST]['cpu_seconds_per_second'] == 1.5
    assert after['web'] | used == after['web']
    assert after['web']['vcpu_seconds_per_second'] == 0.75
    assert after['web']['disk_read_bytes_per_second'] == 0


INCOMPARABLE_MEASUREMENTS = {
    'first': {},
    'new guest': make_measurement(100, 50),
    'unknown': make_measurement(100, 50, web={}),
    'guest restarted': make_measurement(100, 50, web={'vcpu_seconds_total': 2.6}),
    'same time': make_measurement(102, 50, web={'vcpu_seconds_total': 1}),
    'host rebooted': make_measurement(9000, 50, web={'vcpu_seconds_total': 1}),
    'nearly the same time': make_measurement(102 - 1e-9, 50, web={'vcpu_seconds_total': 1}),
    'no time': {HOST: {}, 'web': {'vcpu_seconds_total': 1}},
}


@pytest.mark.parametrize('before', INCOMPARABLE_MEASUREMENTS.values(), ids=INCOMPARABLE_MEASUREMENTS)
def test_rate_without_two_comparable_values_is_unknown(before: Measurement) -> None:
    used = compute_use(before, make_measurement(102, 53, web={'vcpu_seconds_total': 2.5, 'resident_memory_bytes': 7}))
    assert 'vcpu_seconds_per_second' not in used['web']
    assert used['web']['resident_memory_bytes'] == 7


def test_use_of_a_silent_compute_is_empty() -> None:
    assert compute_use(make_measurement(100, 50), {}) == {}


# Answers


def test_answer_is_parsed_without_malformed_amounts() -> None:
    amounts = {'a': 1, 'b': 2.5, 'c': None, 'd': True, 'e': -1, 'f': 2**64, 'g': '7', 'h': [1]}
    value = json.dumps({'version': 1, 'used': {HOST: amounts, WEB: 'x', DB: {}}}).encode()
    assert parse_answer(value) == {HOST: {'a': 1, 'b': 2.5}, WEB: {}, DB: {}}


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        ('{"error": "libvirt is\\u001b away"}', r'libvirt is\x1b away'),
        ('{}', 'its answer is malformed'),
        ('{"used": []}', 'its answer is malformed'),
        ('[]', 'expected a JSON object, not list'),
        (json.dumps({'error': 'x' * 9999}), 'x' * 500),
    ],
)
def test_malformed_answer_or_error_is_refused_with_a_reason(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f'^{re.escape(reason)}$'):
        parse_answer(value.encode())


# Tables


def make_use(**used: Measurement) -> Use:
    return Use(COMPUTES, {HV1: used.get('hv1', {}), HV2: used.get('hv2', {})}, {})


def list_cells(listing: Any) -> list[list[Any]]:
    return [list(row.cells) for row in listing.rows]


RECORDS = [
    Record(WEB, compute=HV1, state=ACTIVE, name='web', resources={'MEMORY_MB': 512}),
    Record(DB, compute=HV1, state=ACTIVE, name='db', resources={'MEMORY_MB': 1024}),
    Record(NEW, compute=HV2, state=BUILDING, name='new', resources={'MEMORY_MB': 256}),
]
GUEST = {'resident_memory_bytes': 300 * 2**20, 'disk_read_bytes_per_second': 2048, 'disk_written_bytes_per_second': 0}


def test_host_that_does_not_answer_is_last_and_unknown() -> None:
    listing = make_host_listing(make_use(hv2={HOST: {'cpus': 4}}), RECORDS)
    assert list_cells(listing)[0] == ['hv1', None, None, None, None, None, None]
    listing = make_host_listing(make_use(hv2={HOST: {'cpu_seconds_per_second': 0}}), RECORDS)
    assert list_cells(listing)[1] == ['hv1', None, None, None, None, None, None]
    row: Any = listing.rows[1].value
    assert {name: value for name, value in row.items() if value is not None} == {'compute': HV1, 'host': 'hv1'}


def test_active_guest_is_listed_without_an_answer_and_others_only_while_they_run() -> None:
    assert list_cells(make_guest_listing(make_use(), RECORDS)) == [
        ['db', None, None, None, None, 'hv1', DB],
        ['web', None, None, None, None, 'hv1', WEB],
    ]
    running = make_guest_listing(make_use(hv2={HOST: {}, NEW: GUEST}), RECORDS[2:])
    assert list_cells(running) == [['new', None, '300/256', 2, 0, 'hv2', NEW]]
    assert make_guest_listing(make_use(), [Record(WEB, compute=HV1, state=STOPPED)]).rows == []
    elsewhere = Record(WEB, compute=DB, state=ACTIVE)
    assert make_guest_listing(make_use(), [elsewhere]).rows == []


def test_amounts_of_a_guest_count_only_if_its_own_compute_reports_them() -> None:
    use = make_use(hv2={HOST: {}, WEB: GUEST})
    assert list_cells(make_guest_listing(use, RECORDS[:1])) == [['web', None, None, None, None, 'hv1', WEB]]


# Drawing


def test_table_stays_while_etcd_does_not_answer_and_is_drawn_again_afterwards() -> None:
    results: list[Any] = [Drawing('first'), Unreachable('etcd is away'), Drawing('second'), KeyboardInterrupt()]
    drawn: list[str] = []

    def make_drawing() -> Drawing:
        result = results.pop(0)
        if isinstance(result, Drawing):
            return result
        raise result

    redraw(make_drawing, drawn.append)
    assert [text.splitlines()[0] for text in drawn] == ['first', 'first', 'second']
    assert ['etcd is away' in text for text in drawn] == [False, True, False]
