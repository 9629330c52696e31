"""The audit: where placement, etcd and the computes tell different stories. Pure: planes in, findings out.

What an instance's own state explains is no finding: one that is scheduled, building or destroying, or that an eschedule
is at, is in work. What a compute that is silent or mute has on it is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ecomp.model import keys
from ecomp.model.allocation import Resources, capacity, difference, summed, words
from ecomp.model.audit_sharing import groups, membership, quotas
from ecomp.model.command_names import RESERVED
from ecomp.model.findings import Finding
from ecomp.model.guest import PAUSED, REFUSED_METADATA, UNLIKE, UNPLUGGED
from ecomp.model.host import SILENT
from ecomp.model.order import Invalid, Request
from ecomp.model.planes import Leftover, Planes, World
from ecomp.model.record import ACTIVE, ERROR, Record

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
            yield Finding('hostname-orphaned', keys.last(key), told)
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
    for key, kept in world.attempts().items():
        if not kept.lease:
            said = f'{key} is on no lease: it will stay for ever'
            yield Finding('attempt-unleased', keys.last(key), said, keys=(key,))


def _queues(world: World) -> Iterator[Finding]:
    for key, kept in world.marks().items():
        if not kept.lease:
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
                yield Finding('queued-doubled', instance, said, mendable=mendable, keys=(key,))
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
            if not (record.state == ERROR and kept is not None and kept.lease):
                yield Finding('name-orphaned', name, f'{key} is of instance {instance}: its record says {record.state}')
        elif name not in world.called(instance) and not world.is_in_work(instance):
            said = 'which is called otherwise' if record or wishes else 'no request and no record speaks of it'
            yield Finding('name-orphaned', name, f'{key} is of instance {instance}: {said}')


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
        yield Finding('name-missing', record.instance, told, mendable=kept is None or mine)


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
            yield Finding('request-misplaced', instance, told, compute, keys=(*_requests(world, instance), theirs))
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


def _requests(world: World, instance: str) -> list[str]:
    return [keys.request(compute, instance) for compute in sorted(world.wishes.get(instance, {}))]


def _doubled(world: World, instance: str) -> Finding:
    told = f'it is requested of computes {", ".join(sorted(world.wishes[instance]))}'
    return Finding('request-doubled', instance, told, keys=tuple(_requests(world, instance)))


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
        yield Finding('request-ended', instance, f'{said}, and it is requested of compute {compute}', compute)
    kept = world.kept(world.record_key(instance))
    if kept is not None and not kept.lease:
        yield Finding('record-unleased', instance, f'{said}, and is on no lease: it will stay for ever')
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
        yield Finding('booted-orphaned', instance, f'{said}, and /booted has the address {address}')
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
