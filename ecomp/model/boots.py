"""The boots of a guest: each time it was started, why, and how far it came. Pure.

In a record they are "boots": [{"number", "reason", "stages": {"started", "addressed", "ready", "stopped"}}], the times
in ISO 8601, at most KEPT and the last one last. Number 1 is the boot that the instance was created with. A record that
ecomp 1.0 wrote has none; its first boot is then told by its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

STARTED, ADDRESSED, READY, STOPPED = STAGES = ('started', 'addressed', 'ready', 'stopped')
CREATED, BY_HAND, AFTER_HOST = 'created', 'by hand', 'host reboot'
REASONS = (CREATED, 'start', 'reboot', AFTER_HOST, BY_HAND)
"""Why a guest was started: it is new; its start or reboot was asked for; it ran when its host went down; by others."""

KEPT = 5
"""Boots a record has, at most: the last ones."""
MOST = 2**53
"""A boot's number, at most."""


@dataclass(frozen=True)
class Boot:
    """One boot: its number, one of REASONS, and the times of the STAGES it has reached."""

    number: int
    reason: str
    stages: Mapping[str, str] = field(default_factory=dict)


Boots = tuple[Boot, ...]


def of(boots: Boots, stages: Mapping[str, str]) -> Boots:
    """The boots of a record with these `boots` and `stages`: also of one whose writer knows of no boots."""
    if boots or STARTED not in stages:
        return boots
    return (Boot(1, CREATED, {name: stages[name] for name in (STARTED, ADDRESSED, READY) if name in stages}),)


def begun(boots: Boots, reason: str, now: str) -> Boots:
    """The boots once the guest was seen running: the last one, if that goes on, else one more."""
    if boots and STOPPED not in boots[-1].stages:
        return boots
    number = boots[-1].number + 1 if boots else 1
    return (*boots, Boot(number, reason, {STARTED: now}))[-KEPT:]


def reached(boots: Boots, stage: str, now: str) -> Boots:
    """The boots once the last one has reached a stage; the first time counts."""
    if not boots or stage in boots[-1].stages:
        return boots
    return (*boots[:-1], replace(boots[-1], stages={**boots[-1].stages, stage: now}))


def off_until(boots: Boots) -> str:
    """The last time at which the guest is known not to have run yet in its last boot; '' where that is not known."""
    return boots[-2].stages.get(STOPPED, '') if len(boots) > 1 else ''


def numbered(boots: Boots, number: int | None) -> Boot | None:
    """The boot of this number, the last one for None; None if it is not there."""
    return next((each for each in reversed(boots) if number in (None, each.number)), None)


def parse(data: Any) -> Boots:
    """The boots in a record. ValueError for what is none; of more than KEPT the last ones, of a stage only STAGES."""
    if data is None:
        return ()
    if not isinstance(data, Sequence) or isinstance(data, str) or not all(map(_is_boot, data)):
        raise ValueError('not a record: boots is no list of boots')
    found = [Boot(each['number'], each['reason'], _known(each['stages'])) for each in data[-KEPT:]]
    if [each.number for each in found] != sorted({each.number for each in found}):
        raise ValueError('not a record: boots are not in their order')
    return tuple(found)


def _known(stages: Mapping[str, str]) -> dict[str, str]:
    return {name: stages[name] for name in STAGES if name in stages}


def _is_boot(data: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get('reason'), str) or len(data['reason']) > 40:
        return False
    number, stages = data.get('number'), data.get('stages')
    if type(number) is not int or not 0 < number <= MOST or not isinstance(stages, dict):
        return False
    return all(isinstance(stages.get(name, ''), str) for name in STAGES)
