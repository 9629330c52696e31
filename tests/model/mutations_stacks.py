"""Bugs that are planted in stacks and evacuations."""

from __future__ import annotations

from tests.model.planting import (
    Constant,
    drop_operand,
    drop_statement,
    make_bug,
    make_pair,
    never,
    replace_argument,
    replace_assignment,
    replace_call,
    replace_condition,
    replace_return,
    return_constant,
)

EVACUATED = {
    'an evacuation does not compare the old request': make_bug('ecomp.scheduler.placing.session:make_removal',
        replace_call('make_tombstone', '([], make_tombstone(store, entries, removal.replaced_by)[1])'),
        'evacuated_beside_destroy'),
    'an evacuation does not compare that the host is silent': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._settle',
        replace_argument('make_move', 2, "Unchanged('/nothing', 0)"), 'evacuated_while_its_host_returns'),
    'an evacuation writes no tombstone': make_bug(
        'ecomp.scheduler.placing.session:Session.deliver', replace_call('make_removal', '([], [])'), 'evacuated_twice'),
    'a tombstone does not name its replacement': make_bug('ecomp.scheduler.placing.session:make_removal',
        replace_argument('make_tombstone', 2, 'None'), 'evacuated_twice'),
    'an evacuation does not move the name': make_bug('ecomp.scheduler.placing.session:Session.deliver',
        replace_call('reserve_names', '([], [])'), 'evacuated_twice'),
    'an evacuation does not move the place in a group': make_bug(
        'ecomp.scheduler.placing.session:Session.deliver', replace_call('join_group', '([], [])'), 'evacuated_twice'),
    "an evacuation does not note the new instance in its stack's key": make_bug(
        'ecomp.scheduler.queries.stacks:make_move', replace_return('([silent], [])'), 'evacuated_beside_replace'),
    'the end of an evacuated instance releases the charge of its replacement': make_bug(
        'ecomp.shared.ends:release_shared_keys', drop_operand('replaced_by'), 'evacuated_while_its_host_returns'),
    'a host forget releases the charge of the replacement': make_bug(
        'ecomp.scheduler.operations.audit:Repairs._release', replace_assignment('replaced_by', 'None'),
        'evacuated_beside_forget'),
    'a killed evacuation is never continued': make_bug('ecomp.scheduler.placing.session:require_ended',
        replace_condition('False', 'host', 'pid'), 'evacuation_repeated'),
    'a claim that was not delivered is kept': make_bug(
        'ecomp.scheduler.placing.evacuate:evacuate', replace_call('undo', 'None'), 'evacuated_beside_forget'),
    'a failed evacuation counts guests that stay': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation.describe_moved',
        replace_return("f'{len(self.guests)} instances were evacuated before' if self.departures else ''"),
        'evacuation_repeated'),
    'a failed evacuation says that it changed nothing': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation.describe_moved', return_constant(''), 'evacuation_repeated'),
    'an evacuation that is overtaken says that it changed nothing': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._announce', replace_assignment('outcome', 'UNCHANGED'),
        'evacuated_twice'),
    'an evacuation overwrites a request with its uuid': make_bug('ecomp.scheduler.placing.session:Session.deliver',
        replace_assignment('unused', '[]'), 'evacuated_beside_create_of_its_replacement'),
    'a create is NOTIFIED of an instance that has moved': make_bug(
        'ecomp.scheduler.placing.create:require_matching', never('is_destroying'), 'evacuated_beside_resume'),
    'an evacuation does not plan again after a lost race for room': make_bug(
        'ecomp.scheduler.placing.evacuate:MAX_ROUNDS', Constant(1), 'evacuated_beside_a_queue'),
    'an evacuated guest of a queue loses its query': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._make_request',
        replace_assignment('changes', '{"instance": instance, "replaces": request.instance, "query": None}'),
        'evacuated_group_of_a_queue'),
    'an evacuation plans without groups': make_bug(
        'ecomp.model.assign:_Plan.get_group', return_constant(None), 'evacuated_group_of_a_queue'),
    # A compute's word is not acted on
    'a replacement on a silent host gets another uuid': make_bug(
        'ecomp.scheduler.placing.evacuate:_Evacuation._take_claim',
        replace_condition('claimed_on in self.session.read_alive()', 'claimed_on', 'compute'),
        'evacuated_again_after_a_restore'),
    'any key at its uuid is a replacement': make_bug('ecomp.scheduler.placing.evacuate:_Evacuation._take_claim',
        replace_condition('is_listed or (claimed_on and claimed_on != self.compute)', 'claimed_on', 'compute'),
        'evacuated_beside_forged_keys'),
    "an evacuation does not compare a request with its stack's key": make_bug(
        'ecomp.scheduler.queries.stacks:find_next_place', never('known'), 'evacuated_with_forged_requests'),
    'a group of one host is evacuated one by one': make_bug('ecomp.scheduler.placing.evacuate:_Evacuation._list_units',
        replace_assignment('is_united', 'False'), 'group_evacuated_as_its_host_returns'),
}  # fmt: skip

