"""Why a request found no room: what each compute lacks, the nearest miss, and the smallest change that fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecomp.errors import EcompError
from ecomp.model.allocation import Resources
from ecomp.model.choose import Candidate
from ecomp.model.computes import Computes
from ecomp.model.explain import Miss, Provider, apart, changed, in_words, miss, nearest, smallest, unexplained
from ecomp.model.group import Group, Membership
from ecomp.model.query import Amount, Constraint, Has, Unexplained, enabled_only, limit, parse
from ecomp.placement.client import Placement
from ecomp.scheduler.looking import hosts
from ecomp.scheduler.placing.facts import CALLS as CALLS
from ecomp.scheduler.placing.facts import Facts
from ecomp.scheduler.placing.joining import settled
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.looking.ask import Backend

SECONDS = 5.0
"""Seconds for which the reasons are looked for. The refusal has been said by then."""

MOST, SHOWN = 50, 10
"""Computes: of more than MOST the SHOWN nearest are shown."""


def tell(
    store: Store,
    backend: Backend,
    query: str,
    wanted: Membership | None,
    taken: Sequence[Candidate],
    on: str | None,
    say: Callable[[str], None],
    calls: int = CALLS,
) -> None:
    """Say why, a line each, in so many calls to placement. Whatever goes wrong with that is one line too.

    `wanted` is its group, `taken` what the others of a set would take, for which there is room; `on` as it was typed.
    """
    found: Future[list[str]] = Future()

    def find() -> None:
        try:
            placement, offer = backend.result()
            named = {uuid for each in offer.candidates for uuid in each}
            refusal = Refusal(query, settled(store, wanted), taken, on, named)
            found.set_result(reasons(store, placement, refusal, calls))
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


@dataclass(frozen=True)
class Refusal:
    """What found no room: a query, its `group`, and `taken`, what others of its set would take: for them there is room.

    `on` is what was typed for the one compute that it is for: then there is a line for that alone. `named` are the
    computes that placement offered a moment ago.
    """

    query: str
    group: Group | None = None
    taken: Sequence[Candidate] = ()
    on: str | None = None
    named: Collection[str] = ()


def reasons(store: Store, placement: Placement, refusal: Refusal, calls: int = CALLS) -> list[str]:
    """A line for each compute, the nearest miss, and the smallest change that fits, as things are now.

    Where others of the set could be placed (`taken`), no smaller change is named but --count. Placement is asked so
    many times at most.
    Errors: those of etcd and placement.
    """
    try:
        asked = _asked(refusal.query, refusal.on)
    except Unexplained as error:
        return [f'what each compute lacks is not explained for this query: {error}']
    known = hosts.computes(store)
    names = _names(known)
    wanted = [each.any_of[0] for each in asked if isinstance(each, Has) and each.typed]
    try:
        facts = Facts(placement, asked, refusal.named, calls)
        dead = sorted(uuid for uuid, each in facts.listed.items() if uuid not in known.living and each.name == uuid)
        there, are_many = len(names) + len(dead), len(names) + len(dead) > MOST
        chosen = dict.fromkeys([*wanted, *names] if are_many else [*names, *dead])
        said, misses = _examined(facts, asked, chosen, known, refusal.group, refusal.taken)
    except Unexplained as error:
        return [f'what each compute lacks is not explained: {error}']
    said |= _limited(refusal, misses)
    if are_many:
        failing = {each.provider: len(each.failures) for each in misses}
        near = sorted((uuid for uuid in said if uuid in names), key=lambda uuid: failing.get(uuid, len(asked) + 1))
        chosen = dict.fromkeys([*wanted, *near[:SHOWN]])
        said = {uuid: said[uuid] for uuid in chosen if uuid in said}
        misses = [each for each in misses if each.provider in said]
    lines = _lines(said, known, there, refusal.on, wanted)
    if any(each.fits for each in misses):
        return lines
    advice = _advice(facts, asked, misses, known, wanted)
    if not refusal.taken:
        return [*lines, *advice]
    return [*lines, *advice[:1], f'the smallest change that fits: --count {len(refusal.taken)}']


def _limited(refusal: Refusal, misses: Iterable[Miss]) -> dict[str, str]:
    """What is said of the computes that have room, and that the query's own limit= keeps placement from naming."""
    limited = limit(refusal.query)
    if limited is None or not limited.isdecimal() or len(refusal.named) < int(limited):
        return {}
    # Those that placement named do for no group, no set, or are dead: it will name them again.
    why = f'has room, but limit={limited} has placement name fewer computes: ask without it'
    return {each.provider: why for each in misses if each.fits and each.provider not in refusal.named}


