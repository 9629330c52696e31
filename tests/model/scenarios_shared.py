"""Groups, quotas and names that two instances request concurrently."""

from __future__ import annotations

from tests.model.acting import SINGLE_FAULT
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, A, B, Cloud, S, U, V
from tests.model.explorer import Check, make_scenarios


def strict_anti_affinity(cloud: Cloud) -> None:
    """Two instances of one strict anti-affinity group, where a message may be lost."""
    cloud.add_hosts(A, B)
    cloud.add_create('eschedule 1', U, seed=1, group=ANTI_AFFINITY)
    cloud.add_create('eschedule 2', V, seed=1, group=ANTI_AFFINITY)


def strict_affinity(cloud: Cloud) -> None:
    """Two instances of one strict affinity group, on two computes with room for both."""
    cloud.add_hosts(A, B)
    cloud.add_create('eschedule 1', U, seed=1, group=AFFINITY)
    cloud.add_create('eschedule 2', V, seed=2, group=AFFINITY)


def quota_of_one(cloud: Cloud) -> None:
    """A quota of one, and two creates."""
    cloud.add_host(A)
    cloud.set_instance_limit(1)
    cloud.has_ample_room = False
    cloud.add_create('eschedule 1', U, seed=1)
    cloud.add_create('eschedule 2', V, seed=2)


def one_name(cloud: Cloud) -> Check:
    """One name, and two creates that request it."""
    cloud.add_host(A)
    first, second = (
        cloud.add_create(f'eschedule {number}', instance, seed=number, name='web')
        for number, instance in enumerate((U, V), 1)
    )

    def check() -> list[str]:
        is_doubled = isinstance(first.outcome, dict) and isinstance(second.outcome, dict)
        return ['two instances have one name'] if is_doubled else []

    return check


def set_in_group(cloud: Cloud) -> None:
    """A set of two and a single instance share an anti-affinity group and a quota of two."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(2)
    cloud.has_ample_room = False
    cloud.add_create('the set', S, seed=1, count=2, minimum=1, group=ANTI_AFFINITY, name='web')
    cloud.add_create('the single one', V, seed=2, group=ANTI_AFFINITY)


def name_of_destroyed(cloud: Cloud) -> None:
    """An instance is destroyed while another one is created with its name."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web')
    host.plan(2)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', V, name='web')


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT, strict_anti_affinity, strict_affinity, quota_of_one, one_name, set_in_group, name_of_destroyed
    )
]
