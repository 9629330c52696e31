"""Bugs that are planted in the product, one at a time; each must be found by a scenario.

A row has a description, the place and kind of the change, and the scenarios that find it, the cheapest first. `python
-m tests.model --planted` prints how many schedules each bug takes. mutations_host.py and mutations_told.py have more
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.model.explorer import Scenario, look_for
from tests.model.mutations_host import HOST
from tests.model.mutations_told import PAIRS, TOLD
from tests.model.planting import (
    Bug,
    Constant,
    asks,
    assigns,
    becomes,
    bug,
    catches,
    drops,
    moves_last,
    never,
    passes,
    planted,
    results,
    returns,
    without,
    without_argument,
)

# The number of schedules of one scenario within which a bug must be found.
SCHEDULES = 3_000

CLAIM = {
    'undo does not ask who holds the attempt': bug(
        'ecomp.scheduler.placing.claim:abandon', never('at_it', 'revision'), 'late_releases', 'one_uuid_of_two_sizes'
    ),
    'undo does not look for a delivery': bug(
        'ecomp.scheduler.placing.claim:abandon', without('read'), 'one_uuid_twice', 'lost_delivery'
    ),
    'undo does not ask who takes it from a queue': bug(
        'ecomp.scheduler.placing.claim:abandon', without('taken'), 'overtaken_by_a_queue'
    ),
    'a claim is released with a generation read later': bug(
        'ecomp.placement.allocations:release',
        passes('release_once', 2, 'consumer(placement, each)'),
        *('release_beside_resume', 'claim_keeper'),
    ),
    'attempts are read after requests': bug(
        'ecomp.store.client:wanted',
        results(
            '{each for each, on in holding.items() if any(store.get(keys.request(compute, each)) for compute in on)}'
            ' | (holding.keys() & (at_it(store) if waiting else in_requests(store.snapshot(keys.ATTEMPTS))))'
        ),
        'fix_and_create',
    ),
    'an equal claim is taken for ours': bug(
        'ecomp.placement.allocations:_is_ours', assigns('moved', 'bool(held.allocations)'), 'overtaken_by_a_queue'
    ),
    'a claim does not exceed the generations released': bug(
        'ecomp.scheduler.placing.create:Attempt.released', returns(0), 'late_release_keeper_and_resume'
    ),
    'a release is not noted': bug(
        'ecomp.placement.allocations:release', drops('note'), 'late_release_keeper_and_resume', 'forget_and_taker'
    ),
    'a release is noted after it': bug(
        'ecomp.placement.allocations:release', moves_last('note'), 'late_release_keeper_and_resume', 'late_releases'
    ),
    'a taker does not exceed the generations released': bug(
        'ecomp.agent.queue:Taker._claim', assigns('above', 'lambda: 0'), 'late_let_go'
    ),
    'a taker does not note what it releases': bug(
        'ecomp.agent.queue:Taker.let_go', without_argument('release', 'note_released'), 'late_let_go'
    ),
    'an empty consumer is a conflict': bug(
        'ecomp.placement.allocations:claim', never('ConsumerConflict', 'found', 'generations'), 'orphan_consumer'
    ),
    'a consumer in the making is taken for empty': bug(
        'ecomp.placement.allocations:EMPTY_SECONDS', Constant(0.0), 'orphan_consumer_taken_over'
    ),
    'a claim is moved without a check': bug(
        'ecomp.placement.allocations:claim', drops('check'), 'one_uuid_of_two_sizes', 'cleared_and_asked_for_more'
    ),
    'a taker that gives up does not ask for attempts': bug(
        'ecomp.agent.queue:Taker.let_go', never('in_requests'), 'waiting_removed'
    ),
    'a compute without queues keeps what it claimed for them': bug(
        'ecomp.agent.host.claims:ClaimKeeper._wanted', without_argument('wanted', 'waiting'), 'queues_off'
    ),
    'the keeper releases at the first look': bug('ecomp.agent.host.claims:APART', Constant(0.0), 'foreign_claim'),
    'the keeper does not ask for attempts': bug(
        'ecomp.agent.host.claims:orphans', without('at_it'), 'claim_of_the_dead'
    ),
    'the keeper does not look for requests': bug(
        'ecomp.agent.host.claims:orphans', without('wished'), 'claim_of_a_removed_request'
    ),
    'the claim of a dead attempt is not released before a look': bug(
        'ecomp.agent.queue:Puller._look', never('_tidy'), 'restarted_taker'
    ),
    'a drain does not wait for attempts that are not announced': bug(
        'ecomp.scheduler.operating.decommission:drained', without('all_announced'), 'drain_and_create'
    ),
}
DELIVERY = {
    'a delivery does not compare its attempt': bug(
        'ecomp.scheduler.placing.claim:deliver', assigns('conditions', '[]'), 'late_delivery'
    ),
    'an attempt is on no lease': bug(
        'ecomp.scheduler.placing.claim:announce', without_argument('Put', 'lease'), 'one_name', 'one_uuid_twice'
    ),
    'a lost delivery is only looked for': bug(
        'ecomp.scheduler.placing.claim:deliver', asks('store.get(attempt_key)', 'withdraw'), 'late_delivery'
    ),
    'a set and one of its instances are delivered at once': bug(
        'ecomp.scheduler.placing.claim:_check_alone', never('is_older'), 'set_and_its_member'
    ),
    'a queued request does not compare its attempt': bug(
        'ecomp.scheduler.placing.enqueue:_commit', without('attempt_revision'), 'queued_and_direct'
    ),
    'a mark is on no lease': bug(
        'ecomp.agent.queue:Taker._mark', without_argument('Put', 'lease'), 'dead_taker'
    ),
    'a refusal of placement is put down to its flavor': bug(
        'ecomp.agent.queue:Puller._take',
        catches('NoCapacity', '(NoCapacity, PlacementRefusal)'),
        'refused_by_placement',
    ),
    'disabled computes are sampled': bug(
        'ecomp.scheduler.placing.place:Few._offered',
        passes('candidates', 1, "f'{self.wanted.query}&in_tree={compute}&root_required=COMPUTE_STATUS_DISABLED'"),
        'few_and_disable',
    ),
}
SHARED = {
    'a first quota is counted once': bug(
        'ecomp.scheduler.operating.sharing:recount', asks('False', 'now'), 'first_quota'
    ),
    'an end leaves its place in the group': bug(
        'ecomp.store.sharing:ended', drops('put_group'), 'built_and_destroyed'
    ),
    'an end leaves its quota': bug('ecomp.store.sharing:ended', drops('put_quota'), 'built_and_destroyed'),
    'an end leaves its address': bug(
        'ecomp.agent.instance.records:Records.end', drops('booted'), 'built_and_destroyed'
    ),
    'a quota is not compared': bug(
        'ecomp.store.sharing:charged', without('unchanged', place=-1), 'quota_of_one'
    ),
    'a quota that is not there is not compared': bug(
        'ecomp.store.sharing:charged', without('unchanged', place=0), 'first_quota'
    ),
    'a group is not compared': bug('ecomp.store.sharing:joined', without('unchanged'), 'apart'),
    'a name is not compared': bug(
        'ecomp.scheduler.looking.find:take_names',
        results('([], [Put(keys.name(name), name_to_json(instance)) for name, instance in named.items()])'),
        'one_name',
    ),
    'a group admits everybody': bug('ecomp.model.group:Group.admits', returns(True), 'apart'),
    'a quota allows everything': bug('ecomp.model.quota:Quota.excess', returns(()), 'quota_of_one'),
    'a refused request keeps what it shared': bug(
        'ecomp.model.order:parse_request', without_argument('Invalid', '_shares'), 'refused'
    ),
    'a destroy of a refused request forgets what it shared': bug(
        'ecomp.scheduler.changing.change:_transaction', becomes('_group_of', 'None'), 'refused'
    ),
}
MUTATIONS: dict[str, Bug] = {**CLAIM, **DELIVERY, **SHARED, **HOST, **TOLD, **PAIRS}


class Detection(NamedTuple):
    """The scenario that found a bug, the number of schedules it took, and the violation."""

    scenario: str
    schedules: int
    wrong: str


def detect(name: str, scenarios: Mapping[str, Scenario]) -> Detection | None:
    """Plant a bug and search for it; return None if no scenario finds it."""
    bug = MUTATIONS[name]
    with planted(bug.plants):
        for scenario in bug.scenarios:
            result = look_for(scenarios[scenario], SCHEDULES)
            for finding in result.findings:
                return Detection(scenario, result.schedules, finding.wrong[0])
    return None
