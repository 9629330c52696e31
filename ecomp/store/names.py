"""Whose a name is: the keys /names/<name>, changed only inside the transactions that deliver and that remove (rule 7).

A name belongs to one living instance. One that failed is still found by it, on its record's lease, until somebody else
takes the name.
"""

from __future__ import annotations

from ecomp.errors import Unreadable
from ecomp.model import keys
from ecomp.model.instance import name_to_json, named
from ecomp.store.client import Delete, Entry, Put, Store, Unchanged

Change = tuple[list[Unchanged], list[Put | Delete]]
"""What a transaction compares, and does, about a name."""


def holder(entry: Entry) -> str:
    """The instance a name's key is about. Unreadable."""
    try:
        return named(entry.value)
    except ValueError as error:
        raise Unreadable(entry.key, error) from error


def freed(store: Store, name: str | None, instance: str, lease: int = 0) -> Change:
    """Let go of an instance's name: it goes, or stays on the `lease` of the record of one that failed.

    Nothing at all where the name is another's by now, or nobody's.
    """
    entry = store.get(keys.name(name)) if name else None
    if entry is None or not _is_of(entry, instance):
        return [], []
    change: Put | Delete = Put(entry.key, entry.value.decode(), lease) if lease else Delete(entry.key)
    return [Unchanged(entry.key, entry.revision)], [change]


def given_back(store: Store, name: str | None, instance: str) -> Change | None:
    """Give a living instance the name it had, where that is nobody's or a failed one's; None where it is another's."""
    entry = store.get(keys.name(name)) if name else None
    if name is None or (entry is not None and not entry.lease and _is_of(entry, instance)):
        return [], []
    if entry is not None and not entry.lease:
        return None
    key = keys.name(name)
    return [Unchanged(key, entry.revision if entry else 0)], [Put(key, name_to_json(instance))]


def _is_of(entry: Entry, instance: str) -> bool:
    try:
        return named(entry.value) == instance
    except ValueError:
        return False
