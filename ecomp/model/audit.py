"""The audit: find disagreements between placement, etcd and the computes. Pure.

An instance in work (scheduled, building, destroying, or with an attempt in flight) gives no findings that its state
explains; _audit_living() skips most checks of it. The guests and disks of silent and mute computes are not compared.
The module has more than 700 lines because the table of the codes stays beside the checks that report them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import calculate_capacity, describe_difference, format_resources, sum_resources
from ecomp.model.command_names import RESERVED
from ecomp.model.group import Group
from ecomp.model.guest import INTERFACE_DOWN, PAUSED, REFUSED_METADATA, UNFILTERED, UNLIKE, UNPLUGGED
from ecomp.model.host import MAX_QUOTED_INSTANCES, SILENT
from ecomp.model.level import get_level
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.planes import AuditIndex, Leftover, Planes
from ecomp.model.quota import Quota, sum_charges
from ecomp.model.record import ACTIVE, ERROR, Record
from ecomp.model.stack import Stack
from ecomp.model.text import join_some
from ecomp.model.trouble import describe_trouble


class Repair(Enum):
    """A repair of `audit --fix`, in words; ecomp.scheduler.operations.audit carries it out."""

    RELEASE = 'releases the claim'
    CLAIM = 'claims the resources of the request again'
    DELETE = 'deletes the key'
    DELETE_REQUEST = 'deletes the request'
    UNQUEUE = 'removes the request from the queue'
    PUT_ON_LEASE = 'puts the record on a lease'
    RESTORE_NAME = 'restores the name'
    JOIN_GROUP = 'adds the instance and its compute to the group'
    LEAVE_GROUP = 'removes these members from the group'
    RECOUNT = 'counts the usage again'
    END_ENTRIES = 'marks these entries as ended'
    RESTORE_STACK = 'restores the stack from the requests'
    CLEAR = 'asks its compute to remove the leftover'


class Code(NamedTuple):
    """A kind of finding: its meaning and repair. Its code is stable: scripts depend on it."""

    meaning: str
    repair: Repair | None = None
    # The manual repair. `<key>` stands for the finding's key, or for all of its keys if one of them is wrong.
    manual_repair: str = ''

    @property
    def fix(self) -> str:
        """The repair of `audit --fix` in words, '' if absent."""
        return self.repair.value if self.repair else ''


REPAIR_WRONG_KEY = 'delete the wrong key with `etcdctl del`: <key>'
REPAIR_MALFORMED = 'if no newer ecomp wrote it: `etcdctl del <key>`'
REPAIR_MALFORMED_REQUEST = '`eschedule destroy <instance>`; if the key does not end in a uuid: `etcdctl del <key>`'
REPAIR_WRONG_DOMAIN = 'on the host of the wrong domain: `virsh destroy <instance>; virsh undefine <instance>`'

CODES = {
    # placement
    'provider-missing': Code(
        'a living compute has no provider', manual_repair='wait a minute, then check the log of its ecompute'
    ),
    'inventory-missing': Code(
        'a living compute has no inventory', manual_repair='wait a minute, then check the log of its ecompute'
    ),
    'capacity-exceeded': Code(
        'the claims on a compute exceed its capacity',
        manual_repair='destroy some of its instances, or increase its `inventory:`',
    ),
    'allocation-orphaned': Code('a claim that no request and no guest needs', Repair.RELEASE),
    'allocation-missing': Code('a living instance has no claim', Repair.CLAIM),
    'allocation-differs': Code(
        'a claim differs from its request',
        manual_repair='destroy the instance, or correct its claim in placement: PUT /allocations/<instance>',
    ),
    'allocation-doubled': Code(
        'a claim is on several computes',
        manual_repair='correct the claim in placement: PUT /allocations/<instance>, with its consumer_generation',
    ),
    # etcd
    'request-doubled': Code('an instance is requested from several computes', manual_repair=REPAIR_WRONG_KEY),
    'request-misplaced': Code(
        'an instance is requested from one compute, but another compute has its record', manual_repair=REPAIR_WRONG_KEY
    ),
    'request-missing': Code('a living instance has no request', manual_repair='eschedule destroy <instance>'),
    'request-ended': Code('a finished instance has a request', Repair.DELETE_REQUEST),
    'replaced-lives': Code(
        'an instance lives beside one that says that it replaces it, as after a restore of etcd',
        manual_repair='only if you know that its host was evacuated: `eschedule destroy <instance>`, or destroy the '
        'replacement if you need the older disk',
    ),
    'request-unreadable': Code('a request is malformed', manual_repair=REPAIR_MALFORMED_REQUEST),
    'queued-unreadable': Code('a queued request is malformed', manual_repair=REPAIR_MALFORMED_REQUEST),
    'queued-flavorless': Code(
        'the flavor of a queued request does not exist',
        manual_repair='run `eschedule flavor set`, or `eschedule destroy <instance>`',
    ),
    'queued-doubled': Code(
        'a queued request has already been delivered to a compute, or is in several queues',
        Repair.UNQUEUE,
        REPAIR_WRONG_KEY,
    ),
    'taker-unleased': Code(
        'a taker key has no lease', manual_repair='if its compute does not take the request: `etcdctl del <key>`'
    ),
    'record-missing': Code(
        'a requested instance has a domain, but no record',
        manual_repair='restart its ecompute, which writes the record again',
    ),
    'record-doubled': Code('several computes have a record of an instance', manual_repair=REPAIR_WRONG_KEY),
    'record-unreadable': Code('a record is malformed', manual_repair='`etcdctl del <key>`, then restart its ecompute'),
    'record-unleased': Code('the record of a finished instance has no lease', Repair.PUT_ON_LEASE),
    'record-leased': Code(
        'the record of a living instance is on a lease',
        manual_repair='write the record without a lease: `etcdctl get --print-value-only <key> | etcdctl put <key>`',
    ),
    'booted-orphaned': Code('/booted has an address of an instance that does not live', Repair.DELETE),
    'booted-differs': Code(
        'the address in /booted differs from the address in the record',
        manual_repair='`etcdctl put <key> ADDRESS`, with the address in the record, or `etcdctl del <key>` if the '
        'record has no address',
    ),
    'name-orphaned': Code('no living instance has this name', Repair.DELETE, manual_repair=REPAIR_MALFORMED),
    'name-missing': Code(
        'a living instance does not own its name',
        Repair.RESTORE_NAME,
        manual_repair='destroy this instance or the owner of the name, or keep both and use the uuid of this one',
    ),
    'name-reserved': Code(
        'the name of a living instance is reserved for a command', manual_repair='use its uuid instead of its name'
    ),
    'group-unreadable': Code('a group is malformed', manual_repair=REPAIR_MALFORMED),
    'group-broken': Code('a strict group violates its policy', manual_repair='destroy the members that violate it'),
    'group-orphaned': Code('a group has a member that is neither requested nor living', Repair.LEAVE_GROUP),
    'group-missing': Code('an instance is not a member of the group in its request', Repair.JOIN_GROUP),
    'quota-unreadable': Code('a quota is malformed', manual_repair=REPAIR_MALFORMED),
    'quota-differs': Code('the usage in a quota differs from the requests of its project', Repair.RECOUNT),
    'usage-differs': Code(
        'the usage in a quota differs from the usage in placement',
        manual_repair='find the claim without a request: `openstack resource provider show --allocations <compute>`',
    ),
    'stack-unreadable': Code('a stack is malformed', manual_repair=REPAIR_MALFORMED),
    'stack-entry': Code('a stack has an entry whose instance is gone, without `apply`', Repair.END_ENTRIES),
    'stack-mismatch': Code(
        'the stack in a request does not exist, or has another instance for its entry',
        Repair.RESTORE_STACK,
        manual_repair='if the instance that the stack has is gone, as after a restore of etcd: `eschedule apply` of '
        'its file takes this one over; otherwise `eschedule destroy` the one that you do not need',
    ),
    'attempt-unleased': Code(
        'an attempt has no lease', manual_repair='if no eschedule places the instance: `etcdctl del <key>`'
    ),
    'hostname-orphaned': Code('a host name that is recorded for a compute that does not exist', Repair.DELETE),
    'presence-unleased': Code('the presence of a compute has no lease', manual_repair='etcdctl del <key>'),
    # computes
    'compute-silent': Code(
        'a compute that holds claims or may run queued requests is silent, so it was not compared',
        manual_repair='start ecompute on its host (after a restore of etcd: `ecompute --accept-new-etcd`); if the '
        'machine never comes back: `eschedule host forget <host> --fenced`',
    ),
    'compute-mute': Code(
        'a living compute does not answer the audit with a valid digest (a summary of what it has)',
        manual_repair='check the log of its ecompute, then restart this ecompute',
    ),
    'host-trouble': Code(
        'a compute reports that it cannot build, so new instances go to others first',
        manual_repair='remove the cause that it names; failed builds count until one succeeds, or for ten minutes',
    ),
    'domain-missing': Code('a living instance has no domain', manual_repair='eschedule destroy <instance>'),
    'domain-off': Code(
        'an active instance is off',
        manual_repair='check the log of its ecompute, which did not notice that the guest is off',
    ),
    'domain-running': Code(
        'the domain of a stopped or finished instance runs',
        manual_repair='check the log of its ecompute; `virsh destroy <instance>` on its host stops the domain',
    ),
    'domain-differs': Code(
        'a domain differs from its record and claim',
        manual_repair='undo on its host, with virsh, what the finding names; within a minute the fault ends',
    ),
    'domain-undefined': Code(
        'a domain is transient: it runs, but libvirt keeps no definition of it',
        manual_repair='on its host, save the output of `virsh dumpxml <instance>` in a file, then run `virsh define` '
        'with this file',
    ),
    'domain-orphaned': Code(
        'a domain that no request and no record needs',
        manual_repair='after a restore of etcd, run `ecompute --accept-new-etcd` on its host; otherwise run '
        '`virsh destroy <instance>; virsh undefine <instance>` there, then repeat the audit, which reports its disk',
    ),
    'domain-misplaced': Code('a domain has the owner mark of another compute', manual_repair=REPAIR_WRONG_DOMAIN),
    'domain-doubled': Code('several computes have a domain of an instance', manual_repair=REPAIR_WRONG_DOMAIN),
    'disk-missing': Code('a living instance has no disk', manual_repair='eschedule destroy <instance>'),
    'base-missing': Code(
        'a disk has no base volume', manual_repair='restore the same image file, or `eschedule destroy <instance>`'
    ),
    'disk-orphaned': Code(
        'a disk without an instance', Repair.CLEAR, manual_repair='remove the disk manually, unless it is the only copy'
    ),
    'seed-orphaned': Code('metadata without an instance on its compute', Repair.CLEAR),
    'iso-orphaned': Code('a NoCloud disk without an instance on its compute', Repair.CLEAR),
    'reservation-orphaned': Code('a reserved address without an instance on its compute', Repair.CLEAR),
    'reservation-missing': Code(
        'the address of a living instance is not reserved',
        manual_repair='restart its ecompute, which reserves the address',
    ),
    'reservation-differs': Code(
        'the address that is reserved for a living instance differs from its record',
        manual_repair='delete the reservation on its host with `virsh net-update <network> delete ip-dhcp-host`, then '
        'restart ecompute there',
    ),
    'filter-missing': Code(
        'a running guest has no filter: it can use any address, and reach etcd and placement',
        manual_repair='`systemctl reload libvirtd` on its host applies the filters of all guests again',
    ),
    'metadata-refused': Code(
        'a guest gets no metadata',
        manual_repair='correct the problem that the fault of the instance names, then reboot the guest',
    ),
    'part-orphaned': Code('a partly written file that no process writes', Repair.CLEAR),
    'base-differs': Code(
        'a base volume has changed since its download',
        manual_repair='destroy the instances that use this base volume (the log of its ecompute names them); the '
        'next instance then downloads the image again',
    ),
    'dhcp-open': Code(
        'the DHCP of a network gives addresses to unknown MACs',
        manual_repair='on its host, while ecompute and the guests on this network are stopped: `ecompute --close-dhcp`',
    ),
}


class Finding(NamedTuple):
    """One disagreement about `subject`: an instance, compute, name, group, project or stack.

    `compute` is where it was found, or ''; with a `leftover`, --fix has that compute remove it. If not `is_repairable`,
    --fix leaves the finding alone, although its code has a repair. --fix changes etcd only if all `keys` are unchanged.
    A repair that deletes a key, or puts it on a lease, applies to the first of `keys`.
    """

    code: str
    subject: str
    sentence: str
    compute: str = ''
    leftover: Leftover | None = None
    is_repairable: bool = True
    keys: tuple[str, ...] = ()

    @property
    def repair(self) -> Repair | None:
        """The repair of `audit --fix`, None if it leaves the finding alone."""
        return CODES[self.code].repair if self.is_repairable else None

    @property
    def fix(self) -> str:
        """The repair in words, '' if absent."""
        return self.repair.value if self.repair else ''

    @property
    def how(self) -> str:
        """The manual repair, with only `<key>` filled in, quoted for the shell; '' if `audit --fix` repairs it."""
        text = '' if self.fix else CODES[self.code].manual_repair
        return text.replace('<key>', ' or '.join(map(shlex.quote, self.keys))) if self.keys else text

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that users see: with level, fix and how, without leftover, is_repairable and keys."""
        fields = {name: getattr(self, name) for name in ('code', 'subject', 'compute', 'sentence', 'fix', 'how')}
        return {**fields, 'level': get_level(self.code)}


