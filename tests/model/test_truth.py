"""truth.py reports a false sentence of a command, and a sentence that it has no row for."""

from __future__ import annotations

import pytest

from ecomp.errors import Conflict, NoCapacity, NotFound, StillGoing, Unreachable
from ecomp.model.order import PowerAction
from ecomp.scheduler.changes.change import Acceptance
from ecomp.scheduler.placing.claim import DeliveryOutcome
from tests.model.acting import Actor
from tests.model.cloud import A, U, V, W
from tests.model.explorer import open_quiet_cloud
from tests.model.scenarios_pairs import make_active
from tests.model.truth import find_false_sentences

pytestmark = pytest.mark.fast

UNDONE = 'nothing was placed, and the claim is released'
EVACUATED = 'instances were evacuated before'
LIES = {
    'a create whose instance is not there': ('create', V, {V: DeliveryOutcome(A)}),
    'not delivered, while it is': ('create', U, Conflict(f'{U}: not delivered: too slow; {UNDONE}')),
    'nothing was changed, while it is there': ('create', U, Unreachable('etcd gives no answer; nothing was changed')),
    'no capacity, with a claim left': ('create', W, NoCapacity('other attempts took every candidate first')),
    'exists, while nothing is there': ('create', V, Conflict(f'{V}: exists, but was requested with the name web')),
    'queued, while it is nowhere': ('queue', V, True),
    'not queued, while it is there': ('queue', U, Conflict(f'{U}: not queued: another process changed its flavor')),
    'destroy accepted, while it lives': ('destroy', U, f'{U}: destroy accepted; {A} carries it out'),
    'nothing was started, while it lives': ('destroy', U, f'{U}: removed from its queue; nothing was started'),
    'no such instance, while it lives': ('destroy', U, NotFound(f'{U}: no such instance')),
    'destroy not accepted, while it is gone': ('destroy', V, Unreachable(f'the destroy of {V} is not accepted')),
    'stop accepted, and not asked for': ('power', U, Acceptance(f'{U}: stop accepted; {A}', PowerAction('stop', 'x'))),
    'forgotten, while it is registered': ('forget', A, None),
    'not forgotten, while it is': ('forget', V, Conflict(f'compute {V} is not forgotten: it is alive')),
    'drained, while something lives there': ('drain', A, None),
    'disabled, while it is enabled': ('disable', A, f'{A}: disabled: no new instances are placed there'),
    'a quota that is not there': ('quota', 'q', 'quota of project q: instances 1/5'),
    'applied, and it is not there': ('apply', V, {V: DeliveryOutcome(A)}),
    'not applied, while it is there': ('apply', U, Conflict(f'stack s: another eschedule changed it; {UNDONE}')),
    'apply changed nothing, with a claim left': (
        'apply',
        W,
        Conflict('stack s: another apply is in flight, process 1 on h; nothing was changed'),
    ),
    'two evacuated, while one is there': ('evacuate', U, Unreachable(f'etcd gives no answer; 2 {EVACUATED}')),
    'evacuated nothing, while it is there': ('evacuate', U, Unreachable(f'etcd gives no answer; {UNDONE}')),
    'evacuated nothing, with a claim left': ('evacuate', W, Unreachable(f'etcd gives no answer; {UNDONE}')),
    'alive, while it is silent': ('evacuate', A, Conflict(f'{A}: its ecompute is alive, and its guests may run')),
    'released, while it is held': ('fix', '', [f'allocation-orphaned {U}: released on {A}']),
}
TRUTHS = {
    'a create': ('create', U, {U: DeliveryOutcome(A)}),
    'no capacity': ('create', V, NoCapacity('other attempts took every candidate first')),
    'destroy not accepted': ('destroy', U, Unreachable(f'the destroy of {U} is not accepted')),
    'no such instance': ('destroy', V, NotFound(f'{V}: no such instance')),
    'not forgotten': ('forget', A, Conflict(f'compute {A} is not forgotten: it is alive')),
    'an apply': ('apply', U, {U: DeliveryOutcome(A)}),
    'an apply waits': ('apply', V, StillGoing('s-web: still being destroyed; nothing was changed')),
    'one evacuated': ('evacuate', U, Unreachable(f'etcd gives no answer; 1 {EVACUATED}')),
    'quota set': ('quota', 'p', 'quota of project p: instances 1/5'),
}


def find_false(command: str, about: str, outcome: object) -> list[str]:
    """Return what is false in one sentence, where U lives on A and W holds a claim."""
    with open_quiet_cloud() as cloud:
        cloud.set_instance_limit(5)
        host = make_active(cloud)
        cloud.etcd.end_lease(host.presence.lease)
        cloud.claim(W, A)
        command_actor = Actor(
            'the command', lambda: None, command=command, subjects=(about,), done=True, outcome=outcome
        )
        cloud.world.actors.append(command_actor)
        return find_false_sentences(cloud, frozenset())


@pytest.mark.parametrize('lie', LIES)
def test_false_sentence_is_reported(lie: str) -> None:
    (message,) = find_false(*LIES[lie])
    assert 'and that is not so' in message


@pytest.mark.parametrize('truth', TRUTHS)
def test_true_sentence_is_accepted(truth: str) -> None:
    assert find_false(*TRUTHS[truth]) == []


def test_sentence_without_a_row_is_reported() -> None:
    (message,) = find_false('destroy', U, f'{U}: will be gone one day')
    assert message == 'the command told its user "U: will be gone one day", a str: truth.py has no row for that'
