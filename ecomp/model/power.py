"""Power: what a request asks of a guest's power, and how far the guest's record says it has come.

A request's `power` is {"action": "stop" | "start" | "reboot", "id": uuid}. The record's is the id of the last one that
was carried out; before that "<id>:asked" once the guest was asked to turn itself off, and "<id>:off" once it is off
and about to be started. So an action is done once, whoever is killed in the middle of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecomp.model import keys

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
ASKED, OFF = 'asked', 'off'
NOT_STARTED = 'it could not be started'
"""How the fault of a guest begins whose start failed."""


@dataclass(frozen=True)
class Power:
    """What is asked, and its id: asked again it is another one."""

    action: str
    id: str

    def is_done(self, said: str | None) -> bool:
        """Whether the record's `power` says that this was carried out."""
        return said == self.id

    def at(self, phase: str) -> str:
        """The record's `power` in the middle of this."""
        return f'{self.id}:{phase}'


def phase(said: str | None) -> str:
    """How far a record's `power` says the last one has come: ASKED, OFF, or '' for the end."""
    return (said or '').partition(':')[2]


def action_id(said: str | None) -> str:
    """Which one a record's `power` is about, '' for none."""
    return (said or '').partition(':')[0]


def parse_power(data: Any) -> Power | None:
    """A request's `power`, None for none. ValueError for what is none."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get('action') not in ACTIONS or not keys.is_uuid(data.get('id', '')):
        raise ValueError(f'power: expected {{"action": "{"|".join(ACTIONS)}", "id": a uuid}}, not {data!r}')
    return Power(data['action'], data['id'])