# {subject: {key about the subject: its revision in etcd}}
Revisions = Mapping[str, Mapping[str, int]]


def confirm_findings(
    first: Iterable[Finding], second: Iterable[Finding], revisions: Sequence[Revisions]
) -> list[Finding]:
    """Return the findings that both checks have, unless the snapshots in `revisions` differ about the subject.

    Planes that are read at different moments may disagree about an instance in work, but then its keys change.
    """
    second_findings = set(second)
    return [
        finding
        for finding in first
        if finding in second_findings
        and all(snapshot.get(finding.subject) == revisions[0].get(finding.subject) for snapshot in revisions)
    ]


# The code for each trouble of a living guest that its compute detects itself and writes into the record's fault.
CODES_BY_TROUBLE = {
    **dict.fromkeys((PAUSED, UNLIKE, UNPLUGGED, INTERFACE_DOWN), 'domain-differs'),
    UNFILTERED: 'filter-missing',
    REFUSED_METADATA: 'metadata-refused',
}


def audit(planes: Planes) -> list[Finding]:
    """Return all findings; about instances in AuditIndex.in_flight, only of attempts, queues and shared keys."""
    world = AuditIndex(planes)
    findings = [
        *_audit_computes(world),
        *_audit_attempts(world),
        *_audit_queues(world),
        *_audit_names(world),
        *_audit_replaced(world),
        *audit_groups(world),
        *audit_quotas(world),
        *audit_stacks(world),
    ]
    for instance in world.list_instances():
        if instance not in world.in_flight:
            findings += _audit_instance(world, instance)
    for compute, digest in planes.digests.items():
        findings += (
            Finding('part-orphaned', compute, f'{name} is on compute {compute}, but no process writes it', compute,
                    Leftover('part', name, mark))
            for name, mark in digest.parts.items()
        )  # fmt: skip
        for name in digest.bad_bases:
            sentence = f'base volume {name} on compute {compute} has changed since its download'
            findings.append(Finding('base-differs', compute, sentence))
        for name in digest.open_dhcp:
            sentence = f'the DHCP of network {name} on compute {compute} gives addresses to unknown MACs'
            findings.append(Finding('dhcp-open', compute, sentence))
    return findings


