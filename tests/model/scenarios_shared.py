"""Groups, quotas and names that two instances request concurrently."""

from __future__ import annotations

from tests.model.acting import SHAKY
from tests.model.cloud import APART, TOGETHER, A, B, Cloud, S, U, V
from tests.model.explorer import Check, within


def apart(cloud: Cloud) -> None:
    """Two instances of one strict anti-affinity group; a message may be lost."""
    cloud.hosts(A, B)
    cloud.creates('eschedule 1', U, seed=1, group=APART)
    cloud.creates('eschedule 2', V, seed=1, group=APART)


def together(cloud: Cloud) -> None:
    """Two instances of one strict affinity group, on two computes with room for both."""
    cloud.hosts(A, B)
    cloud.creates('eschedule 1', U, seed=1, group=TOGETHER)
    cloud.creates('eschedule 2', V, seed=2, group=TOGETHER)


def quota_of_one(cloud: Cloud) -> None:
    """A quota of one, and two creates."""
    cloud.host(A)
    cloud.limited(1)
    cloud.is_ample = False
    cloud.creates('eschedule 1', U, seed=1)
    cloud.creates('eschedule 2', V, seed=2)


def one_name(cloud: Cloud) -> Check:
    """One name, and two creates that request it."""
    cloud.host(A)
    first, second = (
        cloud.creates(f'eschedule {number}', instance, seed=number, name='web')
        for number, instance in enumerate((U, V), 1)
    )

    def check() -> list[str]:
        is_doubled = isinstance(first.outcome, dict) and isinstance(second.outcome, dict)
        return ['two instances have one name'] if is_doubled else []

    return check


def set_in_group(cloud: Cloud) -> None:
    """A set of two and a single instance share an anti-affinity group and a quota of two."""
    cloud.hosts(A, B)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1, group=APART, name='web')
    cloud.creates('the single one', V, seed=2, group=APART)


def name_of_destroyed(cloud: Cloud) -> None:
    """An instance is destroyed while another one is created with its name."""
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
