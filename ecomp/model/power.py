"""Power: what a request asks of a guest's power, and how far the guest's record says it has come.

A request's `power` is {"action": "stop" | "start" | "reboot", "id": uuid}. The record's is the id of the last one that
was carried out; before that "<id>:asked" once the guest was asked to turn itself off, and "<id>:off" once it is off
and about to be started. So an action is done once, whoever is killed in the middle of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ecomp.model import keys

STOP, START, REBOOT = ACTIONS = ('stop', 'start', 'reboot')
ASKED, OFF = 'asked', 'off'
NOT_STARTED = 'it could not be started'
"""How a record's fault begins whose guest could not be started."""


class Power(NamedTuple):
    """What a request asks for, one of ACTIONS, and its id: the same action asked for again has another id."""

    action: str
    id: str

    def is_done(self, said: str | None) -> bool:
        """Whether `said`, a record's `power`, says that this was carried out."""
        return said == self.id

    def at(self, phase: str) -> str:
        """The record's `power` while this is in `phase`, ASKED or OFF."""
        return f'{self.id}:{phase}'


def phase(said: str | None) -> str:
    """How far the last action has come by a record's `power`: ASKED, OFF, or '' for done."""
    return (said or '').partition(':')[2]


def action_id(said: str | None) -> str:
    """The id of the action that a record's `power` is about, '' for none."""
    return (said or '').partition(':')[0]


def parse_power(data: Any) -> Power | None:
    """The Power in a request's `power`; None for None. ValueError for any other data."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get('action') not in ACTIONS or not keys.is_uuid(data.get('id', '')):
        raise ValueError(f'power: expected {{"action": "{"|".join(ACTIONS)}", "id": a uuid}}, not {data!r}')
    return Power(data['action'], data['id'])
