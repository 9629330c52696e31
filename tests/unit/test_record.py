"""Records, boots and digests: written, read back whole, and refused if malformed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.instance.plan import news, pending, unready
from ecomp.model.allocation import MOST
from ecomp.model.boots import AFTER_HOST, BY_HAND, CREATED, KEPT, Boot, numbered, off_until, parse
from ecomp.model.guest import Address, Guest, GuestFailure, mac_address
from ecomp.model.order import Power, Request
from ecomp.model.planes import (
    PAGE_BYTES,
    Digest,
    Leftover,
    clearance_from_json,
    clearance_to_json,
    failed,
    from_pages,
    to_pages,
)
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
from ecomp.scheduler.changing.wait import is_before_boot, is_pending
from tests.kit.hostile import JSON

# Records: written and read back whole, refused if malformed or of a newer version.


COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NOW = '2026-01-31T12:00:00.000Z'
LATER = '2026-01-31T12:00:01.000Z'
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


INTERFACE = Interface('default', 'm0', '10.0.0.1')
FAILURE = Failure('image', 'broken', 'nothing is left')
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
    """A missing field has its default; an unknown field is ignored."""
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


# Boots of a guest: their stages, the limit of five, and strict parsing.


BOOTED = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ITS_HOST = 'b8756be5-a30d-4311-920c-0ad996367a8e'
MAC = '52:54:00:00:00:01'
NEW = Record(BOOTED, ITS_HOST, 'building', image='http://h/i', stages={'requested': '2026-01-31T12:00:00.000Z'})
REBOOT = Power('reboot', ITS_HOST)
STOP = Power('stop', BOOTED)


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
    # A second sighting, on or off, is the same boot and keeps the first time.
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
    assert [boot.number for boot in record.boots] == list(range(4, KEPT + 4))
    assert numbered(record.boots, 3) is None
    assert numbered(record.boots, 4) == record.boots[0]
    assert numbered(record.boots, None) == record.boots[-1] == record.boot
    assert from_json(to_json(record).encode()) == record


def test_what_an_older_ecompute_wrote_has_its_first_boot_in_its_stages() -> None:
    older = replace(FIRST, boots=(), stages={**FIRST.stages, 'started': at(1)})
    assert 'boots' not in json.loads(to_json(older))
    assert older.known_boots == FIRST.boots
    assert older.off(at(4)).on('reboot', at(5)).boots == SECOND.boots
    # The older record of a guest that is off does not contain when it stopped.
    restarted = replace(older, state=STOPPED).on('start', at(5))
    assert [boot.number for boot in restarted.boots] == [1, 2]
    assert restarted.boots[0].stages['stopped'] == at(5)
    assert NEW.known_boots == ()


def test_a_new_boot_is_ready_and_addressed_anew() -> None:
    interface = Interface('default', MAC, '10.0.0.1', 'lease')
    first, second = replace(FIRST, addresses=(interface,)), replace(SECOND, addresses=(interface,))
    assert (pending(first), unready(first)) == (False, False)
    assert (pending(second), unready(second)) == (True, True)
    assert off_until(second.boots) == at(4)
    leases = {'10.0.0.1 of before': (at(3), False), '10.0.0.1 since': (at(5), True), 'unknown': ('', True)}
    for since, new in leases.values():
        assert news(second, {MAC: Address('10.0.0.1', 'lease', since)}) is new
    assert news(second, {MAC: Address('10.0.0.2', 'lease', at(3))})
    assert not news(first, {MAC: Address('10.0.0.1', 'lease', at(5))})
    assert not news(second, {})
    # The clock was set back after the stop, so times do not tell what came later.
    assert news(second, {MAC: Address('10.0.0.1', 'lease', at(2))}, at(3))
    assert not news(second, {MAC: Address('10.0.0.1', 'lease', at(2))}, at(5))


def test_who_waits_after_a_reboot_waits_for_the_boot_it_brings() -> None:
    requested = replace(FIRST, power=REBOOT.at('asked'))
    completed = replace(SECOND, power=REBOOT.id)
    assert is_before_boot('ready', FIRST, FIRST, REBOOT)
    assert is_before_boot('ready', FIRST, requested, REBOOT)
    assert not is_before_boot('ready', FIRST, completed, REBOOT)
    # The disk stage belongs to no boot, and a stop starts none.
    assert not is_before_boot('disk', FIRST, FIRST, REBOOT)
    assert not is_before_boot('ready', FIRST, FIRST, STOP)
    assert not is_before_boot('ready', FIRST, FIRST, None)
    # Another user's action has replaced this one and is carried out.
    assert not is_pending(REBOOT, FIRST, replace(SECOND, power=STOP.id))


def test_who_waits_for_one_that_is_off_waits_for_its_next_boot() -> None:
    assert is_before_boot('addressed', OFF, OFF, None)
    assert not is_before_boot('addressed', OFF, SECOND, None)
    # The stage was reached during the wait, and the guest is off again.
    assert not is_before_boot('ready', FIRST, OFF, None)
    assert not is_before_boot('ready', OFF, SECOND.has('ready', at(6)).off(at(7)), None)


def test_a_failure_of_cloud_init_is_of_its_boot() -> None:
    failed = replace(FIRST, cloud_init=GuestFailure('init', 'no'))
    assert not unready(failed)
    assert failed.on(BY_HAND, at(4)).cloud_init == failed.cloud_init
    restarted = failed.off(at(4)).on('reboot', at(5))
    assert restarted.cloud_init is None
    assert unready(restarted)


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


# A compute's digest for an audit survives being split into pages, at any size.


ANSWERER = 'aaaaaaaa-0000-4000-8000-000000000000'
INSTANCES = [f'{number:08d}-0000-4000-8000-000000000000' for number in range(10_000)]
names = st.text(max_size=40)
guests = st.builds(Guest, names, names | st.none(), st.booleans(), st.booleans(), st.booleans())
words = st.dictionaries(names, names, max_size=20)
digests = st.builds(
    lambda found, *rest: Digest({each.instance: each for each in found}, *rest), st.lists(guests), *[words] * 7
)


def pages(digest: Digest) -> list[bytes]:
    return [page.encode() for page in to_pages(digest)]


@given(digests)
def test_there_and_back_and_no_page_is_longer_than_a_page_and_one_entry(digest: Digest) -> None:
    parts = pages(digest)
    assert from_pages(parts) == digest
    assert max(map(len, parts)) < PAGE_BYTES + 1000


def test_ten_thousand_guests_fit_etcd() -> None:
    digest = Digest(
        {instance: Guest(instance, ANSWERER, True, True, True) for instance in INSTANCES},
        dict.fromkeys(INSTANCES, '/var/lib/ecompute/images/base-0123456789abcdef0123456789abcdef.qcow2'),
        {mac_address(instance, number): instance for instance in INSTANCES for number in (0, 1)},
        {mac_address(instance, 0): f'{instance} 192.168.122.200' for instance in INSTANCES},
    )
    parts = pages(digest)
    assert from_pages(parts) == digest
    assert max(map(len, parts)) <= 512 * 1024
    assert len(parts) <= 20


def test_what_is_no_whole_digest() -> None:
    parts = pages(Digest({instance: Guest(instance, ANSWERER, True, True, True) for instance in INSTANCES}))
    assert len(parts) > 2
    for wrong in ([], parts[:-1], parts[1:], [*parts, parts[-1]], [b'', *parts[1:]], [b'{}'], [b'{"version": 2}']):
        with pytest.raises(ValueError, match='.'):
            from_pages(wrong)
    for value in ([1], [{}], [{'instance': []}], {'a': 1}):
        with pytest.raises(ValueError, match='not a digest'):
            from_pages([json.dumps({'version': 1, 'pages': 1, 'guests': value}).encode()])
    with pytest.raises(ValueError, match='libvirt is away'):
        from_pages([failed('libvirt is away').encode()])


def test_a_clearance() -> None:
    leftovers = [Leftover('disk', 'x'), Leftover('seed', '52:54:00:00:00:00', 'y'), Leftover('part', 'a.part', '1/2')]
    assert clearance_from_json(clearance_to_json(leftovers).encode()) == leftovers
    for wrong in ('', '{}', '{"version": 1}', '{"version": 1, "leftovers": [1]}', '{"version": 2, "leftovers": []}'):
        with pytest.raises(ValueError, match='.'):
            clearance_from_json(wrong.encode())


@pytest.mark.parametrize(
    'page', [{'pages': 'a\nb\x1b[2J'}, {'pages': 1, 'error': 'a\nb\x1b[2J'}, {'pages': 1, 'guests': [{'a\nb': 1}]}]
)
def test_what_is_said_of_one_that_is_none_is_one_line(page: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r'a\\nb') as raised:
        from_pages([json.dumps({'version': 1, **page}).encode()])
    assert str(raised.value).isprintable()
