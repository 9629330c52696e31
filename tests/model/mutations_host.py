"""Bugs that are planted in a compute's handling of instances, its provider and its key."""

from __future__ import annotations

from tests.model.planting import (
    drop_argument,
    drop_operand,
    drop_statement,
    make_bug,
    never,
    replace_assignment,
    replace_condition,
    replace_handler,
    return_constant,
)

HOST = {
    'a record is trusted wherever it is': make_bug(
        'ecomp.agent.instance.records:parse_old_record', drop_argument('from_json', 'compute'), 'forged_records'
    ),
    'an inventory is corrected while it is closed': make_bug(
        'ecomp.agent.host.provider:Registration.register',
        drop_argument('set_inventory', 'is_closing'),
        'closed_during_check',
    ),
    'what fails frees what the instance shares elsewhere': make_bug(
        'ecomp.agent.instance.records:Records.end', replace_assignment('other_requests', '[]'), 'requested_of_two'
    ),
    'a compute builds what placement does not confirm': make_bug(
        'ecomp.agent.instance.instances:Instances.build', never('claim_fault'), 'unconfirmed'
    ),
    'an address whose record was lost is left': make_bug(
        'ecomp.agent.instance.records:Records.remove_stale_address', return_constant(None), 'record_removed_of_active'
    ),
    'a half-built guest whose record was lost is called built': make_bug(
        'ecomp.agent.instance.instances:Instances.build',
        replace_assignment('is_begun', 'known is not None'),
        'record_removed_of_half_a_guest',
    ),
    'a built guest that is off is built over': make_bug(
        'ecomp.agent.instance.instances:Instances.build', drop_operand('is_ours'), 'off_before_it_was_active'
    ),
    'a guest that ran is recorded as off once its record is lost': make_bug(
        'ecomp.agent.instance.instances:Instances._adopt',
        replace_condition('is_off', 'is_off', 'remembered'),
        'power_fails_without_a_record',
    ),
    'what a state directory lacks is never written': make_bug(
        'ecomp.agent.instance.records:Records.recheck', drop_statement('repair'), 'older_state_directory'
    ),
    'what ended here may wait once more': make_bug(
        'ecomp.agent.instance.records:_end_queued', return_constant(True), 'destroyed_and_queued_again'
    ),
    'a start does not ask what has ended': make_bug(
        'ecomp.agent.compute:record_missed_ends', drop_statement('record_end'), 'built_and_destroyed'
    ),
    'a uuid used again is remembered as ended': make_bug(
        'ecomp.agent.host.state:Memory._save', drop_statement('_end_times', 'pop'), 'uuid_reused_and_rebooted'
    ),
    'a guest is started without a look at its request': make_bug(
        'ecomp.agent.instance.instances:Instances._resume', drop_statement('check_request'), 'evacuated_and_back'
    ),
    'what was destroyed on a forgotten host stays there': make_bug(
        'ecomp.agent.instance.instances:Instances.find_forgotten', return_constant({}), 'forgotten_with_a_guest'
    ),
    'a task without a thread is in work for ever': make_bug(
        'ecomp.agent.planner:Planner.hand_back', drop_statement('_finish'), 'no_thread'
    ),
    'one guest without an answer stops its host': make_bug(
        'ecomp.agent.planner:Planner._read_addresses',
        replace_handler('Unreachable', 'EcompError'),
        'addresses_unavailable',
    ),
    'a copy of a compute is the same compute': make_bug(
        'ecomp.store.presence:Presence._read_entry', never('_revision', '_base_value'), 'copied_host'
    ),
    'a full etcd takes no deletes of a compute without a lease': make_bug(
        'ecomp.store.presence:Presence._publish', never('_revision'), 'etcd_full'
    ),
    'a compute does not keep its presence': make_bug(
        'ecomp.store.presence:Presence._publish', drop_argument('Put', 'lease'), 'one_name'
    ),
    'a compute that reports its room is fenced by what it reported before': make_bug(
        'ecomp.store.presence:Presence._update_value', never('written'), 'sample_while_hints_are_published'
    ),
}
