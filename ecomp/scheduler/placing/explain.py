"""Why a request found no room: what each compute lacks, the nearest miss, and the smallest change that fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from ecomp.errors import EcompError
from ecomp.model.choose import Candidate
from ecomp.model.computes import Computes
from ecomp.model.explain import Miss, Provider, apart, changed, in_words, miss, nearest, smallest, unexplained
from ecomp.model.group import Group, Membership
from ecomp.model.query import Amount, Constraint, Has, Unexplained, enabled_only, parse, words
from ecomp.placement import room
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.looking import hosts
from ecomp.scheduler.placing.joining import settled
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.scheduler.looking.ask import Backend

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
    on: str | None,
    say: Callable[[str], None],
) -> None:
    """Say why, a line each. Whatever goes wrong with that is one line too, and never more.

    `wanted` is its group, `taken` what the others of a set would take, for which there is room; `on` as it was typed.
    """
    found: Future[list[str]] = Future()

    def find() -> None:
        try:
            found.set_result(reasons(store, backend.result()[0], query, settled(store, wanted), taken, on))
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
    on: str | None = None,
    most: int = MOST,
    shown: int = SHOWN,
) -> list[str]:
    """A line for each compute, the nearest miss, and the smallest change that fits, as things are now.

    With the others of a set that are `taken` to be placed, there is none: that is to ask for so many. `on` is what was
    typed for the one compute that the query is for: then there is a line for that alone.
    Errors: those of etcd and placement.
    """
    try:
        asked = _asked(query, on)
    except Unexplained as error:
        return [f'what each compute lacks is not explained for this query: {error}']
    known, listed = hosts.computes(store), room.everyone(placement)
    names = _names(known)
    dead = sorted(uuid for uuid, each in listed.items() if uuid not in known.living and each.name == uuid)
    wanted = [each.any_of[0] for each in asked if isinstance(each, Has) and each.typed]
    chosen = [*names, *dead]
    if len(chosen) > most:
        chosen = list(dict.fromkeys([*wanted, *_nearest(placement, asked, names)[:shown]]))
    said, misses = _examined(placement, asked, chosen, known, listed, group, taken)
    if wanted:
        lines = [f'{on}: {each}' for uuid, each in said.items() if uuid in wanted]
        lines = lines or [f'{on}: there is no such compute']
    else:
        lines = [f'{known.called(uuid)}: {each}' for uuid, each in said.items()]
        left = len(names) + len(dead) - len(chosen)
        lines += [f'{left} more are not shown: no nearer, or not alive'] if left else []
    if any(each.fits for each in misses):
        return lines
    advice = _advice(placement, asked, misses, known, wanted)
    if not taken:
        return [*lines, *advice]
    return [*lines, *advice[:1], f'the smallest change that fits: --count {len(taken)}']


def lacking(
    placement: Placement, query: str, known: Computes, among: Sequence[str], group: Group | None = None
) -> dict[str, str]:
    """{compute: what it lacks for a query} of the computes `among`, MOST of them at most.

    Errors: those of placement; Unexplained.
    """
    return _examined(placement, _asked(query), among[:MOST], known, room.everyone(placement), group)[0]


def _asked(query: str, on: str | None = None) -> tuple[Constraint, ...]:
    """The constraints of a query, of which one may have been typed as --on. Unexplained."""
    typed = '' if on is None else f'--on {on}'
    return tuple(
        each._replace(typed=typed) if isinstance(each, Has) and each.key == 'in_tree' else each
        for each in parse(enabled_only(query))
    )


def _examined(
    placement: Placement,
    asked: Sequence[Constraint],
    chosen: Iterable[str],
    known: Computes,
    listed: Mapping[str, room.ProviderListing],
    group: Group | None = None,
    taken: Sequence[Candidate] = (),
) -> tuple[dict[str, str], list[Miss]]:
    """What each chosen compute lacks, in words, and the misses of those that these rules cover."""
    sharing = room.sharing(placement)
    keys = {each.key for each in asked if not isinstance(each, Amount)}
    traits, aggregates = not keys.isdisjoint({'required', 'root_required'}), bool(sharing) or 'member_of' in keys
    takers = [each.compute for each in taken]
    words: dict[str, str] = {}
    misses: list[Miss] = []
    for uuid in chosen:
        provider = None
        if uuid in listed:
            provider = room.look(placement, uuid, listed[uuid].alone, traits=traits, aggregates=aggregates)
        said = _apart(provider, uuid in known.living)
        if said is None and provider is not None:
            beyond = unexplained(asked, provider, sharing)
            if beyond is None:
                given = [each.allocations[uuid] for each in taken if uuid in each.allocations]
                misses.append(apart(miss(asked, provider.less(given)), group, takers, known.called))
            said = _lacks(misses[-1], known.called(uuid)) if beyond is None else f'not explained: {beyond}'
        if said:
            words[uuid] = said
    return words, misses


def _lacks(found: Miss, called: str) -> str:
    # Two hosts of one name are called by name and uuid, and then only the uuid is what the command takes.
    cure = f' (eschedule {_enable(found, called)})'
    said = (each.why + cure if each.is_disabled else each.why for each in found.failures)
    return '; '.join(said) or 'has room by now: ask again'


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
    placement: Placement,
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
        named = candidates(placement, words(changed(asked, best.cures))).candidates
        if any(best.provider in each for each in named):
            fits.append(f'{done} (on {host})')
    return [*lines, f'the smallest change that fits: {", or ".join(fits)}'] if fits else lines


def _names(known: Computes) -> dict[str, str]:
    """What each living compute is called, in the order they are shown: by host name, and uuid where that is not one."""
    called = {uuid: known.called(uuid) for uuid in known.living}
    return dict(sorted(called.items(), key=lambda each: (known.host(each[0]) is None, each[1])))


def _nearest(placement: Placement, asked: Iterable[Constraint], computes: Iterable[str]) -> list[str]:
    """The computes, those first on which the fewest constraints fail: a request for each constraint."""
    holding = [room.holding(placement, each) for each in asked]
    return sorted(computes, key=lambda uuid: sum(uuid not in each for each in holding))
