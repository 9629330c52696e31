"""Manual changes at any moment: a record is deleted or overwritten, a guest is deleted."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.store.client import Delete, Exists, Put
from tests.model.acting import SHAKY
from tests.model.cloud import A, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import within
from tests.model.scenarios_pairs import active


def _removes(cloud: Cloud, *keys_of_it: str) -> None:
    manual_store = ModelStore(cloud.etcd)
    cloud.act('somebody', lambda: manual_store.commit([], list(map(Delete, keys_of_it))), mortal=False)


def _removes_guest(cloud: Cloud, host: Compute, who: str) -> None:
    def remove() -> None:
        host.hypervisor.destroy(U, A)
        host.hypervisor.delete_disk(U)

    cloud.act(who, remove, mortal=False)


def record_removed(cloud: Cloud) -> None:
    """The record of an instance is deleted while it is built and destroyed.

    Its address is deleted, too.
    """
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.works(A, '', host.rounds(4, host.plan, host.planner.recheck))
    _removes(cloud, keys.record(A, U))
    cloud.destroys('destroy', U)


def record_removed_of_half_a_guest(cloud: Cloud) -> None:
    """The record is deleted while ecompute builds and may be killed.

    The half-built guest is not taken for complete.
    """
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.works(A, '', host.rounds(2, host.plan))
    _removes(cloud, keys.record(A, U))


def record_removed_of_active(cloud: Cloud) -> None:
    """The record of an active instance is deleted and written again."""
    host = active(cloud)
    _removes(cloud, keys.record(A, U))
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.destroys('destroy', U)


def record_and_guest_removed(cloud: Cloud) -> None:
    """Record, domain and disk of an active instance are deleted: it is built again."""
    host = active(cloud)
    _removes(cloud, keys.record(A, U))
    _removes_guest(cloud, host, 'somebody else')
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.destroys('destroy', U)


def record_spoilt(cloud: Cloud) -> None:
    """An active instance's record becomes malformed and is deleted; then it is destroyed."""
    host = active(cloud)
    manual_store, record = ModelStore(cloud.etcd), keys.record(A, U)

    def spoil() -> None:
        if manual_store.commit([Exists(keys.request(A, U))], [Put(record, 'no record')]):
            manual_store.commit([], [Delete(record)])

    cloud.act('somebody', spoil, mortal=False, about=(U,))
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.powers('stop', U, 'stop')
    cloud.destroys('destroy', U)


def guest_removed(cloud: Cloud) -> None:
    """The domain and disk of an active instance are deleted, so it ends; another is created."""
    host = active(cloud)
    _removes_guest(cloud, host, 'somebody')
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', U)
    cloud.creates('eschedule', V, name='web2')


SCENARIOS = [
    *within(
        SHAKY,
        *(record_removed, record_removed_of_half_a_guest, record_removed_of_active, record_and_guest_removed),
        record_spoilt,
    ),
    *within(SHAKY._replace(minutes=1), guest_removed),
]
