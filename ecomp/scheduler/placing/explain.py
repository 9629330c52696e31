"""Explain a refusal: what each compute lacks, and the smallest change that fits.

It makes at most MAX_CALLS to placement in a cluster of any size. One call returns the free amounts of all providers
that have any of one class free. A full provider is in no answer: a living compute's hint gives its size, others are
read one by one while calls are left. The last calls read the limits of the nearest computes.
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
from ecomp.model.explain import (
    Miss,
    Provider,
    add_group_failure,
    apply_cures,
    explain_uncovered,
    find_miss,
    find_smallest_miss,
    format_cures,
    sort_misses,
)
from ecomp.model.group import Group, Membership
from ecomp.model.host import Computes, Hint, PresenceFacts
from ecomp.model.query import (
    NOT_DISABLED,
    Amount,
    Constraint,
    Requirement,
    UnsupportedQueryError,
    exclude_disabled,
    format_query,
    parse_query,
    read_limit,
)
from ecomp.model.status import DISABLED, SHARING_TRAIT
from ecomp.placement import providers
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.placement.providers import AGGREGATES, find_matching, read_raw_inventory
from ecomp.scheduler.placing.claim import read_settled_group
from ecomp.scheduler.queries import hosts
from ecomp.store.client import Store

# Calls to placement for all reasons of a refusal, besides the query that found no room.
MAX_CALLS = 5

# Of these, the last one: it checks the smallest change that fits.
ADVICE_CALLS = 1

# Limits of one request: only calls about a single provider return them.
UNIT_LIMITS = ('min_unit', 'max_unit', 'step_size')

# Classes to read first, the likeliest to be free first; then the others of the query.
FIRST_CLASSES = ('MEMORY_MB', 'DISK_GB', 'VCPU')


class ProviderFacts:
    """The providers as placement knows them, read with at most `max_calls` calls, the first by the constructor.

    `constraints` are the part of the query about one provider, `offered` the providers that placement has just returned
    for the query. `listed` are all providers; find() adds to `sharing` those that share with others.
    """

    def __init__(
        self,
        placement: Placement,
        constraints: Sequence[Constraint],
        offered: Collection[str] = (),
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._placement = placement
        self._constraints = constraints
        self._offered = offered
        self._calls_left = max_calls - 1
        self.listed = providers.list_all(placement)
        self.sharing: list[Provider] = []
        self._known_providers: dict[str, Provider] = {}
        # Classes of which only providers in _known_providers have anything free.
        self._exhausted_classes: set[str] = set()
        # The providers in each aggregate that matters.
        self._members_by_aggregate: dict[str, frozenset[str]] = {}
        self._amounts = [constraint for constraint in constraints if isinstance(constraint, Amount)]
        self._other_constraints = [constraint for constraint in constraints if not isinstance(constraint, Amount)]
        self._trait_constraints = {
            constraint for constraint in self._other_constraints if constraint.key in ('required', 'root_required')
        }
        self._calls_per_provider = 3 if self._trait_constraints else 2

    def find(
        self,
        requested: Iterable[str],
        living: Mapping[str, PresenceFacts],
        extra_used: Mapping[str, Sequence[Resources]],
    ) -> dict[str, Provider]:
        """Read these providers while calls are left; those not read or not listed are left out.

        `living` is {compute: presence}; `extra_used` is added to their usage. Raises placement's errors, and
        UnsupportedQueryError if too many aggregates are involved.
        """
        uuids = [uuid for uuid in requested if uuid in self.listed]
        hints = {uuid: presence.room for uuid, presence in living.items()}
        member_of = [constraint for constraint in self._other_constraints if constraint.key == 'member_of']
        self._read_aggregates(
            name
            for constraint in member_of
            for name in (constraint.any_of if isinstance(constraint, Requirement) else [constraint.name])
        )
        self._read_free(uuids, hints)
        results = {uuid: self._complete(self._known_providers[uuid]) for uuid in uuids if uuid in self._known_providers}
        results |= self._infer_full([uuid for uuid in uuids if uuid not in results], hints, results)
        results |= self._read_individually([uuid for uuid in uuids if uuid not in results], results)
        results = {uuid: results[uuid].with_usage(extra_used.get(uuid, ())) for uuid in uuids if uuid in results}
        return self._read_nearest_limits(self._check_doubtful(results, living), living)

    def is_offered(self, query: Sequence[Constraint], provider: str) -> bool:
        """Ask placement whether it offers a provider for a query; False if no call is left."""
        if not self._calls_left:
            return False
        self._calls_left -= 1
        constraints = [part for part in query if isinstance(part, Amount) or part.key != 'in_tree']
        offered = read_candidates(
            self._placement, format_query([*constraints, Requirement('in_tree', (provider,))])
        ).candidates
        return any(provider in allocations for allocations in offered)

    def _read_aggregates(self, aggregates: Iterable[str]) -> None:
        """Read the members of these aggregates, one call each; UnsupportedQueryError if too few calls are left."""
        for name in dict.fromkeys(aggregates):
            if name not in self._members_by_aggregate:
                self._spend(1)
                self._members_by_aggregate[name] = providers.find_satisfying(
                    self._placement, Requirement('member_of', (name,))
                )

    def _read_free(self, uuids: Collection[str], hints: Mapping[str, Hint | None]) -> None:
        """Read the providers with anything free, a class a call, and then those that share; raises what _spend() does.

        The class that most unread ones may have comes first. It stops when calls suffice for the rest, or run out.
        """
        classes = list(dict.fromkeys([*FIRST_CLASSES, *(amount.name for amount in self._amounts)]))
        sharing: frozenset[str] | None = None
        while classes and self._calls_left > self._count_reserved_calls(
            map(self._complete, self._known_providers.values())
        ):
            unseen = [uuid for uuid in uuids if uuid not in self._known_providers]
            if not unseen or len(unseen) * self._calls_per_provider <= self._calls_left - ADVICE_CALLS - (
                sharing is None
            ):
                break  # few enough to be read one by one

            def count_having(name: str, unseen: Sequence[str] = unseen) -> int:
                return sum(_may_have(hints.get(uuid), name) for uuid in unseen)

            name = max(classes, key=count_having)
            classes.remove(name)
            self._calls_left -= 1
            # Time has passed since the last call: what was read first counts.
            self._known_providers = {**providers.read_with_free(self._placement, name), **self._known_providers}
            self._exhausted_classes.add(name)
            sharing = self._find_sharing(hints) if sharing is None else sharing
        sharing = self._find_sharing(hints) if sharing is None else sharing
        self._read_sharing(
            sharing | {uuid for uuid, provider in self._known_providers.items() if SHARING_TRAIT in provider.traits}
        )

    def _find_sharing(self, hints: Mapping[str, Hint | None]) -> frozenset[str]:
        """Find the providers that share with others, with one call.

        Makes no call and returns an empty set if no call is left, or each listed provider is read or has a hint.
        """
        if not self._calls_left or all(uuid in self._known_providers or hints.get(uuid) for uuid in self.listed):
            return frozenset()
        self._calls_left -= 1
        return find_matching(self._placement, f'required={SHARING_TRAIT}')

    def _read_sharing(self, uuids: Iterable[str]) -> None:
        """Append those of these providers that exist, with their aggregates, to `sharing`; errors as _spend()."""
        for uuid in sorted(uuids):
            provider = self._known_providers.get(uuid)
            if provider is None:
                self._spend(2)
                provider = providers.read_provider(self._placement, uuid, True, traits=False, aggregates=False)
            if provider is not None:
                self._spend(1)
                aggregates = providers.read_names(self._placement, uuid, AGGREGATES)
                self._read_aggregates(sorted(aggregates))
                self.sharing.append(replace(provider, aggregates=aggregates))

    def _spend(self, calls: int) -> None:
        """Take this many of the calls left; UnsupportedQueryError if there are fewer."""
        if self._calls_left < calls:
            raise UnsupportedQueryError(
                'the aggregates of the query and of the providers need too many calls to placement'
            )
        self._calls_left -= calls

    def _infer_full(
        self, unseen: Iterable[str], hints: Mapping[str, Hint | None], found_providers: Mapping[str, Provider]
    ) -> dict[str, Provider]:
        """Return those that are full by their hint; a spare call marks disabled ones. {} if the query names traits."""
        if self._trait_constraints - {NOT_DISABLED}:
            return {}  # hints do not contain traits
        full = {
            uuid: self._complete(Provider(uuid, {
                name: Inventory(hinted.capacity, used=hinted.capacity) for name, hinted in hint.items()
            }))
            for uuid in unseen if (hint := hints.get(uuid)) is not None and self._is_full(hint)
        }  # fmt: skip
        if (
            full
            and self._trait_constraints
            and self._calls_left > self._count_reserved_calls([*found_providers.values(), *full.values()])
        ):
            self._calls_left -= 1
            disabled = providers.find_with_trait(self._placement, DISABLED)
            full |= {uuid: replace(full[uuid], traits=[DISABLED]) for uuid in disabled.intersection(full)}
        return full

    def _is_full(self, hint: Hint) -> bool:
        """Return True if hint and later calls show all requested classes it has, if any, used up, not exceeded."""
        free = [(amount.name, hint[amount.name].free_percent) for amount in self._amounts if amount.name in hint]
        return all(hundredths == 0 or (hundredths > 0 and name in self._exhausted_classes) for name, hundredths in free)

    def _read_individually(self, unseen: Iterable[str], found_providers: Mapping[str, Provider]) -> dict[str, Provider]:
        """Read providers one by one while unreserved calls are left; return those that exist."""
        unseen, providers_read = list(unseen), dict[str, Provider]()
        spare = self._calls_left - self._count_reserved_calls(found_providers.values()) if unseen else 0
        for uuid in unseen:
            if spare < self._calls_per_provider:
                break
            spare, self._calls_left = spare - self._calls_per_provider, self._calls_left - self._calls_per_provider
            provider = providers.read_provider(
                self._placement, uuid, True, traits=bool(self._trait_constraints), aggregates=False
            )
            providers_read |= {uuid: self._complete(provider)} if provider is not None else {}
        return providers_read

    def _complete(self, provider: Provider) -> Provider:
        """Return the provider with those aggregates that were read, and whether it stands alone."""
        aggregates = frozenset(name for name, members in self._members_by_aggregate.items() if provider.uuid in members)
        listings = self.listed.get(provider.uuid)
        return replace(provider, aggregates=aggregates, is_standalone=listings is None or listings.is_alone)

    def _count_reserved_calls(self, found_providers: Iterable[Provider]) -> int:
        """Count the calls kept for is_offered(): ADVICE_CALLS; 0 if there are providers, but no changed query fits."""
        has_providers = False
        for provider in found_providers:
            has_providers, cures = True, find_miss(self._constraints, provider).cures
            if cures and not any(cure.amount_to_free for cure in cures):
                return ADVICE_CALLS
        return 0 if has_providers else ADVICE_CALLS

    def _check_doubtful(self, found_providers: dict[str, Provider], living: Collection[str]) -> dict[str, Provider]:
        """Read the limits, which operators may set, of providers with room that are not offered; drop the unread ones.

        If calls are too few, the query is repeated first. Changes and returns `found_providers`.
        """

        def list_doubtful() -> list[str]:
            doubtful = [
                provider for uuid, provider in found_providers.items() if uuid in living and uuid not in self._offered
            ]
            doubtful = [
                provider
                for provider in doubtful
                if not provider.is_closed and not explain_uncovered(self._constraints, provider, self.sharing)
            ]
            return [provider.uuid for provider in doubtful if find_miss(self._constraints, provider).is_candidate]

        if len(list_doubtful()) > self._calls_left - ADVICE_CALLS and self._calls_left:
            self._calls_left -= 1
            offer = read_candidates(self._placement, format_query(self._constraints))
            self._offered = {*self._offered, *(uuid for allocations in offer.candidates for uuid in allocations)}
        for uuid in list_doubtful():
            provider = found_providers.pop(uuid)
            if self._calls_left > ADVICE_CALLS:
                found_providers[uuid] = self._read_limits(provider)
        return found_providers

    def _read_nearest_limits(
        self, found_providers: dict[str, Provider], living: Collection[str]
    ) -> dict[str, Provider]:
        """Add the limits of the nearest providers while calls are left; change and return the argument."""
        unread = (
            provider for uuid, provider in found_providers.items() if uuid in living and uuid in self._known_providers
        )
        spare = self._calls_left - self._count_reserved_calls(found_providers.values())
        for result in (
            sort_misses(find_miss(self._constraints, result) for result in unread)[: max(spare, 0)] if spare else ()
        ):
            found_providers[result.provider] = self._read_limits(found_providers[result.provider])
        return found_providers

    def _read_limits(self, provider: Provider) -> Provider:
        """Return the provider with its UNIT_LIMITS, unchanged if it is gone; takes one call, even if none is left."""
        self._calls_left -= 1
        self._known_providers.pop(provider.uuid, None)
        with suppress(NotFound):
            answer = read_raw_inventory(self._placement, provider.uuid)
            limits = {
                name: shown._replace(
                    **{part: answer[name][part] for part in UNIT_LIMITS if part in answer.get(name, {})}
                )
                for name, shown in provider.inventories.items()
            }
            return replace(provider, inventories=limits)
        return provider


def _may_have(hint: Hint | None, name: str) -> bool:
    """Return True unless there is a hint, and it lacks the class or has nothing of it free."""
    return hint is None or (name in hint and hint[name].free_percent > 0)


# Seconds for finding the reasons; the refusal itself is reported before.
TIMEOUT_SECONDS = 5.0

# Up to MAX_LISTED_COMPUTES have a line each; of more, the MAX_NEAREST_COMPUTES nearest.
MAX_LISTED_COMPUTES = 50
MAX_NEAREST_COMPUTES = 10


def report_reasons(  # noqa: PLR0913
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    query: str,
    membership: Membership | None,
    placed: Sequence[Candidate],
    compute_argument: str | None,
    report: Callable[[str], None],
    max_calls: int = MAX_CALLS,
) -> None:
    """Report the reasons, a line each, or one line if they cannot be found out; raises nothing.

    Waits TIMEOUT_SECONDS at most, also for `backend`; Ctrl-C ends it silently. `placed` are the places of others of the
    set, `compute_argument` is that of --on.
    """
    lines: Future[list[str]] = Future()

    def find_reasons() -> None:
        try:
            placement, offer = backend.result()
            named = {uuid for allocations in offer.candidates for uuid in allocations}
            refusal = Refusal(query, read_settled_group(store, membership), placed, compute_argument, named)
            lines.set_result(list_reasons(store, placement, refusal, max_calls))
        except BaseException as error:
            lines.set_exception(error)

    try:
        # A daemon thread, which may outlive the time-out here: its calls have longer ones.
        threading.Thread(target=find_reasons, name='reasons', daemon=True).start()
        for line in lines.result(TIMEOUT_SECONDS):
            report(line)
    except TimeoutError:
        report(f'what each compute lacks is unknown: no answer within {TIMEOUT_SECONDS:g} s')
    except KeyboardInterrupt:
        pass  # the refusal itself was reported before
    except Exception as error:
        report(f'what each compute lacks is unknown: {str(error) or type(error).__name__}')


@dataclass(frozen=True)
class Refusal:
    """The request that found no room, its group, the places `taken` by its set, and the providers offered (`named`).

    `on` is the argument of --on: then only that compute has a line.
    """

    query: str
    group: Group | None = None
    taken: Sequence[Candidate] = ()
    on: str | None = None
    named: Collection[str] = ()


def list_reasons(store: Store, placement: Placement, refusal: Refusal, max_calls: int = MAX_CALLS) -> list[str]:
    """Return a line for each compute, the closest host, and the smallest change that fits.

    Of more than MAX_LISTED_COMPUTES only the nearest have one; with --on only its own. No change is advised if one has
    room again; with `taken` a smaller --count is. An unsupported query gives one line. Raises the backends' errors.
    """
    try:
        constraints = _parse_constraints(refusal.query, refusal.on)
    except UnsupportedQueryError as error:
        return [f'what each compute lacks is unknown: {error}']
    known_computes = hosts.read_computes(store)
    names = _list_names(known_computes)
    requested = [
        constraint.any_of[0]
        for constraint in constraints
        if isinstance(constraint, Requirement) and constraint.argument
    ]
    try:
        facts = ProviderFacts(placement, constraints, refusal.named, max_calls)
        dead = sorted(
            uuid for uuid, listing in facts.listed.items() if uuid not in known_computes.living and listing.name == uuid
        )
        compute_count, are_many = len(names) + len(dead), len(names) + len(dead) > MAX_LISTED_COMPUTES
        chosen = dict.fromkeys([*requested, *names] if are_many else [*names, *dead])
        texts, misses = _examine(facts, constraints, chosen, known_computes, refusal)
    except UnsupportedQueryError as error:
        return [f'what each compute lacks is unknown: {error}']
    texts |= _explain_limit(refusal, misses)
    if are_many:
        failing = {result.provider: len(result.failures) for result in misses}
        shown = sorted(
            (uuid for uuid in texts if uuid in names), key=lambda uuid: failing.get(uuid, len(constraints) + 1)
        )
        chosen = dict.fromkeys([*requested, *shown[:MAX_NEAREST_COMPUTES]])
        texts = {uuid: texts[uuid] for uuid in chosen if uuid in texts}
        misses = [result for result in misses if result.provider in texts]
    lines = _format_lines(texts, known_computes, compute_count, refusal.on, requested)
    if any(result.is_candidate for result in misses):
        return lines
    advice = _make_advice(facts, constraints, misses, known_computes, requested)
    if not refusal.taken:
        return [*lines, *advice]
    return [*lines, *advice[:1], f'Try: --count {len(refusal.taken)}']


def _explain_limit(refusal: Refusal, misses: Iterable[Miss]) -> dict[str, str]:
    """Explain computes with room that limit= left out: {compute: text}; {} if placement offered less than the limit."""
    limited = read_limit(refusal.query)
    if limited is None or not limited.isdecimal() or len(refusal.named) < int(limited):
        return {}
    # Those that placement offered are unsuitable for the group or the set, or dead: it would offer them again.
    why = f'has room, but limit={limited} makes placement offer other computes. Fix: remove limit={limited}'
    return {result.provider: why for result in misses if result.is_candidate and result.provider not in refusal.named}


def _format_lines(
    texts: Mapping[str, str],
    known_computes: Computes,
    compute_count: int,
    compute_argument: str | None,
    requested: Collection[str],
) -> list[str]:
    """Format a line for each of the `requested` computes or else for all with a text, and one for the hidden rest."""
    if requested:
        return [f'{compute_argument}: {text}' for uuid, text in texts.items() if uuid in requested] or [
            f'{compute_argument}: no host has this name or uuid'
        ]
    lines = [f'{known_computes.format_name(uuid)}: {text}' for uuid, text in texts.items() if text]
    hidden = compute_count - len(texts)
    return [*lines, f'{hidden} more not shown: each of them is no closer, or not alive'] if hidden else lines


def find_shortfalls(
    placement: Placement, query: str, known_computes: Computes, computes: Sequence[str], group: Group | None = None
) -> dict[str, str]:
    """Return {compute: what it lacks, or that it has room} of the first MAX_LISTED_COMPUTES of `computes`.

    One of which nothing could be read is left out. Raises the errors of placement, and UnsupportedQueryError.
    """
    constraints = _parse_constraints(query)
    texts, _ = _examine(
        ProviderFacts(placement, constraints),
        constraints,
        computes[:MAX_LISTED_COMPUTES],
        known_computes,
        Refusal(query, group),
    )
    return {uuid: text for uuid, text in texts.items() if text}


def _parse_constraints(query: str, compute_argument: str | None = None) -> tuple[Constraint, ...]:
    """Parse a query, add NOT_DISABLED; mark in_tree as --on's if `compute_argument` is given. UnsupportedQueryError."""
    typed = '' if compute_argument is None else f'--on {compute_argument}'
    return tuple(
        constraint._replace(argument=typed)
        if isinstance(constraint, Requirement) and constraint.key == 'in_tree'
        else constraint
        for constraint in parse_query(exclude_disabled(query))
    )


