"""What is asked of many computes, by compute. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ecomp.model import keys


class Written(Protocol):
    """What is at a key: the revision that wrote it, and how many bytes of it are not kept."""

    @property
    def revision(self) -> int: ...
    @property
    def dropped(self) -> int: ...


Each = TypeVar('Each', bound=Written)


def changed_hosts(before: Mapping[str, Each], state: Mapping[str, Each]) -> dict[str, dict[str, Each]]:
    """{compute: all that is below /hosts/<compute>/} of those of which anything is otherwise than `before`."""
    changed: dict[str, dict[str, Each]] = {}
    for key, entry in state.items():
        known = before.get(key)
        if known is not entry and (
            known is None or (known.revision, known.dropped) != (entry.revision, entry.dropped)
        ):
            changed[_compute(key)] = {}
    for key in before.keys() - state.keys():
        changed[_compute(key)] = {}
    if changed:
        for key, entry in state.items():
            part = changed.get(_compute(key))
            if part is not None:
                part[key] = entry
    return changed


def _compute(key: str) -> str:
    return key.removeprefix(keys.HOSTS).partition('/')[0]
