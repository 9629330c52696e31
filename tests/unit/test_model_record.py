"""Records: written and read back whole, refused when they are of a newer version or none."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.allocation import MOST
from ecomp.model.order import Request
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    DESTROYING,
    ERROR,
    GONE,
    SCHEDULED,
    STAGES,
    STOPPED,
    Failure,
    Interface,
    Progress,
    Record,
    from_json,
    new_record,
    timestamp,
    to_dict,
    to_json,
)
from tests.kit.hostile import JSON

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NOW, LATER = '2026-01-31T12:00:00.000Z', '2026-01-31T12:00:01.000Z'
RECORD = Record(INSTANCE, COMPUTE, SCHEDULED, image='http://h/i')

texts = st.text(max_size=20)
uuids = st.uuids().map(str)
interfaces = st.builds(Interface, texts, texts, *[st.none() | texts] * 3)
records = st.builds(
    Record,
    instance=uuids,
    compute=uuids,
    state=st.sampled_from([SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR]),
    image=st.none() | texts,
    resources=st.dictionaries(texts, st.integers(0, MOST)),
    query=st.none() | texts,
    user_id=texts,
    project_id=texts,
    addresses=st.lists(interfaces, max_size=2).map(tuple),
    console=st.none() | texts,
    stages=st.dictionaries(st.sampled_from(STAGES), texts),
    error=st.none() | st.builds(Failure, texts, texts, texts),
    fault=st.none() | texts,
    name=st.none() | st.from_regex('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?', fullmatch=True),
    power=st.none() | texts,
    progress=st.none() | st.builds(Progress, texts, st.integers(0, 2**62), st.none() | st.integers(0, 2**62)),
)


@given(records)
def test_what_is_written_is_what_is_read(record: Record) -> None:
    assert from_json(to_json(record).encode()) == record
    assert to_dict(record) == json.loads(to_json(record)) | {'addresses': tuple(to_dict(record)['addresses'])}


FIELDS = json.loads(to_json(RECORD))


def stored(**changed: Any) -> bytes:
    return json.dumps({**FIELDS, **changed}).encode()


INTERFACE, FAILURE = Interface('default', 'm0', '10.0.0.1'), Failure('image', 'broken', 'nothing is left')
OLDER = {'network': 'default', 'mac': 'm0', 'address': '10.0.0.1'}


@pytest.mark.parametrize(
    ('value', 'record'),
    [
        (
            {'version': 1, 'instance': INSTANCE, 'compute': COMPUTE, 'state': ACTIVE, 'image': None},
            Record(INSTANCE, COMPUTE, ACTIVE),
        ),
        ({**FIELDS, 'addresses': [OLDER]}, replace(RECORD, addresses=(INTERFACE,))),
        ({**FIELDS, 'more': 'x'}, RECORD),
        (
            {**FIELDS, 'addresses': [{**OLDER, 'family': 4}], 'error': {**vars(FAILURE), 'code': 7}},
            replace(RECORD, addresses=(INTERFACE,), error=FAILURE),
        ),
    ],
)
def test_what_an_older_or_newer_ecomp_wrote_is_read(value: dict[str, Any], record: Record) -> None:
    """A field that is not there has its default; one that nobody knows is passed over."""
    assert from_json(json.dumps(value).encode()) == record


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        *((stored(version=version), 'install a newer one') for version in (2, 99, None, '1', True, 1.5)),
        *((value, 'record|JSON|UTF-8') for value in (
            b'', b'\xff', b'null', b'[]', b'{}', b'{"version": 1}', b'{"version": 1, "version": 1}',
        )),
        *((stored(**{name: value}), 'record') for name, value in (
            *(('version', 0), ('version', -1), ('instance', '../x'), ('instance', None)),
            *(('compute', '../x'), ('compute', []), ('state', 'migrating'), ('state', 7)),
            *(('image', 7), ('query', []), ('user_id', None), ('fault', {}), ('attempts', True), ('attempts', '1')),
            *(('resources', {'VCPU': 'x'}), ('resources', {'VCPU': True}), ('resources', 'VCPU:1')),
            *(('addresses', 5), ('addresses', None), ('addresses', ['x']), ('addresses', [{'network': 'default'}])),
            *(('addresses', [{'network': 'd', 'mac': 7}]), ('error', 'it broke'), ('error', {'stage': 'image'})),
            *(('error', {'stage': 'image', 'reason': None, 'cleaned': ''}), ('error', [])),
            *(('stages', []), ('stages', {'requested': 7}), ('name', 7), ('name', '../x'), ('power', {'id': 'x'})),
        )),
    ],
)
def test_what_is_no_record_is_refused_in_words(value: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_json(value)


@given(st.sampled_from([*to_dict(RECORD)]), JSON)
def test_no_field_raises_anything_else(name: str, value: Any) -> None:
    try:
        record = from_json(stored(**{name: value}))
    except ValueError:
        return
    assert from_json(to_json(record).encode()) == record


def test_a_new_record_says_what_was_asked() -> None:
    allocations = {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 256}, 'a sharing provider': {'DISK_GB': 2}}
    request = Request(
        INSTANCE,
        allocations,
        image='http://h/i',
        user_id='u',
        project_id='p',
        query='resources=…',
        stages={'requested': NOW},
    )
    record = new_record(COMPUTE, request, LATER)
    assert (record.state, record.compute, record.query) == (SCHEDULED, COMPUTE, 'resources=…')
    assert record.resources == {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 2}
    assert record.stages == {'requested': NOW, 'scheduled': LATER}


def test_the_scheduler_s_own_time_of_scheduling_counts() -> None:
    request = Request(INSTANCE, {}, image=None, user_id='u', project_id='p', query=None, stages={'scheduled': NOW})
    assert new_record(COMPUTE, request, LATER).stages == {'scheduled': NOW}


def test_a_stage_keeps_its_first_time() -> None:
    record = RECORD.at(BUILDING, NOW, 'image').at(BUILDING, LATER, 'image', 'disk')
    assert record.state == BUILDING
    assert record.stages == {'image': NOW, 'disk': LATER}


def test_the_address_is_the_first_interface_s() -> None:
    assert RECORD.address is None
    both = (Interface('default', 'm0', '10.0.0.1'), Interface('br0', 'm1', '10.1.0.1'))
    assert replace(RECORD, addresses=both).address == '10.0.0.1'
    assert replace(RECORD, addresses=(replace(both[0], address=None), both[1])).address is None


def test_times_are_utc_and_sort_as_text() -> None:
    moment = datetime(2026, 1, 31, 13, 0, 0, 123456, timezone(timedelta(hours=1)))
    assert timestamp(moment) == '2026-01-31T12:00:00.123Z'
    assert timestamp(moment.astimezone(UTC)) == timestamp(moment)


def test_a_record_is_of_its_key_s_instance() -> None:
    assert from_json(stored(), INSTANCE) == RECORD
    with pytest.raises(ValueError, match=f'a record of instance {INSTANCE}, not of {COMPUTE}'):
        from_json(stored(), COMPUTE)


def test_progress_is_of_a_stage_and_goes_when_it_is_reached() -> None:
    for progress in (Progress('image', 34_000_000, 600_000_000), Progress('image', 1)):
        assert replace(RECORD, state=BUILDING, progress=progress).at(BUILDING, NOW, 'image').progress is None
    assert str(Progress('image', 34_400_000, 600_000_000)) == 'image, 34 of 600 MB'
    assert str(Progress('image', 34_400_000)) == 'image, 34 MB'


@pytest.mark.parametrize(
    'value',
    [7, 'image', [], {}, {'stage': 'image'}, {'stage': 7, 'done': 1}, {'stage': 'image', 'done': '1'},
     {'stage': 'image', 'done': True}, {'stage': 'image', 'done': -1}, {'stage': 'image', 'done': 10**400},
     {'stage': 'image', 'done': 1, 'total': 'x'}, {'stage': 'image', 'done': 1, 'total': 10**400}],
)  # fmt: skip
def test_progress_that_is_not_understood_is_none(value: Any) -> None:
    assert from_json(stored(progress=value)) == RECORD
