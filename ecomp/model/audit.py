"""Find disagreements between placement, etcd and the hosts. Pure.

A host checks itself, and eschedule checks etcd and the claims on absent computes. An instance in work (scheduled,
building, destroying, or with an attempt in flight) gives no findings that its state explains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import calculate_capacity, describe_difference, format_resources, sum_resources
from ecomp.model.command_names import RESERVED
from ecomp.model.finding import CLUSTER, HOST, Check, Finding, Leftover, Repair, add_checks, run_checks
from ecomp.model.group import Group
from ecomp.model.guest import INTERFACE_DOWN, PAUSED, REFUSED_METADATA, UNFILTERED, UNLIKE, UNPLUGGED, Guest
from ecomp.model.host import MAX_QUOTED_INSTANCES, SILENT
from ecomp.model.json_object import dump
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.parsers import format_reason, list_of, number, text
from ecomp.model.quota import Quota, sum_charges
from ecomp.model.record import Record
from ecomp.model.stack import Stack
from ecomp.model.states import ACTIVE, ERROR
from ecomp.model.stored import decode, encode, nested, optional, sparse, stored, to_dict
from ecomp.model.text import join_some
from ecomp.model.trouble import parse_trouble
from ecomp.model.world import World

# A host at itself, and eschedule at what placement has of absent computes.
BOTH = HOST | CLUSTER


def find_all(world: World) -> list[Finding]:
    """Return all findings, of the cluster or of the host that checks itself."""
    return run_checks(CHECKS, HOST if world.planes.compute else CLUSTER, world)


# {subject: {key about the subject: its revision in etcd}}
Revisions = Mapping[str, Mapping[str, int]]


def confirm_findings(first: Iterable[Finding], second: Iterable[Finding], reads: Sequence[Revisions]) -> list[Finding]:
    """Return the findings that both checks have, if all `reads` agree about their subject."""
    # Planes that are read at different moments may disagree about an instance in work, but then its keys change.
    second_findings = set(second)
    both = [each for each in first if each in second_findings]
    return [each for each in both if all(read.get(each.subject) == reads[0].get(each.subject) for read in reads)]


def _describe_record(record: Record) -> str:
    return f'its record has state {record.state} on compute {record.compute}'


# Of computes, hosts and placement


def _find_compute_problems(world: World) -> Iterator[Finding]:
    known_computes = {*world.living_computes, *world.planes.providers, *world.absent_computes}
    for key in world.select_prefix(keys.HOSTNAMES):
        compute = keys.get_last_part(key)
        if compute not in known_computes:
            problem = 'names a compute that is not in placement, nor in a request or the record of a living instance'
            yield Finding('hostname-orphaned', compute, f'{key} {problem}', keys=(key, keys.compute(compute)))
    for compute in sorted(world.living_computes):
        if compute not in world.planes.providers:
            yield Finding('provider-missing', compute, f'compute {compute} is alive, but has no resource provider')
        trouble = world.get_value(keys.troubles(compute))
        if trouble is not None and trouble.lease:
            sentence = f'compute {compute} cannot build: {parse_trouble(trouble.value)}'
            yield Finding('host-trouble', compute, sentence, compute)
    for compute, state in world.absent_computes.items():
        provider = world.planes.providers.get(compute)
        held = provider.allocations if provider is not None and provider.allocations else {}
        if state == SILENT and (held or world.queue_entries):
            reason = f'has {len(held)} claim{"s" * (len(held) > 1)} in placement' if held else 'may run queued requests'
            sentence = f'compute {compute} {reason}, but is silent, so its guests and disks were not compared'
            yield Finding('compute-silent', compute, sentence, compute)


def find_mute(world: World) -> Iterator[Finding]:
    """Find the living computes that do not check themselves, or do not answer."""
    for compute, reason in sorted(world.planes.mute_reasons.items()):
        yield Finding('compute-mute', compute, f'compute {compute} is alive, but does not check itself: {reason}')


def _find_inventory_problems(world: World) -> Iterator[Finding]:
    for compute in sorted(world.computes & world.visible_providers.keys()):
        provider = world.visible_providers[compute]
        if provider.inventory == {} and compute == world.planes.compute:
            yield Finding('inventory-missing', compute, f'placement has no inventory for the living compute {compute}')
        for name, amount in sorted(sum_resources((provider.allocations or {}).values()).items()):
            inventory = provider.inventory.get(name, {}) if provider.inventory is not None else {'total': amount}
            # `reserved` is not subtracted: a stopped compute has all its VCPU reserved while its guests keep running.
            total = calculate_capacity(inventory.get('total', 0), inventory.get('allocation_ratio', 1.0))
            if amount > total:
                sentence = f'the claims on compute {compute} use {name}:{amount}, but its capacity is {total}'
                yield Finding('capacity-exceeded', compute, sentence, world.planes.compute)


def _find_claim_problems(world: World) -> Iterator[Finding]:
    for record in world.settled:
        instance, compute = record.instance, record.compute
        summary = _describe_record(record)
        claims = world.allocations.get(instance, {})
        held = {provider: claims[provider] for provider in claims.keys() & world.visible_providers.keys()}
        others = sorted((world.computes & held.keys()) - {compute})
        parsed = world.requests_by_compute.get(instance, {}).get(compute)
        if others:
            sentence = f'{summary}, but placement has a claim for it on {" and on ".join(others)}'
            yield Finding('allocation-doubled', instance, sentence, world.planes.compute)
        elif compute in world.visible_providers and compute not in held:
            sentence = f'{summary}, but placement has no claim for it'
            yield Finding('allocation-missing', instance, sentence, compute)
        elif isinstance(parsed, Request):
            expected = {name: each for name, each in parsed.allocations.items() if name in world.visible_providers}
            if sentence := describe_difference(expected, held) or '':
                yield Finding('allocation-differs', instance, sentence, compute)


# Of etcd


def _find_malformed_values(world: World) -> Iterator[Finding]:
    def report(key: str, subject: str, reason: str, compute: str = '') -> Finding:
        return Finding('malformed', subject, f'{key} is malformed: {reason}', compute, keys=(key,))

    for instance, reason in world.malformed_records.items():
        if instance not in world.in_flight:
            yield report(world.get_record_key(instance), instance, reason)
    reported = world.in_flight | world.malformed_records.keys()
    for instance, by_compute in world.requests_by_compute.items():
        for compute, request in by_compute.items():
            if isinstance(request, InvalidRequest) and instance not in reported:
                reported.add(instance)
                key = keys.request(compute, instance)
                # A key may have no part for the instance.
                yield report(key if world.get_value(key) else keys.HOSTS + compute, instance, request.reason, compute)
    for instance, queues in world.queue_entries.items():
        for flavor, waiting in queues.items():
            if isinstance(waiting, InvalidRequest):
                yield report(keys.queue(flavor, instance), instance, f'{waiting.reason}; no compute takes this request')
    for name, owner in world.name_owners.items():
        if owner is None:
            yield report(keys.name(name), name, 'its value names no instance')
    values = ((keys.group, world.groups), (keys.quota, world.quotas), (keys.stack, world.stacks))
    for make_key, parsed in values:
        yield from (report(make_key(name), name, each) for name, each in parsed.items() if isinstance(each, str))


def _find_unleased_keys(world: World) -> Iterator[Finding]:
    for prefix in (keys.COMPUTES, keys.ATTEMPTS, keys.QUEUES):
        for key, entry in world.select_prefix(prefix).items():
            if not entry.lease and (prefix != keys.QUEUES or key.endswith(keys.TAKER)):
                subject = keys.get_last_part(key) if prefix != keys.QUEUES else keys.get_queued_instance(key)
                sentence = f'{key} has no lease, so it remains even if the process that wrote it is dead'
                yield Finding('unleased', subject, sentence, is_repairable=False, keys=(key,))
    for instance in world.judged:
        stored_record = world.get_value(world.get_record_key(instance))
        if stored_record is not None and not stored_record.lease and not world.is_living(instance):
            sentence = f'{world.get_record_key(instance)} has no lease, so the record of a finished instance remains'
            yield Finding('unleased', instance, sentence, keys=world.list_instance_keys(instance))


def _find_queue_problems(world: World) -> Iterator[Finding]:
    for instance, queues in sorted(world.queue_entries.items()):
        requests, record = sorted(world.requests_by_compute.get(instance, {})), world.records.get(instance)
        others = [f'its instance is requested from compute {", ".join(requests)}'] if requests else []
        others += [f'the record of the instance has state {record.state}'] if record else []
        for flavor, waiting in sorted(queues.items()):
            key = keys.queue(flavor, instance)
            if isinstance(waiting, InvalidRequest):
                continue
            if others or len(queues) > 1:
                other_queues = [f'the instance is in the queues {", ".join(sorted(queues))}'] if len(queues) > 1 else []
                sentence = f'{key} is a queued request, but {"; ".join([*others, *other_queues])}'
                can_repair = bool(others) and len(queues) == 1
                related = world.list_instance_keys(instance) if can_repair else ()
                yield Finding('queued-doubled', instance, sentence, is_repairable=can_repair, keys=(key, *related))
            elif world.get_value(keys.flavor(flavor)) is None:
                sentence = f'its request is for flavor {flavor}, which does not exist, so no compute takes the request'
                yield Finding('queued-flavorless', instance, sentence)


def _find_name_problems(world: World) -> Iterator[Finding]:
    for name, instance in world.name_owners.items():
        if instance is None:
            continue
        key = keys.name(name)
        requests, record = world.requests_by_compute.get(instance, {}).values(), world.records.get(instance)
        waiting = world.queue_entries.get(instance, {}).values()
        is_malformed = any(isinstance(parsed, InvalidRequest) for parsed in (*requests, *waiting))
        if is_malformed or instance in world.malformed_records:
            continue  # a malformed record or request may have the name
        entry = world.get_value(key)
        if record is not None and not world.is_living(instance):
            # A failed instance keeps its name, on a lease, for as long as its record.
            if record.state == ERROR and entry is not None and entry.lease:
                continue
            detail = f'whose record has state {record.state}'
        elif name not in world.list_names(instance) and not world.is_in_work(instance):
            detail = 'which has another name' if record or requests else 'which has no request and no record'
        else:
            continue
        sentence = f'{key} belongs to instance {instance}, {detail}'
        yield Finding('name-orphaned', name, sentence, keys=(key, *world.list_instance_keys(instance)))
    for record in world.settled:
        yield from _find_own_name_problems(world, record)


def _find_own_name_problems(world: World, record: Record) -> Iterator[Finding]:
    for name in sorted(world.list_names(record.instance)):
        if name in RESERVED:
            yield Finding('name-reserved', record.instance, f'its name is {name}, which is reserved for a command')
        entry, owner = world.get_value(keys.name(name)), world.name_owners.get(name)
        is_own = owner == record.instance
        if entry is None:
            detail = 'does not exist'
        elif not is_own:
            detail = f'belongs to instance {owner}'
        elif entry.lease:
            detail = 'is on a lease, so it will be deleted'
        else:
            continue
        sentence = f'its name is {name}, but {keys.name(name)} {detail}'
        related_keys = world.list_instance_keys(record.instance)
        is_free = entry is None or is_own
        yield Finding('name-missing', record.instance, sentence, is_repairable=is_free, keys=related_keys)


def _find_living_replaced(world: World) -> Iterator[Finding]:
    requests = {instance: world.list_live_requests(instance) for instance in world.requests_by_compute}
    living = [each for each in world.records.values() if world.is_living(each.instance)]
    settled = [record for record in living if not world.is_in_work(record.instance)]
    requested = [request for placed in requests.values() for request in placed.values()]
    pairs = {(each.replaces, each.instance) for each in (*settled, *requested) if each.replaces}
    for replaced, instance in sorted(pairs):
        computes = sorted(requests.get(replaced, {}))
        if replaced not in requests and world.is_living(replaced):
            computes = [world.records[replaced].compute]
        if computes and world.in_flight.isdisjoint((replaced, instance)):
            # No repair (rule: shown-not-acted-on).
            sentence = f'it lives on compute {" and ".join(computes)}, but instance {instance} was made to replace it'
            yield Finding('replaced-lives', replaced, sentence, computes[0])


def _find_entry_problems(world: World) -> Iterator[Finding]:
    for instance in world.judged:
        record, requests = world.records.get(instance), sorted(world.requests_by_compute.get(instance, {}))
        requested_from = f'it is requested from compute{"s" * (len(requests) > 1)} {", ".join(requests)}'
        for compute, state in sorted(world.contradicting_states.get(instance, {}).items()):
            code = 'record-doubled' if record is not None else 'request-misplaced'
            home = _describe_record(record) if record else requested_from
            trusted_keys = [world.get_record_key(instance)] if record else world.list_request_keys(instance)
            sentence = f'{home}, but compute {compute} has a record with state {state}'
            yield Finding(code, instance, sentence, compute, keys=(*trusted_keys, keys.record(compute, instance)))
        is_living = world.is_living(instance)
        if len(requests) > 1 and (record is None or is_living):
            yield Finding('request-doubled', instance, requested_from, keys=world.list_request_keys(instance))
        booted = world.get_value(keys.address(instance))
        address = booted.value.decode(errors='replace') if booted else None
        if record is not None and is_living:
            yield from _find_living_entry_problems(world, record, address)
        elif record is not None or not requests:
            yield from _find_ended_entry_problems(world, instance, address)


def _find_living_entry_problems(world: World, record: Record, address: str | None) -> Iterator[Finding]:
    instance, record_key = record.instance, world.get_record_key(record.instance)
    entry = world.get_value(record_key)
    if entry is not None and entry.lease:
        sentence = f'{_describe_record(record)}, but is on a lease, so it will be deleted'
        yield Finding('record-leased', instance, sentence, keys=(record_key,))
    if not world.requests_by_compute.get(instance):
        sentence = f'{_describe_record(record)}, but the instance has no request'
        yield Finding('request-missing', instance, sentence, record.compute)
    if not world.is_in_work(instance) and address != (record.address or None):
        booted = 'no address' if address is None else address
        sentence = f'its key below /booted has {booted}, but its record has {record.address or "no address"}'
        yield Finding('booted-differs', instance, sentence, keys=(keys.address(instance),))


def _find_ended_entry_problems(world: World, instance: str, address: str | None) -> Iterator[Finding]:
    record, related_keys = world.records.get(instance), world.list_instance_keys(instance)
    summary = f'its record has state {record.state}' if record else 'the instance has no request and no record'
    for compute in sorted(world.requests_by_compute.get(instance, {})):
        sentence = f'{summary}, but the instance is requested from compute {compute}'
        request_key = keys.request(compute, instance)
        yield Finding('request-ended', instance, sentence, compute, keys=(request_key, *related_keys))
    if world.get_value(keys.address(instance)) is not None:
        sentence = f'{summary}, but its key below /booted has the address {address}'
        yield Finding('booted-orphaned', instance, sentence, keys=(keys.address(instance), *related_keys))


def _find_group_problems(world: World) -> Iterator[Finding]:
    for name, group in world.groups.items():
        if not isinstance(group, Group):
            continue
        for line in group.list_breaches():
            yield Finding('group-broken', name, f'the policy of the group is {group.rule}, but {line}')
        orphans = [instance for instance in sorted(group.members) if not _may_exist(world, instance)]
        if orphans:
            listed = join_some(orphans, MAX_QUOTED_INSTANCES)
            sentence = f'{keys.group(name)} has members that are neither requested nor living: {listed}'
            yield Finding('group-orphaned', name, sentence, keys=(keys.group(name),))
    for instance in (record.instance for record in world.settled):
        for compute, request in world.list_live_requests(instance).items():
            name = request.group.name if request.group else ''
            if name and (detail := _describe_lack(world.groups.get(name), instance, compute)):
                sentence = f'its request on compute {compute} is in group {name}, but {keys.group(name)} {detail}'
                yield Finding('group-missing', instance, sentence, compute, keys=world.list_instance_keys(instance))


def _describe_lack(group: Group | str | None, instance: str, compute: str) -> str:
    if group is None:
        return 'does not exist'
    if isinstance(group, str) or (other := group.members.get(instance)) == compute:
        return ''
    return f'lists the instance on compute {other}' if other else 'does not list the instance'


def _may_exist(world: World, instance: str) -> bool:
    is_known = instance in world.in_flight or instance in world.malformed_records
    return is_known or bool(world.requests_by_compute.get(instance)) or world.is_living(instance)


def _find_quota_problems(world: World) -> Iterator[Finding]:
    # Usage is not compared while work is in progress: an attempt claims before it delivers, a destroy releases.
    in_work = world.in_flight or any(map(world.is_in_work, world.requests_by_compute)) if world.quotas else True
    waiting = (each for places in world.queue_entries.values() for each in places.values())
    requests = *waiting, *(each for places in world.requests_by_compute.values() for each in places.values())
    for project, quota in world.quotas.items():
        if not isinstance(quota, Quota):
            continue
        requested = sum_charges(project, requests, world.records.get)
        difference = _describe_difference(quota.used, requested)
        if difference:
            used = f'the requests of the project use {difference[1]}'
            yield Finding('quota-differs', project, f'{keys.quota(project)} counts {difference[0]}, but {used}')
            continue
        claimed = world.planes.usages.get(project)
        difference = None if claimed is None or in_work else _describe_difference(quota.used, claimed)
        if difference:
            sentence = f'{keys.quota(project)} counts {difference[0]}, but placement counts {difference[1]}'
            yield Finding('usage-differs', project, sentence)


def _describe_difference(first: Mapping[str, int], second: Mapping[str, int]) -> tuple[str, str] | None:
    names = sorted(name for name in {*first, *second} if first.get(name, 0) != second.get(name, 0))
    if not names:
        return None
    texts = [', '.join(f'{name} {amounts.get(name, 0)}' for name in names) for amounts in (first, second)]
    return texts[0], texts[1]


def _find_stack_entries(world: World) -> Iterator[Finding]:
    for name, stack in world.stacks.items():
        key = keys.stack(name)
        if not isinstance(stack, Stack) or _is_being_applied(world, stack):
            continue
        if orphans := list_orphaned_entries(world, stack):
            listed = join_some(orphans, MAX_QUOTED_INSTANCES)
            sentence = f'{key} has entries whose instances are gone, so the next apply creates new ones: {listed}'
            yield Finding('stack-entry', name, sentence, keys=(key,))


def _find_stack_mismatches(world: World) -> Iterator[Finding]:
    lost: dict[str, list[str]] = {}
    for instance in sorted(world.requests_by_compute):
        if instance in world.records and not world.is_living(instance):
            continue  # request-ended
        for place in {each.stack for each in world.list_live_requests(instance).values() if each.stack}:
            known, key = world.stacks.get(place.name), keys.stack(place.name)
            if isinstance(known, str) or _is_being_applied(world, known):
                continue
            # Another uuid is not of the stack. A refused apply may leave a key without entries.
            if place.instance == instance and (known is None or not known.entries):
                lost.setdefault(place.name, []).append(instance)
            elif known and (owner := _describe_owner(known, place.entry_name)) != instance:
                sentence = f'it is requested for {place.entry_name} of stack {place.name}, but {key} has {owner} there'
                yield Finding('stack-mismatch', instance, sentence, is_repairable=False, keys=(key,))
    for name, instances in lost.items():
        listed = join_some(instances, MAX_QUOTED_INSTANCES)
        state = 'has no entries' if name in world.stacks else 'does not exist'
        sentence = f'{keys.stack(name)} {state}, but these instances are requested in it: {listed}'
        yield Finding('stack-mismatch', name, sentence, keys=(keys.stack(name),))


def _is_being_applied(world: World, stack: Stack | None) -> bool:
    return stack is not None and world.get_value(keys.attempt(stack.attempt)) is not None


def _describe_owner(stack: Stack, entry_name: str) -> str:
    entry = stack.entries.get(entry_name)
    return stack.make_place(entry_name, entry.incarnation).instance if entry else 'no instance'


def list_orphaned_entries(world: World, stack: Stack) -> list[str]:
    """List the entries that have not ended, but whose instances are gone and not in error."""
    instances = {name: each for name, each in stack.list_instances().items() if not stack.entries[name].is_ended}
    # The next apply reports a failed instance, and replaces it only on request.
    failed = {each for each in instances.values() if each in world.records and world.records[each].state == ERROR}
    return [name for name, each in instances.items() if each not in failed and not _may_exist(world, each)]


# Of a host, by itself

# The code for each trouble of a living guest.
CODES_BY_TROUBLE = dict.fromkeys((PAUSED, UNLIKE, UNPLUGGED, INTERFACE_DOWN), 'domain-differs')
CODES_BY_TROUBLE |= {UNFILTERED: 'filter-missing', REFUSED_METADATA: 'metadata-refused'}


def _find_guest_problems(world: World) -> Iterator[Finding]:
    compute, facts = world.planes.compute, world.planes.facts
    for instance in world.judged:
        guest, record = facts.guests.get(instance), world.records.get(instance)
        is_awaited = compute in world.requests_by_compute.get(instance, {}) and not world.is_in_work(instance)
        if record is None and guest is not None and _is_domain_of(guest, compute) and is_awaited:
            domain = f'its domain {guest.condition} there'
            sentence = f'it is requested from compute {compute}, and {domain}, but etcd has no record of it'
            yield Finding('record-missing', instance, sentence, compute)
    for record in world.settled:
        if record.compute != compute:
            continue
        instance, guest = record.instance, facts.guests.get(record.instance)
        summary = _describe_record(record)
        if guest is None or not (guest.defined or guest.running):
            detail = 'its domain and its disk do not exist' if guest is None else 'its domain does not exist'
            yield Finding('domain-missing', instance, f'{summary}, but {detail}', compute)
        elif guest.compute == compute:  # _find_foreign_domains() reports another one
            yield from _find_domain_problems(world, record, guest, summary)


def _find_domain_problems(world: World, record: Record, guest: Guest, summary: str) -> Iterator[Finding]:
    instance, compute, without_base = record.instance, record.compute, world.planes.facts.without_base
    if not guest.disk:
        yield Finding('disk-missing', instance, f'{summary}, but its domain has no disk', compute)
    elif instance in without_base:
        sentence = f'{summary}, but its base volume {without_base[instance]} is missing'
        yield Finding('base-missing', instance, sentence, compute)
    switching = world.is_switching(instance)
    if not guest.defined:
        yield Finding('domain-undefined', instance, f'{summary}, but its domain is transient', compute)
    elif record.state == ACTIVE and not guest.running and not switching:
        yield Finding('domain-off', instance, f'{summary}, but its domain is off', compute)
    if record.state != ACTIVE and guest.running and not switching:
        yield Finding('domain-running', instance, f'{summary}, but its domain runs', compute)
    for trouble in () if switching else guest.list_troubles(*record.sizes):
        if trouble.kind in CODES_BY_TROUBLE:
            yield Finding(CODES_BY_TROUBLE[trouble.kind], instance, f'{summary}, but {"".join(trouble)}', compute)
    yield from _find_reservation_problems(world, record)


def _find_reservation_problems(world: World, record: Record) -> Iterator[Finding]:
    reserved, compute = world.reservations.get(record.instance, {}), record.compute
    for interface in record.addresses:
        address = reserved.get(interface.mac)
        if interface.reservation is not None and address != interface.reservation:
            code = 'reservation-missing' if address is None else 'reservation-differs'
            held = f'compute {compute} reserves {address or "no address"} for the instance'
            sentence = f'its record expects {interface.reservation} on network {interface.network}, but {held}'
            yield Finding(code, record.instance, sentence, compute)


def _is_domain_of(guest: Guest, compute: str) -> bool:
    return (guest.defined or guest.running) and guest.compute == compute


def _find_leftovers(world: World) -> Iterator[Finding]:
    compute, facts = world.planes.compute, world.planes.facts
    for instance in world.judged:
        record, requests = world.records.get(instance), sorted(world.requests_by_compute.get(instance, {}))
        homes = {*requests} if record is None else {record.compute} if world.is_living(instance) else set()
        homes |= world.contradicting_states.get(instance, {}).keys()
        guest = facts.guests.get(instance)
        if record is not None:
            summary = f'its record has state {record.state}' + (f' on compute {record.compute}' if homes else '')
        else:
            summary = f'its request is for compute {", ".join(requests)}' if requests else 'the instance has no request'
        if guest is not None:
            yield from _find_guest_leftover(world, guest, homes, summary)
        if compute in homes:
            continue
        # On a host that has the disk, the disk is the finding, and the repair removes both.
        if instance in facts.seeds and guest is None:
            sentence = f'its NoCloud disk is on compute {compute}, but {summary}'
            yield Finding('iso-orphaned', instance, sentence, compute, Leftover('iso', instance))
        if guest is None or not _is_domain_of(guest, compute):
            yield from _find_network_leftovers(world, instance, summary)
        # A guest or a request needs the claim.
        held_here = world.allocations.get(instance, {}).get(compute)
        if held_here is not None and guest is None and not requests and not world.is_living(instance):
            sentence = f'placement has its claim of {format_resources(held_here)} on compute {compute}, but {summary}'
            yield Finding('allocation-orphaned', instance, sentence, compute)


def _find_guest_leftover(world: World, guest: Guest, homes: Collection[str], summary: str) -> Iterator[Finding]:
    compute, instance = world.planes.compute, guest.instance
    if guest.compute not in (None, compute):
        # Computes that share a libvirt see each other's domains.
        if guest.is_adopted:
            sentence = f'its domain is on compute {compute}, but compute {guest.compute} has adopted it; {summary}'
            yield Finding('adoption-misplaced', instance, sentence, compute)
        elif keys.request(guest.compute or '', instance) not in world.planes.etcd:
            mark = f'its domain is on compute {compute}, but has the owner mark of compute {guest.compute}'
            yield Finding('domain-misplaced', instance, f'{mark}; {summary}', compute)
    elif compute in homes or guest.is_adopted:  # the mark of an adopted one without a request goes by itself
        return
    elif not _is_domain_of(guest, compute):
        # Not repaired while the instance lives elsewhere: this may be the only copy of its disk.
        sentence, leftover = f'its disk is on compute {compute}, but {summary}', Leftover('disk', instance)
        yield Finding('disk-orphaned', instance, sentence, compute, leftover, is_repairable=not homes)
    else:
        code = 'domain-running' if guest.running and instance in world.records else 'domain-orphaned'
        sentence = f'its domain {guest.condition} on compute {compute}, but {summary}'
        yield Finding('domain-doubled' if homes else code, instance, sentence, compute)


def _find_network_leftovers(world: World, instance: str, summary: str) -> Iterator[Finding]:
    compute = world.planes.compute
    if reserved := world.reservations.get(instance, {}):
        addresses = ', '.join(sorted(filter(None, reserved.values())))
        held = f'reserves {addresses} for the instance' if addresses else 'has a reservation for it, without an address'
        sentence, leftover = f'compute {compute} {held}, but {summary}', Leftover('reservations', instance)
        yield Finding('reservation-orphaned', instance, sentence, compute, leftover)
    for mac in sorted(world.metadata.get(instance, ())):
        sentence = f'compute {compute} has metadata for MAC {mac} of the instance, but {summary}'
        yield Finding('seed-orphaned', instance, sentence, compute, Leftover('seed', mac, instance))


def _find_file_problems(world: World) -> Iterator[Finding]:
    compute, facts = world.planes.compute, world.planes.facts
    for name, mark in facts.parts.items():
        sentence = f'the unfinished file {name} is on compute {compute}, but no process writes it'
        yield Finding('part-orphaned', compute, sentence, compute, Leftover('part', name, mark))
    for name in sorted(facts.bad_bases):
        sentence = f'base volume {name} on compute {compute} has changed since its download'
        yield Finding('base-differs', compute, sentence, compute)
    for name in sorted(facts.open_dhcp):
        sentence = f'the DHCP of network {name} on compute {compute} gives addresses to unknown MACs'
        yield Finding('dhcp-open', compute, sentence, compute)


REPAIR_WRONG_KEY = 'find the host with the right guest (`virsh list --all`), then `etcdctl del` the other key: <key>'
REPAIR_WRONG_DOMAIN = 'on the host of the wrong domain: `virsh destroy <instance>; virsh undefine <instance>`'


# The rows stay beside the functions that find them, so this module has more than 700 lines.
# fmt: off
CHECKS = add_checks({
    # of the cluster, by eschedule
    'provider-missing': Check(CLUSTER, _find_compute_problems, 'a living compute has no provider',
        'wait a minute, then check the log of its ecompute'),
    'compute-silent': Check(CLUSTER, _find_compute_problems,
        'a compute that holds claims or may run queued requests is silent, so it was not compared',
        'start ecompute on its host (after a restore of etcd: `ecompute --accept-new-etcd`); if the machine never '
        'comes back: `eschedule host forget <host> --fenced`'),
    'compute-mute': Check(CLUSTER, find_mute,
        'a living compute does not check itself, or does not answer `check --now`',
        'check the log of its ecompute, then restart this ecompute'),
    'host-trouble': Check(CLUSTER, _find_compute_problems,
        'a compute reports that it cannot build, so new instances go to others first',
        'remove the cause that the finding names; failed builds count until one succeeds, or for ten minutes'),
    'hostname-orphaned': Check(CLUSTER, _find_compute_problems,
        'a host name that is recorded for a compute that does not exist', repair=Repair.DELETE),
    'request-doubled': Check(CLUSTER, _find_entry_problems, 'an instance is requested from several computes',
        REPAIR_WRONG_KEY),
    'request-misplaced': Check(CLUSTER, _find_entry_problems,
        'an instance is requested from one compute, but another compute has its record', REPAIR_WRONG_KEY),
    'request-missing': Check(CLUSTER, _find_entry_problems, 'a living instance has no request',
        'eschedule destroy <instance>'),
    'request-ended': Check(CLUSTER, _find_entry_problems, 'a finished instance has a request',
        repair=Repair.DELETE_REQUEST),
    'record-doubled': Check(CLUSTER, _find_entry_problems, 'several computes have a record of an instance',
        REPAIR_WRONG_KEY),
    'record-leased': Check(CLUSTER, _find_entry_problems, 'the record of a living instance is on a lease',
        'write the record without a lease: `etcdctl get --print-value-only <key> | etcdctl put <key>`'),
    'booted-orphaned': Check(CLUSTER, _find_entry_problems, '/booted has an address of an instance that does not live',
        repair=Repair.DELETE),
    'booted-differs': Check(CLUSTER, _find_entry_problems,
        'the address in /booted differs from the address in the record', '`etcdctl put <key> ADDRESS`, with the '
        'address in the record, or `etcdctl del <key>` if the record has no address'),
    'replaced-lives': Check(CLUSTER, _find_living_replaced,
        'an instance lives beside one that says that it replaces it, as after a restore of etcd',
        'only if you know that its host was evacuated: `eschedule destroy <instance>`, or destroy the replacement '
        'if you need the older disk'),
    'queued-flavorless': Check(CLUSTER, _find_queue_problems, 'the flavor of a queued request does not exist',
        'run `eschedule flavor set`, or `eschedule destroy <instance>`'),
    'queued-doubled': Check(CLUSTER, _find_queue_problems,
        'a queued request has already been delivered to a compute, or is in several queues',
        'leave the request in one queue, and delete it from the others: `etcdctl del <key>`', Repair.UNQUEUE),
    'name-orphaned': Check(CLUSTER, _find_name_problems, 'no living instance has this name', repair=Repair.DELETE),
    'name-missing': Check(CLUSTER, _find_name_problems, 'a living instance does not own its name',
        'destroy this instance or the owner of the name, or keep both and use the uuid of this one',
        Repair.RESTORE_NAME),
    'name-reserved': Check(CLUSTER, _find_name_problems, 'the name of a living instance is reserved for a command',
        'use its uuid instead of its name'),
    'group-broken': Check(CLUSTER, _find_group_problems, 'a strict group violates its policy',
        'destroy the members that violate it'),
    'group-orphaned': Check(CLUSTER, _find_group_problems, 'a group has a member that is neither requested nor living',
        repair=Repair.LEAVE_GROUP),
    'group-missing': Check(CLUSTER, _find_group_problems, 'an instance is not a member of the group in its request',
        repair=Repair.JOIN_GROUP),
    'quota-differs': Check(CLUSTER, _find_quota_problems,
        'the usage in a quota differs from the requests of its project', repair=Repair.RECOUNT),
    'usage-differs': Check(CLUSTER, _find_quota_problems, 'the usage in a quota differs from the usage in placement',
        'find the claim without a request: `openstack resource provider show --allocations <compute>`'),
    'stack-entry': Check(CLUSTER, _find_stack_entries, 'a stack has an entry whose instance is gone, without `apply`',
        repair=Repair.END_ENTRIES),
    'stack-mismatch': Check(CLUSTER, _find_stack_mismatches,
        'the stack in a request does not exist, or has another instance for its entry',
        'if the instance that the stack has is gone, as after a restore of etcd: `eschedule apply` of its file '
        'takes this one over; otherwise `eschedule destroy` the one that you do not need', Repair.RESTORE_STACK),
    'malformed': Check(CLUSTER, _find_malformed_values,
        'the value of a key is malformed: of a request, a record, a name, a group, a quota, a stack or in a queue',
        'if no newer ecomp wrote it: `etcdctl del <key>`, or for a request `eschedule destroy <instance>`'),
    'unleased': Check(CLUSTER, _find_unleased_keys,
        'a key has no lease: the record of a finished instance, an attempt, a presence or a taker',
        'if the process that wrote it is dead: `etcdctl del <key>`', Repair.PUT_ON_LEASE),
    # of claims, by each host, and by eschedule for absent ones
    'capacity-exceeded': Check(BOTH, _find_inventory_problems, 'the claims on a compute exceed its capacity',
        'destroy some of its instances, or increase its `inventory:`'),
    'allocation-missing': Check(BOTH, _find_claim_problems, 'a living instance has no claim', repair=Repair.CLAIM),
    'allocation-differs': Check(BOTH, _find_claim_problems, 'a claim differs from its request',
        'wait two minutes: its compute sets the claim to the request, if there is room'),
    'allocation-doubled': Check(BOTH, _find_claim_problems, 'a claim is on another compute than its instance',
        'correct the claim in placement: PUT /allocations/<instance>, with its consumer_generation'),
    # of a host, by itself
    'inventory-missing': Check(HOST, _find_inventory_problems, 'a living compute has no inventory',
        'wait a minute, then check the log of its ecompute'),
    'allocation-orphaned': Check(HOST, _find_leftovers, 'a claim that no request and no guest needs',
        repair=Repair.RELEASE),
    'domain-orphaned': Check(HOST, _find_leftovers, 'a domain that no request and no record needs',
        'after a restore of etcd, run `ecompute --accept-new-etcd` on its host; otherwise run `virsh destroy '
        '<instance>; virsh undefine <instance>` there, then repeat `eschedule check`, which reports its disk'),
    'domain-misplaced': Check(HOST, _find_leftovers, 'a domain has the owner mark of another compute',
        REPAIR_WRONG_DOMAIN),
    'adoption-misplaced': Check(HOST, _find_leftovers, 'an adopted domain is on another host than its instance',
        'eschedule release <instance>, then eschedule adopt on the host of the domain'),
    'domain-doubled': Check(HOST, _find_leftovers, 'a compute has a domain of an instance that lives on another one',
        REPAIR_WRONG_DOMAIN),
    'disk-orphaned': Check(HOST, _find_leftovers, 'a disk without an instance',
        'remove the disk manually, unless it is the only copy', Repair.CLEAR),
    'seed-orphaned': Check(HOST, _find_leftovers, 'metadata without an instance on its compute', repair=Repair.CLEAR),
    'iso-orphaned': Check(HOST, _find_leftovers, 'a NoCloud disk without an instance on its compute',
        repair=Repair.CLEAR),
    'reservation-orphaned': Check(HOST, _find_leftovers, 'a reserved address without an instance on its compute',
        repair=Repair.CLEAR),
    'record-missing': Check(HOST, _find_guest_problems, 'a requested instance has a domain, but no record',
        'restart its ecompute, which writes the record again'),
    'domain-missing': Check(HOST, _find_guest_problems, 'a living instance has no domain',
        'eschedule destroy <instance>, or eschedule release <instance> if it was adopted'),
    'domain-off': Check(HOST, _find_guest_problems, 'an active instance is off',
        'check the log of its ecompute, which did not notice that the guest is off'),
    'domain-running': Check(HOST, _find_guest_problems, 'the domain of a stopped or finished instance runs',
        'check the log of its ecompute; `virsh destroy <instance>` on its host stops the domain'),
    'domain-differs': Check(HOST, _find_guest_problems, 'a domain differs from its record and claim',
        'undo on its host, with virsh, what the finding names; within a minute the fault ends'),
    'domain-undefined': Check(HOST, _find_guest_problems,
        'a domain is transient: it runs, but libvirt keeps no definition of it',
        'on its host, save the output of `virsh dumpxml <instance>` in a file, then run `virsh define` with this file'),
    'disk-missing': Check(HOST, _find_guest_problems, 'a living instance has no disk', 'eschedule destroy <instance>'),
    'base-missing': Check(HOST, _find_guest_problems, 'a disk has no base volume',
        'restore the file that the finding names, or `eschedule destroy <instance>`'),
    'reservation-missing': Check(HOST, _find_guest_problems, 'the address of a living instance is not reserved',
        'wait a minute, then check the log of its ecompute, which reserves the address'),
    'reservation-differs': Check(HOST, _find_guest_problems,
        'the address that is reserved for a living instance differs from its record',
        'delete the reservation on its host with `virsh net-update <network> delete ip-dhcp-host`; within a minute '
        'ecompute reserves the right address'),
    'filter-missing': Check(HOST, _find_guest_problems,
        'a running guest has no filter: it can use any address, and reach etcd and placement',
        '`systemctl reload libvirtd` on its host applies the filters of all guests again'),
    'metadata-refused': Check(HOST, _find_guest_problems, 'a guest gets no metadata',
        'correct the problem that the fault of the instance names, then reboot the guest'),
    'part-orphaned': Check(HOST, _find_file_problems, 'a partly written file that no process writes',
        repair=Repair.CLEAR),
    'base-differs': Check(HOST, _find_file_problems, 'a base volume has changed since its download',
        'destroy the instances that use this base volume (the log of its ecompute names them); the next instance '
        'then downloads the image again'),
    'dhcp-open': Check(HOST, _find_file_problems, 'the DHCP of a network gives addresses to unknown MACs',
        'on its host, while ecompute and the guests on this network are stopped: `ecompute --close-dhcp`'),
})
# fmt: on


# What a host reports

# A longer report is malformed.
MAX_REPORT_BYTES = 64 * 1024


@stored(
    *(1, 'report'),
    revision=sparse(number(0, 2**63 - 1)),
    findings=optional(list_of(nested(Finding))),
    omitted=sparse(number(0, 2**31)),
    error=sparse(text(format_reason)),
    repairs=sparse(list_of(text(format_reason))),
)
class HostReport(NamedTuple):
    """The value of /findings/<compute>: what two checks of a host agree on, or a check's error.

    `revision` is that of the last question (`check --now` or `--fix`) that the host answered, or 0. `omitted` counts
    the findings that had no room. `repairs` has a line about each repair that the question asked for.
    """

    findings: tuple[Finding, ...] = ()
    revision: int = 0
    omitted: int = 0
    error: str = ''
    repairs: tuple[str, ...] = ()


def encode_report(report: HostReport) -> str:
    """Encode a report with as many findings as fit, and count the others in `omitted`."""
    size = 512 + len(dump([report.error, *report.repairs]).encode())
    kept: list[Finding] = []
    for finding in report.findings:
        size += len(dump(to_dict(finding)).encode()) + 2
        if size > MAX_REPORT_BYTES:
            break
        kept.append(finding)
    return encode(report._replace(findings=tuple(kept), omitted=report.omitted + len(report.findings) - len(kept)))


def parse_report(compute: str, value: bytes) -> HostReport:
    """Parse a report, whose findings are all of `compute`, or raise ValueError."""
    if len(value) > MAX_REPORT_BYTES:
        raise ValueError(f'it has {len(value)} bytes; the limit is {MAX_REPORT_BYTES}')
    report = decode(HostReport, value)
    return report._replace(findings=tuple(finding._replace(compute=compute) for finding in report.findings))