def _examine(
    facts: ProviderFacts,
    constraints: Sequence[Constraint],
    chosen: Iterable[str],
    known_computes: Computes,
    refusal: Refusal,
) -> tuple[dict[str, str], list[Miss]]:
    """Return {provider: what it lacks ('': no compute)}, if read or unlisted, and misses. Errors as facts.find()."""
    takers = [candidate.compute for candidate in refusal.taken]
    extra_used: dict[str, list[Resources]] = {}
    for candidate in refusal.taken:
        for uuid, amounts in candidate.allocations.items():
            extra_used.setdefault(uuid, []).append(amounts)
    chosen = list(chosen)
    providers_found = facts.find(chosen, known_computes.living, extra_used)
    words: dict[str, str] = {}
    misses: list[Miss] = []
    for uuid in chosen:
        provider = providers_found.get(uuid)
        if provider is None and uuid in facts.listed:
            continue
        text = _describe_unavailable(provider, uuid in known_computes.living)
        if text is None and provider is not None:
            text = explain_uncovered(constraints, provider, facts.sharing)
            if text is None:
                misses.append(
                    add_group_failure(
                        find_miss(constraints, provider), refusal.group, takers, known_computes.format_name
                    )
                )
                text = _describe_miss(misses[-1], known_computes.format_name(uuid), provider.taken_count)
            else:
                text = f'not explained: {text}'
        words[uuid] = text or ''
    return words, misses


