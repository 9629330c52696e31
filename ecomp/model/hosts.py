"""What is asked of many computes, by compute. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ecomp.model import keys


class FollowedValue(keys.StoredValue, Protocol):
    """What a follower has of a key; `dropped` is how many bytes of the value it does not keep."""

    @property
    def dropped(self) -> int: ...


Each = TypeVar('Each', bound=FollowedValue)


def changed_hosts(
    before: Mapping[str, Each], state: Mapping[str, Each], parts: Mapping[str, Mapping[str, Each]]
) -> dict[str, dict[str, Each]]:
    """{compute: all that is below /hosts/<compute>/} of those of which anything is otherwise than `before`.

    `parts` is what each has `before` (none: nothing): of ten thousand keys only those that changed are sorted.
    """
    changed: dict[str, dict[str, Each]] = {}

    def part(key: str) -> dict[str, Each]:
        compute = key.removeprefix(keys.HOSTS).partition('/')[0]
        if compute not in changed:
            changed[compute] = dict(parts.get(compute, {}))
        return changed[compute]

    removed = len(before) - len(state)
    for key, entry in state.items():
        known = before.get(key)
        if known is entry:
            continue
        if known is None:
            removed += 1
        elif (known.revision, known.dropped) == (entry.revision, entry.dropped):
            continue
        part(key)[key] = entry
    if removed:
        for key in before.keys() - state.keys():
            del part(key)[key]
    return changed
