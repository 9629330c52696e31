"""Bugs that are planted in a compute's handling of instances, its provider and its key."""

from __future__ import annotations

from tests.model.planting import (
    asks,
    assigns,
    bug,
    catches,
    drops,
    never,
    returns,
    without,
    without_argument,
)

HOST = {
    'a record is trusted wherever it is': bug(
        'ecomp.agent.instance.records:older_record', without_argument('from_json', 'compute'), 'foreign_records'
    ),
    'an inventory is corrected while it is closed': bug(
        'ecomp.agent.host.provider:Registration.register',
        without_argument('set_inventory', 'is_closing'),
        'closed_while_it_is_kept',
    ),
    'what fails frees what the instance shares elsewhere': bug(
        'ecomp.agent.instance.records:Records.end', assigns('others', '[]'), 'asked_of_two'
    ),
    'a compute builds what placement does not confirm': bug(
        'ecomp.agent.instance.instances:Instances.build', never('differs'), 'unconfirmed'
    ),
    'an address whose record was lost is left': bug(
        'ecomp.agent.instance.records:Records.lost', returns(None), 'record_removed_of_active'
    ),
    'a half-built guest whose record was lost is called built': bug(
        'ecomp.agent.instance.instances:Instances.build',
        assigns('is_begun', 'known is not None'),
        'record_removed_of_half_a_guest',
    ),
    'a built guest that is off is built over': bug(
        'ecomp.agent.instance.instances:Instances.build', without('is_ours'), 'off_before_it_was_active'
    ),
    'a guest that ran is recorded as off once its record is lost': bug(
        'ecomp.agent.instance.instances:Instances._adopt', asks('is_off', 'is_off', 'remembered'),
        'power_fails_without_a_record',
    ),
    'what a state directory lacks is never written': bug(
        'ecomp.agent.instance.records:Records.recheck', drops('put_right'), 'older_state_directory'
    ),
    'what ended here may wait once more': bug(
        'ecomp.agent.instance.records:_end_waiting', returns(True), 'destroyed_and_waiting_again'
    ),
    'a start does not ask what has ended': bug(
        'ecomp.agent.compute:note_ends', drops('ended'), 'built_and_destroyed'
    ),
    'a uuid used again is remembered as ended': bug(
        'ecomp.agent.host.state:Memory._keep', drops('_ended', 'pop'), 'used_again_and_rebooted'
    ),
    'a task without a thread is in work for ever': bug(
        'ecomp.agent.planner:Planner.hand_back', drops('_end'), 'no_thread'
    ),
    'one guest without an answer stops its host': bug(
        'ecomp.agent.planner:Planner._addresses', catches('Unreachable', 'EcompError'), 'unheard'
    ),
    'a copy of a compute is the same compute': bug(
        'ecomp.store.presence:Presence._entry', never('_revision', '_who'), 'cloned'
    ),
    'a full etcd takes no deletes of a compute without a lease': bug(
        'ecomp.store.presence:Presence._publish', never('_revision'), 'full'
    ),
    'a compute does not keep its presence': bug(
        'ecomp.store.presence:Presence._publish', without_argument('Put', 'lease'), 'one_name'
    ),
    'a compute that reports its room is fenced by what it reported before': bug(
        'ecomp.store.presence:Presence._says_so', never('written'), 'few_while_hints_are_put'
    ),
}
