"""The audit: where placement, etcd and the computes tell different stories. Pure: planes in, findings out.

What an instance's own state explains is no finding: one that is scheduled, building or destroying, or that an eschedule
is at, is in work. What a compute that is silent or mute has on it is not compared.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import Resources, capacity, difference, summed, words
from ecomp.model.command_names import RESERVED
from ecomp.model.group import Group
from ecomp.model.guest import PAUSED, REFUSED_METADATA, UNLIKE, UNPLUGGED
from ecomp.model.host import QUOTED, SILENT
from ecomp.model.order import Invalid, Request
from ecomp.model.planes import Leftover, Planes, World
from ecomp.model.quota import Quota, counted
from ecomp.model.record import ACTIVE, ERROR, Record
from ecomp.model.text import some

FOUND = 8
"""The exit code of an audit or a doctor that found something."""


class Repair(Enum):
    """What `audit --fix` does about a finding, in words; ecomp.scheduler.operating.audit carries it out."""

    RELEASE = 'releases it'
    CLAIM = 'claims it again, as it was requested'
    DELETE = 'deletes it'
    DELETE_REQUEST = 'deletes the request'
    UNQUEUE = 'takes it out of the queue'
    PUT_ON_LEASE = 'puts it on a lease'
    RESTORE_NAME = 'gives it back'
    JOIN_GROUP = 'puts it in, where it is'
    LEAVE_GROUP = 'takes it out'
    RECOUNT = 'counts anew'
    CLEAR = 'has its compute remove it'


class Code(NamedTuple):
    """What an audit can find: every code, what it means, and what mends it.

    The codes are stable: scripts may ask for them. An instance is named by its uuid, a compute by its provider's, a
    name by itself.
    """

    meaning: str
    repair: Repair | None = None
    how: str = ''
    """How a person mends it otherwise. Of a finding `<key>` is its key, or each of those of which one is wrong."""

    @property
    def fix(self) -> str:
        """What `audit --fix` does about it, '' for nothing."""
        return self.repair.value if self.repair else ''


WRONG_KEY = 'delete the wrong one: etcdctl del <key>'
UNREADABLE = 'if no newer ecomp wrote it, delete the key: etcdctl del <key>'
UNREADABLE_REQUEST = 'eschedule destroy <instance>; of what is no uuid: etcdctl del <key>'

CODES = {
    # placement
    'provider-missing': Code(
        'a living compute is no provider', how='its ecompute registers it within a minute, else see its log'
    ),
    'inventory-missing': Code(
        'a living compute has no inventory', how='its ecompute sets it within a minute, else see its log'
    ),
    'capacity-exceeded': Code(
        'more of a class is used than there is', how='destroy some of its instances, or raise `inventory:` there'
    ),
    'allocation-orphaned': Code('an allocation nobody stands behind', Repair.RELEASE),
    'allocation-missing': Code('an instance lives and holds nothing', Repair.CLAIM),
    'allocation-differs': Code(
        'an instance holds other than was requested', how='destroy it, or correct it: PUT /allocations/<instance>'
    ),
    'allocation-doubled': Code(
        'an instance holds on two computes', how='correct it with its generation: PUT /allocations/<instance>'
    ),
    # etcd
    'request-doubled': Code('an instance is requested of two computes', how=WRONG_KEY),
    'request-misplaced': Code('an instance is requested of one compute and recorded by another', how=WRONG_KEY),
    'request-missing': Code('an instance lives without a request', how='eschedule destroy <instance> removes it whole'),
    'request-ended': Code('a request of an instance that has ended', Repair.DELETE_REQUEST),
    'request-unreadable': Code('a request that cannot be understood', how=UNREADABLE_REQUEST),
    'queued-unreadable': Code('a waiting request that cannot be understood', how=UNREADABLE_REQUEST),
    'queued-flavorless': Code(
        'a request waits for a flavor that is not there',
        how='eschedule flavor set it again, or eschedule destroy <instance>',
    ),
    'queued-doubled': Code('a request waits that was delivered already', Repair.UNQUEUE, WRONG_KEY),
    'taker-unleased': Code('a compute is taking a request for ever', how='if it is not: etcdctl del <key>'),
    'record-missing': Code('an instance runs and has no record', how='restart its ecompute, which writes it again'),
    'record-doubled': Code('another compute has a record of it, too', how=WRONG_KEY),
    'record-unreadable': Code('a record that cannot be understood', how='etcdctl del <key>, and restart its ecompute'),
    'record-unleased': Code('the record of what has ended will stay for ever', Repair.PUT_ON_LEASE),
    'record-leased': Code(
        'the record of what lives will vanish',
        how='put it again without a lease: etcdctl get --print-value-only <key> | etcdctl put <key>',
    ),
    'booted-orphaned': Code('an address of no living instance', Repair.DELETE),
    'booted-differs': Code(
        'an address other than the recorded one', how='put the right one: etcdctl put <key> ADDRESS'
    ),
    'name-orphaned': Code('a name of no living instance', Repair.DELETE, how=UNREADABLE),
    'name-missing': Code(
        'a living instance does not have its name',
        Repair.RESTORE_NAME,
        how='another one has it: destroy one of the two, or let both be and say the uuid of this one',
    ),
    'name-reserved': Code('a living instance has the name of a command', how='give its uuid in place of its name'),
    'group-unreadable': Code('a group that cannot be understood', how=UNREADABLE),
    'group-broken': Code('the rule of a strict group does not hold', how='destroy what is not to be there'),
    'group-orphaned': Code('a member of a group that is no living instance', Repair.LEAVE_GROUP),
    'group-missing': Code('a living instance is not in its group', Repair.JOIN_GROUP),
    'quota-unreadable': Code('a quota that cannot be understood', how=UNREADABLE),
    'quota-differs': Code('a quota counts other than is requested', Repair.RECOUNT),
    'usage-differs': Code(
        "a quota counts other than placement does for its project", how='whose claim it is: openstack allocation show'
    ),
    'attempt-unleased': Code('somebody is at a request for ever', how='if nobody is: etcdctl del <key>'),
    'hostname-orphaned': Code('the host name of a compute that is not there', Repair.DELETE),
    'presence-unleased': Code('a compute says it is alive, and on no lease', how='etcdctl del <key>'),
    # computes
    'compute-silent': Code(
        'a silent compute holds claims, or may run what waits in a queue, and was not compared',
        how='bring it back (after a restore of etcd: ecompute --accept-new-etcd there); of a machine that is off for '
        'good: eschedule host forget <host> --fenced',
    ),
    'compute-mute': Code('a living compute gives no digest', how="see its ecompute's log; restart it"),
    'domain-missing': Code('an instance lives and has no domain', how='eschedule destroy <instance>'),
    'domain-off': Code('an active instance is off', how="see its ecompute's log: it has not noticed"),
    'domain-running': Code(
        'an instance runs that is recorded as off or ended', how="see its ecompute's log; virsh destroy ends it"
    ),
    'domain-differs': Code('a domain is not as its record and claim say', how='undo with virsh what its fault says'),
    'domain-undefined': Code(
        'a running domain that will vanish', how='virsh dumpxml <instance> into a file, then virsh define it'
    ),
    'domain-orphaned': Code(
        'a domain nobody asks for',
        how='after a restore of etcd: ecompute --accept-new-etcd on its host; else virsh destroy, virsh undefine; its '
        'disk is then found by the next audit',
    ),
    'domain-misplaced': Code(
        'a domain with the mark of another compute', how='stop one: virsh destroy, virsh undefine on that host'
    ),
    'domain-doubled': Code(
        'an instance has domains on two computes', how='end the wrong one: virsh destroy, virsh undefine on its host'
    ),
    'disk-missing': Code('an instance has no disk', how='eschedule destroy <instance>'),
    'base-missing': Code(
        'a disk lies on a base volume that is gone', how='put the same image file back, or eschedule destroy <instance>'
    ),
    'disk-orphaned': Code('a disk nobody asks for', Repair.CLEAR, how='look, and remove it by hand'),
    'seed-orphaned': Code('metadata of no instance', Repair.CLEAR),
    'iso-orphaned': Code('a NoCloud disk of no instance', Repair.CLEAR),
    'reservation-orphaned': Code('an address reserved for no instance', Repair.CLEAR),
    'reservation-missing': Code(
        'the address of a living instance is not reserved', how='restart its ecompute, which reserves it again'
    ),
    'reservation-differs': Code(
        'another address is reserved for a living instance than its record says',
        how='virsh net-update <network> delete ip-dhcp-host, then restart its ecompute',
    ),
    'metadata-refused': Code('a guest gets no metadata', how='correct what its fault says, and reboot the guest'),
    'part-orphaned': Code('a file left half written', Repair.CLEAR),
    'base-differs': Code(
        'a base volume is not what was fetched',
        how='eschedule destroy the instances on it, which its ecompute named; the next of that image fetches it again',
    ),
    'dhcp-open': Code(
        'a guest can take every address of a network',
        how="virsh net-edit it: <network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'>, and before "
        "</network> <dnsmasq:options><dnsmasq:option value='dhcp-ignore=tag:!known'/></dnsmasq:options>; then virsh "
        'net-destroy and net-start it, which cuts its guests off for the second until its ecompute plugs them in again',
    ),
}


class Finding(NamedTuple):
    """One disagreement about `subject`, an instance, a compute or a name; `sentence` says which plane says what.

    `compute` is the compute it is on, '' for none; `leftover` is what --fix has that compute remove, None for nothing.
    `mendable` False means that --fix leaves this one, whatever its code says. `keys` are those of etcd that a person
    chooses from; where --fix repairs it, the first is what it changes, if all of them are as they were found.
    """

    code: str
    subject: str
    sentence: str
    compute: str = ''
    leftover: Leftover | None = None
    mendable: bool = True
    keys: tuple[str, ...] = ()

    @property
    def repair(self) -> Repair | None:
        """What `audit --fix` does about it, None for nothing."""
        return CODES[self.code].repair if self.mendable else None

    @property
    def fix(self) -> str:
        """The repair in words, '' for none."""
        return self.repair.value if self.repair else ''

    @property
    def how(self) -> str:
        """How a person mends it, '' where `audit --fix` does."""
        how = '' if self.fix else CODES[self.code].how
        return how.replace('<key>', ' or '.join(map(shlex.quote, self.keys))) if self.keys else how

    def to_dict(self) -> dict[str, Any]:
        """The finding as users see it in JSON."""
        return {name: getattr(self, name) for name in ('code', 'subject', 'compute', 'sentence', 'fix', 'how')}


Revisions = Mapping[str, Mapping[str, int]]
"""{subject: {key about it: etcd's revision}}."""


def confirmed(first: Iterable[Finding], second: Iterable[Finding], revisions: Sequence[Revisions]) -> list[Finding]:
    """The findings that both looks have, word for word, and about whose subject no key changed in any of `revisions`.

    What is in work changes keys: what two planes say of it at different moments is no disagreement.
    """
    again = set(second)
    return [
        each
        for each in first
        if each in again and all(at.get(each.subject) == revisions[0].get(each.subject) for at in revisions)
    ]


TROUBLES = {**dict.fromkeys((PAUSED, UNLIKE, UNPLUGGED), 'domain-differs'), REFUSED_METADATA: 'metadata-refused'}
"""The code of what a compute has found itself of a living guest, and says in its record's fault."""


def audit(planes: Planes) -> list[Finding]:
    """Every disagreement between the planes, those about computes first."""
    world = World(planes)
    found = [*_computes(world), *_attempts(world), *_queues(world), *_names(world), *groups(world), *quotas(world)]
    for instance in world.instances():
        if instance not in world.at_it:
            found += _instance(world, instance)
    for compute, digest in planes.digests.items():
        found += (
            Finding('part-orphaned', compute, f'{name} is on compute {compute}, and nobody is writing it', compute,
                    Leftover('part', name, mark))
            for name, mark in digest.parts.items()
        )  # fmt: skip
        for name in digest.bad_bases:
            said = f'base volume {name} on compute {compute} is not what it was when it was fetched'
            found.append(Finding('base-differs', compute, said))
        for name in digest.open_dhcp:
            said = f'the DHCP of network {name} on compute {compute} gives an address to whatever MAC asks'
            found.append(Finding('dhcp-open', compute, said))
    return found


def _computes(world: World) -> Iterator[Finding]:
    known = {*world.alive, *world.planes.providers, *world.away()}
    for key, kept in world.planes.etcd.items():
        if key.startswith(keys.COMPUTES) and not kept.lease:
            compute = keys.last(key)
            yield Finding('presence-unleased', compute, f'{key} is on no lease: nobody is alive by it', keys=(key,))
        if key.startswith(keys.HOSTNAMES) and keys.last(key) not in known:
            told = f'{key} is the name of a compute that neither placement nor a request or a living record speaks of'
            presence = keys.compute(keys.last(key))
            yield Finding('hostname-orphaned', keys.last(key), told, keys=(key, presence))
    for compute in sorted(world.alive):
        provider = world.planes.providers.get(compute)
        if provider is None:
            yield Finding('provider-missing', compute, f'etcd says compute {compute} lives, placement does not know it')
        elif not provider.inventory:
            yield Finding('inventory-missing', compute, f'compute {compute} lives, placement has no inventory of it')
        if compute in world.planes.mute:
            why = world.planes.mute[compute]
            yield Finding('compute-mute', compute, f'etcd says compute {compute} lives, it gives no digest: {why}')
    for compute, state in world.away().items():
        held = world.planes.providers[compute].held if compute in world.planes.providers else {}
        if state == SILENT and (held or world.queued):
            why = f'holds {len(held)} claim' + 's' * (len(held) > 1) if held else 'requests wait that it may run'
            told = f'compute {compute} is silent, and {why}: what it has was not compared'
            yield Finding('compute-silent', compute, told, compute)
    for compute in sorted(world.computes & world.planes.providers.keys()):
        provider = world.planes.providers[compute]
        for name, amount in sorted(summed(provider.held.values()).items()):
            each = provider.inventory.get(name, {})
            # Not less `reserved`: a compute that was stopped has all its VCPU reserved, and its guests go on.
            there = capacity(each.get('total', 0), each.get('allocation_ratio', 1.0))
            if amount > there:
                yield Finding('capacity-exceeded', compute, f'{name}:{amount} is held of it, and it has {there}')


def _attempts(world: World) -> Iterator[Finding]:
    for key, kept in world.under(keys.ATTEMPTS).items():
        if not kept.lease:
            said = f'{key} is on no lease: it will stay for ever'
            yield Finding('attempt-unleased', keys.last(key), said, keys=(key,))


def _queues(world: World) -> Iterator[Finding]:
    for key, kept in world.under(keys.QUEUES).items():
        if key.endswith(keys.TAKER) and not kept.lease:
            said = f'{key} is on no lease: nobody else ever takes it'
            yield Finding('taker-unleased', keys.in_queue(key), said, keys=(key,))
    for instance, queues in sorted(world.queued.items()):
        wishes, record = sorted(world.wishes.get(instance, {})), world.records.get(instance)
        others = [f'it is requested of compute {", ".join(wishes)}'] if wishes else []
        others += [f'its record says {record.state}'] if record else []
        for flavor, waiting in sorted(queues.items()):
            key = keys.queue(flavor, instance)
            if isinstance(waiting, Invalid):
                said = f'{key} cannot be understood, and nobody takes it: {waiting.reason}'
                yield Finding('queued-unreadable', instance, said, keys=(key,))
            elif others or len(queues) > 1:
                also = [f'it waits for {", ".join(sorted(queues))}'] if len(queues) > 1 else []
                said = f'{key} says that it waits, and {"; ".join([*others, *also])}'
                mendable = bool(others) and len(queues) == 1
                rests = world.keys_of(instance) if mendable else ()
                yield Finding('queued-doubled', instance, said, mendable=mendable, keys=(key, *rests))
            elif world.kept(keys.flavor(flavor)) is None:
                said = f'it waits for flavor {flavor}, which is not there: nobody takes it'
                yield Finding('queued-flavorless', instance, said)


def _names(world: World) -> Iterator[Finding]:
    for name, instance in world.names.items():
        key = keys.name(name)
        if instance is None:
            yield Finding('name-orphaned', name, f'{key} cannot be understood', mendable=False, keys=(key,))
            continue
        wishes, record = world.wishes.get(instance, {}).values(), world.records.get(instance)
        waits = world.queued.get(instance, {}).values()
        if instance in world.unreadable or any(isinstance(each, Invalid) for each in (*wishes, *waits)):
            continue  # what it is called is not known
        kept = world.kept(key)
        if record is not None and not world.is_living(instance):
            # By its name one that failed is found as long as its record is there.
            if record.state == ERROR and kept is not None and kept.lease:
                continue
            said = f'its record says {record.state}'
        elif name not in world.called(instance) and not world.is_in_work(instance):
            said = 'which is called otherwise' if record or wishes else 'no request and no record speaks of it'
        else:
            continue
        told = f'{key} is of instance {instance}: {said}'
        yield Finding('name-orphaned', name, told, keys=(key, *world.keys_of(instance)))


def _called(world: World, record: Record) -> Iterator[Finding]:
    for name in sorted(world.called(record.instance)):
        if name in RESERVED:
            yield Finding('name-reserved', record.instance, f'it is called {name}, which is reserved for a command')
        kept, whose = world.kept(keys.name(name)), world.names.get(name)
        mine = whose == record.instance
        if kept is None:
            said = 'is not there'
        elif not mine:
            said = f'is of instance {whose}'
        elif kept.lease:
            said = 'is on a lease: it will vanish'
        else:
            continue
        told = f'it is called {name}, and {keys.name(name)} {said}'
        rests = world.keys_of(record.instance)
        yield Finding('name-missing', record.instance, told, mendable=kept is None or mine, keys=rests)


def _instance(world: World, instance: str) -> Iterator[Finding]:
    if instance in world.unreadable:
        key = world.record_key(instance)
        said = f'{key} cannot be understood: {world.unreadable[instance]}'
        yield Finding('record-unreadable', instance, said, keys=(key,))
        return
    for compute, wish in world.wishes.get(instance, {}).items():
        if isinstance(wish, Invalid):
            key = keys.request(compute, instance)
            key = key if world.kept(key) else keys.HOSTS + compute  # of one without a second part
            said = f'{key} cannot be understood: {wish.reason}'
            yield Finding('request-unreadable', instance, said, compute, keys=(key,))
            return
    record = world.records.get(instance)
    for compute, state in sorted(world.contradicting.get(instance, {}).items()):
        said = f'compute {compute} has a record that says {state}'
        own = keys.record(compute, instance)
        theirs = own if world.kept(own) else keys.old_record(instance)
        if record is not None:
            told = f'its record says {record.state} on compute {record.compute}, and {said}'
            yield Finding('record-doubled', instance, told, compute, keys=(world.record_key(instance), theirs))
        else:
            told = f'{said}, and it is requested of compute {", ".join(sorted(world.wishes.get(instance, {})))}'
            yield Finding('request-misplaced', instance, told, compute, keys=(*world.request_keys(instance), theirs))
    if record is not None and world.is_living(instance):
        yield from _living(world, record)
        home = {record.compute}
    elif record is not None:
        yield from _ended(world, record)
        home = set()
    else:
        yield from _unrecorded(world, instance)
        home = set(world.wishes.get(instance, {}))
    yield from _elsewhere(world, instance, home | world.contradicting.get(instance, {}).keys())


def _doubled(world: World, instance: str) -> Finding:
    told = f'it is requested of computes {", ".join(sorted(world.wishes[instance]))}'
    return Finding('request-doubled', instance, told, keys=world.request_keys(instance))


def _living(world: World, record: Record) -> Iterator[Finding]:
    instance, compute = record.instance, record.compute
    said = f'its record says {record.state} on compute {compute}'
    kept = world.kept(world.record_key(instance))
    if kept is not None and kept.lease:
        told = f'{said}, and is on a lease: it will vanish'
        yield Finding('record-leased', instance, told, keys=(world.record_key(instance),))
    wishes = world.wishes.get(instance, {})
    if not wishes:
        yield Finding('request-missing', instance, f'{said}, and no compute is asked for it', compute)
    elif len(wishes) > 1:
        yield _doubled(world, instance)
    if world.is_in_work(instance):
        return
    yield from _claim(world, record, said)
    booted = world.kept(keys.booted(instance))
    told = booted.value.decode(errors='replace') if booted else 'nothing'
    if told != (record.address or 'nothing'):
        told = f'/booted says {told}, its record {record.address or "nothing"}'
        yield Finding('booted-differs', instance, told, keys=(keys.booted(instance),))
    yield from _called(world, record)
    yield from membership(world, instance)
    yield from _guest(world, record, said)
    for code in dict.fromkeys(code for trouble, code in TROUBLES.items() if trouble in (record.fault or '')):
        yield Finding(code, instance, f'{said}, and {record.fault}', compute)


def _claim(world: World, record: Record, said: str) -> Iterator[Finding]:
    instance = record.instance
    held = world.held.get(instance, {})
    on = sorted(world.computes & held.keys())
    wish = world.wishes.get(instance, {}).get(record.compute)
    if not held:
        yield Finding('allocation-missing', instance, f'{said}, placement holds nothing for it', record.compute)
    elif len(on) > 1:
        yield Finding('allocation-doubled', instance, f'{said}, placement holds for it on {" and on ".join(on)}')
    elif isinstance(wish, Request) and (differs := difference(wish.allocations, held)):
        yield Finding('allocation-differs', instance, differs, record.compute)


def _guest(world: World, record: Record, said: str) -> Iterator[Finding]:
    """Disagreements between a living instance's record and what its own compute has of it."""
    instance, compute = record.instance, record.compute
    digest = world.planes.digests.get(compute)
    if digest is None:
        return
    guest = digest.guests.get(instance)
    if guest is None or not (guest.defined or guest.running):
        without = 'neither its domain nor its disk is there' if guest is None else 'its domain is not there'
        yield Finding('domain-missing', instance, f'{said}, and {without}', compute)
        return
    if guest.compute != compute:
        return  # told by _elsewhere
    if not guest.disk:
        yield Finding('disk-missing', instance, f'{said}, and its domain is there without its disk', compute)
    elif instance in digest.without_base:
        path = digest.without_base[instance]
        yield Finding('base-missing', instance, f'{said}, and its disk lies on {path}, which is not there', compute)
    switching = world.is_switching(instance)
    if not guest.defined:
        yield Finding('domain-undefined', instance, f'{said}, and its domain runs and is not defined', compute)
    elif record.state == ACTIVE and not guest.running and not switching:
        yield Finding('domain-off', instance, f'{said}, and its domain is off', compute)
    if record.state != ACTIVE and guest.running and not switching:
        yield Finding('domain-running', instance, f'{said}, and its domain runs', compute)
    yield from _reserved(world, record)


def _reserved(world: World, record: Record) -> Iterator[Finding]:
    """Addresses that its record expects and that its compute's networks do not reserve."""
    instance, compute = record.instance, record.compute
    there = world.reserved.get(instance, {}).get(compute, {})
    for each in record.addresses:
        address = there.get(each.mac)
        if each.expected is None or address == each.expected:
            continue
        code = 'reservation-missing' if address is None else 'reservation-differs'
        held = 'nothing reserved' if address is None else f'{address} reserved'
        said = f'its record says that {each.network} keeps {each.expected} for it, compute {compute} has {held}'
        yield Finding(code, instance, said, compute)


def _ended(world: World, record: Record) -> Iterator[Finding]:
    instance = record.instance
    said = f'its record says {record.state}'
    for compute in world.wishes.get(instance, {}):
        told = f'{said}, and it is requested of compute {compute}'
        rests = (keys.request(compute, instance), *world.keys_of(instance))
        yield Finding('request-ended', instance, told, compute, keys=rests)
    kept = world.kept(world.record_key(instance))
    if kept is not None and not kept.lease:
        told = f'{said}, and is on no lease: it will stay for ever'
        yield Finding('record-unleased', instance, told, keys=world.keys_of(instance))
    yield from _traces(world, instance, said)


def _unrecorded(world: World, instance: str) -> Iterator[Finding]:
    wishes = world.wishes.get(instance, {})
    if len(wishes) > 1:
        yield _doubled(world, instance)
    if not wishes:
        yield from _traces(world, instance, 'no request and no record speaks of it')
    elif not world.is_in_work(instance):
        for compute, guest in _domains(world, instance).items():
            if compute in wishes:
                does = 'runs' if guest else 'is defined'
                said = f'it is requested of compute {compute}, its domain {does} there, and it has no record'
                yield Finding('record-missing', instance, said, compute)


def _traces(world: World, instance: str, said: str) -> Iterator[Finding]:
    """The address and the claim left of an instance that has ended, or that no key names."""
    booted = world.kept(keys.booted(instance))
    if booted is not None:
        address = booted.value.decode(errors='replace')
        told = f'{said}, and /booted has the address {address}'
        yield Finding('booted-orphaned', instance, told, keys=(keys.booted(instance), *world.keys_of(instance)))
    held = {name: each for name, each in world.held.get(instance, {}).items() if name in world.computes}
    # A guest stands behind its claim, and a compute that says nothing may have it.
    unheard = held.keys() - world.planes.digests.keys()
    if held and not unheard and instance not in world.guests and not world.wishes.get(instance):
        yield Finding('allocation-orphaned', instance, f'placement holds {_words(held)}; {said}')


def _elsewhere(world: World, instance: str, home: set[str]) -> Iterator[Finding]:
    """What computes other than those in `home` have of the instance."""
    record = world.records.get(instance)
    if record is None:
        said = f'it is requested of compute {", ".join(sorted(home))}' if home else 'nothing asks for it'
    else:
        said = f'its record says {record.state}' + (f' on compute {record.compute}' if home else '')
    domains = _domains(world, instance)
    if len(domains) > 1:
        yield Finding('domain-doubled', instance, f'its domain is on computes {" and ".join(sorted(domains))}; {said}')
    for compute, guest in sorted(world.guests.get(instance, {}).items()):
        if guest.compute not in (None, compute):
            # Two computes on one libvirt see each other's domains.
            if guest.compute not in world.guests[instance]:
                marked = f'its domain is on compute {compute} and has the mark of compute {guest.compute}'
                yield Finding('domain-misplaced', instance, f'{marked}; {said}', compute)
        elif compute in home:
            continue
        elif compute not in domains:
            disk = f'its disk is on compute {compute}; {said}'
            # What may be the only copy of what lives elsewhere is nothing to remove by rule.
            yield Finding('disk-orphaned', instance, disk, compute, Leftover('disk', instance), mendable=not home)
        elif len(domains) == 1:
            code = 'domain-running' if guest.running and record is not None and not home else 'domain-orphaned'
            does = 'runs' if guest.running else 'is defined'
            yield Finding(code, instance, f'its domain {does} on compute {compute}; {said}', compute)
    for compute in sorted(world.seeds.get(instance, ())):
        # Where its disk is, that is found, and goes with the other.
        if compute not in home and compute not in world.guests.get(instance, {}):
            iso = f'its NoCloud disk is on compute {compute}; {said}'
            yield Finding('iso-orphaned', instance, iso, compute, Leftover('iso', instance))
    for compute, reserved in sorted(world.reserved.get(instance, {}).items()):
        if compute not in home and compute not in domains:
            kept = f'compute {compute} keeps {", ".join(sorted(reserved.values()))} for it; {said}'
            yield Finding('reservation-orphaned', instance, kept, compute, Leftover('reservations', instance))
    for compute, macs in sorted(world.metadata.get(instance, {}).items()):
        if compute not in home and compute not in domains:
            for mac in sorted(macs):
                kept = f'compute {compute} has metadata of {mac} for it; {said}'
                yield Finding('seed-orphaned', instance, kept, compute, Leftover('seed', mac, instance))


def _domains(world: World, instance: str) -> Mapping[str, bool]:
    """{compute: whether it runs} of the computes with a domain of this instance that has their own mark."""
    return {
        compute: guest.running
        for compute, guest in world.guests.get(instance, {}).items()
        if (guest.defined or guest.running) and guest.compute == compute
    }


def _words(held: Mapping[str, Resources]) -> str:
    return ' and '.join(f'{words(resources)} on {provider}' for provider, resources in sorted(held.items()))


def groups(world: World) -> Iterator[Finding]:
    """Groups whose key cannot be read, whose rule is broken, or that have members that are no living instances."""
    for name, found in world.groups.items():
        if not isinstance(found, Group):
            key = keys.group(name)
            yield Finding('group-unreadable', name, f'{key} cannot be understood: {found}', keys=(key,))
            continue
        for line in found.broken():
            yield Finding('group-broken', name, f'it is {found.rule}, and {line}')
        gone = [each for each in sorted(found.members) if not _is_there(world, each)]
        if gone:
            told = f'{keys.group(name)} has members that neither a request nor a living record speaks of'
            yield Finding('group-orphaned', name, f'{told}: {some(gone, QUOTED)}', keys=(keys.group(name),))


def _is_there(world: World, instance: str) -> bool:
    asked = instance in world.at_it or instance in world.unreadable or bool(world.wishes.get(instance))
    return asked or world.is_living(instance)


def membership(world: World, instance: str) -> Iterator[Finding]:
    """Requests of a living instance whose group does not have it on their compute."""
    for compute, wish in world.wishes.get(instance, {}).items():
        if not isinstance(wish, Request) or wish.is_tombstone or wish.group is None:
            continue
        found = world.groups.get(wish.group.name)
        if found is None:
            said = 'is not there'
        elif not isinstance(found, Group) or found.members.get(instance) == compute:
            continue
        else:
            on = found.members.get(instance)
            said = f'has it on compute {on}' if on else 'does not have it'
        name = wish.group.name
        told = f'it is in group {name} on compute {compute}, and {keys.group(name)} {said}'
        yield Finding('group-missing', instance, told, compute, keys=world.keys_of(instance))


def quotas(world: World) -> Iterator[Finding]:
    """Quotas that cannot be read, or that count other than the project's requests, or than placement, do."""
    for project, found in world.quotas.items():
        if not isinstance(found, Quota):
            key = keys.quota(project)
            yield Finding('quota-unreadable', project, f'{key} cannot be understood: {found}', keys=(key,))
            continue
        requested = _requested(world, project)
        differs = _differs(found.used, requested)
        if differs:
            told = f'{keys.quota(project)} counts {differs[0]}, its requests {differs[1]}'
            yield Finding('quota-differs', project, told)
            continue
        claimed = world.planes.usages.get(project)
        # Who is at it claims first and delivers then; what a compute is at has its claim, or soon none.
        in_work = world.at_it or any(map(world.is_in_work, world.wishes))
        differs = None if claimed is None or in_work else _differs(found.used, claimed)
        if differs:
            told = f'{keys.quota(project)} counts {differs[0]}, placement {differs[1]}'
            yield Finding('usage-differs', project, told)


def _requested(world: World, project: str) -> dict[str, int]:
    waits = (waiting for places in world.queued.values() for waiting in places.values())
    wishes = (wish for asked in world.wishes.values() for wish in asked.values())
    return counted(project, (*waits, *wishes), world.records.get)


def _differs(one: Mapping[str, int], other: Mapping[str, int]) -> tuple[str, str] | None:
    """The amounts that differ, in words, of the one and of the other; None if none does."""
    names = sorted(name for name in {*one, *other} if one.get(name, 0) != other.get(name, 0))
    if not names:
        return None
    words = [', '.join(f'{name} {each.get(name, 0)}' for name in names) for each in (one, other)]
    return words[0], words[1]
