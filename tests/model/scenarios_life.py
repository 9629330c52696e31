"""An instance is built, switched and destroyed while its ecompute is killed and restarted."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.model.record import GONE, RETENTION_SECONDS, Record, to_json
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import AFFINITY, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import make_scenarios


def _deliver(cloud: Cloud) -> Compute:
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web', AFFINITY)
    return host


def _make_active(cloud: Cloud) -> Compute:
    host = _deliver(cloud)
    host.plan(3)
    return host


def built_and_destroyed(cloud: Cloud) -> None:
    """A destroy during a build; ecompute may be killed anywhere, and a message may be lost."""
    host = _deliver(cloud)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)


def destroyed_twice(cloud: Cloud) -> None:
    """Two destroys of an active instance while its compute works."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_destroy('destroy 1', U)
    cloud.add_destroy('destroy 2', U)


def stopped_and_destroyed(cloud: Cloud) -> None:
    """A stop and a destroy of an active instance."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_power('stop', U, 'stop')


def rebooted(cloud: Cloud) -> None:
    """A reboot of an active instance; ecompute may be killed anywhere."""
    host = _make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan))
    cloud.add_power('reboot', U, 'reboot')


def forged_records(cloud: Cloud) -> None:
    """Forged records say that U is gone on another compute: U is built nevertheless."""
    host = _deliver(cloud)
    forged = to_json(Record(U, B, GONE))

    def forge() -> None:
        lease = cloud.store.grant(RETENTION_SECONDS[GONE])
        for key in (keys.old_record(U), keys.record(B, U)):
            cloud.store.commit([], [Put(key, forged, lease)])

    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_actor('somebody', forge)
    cloud.add_destroy('destroy', U)


def killed_twice(cloud: Cloud) -> None:
    """An ecompute is killed in a build, restarted during a destroy, and killed again."""
    host = _deliver(cloud)
    first = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

    def restart() -> None:
        cloud.world.wait('the first to be killed', lambda: first.dead)
        host.restart()
        host.repeat(3, host.plan)()

    cloud.add_actor('A again', restart, process=A)
    cloud.add_destroy('destroy', U)


def resumed_and_built(cloud: Cloud) -> None:
    """A create with the same --uuid while the first one's delivery is built."""
    host = cloud.add_host(A)
    cloud.add_two_creates(U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.check_claims))


def destroyed_and_asked_again(cloud: Cloud) -> None:
    """A uuid is created again during its destroy: it is refused, or nothing is lost."""
    host = _make_active(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', U, resume=True)


def published_again(cloud: Cloud) -> None:
    """A compute publishes its guests to an empty etcd during a create of the same name."""
    host = _make_active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    cloud.has_ample_room = False
    host.republishes = True
    cloud.add_compute_actor(A, '', lambda: host.start(republishes=True))
    cloud.add_create('eschedule', V, name='web')


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(built_and_destroyed, destroyed_twice, stopped_and_destroyed, rebooted, forged_records),
        *(destroyed_and_asked_again, published_again),
    ),
    *make_scenarios(Bounds(2, 2, kills=2), killed_twice),
    *make_scenarios(Bounds(2, 1, kills=1), resumed_and_built),
]
