"""At the start: what ended here is remembered as ended, and what is reserved in DHCP is as the records say."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ecomp.agent.host.memory import Memory
from ecomp.errors import BuildFailed
from ecomp.model import keys
from ecomp.model.guest import ReservedAddress
from ecomp.model.record import ACTIVE, BUILDING, ERROR, GONE, STOPPED, from_json
from ecomp.store.client import Entry, Store
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def note_ends(compute: str, store: Store, memory: Memory, here: Collection[str]) -> None:
    """Remember as ended what nobody asks for, of which nothing is `here` and whose record says no other.

    An end's last transaction comes before the state directory: killed in between, or with a full disk, the directory
    says that it lives. Believed, its address would be reserved again at every start, and nobody could mend it.
    Only with the etcd that we know. Errors: those of etcd.
    """
    asked = {keys.last(key) for key in store.snapshot(keys.request_prefix(compute), keys_only=True).entries}
    remembered = memory.all()
    for instance in remembered.keys() - asked - set(here):
        # Read after the requests were: its end takes both in one transaction, so what lives has one of them.
        places = keys.record(compute, instance), keys.old_record(instance)
        there, known = store.read(places).values(), remembered[instance]
        if not there and known.record.state == BUILDING and known.failure is None:
            continue  # begun, and killed before its record said so: the planner takes back what is reserved for it
        if all(_has_ended(compute, each) for each in there):
            memory.ended(instance)
            log.info('instance %s had ended, and this compute had not written that down', instance)


def reserve_again(hypervisor: Hypervisor, memory: Memory) -> None:
    """Reserve what was removed by hand, or with a network that was defined anew. Errors: those of the hypervisor."""
    there = hypervisor.reservations()
    for instance, remembered in memory.all().items():
        if remembered.record.state not in (ACTIVE, STOPPED):
            continue  # its build, or its destroy, sees to it
        for each in remembered.record.addresses:
            if each.expected is None or there.get(each.mac) == ReservedAddress(instance, each.expected):
                continue
            try:
                got = hypervisor.reserve(instance, each.mac, each.network, each.expected)
            except BuildFailed as error:
                log.warning('instance %s: %s cannot be reserved again: %s', instance, each.expected, error.reason)
            else:
                log.warning('instance %s: %s was not reserved on %s, %s is', instance, each.expected, each.network, got)


def _has_ended(compute: str, entry: Entry) -> bool:
    try:
        record = from_json(entry.value)
    except ValueError:
        return False  # a newer ecomp's, perhaps
    return record.state in (GONE, ERROR) or record.compute != compute