STACKS = {
    # The stack's key
    'the first key of a stack is written without a check': make_bug(
        'ecomp.scheduler.placing.stack:write_stack', drop_operand('Unchanged'), 'applied_twice'),
    "a change of a stack does not compare the stack's key": make_bug(
        'ecomp.scheduler.placing.stack:_make_stack_change', drop_operand('Unchanged'), 'pruned_and_applied'),
    "an apply does not check the stack's key after it announced": make_bug(
        'ecomp.scheduler.placing.stack:_Application.announce', never('entry', 'revision'), 'applied_twice'),
    "an apply compares the stack's key neither after it announced nor as it delivers": make_pair(
        make_bug('ecomp.scheduler.placing.stack:_Application.announce', never('entry', 'revision')),
        make_bug('ecomp.scheduler.placing.stack:_make_stack_change', drop_operand('Unchanged')),
        'applied_with_two_files'),
    'a delivery is not noted in the key': make_bug(
        'ecomp.model.stack:Stack.with_delivered', replace_return('self'), 'applied_twice'),
    # Uuids
    'the incarnation does not rise': make_bug('ecomp.model.stack:Stack.make_place',
        replace_return('Place(self.name, member, int(number), self.epoch, incarnation or self.floor + 1)'),
        'applied_and_destroyed'),
    'a lost key is restored with floor 0': make_bug('ecomp.scheduler.queries.stacks:load_stack',
        replace_argument('restore_stack', 2, '0'), 'applied_without_its_key'),
    # Attempts and claims
    "a delivery compares neither its attempt nor the stack's key": make_pair(
        make_bug('ecomp.scheduler.placing.stack:_make_stack_change', drop_operand('Unchanged')),
        make_bug('ecomp.shared.ends:deliver', replace_assignment('conditions', '[]')), 'applied_twice_and_frozen'),
    'a slow apply delivers although its attempt has ended': make_bug(
        'ecomp.shared.ends:deliver', replace_assignment('conditions', '[]'), 'apply_frozen', 'apply_late'),
    'an apply takes all claims for its own': make_bug('ecomp.scheduler.placing.stack:apply_change',
        replace_assignment('movable', 'set(change.order.instances)'), 'apply_interrupted_after_a_restore'),
    "an apply neither reads earlier claims nor leaves another attempt's claim where it is": make_pair(
        make_bug('ecomp.scheduler.placing.session:read_earlier_claims', return_constant(({}, {}))),
        make_bug('ecomp.placement.allocations:claim', never('elsewhere')), 'applied_after_a_restore_beside_silence'),
    'an apply does not take over the claims of a killed one': make_bug(
        'ecomp.scheduler.placing.stack:_Application._take_over', return_constant({}), 'apply_killed'),
    'an apply that is refused keeps its claims': make_bug(
        'ecomp.scheduler.placing.session:Session.undo', never('releasable', 'movable'), 'applied_in_one_group'),
    'a new instance of a stack is not charged to the quota': make_bug(
        'ecomp.scheduler.placing.stack:_Application.deliver', replace_call('charge_quota', '([], [])'), 'apply_late'),
    'an instance that is newer than the restored key of its stack is foreign': make_bug(
        'ecomp.scheduler.queries.stacks:_adopt', replace_assignment('is_newer', 'False'), 'applied_after_a_restore'),
    'a killed apply is never taken over': make_bug(
        'ecomp.scheduler.placing.session:require_ended', replace_condition('False', 'host', 'pid'), 'apply_killed'),
    'an apply is placed on disabled computes': make_bug('ecomp.scheduler.placing.session:Session.read_offer',
        replace_argument('read_candidates', 1, "f'{query}&root_required=COMPUTE_STATUS_DISABLED'"),
        'applied_and_disabled'),
    # Replacements, and what is destroyed
    'a removal does not compare the request, and a destroy does not note the end of the entry': make_pair(
        make_bug(
            'ecomp.scheduler.placing.session:make_removal',
            replace_call('make_tombstone', '([], make_tombstone(store, entries)[1])'),
        ),
        make_bug('ecomp.scheduler.queries.stacks:make_end', return_constant(([], []))),
        'pruned_and_destroyed',
    ),
    'a prune beside new members destroys nothing': make_bug('ecomp.scheduler.placing.stack:_Application.deliver',
        replace_argument('deliver', 2, '[removal for removal in self.change.removals if removal.is_replaced]'),
        'pruned_beside_create'),
    'a prune that goes first is not planned again': make_bug(
        'ecomp.cli.apply:_wait_for_ends', drop_statement('run', 'read_and_plan'), 'pruned_first'),
    'a replacement leaves the old instance': make_bug(
        'ecomp.scheduler.placing.stack:_Application.deliver', replace_argument('deliver', 2, '()'), 'replaced_twice'),
    'a replacement does not take the name over': make_bug('ecomp.scheduler.placing.claim:reserve_names',
        replace_argument('require_free_name', 3, '{instance}'), 'replaced_twice'),
    'a replacement takes any name': make_bug('ecomp.scheduler.placing.claim:require_free_name',
        replace_assignment('current', 'None'), 'replaced_beside_create_of_its_name'),
    'a name of a new member is not compared': make_bug('ecomp.scheduler.placing.claim:reserve_names',
        replace_return('([], [Put(keys.name(name), encode(NameOwner(instance))) for name, instance in named.items()])'),
        'applied_beside_create_of_its_name'),
    'an apply takes a refused claim for granted': make_bug('ecomp.scheduler.placing.session:Session.place',
        replace_assignment('claimed', '(self.claim(assignment.candidates), set(assignment.candidates))[1]'),
        'replaced_beside_create_in_its_room'),
    'a group admits everybody of a stack': make_bug('ecomp.scheduler.placing.session:Session.deliver',
        replace_call('join_group', '([], [])'), 'applied_in_one_group'),
    # A compute's word is not acted on, and what a silent host may run stays
    'a new stack does not look for unknown claims': make_bug(
        'ecomp.scheduler.queries.stacks:require_known_claims', return_constant(None), 'first_apply_after_a_restore'),
    'a presence proves that a host is alive': make_bug('ecomp.scheduler.queries.stacks:require_known_claims',
        replace_assignment('is_proven', 'True'), 'first_apply_as_presences_are_back'),
    'a key without entries hides what the requests show': make_bug(
        'ecomp.scheduler.queries.stacks:load_stack', drop_operand('entries'), 'apply_after_a_refused_one'),
    'an instance on a silent host is replaced': make_bug(
        'ecomp.scheduler.queries.stacks:find_silent_computes', replace_return('{}'), 'replaced_on_a_silent_host'),
    'an entry with an instance adopts another one': make_bug('ecomp.scheduler.queries.stacks:_adopt',
        replace_condition('place is None', 'entry_name', 'entries'), 'apply_beside_a_forged_replacement'),
}  # fmt: skip
