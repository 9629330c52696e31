"""Explain a refusal: what each compute lacks, and the smallest change that fits.

This takes a few calls to placement in a cluster of any size. One call returns the free amounts of all providers with
any of a class free. A provider that is entirely full is in no answer: a living compute's hint gives its size, and
others are read one by one while calls are left. The last calls read the limits of the nearest computes.
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

# Calls to placement for all reasons of a refusal, besides the query that found no room.
CALLS = 5

# Of these, the last one: it checks the smallest change that fits.
ADVICE = 1

# Limits of one request: only calls about a single provider return them.
LIMITS = ('min_unit', 'max_unit', 'step_size')

# Classes to read first, the likeliest to be free first; then the others of the query.
FIRST = ('MEMORY_MB', 'DISK_GB', 'VCPU')


class Facts:
    """The providers as placement knows them, read with at most `max_calls` calls.

    `constraints` are the query's for one provider; `offered` the providers in placement's recent answer to it.
    """

    def __init__(
        self, placement: Placement, asked: Sequence[Constraint], named: Collection[str] = (), calls: int = CALLS
    ) -> None:
        self._placement = placement
        self._asked = asked
        self._named = named
        self._left = calls - 1
        self.listed = providers.everyone(placement)
        self.sharing: list[Provider] = []
        self._seen: dict[str, Provider] = {}
        # Classes of which only providers in _known_providers have anything free.
        self._none_of: set[str] = set()
        # The providers in each aggregate that matters.
        self._near: dict[str, frozenset[str]] = {}
        self._amounts = [constraint for constraint in asked if isinstance(constraint, Amount)]
        self._others = [constraint for constraint in asked if not isinstance(constraint, Amount)]
        self._traits = {constraint for constraint in self._others if constraint.key in ('required', 'root_required')}
        # Calls to read one provider.
        self._each = 3 if self._traits else 2

    def find(
        self, wanted: Iterable[str], living: Mapping[str, Living], given: Mapping[str, Sequence[Resources]]
    ) -> dict[str, Provider]:
        """Read those of these providers that the calls suffice for, more important ones first.

        `extra_used` is added to their usage. Raises the errors of placement, and Unexplained.
        """
        uuids = [uuid for uuid in wanted if uuid in self.listed]
        hints = {uuid: presence.room for uuid, presence in living.items()}
        member_of = [constraint for constraint in self._others if constraint.key == 'member_of']
        self._look_into(
            name
            for constraint in member_of
            for name in (constraint.any_of if isinstance(constraint, Has) else [constraint.name])
        )
        self._look_for_free(uuids, hints)
        results = {uuid: self._whole(self._seen[uuid]) for uuid in uuids if uuid in self._seen}
        results |= self._full([uuid for uuid in uuids if uuid not in results], hints, results)
        results |= self._read([uuid for uuid in uuids if uuid not in results], results)
        results = {uuid: results[uuid].less(given.get(uuid, ())) for uuid in uuids if uuid in results}
        return self._limited(self._undoubted(results, living), living)

    def offers(self, query: Sequence[Constraint], provider: str) -> bool:
        """Return whether placement offers a provider for a query; False if no call is left."""
        if not self._left:
            return False
        self._left -= 1
        constraints = [part for part in query if isinstance(part, Amount) or part.key != 'in_tree']
        offered = candidates(self._placement, words([*constraints, Has('in_tree', (provider,))])).candidates
        return any(provider in allocations for allocations in offered)

    def _look_into(self, aggregates: Iterable[str]) -> None:
        """Read the members of these aggregates."""
        for name in dict.fromkeys(aggregates):
            if name not in self._near:
                self._spend(1)
                self._near[name] = providers.holding(self._placement, Has('member_of', (name,)))

    def _look_for_free(self, there: Collection[str], hints: Mapping[str, Hint | None]) -> None:
        classes = list(dict.fromkeys([*FIRST, *(amount.name for amount in self._amounts)]))
        sharing: frozenset[str] | None = None
        while classes and self._left > self._kept(map(self._whole, self._seen.values())):
            unseen = [uuid for uuid in there if uuid not in self._seen]
            if not unseen or len(unseen) * self._each <= self._left - ADVICE - (sharing is None):
                break  # few enough to be read one by one

            def having(name: str, unseen: Sequence[str] = unseen) -> int:
                return sum(_may_have(hints.get(uuid), name) for uuid in unseen)

            name = max(classes, key=having)
            classes.remove(name)
            self._left -= 1
            # Time has passed since the last call: what was read first counts.
            self._seen = {**providers.with_free(self._placement, name), **self._seen}
            self._none_of.add(name)
            sharing = self._sharing(hints) if sharing is None else sharing
        sharing = self._sharing(hints) if sharing is None else sharing
        self._look_at_sharing(
            sharing | {uuid for uuid, provider in self._seen.items() if providers.SHARES in provider.traits}
        )

    def _sharing(self, hints: Mapping[str, Hint | None]) -> frozenset[str]:
        """Find unread providers that share with others; a compute with a hint does not."""
        if not self._left or all(uuid in self._seen or hints.get(uuid) for uuid in self.listed):
            return frozenset()
        self._left -= 1
        return matching(self._placement, f'required={providers.SHARES}')

    def _look_at_sharing(self, uuids: Iterable[str]) -> None:
        for uuid in sorted(uuids):
            provider = self._seen.get(uuid)
            if provider is None:
                self._spend(2)
                provider = providers.look(self._placement, uuid, True, traits=False, aggregates=False)
            if provider is not None:
                self._spend(1)
                aggregates = providers.names_of(self._placement, uuid, AGGREGATES)
                self._look_into(sorted(aggregates))
                self.sharing.append(replace(provider, aggregates=aggregates))

    def _spend(self, calls: int) -> None:
        if self._left < calls:
            raise Unexplained('more aggregates matter than are looked into at once')
        self._left -= calls

    def _full(
        self, unseen: Iterable[str], hints: Mapping[str, Hint | None], found: Mapping[str, Provider]
    ) -> dict[str, Provider]:
        """Infer full providers from their hints: their capacity, all of it used."""
        if self._traits - {ENABLED}:
            return {}  # hints do not contain traits
        full = {
            uuid: self._whole(Provider(uuid, {
                name: Inventory(hinted.capacity, used=hinted.capacity) for name, hinted in hint.items()
            }))
            for uuid in unseen if (hint := hints.get(uuid)) is not None and self._is_full(hint)
        }  # fmt: skip
        if full and self._traits and self._left > self._kept([*found.values(), *full.values()]):
            self._left -= 1
            disabled = providers.having(self._placement, DISABLED)
            full |= {uuid: replace(full[uuid], traits=[DISABLED]) for uuid in disabled.intersection(full)}
        return full

    def _is_full(self, hint: Hint) -> bool:
        """True if each requested class in the hint is exactly used up, by hint or placement.

        An overcommitted class has a negative hint: its usage is larger than the hint can say.
        """
        free = [(amount.name, hint[amount.name].hundredths) for amount in self._amounts if amount.name in hint]
        return all(hundredths == 0 or (hundredths > 0 and name in self._none_of) for name, hundredths in free)

    def _read(self, unseen: Iterable[str], found: Mapping[str, Provider]) -> dict[str, Provider]:
        """Read providers one by one, as many as there are calls for."""
        unseen, providers_read = list(unseen), dict[str, Provider]()
        spare = self._left - self._kept(found.values()) if unseen else 0
        for uuid in unseen:
            if spare < self._each:
                break
            spare, self._left = spare - self._each, self._left - self._each
            provider = providers.look(self._placement, uuid, True, traits=bool(self._traits), aggregates=False)
            providers_read |= {uuid: self._whole(provider)} if provider is not None else {}
        return providers_read

    def _whole(self, provider: Provider) -> Provider:
        """Return the provider with its aggregates, and whether it stands alone."""
        aggregates = frozenset(name for name, members in self._near.items() if provider.uuid in members)
        listed = self.listed.get(provider.uuid)
        return replace(provider, aggregates=aggregates, alone=listed is None or listed.alone)

    def _kept(self, found: Iterable[Provider]) -> int:
        """Count the calls kept for is_offered(): 0 if no query change fits the providers read."""
        has_providers = False
        for provider in found:
            has_providers, cures = True, miss(self._asked, provider).cures
            if cures and not any(cure.freed for cure in cures):
                return ADVICE
        return 0 if has_providers else ADVICE

    def _undoubted(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """Add the limits, which operators may set, of providers that have room and are not offered.

        Those for which no call is left are dropped.
        """

        def doubted() -> list[str]:
            doubtful = [provider for uuid, provider in found.items() if uuid in living and uuid not in self._named]
            doubtful = [
                provider
                for provider in doubtful
                if not provider.is_closed and not unexplained(self._asked, provider, self.sharing)
            ]
            return [provider.uuid for provider in doubtful if miss(self._asked, provider).fits]

        if len(doubted()) > self._left - ADVICE and self._left:
            self._left -= 1
            offer = candidates(self._placement, words(self._asked))
            self._named = {*self._named, *(uuid for allocations in offer.candidates for uuid in allocations)}
        for uuid in doubted():
            provider = found.pop(uuid)
            if self._left > ADVICE:
                found[uuid] = self._with_limits(provider)
        return found

    def _limited(self, found: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """Add the limits of the nearest providers while calls are left."""
        unread = (provider for uuid, provider in found.items() if uuid in living and uuid in self._seen)
        spare = self._left - self._kept(found.values())
        for result in nearest(miss(self._asked, result) for result in unread)[: max(spare, 0)] if spare else ():
            found[result.provider] = self._with_limits(found[result.provider])
        return found

    def _with_limits(self, provider: Provider) -> Provider:
        self._left -= 1
        self._seen.pop(provider.uuid, None)
        with suppress(NotFound):
            answer = inventory(self._placement, provider.uuid)
            limits = {
                name: shown._replace(**{part: answer[name][part] for part in LIMITS if part in answer.get(name, {})})
                for name, shown in provider.inventories.items()
            }
            return replace(provider, inventories=limits)
        return provider


def _may_have(hint: Hint | None, name: str) -> bool:
    return hint is None or (name in hint and hint[name].hundredths > 0)


# Seconds for finding the reasons; the refusal itself is reported before.
SECONDS = 5.0

# Up to MAX_LISTED_COMPUTES have a line each; of more, the MAX_NEAREST_COMPUTES nearest.
MOST = 50
SHOWN = 10


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
    """Report the reasons, a line each, or one line if they cannot be found out; see Refusal."""
    lines: Future[list[str]] = Future()

    def find() -> None:
        try:
            placement, offer = backend.result()
            named = {uuid for allocations in offer.candidates for uuid in allocations}
            refusal = Refusal(query, settled(store, wanted), taken, on, named)
            lines.set_result(reasons(store, placement, refusal, calls))
        except BaseException as error:
            lines.set_exception(error)

    try:
        # A daemon thread, which may outlive the time-out here: its calls have longer ones.
        threading.Thread(target=find, name='reasons', daemon=True).start()
        for line in lines.result(SECONDS):
            say(line)
    except TimeoutError:
        say(f'what each compute lacks could not be found out within {SECONDS:g} s')
    except KeyboardInterrupt:
        pass  # the refusal itself was reported before
    except Exception as error:
        say(f'what each compute lacks could not be found out: {str(error) or type(error).__name__}')


@dataclass(frozen=True)
class Refusal:
    """The request that found no room, its group, and the places `taken` by others of its set.

    `on` is the argument of --on: then only that compute has a line. `named` are the providers that placement offered.
    """

    query: str
    group: Group | None = None
    taken: Sequence[Candidate] = ()
    on: str | None = None
    named: Collection[str] = ()


def reasons(store: Store, placement: Placement, refusal: Refusal, calls: int = CALLS) -> list[str]:
    """Return a line for each compute, the nearest miss, and the smallest change that fits.

    With `taken` that change is a smaller --count. Raises the errors of etcd and placement.
    """
    try:
        constraints = _asked(refusal.query, refusal.on)
    except Unexplained as error:
        return [f'what each compute lacks is not explained for this query: {error}']
    known_computes = hosts.computes(store)
    names = _names(known_computes)
    requested = [constraint.any_of[0] for constraint in constraints if isinstance(constraint, Has) and constraint.typed]
    try:
        facts = Facts(placement, constraints, refusal.named, calls)
        dead = sorted(
            uuid
            for uuid, listing in facts.listed.items()
            if uuid not in known_computes.living and listing.name == uuid
        )
        compute_count, are_many = len(names) + len(dead), len(names) + len(dead) > MOST
        chosen = dict.fromkeys([*requested, *names] if are_many else [*names, *dead])
        texts, misses = _examined(facts, constraints, chosen, known_computes, refusal)
    except Unexplained as error:
        return [f'what each compute lacks is not explained: {error}']
    texts |= _limited(refusal, misses)
    if are_many:
        failing = {result.provider: len(result.failures) for result in misses}
        shown = sorted(
            (uuid for uuid in texts if uuid in names), key=lambda uuid: failing.get(uuid, len(constraints) + 1)
        )
        chosen = dict.fromkeys([*requested, *shown[:SHOWN]])
        texts = {uuid: texts[uuid] for uuid in chosen if uuid in texts}
        misses = [result for result in misses if result.provider in texts]
    lines = _lines(texts, known_computes, compute_count, refusal.on, requested)
    if any(result.fits for result in misses):
        return lines
    advice = _advice(facts, constraints, misses, known_computes, requested)
    if not refusal.taken:
        return [*lines, *advice]
    return [*lines, *advice[:1], f'the smallest change that fits: --count {len(refusal.taken)}']


def _limited(refusal: Refusal, misses: Iterable[Miss]) -> dict[str, str]:
    """Explain computes with room that placement did not offer because of the query's limit=."""
    limited = limit(refusal.query)
    if limited is None or not limited.isdecimal() or len(refusal.named) < int(limited):
        return {}
    # Those that placement offered are unsuitable for the group or the set, or dead: it would offer them again.
    why = f'has room, but limit={limited} has placement name fewer computes: ask without it'
    return {result.provider: why for result in misses if result.fits and result.provider not in refusal.named}