def _audit_computes(world: AuditIndex) -> Iterator[Finding]:
    """Find unleased presences, orphaned host names, and computes: mute, overfull, unregistered, silent but in use."""
    known_computes = {*world.living_computes, *world.planes.providers, *world.list_absent_computes()}
    for key, entry in world.planes.etcd.items():
        if key.startswith(keys.COMPUTES) and not entry.lease:
            compute = keys.get_last_part(key)
            yield Finding(
                'presence-unleased',
                compute,
                f'{key} has no lease, so it remains even if its compute is dead',
                keys=(key,),
            )
        if key.startswith(keys.HOSTNAMES) and keys.get_last_part(key) not in known_computes:
            detail = (
                f'{key} names a compute that is not in placement, nor in a request or the record of a living instance'
            )
            presence = keys.compute(keys.get_last_part(key))
            yield Finding('hostname-orphaned', keys.get_last_part(key), detail, keys=(key, presence))
    for compute in sorted(world.living_computes):
        provider = world.planes.providers.get(compute)
        if provider is None:
            yield Finding('provider-missing', compute, f'compute {compute} is alive, but has no provider')
        elif not provider.inventory:
            yield Finding('inventory-missing', compute, f'compute {compute} is alive, but has no inventory')
        if compute in world.planes.mute_reasons:
            reason = world.planes.mute_reasons[compute]
            yield Finding('compute-mute', compute, f'compute {compute} is alive, but returns no valid digest: {reason}')
        trouble = world.get_value(keys.troubles(compute))
        if trouble is not None and trouble.lease:
            reasons = describe_trouble(trouble.value)
            yield Finding('host-trouble', compute, f'compute {compute} cannot build: {reasons}', compute)
    for compute, state in world.list_absent_computes().items():
        held = world.planes.providers[compute].allocations if compute in world.planes.providers else {}
        if state == SILENT and (held or world.queue_entries):
            reason = f'holds {len(held)} claim' + 's' * (len(held) > 1) if held else 'may run queued requests'
            sentence = f'compute {compute} {reason}, but is silent, so its guests and disks were not compared'
            yield Finding('compute-silent', compute, sentence, compute)
    for compute in sorted(world.computes & world.planes.providers.keys()):
        provider = world.planes.providers[compute]
        for name, amount in sorted(sum_resources(provider.allocations.values()).items()):
            inventory = provider.inventory.get(name, {})
            # `reserved` is not subtracted: a stopped compute has all its VCPU reserved while its guests keep running.
            total = calculate_capacity(inventory.get('total', 0), inventory.get('allocation_ratio', 1.0))
            if amount > total:
                yield Finding(
                    'capacity-exceeded', compute, f'its claims use {name}:{amount}, but its capacity is {total}'
                )


