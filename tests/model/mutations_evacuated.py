"""Bugs that are planted in evacuations: what they compare, what they write, and what they take over."""

from __future__ import annotations

from tests.model.planting import (
    Constant,
    drop_operand,
    make_bug,
    never,
    replace_argument,
    replace_assignment,
    replace_call,
    replace_condition,
    replace_return,
    return_constant,
)

EVACUATED = {
    'an evacuation does not compare the old request': make_bug(
        'ecomp.scheduler.placing.stack:_make_removal',
        replace_call('make_tombstone', '([], make_tombstone(store, entries, removal.replaced_by)[1])'),
        'evacuated_beside_destroy',
    ),
    'an evacuation does not compare that the host is silent': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._settle',
        replace_argument('partial', 3, "Unchanged('/nothing', 0)"),
        'evacuated_while_its_host_returns',
    ),
    'an evacuation writes no tombstone': make_bug(
        'ecomp.scheduler.placing.stack:deliver_with_removals',
        replace_call('_make_removal', '([], [])'),
        'evacuated_twice',
    ),
    'a tombstone does not name its replacement': make_bug(
        'ecomp.scheduler.placing.stack:_make_removal',
        replace_argument('make_tombstone', 2, 'None'),
        'evacuated_twice',
    ),
    'an evacuation does not move the name': make_bug(
        'ecomp.scheduler.placing.stack:deliver_with_removals',
        replace_call('reserve_names', '([], [])'),
        'evacuated_twice',
    ),
    'an evacuation does not move the place in a group': make_bug(
        'ecomp.scheduler.placing.stack:deliver_with_removals',
        replace_call('join_group', '([], [])'),
        'evacuated_twice',
    ),
    "an evacuation does not note the new instance in its stack's key": make_bug(
        'ecomp.scheduler.queries.stacks:make_move', replace_return('([silent], [])'), 'evacuated_beside_replace'
    ),
    'the end of an evacuated instance releases the charge of its replacement': make_bug(
        'ecomp.store.sharing:release_shared_keys', drop_operand('replaced_by'), 'evacuated_while_its_host_returns'
    ),
    'a host forget releases the charge of the replacement': make_bug(
        'ecomp.scheduler.operations.decommission:_make_end_record',
        replace_assignment('replaced_by', 'None'),
        'evacuated_beside_forget',
    ),
    'a killed evacuation is never continued': make_bug(
        'ecomp.scheduler.placing.stack:check_previous', replace_condition('False', 'host', 'pid'), 'evacuation_repeated'
    ),
    'a claim that was not delivered is kept': make_bug(
        'ecomp.scheduler.placing.evacuate:evacuate', replace_call('undo', 'None'), 'evacuated_beside_forget'
    ),
    'a failed evacuation counts guests that stay': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._describe_moved',
        replace_return("f'{len(self.guests)} instances were evacuated before' if self.moved else ''"),
        'evacuation_repeated',
    ),
    'a failed evacuation says that it changed nothing': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._describe_moved', return_constant(''), 'evacuation_repeated'
    ),
    'an evacuation that is overtaken says that it changed nothing': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._announce',
        replace_assignment('outcome', 'UNCHANGED'),
        'evacuated_twice',
    ),
    'an evacuation overwrites a request with its uuid': make_bug(
        'ecomp.scheduler.placing.stack:deliver_with_removals',
        replace_assignment('unused', '[]'),
        'evacuated_beside_create_of_its_replacement',
    ),
    'after an unknown outcome any request is its own': make_bug(
        'ecomp.scheduler.placing.claim:deliver',
        replace_assignment('is_ours', 'True'),
        'evacuated_beside_create_of_its_replacement',
    ),
    'a create is NOTIFIED of an instance that has moved': make_bug(
        'ecomp.scheduler.placing.create:check_same', never('is_destroying'), 'evacuated_beside_resume'
    ),
    'an evacuation does not plan again after a lost race for room': make_bug(
        'ecomp.scheduler.placing.evacuate:MAX_ROUNDS', Constant(1), 'evacuated_beside_a_queue'
    ),
    'an evacuated guest of a queue loses its query': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._settle',
        replace_assignment('fields', 'request.copy_fields(instance=new, replaces=old, stages=stages, query=None)'),
        'evacuated_group_of_a_queue',
    ),
    'an evacuation plans without groups': make_bug(
        'ecomp.model.moves:_Plan.get_group', return_constant(None), 'evacuated_group_of_a_queue'
    ),
    # A compute's word is not acted on
    'a replacement on a silent host gets another uuid': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._take_claim',
        replace_condition('claimed_on in self.read_alive()', 'claimed_on', 'compute'),
        'evacuated_again_after_a_restore',
    ),
    'any key at its uuid is a replacement': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._take_claim',
        replace_condition('is_listed or (claimed_on and claimed_on != self.compute)', 'claimed_on', 'compute'),
        'evacuated_beside_forged_keys',
    ),
    "an evacuation does not compare a request with its stack's key": make_bug(
        'ecomp.scheduler.queries.stacks:find_next_place', never('known'), 'evacuated_with_forged_requests'
    ),
    'a group of one host is evacuated one by one': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._list_units',
        replace_assignment('is_united', 'False'),
        'group_evacuated_as_its_host_returns',
    ),
}
