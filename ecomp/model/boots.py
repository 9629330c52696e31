"""The last boot of a guest: why it was started, and which stages it reached. Pure.

The boot with which an instance is created has number 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ecomp.model.parsers import OBJECT, TEXT, check, dict_of, list_of, number
from ecomp.model.stored import nested, sparse, stored

STARTED, ADDRESSED, READY, STOPPED = STAGES = ('started', 'addressed', 'ready', 'stopped')
CREATED = 'created'
MANUAL = 'by hand'
HOST_REBOOT = 'host reboot'
# Why a guest was started; `by hand` is outside ecomp, `host reboot` is after its host went down while it was running.
REASONS = (CREATED, 'start', 'reboot', HOST_REBOOT, MANUAL, 'rebuild')

MAX_BOOT_NUMBER = 2**53


def _parse_known_stages(data: Any) -> dict[str, str]:
    return dict_of(TEXT)({name: time for name, time in OBJECT(data).items() if name in STAGES})


_REASON = check('text of up to 40 characters', lambda value: isinstance(value, str) and len(value) <= 40)


@stored(number=number(1, MAX_BOOT_NUMBER), reason=_REASON, stages=_parse_known_stages, previous_stop=sparse(TEXT))
class Boot(NamedTuple):
    number: int
    reason: str  # one of REASONS
    stages: Mapping[str, str] = {}  # the ISO time of each stage reached
    previous_stop: str = ''  # when the boot before stopped, '' if unknown

    def with_stage(self, stage: str, now: str) -> Boot:
        """Return the boot with the time of a stage, unless it has an earlier time of it."""
        return self._replace(stages={**self.stages, stage: self.stages.get(stage, now)})


def parse_last(data: Any) -> Boot | None:
    """Return the last of a record's boots, with the stop of the one before, or None."""
    # An older ecomp wrote several.
    boots: tuple[Boot, ...] = list_of(nested(Boot))(data)
    if len(boots) > 1:
        return boots[-1]._replace(previous_stop=boots[-2].stages.get(STOPPED, ''))
    return boots[-1] if boots else None
