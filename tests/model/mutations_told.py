"""Bugs that show only in one step, in a message, or after time, a return or a restore.

PAIRED has bugs in two checks that cover each other: a bug in only one of them has no effect.
"""

from __future__ import annotations

from tests.model.planting import (
    always,
    combine,
    drop_argument,
    drop_operand,
    drop_statement,
    make_bug,
    make_pair,
    move_first,
    never,
    replace_assignment,
    replace_condition,
    replace_return,
    return_constant,
)

_ON_A_LEASE = '{keys.get_last_part(key) for key, stored in presences.items() if stored.lease}'
REPORTED = {
    # Wrong for one step, and right again at rest
    'a destroy releases the claim before the domain is undefined': make_bug(
        'ecomp.agent.instance.instances:Instances._remove', move_first('_release_claim'), 'built_and_destroyed'),
    # What a command reports to its user
    'a destroy whose answer is lost is called not accepted': make_bug(
        'ecomp.scheduler.changes.change:retry_until_accepted', never('doubts'), 'destroy_with_losses'),
    'an attempt that releases nothing calls its claim released': make_bug(
        'ecomp.scheduler.placing.session:Session.release', always('abandon'), 'one_name', 'create_with_losses'),
    'a name is taken from who still has it': make_bug(
        'ecomp.scheduler.placing.claim:require_free_name', never('current', 'state'), 'one_name', 'name_of_destroyed'),
    # Drains, and time
    'a drain does not look for claims': make_bug('ecomp.scheduler.operations.decommission:wait_until_drained',
        drop_operand('read_provider_allocations'), 'drain_beside_orphans'),
    'a drain does not wait for attempts': make_bug('ecomp.scheduler.operations.decommission:wait_until_drained',
        drop_operand('placing', place=-1), 'drain_beside_a_frozen_create'),
    'a drain does not wait for takers': make_bug('ecomp.scheduler.operations.decommission:wait_until_drained',
        drop_operand('taking', place=-1), 'drain_beside_a_frozen_claim'),
    'a create that was slow does not ask placement again': make_bug(
        'ecomp.scheduler.placing.create:_Creation.claim', never('MAX_OFFER_AGE_SECONDS'), 'drain_and_slow_create'),
    'a taker does not read its traits before it takes': make_bug('ecomp.agent.queue:Taker._try',
        replace_assignment('traits', 'self._room.traits'), 'drain_beside_a_frozen_taker'),
    'a compute that was full stays so for ever': make_bug('ecomp.agent.queue:Taker.take_next',
        combine(never('_is_room_stale'), never('get_due_time')), 'refused_and_room_freed'),
    # Computes that are forgotten, come back, or are new
    'forget does not ask whether the compute has come back': make_bug(
        'ecomp.scheduler.operations.audit:Repairs._release', drop_operand('is_alive'), 'forgotten_while_taking'),
    'forget does not note what it releases': make_bug('ecomp.scheduler.operations.audit:Repairs._release',
        drop_argument('release', 'note_released'), 'frozen_forget_and_reused'),
    'two takers are not told from each other': make_bug(
        'ecomp.agent.queue:Taker._claim', never('entry', 'taker_revision'), 'cleared_and_created_larger'),
    # A restored etcd
    'a compute that publishes leaves the queue entry': make_bug(
        'ecomp.agent.instance.records:_publish', drop_statement('entry', 'Delete'), 'new_compute_behind_acceptance'),
    'a half-done destroy is published as living': make_bug(
        'ecomp.agent.instance.records:decide_republish', never('DESTROYING'), 'destroyed_half_and_restored'),
    'a compute that publishes does not restore names': make_bug(
        'ecomp.agent.instance.records:_publish', replace_assignment('change', '([], [])'), 'accepted_and_destroyed'),
    'a compute that publishes does not count quotas': make_bug(
        'ecomp.agent.instance.records:_restore_shared', never('is_uncharged'), 'accepted_by_two'),
    'a compute that publishes does not restore groups': make_bug(
        'ecomp.shared.names:rejoin_group', replace_return('([unchanged], [])'), 'accepted_and_destroyed'),
    # Claims of another attempt, and what may run on a silent compute (rule: claim-stays)
    'the claim of another attempt is moved to another compute': make_bug(
        'ecomp.placement.allocations:claim', never('elsewhere'), 'queued_after_a_restore'),
    'an attempt takes all claims for its own': make_bug('ecomp.scheduler.placing.create:create',
        replace_assignment('movable', 'set(order.instances)'), 'resumed_as_it_is_published'),
    'undo releases claims that the attempt did not make': make_bug('ecomp.scheduler.placing.session:Session.undo',
        replace_condition('(releasable := self.attempted)', 'releasable', 'movable'), 'resumed_as_it_is_published'),
    'a taker does not ask whether a silent compute may run it': make_bug(
        'ecomp.agent.queue:Taker._may_run_elsewhere', return_constant(False), 'new_compute_after_restoring_both'),
    'any key on a lease proves that its compute lives': make_bug('ecomp.model.host:list_unproven',
        replace_assignment('alive', _ON_A_LEASE), 'new_compute_beside_a_restored_key'),
    'a compute that publishes ignores what was destroyed in a queue': make_bug(
        'ecomp.agent.instance.records:decide_republish', drop_operand('was_destroyed', 'present'),
        'destroyed_in_a_restored_queue'),
    'forget without --fenced does not ask for claims': make_bug(
        'ecomp.scheduler.operations.forget:find_obstacle', never('consumers', 'fenced'), 'forgotten_after_a_restore'),
    'a taker releases the claim of an instance that has a domain here': make_bug(
        'ecomp.agent.queue:Taker._release_dead_claims', drop_operand('guests'), 'state_directory_lost_after_a_restore'),
    'a request is ended in error although another compute holds a claim for it': make_bug(
        'ecomp.agent.queue:Taker.refuse', never('read_consumer'), 'refused_after_a_restore'),
    'a request is left alone for ever once another compute held a claim for it': make_bug(
        'ecomp.agent.queue:Taker._is_held_elsewhere', drop_statement('discard'), 'forget_and_taker'),
    # Claims that are checked a second time
    'the keeper does not look again before it releases': make_bug(
        'ecomp.agent.host.claims:ClaimKeeper._find_needed', replace_return('set()'), 'claim_keeper'),
    'a release does not keep what is wanted': make_bug(
        'ecomp.placement.allocations:release', replace_assignment('excluded', '()'), 'keeper_and_create'),
    'a destroy out of a queue does not compare the entry': make_bug(
        'ecomp.scheduler.changes.change:_prepare_dequeue', drop_operand('entry', 'Unchanged'), 'taken_and_destroyed'),
    'a destroy does not compare the request': make_bug('ecomp.scheduler.changes.change:make_tombstone',
        replace_assignment('conditions', "[Unchanged('/nothing', 0)]"), 'destroyed_twice_beside_another'),
    'an address is not written for clients of 2019': make_bug(
        'ecomp.agent.instance.instances:Instances.record_addresses', drop_statement('Put', 'append'),
        'built_and_destroyed'),
    'an attempt does not look for a delivery once it is announced': make_bug(
        'ecomp.scheduler.placing.create:_Creation.announce', replace_return('{}'), 'one_uuid_twice',
        'resume_with_losses'),
}  # fmt: skip
PAIRED = {
    'neither the mark nor the lease fences a taker': make_pair(
        make_bug('ecomp.shared.ends:deliver', replace_assignment('conditions', '[]')),
        make_bug('ecomp.shared.presence:Presence._set_fence', drop_statement('fence')), 'frozen_taker_forgotten'),
    'a move compares neither its mark nor the queue entry': make_pair(
        make_bug('ecomp.shared.ends:deliver', replace_assignment('conditions', '[]')),
        make_bug('ecomp.agent.queue:Taker._move', drop_operand('revision', 'Unchanged')), 'taken_and_destroyed'),
    'a mark read back compares neither its lease nor its compute, and a claim is moved to another compute': make_pair(
        make_bug('ecomp.store.client:_is_written', drop_operand('entry', 'put', 'lease', 'encode')),
        make_bug('ecomp.placement.allocations:claim', never('elsewhere')), *('taker_key_removed', 'two_takers')),
    "a taker neither leaves alone what may run elsewhere nor another compute's claim": make_pair(
        make_bug('ecomp.agent.queue:Taker._may_run_elsewhere', return_constant(False)),
        make_bug('ecomp.placement.allocations:claim', never('elsewhere')),
        *('new_compute_after_a_restore', 'new_compute_beside_a_living_one')),
    'a create neither reads earlier claims nor leaves them where they are': make_pair(
        make_bug('ecomp.scheduler.placing.session:read_earlier_claims', return_constant(({}, {}))),
        make_bug('ecomp.placement.allocations:claim', never('elsewhere')), 'resumed_after_a_restore'),
    'neither a create nor its delivery looks for an earlier record': make_pair(
        make_bug('ecomp.scheduler.placing.create:_find_deliveries', return_constant({})),
        make_bug('ecomp.shared.ends:deliver', drop_statement('record', 'append')), 'destroyed_and_asked_again'),
    'forget neither refuses nor looks before it releases': make_pair(
        make_bug('ecomp.scheduler.operations.forget:forget', never('reason')),
        make_bug('ecomp.scheduler.operations.audit:Repairs._release', never('is_alive')), 'forget_and_create'),
}  # fmt: skip
