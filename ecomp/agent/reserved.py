"""At the start: what is reserved in DHCP for the instances here is as their records say."""

from __future__ import annotations

import logging

from ecomp.agent.memory import Memory
from ecomp.errors import BuildFailed
from ecomp.model.guest import Reserved
from ecomp.model.record import ACTIVE, STOPPED
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


def reserve_again(hypervisor: Hypervisor, memory: Memory) -> None:
    """Reserve what was removed by hand, or with a network that was defined anew. Errors: those of the hypervisor."""
    there = hypervisor.reservations()
    for instance, remembered in memory.all().items():
        if remembered.record.state not in (ACTIVE, STOPPED):
            continue  # its build, or its destroy, sees to it
        for each in remembered.record.addresses:
            if each.expected is None or there.get(each.mac) == Reserved(instance, each.expected):
                continue
            try:
                got = hypervisor.reserve(instance, each.mac, each.network, each.expected)
            except BuildFailed as error:
                log.warning('instance %s: %s cannot be reserved again: %s', instance, each.expected, error.reason)
            else:
                log.warning('instance %s: %s was not reserved on %s, %s is', instance, each.expected, each.network, got)
