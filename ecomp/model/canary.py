"""What came of canaries: small guests that are booted, entered and destroyed, to see whether hosts do that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

from ecomp.model.record import SCHEDULED, STAGES, Record

if TYPE_CHECKING:
    from ecomp.model.health import Ailment

CHECK = 'canary'
"""The check that finds what is wrong with one."""
SMALL = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
"""What a canary asks for, if nothing else is said."""
BOOTED, READY = 'addressed', STAGES[-1]
ENTERED = 'entered'
"""How far a canary comes that was logged in to, beyond every stage."""

CHECKED = 'ecompute --check, there, and the log of its ecompute say more'
CURES: Mapping[str, str] = {
    STAGES[0]: 'the same command again; what is wrong with etcd and placement eschedule doctor alone says, too',
    SCHEDULED: 'systemctl restart ecompute, there; its log says why it took nothing',
    'image': 'name an IMAGE_URL that this host can fetch, or have it reach that one: curl -I IMAGE_URL, there',
    BOOTED: 'virsh net-list --all, there: its network has to be active; an image that asks no DHCP: --for started',
    READY: 'take an image with a cloud-init that calls back, as those for clouds have; else: --for addressed',
    ENTERED: 'name the private key with -i, and the user in ssh_user of schedule.yaml; its `reach` has to lead there',
}
"""What mends it, by the stage in which it broke; of all others CHECKED."""


class Canary(NamedTuple):
    """What came of the canary of a host, which is `called` so.

    `reached` is the last stage that it reached, or ENTERED, and None where none was placed; `seconds` is how long that
    took, None where it broke. `why` says why it came no further. `broken` is the stage in which it broke, '' where
    nothing is wrong with the host. `left` says why something of it may be left, '' where it is gone.
    """

    compute: str
    host: str | None
    called: str
    instance: str | None = None
    name: str | None = None
    reached: str | None = None
    seconds: float | None = None
    why: str = ''
    broken: str = ''
    left: str = ''

    def to_dict(self) -> dict[str, object]:
        """What -f json has of it."""
        own = ('compute', 'host', 'instance', 'name', 'reached')
        gone = None if self.reached is None else not self.left
        about = {each: getattr(self, each) for each in own}
        return {**about, 'seconds': self.seconds and round(self.seconds, 3), 'said': self.why or None, 'gone': gone}


def check_names_no_host(query: str) -> None:
    """ValueError for a query that says on which host it is to be: each canary is on its own."""
    if any(key.startswith('in_tree') for key, _ in parse_qsl(query, keep_blank_values=True)):
        raise ValueError('a canary is placed on every host: say --on HOST, for one alone, in place of in_tree=')


def line(canary: Canary) -> str:
    """What came of it, as one line, with the compute by its uuid."""
    if canary.name is None:
        return f'{canary.compute}: no canary: {canary.why}'
    end = f'it may be left: {canary.left}' if canary.left else 'gone'
    if canary.reached == ENTERED:
        return f'{canary.compute}: {canary.name} was entered after {canary.seconds:.1f} s; {end}'
    if canary.seconds is None:
        return f'{canary.compute}: {canary.name}: {canary.why}; {end}'
    how_far = 'booted' if canary.reached in (BOOTED, READY) else f'reached {canary.reached}'
    return f'{canary.compute}: {canary.name} {how_far} after {canary.seconds:.1f} s, not entered: {canary.why}; {end}'


def of_canaries(found: Iterable[Canary], interrupted: bool) -> list[Ailment]:
    """What is wrong with the hosts, as far as their canaries tell; and with those of which something may be left."""
    from ecomp.model.health import Ailment  # every command loads this module, and few need that

    ailments, tried = [], interrupted
    for each in found:
        tried = tried or each.name is not None
        if each.broken:
            cure = CURES.get(each.broken, CHECKED)
            ailments.append(Ailment(CHECK, f'on {each.called} a canary did not come through: {each.why}', cure))
        if each.left:
            what = f'{each.name} on {each.called} may be left: {each.left}'
            ailments.append(Ailment(CHECK, what, f'eschedule destroy --wait {each.instance}'))
    if not tried:
        what = 'no canary was placed: there is no compute that is up and has room for one'
        ailments.append(Ailment(CHECK, what, 'eschedule hosts shows all, and how much each has'))
    return ailments


def how_far(record: Record | None) -> tuple[str, str]:
    """The last stage that a guest has reached, and the one in which it is, or broke. None: nobody knows of it."""
    if record is None:
        return STAGES[0], STAGES[0]
    reached = [each for each in STAGES if each in record.reached] or [STAGES[0]]
    if record.error is not None:
        return reached[-1], record.error.stage
    if record.state == SCHEDULED:
        return reached[-1], SCHEDULED  # its compute has not begun with it
    return reached[-1], next((each for each in STAGES if each not in reached), READY)