def _describe_miss(result: Miss, display_name: str, taken_count: int) -> str:
    """Describe what a compute lacks, or that it has room, without its name; `taken_count` members of the set fit."""
    # Two hosts of one name are shown with their uuid, and then the command takes only the uuid.
    cure = f' (eschedule {_format_enable_command(result, display_name)})'
    reasons_given = (failure.reason + cure if failure.is_disabled else failure.reason for failure in result.failures)
    is_short = any(isinstance(failure.constraint, Amount) for failure in result.failures)
    takes = f'has room for {taken_count} of the set, then ' if taken_count and is_short else ''
    return takes + '; '.join(reasons_given) or 'has room now. Try: the same command again'


def _format_enable_command(result: Miss, display_name: str) -> str:
    """Format `host enable` with the host name, or the uuid if the name is not unique."""
    return f'host enable {result.provider if result.provider in display_name else display_name}'


def _describe_unavailable(provider: Provider | None, alive: bool) -> str | None:
    """Explain why a compute can take nothing; None if it can, '' if it is not a compute."""
    if alive:
        if provider is None:
            return 'has no resource provider'
        return 'is closed: all its VCPU is reserved' if provider.is_closed else None
    # Another cloud may use this placement: its providers have other names or no VCPU.
    if provider is None or (provider.inventories and 'VCPU' not in provider.inventories):
        return ''
    return 'is closed: its ecompute was stopped' if provider.is_closed else 'is not alive'


