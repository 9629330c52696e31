"""Which instances a list shows, and in which state: what a silent host reported last is old. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ecomp.model.host import LIVE_STATES, SILENT, UP, describe_silence
from ecomp.model.record import DESTROYING, UNKNOWN, Record


class Absences(NamedTuple):
    """The hosts of some records that have no presence: {compute: CLOSED or SILENT}.

    `destroying` are the instances there whose destroy is accepted; the host has not reported it. `last_seen` are ISO
    times of the last sign of life of silent hosts, as far as known, and `today` is the date in UTC.
    """

    states: Mapping[str, str] = {}
    destroying: Collection[str] = ()
    last_seen: Mapping[str, str] = {}
    today: str = ''

    def get_host_state(self, record: Record) -> str | None:
        """Return UP, CLOSED or SILENT; None if no host has the instance: it is queued, gone or in error."""
        return self.states.get(record.compute, UP) if is_on_host(record) else None

    def is_stale(self, record: Record) -> bool:
        """Return whether the record is what its host reported before it was closed or silent."""
        return self.get_host_state(record) not in (UP, None)

    def get_state(self, record: Record) -> str:
        """Return the state to show. A closed host was stopped cleanly and leaves its guests as they are."""
        if record.state not in LIVE_STATES:
            return record.state
        if record.instance in self.destroying:
            return DESTROYING
        return UNKNOWN if self.get_host_state(record) == SILENT else record.state

    def explain_state(self, record: Record, host: str) -> str | None:
        """Return why the state to show is not the recorded one: `hv2 silent since 16:35:54, was active`, or None."""
        shown_state = self.get_state(record)
        if shown_state == DESTROYING and self.is_stale(record):
            return f'waiting for {host}'
        silence = describe_silence(self.last_seen.get(record.compute), self.today)
        return f'{host} {silence}, was {record.state}' if shown_state == UNKNOWN else None


# For records whose hosts were not looked up: every state is shown as it is recorded.
NO_ABSENCES = Absences()


def is_on_host(record: Record) -> bool:
    """Return whether a host has the instance, or is to have it."""
    return record.state in (*LIVE_STATES, DESTROYING)


class RecordFilter(NamedTuple):
    """A filter for records; None accepts all. `name` is a pattern of fnmatchcase(); a missing name counts as ''.

    `states` are of SHOWN_STATES.
    """

    states: Collection[str] | None = None
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None
    stack: str | None = None

    def select(self, records: Iterable[Record], absences: Absences = NO_ABSENCES) -> list[Record]:
        return [record for record in records if self._matches(record, absences)]

    def _matches(self, record: Record, absences: Absences) -> bool:
        return (
            (self.states is None or absences.get_state(record) in self.states)
            and self.compute in (None, record.compute)
            and self.project in (None, record.project_id)
            and self.group in (None, record.group_name)
            and (self.name is None or fnmatchcase(record.name or '', self.name))
            and self.stack in (None, record.stack and record.stack.name)
        )
