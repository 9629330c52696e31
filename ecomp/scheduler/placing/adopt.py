"""Adopt guests that ecomp did not create: claim them where they are, and mark them.

First the host is disabled. Once it no longer reserves what these guests use, they are claimed and delivered in blocks.
Then the host is enabled. After a kill it stays disabled, and a repetition continues.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ecomp.errors import Conflict, EcompError, NoCapacity, NotFound, OverQuota
from ecomp.failpoints import failpoint
from ecomp.model import keys, status
from ecomp.model.allocation import Inventory, Resources, find_compute, sum_resources
from ecomp.model.choose import Candidate
from ecomp.model.foreign import ForeignGuest, HostForeign, parse_foreign
from ecomp.model.order import Request, parse_request
from ecomp.model.record import parse_or_none
from ecomp.model.states import ERROR, GONE
from ecomp.model.text import join_some
from ecomp.placement import providers
from ecomp.placement.allocations import Requester, read_consumers
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import ANSWER_TIMEOUT_SECONDS, ask, wait_for_answers
from ecomp.scheduler.operations.decommission import require_provider
from ecomp.scheduler.placing.claim import reserve_names
from ecomp.scheduler.placing.session import DeliveryRefused, Scheduler, Session, require_ended
from ecomp.shared.attempts import is_alive
from ecomp.shared.names import Change, Excluded, charge_quota, try_revoke
from ecomp.shared.places import KeyIndex, read_index
from ecomp.store.client import Entry, Store

log = logging.getLogger(__name__)

# Guests of one transaction: each has a request and a name.
BLOCK_SIZE = 20


class Adoptee(NamedTuple):
    """A guest to adopt, and the name that it gets, or None."""

    guest: ForeignGuest
    name: str | None


def read_foreign(
    store: Store, computes: Collection[str], is_now: bool = True
) -> tuple[dict[str, HostForeign], dict[str, str]]:
    """Read the guests of others on these living computes, and why some lists are not current.

    If `is_now`, the computes look at themselves first.
    """
    answered, problems = set(computes), dict[str, str]()
    if is_now:
        with ask(store, '', computes=computes) as revisions:
            questions = dict.fromkeys(computes, revisions[''])
            answered = wait_for_answers(store, keys.FINDINGS, questions, ANSWER_TIMEOUT_SECONDS)
        problems = dict.fromkeys(set(computes) - answered, 'does not answer: the last list that it published is used')
    found = dict.fromkeys(computes, HostForeign())
    for key, entry in store.read(sorted(map(keys.foreign, computes))).items():
        try:
            found[keys.get_last_part(key)] = parse_foreign(entry.value)
        except ValueError as error:
            problems[keys.get_last_part(key)] = f'its list is malformed: {error}'
    return found, problems


def adopt(  # noqa: PLR0913
    scheduler: Scheduler,
    compute: str,
    display_name: str,
    adoptees: Sequence[Adoptee],
    user: str,
    project: str,
    report: Callable[[ForeignGuest, str], None],
) -> None:
    """Adopt guests of a living compute, which is disabled meanwhile, and report each.

    Raises:
        NoCapacity: placement has too little room there for these guests, or the quota has (OverQuota).
        Conflict: another compute, placement or an instance that ended knows a guest, or another adoption is in flight.
    """
    placement = scheduler.backend()[0]
    require_provider(placement, compute, display_name)
    guests = {each.guest.instance: each for each in adoptees}
    uuid = keys.get_last_part(keys.adoption(compute))
    # A guest that has our mark is not named: if it is released in the meantime, its host has to reserve what it uses.
    unmarked = [name for name, each in guests.items() if each.guest.adopted_by != compute]
    session = Session(scheduler, uuid, unmarked, Requester(user, project))
    with session.open():
        session.announce(None, partial(require_ended, f'an adoption on {display_name}', scheduler.owner))
        session.after_undo = partial(_undo, session, compute, display_name)
        failpoint('adoption-announced')
        adopted, old_records = _find_adoptions(session, compute, guests)
        for instance in adopted:
            report(guests[instance].guest, f'is already adopted, as {instance}')
        remaining = {instance: each for instance, each in guests.items() if instance not in adopted}
        if remaining:
            # Names and quota are looked at before anything is claimed.
            reserve_names(session.store, {instance: each.name for instance, each in remaining.items()})
            _charge(session.store, project, remaining)
            providers.create_missing_traits(placement, status.STATUS_TRAITS)
            providers.change_names(placement, compute, providers.TRAITS, status.apply_adoption)
            failpoint('adoption-disabled')
            _require_unreserved(session.store, compute, display_name, set(remaining))
            require_room(placement, compute, display_name, remaining)
        for start in range(0, len(remaining), BLOCK_SIZE):
            block = dict(list(remaining.items())[start : start + BLOCK_SIZE])
            _deliver(session, compute, block, old_records, start + BLOCK_SIZE >= len(remaining))
            for each in block.values():
                name = f' and name {each.name}' if each.name else ''
                report(each.guest, f'adopted with uuid {each.guest.instance}{name}')
        _enable(session, compute)
        failpoint('adoption-enabled')
    session.finish(guests)


def _undo(session: Session, compute: str, display_name: str) -> str:
    """Enable the host if it reserves again what the guests use, else return what is left to do."""
    problem = f'{display_name} may stay disabled until the command is repeated'
    try:
        if session.store.get(keys.adoption(compute)) is not None:
            return f'another adoption on {display_name} goes on'
        if read_foreign(session.store, [compute])[1]:
            return problem
        _enable(session, compute)
    except EcompError as error:
        log.debug('%s cannot be enabled: %s', display_name, error)
        return problem
    return ''


def _enable(session: Session, compute: str) -> None:
    end = partial(status.end_adoption, is_alive=is_alive(session.store, compute))
    providers.change_names(session.placement, compute, providers.TRAITS, end)


def _find_adoptions(session: Session, compute: str, guests: Mapping[str, Adoptee]) -> tuple[set[str], dict[str, Entry]]:
    """Return the guests adopted already, and records of former adoptions, or raise Conflict."""
    store, index = session.store, read_index(session.store)
    _require_only_here(session, compute, guests, index)
    queued = {keys.get_queued_instance(key) for key in store.snapshot(keys.QUEUES, keys_only=True).entries}
    adopted, old_records = set(), dict[str, Entry]()
    for instance, each in guests.items():
        if index.requests.get(instance):
            _require_adopted(store, compute, each)
            adopted.add(instance)
        elif instance in queued or instance in index.records:
            record = store.get(keys.record(compute, instance))
            parsed = parse_or_none(record.value) if record is not None else None
            if record is None or parsed is None or not parsed.is_adopted or parsed.state not in (GONE, ERROR):
                raise Conflict(f'{each.guest.name}: its uuid {instance} was used by ecomp before. {NEW_UUID}')
            old_records[instance] = record
    return adopted, old_records


NEW_UUID = 'Fix: give the domain a new uuid'


def _require_only_here(session: Session, compute: str, guests: Mapping[str, Adoptee], index: KeyIndex) -> None:
    claims = read_consumers(session.placement, guests)
    others = [each for each in session.read_alive() if each != compute]
    listed = read_foreign(session.store, others, is_now=False)[0]
    hosts = {guest.instance: other for other, foreign in listed.items() for guest in foreign.guests}
    for instance, each in guests.items():
        requested = [key.split('/')[2] for key in index.requests.get(instance, ())]
        known = {*requested, find_compute(claims[instance].allocations), hosts.get(instance, '')} - {'', compute}
        if known:
            host = session.get_display_name(min(known))
            raise Conflict(f'{each.guest.name}: its uuid {instance} is used on {host}, too. {NEW_UUID}, here or there')


def _require_adopted(store: Store, compute: str, adoptee: Adoptee) -> None:
    key = keys.request(compute, adoptee.guest.instance)
    entry = store.get(key)
    request = parse_request(compute, key, entry.value) if entry is not None else None
    if not isinstance(request, Request) or not request.is_adopted:
        raise Conflict(f'{adoptee.guest.name}: its uuid {adoptee.guest.instance} is used by ecomp. {NEW_UUID}')
    if request.is_tombstone:
        raise Conflict(f'{adoptee.guest.name}: is being released. Try: the same command once it is gone')


def _require_unreserved(store: Store, compute: str, display_name: str, instances: set[str]) -> None:
    found, problems = read_foreign(store, [compute])
    if gone := instances - {each.instance for each in found[compute].guests}:
        raise NotFound(f'{display_name} has no guest {join_some(sorted(gone), 5)} any more')
    if problems or not instances.issubset(found[compute].left_out):
        why = problems.get(compute, 'its ecompute still reserves what these guests use')
        raise EcompError(f'{display_name}: {why}. Try: the same command again')


def require_room(placement: Placement, compute: str, display_name: str, guests: Mapping[str, Adoptee]) -> None:
    """Raise NoCapacity, with a cure, if the provider has too little room for all guests."""
    inventory = providers.read_inventory(placement, compute)
    claims = read_consumers(placement, guests)
    needed = sum_resources(each.guest.size for name, each in guests.items() if not claims[name].allocations)
    if cure := explain_lack(inventory, needed):
        raise NoCapacity(f'{display_name} has too little room for the guests to adopt ({len(guests)}): {cure}')


def find_lacking(inventory: Mapping[str, Inventory], needed: Resources, own_reserve: Resources) -> dict[str, int]:
    """Return {class: shortage}, where what is reserved for `own_reserve` counts as free."""
    lacking = {}
    for name, amount in sorted(needed.items()):
        held = inventory.get(name, Inventory(0))
        own = min(held.reserved, own_reserve.get(name, 0)) * held.allocation_ratio
        lacking[name] = math.ceil(held.used + amount - held.capacity - own)
    return {name: lack for name, lack in lacking.items() if lack > 0}


def explain_lack(inventory: Mapping[str, Inventory], needed: Resources) -> str:
    """Return what is missing for these amounts and how to make room, '' for nothing."""
    lacking, ratios, totals = find_lacking(inventory, needed, {}), list[str](), list[str]()
    missing = [f'{name} {lack}' for name, lack in lacking.items()]
    for name in lacking:
        held = inventory.get(name, Inventory(0))
        used, left = needed[name] + held.used, held.total - held.reserved
        # Rounded up to two digits: a little less would refuse the last guest.
        (ratios if left > 0 else totals).append(f'{name}: {-(-100 * used // left) / 100 if left > 0 else used:g}')
    parts = {'allocation_ratios': ratios, 'inventory': totals}
    lines = [f'{key}: {{{", ".join(part)}}}' for key, part in parts.items() if part]
    cure = f'. Fix: set {" and ".join(lines)} in its compute.yaml and restart ecompute, or adopt fewer'
    return f'{", ".join(missing)} {"is" if len(missing) == 1 else "are"} missing{cure}' if missing else ''


def _charge(store: Store, project: str, guests: Mapping[str, Adoptee]) -> Change:
    try:
        return charge_quota(store, project, {instance: each.guest.size for instance, each in guests.items()})
    except Excluded as excluded:
        left = len(guests) - len(excluded.admitted)
        raise OverQuota(f'the quota of project {project} has no room for {left} of these guests') from excluded


def _deliver(
    session: Session, compute: str, block: Mapping[str, Adoptee], old: Mapping[str, Entry], is_last: bool
) -> None:
    session.store.keep_alive(session.lease)  # hundreds of guests take a while
    user, project = session.requester
    stages = dict.fromkeys(('requested', 'scheduled'), session.scheduler.now())
    fields: dict[str, Any] = {'user_id': user, 'project_id': project, 'stages': stages, 'is_adopted': True}
    requests = {
        uuid: Request(uuid, {compute: each.guest.size}, name=each.name, **fields) for uuid, each in block.items()
    }
    candidates = {name: Candidate(compute, request.allocations, None) for name, request in requests.items()}
    if refused := candidates.keys() - session.claim(candidates):
        raise NoCapacity(f'{block[min(refused)].guest.name}: placement refused its claim. Try: the same command again')
    failpoint('adoption-claimed')
    deliveries = [(compute, request) for request in requests.values()]
    charge = partial(_charge, session.store, project, block)
    if not session.deliver(deliveries, charge, ends_attempt=is_last, old_records=old):
        raise DeliveryRefused('the guests are not adopted: this eschedule was too slow, or another one took over')
    failpoint('adoption-delivered')
    session.movable -= block.keys()
    for instance in block.keys() & old.keys():
        try_revoke(session.store, old[instance].lease)
