"""An instance is built, switched and destroyed while its ecompute is killed and restarted."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.model.record import GONE, KEPT, Record, to_json
from ecomp.store.client import Delete, Put
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import TOGETHER, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import within


def _delivered(cloud: Cloud) -> Compute:
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A, 'web', TOGETHER)
    return host


def _active(cloud: Cloud) -> Compute:
    host = _delivered(cloud)
    host.plan(3)
    return host


def built_and_destroyed(cloud: Cloud) -> None:
    """A destroy during a build; ecompute may be killed anywhere, and a message may be lost."""
    host = _delivered(cloud)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', U)


def destroyed_twice(cloud: Cloud) -> None:
    """Two destroys of an active instance while its compute works."""
    host = _active(cloud)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.destroys('destroy 1', U)
    cloud.destroys('destroy 2', U)


def stopped_and_destroyed(cloud: Cloud) -> None:
    """A stop and a destroy of an active instance."""
    host = _active(cloud)
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.destroys('destroy', U)
    cloud.powers('stop', U, 'stop')


def rebooted(cloud: Cloud) -> None:
    """A reboot of an active instance; ecompute may be killed anywhere."""
    host = _active(cloud)
    cloud.works(A, '', host.rounds(4, host.plan))
    cloud.powers('reboot', U, 'reboot')


def foreign_records(cloud: Cloud) -> None:
    """Forged records say that U is gone on another compute: U is built nevertheless."""
    host = _delivered(cloud)
    forged = to_json(Record(U, B, GONE))

    def forge() -> None:
        lease = cloud.store.grant(KEPT[GONE])
        for key in (keys.old_record(U), keys.record(B, U)):
            cloud.store.commit([], [Put(key, forged, lease)])

    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.act('somebody', forge)
    cloud.destroys('destroy', U)


def killed_twice(cloud: Cloud) -> None:
    """An ecompute is killed in a build, restarted during a destroy, and killed again."""
    host = _delivered(cloud)
    first = cloud.works(A, '', host.rounds(2, host.plan))

    def restart() -> None:
        cloud.world.wait('the first to be killed', lambda: first.dead)
        host.restart()
        host.rounds(3, host.plan)()

    cloud.act('A again', restart, process=A)
    cloud.destroys('destroy', U)


def resumed_and_built(cloud: Cloud) -> None:
    """A create with the same --uuid while the first one's delivery is built."""
    host = cloud.host(A)
    cloud.creates_twice(U)
    cloud.works(A, '', host.rounds(2, host.plan, host.keep_claims))


def destroyed_and_asked_again(cloud: Cloud) -> None:
    """A uuid is created again during its destroy: it is refused, or nothing is lost."""
    host = _active(cloud)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', U, resume=True)


def published_again(cloud: Cloud) -> None:
    """A compute publishes its guests to an empty etcd during a create of the same name."""
    host = _active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    cloud.is_ample = False
    host.republishes = True
    cloud.works(A, '', lambda: host.start(republishes=True))
    cloud.creates('eschedule', V, name='web')


SCENARIOS = [
    *within(
        SHAKY,
        *(built_and_destroyed, destroyed_twice, stopped_and_destroyed, rebooted, foreign_records),
        *(destroyed_and_asked_again, published_again),
    ),
    *within(Bounds(2, 2, kills=2), killed_twice),
    *within(Bounds(2, 1, kills=1), resumed_and_built),
]