def _audit_attempts(world: AuditIndex) -> Iterator[Finding]:
    """Find attempts that are on no lease."""
    for key, entry in world.select_prefix(keys.ATTEMPTS).items():
        if not entry.lease:
            sentence = f'{key} has no lease, so it is never deleted'
            yield Finding('attempt-unleased', keys.get_last_part(key), sentence, keys=(key,))


def _audit_queues(world: AuditIndex) -> Iterator[Finding]:
    """Find unleased takers and queued requests that are malformed, doubled or flavorless: one finding each.

    A doubled one is in several queues, delivered or recorded; it is repairable if it is in one queue only.
    """
    for key, entry in world.select_prefix(keys.QUEUES).items():
        if key.endswith(keys.TAKER) and not entry.lease:
            sentence = f'{key} has no lease, so it is never deleted, and no other compute takes the request'
            yield Finding('taker-unleased', keys.get_queued_instance(key), sentence, keys=(key,))
    for instance, queues in sorted(world.queue_entries.items()):
        requests, record = sorted(world.requests_by_compute.get(instance, {})), world.records.get(instance)
        others = [f'it is requested from compute {", ".join(requests)}'] if requests else []
        others += [f'its record has state {record.state}'] if record else []
        for flavor, waiting in sorted(queues.items()):
            key = keys.queue(flavor, instance)
            if isinstance(waiting, InvalidRequest):
                sentence = f'{key} is malformed, so no compute takes it: {waiting.reason}'
                yield Finding('queued-unreadable', instance, sentence, keys=(key,))
            elif others or len(queues) > 1:
                other_queues = [f'it is in the queues {", ".join(sorted(queues))}'] if len(queues) > 1 else []
                sentence = f'{key} is a queued request, but {"; ".join([*others, *other_queues])}'
                is_repairable = bool(others) and len(queues) == 1
                related_keys = world.list_instance_keys(instance) if is_repairable else ()
                yield Finding(
                    'queued-doubled', instance, sentence, is_repairable=is_repairable, keys=(key, *related_keys)
                )
            elif world.get_value(keys.flavor(flavor)) is None:
                sentence = f'it is queued for flavor {flavor}, which does not exist, so no compute takes it'
                yield Finding('queued-flavorless', instance, sentence)


def _audit_names(world: AuditIndex) -> Iterator[Finding]:
    """Find malformed names (not repairable), or those whose owner is gone, unknown, renamed or failed (if unleased)."""
    for name, instance in world.name_owners.items():
        key = keys.name(name)
        if instance is None:
            yield Finding('name-orphaned', name, f'{key} is malformed', is_repairable=False, keys=(key,))
            continue
        requests, record = world.requests_by_compute.get(instance, {}).values(), world.records.get(instance)
        waiting = world.queue_entries.get(instance, {}).values()
        if instance in world.malformed_records or any(
            isinstance(parsed, InvalidRequest) for parsed in (*requests, *waiting)
        ):
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


