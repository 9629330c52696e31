"""Bugs that are planted in the product, one at a time. Each must be found by a scenario.

A row has a description, the place and kind of the change, and the scenarios that find it, the cheapest first.
`python -m tests.model --planted` prints how many schedules each bug takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.model.explorer import Scenario, search
from tests.model.mutations_adopted import ADOPTED
from tests.model.mutations_changed import CHANGED
from tests.model.mutations_resized import REBUILT, RESIZED
from tests.model.mutations_stacks import EVACUATED, STACKS
from tests.model.mutations_told import PAIRED, REPORTED
from tests.model.planting import (
    Bug,
    Constant,
    drop_argument,
    drop_operand,
    drop_statement,
    make_bug,
    move_last,
    never,
    plant_bugs,
    replace_argument,
    replace_assignment,
    replace_call,
    replace_condition,
    replace_handler,
    replace_return,
    return_constant,
)

HOST = {
    'a record is trusted wherever it is': make_bug(
        'ecomp.shared.places:find_by_listing', never('request_keys'), 'forged_records'),
    'an inventory is corrected while it is closed': make_bug('ecomp.agent.host.provider:Registration.register',
        drop_argument('set_inventory', 'is_closing'), 'closed_during_check'),
    'what fails frees what the instance shares elsewhere': make_bug(
        'ecomp.agent.instance.records:Records.end', replace_assignment('other_requests', '[]'), 'requested_of_two'),
    'a compute builds what placement does not confirm': make_bug(
        'ecomp.agent.instance.instances:Instances._carry_out', never('claim_fault'), 'unconfirmed'),
    'an address whose record was lost is left': make_bug(
        'ecomp.agent.instance.records:Records.remove_stale_address', return_constant(None), 'record_removed_of_active'),
    'a half-built guest whose record was lost is called built': make_bug(
        'ecomp.agent.instance.instances:Instances.build', replace_assignment('is_build_begun', 'stored is not None'),
        'record_removed_of_half_a_guest'),
    'a built guest that is off is built over': make_bug(
        'ecomp.agent.instance.instances:Instances._may_have_run', drop_operand('is_ours'), 'off_before_it_was_active'),
    'a guest that ran is recorded as off once its record is lost': make_bug(
        'ecomp.agent.instance.instances:Instances._adopt', replace_condition('is_off', 'is_off', 'remembered'),
        'power_fails_without_a_record'),
    'what a state directory lacks is never written': make_bug(
        'ecomp.agent.instance.records:Records.recheck', drop_statement('repair'), 'older_state_directory'),
    'what ended here may wait once more': make_bug(
        'ecomp.agent.instance.records:_end_queued', return_constant(True), 'destroyed_and_queued_again'),
    'a start does not ask what has ended': make_bug(
        'ecomp.agent.compute:record_missed_ends', drop_statement('record_end'), 'built_and_destroyed'),
    'a uuid used again is remembered as ended': make_bug(
        'ecomp.agent.host.state:Memory._save', drop_statement('_end_times', 'pop'), 'uuid_reused_and_rebooted'),
    'a guest is started without a look at its request': make_bug(
        'ecomp.agent.instance.instances:Instances._resume', drop_statement('require_revision'), 'evacuated_and_back'),
    'what was destroyed on a forgotten host stays there': make_bug(
        'ecomp.agent.instance.instances:Instances.find_forgotten', return_constant({}), 'forgotten_with_a_guest'),
    'a task without a thread is in work for ever': make_bug(
        'ecomp.agent.planner:Planner.hand_back', drop_statement('_finish'), 'no_thread'),
    'one guest without an answer stops its host': make_bug(
        'ecomp.agent.planner:Planner._observe', replace_argument('attempt', 2, 'Exception'), 'addresses_unavailable'),
    'a copy of a compute is the same compute': make_bug(
        'ecomp.shared.presence:Presence._require_ours', never('_revision', '_value'), 'copied_host'),
    'a full etcd takes no deletes of a compute without a lease': make_bug(
        'ecomp.shared.presence:Presence._put_key', never('_revision'), 'etcd_full'),
    'a compute does not keep its presence': make_bug(
        'ecomp.shared.presence:Presence._put_key', drop_argument('Put', 'lease'), 'one_name'),
    'facts are not on the lease of the presence': make_bug('ecomp.shared.presence:Presence._write_attached',
        drop_argument('Put', '_lease_id'), 'sample_while_facts_are_published'),
}  # fmt: skip

# The number of schedules of one scenario within which a bug must be found.
MAX_SCHEDULES = 3_000

CLAIM = {
    'undo does not ask who holds the attempt': make_bug('ecomp.shared.attempts:read_pending_instances',
        replace_assignment('others', '{key: each for key, each in attempts.entries.items() if key != own_attempt.key}'),
        'late_releases', 'one_uuid_of_two_sizes'),
    'undo does not look for a delivery': make_bug('ecomp.scheduler.placing.claim:abandon',
        replace_argument('find_needed', 5, '()'), 'one_uuid_twice', 'lost_delivery'),
    'undo does not ask who takes it from a queue': make_bug(
        'ecomp.scheduler.placing.claim:abandon', replace_argument('find_needed', 3, "''"), 'overtaken_by_a_queue'),
    'a claim is released with a generation read later': make_bug('ecomp.placement.allocations:release',
        replace_argument('release_once', 2, 'read_consumer(placement, name)'),
        *('release_beside_resume', 'claim_keeper')),
    'attempts are read after requests': make_bug(
        'ecomp.shared.attempts:find_needed',
        replace_return(
            'elsewhere | {names[key] for key in found}'
            ' | read_pending_instances(store, queued, own_attempt).intersection(holding)'
        ),
        'release_beside_resume',
    ),
    'an equal claim is taken for ours': make_bug('ecomp.placement.allocations:_is_own_claim',
        replace_assignment('is_next', 'bool(consumer.allocations)'), 'overtaken_by_a_queue'),
    'a claim does not exceed the generations released': make_bug(
        'ecomp.scheduler.placing.session:Session.read_highest_released', return_constant(0),
        'late_release_keeper_and_resume'),
    'a release is not noted': make_bug('ecomp.placement.allocations:release',
        drop_statement('note_generations'), 'late_release_keeper_and_resume', 'forget_and_taker'),
    'a release is noted after it': make_bug('ecomp.placement.allocations:release',
        move_last('note_generations'), 'late_release_keeper_and_resume', 'late_releases'),
    'a taker does not exceed the generations released': make_bug(
        'ecomp.agent.queue:Taker._claim', replace_assignment('above', 'lambda: 0'), 'late_release_by_taker'),
    'a taker does not note what it releases': make_bug(
        'ecomp.agent.queue:Taker.release_claim', drop_argument('release', 'note'), 'late_release_by_taker'),
    'an empty consumer is a conflict': make_bug('ecomp.placement.allocations:_ClaimProgress.prepare_next',
        never('ConsumerConflict', 'current'), 'orphan_consumer'),
    'a consumer in the making is taken for empty': make_bug(
        'ecomp.placement.allocations:EMPTY_CONSUMER_SECONDS', Constant(0.0), 'orphan_consumer_taken_over'),
    'a claim is moved without a check': make_bug('ecomp.placement.allocations:claim',
        drop_statement('check'), 'one_uuid_of_two_sizes', 'cleared_and_created_larger'),
    'a taker that gives up does not ask for attempts': make_bug(
        'ecomp.agent.queue:Taker.release_claim', replace_call('find_needed', '()'), 'queue_entry_removed'),
    'a compute without queues keeps what it claimed for them': make_bug(
        'ecomp.agent.host.claims:ClaimKeeper._find_needed', replace_argument('find_needed', 3, "'queued'"),
        'queues_off'),
    'the keeper releases at the first look': make_bug(
        'ecomp.agent.host.claims:CONFIRMATION_SECONDS', Constant(0.0), 'foreign_claim'),
    'the keeper does not ask for attempts': make_bug(
        'ecomp.agent.host.claims:find_orphans', drop_operand('in_flight'), 'claim_of_the_dead'),
    'the keeper does not look for requests': make_bug(
        'ecomp.agent.host.claims:find_orphans', drop_operand('requests'), 'claim_of_a_removed_request'),
    'the claim of a dead attempt is not released before a look': make_bug(
        'ecomp.agent.queue:Taker._read_room', replace_call('_release_dead_claims', '()'), 'restarted_taker'),
    'a drain does not wait for attempts that are not announced': make_bug(
        'ecomp.scheduler.operations.decommission:wait_until_drained', drop_operand('all_announced'),
        'drain_and_create'),
}  # fmt: skip
DELIVERY = {
    'a delivery does not compare its attempt': make_bug(
        'ecomp.shared.ends:deliver', replace_assignment('conditions', '[]'), 'resume_unanswered'),
    'an attempt is on no lease': make_bug(
        'ecomp.scheduler.placing.claim:announce', drop_argument('Put', 'lease'), 'one_name', 'one_uuid_twice'),
    'a set and one of its instances are delivered at once': make_bug(
        'ecomp.scheduler.placing.claim:_require_oldest', never('is_older'), 'set_and_its_member'),
    'a queued request does not compare its attempt': make_bug(
        'ecomp.scheduler.placing.enqueue:_commit', drop_operand('attempt_revision'), 'queued_and_direct'),
    'a mark is on no lease': make_bug('ecomp.agent.queue:Taker.take', drop_argument('Put', 'get_lease'), 'dead_taker'),
    'a refusal of placement is put down to its flavor': make_bug('ecomp.agent.queue:Taker._try',
        replace_handler('NoCapacity', '(NoCapacity, PlacementRefusal)'), 'refused_by_placement'),
    'disabled computes are sampled': make_bug(
        'ecomp.scheduler.placing.sample:SampledPlacer._claim',
        replace_argument(
            'read_offer', 0, "f'{self.order.query}&in_tree={compute}&root_required=COMPUTE_STATUS_DISABLED'"
        ),
        'sample_and_disable',
    ),
}  # fmt: skip
SETTLED = {
    'a lost transaction is only looked for': make_bug(
        'ecomp.store.client:Store._settle', replace_assignment('fence', 'None'), 'late_delivery'),
    'a lost transaction is looked for where it compares, not where it writes': make_bug(
        'ecomp.store.client:Store._settle', drop_operand('operations', place=0), 'lost_delivery', 'create_with_losses'),
    'any value is that of a lost transaction': make_bug('ecomp.store.client:_is_written',
        drop_operand('entry', 'put', 'lease', 'encode'), 'destroy_unanswered_beside_stop'),
    'a delivery whose effect is used is called undone': make_bug(
        'ecomp.shared.ends:find_delivery', return_constant(None), 'delivery_unanswered_and_stopped'),
}  # fmt: skip
SHARED = {
    'a first quota is counted once': make_bug(
        'ecomp.scheduler.operations.sharing:recount_quota', replace_condition('False', 'now'), 'first_quota'),
    'an end leaves its place in the group': make_bug(
        'ecomp.shared.ends:release_shared_keys', drop_statement('make_group_operation'), 'built_and_destroyed'),
    'an end leaves its quota': make_bug(
        'ecomp.shared.ends:release_shared_keys', drop_statement('make_quota_put'), 'built_and_destroyed'),
    'an end leaves its address': make_bug(
        'ecomp.agent.instance.records:Records.end', drop_statement('address'), 'built_and_destroyed'),
    'a quota is not compared': make_bug(
        'ecomp.shared.names:charge_quota', drop_operand('unchanged', place=-1), 'quota_of_one'),
    'a quota that is not there is not compared': make_bug(
        'ecomp.shared.names:charge_quota', drop_operand('unchanged', place=0), 'first_quota'),
    'a group is not compared': make_bug(
        'ecomp.shared.names:join_group', drop_operand('unchanged'), 'strict_anti_affinity'),
    'a name is not compared': make_bug('ecomp.scheduler.placing.claim:reserve_names',
        replace_return('([], [Put(keys.name(name), encode(NameOwner(instance))) for name, instance in named.items()])'),
        'one_name'),
    'a group admits everybody': make_bug(
        'ecomp.model.group:Group.can_admit', return_constant(True), 'strict_anti_affinity'),
    'a quota allows everything': make_bug('ecomp.model.quota:Quota.list_excesses', return_constant(()), 'quota_of_one'),
    'a refused request keeps what it shared': make_bug(
        'ecomp.model.order:parse_request', drop_argument('InvalidRequest', '_parse_request_holdings'), 'refused'),
    'a destroy of a refused request forgets what it shared': make_bug(
        'ecomp.scheduler.changes.change:make_tombstone', replace_call('_read_membership', 'None'), 'refused'),
}  # fmt: skip
MUTATIONS: dict[str, Bug] = {
    **CLAIM, **DELIVERY, **SETTLED, **SHARED, **HOST, **STACKS, **EVACUATED, **REPORTED, **PAIRED, **ADOPTED,
    **CHANGED, **RESIZED, **REBUILT,
}  # fmt: skip


class Detection(NamedTuple):
    scenario: str
    schedules: int
    wrong: str


def detect(name: str, scenarios: Mapping[str, Scenario]) -> Detection | None:
    bug = MUTATIONS[name]
    with plant_bugs(bug.plants):
        for scenario in bug.scenarios:
            result = search(scenarios[scenario], MAX_SCHEDULES)
            for finding in result.findings:
                return Detection(scenario, result.schedules, finding.violations[0])
    return None
