"""Explain a refusal: what each compute lacks, and the smallest change that fits.

Facts may be a minute old, so placement is asked whether the advised change fits, and doubtful computes are read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ecomp.errors import EcompError
from ecomp.model import explain, keys
from ecomp.model.allocation import Provider, Resources
from ecomp.model.choose import Candidate
from ecomp.model.facts import NO_FACTS, Facts, sum_usage
from ecomp.model.group import Group, Membership
from ecomp.model.host import Computes
from ecomp.model.order import parse_request
from ecomp.model.query import (
    Amount,
    Constraint,
    Requirement,
    UnsupportedQueryError,
    exclude_disabled,
    format_query,
    parse_query,
    read_limit,
)
from ecomp.model.status import DISABLED
from ecomp.placement.allocations import read_candidates
from ecomp.placement.client import Placement
from ecomp.placement.providers import find_with_trait
from ecomp.scheduler.placing.claim import read_settled_group
from ecomp.scheduler.placing.offer import Backend
from ecomp.scheduler.queries.computes import read_computes, read_troubles
from ecomp.scheduler.queries.hosts import read_facts
from ecomp.store.client import Store

# Seconds for finding the reasons; the refusal itself is reported before.
TIMEOUT_SECONDS = 5.0
# Up to MAX_LISTED_COMPUTES have a line each; of more, the MAX_NEAREST_COMPUTES nearest.
MAX_LISTED_COMPUTES = 50
MAX_NEAREST_COMPUTES = 10


@dataclass(frozen=True)
class Refusal:
    """The request that found no room."""

    query: str
    group: Group | None = None
    # The places that were found for other instances of its set.
    places: Sequence[Candidate] = ()
    # The argument of --on: then only that compute has a line.
    on: str | None = None
    # The providers that placement offered.
    providers: Collection[str] = ()


def report_reasons(
    store: Store, backend: Backend, refusal: Refusal, membership: Membership | None, report: Callable[[str], None]
) -> None:
    """Report the reasons, a line each, within TIMEOUT_SECONDS, and raise nothing."""
    lines: Future[list[str]] = Future()

    def find_reasons() -> None:
        try:
            placement, offer = backend.result()
            providers = {uuid for allocations in offer.candidates for uuid in allocations}
            group = read_settled_group(store, membership)
            lines.set_result(list_reasons(store, placement, replace(refusal, group=group, providers=providers)))
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


def list_reasons(store: Store, placement: Placement, refusal: Refusal) -> list[str]:
    """Return a line for each compute, the closest host, and the smallest change that fits."""
    try:
        constraints = _parse_constraints(refusal.query, refusal.on)
    except UnsupportedQueryError as error:
        return [f'what each compute lacks is unknown: {error}']
    computes = read_computes(store)
    on = [each.any_of[0] for each in constraints if isinstance(each, Requirement) and each.argument]
    living = sorted(computes.living, key=lambda each: (not computes.find_hostname(each), computes.format_name(each)))
    examination = _examine(store, placement, constraints, living, computes, refusal)
    for compute in examination.with_room:
        examination.texts[compute] = _explain_room(compute, refusal, examination.ages_seconds.get(compute))
    _add_troubles(store, examination.texts)
    dead = dict.fromkeys(sorted(computes.stored_hostnames.keys() - computes.living.keys()), 'is not alive')
    if on:
        texts = {**dead, **examination.texts}
        lines = [f'{refusal.on}: {texts.get(each, "is not alive")}' for each in on]  # the caller knows it exists
    else:
        texts = {**examination.shorten(), **dead}
        lines = [f'{computes.format_name(compute)}: {text}' for compute, text in texts.items()]
        hidden = len(living) + len(dead) - len(texts)
        lines += [f'{hidden} more computes are not shown: none of them lacks less'] if hidden else []
    if examination.with_room:
        return lines
    advice = _make_advice(placement, constraints, examination.misses, computes, on)
    return [*lines, *advice[:1], f'Try: --count {len(refusal.places)}'] if refusal.places else [*lines, *advice]


def find_shortfalls(
    store: Store, placement: Placement, query: str, computes: Computes, group: Group | None = None
) -> dict[str, str]:
    """Return {compute: what it lacks, or that it has room} of computes that take from queues."""
    constraints, takers = _parse_constraints(query), computes.takers[:MAX_LISTED_COMPUTES]
    texts = _examine(store, placement, constraints, takers, computes, Refusal(query, group)).texts
    _add_troubles(store, texts)
    return texts


@dataclass
class _Examination:
    """What computes lack, as {compute: text}, and the misses of those that find_miss() covers."""

    texts: dict[str, str] = field(default_factory=dict)
    misses: list[explain.Miss] = field(default_factory=list)
    # How old the facts of the first computes with room may be, where etcd knows it.
    ages_seconds: dict[str, int | None] = field(default_factory=dict)

    @property
    def with_room(self) -> list[str]:
        return [each.provider for each in self.misses if each.is_candidate]

    def shorten(self) -> dict[str, str]:
        if len(self.texts) <= MAX_LISTED_COMPUTES:
            return dict(self.texts)
        nearest = [each.provider for each in explain.sort_misses(self.misses)[:MAX_NEAREST_COMPUTES]]
        self.misses = [each for each in self.misses if each.provider in nearest]
        return {compute: self.texts[compute] for compute in nearest}


def _examine(
    store: Store,
    placement: Placement,
    constraints: Sequence[Constraint],
    uuids: Sequence[str],
    computes: Computes,
    refusal: Refusal,
) -> _Examination:
    """Examine computes by uuid, and with newer data again those that have room or are disabled."""
    reported = read_facts(store)
    examination = _examine_by_facts(constraints, uuids, computes, reported.facts, refusal)
    if doubtful := [each.provider for each in examination.misses if each.is_candidate or each.failures[0].is_disabled]:
        newer = _reread_facts(store, placement, reported.facts, doubtful[:MAX_NEAREST_COMPUTES])
        examination = _examine_by_facts(constraints, uuids, computes, {**reported.facts, **newer}, refusal)
        for compute in newer.keys() & set(examination.with_room):
            examination.ages_seconds[compute] = store.read_lease_age(reported.leases[compute])
    return examination


def _examine_by_facts(
    query: Sequence[Constraint], uuids: Sequence[str], computes: Computes, facts: Mapping[str, Facts], refusal: Refusal
) -> _Examination:
    takers, taken = [each.compute for each in refusal.places], dict[str, list[Resources]]()
    for candidate in refusal.places:
        taken.setdefault(candidate.compute, []).append(candidate.allocations[candidate.compute])
    examination = _Examination()
    for compute in uuids:
        if compute not in computes.living:
            continue
        of_compute = facts.get(compute, NO_FACTS)
        provider = of_compute.make_provider(compute, taken.get(compute, ()))
        closed = 'is closed: all its VCPU is reserved' if provider.is_closed else None
        if excuse := of_compute.problem or closed or explain.explain_uncovered(query, provider):
            examination.texts[compute] = excuse
            continue
        miss = explain.find_miss(query, provider)
        miss = explain.add_group_failure(miss, refusal.group, takers, computes.format_name)
        examination.misses.append(miss)
        examination.texts[compute] = _describe_miss(miss, computes.format_name(compute), provider)
    return examination


def _add_troubles(store: Store, texts: dict[str, str]) -> None:
    for compute, trouble in read_troubles(store).items():
        if compute in texts:
            texts[compute] = f'cannot build: {trouble}; {texts[compute]}'


def _reread_facts(
    store: Store, placement: Placement, facts: Mapping[str, Facts], computes: Iterable[str]
) -> dict[str, Facts]:
    disabled, updated = find_with_trait(placement, DISABLED), dict[str, Facts]()
    for compute in computes:
        entries = store.snapshot(keys.request_prefix(compute)).entries
        held = sum_usage(compute, (parse_request(compute, key, entry.value) for key, entry in entries.items()))
        traits = {*facts[compute].traits} - {DISABLED} | ({DISABLED} if compute in disabled else set())
        updated[compute] = facts[compute].replace_usage(held)._replace(traits=tuple(traits))
    return updated


def _explain_room(compute: str, refusal: Refusal, age_seconds: int | None) -> str:
    limit = read_limit(refusal.query)
    if limit and limit.isdecimal() and len(refusal.providers) >= int(limit) and compute not in refusal.providers:
        # Those that placement offered are unsuitable for the group or the set, or dead: it would offer them again.
        return f'has room, but limit={limit} makes placement offer other computes. Fix: remove limit={limit}'
    if compute in refusal.providers:
        return 'has room now. Try: the same command again'
    when = '' if age_seconds is None else f' {age_seconds} s ago'
    return f'had room{when}, but placement refused: another request probably took it. Try: the same command again'


def _parse_constraints(query: str, on: str | None = None) -> tuple[Constraint, ...]:
    """Parse a query, exclude disabled providers, and mark its in_tree as the argument of --on."""
    typed = '' if on is None else f'--on {on}'
    return tuple(
        part._replace(argument=typed) if isinstance(part, Requirement) and part.key == 'in_tree' else part
        for part in parse_query(exclude_disabled(query))
    )


def _describe_miss(miss: explain.Miss, display_name: str, provider: Provider) -> str:
    cure = f' ({_format_enable(miss.provider, display_name)})'
    reasons_given = (failure.reason + cure if failure.is_disabled else failure.reason for failure in miss.failures)
    is_short = any(isinstance(failure.constraint, Amount) for failure in miss.failures)
    takes = f'has room for {provider.taken_count} of the set, then ' if provider.taken_count and is_short else ''
    return takes + '; '.join(reasons_given) or 'has room now. Try: the same command again'


def _format_enable(compute: str, display_name: str) -> str:
    return f'eschedule host enable {compute if compute in display_name else display_name}'


def _make_advice(
    placement: Placement,
    constraints: Sequence[Constraint],
    misses: Collection[explain.Miss],
    computes: Computes,
    on: Collection[str],
) -> list[str]:
    """Return the closest host, unless given by `on`, and what to change, or that nothing helps."""
    if not misses:
        return []
    sorted_misses = explain.sort_misses(misses)
    lines = [] if on else [f'the host that lacks least is {computes.format_name(sorted_misses[0].provider)}']
    best = explain.find_smallest_miss(misses)
    disabled = [each.provider for each in sorted_misses if each.is_disabled]
    enabled = list(map(_format_enable, disabled, map(computes.format_name, disabled)))
    host = computes.format_name(best.provider) if best else ''
    done = explain.format_cures(best.cures, host) if best and best.cures else ''
    if best is None or not best.cures or any(cure.amount_to_free for cure in best.cures):
        if enabled:
            return [*lines, f'Try: {enabled[0]}']
        no_change = f'no change of the query is enough. Try: {done}' if done else 'no change of the query fits any host'
        return [*lines, no_change]
    fits = enabled[:1] if on else []
    with suppress(EcompError):
        # The facts may be stale, or incomplete: placement may not know a trait, say.
        if _is_offered(placement, explain.apply_cures(constraints, best.cures), best.provider):
            fits.append(f'{done}, which fits on {host}')
    return [*lines, f'Try: {", or ".join(fits)}'] if fits else lines


def _is_offered(placement: Placement, query: Sequence[Constraint], provider: str) -> bool:
    constraints = [part for part in query if isinstance(part, Amount) or part.key != 'in_tree']
    query_there = format_query([*constraints, Requirement('in_tree', (provider,))])
    return any(provider in allocations for allocations in read_candidates(placement, query_there).candidates)