def _audit_replaced(world: AuditIndex) -> Iterator[Finding]:
    """Find instances that others say they replace, and that live: with a request that is no tombstone, or a record.

    Not repairable: what an instance replaces is the word of its compute (rule: shown-not-acted-on).
    """
    requests = {
        instance: {name: each for name, each in placed.items() if isinstance(each, Request) and not each.is_tombstone}
        for instance, placed in world.requests_by_compute.items()
    }
    living = [each for each in world.records.values() if world.is_living(each.instance)]
    settled = [record for record in living if not world.is_in_work(record.instance)]
    requested = [request for placed in requests.values() for request in placed.values()]
    pairs = {(each.replaces, each.instance) for each in (*settled, *requested) if each.replaces}
    for replaced, instance in sorted(pairs):
        computes = sorted(requests.get(replaced, {}))
        if replaced not in requests and world.is_living(replaced):
            computes = [world.records[replaced].compute]
        if computes and world.in_flight.isdisjoint((replaced, instance)):
            sentence = f'it lives on compute {" and ".join(computes)}, but instance {instance} says that it replaces it'
            yield Finding('replaced-lives', replaced, sentence, computes[0])


def _audit_own_names(world: AuditIndex, record: Record) -> Iterator[Finding]:
    """Find the instance's names that are reserved, or whose key is absent, leased or another's (not repairable)."""
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
        yield Finding(
            'name-missing', record.instance, sentence, is_repairable=entry is None or is_own, keys=related_keys
        )


def _audit_instance(world: AuditIndex, instance: str) -> Iterator[Finding]:
    """Audit an instance; if its record or a request is malformed, that is the only finding."""
    if instance in world.malformed_records:
        key = world.get_record_key(instance)
        sentence = f'{key} is malformed: {world.malformed_records[instance]}'
        yield Finding('record-unreadable', instance, sentence, keys=(key,))
        return
    for compute, parsed in world.requests_by_compute.get(instance, {}).items():
        if isinstance(parsed, InvalidRequest):
            key = keys.request(compute, instance)
            key = key if world.get_value(key) else keys.HOSTS + compute  # a key without an instance part
            sentence = f'{key} is malformed: {parsed.reason}'
            yield Finding('request-unreadable', instance, sentence, compute, keys=(key,))
            return
    record = world.records.get(instance)
    for compute, state in sorted(world.contradicting_states.get(instance, {}).items()):
        conflict = f'compute {compute} has a record with state {state}'
        other_key = keys.record(compute, instance)
        if record is not None:
            text = f'its record has state {record.state} on compute {record.compute}, but {conflict}'
            yield Finding('record-doubled', instance, text, compute, keys=(world.get_record_key(instance), other_key))
        else:
            requested_from = ', '.join(sorted(world.requests_by_compute.get(instance, {})))
            text = f'{conflict}, but it is requested from compute {requested_from}'
            yield Finding(
                'request-misplaced', instance, text, compute, keys=(*world.list_request_keys(instance), other_key)
            )
    if record is not None and world.is_living(instance):
        yield from _audit_living(world, record)
        home = {record.compute}
    elif record is not None:
        yield from _audit_ended(world, record)
        home = set()
    else:
        yield from _audit_unrecorded(world, instance)
        home = set(world.requests_by_compute.get(instance, {}))
    yield from _audit_elsewhere(world, instance, home | world.contradicting_states.get(instance, {}).keys())


def _make_doubled_finding(world: AuditIndex, instance: str) -> Finding:
    sentence = f'it is requested from computes {", ".join(sorted(world.requests_by_compute[instance]))}'
    return Finding('request-doubled', instance, sentence, keys=world.list_request_keys(instance))


def _audit_living(world: AuditIndex, record: Record) -> Iterator[Finding]:
    """Audit a living instance; of one in work, only the lease of its record and the number of its requests."""
    instance, compute = record.instance, record.compute
    summary = f'its record has state {record.state} on compute {compute}'
    entry = world.get_value(world.get_record_key(instance))
    if entry is not None and entry.lease:
        sentence = f'{summary}, but is on a lease, so it will be deleted'
        yield Finding('record-leased', instance, sentence, keys=(world.get_record_key(instance),))
    requests = world.requests_by_compute.get(instance, {})
    if not requests:
        yield Finding('request-missing', instance, f'{summary}, but it has no request', compute)
    elif len(requests) > 1:
        yield _make_doubled_finding(world, instance)
    if world.is_in_work(instance):
        return
    yield from _audit_claim(world, record, summary)
    booted = world.get_value(keys.address(instance))
    booted_address = booted.value.decode(errors='replace') if booted else 'no address'
    if booted_address != (record.address or 'no address'):
        sentence = f'/booted has {booted_address}, but its record has {record.address or "no address"}'
        yield Finding('booted-differs', instance, sentence, keys=(keys.address(instance),))
    yield from _audit_own_names(world, record)
    yield from audit_membership(world, instance)
    yield from _audit_guest(world, record, summary)
    # The compute may not have checked the guest since it was changed, so its digest counts, too.
    guest = None if world.is_switching(instance) else world.guests.get(instance, {}).get(compute)
    observed = guest.describe_trouble(record.resources) if guest is not None and guest.compute == compute else ''
    sentences: dict[str, str] = {}
    for label, text in (('fault', record.fault or ''), ('not in its fault yet', observed)):
        codes = [code for trouble, code in CODES_BY_TROUBLE.items() if trouble in text]
        sentences = {**dict.fromkeys(codes, f'{summary}; {label}: {text}'), **sentences}
    for code, sentence in sentences.items():
        yield Finding(code, instance, sentence, compute)


