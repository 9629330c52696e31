"""The boots of a guest: why each was started, and which stages it reached. Pure.

A record has the newest 5, oldest first. Number 1 is the boot that the instance was created with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ecomp.model.parsers import OBJECT, TEXT, check, dict_of, list_of, number
from ecomp.model.stored import nested, stored

STARTED, ADDRESSED, READY, STOPPED = STAGES = ('started', 'addressed', 'ready', 'stopped')
CREATED = 'created'
MANUAL = 'by hand'
HOST_REBOOT = 'host reboot'
# Why a guest was started; `by hand` is outside ecomp, `host reboot` is after its host went down while it was running.
REASONS = (CREATED, 'start', 'reboot', HOST_REBOOT, MANUAL)

MAX_BOOTS = 5  # boots that a record keeps, the newest ones
MAX_BOOT_NUMBER = 2**53


def _parse_stages(data: Any) -> dict[str, str]:
    known = {name: time for name, time in OBJECT(data).items() if name in STAGES}
    return dict_of(TEXT)(known)


_REASON = check('text of up to 40 characters', lambda value: isinstance(value, str) and len(value) <= 40)


@stored(number=number(1, MAX_BOOT_NUMBER), reason=_REASON, stages=_parse_stages)
@dataclass(frozen=True)
class Boot:
    """One boot: its number, one of REASONS, and the ISO time of each stage that it has reached."""

    number: int
    reason: str
    stages: Mapping[str, str] = field(default_factory=dict)


Boots = tuple[Boot, ...]


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
    """Parse a record's boots, whose numbers must increase, and return the newest MAX_BOOTS."""
    boots: Boots = list_of(nested(Boot))(data)
    if any(before.number >= after.number for before, after in pairwise(boots)):
        raise ValueError('the boots are not in the order of their numbers')
    return boots[-MAX_BOOTS:]
