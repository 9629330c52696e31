"""Readers of all kinds of values that others write, valid values, checks of mutated ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from ecomp.cli.history import Explanation, drawn, explanation_to_dict, in_sentences, timeline_to_dict
from ecomp.cli.inspect import as_detail, as_list, no_address
from ecomp.cli.operators import as_findings, as_hosts
from ecomp.cli.sharing import as_flavors, as_groups, as_members, as_quota, as_quotas
from ecomp.errors import EcompError
from ecomp.model import cluster, flavor, group, keys, planes, quota
from ecomp.model import order as requesting
from ecomp.model import queue as queues
from ecomp.model import record as records
from ecomp.model.allocation import MOST, difference
from ecomp.model.audit import audit
from ecomp.model.group import Group, Membership
from ecomp.model.guest import Guest, SharedUserData, shared_user_data
from ecomp.model.host import NOBODY, Computes, InEtcd, hosts, living_in
from ecomp.model.order import SIZE_LIMIT, Invalid, Power, Request
from ecomp.model.planes import Planes, ProviderState, involved
from ecomp.model.query import parse
from ecomp.model.record import Failure, Interface, Progress, Record
from ecomp.store.client import Entry
from ecomp.store.presence import _holder, _word
from ecomp.store.sharing import released_from_json, released_to_json
from tests.kit.forms import LOOKS, documents, texts
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER, request

NOW = '2026-01-31T12:00:00.000Z'
SHARED = SharedUserData.of(b'#cloud-config\n')


def shown(*told: str) -> None:
    """Assert that texts are printable, so escaping changes nothing, and that JSON is valid."""
    for text in told:
        lines = text.split('\n')
        assert all(line.isprintable() for line in lines), text
        if text.startswith(('{', '[{')):
            json.loads(text, parse_constant=lambda name: pytest.fail(name))


def shown_record(found: Record) -> None:
    explanation = Explanation(found, NOBODY, found.why, Group('g', 'affinity', True, {found.instance: found.compute}))
    for table in (as_list([found]), as_detail(found)):
        shown(*texts(table))
    shown(in_sentences(explanation), *documents(explanation_to_dict(explanation)))
    for look in LOOKS:
        shown(drawn([found, found], look))
    shown(*documents(timeline_to_dict([found, found])))
    assert no_address(replace(found, state=records.BUILDING))


class Refused(Exception):
    """A reader refused the value with this message."""


def taken(read: Callable[..., Any], *given: Any) -> Any:
    """Return what the reader returns.

    Raises:
        RefusedError: it raised its documented error, a ValueError with a message.
    """
    try:
        return read(*given)
    except UnicodeEncodeError:
        raise  # an accepted text that cannot be written
    except ValueError as error:
        raise Refused(str(error)) from error


def read_request(value: bytes) -> None:
    parsed = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), value)
    if isinstance(parsed, Invalid):
        assert len(parsed.reason) <= requesting.REASON_LIMIT
        read_record(records.to_json(records.refused_record(COMPUTE, parsed._replace(instance=INSTANCE), NOW)).encode())
        return
    encoded = requesting.to_json(parsed).encode()
    if len(encoded) <= SIZE_LIMIT:
        assert requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), encoded) == parsed
    record = records.new_record(COMPUTE, parsed, NOW)
    assert records.from_json(records.to_json(record).encode(), INSTANCE) == record
    shown_record(record)
    difference(parsed.allocations, {OTHER: {'VCPU': 1}})


def read_record(value: bytes) -> None:
    parsed = taken(records.from_json, value, INSTANCE)
    assert records.from_json(records.to_json(parsed).encode(), INSTANCE) == parsed
    shown_record(parsed)


def read_waiting(value: bytes) -> None:
    key = keys.queue('f', INSTANCE)
    shown_record(queues.record_of(key, value))
    parsed = queues.parse_waiting(key, value)
    if isinstance(parsed, Invalid):
        return
    assert queues.parse_waiting(key, queues.to_json(parsed).encode()) == parsed
    encoded = requesting.to_json(parsed.request(COMPUTE, NOW)).encode()
    accepted = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), encoded)
    assert isinstance(accepted, Request) or len(encoded) > SIZE_LIMIT


def read_group(value: bytes) -> None:
    parsed = taken(group.from_json, 'g', value)
    assert group.from_json('g', group.to_json(parsed).encode()) == parsed
    parsed.excludes(COMPUTE)
    parsed.broken()
    shown(*texts(as_groups([parsed], NOBODY, {})))
    shown(*texts(as_members([parsed], Computes({}, {COMPUTE: 'hv1'}), {}, several=False)))


def read_quota(value: bytes) -> None:
    parsed = taken(quota.from_json, 'p', value)
    charged = parsed.with_used(quota.charge({'VCPU': 7})).without_used({'VCPU': 1})
    assert quota.from_json('p', quota.to_json(charged).encode()) == charged
    quota.refusal('p', parsed.excess(quota.charge({'VCPU': MOST})))
    shown(*texts(as_quotas([parsed])), *texts(as_quota([parsed], several=True)))


def read_flavor(value: bytes) -> None:
    parsed = taken(flavor.from_json, 'f', value)
    assert flavor.from_json('f', flavor.to_json(parsed).encode()) == parsed
    parse(flavor.on_top(parsed, 'resources=VCPU:2&required=T'))
    shown(*texts(as_flavors({'f': (parsed, 'etcd')})))


def compared(etcd: dict[str, Entry], digests: dict[str, planes.Digest]) -> None:
    involved(etcd)
    shown(*texts(as_findings(audit(Planes({COMPUTE: ProviderState(COMPUTE)}, etcd, digests)))))


def read_digest(value: bytes) -> None:
    digest = taken(planes.from_pages, [value])
    assert planes.from_pages([page.encode() for page in planes.to_pages(digest)]) == digest
    compared({}, {COMPUTE: digest})


def read_clearance(value: bytes) -> None:
    clearance = taken(planes.clearance_from_json, value)
    assert planes.clearance_from_json(planes.clearance_to_json(clearance).encode()) == clearance


def read_compute(value: bytes) -> None:
    entry = Entry(keys.compute(COMPUTE), value, 1, 1)
    presence, holder = living_in(entry.value), _holder(entry)
    for field in ('hostname', 'since'):
        assert _word(holder or {}, field).isprintable()
    rows = hosts(InEtcd(Computes({COMPUTE: presence})), {})
    shown(*texts(as_hosts(rows)))


def read_announced(value: bytes) -> None:
    assert INSTANCE in requesting.announced(keys.attempt(INSTANCE), value)
    compared({keys.attempt(INSTANCE): Entry(keys.attempt(INSTANCE), value, 1, 7)}, {})


def read_known(value: bytes) -> None:
    identity = taken(cluster.from_json, value)
    assert cluster.from_json(cluster.to_json(identity).encode()) == identity
    cluster.unlike(identity, value)


RECORD = Record(
    *(INSTANCE, COMPUTE, 'active'),
    image=IMAGE,
    resources={'VCPU': 1, 'DISK_GB': 2},
    query='resources=VCPU:1',
    user_id='u',
    project_id='p',
    addresses=(Interface('default', '52:54:00:00:00:01', '10.0.0.1', 'lease', '10.0.0.1'),),
    console='h:/c',
    stages={'requested': NOW, 'scheduled': NOW, 'started': '2026-01-31T12:00:01.000Z'},
    error=Failure('image', 'x', 'y'),
    fault='z',
    name='web1',
    power=f'{OTHER}:off',
    progress=Progress('image', 1, 2),
    group=Membership('web'),
    why=requesting.why_from({'weigh': 'spread', 'weight': 0.5, 'of': 3}),
)
WHOLE = request(
    query='resources=VCPU:1',
    stages={'requested': NOW},
    name='web1',
    ssh_keys=['ssh-ed25519 AAAA x'],
    user_data='eA==',
    count=3,
    group={'name': 'web', 'policy': 'affinity', 'strict': True},
    why={'weigh': 'spread', 'weight': 0.5, 'of': 3},
    power=Power('stop', OTHER)._asdict(),
    resources={'VCPU': 1},
)
TOMBSTONE = {**WHOLE, 'allocations': {}, 'image': None}
WAITING = {
    **{name: WHOLE[name] for name in ('version', 'instance', 'image', 'user_id', 'project_id')},
    **{name: WHOLE[name] for name in ('stages', 'name', 'group')},
    **{'flavor': 'f', 'query': 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1&required=T', 'ssh_keys': ['x'], 'count': 1},
}
DIGEST = planes.Digest(
    {INSTANCE: Guest(INSTANCE, COMPUTE, True, True, True)},
    *({INSTANCE: '/base'}, {'52:54:00:00:00:01': INSTANCE}, {INSTANCE: ''}),
    {'52:54:00:00:00:01': f'{INSTANCE} 10.0.0.1'},
    {'x.part': '1/2'},
)
ALIVE = {'version': '1', 'hostname': 'h', 'since': NOW, 'token': 't', 'boot': 'b', 'pid': '7'}

READERS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    'request': (read_request, WHOLE),
    'tombstone': (read_request, TOMBSTONE),
    'record': (read_record, json.loads(records.to_json(RECORD))),
    'waiting': (read_waiting, WAITING),
    'group': (
        read_group, {'version': 1, 'policy': 'affinity', 'strict': True, 'members': {INSTANCE: COMPUTE, OTHER: ''}}
    ),
    'quota': (read_quota, {'version': 1, 'limits': {'VCPU': 10, 'instances': 3}, 'used': {'VCPU': 1, 'instances': 1}}),
    'flavor': (read_flavor, {'version': 1, 'resources': {'VCPU': 1}, 'required': ['T'], 'forbidden': ['U']}),
    'digest': (read_digest, json.loads(planes.to_pages(DIGEST)[0])),
    'clearance': (read_clearance, {'version': 1, 'leftovers': [{'kind': 'disk', 'name': INSTANCE, 'mark': 'x'}]}),
    'cleared': (lambda value: taken(planes.cleared_from_json, value), ['disk x: removed']),
    'user-data': (lambda value: taken(shared_user_data, value, SHARED.sha256), json.loads(SHARED.text)),
    'announced': (read_announced, {'version': 1, 'instances': [INSTANCE, OTHER], 'query': 'x', 'host': 'h', 'pid': 1}),
    'compute': (read_compute, ALIVE),
    'name': (lambda value: taken(requesting.named, value), {'version': 1, 'instance': INSTANCE}),
    'taker': (queues.marked_by, {'version': 1, 'compute': COMPUTE}),
    'cluster': (lambda value: taken(cluster.identity, value), {'version': 1, 'identity': OTHER, 'since': NOW}),
    'known': (read_known, {'version': 1, 'identity': OTHER, 'cluster': 2**63, 'revision': 7, 'term': 2}),
    'released': (lambda value: released_to_json(released_from_json(value)), {'generations': {INSTANCE: 3}}),
}


def cases(few: int) -> Any:
    """Parametrize `number`: a few cases always, 20,000 with --all."""
    all_cases = pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
    return pytest.mark.parametrize('number', [few, all_cases])


@contextmanager
def case(name: str, number: int, value: object) -> Iterator[None]:
    """Check one case: every error but the product's own fails it.

    Raises:
        AssertionError: another error, with the name and number of the case.
    """
    try:
        yield
    except Refused as error:
        message = str(error)
    except EcompError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f'case {number} of {name}: {type(error).__name__}: {error}; {value!r:.2000}') from error
    else:
        message = 'understood'
    assert message, (name, number, value)
    assert '\n' not in message, (name, number, value)


PLACES = {
    'request': keys.request(COMPUTE, INSTANCE),
    'tombstone': keys.request(OTHER, INSTANCE),
    'record': keys.record(COMPUTE, INSTANCE),
    'waiting': keys.queue('f', INSTANCE),
    'group': keys.group('web'),
    'quota': keys.quota('p'),
    'flavor': keys.flavor('f'),
    'announced': keys.attempt(OTHER),
    'compute': keys.compute(COMPUTE),
    'name': keys.name('web1'),
    'taker': keys.taker(keys.queue('f', INSTANCE)),
}