def _lines(said: Mapping[str, str], known: Computes, there: int, on: str | None, wanted: Collection[str]) -> list[str]:
    """Format a line for each of the `requested` computes or, without any, for all."""
    if wanted:
        return [f'{on}: {text}' for uuid, text in said.items() if uuid in wanted] or [f'{on}: there is no such compute']
    lines = [f'{known.called(uuid)}: {text}' for uuid, text in said.items() if text]
    hidden = there - len(said)
    return [*lines, f'{hidden} more are not shown: no nearer, or not alive'] if hidden else lines


def lacking(
    placement: Placement, query: str, known: Computes, among: Sequence[str], group: Group | None = None
) -> dict[str, str]:
    """Return what the first MAX_LISTED_COMPUTES lack. Errors: placement's, Unexplained."""
    constraints = _asked(query)
    texts, _ = _examined(Facts(placement, constraints), constraints, among[:MOST], known, Refusal(query, group))
    return {uuid: text for uuid, text in texts.items() if text}


def _asked(query: str, on: str | None = None) -> tuple[Constraint, ...]:
    """Parse a query's constraints, one of which may stem from --on. Raises Unexplained."""
    typed = '' if on is None else f'--on {on}'
    return tuple(
        constraint._replace(typed=typed) if isinstance(constraint, Has) and constraint.key == 'in_tree' else constraint
        for constraint in parse(enabled_only(query))
    )