def _audit_claim(world: AuditIndex, record: Record, summary: str) -> Iterator[Finding]:
    """Yield at most one finding: no claim, claims on several computes, or one unlike its compute's valid request."""
    instance = record.instance
    held = world.allocations.get(instance, {})
    held_on = sorted(world.computes & held.keys())
    parsed = world.requests_by_compute.get(instance, {}).get(record.compute)
    if not held:
        yield Finding('allocation-missing', instance, f'{summary}, but placement has no claim for it', record.compute)
    elif len(held_on) > 1:
        yield Finding(
            'allocation-doubled', instance, f'{summary}, but placement has claims for it on {" and on ".join(held_on)}'
        )
    elif isinstance(parsed, Request) and (sentence := describe_difference(parsed.allocations, held)):
        yield Finding('allocation-differs', instance, sentence, record.compute)


def _audit_guest(world: AuditIndex, record: Record, summary: str) -> Iterator[Finding]:
    """Compare a living instance's record with its compute's digest, if any; not its power during a power action."""
    instance, compute = record.instance, record.compute
    digest = world.planes.digests.get(compute)
    if digest is None:
        return
    guest = digest.guests.get(instance)
    if guest is None or not (guest.defined or guest.running):
        detail = 'its domain and its disk do not exist' if guest is None else 'its domain does not exist'
        yield Finding('domain-missing', instance, f'{summary}, but {detail}', compute)
        return
    if guest.compute != compute:
        return  # _audit_elsewhere() reports it
    if not guest.disk:
        yield Finding('disk-missing', instance, f'{summary}, but its domain has no disk', compute)
    elif instance in digest.without_base:
        path = digest.without_base[instance]
        yield Finding('base-missing', instance, f'{summary}, but its base volume {path} is missing', compute)
    switching = world.is_switching(instance)
    if not guest.defined:
        yield Finding('domain-undefined', instance, f'{summary}, but its domain is transient', compute)
    elif record.state == ACTIVE and not guest.running and not switching:
        yield Finding('domain-off', instance, f'{summary}, but its domain is off', compute)
    if record.state != ACTIVE and guest.running and not switching:
        yield Finding('domain-running', instance, f'{summary}, but its domain runs', compute)
    yield from _audit_reservations(world, record)


def _audit_reservations(world: AuditIndex, record: Record) -> Iterator[Finding]:
    """Find expected addresses whose reservation is missing or different; unknown reservations count as missing."""
    instance, compute = record.instance, record.compute
    reserved = world.reservations.get(instance, {}).get(compute, {})
    for interface in record.addresses:
        address = reserved.get(interface.mac)
        if interface.expected is None or address == interface.expected:
            continue
        code = 'reservation-missing' if address is None else 'reservation-differs'
        held = f'reserves {address or "no address"} for it'
        sentence = f'its record expects {interface.expected} on {interface.network}, but compute {compute} {held}'
        yield Finding(code, instance, sentence, compute)


def _audit_ended(world: AuditIndex, record: Record) -> Iterator[Finding]:
    """Find what remains of an ended instance: requests, an unleased record, address and claim."""
    instance = record.instance
    summary = f'its record has state {record.state}'
    for compute in world.requests_by_compute.get(instance, {}):
        sentence = f'{summary}, but it is requested from compute {compute}'
        related_keys = (keys.request(compute, instance), *world.list_instance_keys(instance))
        yield Finding('request-ended', instance, sentence, compute, keys=related_keys)
    entry = world.get_value(world.get_record_key(instance))
    if entry is not None and not entry.lease:
        sentence = f'{summary}, but no lease, so it is never deleted'
        yield Finding('record-unleased', instance, sentence, keys=world.list_instance_keys(instance))
    yield from _audit_traces(world, instance, summary)


def _audit_unrecorded(world: AuditIndex, instance: str) -> Iterator[Finding]:
    """Audit an instance without a record.

    If it is requested: doubled requests, and its domain on a requested compute; if not: any traces.
    """
    requests = world.requests_by_compute.get(instance, {})
    if len(requests) > 1:
        yield _make_doubled_finding(world, instance)
    if not requests:
        yield from _audit_traces(world, instance, 'it has no request and no record')
    elif not world.is_in_work(instance):
        for compute, guest in _find_domains(world, instance).items():
            if compute in requests:
                condition = 'runs' if guest else 'is defined'
                sentence = (
                    f'it is requested from compute {compute}, and its domain {condition} there, but it has no record'
                )
                yield Finding('record-missing', instance, sentence, compute)


