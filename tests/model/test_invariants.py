"""A rule of invariants.py is reported if it is broken for one step, although not at rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from ecomp.model import keys
from ecomp.model.guest import Guest
from ecomp.model.stack import Place
from ecomp.store.client import Delete, Put
from tests.model.acting import Bounds, Call
from tests.model.cloud import A, B, Cloud, S, U, V, W
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, Scenario, explore
from tests.model.invariants import CAPACITY, CLAIM, DELIVERY, DOMAIN, ENTRY, NAME, RULES, WHOLE

pytestmark = pytest.mark.fast


class Breach(NamedTuple):
    """A change that breaks a rule, the change that reverts it, and the message of the rule."""

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
    """Deliver instances of one entry of a stack as an apply of `attempted` does."""
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


SIZE = {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}
BREACHES = {
    DOMAIN: Breach(
        lambda cloud: _set_guest(cloud, B, U, Guest(U, None, defined=False, running=False, disk=True)),
        lambda cloud: _set_guest(cloud, B, U, None),
        'U has a domain or a disk on A and B',
    ),
    CLAIM: Breach(
        lambda cloud: _hold(cloud, U, {}),
        lambda cloud: _hold(cloud, U, {A: SIZE}),
        'U is a domain on A without a claim there',
    ),
    CAPACITY: Breach(
        lambda cloud: _hold(cloud, V, {A: {'VCPU': 4}}),
        lambda cloud: _hold(cloud, V, {}),
        'a write raises VCPU of A above its capacity',
    ),
    NAME: Breach(
        lambda cloud: _commit(cloud, Put(keys.request(B, V), '{"name": "web"}')),
        lambda cloud: _commit(cloud, Delete(keys.request(B, V))),
        'the name web is requested by U and V, and held by U',
    ),
    ENTRY: Breach(
        lambda cloud: _deliver(cloud, [V, W], V, W),
        _withdraw,
        'entry web/1 of stack s has the living instances V and W',
    ),
    DELIVERY: Breach(_deliver_again, _withdraw, 'V is delivered twice'),
    WHOLE: Breach(lambda cloud: _deliver(cloud, [V, W], V), _withdraw, 'V is delivered by an apply of V and W'),
}


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


@pytest.mark.parametrize('rule', RULES)
def test_an_exempt_rule_is_not_checked(rule: str) -> None:
    def scene(cloud: Cloud) -> Check | None:
        """The same rule is broken for one step, and the scenario exempts it."""
        cloud.exempt(rule, 'the scenario breaks it itself')
        _break_for_one_step(cloud, BREACHES[rule])
        return None

    assert explore(Scenario(scene, Bounds(0, 0))).findings == []