def _lines(
    said: Mapping[str, str], known: Computes, there: int, on: str | None, wanted: Collection[str]
) -> list[str]:
    """A line for each of the `wanted` computes; where none is, for each, and how many of all `there` are left out."""
    if wanted:
        return [f'{on}: {each}' for uuid, each in said.items() if uuid in wanted] or [f'{on}: there is no such compute']
    lines = [f'{known.called(uuid)}: {each}' for uuid, each in said.items() if each]
    left = there - len(said)
    return [*lines, f'{left} more are not shown: no nearer, or not alive'] if left else lines


def lacking(
    placement: Placement, query: str, known: Computes, among: Sequence[str], group: Group | None = None
) -> dict[str, str]:
    """{compute: what it lacks for a query} of the computes `among`, MOST of them at most.

    Errors: those of placement; Unexplained.
    """
    asked = _asked(query)
    said, _ = _examined(Facts(placement, asked), asked, among[:MOST], known, group)
    return {uuid: each for uuid, each in said.items() if each}


def _asked(query: str, on: str | None = None) -> tuple[Constraint, ...]:
    """The constraints of a query, of which one may have been typed as --on. Unexplained."""
    typed = '' if on is None else f'--on {on}'
    return tuple(
        each._replace(typed=typed) if isinstance(each, Has) and each.key == 'in_tree' else each
        for each in parse(enabled_only(query))
    )


def _examined(
    facts: Facts,
    asked: Sequence[Constraint],
    chosen: Iterable[str],
    known: Computes,
    group: Group | None = None,
    taken: Sequence[Candidate] = (),
) -> tuple[dict[str, str], list[Miss]]:
    """What each chosen compute lacks, in words, and the misses of those that these rules cover.

    '' for what is no compute. One of which nothing could be found out is in neither. Unexplained.
    """
    takers = [each.compute for each in taken]
    given: dict[str, list[Resources]] = {}
    for each in taken:
        for uuid, amounts in each.allocations.items():
            given.setdefault(uuid, []).append(amounts)
    chosen = list(chosen)
    found = facts.find(chosen, known.living, given)
    words: dict[str, str] = {}
    misses: list[Miss] = []
    for uuid in chosen:
        provider = found.get(uuid)
        if provider is None and uuid in facts.listed:
            continue
        said = _apart(provider, uuid in known.living)
        if said is None and provider is not None:
            said = unexplained(asked, provider, facts.sharing)
            if said is None:
                misses.append(apart(miss(asked, provider), group, takers, known.called))
                said = _lacks(misses[-1], known.called(uuid), provider.taken_count)
            else:
                said = f'not explained: {said}'
        words[uuid] = said or ''
    return words, misses


def _lacks(found: Miss, called: str, taken_count: int) -> str:
    # Two hosts of one name are called by name and uuid, and then only the uuid is what the command takes.
    cure = f' (eschedule {_enable(found, called)})'
    said = (each.why + cure if each.is_disabled else each.why for each in found.failures)
    is_short = any(isinstance(each.constraint, Amount) for each in found.failures)
    takes = f'takes {taken_count} of them, then ' if taken_count and is_short else ''
    return takes + '; '.join(said) or 'has room by now: ask again'


def _enable(found: Miss, called: str) -> str:
    return f'host enable {found.provider if found.provider in called else called}'


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
    facts: Facts,
    asked: Sequence[Constraint],
    misses: Collection[Miss],
    known: Computes,
    wanted: Collection[str],
) -> list[str]:
    """The nearest miss, and the smallest change that fits, which placement was asked about.

    A disabled compute that lacks nothing else is enabled: where it is `wanted`, and where no change of the query fits.
    """
    if not misses:
        return []
    lines = [] if wanted else [f'the nearest miss is {known.called(nearest(misses)[0].provider)}']
    best = smallest(misses)
    disabled = [each for each in nearest(misses) if each.is_disabled and (not wanted or each.provider in wanted)]
    enabled = [f'eschedule {_enable(each, known.called(each.provider))}' for each in disabled[:1]]
    host = known.called(best.provider) if best else ''
    done = in_words(best.cures, host) if best and best.cures else ''
    if best is None or not best.cures or any(each.freed for each in best.cures):
        if enabled:
            return [*lines, f'the smallest change that fits: {enabled[0]}']
        no_change = f'no change of the query alone fits: {done}' if done else 'no change of the query fits any of them'
        return [*lines, no_change]
    fits = enabled if wanted else []
    with suppress(EcompError):
        # What was read is a moment old, and what never came to be looked at may be wrong too: a trait nobody knows.
        if facts.offers(changed(asked, best.cures), best.provider):
            fits.append(f'{done} (on {host})')
    return [*lines, f'the smallest change that fits: {", or ".join(fits)}'] if fits else lines


def _names(known: Computes) -> dict[str, str]:
    """What each living compute is called, in the order they are shown: by host name, and uuid where that is not one."""
    called = {uuid: known.called(uuid) for uuid in known.living}
    return dict(sorted(called.items(), key=lambda each: (known.host(each[0]) is None, each[1])))