def _audit_traces(world: AuditIndex, instance: str, summary: str) -> Iterator[Finding]:
    """Find what remains of a finished or unknown instance: its address, and a claim that certainly nothing needs."""
    booted = world.get_value(keys.address(instance))
    if booted is not None:
        address = booted.value.decode(errors='replace')
        sentence = f'{summary}, but /booted has the address {address}'
        yield Finding(
            'booted-orphaned', instance, sentence, keys=(keys.address(instance), *world.list_instance_keys(instance))
        )
    held = {
        name: resources for name, resources in world.allocations.get(instance, {}).items() if name in world.computes
    }
    # A guest or a request needs the claim, and a compute without a digest may have the guest.
    unheard = held.keys() - world.planes.digests.keys()
    if held and not unheard and instance not in world.guests and not world.requests_by_compute.get(instance):
        amounts = [f'{format_resources(resources)} on {provider}' for provider, resources in sorted(held.items())]
        yield Finding(
            'allocation-orphaned', instance, f'placement has its claim of {" and ".join(amounts)}, but {summary}'
        )


def _audit_elsewhere(world: AuditIndex, instance: str, home_computes: set[str]) -> Iterator[Finding]:
    """Find the instance's parts outside `home_computes`, several domains, and owner marks of computes that lack it."""
    record = world.records.get(instance)
    if record is None:
        summary = (
            f'it is requested from compute {", ".join(sorted(home_computes))}' if home_computes else 'it has no request'
        )
    else:
        summary = f'its record has state {record.state}' + (f' on compute {record.compute}' if home_computes else '')
    domains = _find_domains(world, instance)
    if len(domains) > 1:
        yield Finding(
            'domain-doubled', instance, f'its domain is on computes {" and ".join(sorted(domains))}, but {summary}'
        )
    for compute, guest in sorted(world.guests.get(instance, {}).items()):
        if guest.compute not in (None, compute):
            # Computes that share a libvirt see each other's domains, so the owner that the mark names may have it.
            if guest.compute not in world.guests[instance]:
                mark = f'its domain is on compute {compute}, but has the owner mark of compute {guest.compute}'
                yield Finding('domain-misplaced', instance, f'{mark}; {summary}', compute)
        elif compute in home_computes:
            continue
        elif compute not in domains:
            sentence = f'its disk is on compute {compute}, but {summary}'
            # Not repaired automatically while the instance lives elsewhere: this may be the only copy of its disk.
            yield Finding(
                'disk-orphaned',
                instance,
                sentence,
                compute,
                Leftover('disk', instance),
                is_repairable=not home_computes,
            )
        elif len(domains) == 1:
            code = 'domain-running' if guest.running and record is not None and not home_computes else 'domain-orphaned'
            condition = 'runs' if guest.running else 'is defined'
            yield Finding(code, instance, f'its domain {condition} on compute {compute}, but {summary}', compute)
    for compute in sorted(world.seeds.get(instance, ())):
        # On a compute that has the disk, the disk is the finding, and the repair removes both.
        if compute not in home_computes and compute not in world.guests.get(instance, {}):
            iso_sentence = f'its NoCloud disk is on compute {compute}, but {summary}'
            yield Finding('iso-orphaned', instance, iso_sentence, compute, Leftover('iso', instance))
    for compute, reserved in sorted(world.reservations.get(instance, {}).items()):
        if compute not in home_computes and compute not in domains:
            addresses = ', '.join(sorted(filter(None, reserved.values())))
            held = f'reserves {addresses} for it' if addresses else 'has a reservation for it, without an address'
            leftover = f'compute {compute} {held}, but {summary}'
            yield Finding('reservation-orphaned', instance, leftover, compute, Leftover('reservations', instance))
    for compute, macs in sorted(world.metadata.get(instance, {}).items()):
        if compute not in home_computes and compute not in domains:
            for mac in sorted(macs):
                leftover = f'compute {compute} has metadata for its MAC {mac}, but {summary}'
                yield Finding('seed-orphaned', instance, leftover, compute, Leftover('seed', mac, instance))


def _find_domains(world: AuditIndex, instance: str) -> Mapping[str, bool]:
    """Return {compute: whether it runs} of the instance's domains that have the owner mark of their compute."""
    return {
        compute: guest.running
        for compute, guest in world.guests.get(instance, {}).items()
        if (guest.defined or guest.running) and guest.compute == compute
    }


def audit_groups(world: AuditIndex) -> Iterator[Finding]:
    """Find malformed groups, broken strict rules, and members that are neither requested nor living."""
    for name, group in world.groups.items():
        if not isinstance(group, Group):
            key = keys.group(name)
            yield Finding('group-unreadable', name, f'{key} is malformed: {group}', keys=(key,))
            continue
        for line in group.list_breaches():
            yield Finding('group-broken', name, f'its policy is {group.rule}, but {line}')
        orphans = [instance for instance in sorted(group.members) if not _is_requested_or_living(world, instance)]
        if orphans:
            sentence = f'{keys.group(name)} has members that are neither requested nor living'
            yield Finding(
                'group-orphaned',
                name,
                f'{sentence}: {join_some(orphans, MAX_QUOTED_INSTANCES)}',
                keys=(keys.group(name),),
            )


def _is_requested_or_living(world: AuditIndex, instance: str) -> bool:
    """Return True if the instance is requested, in flight or living, or has a malformed record."""
    is_requested = (
        instance in world.in_flight
        or instance in world.malformed_records
        or bool(world.requests_by_compute.get(instance))
    )
    return is_requested or world.is_living(instance)


