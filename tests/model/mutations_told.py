"""Bugs that show only in one step, in a message, or after time, a return or a restore.

PAIRED has bugs in two checks that cover each other: a bug in only one of them has no effect.
"""

from __future__ import annotations

from tests.model.planting import (
    always,
    asks,
    assigns,
    both,
    bug,
    drops,
    moves_first,
    never,
    pair,
    results,
    returns,
    without,
    without_argument,
)

_ON_A_LEASE = '{keys.last(key) for key, each in presence.items() if each.lease}'
TOLD = {
    # Wrong for one step, and right again at rest
    'a destroy releases the claim before the domain is undefined': bug(
        'ecomp.agent.instance.instances:Instances._remove', moves_first('_release'), 'built_and_destroyed'
    ),
    # What a command reports to its user
    'a delivery whose answer is lost is called undone': bug(
        'ecomp.scheduler.placing.claim:deliver', never('get', 'request'), 'lost_delivery', 'create_with_losses'
    ),
    'a destroy whose answer is lost is called not accepted': bug(
        'ecomp.scheduler.changing.change:until_accepted', always('is_unknown'), 'destroy_with_losses'
    ),
    'an attempt that releases nothing calls its claim released': bug(
        'ecomp.scheduler.placing.create:Attempt._release', always('abandon'), 'one_name', 'create_with_losses'
    ),
    'a name is taken from who still has it': bug(
        'ecomp.scheduler.looking.find:free_name', never('found', 'state'), 'one_name', 'name_of_destroyed'
    ),
    # Drains, and time
    'a drain does not look for claims': bug(
        'ecomp.scheduler.operating.decommission:drained', without('of_provider'), 'drain_beside_orphans'
    ),
    'a drain does not wait for attempts': bug(
        'ecomp.scheduler.operating.decommission:drained', without('placing', place=-1), 'drain_beside_a_frozen_create'
    ),
    'a drain does not wait for takers': bug(
        'ecomp.scheduler.operating.decommission:drained', without('taking', place=-1), 'drain_beside_a_frozen_claim'
    ),
    'a create that was slow does not ask placement again': bug(
        'ecomp.scheduler.placing.create:Attempt.claim', never('FRESH'), 'drain_and_slow_create'
    ),
    'a taker does not read its traits before it takes': bug(
        'ecomp.agent.queue:Puller._is_open', returns(True), 'drain_beside_a_frozen_taker'
    ),
    'a refusal of placement lasts for ever': bug(
        'ecomp.agent.queue:Puller.step', drops('_refused'), 'refused_and_room_again'
    ),
    # Computes that are forgotten, come back, or are new
    'forget does not ask whether the compute has come back': bug(
        'ecomp.scheduler.operating.decommission:_Removal._release', without('is_alive'), 'forgotten_as_it_takes'
    ),
    'forget does not note what it releases': bug(
        'ecomp.scheduler.operating.decommission:_Removal._release',
        without_argument('release', 'note_released'),
        'frozen_forget_and_used_again',
    ),
    'two takers are not told from each other': bug(
        'ecomp.agent.queue:Taker._claim', never('entry', 'mark'), 'cleared_and_asked_for_more'
    ),
    # A restored etcd
    'a compute that publishes leaves the queue entry': bug(
        'ecomp.agent.instance.records:_publish', drops('entry', 'Delete'), 'new_compute_behind_acceptance'
    ),
    'a half-done destroy is published as living': bug(
        'ecomp.agent.instance.records:running', never('DESTROYING'), 'destroyed_half_and_restored'
    ),
    'a compute that publishes does not restore names': bug(
        'ecomp.agent.instance.records:_publish', assigns('change', '([], [])'), 'accepted_and_destroyed'
    ),
    'a compute that publishes does not count quotas': bug(
        'ecomp.agent.instance.records:_publish', never('is_new', 'queued'), 'accepted_by_two'
    ),
    'a compute that publishes does not restore groups': bug(
        'ecomp.store.sharing:rejoined', results('([unchanged], [])'), 'accepted_and_destroyed'
    ),
    # Claims of another attempt, and what may run on a silent compute (rule 13)
    'the claim of another attempt is moved to another compute': bug(
        'ecomp.placement.allocations:claim', never('elsewhere'), 'queued_after_a_restore'
    ),
    'an attempt takes all claims for its own': bug(
        'ecomp.scheduler.placing.create:create',
        assigns('movable', 'set(wanted.instances)'),
        'resumed_as_it_is_published',
    ),
    'undo releases claims that the attempt did not make': bug(
        'ecomp.scheduler.placing.create:Attempt.undo',
        asks('(mine := self.tried)', 'mine', 'movable'),
        'resumed_as_it_is_published',
    ),
    'a taker does not ask whether a silent compute may run it': bug(
        'ecomp.agent.queue:Puller._may_run_elsewhere', returns(False), 'new_compute_after_restoring_both'
    ),
    'any key on a lease proves that its compute lives': bug(
        'ecomp.model.host:unproven', assigns('alive', _ON_A_LEASE), 'new_compute_beside_a_restored_key'
    ),
    'a compute that publishes ignores what was destroyed in a queue': bug(
        'ecomp.agent.instance.records:running', without('was_destroyed', 'wish'), 'destroyed_in_a_restored_queue'
    ),
    'forget without --fenced does not ask for claims': bug(
        'ecomp.scheduler.operating.decommission:_allowed', never('held', 'fenced'), 'forgotten_after_a_restore'
    ),
    'a taker releases the claim of an instance that has a domain here': bug(
        'ecomp.agent.queue:Puller._look', never('instance', 'here'), 'state_directory_lost_after_a_restore'
    ),
    'a request is ended in error although another compute holds a claim for it': bug(
        'ecomp.agent.queue:Taker.refuse', never('consumer'), 'refused_after_a_restore'
    ),
    'a request is left alone for ever once another compute held a claim for it': bug(
        'ecomp.agent.queue:Puller._is_held_elsewhere', drops('discard'), 'forget_and_taker'
    ),
    # Claims that are checked a second time
    'the keeper does not look again before it releases': bug(
        'ecomp.agent.host.claims:ClaimKeeper._wanted', results('set()'), 'claim_keeper'
    ),
    'a release does not keep what is wanted': bug(
        'ecomp.placement.allocations:release', assigns('kept', '()'), 'fix_and_create'
    ),
    'a destroy out of a queue does not compare the entry': bug(
        'ecomp.scheduler.changing.change:_out_of_queue', without('entry', 'Unchanged'), 'taken_and_destroyed'
    ),
    'a destroy does not compare the request': bug(
        'ecomp.scheduler.changing.change:_transaction', assigns('unchanged', '[]'), 'destroyed_twice_beside_another'
    ),
    'an address is not written for clients of 2019': bug(
        'ecomp.agent.instance.instances:Instances.address', drops('booted'), 'built_and_destroyed'
    ),
    'an attempt does not look for a delivery once it is announced': bug(
        'ecomp.scheduler.placing.create:Attempt.announce', results('{}'), 'one_uuid_twice', 'resume_with_losses'
    ),
}
PAIRS = {
    'neither the mark nor the lease fences a taker': pair(
        bug('ecomp.agent.queue:Taker._move', without('mark_key', 'Unchanged')),
        bug('ecomp.store.presence:Presence._hold', drops('fence')),
        'frozen_taker_forgotten',
    ),
    'a move compares neither its mark nor the queue entry': bug(
        'ecomp.agent.queue:Taker._move',
        both(without('mark_key', 'Unchanged'), without('queue_key', 'Unchanged')),
        'taken_and_destroyed',
    ),
    'a mark read back compares neither its lease nor its compute, and a claim is moved to another compute': pair(
        bug('ecomp.agent.queue:Taker._mark', assigns('ours', 'entry is not None')),
        bug('ecomp.placement.allocations:claim', never('elsewhere')),
        *('mark_removed', 'two_takers'),
    ),
    'a taker neither leaves alone what may run elsewhere nor another compute\'s claim': pair(
        bug('ecomp.agent.queue:Puller._may_run_elsewhere', returns(False)),
        bug('ecomp.placement.allocations:claim', never('elsewhere')),
        *('new_compute_after_a_restore', 'new_compute_beside_a_living_one'),
    ),
    'a create neither reads earlier claims nor leaves them where they are': pair(
        bug('ecomp.scheduler.placing.create:earlier_claims', returns(({}, {}))),
        bug('ecomp.placement.allocations:claim', never('elsewhere')),
        'resumed_after_a_restore',
    ),
    'neither a create nor its delivery looks for an earlier record': pair(
        bug('ecomp.scheduler.placing.create:_before', returns({})),
        bug('ecomp.scheduler.placing.claim:deliver', drops('record', 'append')),
        'destroyed_and_asked_again',
    ),
    'forget neither refuses nor looks before it releases': pair(
        bug('ecomp.scheduler.operating.decommission:_allowed', never('reason')),
        bug('ecomp.scheduler.operating.decommission:_Removal._release', never('is_alive')),
        'forget_and_create',
    ),
}
