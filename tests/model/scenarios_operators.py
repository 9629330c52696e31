"""Operators' commands during those of users: drain, forget, audit --fix, quota set."""

from __future__ import annotations

from collections.abc import Callable

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.group import Group, Membership
from ecomp.model.group import to_json as group_json
from ecomp.model.order import name_to_json
from ecomp.scheduler.changing.wait import Deadline
from ecomp.scheduler.operating.audit import audit, fix, mend
from ecomp.scheduler.operating.decommission import disable, drained, enable, forget
from ecomp.scheduler.operating.sharing import limit
from ecomp.store.client import Put
from tests.model.acting import SHAKY, Actor, Bounds
from tests.model.cloud import A, B, Cloud, U, V, W
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within
from tests.model.virtual import NOW


def forgetting(cloud: Cloud, compute: str, fenced: bool = True) -> Callable[[], None]:
    """Return the work of a `host forget`."""
    return lambda: forget(
        ModelStore(cloud.etcd), cloud.placement, compute, compute, lambda: NOW, lambda _: None, fenced
    )


def forgets(cloud: Cloud, compute: str, after: Actor) -> Actor:
    """Add a `host forget` that begins when its compute is silent."""
    run_forget = forgetting(cloud, compute)

    def work() -> None:
        cloud.world.wait('the compute to be silent', lambda: not after.is_at_it)
        run_forget()

    return cloud.act('host forget', work, again=run_forget, command='forget', about=(compute,))


def ends(cloud: Cloud, compute: str) -> Actor:
    """Add the orderly and final end of a compute: its lease is revoked."""

    def work() -> None:
        ModelStore(cloud.etcd).revoke(cloud.computes[compute].presence.lease)
        cloud.computes[compute].is_dead = True

    return cloud.act(f'compute {cloud.world.names[compute]}', work, mortal=False)


def fixes(cloud: Cloud) -> Actor:
    """Add an `audit --fix` whose two checks are done before the schedule begins."""
    first, second = (audit(cloud.store, cloud.placement) for _ in range(2))
    assert [finding for finding in second.findings if finding.fix]

    def run() -> list[str]:
        return mend(ModelStore(cloud.etcd), cloud.placement, first, second)

    def repeat() -> None:
        fix(cloud.store, cloud.placement, lambda _: None)

    return cloud.act('audit --fix', run, again=repeat, command='fix')


def sets(cloud: Cloud, name: str, *words: str) -> Actor:
    """Add a `quota set`."""

    def run() -> str:
        return limit(ModelStore(cloud.etcd), 'p', words)

    return cloud.act(name, run, again=run, command='quota', about=('p',))


def drains(cloud: Cloud, compute: str) -> Actor:
    """Add a `host drain --wait`."""

    def work() -> None:
        store = ModelStore(cloud.etcd)
        disable(cloud.placement, compute, compute)
        drained(store, cloud.placement, compute, compute, Deadline(5.0), lambda _: None)

    return cloud.act('host drain', work, command='drain', about=(compute,))


def drain_and_create(cloud: Cloud) -> None:
    """`host drain --wait` of an empty compute, during a create that queried placement earlier."""
    cloud.host(A)
    cloud.is_ample = False
    cloud.creates('eschedule', U, asks_first=True)
    drains(cloud, A)


def forget_and_create(cloud: Cloud) -> None:
    """A compute ends and is forgotten during a create that may use it."""
    cloud.host(A)
    cloud.is_ample = False
    cloud.creates('eschedule', U)
    forgets(cloud, A, ends(cloud, A))


def forget_with_another(cloud: Cloud) -> None:
    """The same where another compute has room for the request."""
    cloud.hosts(A, B)
    cloud.creates('eschedule', U, weigh='first')
    forgets(cloud, A, ends(cloud, A))


def forget_what_is_destroyed(cloud: Cloud) -> None:
    """A compute is dead, and its last instance is destroyed while the compute is forgotten."""
    cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A, name='web')
    silent = ends(cloud, A)
    cloud.destroys('destroy', U)
    forgets(cloud, A, silent)


def fix_and_create(cloud: Cloud) -> None:
    """`audit --fix` releases an orphaned claim while its --uuid is created again."""
    cloud.host(A)
    cloud.claimed(U, A)
    fixes(cloud)
    cloud.creates('eschedule', U, resume=True)


def fix_drift(cloud: Cloud) -> None:
    """`audit --fix` repairs a wrong quota, name and group during a create and a destroy."""
    host = cloud.host(A)
    cloud.is_astray = True
    cloud.limited(5)
    membership = Membership('g', 'affinity', True)
    cloud.delivered(U, A, 'web', membership)
    host.plan(2)
    wrong_group = Group('g', 'affinity', True, {U: A, W: A})
    cloud.store.commit([], [Put(keys.name('old'), name_to_json(W)), Put(keys.group('g'), group_json(wrong_group))])
    fixes(cloud)
    cloud.creates('eschedule', V, name='db')
    cloud.destroys('destroy', U)


def first_quota_twice(cloud: Cloud) -> None:
    """A project's first quota is set twice concurrently, during a delivery."""
    cloud.host(A)
    cloud.creates('eschedule', U)
    for number in (1, 2):
        sets(cloud, f'quota set {number}', 'instances=5')


def first_quota(cloud: Cloud) -> None:
    """A project's first quota is set during a delivery."""
    cloud.host(A)
    cloud.creates('eschedule', U)
    sets(cloud, 'quota set', 'instances=5')


def quota_and_destroy(cloud: Cloud) -> None:
    """A project's first quota is set while its instance is destroyed."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    host.plan(2)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    sets(cloud, 'quota set', 'instances=5')


def disable_and_enable(cloud: Cloud) -> Check:
    """Run `host disable` and `host enable` concurrently, during a claim: both succeed."""
    cloud.host(A)
    cloud.is_ample = False
    disable_command = cloud.act('host disable', lambda: disable(cloud.placement, A, A), command='disable', about=(A,))
    store = ModelStore(cloud.etcd)
    enable_command = cloud.act(
        'host enable', lambda: enable(store, cloud.placement, A, A), command='enable', about=(A,)
    )
    cloud.creates('eschedule', U)

    def check() -> list[str]:
        errors = [
            command.outcome for command in (disable_command, enable_command) if isinstance(command.outcome, EcompError)
        ]
        return [f'disable or enable fails: {error}' for error in errors if cloud.is_unharmed]

    return check


SCENARIOS = [
    *within(Bounds(2, 0), drain_and_create, forget_and_create, forget_with_another, fix_and_create, first_quota_twice),
    *within(SHAKY, forget_what_is_destroyed, fix_drift, first_quota, disable_and_enable),
    *within(Bounds(2, 1, answers=1), quota_and_destroy),
]
