"""Manual changes at any moment: a record is deleted or overwritten, a guest is deleted."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.store.client import Delete, Exists, Put
from tests.model.acting import SINGLE_FAULT
from tests.model.cloud import A, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import make_scenarios
from tests.model.scenarios_pairs import make_active


def _add_key_removal(cloud: Cloud, *removed_keys: str) -> None:
    manual_store = ModelStore(cloud.etcd)
    cloud.add_actor('somebody', lambda: manual_store.commit([], list(map(Delete, removed_keys))), mortal=False)


def _add_guest_removal(cloud: Cloud, host: Compute, name: str) -> None:
    def remove() -> None:
        host.hypervisor.destroy(U, A)
        host.hypervisor.delete_disk(U)

    cloud.add_actor(name, remove, mortal=False)


def record_removed(cloud: Cloud) -> None:
    """The record of an instance is deleted while it is built and destroyed.

    Its address is deleted, too.
    """
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan, host.planner.recheck))
    _add_key_removal(cloud, keys.record(A, U))
    cloud.add_destroy('destroy', U)


def record_removed_of_half_a_guest(cloud: Cloud) -> None:
    """The record is deleted while ecompute builds and may be killed.

    The half-built guest is not taken for complete.
    """
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    _add_key_removal(cloud, keys.record(A, U))


def record_removed_of_active(cloud: Cloud) -> None:
    """The record of an active instance is deleted and written again."""
    host = make_active(cloud)
    _add_key_removal(cloud, keys.record(A, U))
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_destroy('destroy', U)


def record_and_guest_removed(cloud: Cloud) -> None:
    """Record, domain and disk of an active instance are deleted: it is built again."""
    host = make_active(cloud)
    _add_key_removal(cloud, keys.record(A, U))
    _add_guest_removal(cloud, host, 'somebody else')
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_destroy('destroy', U)


def record_spoilt(cloud: Cloud) -> None:
    """An active instance's record becomes malformed and is deleted; then it is destroyed."""
    host = make_active(cloud)
    manual_store, record = ModelStore(cloud.etcd), keys.record(A, U)

    def spoil() -> None:
        if manual_store.commit([Exists(keys.request(A, U))], [Put(record, 'no record')]):
            manual_store.commit([], [Delete(record)])

    cloud.add_actor('somebody', spoil, mortal=False, subjects=(U,))
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_power('stop', U, 'stop')
    cloud.add_destroy('destroy', U)


def guest_removed(cloud: Cloud) -> None:
    """The domain and disk of an active instance are deleted, so it ends; another is created."""
    host = make_active(cloud)
    _add_guest_removal(cloud, host, 'somebody')
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, name='web2')


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(record_removed, record_removed_of_half_a_guest, record_removed_of_active, record_and_guest_removed),
        record_spoilt,
    ),
    *make_scenarios(SINGLE_FAULT._replace(minutes=1), guest_removed),
]
