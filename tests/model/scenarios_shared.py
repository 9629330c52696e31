"""What instances share: groups, quotas, names; two who want the same at once."""

from __future__ import annotations

from tests.model.acting import SHAKY
from tests.model.cloud import APART, TOGETHER, A, B, Cloud, S, U, V
from tests.model.explorer import Check, within


def apart(cloud: Cloud) -> None:
    """Two of one strict anti-affinity group; a message may be lost."""
    cloud.hosts(A, B)
    cloud.creates('eschedule 1', U, seed=1, group=APART)
    cloud.creates('eschedule 2', V, seed=1, group=APART)


def together(cloud: Cloud) -> None:
    """Two of one strict affinity group, on two computes with room for both."""
    cloud.hosts(A, B)
    cloud.creates('eschedule 1', U, seed=1, group=TOGETHER)
    cloud.creates('eschedule 2', V, seed=2, group=TOGETHER)


def quota_of_one(cloud: Cloud) -> None:
    """A quota of one, and two who ask."""
    cloud.host(A)
    cloud.limited(1)
    cloud.is_ample = False
    cloud.creates('eschedule 1', U, seed=1)
    cloud.creates('eschedule 2', V, seed=2)


def one_name(cloud: Cloud) -> Check:
    """One name, and two who want it."""
    cloud.host(A)
    one, two = (
        cloud.creates(f'eschedule {number}', each, seed=number, name='web') for number, each in enumerate((U, V), 1)
    )

    def check() -> list[str]:
        both = isinstance(one.outcome, dict) and isinstance(two.outcome, dict)
        return ['two instances have one name'] if both else []

    return check


def set_in_group(cloud: Cloud) -> None:
    """A set of two, of which one will do, and a single one in one strict anti-affinity group, with a quota of two."""
    cloud.hosts(A, B)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1, group=APART, name='web')
    cloud.creates('the single one', V, seed=2, group=APART)


def name_of_destroyed(cloud: Cloud) -> None:
    """An instance is destroyed, and its name taken by another one that is created meanwhile."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A, 'web')
    host.plan(2)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', V, name='web')


SCENARIOS = [
    *within(SHAKY, apart, together, quota_of_one, one_name, set_in_group, name_of_destroyed),
]
