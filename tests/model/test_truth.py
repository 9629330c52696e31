"""truth.py reports false sentences of commands, and invariants.py reports broken rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from ecomp.errors import Conflict, NoCapacity, NotFound, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import Guest
from ecomp.model.order import PowerAction
from ecomp.model.stack import Place
from ecomp.scheduler.changes.change import Acceptance
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Delete, Put
from tests.model.acting import Actor, Bounds, Call
from tests.model.cloud import A, B, Cloud, S, U, V, W
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, Scenario, explore, open_quiet_cloud
from tests.model.invariants import CAPACITY, CLAIM, DELIVERY, DOMAIN, ENTRY, FOREIGN, NAME, RULES, WHOLE
from tests.model.scenarios_pairs import make_active
from tests.model.truth import find_false_sentences

pytestmark = pytest.mark.fast

UNDONE = 'nothing was placed, and the claim in placement is released'
EVACUATED = 'instances were evacuated before'
LIES = {
    'a create whose instance is not there': ('create', V, {V: DeliveryOutcome(A)}),
    'not delivered, while it is': ('create', U, Conflict(f'{U}: not delivered: too slow; {UNDONE}')),
    'nothing was changed, while it is there': ('create', U, Unreachable('etcd gives no answer; nothing was changed')),
    'no capacity, with a claim left': ('create', W, NoCapacity('other requests took all the room first')),
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
    'apply changed nothing, with a claim left': ('apply', W,
        Conflict('stack s: another apply is running, as process 1 on h; nothing was changed')),
    'two evacuated, while one is there': ('evacuate', U, Unreachable(f'etcd gives no answer; 2 {EVACUATED}')),
    'evacuated nothing, while it is there': ('evacuate', U, Unreachable(f'etcd gives no answer; {UNDONE}')),
    'evacuated nothing, with a claim left': ('evacuate', W, Unreachable(f'etcd gives no answer; {UNDONE}')),
    'alive, while it is silent': ('evacuate', A, Conflict(f'{A}: its ecompute is alive, and its guests may run')),
    'released, while it is held': ('fix', '', [f'allocation-orphaned {U}: released on {A}']),
}  # fmt: skip
TRUTHS = {
    'a create': ('create', U, {U: DeliveryOutcome(A)}),
    'no capacity': ('create', V, NoCapacity('other requests took all the room first')),
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


# A rule of invariants.py is reported if it is broken for one step, although not at rest.


class Breach(NamedTuple):
    break_rule: Callable[[Cloud], object]
    restore: Callable[[Cloud], object]
    message: str


def _set_guest(cloud: Cloud, compute: str, instance: str, guest: Guest | None) -> None:
    guests = dict(cloud.computes[compute].hypervisor.list_guests())
    guests.pop(instance, None)
    cloud.computes[compute].hypervisor._guests = guests if guest is None else {**guests, instance: guest}


def _hold(cloud: Cloud, instance: str, allocations: dict[str, dict[str, int]]) -> None:
    cloud.model.held[instance] = allocations
    if not allocations:
        del cloud.model.held[instance]
    cloud.model.writes += 1


def _commit(cloud: Cloud, *operations: Put | Delete) -> None:
    ModelStore(cloud.etcd).commit([], operations)


def _deliver(cloud: Cloud, attempted: Sequence[str], *delivered: str) -> None:
    attempt = keys.attempt(S)
    _commit(cloud, Put(attempt, json.dumps({'instances': attempted})))
    value = json.dumps({'allocations': {B: {}}, 'stack': Place('s', 'web', 1, S, 1)._asdict()})
    _commit(cloud, Delete(attempt), *(Put(keys.request(B, instance), value) for instance in delivered))


def _deliver_again(cloud: Cloud) -> None:
    _deliver(cloud, [V], V)
    _withdraw(cloud)
    _deliver(cloud, [V], V)


def _withdraw(cloud: Cloud) -> None:
    _commit(cloud, Delete(keys.request(B, V)), Delete(keys.request(B, W)))


def _set_foreign(cloud: Cloud, *guests: ForeignGuest) -> None:
    cloud.computes[A].hypervisor.set_foreign(*guests)
    _hold(cloud, W, {})  # the rule is checked after a write to placement


SIZE = {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}
BREACHES = {
    DOMAIN: Breach(lambda cloud: _set_guest(cloud, B, U, Guest(U, None, defined=False, running=False, disk=True)),
        lambda cloud: _set_guest(cloud, B, U, None), 'U has a domain or a disk on A and B'),
    CLAIM: Breach(lambda cloud: _hold(cloud, U, {}), lambda cloud: _hold(cloud, U, {A: SIZE}),
        'U is a domain on A without a claim there'),
    CAPACITY: Breach(lambda cloud: _hold(cloud, V, {A: {'VCPU': 4}}), lambda cloud: _hold(cloud, V, {}),
        'a write raises VCPU of A above its capacity'),
    NAME: Breach(lambda cloud: _commit(cloud, Put(keys.request(B, V), '{"name": "web"}')),
        lambda cloud: _commit(cloud, Delete(keys.request(B, V))),
        'the name web is requested by U and V, and held by U'),
    ENTRY: Breach(lambda cloud: _deliver(cloud, [V, W], V, W), _withdraw,
        'entry web/1 of stack s has the living instances V and W'),
    DELIVERY: Breach(_deliver_again, _withdraw, 'V is delivered twice'),
    FOREIGN: Breach(lambda cloud: _set_foreign(cloud, ForeignGuest(V, 'db', True, size=SIZE)), _set_foreign,
        'what V uses is neither claimed nor reserved on A'),
    WHOLE: Breach(lambda cloud: _deliver(cloud, [V, W], V), _withdraw, 'V is delivered by an apply of V and W'),
}  # fmt: skip


def _break_for_one_step(cloud: Cloud, breach: Breach) -> None:
    cloud.add_hosts(A, B)
    cloud.deliver(U, A, 'web')
    cloud.computes[A].plan(3)

    def work() -> None:
        for number, change in enumerate((breach.break_rule, breach.restore)):
            cloud.world.call(Call('libvirt', ('changes', str(number)), writes=True), lambda: None)
            change(cloud)

    cloud.add_actor('somebody', work, mortal=False)


@pytest.mark.parametrize('rule', RULES)
def test_rule_broken_for_one_step_is_reported(rule: str) -> None:
    def scene(cloud: Cloud) -> Check | None:
        """One rule is broken for one step."""
        _break_for_one_step(cloud, BREACHES[rule])
        return None

    result = explore(Scenario(scene, Bounds(0, 0)))
    assert [finding.violations for finding in result.findings] == [(BREACHES[rule].message,)]
    assert f'WRONG from here on: {BREACHES[rule].message}' in result.findings[0].story
