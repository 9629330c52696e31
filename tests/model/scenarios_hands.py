"""What somebody does by hand, at any moment: a record is removed or spoilt, a guest is gone."""

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
    by_hand = ModelStore(cloud.etcd)
    cloud.act('somebody', lambda: by_hand.commit([], list(map(Delete, keys_of_it))), mortal=False)


def _removes_guest(cloud: Cloud, host: Compute, who: str) -> None:
    def removes() -> None:
        host.hypervisor.destroy(U, A)
        host.hypervisor.delete_disk(U)

    cloud.act(who, removes, mortal=False)


def record_removed(cloud: Cloud) -> None:
    """The record of one that is built and destroyed is removed at any time; its address goes with it all the same."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.works(A, '', host.rounds(4, host.plan, host.planner.recheck))
    _removes(cloud, keys.record(A, U))
    cloud.destroys('destroy', U)


def record_removed_of_half_a_guest(cloud: Cloud) -> None:
    """The record is removed while ecompute builds, and is killed in it: what is there of the guest is no guest yet."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.works(A, '', host.rounds(2, host.plan))
    _removes(cloud, keys.record(A, U))


def record_removed_of_active(cloud: Cloud) -> None:
    """The same of one that has an address, which ecompute writes down anew if nobody is faster."""
    host = active(cloud)
    _removes(cloud, keys.record(A, U))
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.destroys('destroy', U)


def record_and_guest_removed(cloud: Cloud) -> None:
    """The record, the domain and the disk of an active one are removed: it is built again, or destroyed."""
    host = active(cloud)
    _removes(cloud, keys.record(A, U))
    _removes_guest(cloud, host, 'somebody else')
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.destroys('destroy', U)


def record_spoilt(cloud: Cloud) -> None:
    """An active one's record becomes something that nobody can read, and is removed; it is stopped and destroyed."""
    host = active(cloud)
    by_hand, record = ModelStore(cloud.etcd), keys.record(A, U)

    def spoils() -> None:
        if by_hand.commit([Exists(keys.request(A, U))], [Put(record, 'no record')]):
            by_hand.commit([], [Delete(record)])

    cloud.act('somebody', spoils, mortal=False, about=(U,))
    cloud.works(A, '', host.rounds(3, host.planner.recheck, host.plan))
    cloud.powers('stop', U, 'stop')
    cloud.destroys('destroy', U)


def guest_removed(cloud: Cloud) -> None:
    """Domain and disk of an active one are removed, which ends it after a minute; it is destroyed, another is made."""
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
