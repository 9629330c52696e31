"""The boots of a guest: why each was started, and which stages it reached. Pure.

In a record they are "boots": [{"number", "reason", "stages": {"started", "addressed", "ready", "stopped"}}], with times
in ISO 8601; the newest 5, oldest first. Number 1 is the boot that the instance was created with. A record that
ecomp 1.0 wrote has no boots; its first boot is then derived from its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

STARTED, ADDRESSED, READY, STOPPED = STAGES = ('started', 'addressed', 'ready', 'stopped')
CREATED = 'created'
MANUAL = 'by hand'
HOST_REBOOT = 'host reboot'
# Why a guest was started; `by hand` is outside ecomp, `host reboot` is after its host went down while it was running.
REASONS = (CREATED, 'start', 'reboot', HOST_REBOOT, MANUAL)

MAX_BOOTS = 5  # boots that a record keeps, the newest ones
MAX_BOOT_NUMBER = 2**53


@dataclass(frozen=True)
class Boot:
    """One boot: its number, one of REASONS, and the ISO time of each stage that it has reached."""

    number: int
    reason: str
    stages: Mapping[str, str] = field(default_factory=dict)


Boots = tuple[Boot, ...]


def infer_boots(boots: Boots, stages: Mapping[str, str]) -> Boots:
    """Return a record's boots; without any, the one that its `stages` show, or () if it was never started."""
    if boots or STARTED not in stages:
        return boots
    return (Boot(1, CREATED, {name: stages[name] for name in (STARTED, ADDRESSED, READY) if name in stages}),)


def record_running(boots: Boots, reason: str, now: str) -> Boots:
    """Return `boots` if the last one has not stopped; else add one, STARTED at `now`; keep the newest MAX_BOOTS."""
    if boots and STOPPED not in boots[-1].stages:
        return boots
    number = boots[-1].number + 1 if boots else 1
    return (*boots, Boot(number, reason, {STARTED: now}))[-MAX_BOOTS:]


def add_stage(boots: Boots, stage: str, now: str) -> Boots:
    """Return the boots with a stage, at ISO time `now`, added to the last boot, if any, unless that has it."""
    if not boots or stage in boots[-1].stages:
        return boots
    return (*boots[:-1], replace(boots[-1], stages={**boots[-1].stages, stage: now}))


def find_previous_stop(boots: Boots) -> str:
    """Return the ISO time at which the boot before the last one stopped, or '' if unknown."""
    return boots[-2].stages.get(STOPPED, '') if len(boots) > 1 else ''


def find_boot(boots: Boots, number: int | None) -> Boot | None:
    """Return the boot with this number (None: the last boot), or None if there is no such boot."""
    return next((boot for boot in reversed(boots) if number in (None, boot.number)), None)


def parse(data: Any) -> Boots:
    """Parse a record's newest MAX_BOOTS boots, without unknown stages; () for None, ValueError if malformed.

    Their numbers must increase; reasons are any text of up to 40 characters.
    """
    if data is None:
        return ()
    if not isinstance(data, Sequence) or isinstance(data, str) or not all(map(_is_boot, data)):
        raise ValueError('not a valid record: its field boots is not a list of boots')
    boots = [Boot(entry['number'], entry['reason'], _select_stages(entry['stages'])) for entry in data[-MAX_BOOTS:]]
    if [boot.number for boot in boots] != sorted({boot.number for boot in boots}):
        raise ValueError('not a valid record: its boots are not in the order of their numbers')
    return tuple(boots)


def _select_stages(stages: Mapping[str, str]) -> dict[str, str]:
    return {name: stages[name] for name in STAGES if name in stages}


def _is_boot(data: Any) -> bool:
    """Return True for a number from 1, a reason of up to 40 characters and stages with text."""
    if not isinstance(data, dict) or not isinstance(data.get('reason'), str) or len(data['reason']) > 40:
        return False
    number, stages = data.get('number'), data.get('stages')
    if type(number) is not int or not 0 < number <= MAX_BOOT_NUMBER or not isinstance(stages, dict):
        return False
    return all(isinstance(stages.get(name, ''), str) for name in STAGES)
