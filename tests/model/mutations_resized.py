"""Planted bugs of resize and rebuild."""

from __future__ import annotations

from tests.model.mutations_changed import CHANGED
from tests.model.planting import (
    Bug,
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
        _RESIZE, replace_assignment('wanted', 'request.allocate(size)'), _REBOOTED),
    'a resize charges its target only': make_bug(_RESIZE, replace_argument('change_charge', 3, 'size'), _REBOOTED),
    'a new boot is evidence of a new size': make_bug(
        'ecomp.model.guest:Guest.runs_with', replace_return('self.running'), _REBOOTED),
    'a resize does not compare its attempt': make_bug(
        _RESIZE, drop_argument('merge_changes', 'attempt'), 'resize_frozen'),
    'a claim is set to a request read before its generation': make_bug(
        'ecomp.placement.allocations:correct_claim', move_first('read_request'), 'resize_frozen'),
    'attempts are not read before a claim is corrected': make_bug(
        'ecomp.shared.attempts:read_settled_request', replace_call('read_pending_instances', '()'), 'resize_frozen'),
    'a claim that differs is left': make_bug(
        'ecomp.agent.host.claims:ClaimKeeper.reconcile', drop_statement('_correct'), 'resize_frozen'),
    'the end refunds what the record has': make_bug(
        'ecomp.model.record:copy_holdings', drop_argument('replace', 'resources'), 'resized_beside_destroy'),
    'a guest that has started with the resize before is unlike its record': make_bug(
        'ecomp.agent.instance.instances:Instances.resize', drop_statement('record', 'resources', 'resize'),
        'resized_twice'),
}  # fmt: skip

_OF = 'ecomp.agent.instance.'
_REBUILD, _REPLACE_GUEST = f'{_OF}instances:Instances.rebuild', f'{_OF}instances:Instances._replace_guest'
_MAKE_SPEC, _ADOPT = f'{_OF}instances:GuestTemplate.make_spec', f'{_OF}instances:Instances._adopt'
_IS_ABOVE = replace_assignment('is_defined', 'guest is not None and guest.rebuilt > request.rebuild')
_VANISHED_FIRST = replace_call(
    '_plan_rebuild', 'instance not in observations.vanished and _plan_rebuild(parsed, record)'
)
_BEGIN_WITH_KEYS = replace_assignment('record', 'replace(stored, rebuilt=begun, attempts=0)')
_END_WITH_KEYS = replace_assignment('older', 'stored.mark_off(self.now())')
_RELEASE = replace_assignment('failure', '(self._find_failure(attempt, error), self._release_claim(instance))[0]')
REBUILT = {
    'a rebuild whose number the mark has is repeated': make_bug(_REBUILD, _IS_ABOVE, 'rebuilt_and_state_lost'),
    'the mark lacks the number': make_bug(_MAKE_SPEC, drop_argument('GuestSpec', 'rebuild'), 'rebuilt_and_state_lost'),
    'a new record lacks the number': make_bug(
        'ecomp.model.record:make_record', drop_statement('fields', 'rebuild'), 'rebuild_failed_and_all_lost'),
    'a lost record was that of an end': make_bug(
        _ADOPT, drop_statement('remembered', 'rebuilt'), 'rebuilt_without_record'),
    'what vanished in a rebuild has ended': make_bug(f'{_OF}plan:plan', _VANISHED_FIRST, 'rebuilt_without_domain'),
    'a failed rebuild releases its claim': make_bug(_REPLACE_GUEST, _RELEASE, 'rebuild_failed'),
    'a failed rebuild keeps an image without a disk': make_bug(
        _REPLACE_GUEST, replace_assignment('is_kept', 'True'), 'rebuild_failed'),
    'a rebuilt guest keeps its host keys': make_bug(_REBUILD, _BEGIN_WITH_KEYS, 'rebuilt_and_restored'),
    'an older record keeps its host keys': make_bug(_REBUILD, _END_WITH_KEYS, 'rebuilt_and_state_lost'),
    'a rebuild takes a destroy back': Bug(CHANGED['a change compares no request'].plants, ('rebuilt_beside_destroy',)),
    'an older etcd takes a rebuild back': Bug(CHANGED['a change is taken back'].plants, ('rebuilt_and_restored',)),
}  # fmt: skip