def _make_advice(
    facts: ProviderFacts,
    constraints: Sequence[Constraint],
    misses: Collection[Miss],
    known_computes: Computes,
    requested: Collection[str],
) -> list[str]:
    """Return the closest host and the smallest change that fits, if placement confirms it; [] without misses.

    To enable a disabled compute is advised if it was requested, or if no change of the query fits.
    """
    if not misses:
        return []
    lines = [] if requested else [f'the closest host is {known_computes.format_name(sort_misses(misses)[0].provider)}']
    best = find_smallest_miss(misses)
    disabled = [
        result
        for result in sort_misses(misses)
        if result.is_disabled and (not requested or result.provider in requested)
    ]
    enabled = [
        f'eschedule {_format_enable_command(result, known_computes.format_name(result.provider))}'
        for result in disabled[:1]
    ]
    host = known_computes.format_name(best.provider) if best else ''
    done = format_cures(best.cures, host) if best and best.cures else ''
    if best is None or not best.cures or any(cure.amount_to_free for cure in best.cures):
        if enabled:
            return [*lines, f'Try: {enabled[0]}']
        no_change = f'no change of the query alone fits: {done}' if done else 'no change of the query fits any host'
        return [*lines, no_change]
    fits = enabled if requested else []
    with suppress(EcompError):
        # The facts may be stale, or incomplete: placement may not know a trait, say.
        if facts.is_offered(apply_cures(constraints, best.cures), best.provider):
            fits.append(f'{done}, which fits on {host}')
    return [*lines, f'Try: {", or ".join(fits)}'] if fits else lines


def _list_names(known_computes: Computes) -> dict[str, str]:
    """Return {uuid: display name} of living computes: first those with a host name, sorted."""
    called = {uuid: known_computes.format_name(uuid) for uuid in known_computes.living}
    return dict(sorted(called.items(), key=lambda each: (known_computes.find_hostname(each[0]) is None, each[1])))
