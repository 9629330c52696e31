"""Which instances a listing is to show. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ecomp.model.record import Record


class Pick(NamedTuple):
    """What an instance has to be, to be shown; None where it does not matter.

    `states` are those it may be in, `name` is a pattern in which * stands for any text and ? for any character.
    """

    states: Collection[str] | None = None
    compute: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None

    def of(self, records: Iterable[Record]) -> list[Record]:
        """Those that are meant, in their order."""
        return [each for each in records if self._means(each)]

    def _means(self, record: Record) -> bool:
        return (
            (self.states is None or record.state in self.states)
            and self.compute in (None, record.compute)
            and self.project in (None, record.project_id)
            and self.group in (None, record.group_name)
            and (self.name is None or fnmatchcase(record.name or '', self.name))
        )
