"""Planted bugs of resize."""

from __future__ import annotations

from tests.model.planting import (
    drop_argument,
    drop_statement,
    make_bug,
    move_first,
    replace_argument,
    replace_assignment,
    replace_call,
    replace_return,
)

_RESIZE, _REBOOTED = 'ecomp.scheduler.placing.modify:resize', 'resized_down_and_rebooted'
RESIZED = {
    'a claim is lowered before the guest starts': make_bug(
        _RESIZE, replace_assignment('wanted', 'request.allocate(size)'), _REBOOTED
    ),
    'a resize charges its target only': make_bug(_RESIZE, replace_argument('change_charge', 3, 'size'), _REBOOTED),
    'a new boot is evidence of a new size': make_bug(
        'ecomp.model.guest:Guest.runs_with', replace_return('self.running'), _REBOOTED
    ),
    'a resize does not compare its attempt': make_bug(
        _RESIZE, drop_argument('merge_changes', 'attempt'), 'resize_frozen'
    ),
    'a claim is set to a request read before its generation': make_bug(
        'ecomp.placement.allocations:correct_claim', move_first('read_request'), 'resize_frozen'
    ),
    'attempts are not read before a claim is corrected': make_bug(
        'ecomp.shared.attempts:read_settled_request', replace_call('read_pending_instances', '()'), 'resize_frozen'
    ),
    'a claim that differs is left': make_bug(
        'ecomp.agent.host.claims:ClaimKeeper.check_claims', drop_statement('_correct'), 'resize_frozen'
    ),
    'the end refunds what the record has': make_bug(
        'ecomp.model.record:copy_holdings', drop_argument('replace', 'resources'), 'resized_beside_destroy'
    ),
    'a guest that has started with the resize before is unlike its record': make_bug(
        'ecomp.agent.instance.instances:Instances.resize',
        drop_statement('record', 'resources', 'resize'),
        'resized_twice',
    ),
}
