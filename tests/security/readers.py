"""Readers of all kinds of values that others write, valid values, checks of mutated ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from ecomp.cli import sharing
from ecomp.cli.check import make_finding_listing
from ecomp.cli.history import Explanation, draw_timeline, explanation_to_dict, format_explanation, timeline_to_dict
from ecomp.cli.inspect import explain_no_address, make_record_details, make_record_listing
from ecomp.cli.operators import make_host_listing
from ecomp.cli.sharing import make_group_listing, make_member_listing, make_quota_listing, make_usage_listing
from ecomp.errors import EcompError
from ecomp.model import cluster, flavor, keys, quota, stack, states
from ecomp.model import order as requesting
from ecomp.model import queue as queues
from ecomp.model import record as records
from ecomp.model.allocation import MAX_SUM, describe_difference
from ecomp.model.audit import HostReport, encode_report, find_all, parse_report
from ecomp.model.choose import PlacementReason
from ecomp.model.explain import find_miss
from ecomp.model.facts import parse_facts
from ecomp.model.finding import Finding
from ecomp.model.group import Group, Membership
from ecomp.model.guest import Guest, ReservedAddress
from ecomp.model.host import NO_COMPUTES, Computes, PresenceFacts
from ecomp.model.order import MAX_REQUEST_BYTES, InvalidRequest, PowerAction, Request
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from ecomp.model.query import parse_query
from ecomp.model.record import Failure, Interface, Progress, Record
from ecomp.model.stack import Stack
from ecomp.model.stored import decode, decode_lenient, encode, nested
from ecomp.model.trouble import parse_trouble
from ecomp.model.user_data import SharedUserData, parse_shared_user_data
from ecomp.model.world import HostFacts, Planes, ProviderState, World, index_revisions, list_hosts
from ecomp.shared.notes import released_from_json, released_to_json
from ecomp.shared.presence import _format_field, _parse_holder
from ecomp.store.client import Entry
from tests.kit.forms import ALL_LOOKS, make_documents, render_all
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER_UUID, make_request

NOW = '2026-01-31T12:00:00.000Z'
SHARED = SharedUserData.from_bytes(b'#cloud-config\n')


def assert_printable(*outputs: str) -> None:
    """Assert that texts are printable, so escaping changes nothing, and that JSON is valid."""
    for text in outputs:
        lines = text.split('\n')
        assert all(line.isprintable() for line in lines), text
        if text.startswith(('{', '[{')):
            json.loads(text, parse_constant=lambda name: pytest.fail(name))


def render_record(record: Record) -> None:
    explanation = Explanation(
        record, NO_COMPUTES, record.why, Group('g', 'affinity', True, {record.instance: record.compute})
    )
    for table in (make_record_listing([record]), make_record_details(record)):
        assert_printable(*render_all(table))
    assert_printable(format_explanation(explanation), *make_documents(explanation_to_dict(explanation)))
    for look in ALL_LOOKS:
        assert_printable(draw_timeline(record, look))
    assert_printable(*make_documents(timeline_to_dict(record)))
    assert explain_no_address(replace(record, state=states.BUILDING))


class RefusedError(Exception):
    """A reader refused the value with this message."""


def call_reader(read: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    try:
        return read(*arguments, **given)
    except UnicodeEncodeError:
        raise  # an accepted text that cannot be written
    except ValueError as error:
        raise RefusedError(str(error)) from error


def read_request(value: bytes) -> None:
    parsed = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), value)
    if isinstance(parsed, InvalidRequest):
        assert len(parsed.reason) <= MAX_REASON_CHARACTERS
        read_record(encode(records.make_refused_record(COMPUTE, parsed._replace(instance=INSTANCE), NOW)).encode())
        return
    encoded = encode(parsed).encode()
    if len(encoded) <= MAX_REQUEST_BYTES:
        assert requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), encoded) == parsed
    record = records.make_record(COMPUTE, parsed, NOW)
    assert records.from_json(encode(record).encode(), INSTANCE) == record
    render_record(record)
    describe_difference(parsed.allocations, {OTHER_UUID: {'VCPU': 1}})


def read_record(value: bytes) -> None:
    parsed = call_reader(records.from_json, value, INSTANCE)
    assert records.from_json(encode(parsed).encode(), INSTANCE) == parsed
    render_record(parsed)


def read_queued(value: bytes) -> None:
    key = keys.queue('f', INSTANCE)
    render_record(queues.make_queued_record(key, value))
    parsed = queues.parse_queue_entry(key, value)
    if isinstance(parsed, InvalidRequest):
        return
    assert queues.parse_queue_entry(key, encode(parsed).encode()) == parsed
    encoded = encode(parsed.make_request(COMPUTE, NOW)).encode()
    accepted = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), encoded)
    assert isinstance(accepted, Request) or len(encoded) > MAX_REQUEST_BYTES


def read_group(value: bytes) -> None:
    parsed = call_reader(decode, Group, value, name='g')
    assert decode(Group, encode(parsed).encode(), name='g') == parsed
    parsed.explain_exclusion(COMPUTE)
    parsed.list_breaches()
    assert_printable(*render_all(make_group_listing([parsed], NO_COMPUTES, {})))
    assert_printable(*render_all(make_member_listing([parsed], Computes({}, {COMPUTE: 'hv1'}), {}, is_array=False)))


def read_quota(value: bytes) -> None:
    parsed = call_reader(decode, quota.Quota, value, project='p')
    charged = parsed.add_used(quota.make_charge({'VCPU': 7})).add_used({'VCPU': 1}, -1)
    assert decode(quota.Quota, encode(charged).encode(), project='p') == charged
    quota.describe_excesses('p', parsed.list_excesses(quota.make_charge({'VCPU': MAX_SUM})))
    assert_printable(
        *render_all(make_quota_listing([parsed])), *render_all(make_usage_listing([parsed], is_array=True))
    )


def read_flavor(value: bytes) -> None:
    parsed = call_reader(decode, flavor.Flavor, value, name='f')
    assert decode(flavor.Flavor, encode(parsed).encode(), name='f') == parsed
    parse_query(flavor.merge_query(parsed, 'resources=VCPU:2&required=T'))
    assert_printable(*render_all(sharing.make_flavor_listing({'f': parsed})))


def read_stack(value: bytes) -> None:
    parsed = call_reader(decode, Stack, value, name='shop')
    delivered = parsed.with_delivered({parsed.make_place('new/1'): COMPUTE}).with_ended(parsed.entries)
    for written in (parsed, delivered):
        assert decode(Stack, encode(written).encode(), name='shop') == written
    places = {parsed.make_place(entry, parsed.entries[entry].incarnation): COMPUTE for entry in parsed.entries}
    assert parsed.list_instances() == {place.entry_name: place.instance for place in places}
    for place in places:
        assert nested(stack.Place)(json.loads(json.dumps(place._asdict()))) == place
    stack.restore_stack('shop', places, 1)


def audit_values(etcd: dict[str, Entry], facts: HostFacts | None = None) -> None:
    index_revisions(etcd)
    provider = ProviderState(COMPUTE, {}, {})
    planes = Planes({COMPUTE: provider}, etcd) if facts is None else Planes({COMPUTE: provider}, etcd, COMPUTE, facts)
    assert_printable(*render_all(make_finding_listing(find_all(World(planes)))))


def read_report(value: bytes) -> None:
    report = call_reader(parse_report, COMPUTE, value)
    assert parse_report(COMPUTE, encode_report(report).encode()) == report
    assert {finding.compute for finding in report.findings} <= {COMPUTE}
    assert_printable(report.error, *report.repairs, *render_all(make_finding_listing(report.findings)))


def read_compute(value: bytes) -> None:
    entry = Entry(keys.compute(COMPUTE), value, 1, 1)
    presence, holder = decode_lenient(PresenceFacts, entry.value), _parse_holder(entry)
    for field in ('hostname', 'since'):
        assert _format_field(holder or {}, field).isprintable()
    (host,) = list_hosts(World(Planes({}, {entry.key: entry})), {})
    assert host.facts == presence
    assert_printable(*render_all(make_host_listing([host])))


def read_facts(value: bytes) -> None:
    facts = parse_facts(value)
    provider = facts.make_provider(COMPUTE, [{'VCPU': 1}])
    for query in ('resources=VCPU:1', f'resources=VCPU:{10**4000}&required=T&member_of={OTHER_UUID}'):
        miss = find_miss(parse_query(query), provider)
        assert_printable(facts.problem, *(failure.reason for failure in miss.failures))


def read_trouble(value: bytes) -> None:
    key = keys.troubles(COMPUTE)
    assert str(parse_trouble(value)).isprintable()
    presence = Entry(keys.compute(COMPUTE), b'{}', 1, 1)
    etcd = {key: Entry(key, value, 1, 1), presence.key: presence}
    hosts = list_hosts(World(Planes({}, etcd)), {})
    assert [(host.state, host.trouble is None) for host in hosts] == [('up', False)]
    assert_printable(*render_all(make_host_listing(hosts)))
    audit_values(etcd)


def read_attempt(value: bytes) -> None:
    assert INSTANCE in requesting.parse_attempt_instances(keys.attempt(INSTANCE), value)
    audit_values({keys.attempt(INSTANCE): Entry(keys.attempt(INSTANCE), value, 1, 7)})


def read_known_identity(value: bytes) -> None:
    identity = call_reader(decode, cluster.KnownCluster, value)
    assert decode(cluster.KnownCluster, encode(identity).encode()) == identity
    cluster.explain_identity_mismatch(identity, value)


PLACE = Stack('shop', OTHER_UUID).make_place('web/2', 7)
RECORD = Record(
    *(INSTANCE, COMPUTE, 'active'), image=IMAGE, resources={'VCPU': 1, 'DISK_GB': 2}, query='resources=VCPU:1',
    user_id='u', project_id='p',
    addresses=(Interface('default', '52:54:00:00:00:01', '10.0.0.1', 'lease', '10.0.0.1'),), console='h:/c',
    stages={'requested': NOW, 'scheduled': NOW, 'started': '2026-01-31T12:00:01.000Z'},
    error=Failure('image', 'x', 'y'), fault='z', name='web1', power=f'{OTHER_UUID}:off',
    progress=Progress('image', 1, 2), group=Membership('web'), why=PlacementReason('spread', 0.5, 3), stack=PLACE,
)  # fmt: skip
REQUEST = make_request(
    query='resources=VCPU:1', stages={'requested': NOW}, name='web1', ssh_keys=['ssh-ed25519 AAAA x'], user_data='eA==',
    count=3, group={'name': 'web', 'policy': 'affinity', 'strict': True},
    why={'weigh': 'spread', 'weight': 0.5, 'of': 3}, power=PowerAction('stop', OTHER_UUID)._asdict(),
    resources={'VCPU': 1}, stack=PLACE._asdict(),
)  # fmt: skip
TOMBSTONE = {**REQUEST, 'allocations': {}, 'image': None}
QUEUED = {
    **{name: REQUEST[name] for name in ('version', 'instance', 'image', 'user_id', 'project_id')},
    **{name: REQUEST[name] for name in ('stages', 'name', 'group')},
    **{'flavor': 'f', 'query': 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1&required=T', 'ssh_keys': ['x'], 'count': 1},
}
FACTS = HostFacts(
    {INSTANCE: Guest(INSTANCE, COMPUTE, True, True, True)},
    *({INSTANCE: '/base'}, {'52:54:00:00:00:01': INSTANCE}, frozenset({INSTANCE})),
    {'52:54:00:00:00:01': ReservedAddress(INSTANCE, '10.0.0.1')},
    {'x.part': '1/2'},
)
REPORT = HostReport(
    (Finding('disk-orphaned', INSTANCE, 'its disk', is_repairable=False), Finding('dhcp-open', COMPUTE, 'x')),
    *(7, 1, 'away', ('x: removed',)),
)
PRESENCE = {'version': '1', 'hostname': 'h', 'since': NOW, 'token': 't', 'boot': 'b', 'pid': '7'}

READERS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    'request': (read_request, REQUEST),
    'tombstone': (read_request, TOMBSTONE),
    'record': (read_record, json.loads(encode(RECORD))),
    'waiting': (read_queued, QUEUED),
    'group': (
        read_group,
        {'version': 1, 'policy': 'affinity', 'strict': True, 'members': {INSTANCE: COMPUTE, OTHER_UUID: ''}},
    ),
    'quota': (read_quota, {'version': 1, 'limits': {'VCPU': 10, 'instances': 3}, 'used': {'VCPU': 1, 'instances': 1}}),
    'flavor': (read_flavor, {'version': 1, 'resources': {'VCPU': 1}, 'required': ['T'], 'forbidden': ['U']}),
    'stack': (
        read_stack,
        {
            'version': 1,
            'epoch': OTHER_UUID,
            'floor': 70_000,
            'entries': {
                'web/2': {'incarnation': 7, 'compute': COMPUTE},
                'db-1/300': {'incarnation': 1, 'compute': OTHER_UUID, 'ended': True},
            },
        },
    ),
    'report': (read_report, json.loads(encode_report(REPORT))),
    'user-data': (lambda value: call_reader(parse_shared_user_data, value, SHARED.sha256), json.loads(SHARED.text)),
    'announced': (
        read_attempt,
        {'version': 1, 'instances': [INSTANCE, OTHER_UUID], 'query': 'x', 'host': 'h', 'pid': 1},
    ),
    'compute': (read_compute, PRESENCE),
    'facts': (
        read_facts,
        {
            **{'version': 1, 'room': {'VCPU': [4, 5]}, 'limits': {'VCPU': [1, 2, 1]}},
            **{'traits': ['T'], 'aggregates': [OTHER_UUID], 'images': ['0123456789ab']},
        },
    ),
    'trouble': (read_trouble, {'version': 1, 'reasons': ['network default is off', 'disk full']}),
    'name': (lambda value: call_reader(decode, requesting.NameOwner, value), {'version': 1, 'instance': INSTANCE}),
    'taker': (lambda value: decode_lenient(queues.QueueTaker, value), {'version': 1, 'compute': COMPUTE}),
    'cluster': (
        lambda value: call_reader(decode, cluster.ClusterIdentity, value),
        {'version': 1, 'identity': OTHER_UUID, 'since': NOW},
    ),
    'known': (read_known_identity, {'version': 1, 'identity': OTHER_UUID, 'cluster': 2**63, 'revision': 7, 'term': 2}),
    'released': (lambda value: released_to_json(released_from_json(value)), {'generations': {INSTANCE: 3}}),
}


def parametrize_cases(quick_number: int) -> Any:
    all_cases = pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
    return pytest.mark.parametrize('number', [quick_number, all_cases])


@contextmanager
def check_case(name: str, number: int, value: object) -> Iterator[None]:
    """Check one case: every error but the product's own fails it."""
    try:
        yield
    except RefusedError as error:
        message = str(error)
    except EcompError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f'case {number} of {name}: {type(error).__name__}: {error}; {value!r:.2000}') from error
    else:
        message = 'understood'
    assert message, (name, number, value)
    assert '\n' not in message, (name, number, value)


KEYS_BY_KIND = {
    'request': keys.request(COMPUTE, INSTANCE), 'tombstone': keys.request(OTHER_UUID, INSTANCE),
    'record': keys.record(COMPUTE, INSTANCE), 'waiting': keys.queue('f', INSTANCE),
    'group': keys.group('web'), 'quota': keys.quota('p'),
    'flavor': keys.flavor('f'), 'stack': keys.stack('shop'),
    'announced': keys.attempt(OTHER_UUID), 'compute': keys.compute(COMPUTE),
    'trouble': keys.troubles(COMPUTE), 'name': keys.name('web1'),
    'taker': keys.taker(keys.queue('f', INSTANCE)),
}  # fmt: skip
