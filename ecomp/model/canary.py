"""Canaries: small guests that are booted, entered and destroyed to test hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

from ecomp.errors import split_fix
from ecomp.model.record import SCHEDULED, STAGES, Record

if TYPE_CHECKING:
    from ecomp.model.health import Ailment

CHECK = 'canary'
# The default query of a canary.
DEFAULT_QUERY = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
BOOTED = 'addressed'
READY = STAGES[-1]
ENTERED = 'entered'  # logged in to: the result after the last stage

DEFAULT_CURE = 'check the output of `ecompute --check` there, and the log of its ecompute'
# The cure by the stage in which a canary failed; for other stages it is DEFAULT_CURE.
CURES: Mapping[str, str] = {
    STAGES[0]: 'repeat the command; `eschedule doctor` alone also checks etcd and placement',
    SCHEDULED: 'run `systemctl restart ecompute` there; the log of ecompute shows why it accepted no request',
    'image': 'give an IMAGE_URL that the host can download, or make this image reachable there; test with `curl -I '
    'IMAGE_URL` there',
    BOOTED: 'start its network if `virsh net-list --all` shows it inactive; for an image without DHCP: --for started',
    READY: 'use a cloud image, whose cloud-init reports that it is ready; for another image: --for addressed',
    ENTERED: 'give the private key with -i, and set `ssh_user` and `reach` in schedule.yaml so that ssh reaches the '
    'guest',
}


class Canary(NamedTuple):
    """The result of one host's canary.

    `reached` is its last stage, or ENTERED, after `seconds`; both are None if it was not placed, `seconds` also if it
    failed or was interrupted. `reason` says why it went no further. `failed_stage` is '' unless the host failed the
    test. `leftover_reason` is '' if the canary is gone, or was not placed.
    """

    compute: str
    host: str | None
    display_name: str
    instance: str | None = None
    name: str | None = None
    reached: str | None = None
    seconds: float | None = None
    reason: str = ''
    failed_stage: str = ''
    leftover_reason: str = ''

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object that users see; `said` is the reason, `gone` is null if no canary was placed."""
        names = ('compute', 'host', 'instance', 'name', 'reached')
        gone = None if self.reached is None else not self.leftover_reason
        fields = {name: getattr(self, name) for name in names}
        return {**fields, 'seconds': self.seconds and round(self.seconds, 3), 'said': self.reason or None, 'gone': gone}


def check_names_no_host(query: str) -> None:
    """Raise ValueError if a query names a host (in_tree=): each host gets its own canary."""
    if any(key.startswith('in_tree') for key, _ in parse_qsl(query, keep_blank_values=True)):
        raise ValueError(
            'in_tree= is not accepted: each host gets a canary of its own. Fix: give --on HOST for a single host'
        )


def format_line(canary: Canary) -> str:
    """Return the result as one line, which begins with the compute's uuid."""
    if canary.name is None:
        return f'{canary.compute}: no canary: {canary.reason}'
    end = f'it may still exist: {split_fix(canary.leftover_reason)[0]}' if canary.leftover_reason else 'gone'
    if canary.reached == ENTERED:
        return f'{canary.compute}: {canary.name} accepted a login after {canary.seconds:.1f} s; {end}'
    if canary.seconds is None:
        return f'{canary.compute}: {canary.name} ({end}): {canary.reason}'
    how_far = 'booted' if canary.reached in (BOOTED, READY) else f'reached {canary.reached}'
    result = f'{how_far} after {canary.seconds:.1f} s, and no login was tried'
    return f'{canary.compute}: {canary.name} {result} ({end}): {canary.reason}'


def diagnose_canaries(canaries: Iterable[Canary], was_interrupted: bool) -> list[Ailment]:
    """List the failed and the leftover canaries; also that none was placed, if the run was not interrupted."""
    from ecomp.model.health import Ailment  # every command loads this module, but few need Ailment

    ailments, was_tried = [], was_interrupted
    for canary in canaries:
        was_tried = was_tried or canary.name is not None
        if canary.failed_stage:
            cure = CURES.get(canary.failed_stage, DEFAULT_CURE)
            problem = f'the canary on {canary.display_name} failed: {split_fix(canary.reason)[0]}'
            ailments.append(Ailment(CHECK, problem, cure))
        if canary.leftover_reason:
            problem = f'{canary.name} on {canary.display_name} may still exist: {split_fix(canary.leftover_reason)[0]}'
            ailments.append(Ailment(CHECK, problem, f'eschedule destroy --wait {canary.instance}'))
    if not was_tried:
        problem = 'no canary was placed: no host is up and has room for one'
        ailments.append(
            Ailment(CHECK, problem, 'start ecompute on a host, or free room on one; `eschedule hosts` shows the hosts')
        )
    return ailments


def find_stages(record: Record | None) -> tuple[str, str]:
    """Return the last stage reached (none: the first), and the current or failed stage (READY if all are reached)."""
    if record is None:
        return STAGES[0], STAGES[0]
    reached = [stage for stage in STAGES if stage in record.reached_stages] or [STAGES[0]]
    if record.error is not None:
        return reached[-1], record.error.stage
    if record.state == SCHEDULED:
        return reached[-1], SCHEDULED  # its compute has not started the build
    return reached[-1], next((stage for stage in STAGES if stage not in reached), READY)
