"""Planted bugs of rename and protect."""

from __future__ import annotations

from tests.model.planting import drop_operand, drop_statement, make_bug, never, replace_call

CHANGED = {
    'a rename does not release the old name': make_bug(
        'ecomp.scheduler.placing.modify:rename', replace_call('release_name', '([], [])'), 'renamed_beside_create'
    ),
    'a rename does not compare the keys of its names': make_bug(
        'ecomp.scheduler.placing.modify:_rewrite', drop_operand('conditions'), 'renamed_beside_create'
    ),
    'a change does not compare the request': make_bug(
        'ecomp.scheduler.placing.modify:_rewrite', drop_operand('entry', 'Unchanged'), 'renamed_beside_stop'
    ),
    'an end releases the name in the record': make_bug(
        'ecomp.agent.instance.instances:Instances.destroy',
        replace_call('hold', 'record'),
        'renamed_beside_destroy',
    ),
    'a destroy does not look at the protection': make_bug(
        'ecomp.scheduler.changes.change:destroy', drop_statement('require_unprotected'), 'protected_beside_destroy'
    ),
    'an evacuation looks at the protection only in its plan': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._settle',
        never('is_protected'),
        'protected_beside_evacuation',
    ),
    'an apply does not look at the protection': make_bug(
        'ecomp.model.apply:plan_steps', replace_call('_keep_protected', 'step'), 'protected_beside_replace'
    ),
    'a compute that publishes takes back a change': make_bug(
        'ecomp.agent.instance.records:decide_republish', never('changed'), 'renamed_and_restored'
    ),
    'a compute that publishes takes back a stop with a change': make_bug(
        'ecomp.agent.instance.records:decide_republish', drop_operand('power', place=1), 'stopped_after_a_restore'
    ),
    'a compute that publishes restores the name of its own record': make_bug(
        'ecomp.agent.instance.records:decide_republish',
        replace_call('copy_changes', 'record'),
        'renamed_again_after_a_restore',
    ),
    'a compute that publishes leaves the old name': make_bug(
        'ecomp.agent.instance.records:_publish', replace_call('release_name', '([], [])'), 'renamed_and_restored'
    ),
}