def _examined(
    facts: Facts, asked: Sequence[Constraint], chosen: Iterable[str], known: Computes, refusal: Refusal
) -> tuple[dict[str, str], list[Miss]]:
    """Return what each compute lacks ('': it is none), and the misses that our rules cover.

    A compute of which nothing could be read is in neither. Raises Unexplained.
    """
    takers = [candidate.compute for candidate in refusal.taken]
    extra_used: dict[str, list[Resources]] = {}
    for candidate in refusal.taken:
        for uuid, amounts in candidate.allocations.items():
            extra_used.setdefault(uuid, []).append(amounts)
    chosen = list(chosen)
    providers_found = facts.find(chosen, known.living, extra_used)
    words: dict[str, str] = {}
    misses: list[Miss] = []
    for uuid in chosen:
        provider = providers_found.get(uuid)
        if provider is None and uuid in facts.listed:
            continue
        text = _apart(provider, uuid in known.living)
        if text is None and provider is not None:
            text = unexplained(asked, provider, facts.sharing)
            if text is None:
                misses.append(apart(miss(asked, provider), refusal.group, takers, known.called))
                text = _lacks(misses[-1], known.called(uuid), provider.taken_count)
            else:
                text = f'not explained: {text}'
        words[uuid] = text or ''
    return words, misses


