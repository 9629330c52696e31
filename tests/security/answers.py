"""Answers of placement without a server: valid ones, and what is done with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from ecomp.cli.check import make_finding_listing
from ecomp.cli.operators import make_host_listing
from ecomp.model import keys
from ecomp.model.allocation import describe_difference
from ecomp.model.audit import find_all
from ecomp.model.choose import STRATEGIES, Ranking, choose, distribute
from ecomp.model.explain import find_miss, sort_misses
from ecomp.model.host import ProviderSummary
from ecomp.model.query import parse_query
from ecomp.model.world import Planes, ProviderState, World, list_hosts
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.placement.http_client import Answer
from ecomp.store.client import Entry
from tests.kit.forms import render_all
from tests.kit.hostile import COMPUTE, INSTANCE, OTHER_UUID
from tests.security.readers import KEYS_BY_KIND, READERS, assert_printable


class CannedPlacement(Placement):
    body = b''
    status = 200

    def _send(self, *arguments: Any) -> Answer:
        answer = Answer(self.status, self.body, {})
        if self.status == 200:
            return answer
        raise self._make_error(answer, arguments[-1])


VALID_INVENTORY = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.5, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}
ALLOCATIONS = {COMPUTE: {'resources': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}}
SUMMARY = {'resources': {'VCPU': {'capacity': 4, 'used': 1}, 'DISK_GB': {'capacity': 4, 'used': 1}}}
PROVIDER_ROW = {'uuid': COMPUTE, 'name': COMPUTE, 'root_provider_uuid': COMPUTE}
QUERY = 'resources=VCPU:2,DISK_GB:9&required=T'


def check_candidates(client: Placement) -> None:
    offer = allocations.read_candidates(client, QUERY)
    for weigh in STRATEGIES:
        choice = choose(offer, [COMPUTE], weigh, random.Random(0))
        distribute(Ranking(choice.candidates), offer.rooms, 3, weigh, random.Random(0))


def check_shares(client: Placement) -> None:
    shares = providers.read_rooms(client, [COMPUTE, OTHER_UUID])
    in_placement = {uuid: ProviderSummary(uuid, share) for uuid, share in shares.items()}
    presence = Entry(keys.compute(COMPUTE), b'{"hostname": "h"}', 1, 1)
    world = World(Planes({}, {presence.key: presence}))
    assert_printable(*render_all(make_host_listing(list_hosts(world, in_placement))))


def check_look(client: Placement) -> None:
    provider = providers.read_provider(client, COMPUTE, traits=True, aggregates=True)
    if provider is None:
        return
    for query in (QUERY, 'resources=VCPU:1', f'resources=VCPU:{10**4000}'):
        for result in sort_misses([find_miss(parse_query(query), provider)]):
            assert all(failure.reason for failure in result.failures)


def check_audit(client: Placement) -> None:
    provider = ProviderState(
        COMPUTE, providers.read_raw_inventory(client, COMPUTE), allocations.read_provider_allocations(client, COMPUTE)
    )
    etcd = {key: Entry(key, json.dumps(READERS[name][1]).encode(), 1, 1) for name, key in KEYS_BY_KIND.items()}
    _, used = providers.read_project_usages(client, 'p')
    world = World(Planes({COMPUTE: provider}, etcd, usages={'p': used}))
    assert_printable(*render_all(make_finding_listing(find_all(world))))


def check_claim(client: Placement) -> None:
    consumer = allocations.read_consumer(client, INSTANCE)
    allocations.claim(client, {INSTANCE: {COMPUTE: {'VCPU': 1}}}, allocations.Requester('u', 'p'), lambda: None)
    describe_difference({COMPUTE: {'VCPU': 1}}, consumer.allocations)
    allocations.release_once(client, INSTANCE, consumer)


CALLS_AND_ANSWERS: dict[str, tuple[Callable[[Placement], object], Any]] = {
    'candidates': (check_candidates,
        {'allocation_requests': [{'allocations': ALLOCATIONS}], 'provider_summaries': {COMPUTE: SUMMARY}}),
    'consumer': (check_claim,
        {'allocations': ALLOCATIONS, 'consumer_generation': 1, 'user_id': 'u', 'project_id': 'p'}),
    'of provider': (lambda client: allocations.read_provider_allocations(client, COMPUTE),
        {'allocations': ALLOCATIONS}),
    'inventory': (lambda client: providers.read_inventory(client, COMPUTE, {}),
        {'inventories': {'VCPU': VALID_INVENTORY}}),
    'set inventory': (lambda client: providers.set_inventory(client, COMPUTE, {}), {'generation': 1}),
    'usages': (lambda client: providers.read_usages(client, COMPUTE), {'usages': {'VCPU': 1}}),
    'project': (lambda client: providers.read_project_usages(client, 'p'),
        {'usages': {'INSTANCE': {'consumer_count': 1, 'VCPU': 1}}}),
    'names': (lambda client: providers.read_provider_names(client),
        {'resource_providers': [PROVIDER_ROW, PROVIDER_ROW]}),
    'name': (lambda client: (providers.read_provider_name(client, COMPUTE), providers.ensure_provider(client, COMPUTE)),
        PROVIDER_ROW),
    'shares': (check_shares,
        {'provider_summaries': {COMPUTE: SUMMARY}, 'usages': {'VCPU': 1}, 'inventories': {'VCPU': VALID_INVENTORY}}),
    'look': (
        check_look,
        {
            **{'inventories': {'VCPU': VALID_INVENTORY, 'DISK_GB': VALID_INVENTORY}, 'usages': {'VCPU': 1}},
            **{'traits': ['T'], 'aggregates': [], 'resource_provider_generation': 1},
        },
    ),
    'traits': (lambda client: providers.change_names(client, COMPUTE, providers.TRAITS, lambda names: names | {'T'}),
        {'traits': ['U'], 'resource_provider_generation': 1}),
    'audit': (
        check_audit,
        {
            'inventories': {'VCPU': VALID_INVENTORY},
            'allocations': ALLOCATIONS,
            'usages': {'INSTANCE': {'consumer_count': 1}},
        },
    ),
}  # fmt: skip
