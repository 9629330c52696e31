"""Change an instance that stays where it is, by rewriting its request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from ecomp.errors import Conflict, EcompError, NoCapacity, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, Resources, find_compute, sum_allocations, to_wire
from ecomp.model.order import PowerAction, Request, Resize
from ecomp.model.query import UnsupportedQueryError, replace_amounts
from ecomp.model.record import Record
from ecomp.model.stored import to_dict
from ecomp.placement import providers
from ecomp.placement.allocations import correct_claim, read_consumer, replace_allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.changes import change
from ecomp.scheduler.placing.adopt import find_lacking
from ecomp.scheduler.placing.claim import announce, reserve_names
from ecomp.scheduler.placing.session import require_ended
from ecomp.scheduler.queries.find import find_living
from ecomp.shared.attempts import read_settled_request
from ecomp.shared.names import Change, change_charge, merge_changes, release_name, try_revoke
from ecomp.shared.places import KeyIndex
from ecomp.store.client import Delete, Settlement, Store, Touch, Unchanged

# The fields of the request to write, and the change of other keys that goes with them.
Rewriting = tuple[Mapping[str, object], Change]
MakeRewriting = Callable[[Request, Record], Rewriting | None]
Owner = Mapping[str, object]  # who makes an attempt, see describe_owner()


def protect(store: Store, instance: str, is_protected: bool, key_index: KeyIndex | None = None) -> str:
    """Set whether an instance is protected from removal, and return a sentence about it."""
    new: Rewriting = {'protected': is_protected}, ([], [])
    is_new = _rewrite(store, instance, lambda old, _: None if old.is_protected == is_protected else new, key_index)
    return f'{instance}: is {"" if is_protected else "not "}protected{" now" if is_new else ""}'


def rename(store: Store, instance: str, name: str) -> str:
    """Name an instance, and return a sentence, or raise Conflict if a living one has the name."""

    def make(request: Request, _record: Record) -> Rewriting | None:
        if request.name == name:
            return None
        new, old = reserve_names(store, {instance: name}), release_name(store, request.name, instance)
        return {'name': name}, merge_changes(new, old)

    return f'{instance}: is called {name}{" now" if _rewrite(store, instance, make) else ""}'


def resize(
    store: Store,
    placement: Placement,
    instance: str,
    amounts: Resources,
    owner: Owner,
    power: PowerAction | None = None,
) -> change.Acceptance:
    """Accept amounts for a guest, which it gets when it starts, or now by `power`.

    Until then it claims, and its project is charged, the larger of old and new of each class. The claim grows before
    the request does. After an error it is set to the request again, here or by its compute (rule: orphaned-claim).
    """
    accepted, compute, lease = (unchanged := change.Acceptance(f'{instance}: already has this size')), '', 0
    attempt: list[Unchanged] = []  # once it is announced

    def make(request: Request, record: Record) -> Rewriting | None:
        nonlocal accepted, compute, lease
        size = request.plan_size(amounts)
        if size == request.guest_size and not request.resize:
            accepted = unchanged  # also if an earlier try was about to change it
            return None
        try:
            query = replace_amounts(request.query or '', amounts)
        except UnsupportedQueryError as error:
            raise UsageError(f'{instance}: its size cannot change: {error}') from error
        compute = find_compute(request.allocations)
        wanted = request.allocate({name: max(amount, size[name]) for name, amount in request.resources.items()})
        charge = change_charge(store, request.project_id, request.resources, sum_allocations(wanted))
        if wanted != request.allocations:
            if not attempt:
                lease = store.grant(keys.ATTEMPT_SECONDS)
                attempt.append(_announce(store, lease, instance, owner))
            _enlarge(placement, instance, wanted)
        number = request.make_change_number(datetime.now(UTC).timestamp())
        fields: dict[str, object] = {'allocations': to_wire(wanted), 'query': query}
        fields |= {'resize': to_dict(Resize(number, size)), **({'power': to_dict(power)} if power else {})}
        effect = '' if power else f'. It takes effect when the guest starts. Try: eschedule reboot {instance}'
        delay = change.describe_delay(store, compute)
        sentence = f'{instance}: resize accepted; {compute} carries it out{delay}{effect}'
        accepted = change.Acceptance(sentence, power, change.list_previous_ids(record, request))
        return fields, merge_changes(charge, ([*attempt], [Delete(each.key) for each in attempt]))

    try:
        try:
            _rewrite(store, instance, make)
        finally:
            try_revoke(store, lease)  # from now on, no late write of this process is accepted
    except EcompError:
        with suppress(EcompError):  # then its compute does it, once the attempt is gone
            if attempt:
                correct_claim(placement, instance, partial(read_settled_request, store, compute, instance))
        raise
    return accepted


def _announce(store: Store, lease: int, instance: str, owner: Owner) -> Unchanged:
    uuid, value = keys.derive_uuid(instance, 'resize'), {**owner, 'instances': [instance]}
    revision = announce(store, lease, uuid, value, True, partial(require_ended, 'another resize', owner))
    failpoint('resize-announced')
    return Unchanged(keys.attempt(uuid), revision)


def _enlarge(placement: Placement, instance: str, target: Allocations) -> None:
    consumer = read_consumer(placement, instance)
    if consumer.allocations.keys() != target.keys():
        raise Conflict(f'{instance}: its claim in placement differs from its request. Try: eschedule check')
    try:
        replace_allocations(placement, instance, target, consumer.user_id, consumer.project_id, consumer.generation)
    except NoCapacity as error:
        lacks = _explain_lack(placement, consumer.allocations, target)
        cure = 'give less, or create a larger instance elsewhere'
        raise NoCapacity(f'{instance}: {lacks or "placement refused its claim"}. Fix: {cure}') from error
    failpoint('resize-claimed')


def _explain_lack(placement: Placement, claim: Allocations, target: Allocations) -> str:
    lacks = []
    for compute, amounts in target.items():
        growth = {name: amount - claim[compute].get(name, 0) for name, amount in amounts.items()}
        inventory = providers.read_inventory(placement, compute)
        lacking = find_lacking(inventory, {name: amount for name, amount in growth.items() if amount > 0}, {})
        lacks += [f'{compute} lacks {name} {amount}' for name, amount in lacking.items()]
    return ', '.join(lacks)


def rebuild(store: Store, instance: str, image: str | None) -> tuple[str, int]:
    """Request a rebuild, and return a sentence about it, and the number of the rebuild.

    Raises:
        Conflict: it is adopted or protected, its user-data is no longer in etcd, or others keep changing it.
    """
    numbers = [-1]

    def make(request: Request, _record: Record) -> Rewriting | None:
        if request.rebuild == numbers[-1]:
            return None  # committed by an earlier try whose answer was lost
        if request.is_adopted:
            raise Conflict(f'{instance}: is adopted, so ecomp does not replace its disks. Try: virsh on its host')
        change.require_unprotected(request)
        if request.user_data_sha256 and store.get(keys.user_data(request.user_data_sha256)) is None:
            raise Conflict(f'{instance}: its user-data is no longer in etcd. Fix: destroy it, and create it again')
        numbers.append(request.make_change_number(datetime.now(UTC).timestamp()))
        return {'image': image or request.image, 'rebuild': numbers[-1]}, ([], [])

    sentence = change.describe_acceptance(store, find_living(store, instance).record, 'rebuild')
    _rewrite(store, instance, make)
    return sentence, numbers[-1]


def _rewrite(store: Store, instance: str, make: MakeRewriting, key_index: KeyIndex | None = None) -> bool:
    """Write what `make` returns for the current request, or return False if that is None."""

    def read_and_write(doubts: change.Doubts) -> bool | None:
        entries = find_living(store, instance, key_index)
        entry, request = change.require_changeable_request(entries)
        if (made := make(request, entries.record)) is None:
            return False
        fields, (conditions, operations) = made
        number = request.make_change_number(datetime.now(UTC).timestamp())
        put = change.merge_into_request(entries, entry, {**fields, 'changed': number, **store.make_stamp()})
        settlement = Settlement(Touch(entry.key), doubts.append)
        written = store.commit([Unchanged(entry.key, entry.revision), *conditions], [put, *operations], settlement)
        if written is not None:
            failpoint('changed')
        return bool(written) or None

    return change.retry_until_accepted(instance, 'change', 'the same command again', read_and_write)