def _lacks(found: Miss, called: str, taken_count: int) -> str:
    # Two hosts of one name are shown with their uuid, and then the command takes only the uuid.
    cure = f' (eschedule {_enable(found, called)})'
    reasons_given = (failure.why + cure if failure.is_disabled else failure.why for failure in found.failures)
    is_short = any(isinstance(failure.constraint, Amount) for failure in found.failures)
    takes = f'takes {taken_count} of them, then ' if taken_count and is_short else ''
    return takes + '; '.join(reasons_given) or 'has room by now: ask again'


def _enable(found: Miss, called: str) -> str:
    return f'host enable {found.provider if found.provider in called else called}'


def _apart(provider: Provider | None, alive: bool) -> str | None:
    """Explain a compute without room for any query; '' if it is none, None for all others."""
    if alive:
        if provider is None:
            return 'has no resource provider'
        return 'is closed: all its VCPU is reserved' if provider.is_closed else None
    # Another cloud may use this placement: its providers have other names or no VCPU.
    if provider is None or (provider.inventories and 'VCPU' not in provider.inventories):
        return ''
    return 'is closed: its ecompute was stopped' if provider.is_closed else 'is not alive'


def _advice(
    facts: Facts, asked: Sequence[Constraint], misses: Collection[Miss], known: Computes, wanted: Collection[str]
) -> list[str]:
    """Return the nearest miss, and the smallest change that fits, checked with placement.

    To enable a disabled compute is advised if it was requested, or if no change of the query fits.
    """
    if not misses:
        return []
    lines = [] if wanted else [f'the nearest miss is {known.called(nearest(misses)[0].provider)}']
    best = smallest(misses)
    disabled = [
        result for result in nearest(misses) if result.is_disabled and (not wanted or result.provider in wanted)
    ]
    enabled = [f'eschedule {_enable(result, known.called(result.provider))}' for result in disabled[:1]]
    host = known.called(best.provider) if best else ''
    done = in_words(best.cures, host) if best and best.cures else ''
    if best is None or not best.cures or any(cure.freed for cure in best.cures):
        if enabled:
            return [*lines, f'the smallest change that fits: {enabled[0]}']
        no_change = f'no change of the query alone fits: {done}' if done else 'no change of the query fits any of them'
        return [*lines, no_change]
    fits = enabled if wanted else []
    with suppress(EcompError):
        # The facts may be stale, or incomplete: placement may not know a trait, say.
        if facts.offers(changed(asked, best.cures), best.provider):
            fits.append(f'{done} (on {host})')
    return [*lines, f'the smallest change that fits: {", or ".join(fits)}'] if fits else lines


def _names(known: Computes) -> dict[str, str]:
    """Return {uuid: display name} of living computes: first those with a host name, sorted."""
    called = {uuid: known.called(uuid) for uuid in known.living}
    return dict(sorted(called.items(), key=lambda each: (known.host(each[0]) is None, each[1])))
