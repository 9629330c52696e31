"""Which instances a list shows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ecomp.model.record import Record


class RecordFilter(NamedTuple):
    """A filter for records; None accepts all. `name` is a pattern of fnmatchcase(); a missing name counts as ''.

    `stack_instances` are of the stack, too, if their records do not say so.
    """

    states: Collection[str] | None = None
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None
    stack: str | None = None
    stack_instances: Collection[str] = ()

    def select(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that pass the filter, in their order."""
        return [record for record in records if self._matches(record)]

    def _matches(self, record: Record) -> bool:
        return (
            (self.states is None or record.state in self.states)
            and self.compute in (None, record.compute)
            and self.project in (None, record.project_id)
            and self.group in (None, record.group_name)
            and (self.name is None or fnmatchcase(record.name or '', self.name))
            and (self.stack is None or self._is_of_stack(record))
        )

    def _is_of_stack(self, record: Record) -> bool:
        return record.instance in self.stack_instances or (record.stack is not None and record.stack.name == self.stack)
