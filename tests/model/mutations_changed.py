"""Planted bugs of rename and protect."""

from tests.model.planting import drop_operand, drop_statement, make_bug, never, replace_call

_RENAME, _REWRITE = 'ecomp.scheduler.placing.modify:rename', 'ecomp.scheduler.placing.modify:_rewrite'
_END, _REPUBLISH = 'ecomp.agent.instance.instances:Instances.destroy', 'ecomp.agent.instance.records:decide_republish'
_DESTROY, _SETTLE = 'ecomp.scheduler.changes.change:destroy', 'ecomp.scheduler.placing.evacuate:_Evacuation._settle'
CHANGED = {
    'a rename keeps the old name': make_bug(_RENAME, replace_call('release_name', '([], [])'), 'renamed_beside_create'),
    'a rename compares no names': make_bug(_REWRITE, drop_operand('conditions'), 'renamed_beside_create'),
    'a change compares no request': make_bug(_REWRITE, drop_operand('entry', 'Unchanged'), 'renamed_beside_stop'),
    'an end frees an old name': make_bug(_END, replace_call('copy_holdings', 'record'), 'renamed_beside_destroy'),
    'a destroy is not refused': make_bug(_DESTROY, drop_statement('require_unprotected'), 'protected_beside_destroy'),
    'an evacuation ignores a late protection': make_bug(_SETTLE, never('is_protected'), 'protected_beside_evacuation'),
    'a change is taken back': make_bug(_REPUBLISH, never('change_number'), 'renamed_and_restored'),
    'a change takes a stop back': make_bug(_REPUBLISH, drop_operand('power', place=1), 'changed_after_a_restore'),
    'an old name is published': make_bug(_REPUBLISH, replace_call('copy_changes', 'record'), 'changed_after_a_restore'),
}
