"""Which instances a list shows, and in which state if their host is silent. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ecomp.model.host import LIVE_STATES, SILENT, UP, describe_silence
from ecomp.model.record import Record
from ecomp.model.states import DESTROYING, UNKNOWN


class Absences(NamedTuple):
    """What is known of hosts without a presence, for the records that such hosts wrote."""

    states: Mapping[str, str] = {}  # {compute: CLOSED or SILENT}
    destroying: Collection[str] = ()  # the instances there whose destroy is accepted, but not reported
    last_seen: Mapping[str, str] = {}  # ISO times of the last sign of life of silent hosts, as far as known
    today: str = ''  # the date in UTC

    def get_host_state(self, record: Record) -> str | None:
        """Return UP, CLOSED or SILENT, or None if no host has the instance."""
        return self.states.get(record.compute, UP) if is_on_host(record) else None

    def is_stale(self, record: Record) -> bool:
        return self.get_host_state(record) not in (UP, None)

    def get_state(self, record: Record) -> str:
        """Return the state to show: `destroying` or `unknown` may replace that of an absent host."""
        if record.state not in LIVE_STATES:
            return record.state
        if record.instance in self.destroying:
            return DESTROYING
        # A closed host was stopped cleanly, and leaves its guests as they are.
        return UNKNOWN if self.get_host_state(record) == SILENT else record.state

    def explain_state(self, record: Record, host: str) -> str | None:
        """Return `waiting for HOST` or `HOST silent, was active` if that is shown, or None."""
        shown_state = self.get_state(record)
        if shown_state == DESTROYING and self.is_stale(record):
            return f'waiting for {host}'
        silence = describe_silence(self.last_seen.get(record.compute), self.today)
        return f'{host} {silence}, was {record.state}' if shown_state == UNKNOWN else None


# For records whose hosts were not looked up: every state is shown as it is recorded.
NO_ABSENCES = Absences()


def is_on_host(record: Record) -> bool:
    return record.state in (*LIVE_STATES, DESTROYING)


class RecordFilter(NamedTuple):
    """A filter for records, in which None accepts all."""

    states: Collection[str] | None = None  # of SHOWN_STATES
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None  # a pattern of fnmatchcase(); a missing name counts as ''
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
