"""Planted bugs of adoption and release."""

from __future__ import annotations

from tests.model import planting
from tests.model.planting import drop_statement, make_bug, make_pair, never, replace_assignment, replace_condition

_NOT_DISABLED = make_bug(
    'ecomp.agent.compute:Compute._measure',
    replace_condition('attempted', 'attempted', 'DISABLED'),
    'adopted_and_repeated',
)
_MARK_STAYS = make_bug(
    'ecomp.agent.instance.instances:Instances._remove', never('domain', 'job'), 'released_and_stopped'
)
ADOPTED = {
    'an adoption has its host leave guests out before it is disabled': _NOT_DISABLED,
    'an adoption does not disable its host': make_pair(
        make_bug('ecomp.scheduler.placing.adopt:adopt', drop_statement('apply_adoption')), _NOT_DISABLED,
        'adopted_beside_a_create'),
    'reserved is lowered after the claim': make_bug(
        'ecomp.scheduler.placing.adopt:adopt', drop_statement('_require_unreserved'), 'adopted_and_interrupted'),
    'an adoption names guests that it has adopted before': make_bug('ecomp.scheduler.placing.adopt:adopt',
        replace_assignment('unmarked', 'list(guests)'), 'released_beside_an_adoption'),
    'an undone adoption enables its host before it reserves again': make_bug(
        'ecomp.scheduler.placing.adopt:_undo', never('read_foreign'), 'adopted_and_interrupted'),
    'an adopted guest is destroyed like one of ours': make_pair(
        make_bug(
            'ecomp.agent.instance.instances:Instances.destroy',
            planting.replace_argument('_remove', 1, 'Destroy(instance, self.compute)'),
        ),
        _MARK_STAYS,
        'released_and_stopped',
    ),
    'a release leaves the mark': _MARK_STAYS,
    'a release does not reserve': make_bug(
        'ecomp.agent.instance.instances:Instances._remove', drop_statement('on_release'), 'released_and_adopted_again'),
    'a release that is repeated does not reserve': make_bug('ecomp.agent.instance.instances:Instances._remove',
        replace_condition('domain is not None and domain.adopted_by', 'domain', 'job'), 'released_and_stopped'),
    'a guest that is being released is left out': make_bug(
        'ecomp.agent.compute:Compute._is_adopting', planting.drop_operand('is_tombstone'), 'released_and_stopped'),
    'a domain is adopted without a mark': make_bug(
        'ecomp.agent.instance.instances:Instances.adopt', drop_statement('set_adoption'), 'adopted_and_repeated'),
    'a mark without a claim stays': make_bug('ecomp.agent.compute:Compute._reconcile_claims',
        drop_statement('set_adoption'), 'adopted_after_both_snapshots'),
    'an adopted guest without a claim is published again': make_bug(
        'ecomp.agent.instance.records:republish', never('is_adopted', 'claimed_on'), 'adopted_after_both_snapshots'),
}  # fmt: skip