def audit_membership(world: AuditIndex, instance: str) -> Iterator[Finding]:
    """Find valid requests, no tombstones, whose group is absent or, if valid, lacks the instance on their compute."""
    for compute, parsed in world.requests_by_compute.get(instance, {}).items():
        if not isinstance(parsed, Request) or parsed.is_tombstone or parsed.group is None:
            continue
        group = world.groups.get(parsed.group.name)
        if group is None:
            detail = 'does not exist'
        elif not isinstance(group, Group) or group.members.get(instance) == compute:
            continue
        else:
            group_compute = group.members.get(instance)
            detail = f'has it on compute {group_compute}' if group_compute else 'does not have it'
        name = parsed.group.name
        sentence = f'it is requested in group {name} on compute {compute}, but {keys.group(name)} {detail}'
        yield Finding('group-missing', instance, sentence, compute, keys=world.list_instance_keys(instance))


def audit_quotas(world: AuditIndex) -> Iterator[Finding]:
    """Find quotas that are malformed, unlike their requests or, while nothing is in work, unlike placement's usage."""
    for project, quota in world.quotas.items():
        if not isinstance(quota, Quota):
            key = keys.quota(project)
            yield Finding('quota-unreadable', project, f'{key} is malformed: {quota}', keys=(key,))
            continue
        requested = _count_requested(world, project)
        difference = _describe_difference(quota.used, requested)
        if difference:
            sentence = (
                f'{keys.quota(project)} counts {difference[0]}, but the requests of the project use {difference[1]}'
            )
            yield Finding('quota-differs', project, sentence)
            continue
        claimed = world.planes.usages.get(project)
        # Not compared while work is in progress: an attempt claims before it delivers, a destroy releases the claim.
        in_work = world.in_flight or any(map(world.is_in_work, world.requests_by_compute))
        difference = None if claimed is None or in_work else _describe_difference(quota.used, claimed)
        if difference:
            sentence = f'{keys.quota(project)} counts {difference[0]}, but placement counts {difference[1]}'
            yield Finding('usage-differs', project, sentence)


def _count_requested(world: AuditIndex, project: str) -> dict[str, int]:
    """Return the usage of a project by its queued and delivered requests: {class: amount}."""
    waiting_requests = (waiting for places in world.queue_entries.values() for waiting in places.values())
    requests = (parsed for by_compute in world.requests_by_compute.values() for parsed in by_compute.values())
    return sum_charges(project, (*waiting_requests, *requests), world.records.get)


def _describe_difference(first: Mapping[str, int], second: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the differing amounts of both as text, 0 for a name that one lacks; None if all are equal."""
    names = sorted(name for name in {*first, *second} if first.get(name, 0) != second.get(name, 0))
    if not names:
        return None
    texts = [', '.join(f'{name} {amounts.get(name, 0)}' for name in names) for amounts in (first, second)]
    return texts[0], texts[1]


def audit_stacks(world: AuditIndex) -> Iterator[Finding]:
    """Find malformed stacks, entries without an instance, and unfinished instances that their stack does not have.

    A stack with an apply in flight has only the first.
    """
    for name, stack in world.stacks.items():
        key = keys.stack(name)
        if not isinstance(stack, Stack):
            yield Finding('stack-unreadable', name, f'{key} is malformed: {stack}', keys=(key,))
        elif (orphans := list_orphaned_entries(world, stack)) and not world.get_value(keys.attempt(stack.attempt)):
            listed = join_some(orphans, MAX_QUOTED_INSTANCES)
            sentence = f'{key} has entries whose instances are gone, so the next apply creates new ones: {listed}'
            yield Finding('stack-entry', name, sentence, keys=(key,))
    lost: dict[str, list[str]] = {}
    for instance, by_compute in sorted(world.requests_by_compute.items()):
        requests = [each for each in by_compute.values() if isinstance(each, Request) and not each.is_tombstone]
        if instance in world.records and not world.is_living(instance):
            continue  # request-ended
        for place in {each.stack for each in requests if each.stack}:
            known, key = world.stacks.get(place.name), keys.stack(place.name)
            if isinstance(known, Stack) and world.get_value(keys.attempt(known.attempt)):
                continue
            # Another uuid is not of the stack. A refused apply may leave a key without entries.
            if place.instance == instance and (known is None or (isinstance(known, Stack) and not known.entries)):
                lost.setdefault(place.name, []).append(instance)
                continue
            if not isinstance(known, Stack):
                continue
            entry = known.entries.get(place.entry_name)
            owner = known.make_place(place.entry_name, entry.incarnation).instance if entry else 'no instance'
            if owner != instance:
                sentence = f'it is requested for {place.entry_name} of stack {place.name}, but {key} has {owner} there'
                yield Finding('stack-mismatch', instance, sentence, is_repairable=False, keys=(key,))
    for name, instances in lost.items():
        listed = join_some(instances, MAX_QUOTED_INSTANCES)
        state = 'has no entries' if name in world.stacks else 'does not exist'
        sentence = f'{keys.stack(name)} {state}, but these instances are requested in it: {listed}'
        yield Finding('stack-mismatch', name, sentence, keys=(keys.stack(name),))


def list_orphaned_entries(world: AuditIndex, stack: Stack) -> list[str]:
    """List the entries that have not ended, but whose instances are neither requested, living nor failed."""
    instances = {name: each for name, each in stack.list_instances().items() if not stack.entries[name].is_ended}
    # The next apply reports a failed instance, and replaces it only on request.
    failed = {each for each in instances.values() if each in world.records and world.records[each].state == ERROR}
    return [name for name, each in instances.items() if each not in failed and not _is_requested_or_living(world, each)]
