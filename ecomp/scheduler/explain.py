"""Why a request found no room: what each compute lacks, the nearest miss, and the smallest change that fits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from ecomp.errors import EcompError
from ecomp.model.choose import Candidate
from ecomp.model.explain import Miss, Provider, apart, changed, in_words, miss, nearest, smallest, unexplained
from ecomp.model.group import Group, Membership
from ecomp.model.query import Amount, Constraint, Unexplained, enabled_only, parse, words
from ecomp.placement import room
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.scheduler import hosts
from ecomp.scheduler.joining import settled
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.ask import Backend

SECONDS = 5.0
"""How long the reasons are looked for. The refusal has been said by then."""

MOST, SHOWN = 50, 10
"""Of more computes than MOST, the SHOWN nearest are looked at one by one: two to four requests to placement each."""


def tell(
    store: Store,
    backend: Backend,
    query: str,
    wanted: Membership | None,
    taken: Sequence[Candidate],
    say: Callable[[str], None],
) -> None:
    """Say why, a line each. Whatever goes wrong with that is one line too, and never more.

    `wanted` is its group, `taken` what the others of a set would take, for which there is room.
    """
    found: Future[list[str]] = Future()

    def find() -> None:
        try:
            found.set_result(reasons(store, backend.result()[0], query, settled(store, wanted), taken))
        except BaseException as error:
            found.set_exception(error)

    try:
        # A thread can be left alone: its calls have limits of their own, and longer ones.
        threading.Thread(target=find, name='reasons', daemon=True).start()
        for line in found.result(SECONDS):
            say(line)
    except TimeoutError:
        say(f'what each compute lacks could not be found out within {SECONDS:g} s')
    except KeyboardInterrupt:
        pass  # the answer is known, and was all that matters
    except Exception as error:
        say(f'what each compute lacks could not be found out: {str(error) or type(error).__name__}')


def reasons(
    store: Store,
    placement: Placement,
    query: str,
    group: Group | None = None,
    taken: Sequence[Candidate] = (),
    most: int = MOST,
    shown: int = SHOWN,
) -> list[str]:
    """A line for each compute, the nearest miss, and the smallest change that fits, as things are now.

    With the others of a set that are `taken` to be placed, there is none: that is to ask for so many.
    Errors: those of etcd and placement.
    """
    if group is not None:
        group = group.with_members({f'the set\'s {number}': each.compute for number, each in enumerate(taken)})
    try:
        asked = parse(enabled_only(query))
    except Unexplained as error:
        return [f'what each compute lacks is not explained for this query: {error}']
    alive, listed = hosts.alive(store), room.everyone(placement)
    names = _names(alive)
    dead = sorted(uuid for uuid, each in listed.items() if uuid not in alive and each.name == uuid)
    chosen = [*names, *dead]
    if len(chosen) > most:
        chosen = _nearest(placement, asked, names)[:shown]
    sharing = room.sharing(placement)
    keys = {each.key for each in asked if not isinstance(each, Amount)}
    traits, aggregates = not keys.isdisjoint({'required', 'root_required'}), bool(sharing) or 'member_of' in keys
    lines: list[str] = []
    misses: list[Miss] = []
    for uuid in chosen:
        provider = None
        if uuid in listed:
            provider = room.look(placement, uuid, listed[uuid].alone, traits=traits, aggregates=aggregates)
        said, called = _apart(provider, uuid in alive), names.get(uuid, uuid)
        if said is None and provider is not None:
            beyond = unexplained(asked, provider, sharing)
            if beyond is None:
                given = [each.allocations[uuid] for each in taken if uuid in each.allocations]
                misses.append(apart(miss(asked, provider.less(given)), group))
            said = _lacks(misses[-1], called) if beyond is None else f'not explained: {beyond}'
        if said:
            lines.append(f'{called}: {said}')
    left = len(names) + len(dead) - len(chosen)
    if left:
        lines.append(f'{left} more are not shown: no nearer, or not alive')
    if any(each.fits for each in misses):
        return lines
    advice = _advice(placement, asked, misses, names)
    if not taken:
        return [*lines, *advice]
    return [*lines, *advice[:1], f'the smallest change that fits: --count {len(taken)}']


def _lacks(found: Miss, called: str) -> str:
    # Two hosts of one name are called by name and uuid, and then only the uuid is what the command takes.
    cure = f' (eschedule host enable {found.provider if found.provider in called else called})'
    said = (each.why + cure if each.is_disabled else each.why for each in found.failures)
    return '; '.join(said) or 'has room by now: ask again'


def _apart(provider: Provider | None, alive: bool) -> str | None:
    """What is said of a compute that no query would get room on, '' for what is none; None for all others."""
    if alive:
        if provider is None:
            return 'has no resource provider'
        return 'is closed: all its VCPU is reserved' if provider.is_closed else None
    # A placement may be shared with others, whose providers are named otherwise or have no VCPU.
    if provider is None or (provider.inventories and 'VCPU' not in provider.inventories):
        return ''
    return 'is closed: its ecompute was stopped' if provider.is_closed else 'is not alive'


def _advice(
    placement: Placement, asked: Sequence[Constraint], misses: Collection[Miss], names: Mapping[str, str]
) -> list[str]:
    """The nearest miss, and the smallest change that fits, which placement was asked about."""
    if not misses:
        return []
    lines = [f'the nearest miss is {names[nearest(misses)[0].provider]}']
    best = smallest(misses)
    if best is None or not best.cures:
        return [*lines, 'no change of the query fits any of them']
    host = names[best.provider]
    done = in_words(best.cures, host)
    if any(each.freed for each in best.cures):
        return [*lines, f'no change of the query alone fits: {done}']
    with suppress(EcompError):
        # What was read is a moment old, and what never came to be looked at may be wrong too: a trait nobody knows.
        named = candidates(placement, words(changed(asked, best.cures))).candidates
        if any(best.provider in each for each in named):
            lines.append(f'the smallest change that fits: {done} (on {host})')
    return lines


def _names(alive: Mapping[str, str | None]) -> dict[str, str]:
    """What each living compute is called, in the order they are shown: by host name, and uuid where that is not one."""
    several = Counter(alive.values())
    called = {
        uuid: uuid if host is None else host if several[host] == 1 else f'{host} ({uuid})'
        for uuid, host in alive.items()
    }
    return dict(sorted(called.items(), key=lambda each: (alive[each[0]] is None, each[1])))


def _nearest(placement: Placement, asked: Iterable[Constraint], computes: Iterable[str]) -> list[str]:
    """The computes, those first on which the fewest constraints fail: a request for each constraint."""
    holding = [room.holding(placement, each) for each in asked]
    return sorted(computes, key=lambda uuid: sum(uuid not in each for each in holding))
