"""Why a request found no room: what each compute lacks, the nearest miss, and the smallest change that fits.

It takes a few calls to placement, however many computes there are. One answer has the free amounts of every provider
that has any of a class free. A provider that is full of everything is in no answer: a living compute's hint says how
large it is, and the rest is read one by one while calls are left. With the calls left at the end the limits of one
amount are read for the nearest computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from ecomp.errors import EcompError, NotFound
from ecomp.model.allocation import Inventory, Resources
from ecomp.model.choose import Candidate, Offer
from ecomp.model.explain import Miss, Provider, apart, changed, in_words, miss, nearest, smallest, unexplained
from ecomp.model.group import Group, Membership
from ecomp.model.host import Computes, Hint, Living
from ecomp.model.query import ENABLED, Amount, Constraint, Has, Unexplained, enabled_only, limit, parse, words
from ecomp.model.status import DISABLED
from ecomp.placement import providers
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, inventory, matching
from ecomp.scheduler.looking import hosts
from ecomp.scheduler.placing.claim import settled
from ecomp.store.client import Store

CALLS = 5
"""Calls to placement for all that is said of a refusal. With the question that found no room that is six."""

ADVICE = 1
"""The last of them: whether the smallest change fits."""

LIMITS = ('min_unit', 'max_unit', 'step_size')
"""Of what one may ask for: in no answer about several providers."""

FIRST = ('MEMORY_MB', 'DISK_GB', 'VCPU')
"""What is asked about, the likeliest to be free first; then what else the query asks for."""


class Facts:
    """What placement has of the providers, as far as `calls` go; `asked` is what a query asks of one.

    `named` are the providers that placement offered for it a moment ago.
    """

    def __init__(
        self, placement: Placement, asked: Sequence[Constraint], named: Collection[str] = (), calls: int = CALLS
    ) -> None:
        self._placement, self._asked, self._named = placement, asked, named
        self._left = calls - 1
        self.listed = providers.everyone(placement)
        self.sharing: list[Provider] = []
        self._seen: dict[str, Provider] = {}
        self._none_of: set[str] = set()
        """The classes of which every provider that is not in _seen has nothing free."""
        self._near: dict[str, frozenset[str]] = {}
        """The providers in each aggregate that matters."""
        self._amounts = [each for each in asked if isinstance(each, Amount)]
        self._others = [each for each in asked if not isinstance(each, Amount)]
        self._traits = {each for each in self._others if each.key in ('required', 'root_required')}
        self._each = 3 if self._traits else 2
        """Calls for one that is read by itself."""

    def find(
        self, wanted: Iterable[str], living: Mapping[str, Living], given: Mapping[str, Sequence[Resources]]
    ) -> dict[str, Provider]:
        """Those of the wanted of which it can be found out, the more important first; what is `given` counts as used.

        Errors: those of placement; Unexplained.
        """
        there = [uuid for uuid in wanted if uuid in self.listed]
        hints = {uuid: each.room for uuid, each in living.items()}
        about = [each for each in self._others if each.key == 'member_of']
        self._look_into(name for each in about for name in (each.any_of if isinstance(each, Has) else [each.name]))
        self._look_for_free(there, hints)
        found = {uuid: self._whole(self._seen[uuid]) for uuid in there if uuid in self._seen}
        found |= self._full([uuid for uuid in there if uuid not in found], hints, found)
        found |= self._read([uuid for uuid in there if uuid not in found], found)
        found = {uuid: found[uuid].less(given.get(uuid, ())) for uuid in there if uuid in found}
        return self._limited(self._undoubted(found, living), living)

    def offers(self, query: Sequence[Constraint], provider: str) -> bool:
        """Whether placement would give on a provider what a changed query asks for; False where no call is left."""
        if not self._left:
            return False
        self._left -= 1
        others = [each for each in query if isinstance(each, Amount) or each.key != 'in_tree']
        named = candidates(self._placement, words([*others, Has('in_tree', (provider,))])).candidates
        return any(provider in each for each in named)

    def _look_into(self, aggregates: Iterable[str]) -> None:
        """Who is in these aggregates."""
        for name in dict.fromkeys(aggregates):
            if name not in self._near:
                self._spend(1)
                self._near[name] = providers.holding(self._placement, Has('member_of', (name,)))

    def _look_for_free(self, there: Collection[str], hints: Mapping[str, Hint | None]) -> None:
        classes = list(dict.fromkeys([*FIRST, *(each.name for each in self._amounts)]))
        sharing: frozenset[str] | None = None
        while classes and self._left > self._kept(map(self._whole, self._seen.values())):
            unseen = [uuid for uuid in there if uuid not in self._seen]
            if not unseen or len(unseen) * self._each <= self._left - ADVICE - (sharing is None):
                break  # so few are read one by one

            def having(name: str, unseen: Sequence[str] = unseen) -> int:
                return sum(_may_have(hints.get(uuid), name) for uuid in unseen)

            name = max(classes, key=having)
            classes.remove(name)
            self._left -= 1
            # A moment has passed: what has been seen counts as it was.
            self._seen = {**providers.with_free(self._placement, name), **self._seen}
            self._none_of.add(name)
            sharing = self._sharing(hints) if sharing is None else sharing
        sharing = self._sharing(hints) if sharing is None else sharing
        self._look_at_sharing(sharing | {uuid for uuid, each in self._seen.items() if providers.SHARES in each.traits})

    def _sharing(self, hints: Mapping[str, Hint | None]) -> frozenset[str]:
        """Those of which nothing is known yet that share with others: what hints is a compute, and none of these."""
        if not self._left or all(uuid in self._seen or hints.get(uuid) for uuid in self.listed):
            return frozenset()
        self._left -= 1
        return matching(self._placement, f'required={providers.SHARES}')

    def _look_at_sharing(self, uuids: Iterable[str]) -> None:
        for uuid in sorted(uuids):
            found = self._seen.get(uuid)
            if found is None:
                self._spend(2)
                found = providers.look(self._placement, uuid, True, traits=False, aggregates=False)
            if found is not None:
                self._spend(1)
                near = providers.names_of(self._placement, uuid, AGGREGATES)
                self._look_into(sorted(near))
                self.sharing.append(replace(found, aggregates=near))

    def _spend(self, calls: int) -> None:
        if self._left < calls:
            raise Unexplained('more aggregates matter than are looked into at once')
        self._left -= calls

    def _full(
        self, unseen: Iterable[str], hints: Mapping[str, Hint | None], found: Mapping[str, Provider]
    ) -> dict[str, Provider]:
        """The unseen that are full, with what they say they have in all: free is nothing of what was asked about."""
        if self._traits - {ENABLED}:
            return {}  # of which they say nothing
        full = {
            uuid: self._whole(Provider(uuid, {
                name: Inventory(each.capacity, used=each.capacity) for name, each in hint.items()
            }))
            for uuid in unseen if (hint := hints.get(uuid)) is not None and self._is_full(hint)
        }  # fmt: skip
        if full and self._traits and self._left > self._kept([*found.values(), *full.values()]):
            self._left -= 1
            disabled = providers.having(self._placement, DISABLED)
            full |= {uuid: replace(full[uuid], traits=[DISABLED]) for uuid in disabled.intersection(full)}
        return full

    def _is_full(self, hint: Hint) -> bool:
        """Whether nothing is free of each class that is asked for and, so far as is known, no more given than is."""
        about = [(each.name, hint[each.name].hundredths) for each in self._amounts if each.name in hint]
        return all(left == 0 or (left > 0 and name in self._none_of) for name, left in about)

    def _read(self, unseen: Iterable[str], found: Mapping[str, Provider]) -> dict[str, Provider]:
        """Those that are read one by one, as many as there are calls for."""
        unseen, more = list(unseen), dict[str, Provider]()
        spare = self._left - self._kept(found.values()) if unseen else 0
        for uuid in unseen:
            if spare < self._each:
                break
            spare, self._left = spare - self._each, self._left - self._each
            each = providers.look(self._placement, uuid, True, traits=bool(self._traits), aggregates=False)
            more |= {uuid: self._whole(each)} if each is not None else {}
        return more

    def _whole(self, provider: Provider) -> Provider:
        """The provider with what else is known of it."""
        near = frozenset(name for name, there in self._near.items() if provider.uuid in there)
        listed = self.listed.get(provider.uuid)
        return replace(provider, aggregates=near, alone=listed is None or listed.alone)

    def _kept(self, found: Iterable[Provider]) -> int:
        """Calls that are kept for offers(): 0 where something is found, and no change of the query alone fits it."""
        some = False
        for each in found:
            some, cures = True, miss(self._asked, each).cures
            if cures and not any(cure.freed for cure in cures):
                return ADVICE
        return 0 if some else ADVICE

    def _undoubted(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """The same, with the limits of those that have room, as it looks, and that placement does not offer.

        A person may have set them. One for which no call is left is left out.
        """

        def doubted() -> list[str]:
            rest = [each for uuid, each in found.items() if uuid in living and uuid not in self._named]
            rest = [each for each in rest if not each.is_closed and not unexplained(self._asked, each, self.sharing)]
            return [each.uuid for each in rest if miss(self._asked, each).fits]

        if len(doubted()) > self._left - ADVICE and self._left:
            self._left -= 1
            offer = candidates(self._placement, words(self._asked))
            self._named = {*self._named, *(uuid for each in offer.candidates for uuid in each)}
        for uuid in doubted():
            each = found.pop(uuid)
            if self._left > ADVICE:
                found[uuid] = self._with_limits(each)
        return found

    def _limited(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """The same, with the limits of the nearest of them, as far as calls are left."""
        unread = (each for uuid, each in found.items() if uuid in living and uuid in self._seen)
        spare = self._left - self._kept(found.values())
        for each in nearest(miss(self._asked, each) for each in unread)[: max(spare, 0)] if spare else ():
            found[each.provider] = self._with_limits(found[each.provider])
        return found

    def _with_limits(self, provider: Provider) -> Provider:
        self._left -= 1
        self._seen.pop(provider.uuid, None)
        with suppress(NotFound):
            have = inventory(self._placement, provider.uuid)
            limits = {
                name: there._replace(**{part: have[name][part] for part in LIMITS if part in have.get(name, {})})
                for name, there in provider.inventories.items()
            }
            return replace(provider, inventories=limits)
        return provider


def _may_have(hint: Hint | None, name: str) -> bool:
    return hint is None or (name in hint and hint[name].hundredths > 0)


SECONDS = 5.0
"""Seconds for which the reasons are looked for. The refusal has been said by then."""

MOST, SHOWN = 50, 10
"""Computes: of more than MOST the SHOWN nearest are shown."""


def tell(
    store: Store,
    backend: Future[tuple[Placement, Offer]],
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
        said, misses = _examined(facts, asked, chosen, known, refusal)
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


def _lines(said: Mapping[str, str], known: Computes, there: int, on: str | None, wanted: Collection[str]) -> list[str]:
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
    said, _ = _examined(Facts(placement, asked), asked, among[:MOST], known, Refusal(query, group))
    return {uuid: each for uuid, each in said.items() if each}


def _asked(query: str, on: str | None = None) -> tuple[Constraint, ...]:
    """The constraints of a query, of which one may have been typed as --on. Unexplained."""
    typed = '' if on is None else f'--on {on}'
    return tuple(
        each._replace(typed=typed) if isinstance(each, Has) and each.key == 'in_tree' else each
        for each in parse(enabled_only(query))
    )


def _examined(
    facts: Facts, asked: Sequence[Constraint], chosen: Iterable[str], known: Computes, refusal: Refusal
) -> tuple[dict[str, str], list[Miss]]:
    """What each chosen compute lacks, in words, and the misses of those that these rules cover.

    '' for what is no compute. One of which nothing could be found out is in neither. Unexplained.
    """
    takers = [each.compute for each in refusal.taken]
    given: dict[str, list[Resources]] = {}
    for each in refusal.taken:
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
                misses.append(apart(miss(asked, provider), refusal.group, takers, known.called))
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
    facts: Facts, asked: Sequence[Constraint], misses: Collection[Miss], known: Computes, wanted: Collection[str]
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
