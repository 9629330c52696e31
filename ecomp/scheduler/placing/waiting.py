"""Why a request still waits in its queue: how long it does, behind how many, and what those lack that take from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.model.allocation import compute_of
from ecomp.model.computes import Computes
from ecomp.model.group import Group
from ecomp.model.query import Unexplained
from ecomp.model.queue import marked_by
from ecomp.placement.allocations import consumer
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.explain import lacking
from ecomp.store.client import Entry, Store


@dataclass(frozen=True)
class Waiting:
    """A place in a queue. `before` is how many of the same flavor wait longer; `taker` the compute that is taking it.

    `lacks` is what each compute that takes from queues lacks, in words; `unknown` why that could not be found out.
    `is_flavorless`: its flavor is not there, and nobody takes it whatever each has. `claimed_on` is the compute that
    holds a claim for it: nobody else takes it.
    """

    flavor: str
    before: int
    taker: str | None
    lacks: Mapping[str, str]
    unknown: str | None = None
    is_flavorless: bool = False
    claimed_on: str | None = None


def waiting(
    store: Store, placement: Placement, entry: Entry, query: str | None, known: Computes, group: Group | None
) -> Waiting:
    """Look at the queue, and at the computes that take from it. Errors: those of etcd."""
    flavor = (keys.queued(entry.key) or ('', ''))[0]
    there = store.snapshot(keys.queue(flavor, ''), keys_only=True).entries
    before = sum(each.revision < entry.revision for key, each in there.items() if keys.queued(key) is not None)
    mark = store.get(keys.taker(entry.key))
    taker = marked_by(mark.value) if mark is not None else None
    if store.get(keys.flavor(flavor)) is None:
        return Waiting(flavor, before, taker, {}, is_flavorless=True)
    try:
        claimed_on = compute_of(consumer(placement, keys.last(entry.key)).allocations) or None
        if claimed_on is not None:
            return Waiting(flavor, before, taker, {}, claimed_on=claimed_on)
        lacks = lacking(placement, query or '', known, known.takers, group) if known.takers else {}
    except (EcompError, Unexplained) as error:
        return Waiting(flavor, before, taker, {}, str(error))
    return Waiting(flavor, before, taker, lacks)
