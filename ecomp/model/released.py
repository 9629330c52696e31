"""What is noted of claims before they are released: {instance: generation}."""

from __future__ import annotations

from collections.abc import Mapping

from ecomp.model.json_object import dump, load_object

MOST = 1000
"""A generation above this is not believed: each step up to it is a call to placement."""


def to_json(generations: Mapping[str, int]) -> str:
    """The value of the key."""
    return dump({'version': 1, 'generations': dict(generations)})


def from_json(value: bytes) -> dict[str, int]:
    """What it says; nothing where nobody of ours wrote it."""
    try:
        found = load_object(value).get('generations')
    except ValueError:
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: number for name, number in entries if type(number) is int and 0 < number <= MOST}
