"""An instance's life on its compute: built, switched, destroyed, while ecompute dies and is started again."""

from __future__ import annotations

from ecomp.model.group import Membership
from tests.model.cloud import A, Cloud, I, J
from tests.model.compute import Compute
from tests.model.explorer import Scenario
from tests.model.world import SHAKY, Bounds

TOGETHER = Membership('g', 'affinity', True)


def _delivered(cloud: Cloud) -> Compute:
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(I, A, 'web', TOGETHER)
    return host


def _active(cloud: Cloud) -> Compute:
    host = _delivered(cloud)
    for _ in range(3):
        host.plan()
    return host


def built_and_destroyed(cloud: Cloud) -> None:
    """A destroy while it is built; ecompute may be killed anywhere, and a message may be lost."""
    host = _delivered(cloud)
    cloud.act('A', host.rounds(3, host.plan))
    cloud.destroys('destroy', I)


def destroyed_twice(cloud: Cloud) -> None:
    """Two destroys of an active one, while its compute is at it."""
    host = _active(cloud)
    cloud.act('A', host.rounds(2, host.plan))
    cloud.destroys('destroy 1', I)
    cloud.destroys('destroy 2', I)


def stopped_and_destroyed(cloud: Cloud) -> None:
    """A stop and a destroy of an active one."""
    host = _active(cloud)
    cloud.act('A', host.rounds(3, host.plan))
    cloud.destroys('destroy', I)
    cloud.powers('stop', I, 'stop')


def rebooted(cloud: Cloud) -> None:
    """A reboot of an active one; ecompute may be killed anywhere."""
    host = _active(cloud)
    cloud.act('A', host.rounds(4, host.plan))
    cloud.powers('reboot', I, 'reboot')


def killed_twice(cloud: Cloud) -> None:
    """ecompute is killed in a build, started again beside a destroy, and killed once more."""
    host = _delivered(cloud)
    first = cloud.act('A', host.rounds(2, host.plan))

    def again() -> None:
        cloud.world.wait('the first to be killed', lambda: first.dead)
        host.start()
        host.rounds(3, host.plan)()

    cloud.act('A again', again)
    cloud.destroys('destroy', I)


def resumed_and_built(cloud: Cloud) -> None:
    """The same --uuid again, while what the first one delivered is built and the keeper looks."""
    host = cloud.host(A)
    cloud.creates('eschedule 1', I, resume=True, seed=1)
    cloud.creates('eschedule 2', I, resume=True, seed=2)
    cloud.act('A', host.rounds(2, host.plan, host.keep_claims))


def destroyed_and_asked_again(cloud: Cloud) -> None:
    """A destroyed one's uuid is asked for again, while its compute is at the destroy: refused, or nothing is lost."""
    host = _active(cloud)
    cloud.destroys('destroy', I)
    cloud.act('A', host.rounds(2, host.plan))
    cloud.creates('eschedule', I, resume=True)


def published_again(cloud: Cloud) -> None:
    """etcd was exchanged for an empty one; the compute publishes what it runs, beside a create of the same uuid."""
    host = _active(cloud)
    empty = [key for key in cloud.etcd.entries]
    for key in empty:
        del cloud.etcd.entries[key]
    cloud.is_ample = False
    cloud.act('A', lambda: host.start(republishes=True))
    cloud.creates('eschedule', J, name='web')


SCENARIOS = [
    Scenario(built_and_destroyed, SHAKY),
    Scenario(destroyed_twice, SHAKY),
    Scenario(stopped_and_destroyed, SHAKY),
    Scenario(rebooted, SHAKY),
    Scenario(killed_twice, Bounds(2, 2, kills=2)),
    Scenario(resumed_and_built, Bounds(2, 1, kills=1)),
    Scenario(destroyed_and_asked_again, SHAKY),
    Scenario(published_again, SHAKY),
]
