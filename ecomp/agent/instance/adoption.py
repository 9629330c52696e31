"""A guest that is there: what its record says of it, and how one that nobody wrote down as active is taken over."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from ecomp.agent.host.memory import Memory
from ecomp.agent.instance.power import Switch
from ecomp.agent.instance.records import Records
from ecomp.agent.instance.surroundings import ControlPlane, Shape
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.allocation import difference
from ecomp.model.boots import CREATED
from ecomp.model.guest import Guest, GuestSpec
from ecomp.model.instance import Request
from ecomp.model.record import ACTIVE, BUILDING, Interface, Record
from ecomp.placement import allocations
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)


class Adoption:
    """Takes over the guests of one compute. One thread an instance."""

    def __init__(
        self,
        control: ControlPlane,
        hypervisor: Hypervisor,
        shape: Shape,
        records: Records,
        switch: Switch,
        memory: Memory,
    ) -> None:
        self._control = control
        self._hypervisor = hypervisor
        self._shape = shape
        self._records = records
        self._switch = switch
        self._memory = memory

    def adopt(self, record: Record, revision: int, request: Request, guest: Guest, lost: bool, starts: bool) -> None:
        """Write down a guest that is there already; what placement says otherwise is its fault, in words.

        `lost`: its record was. `starts`: if it is off it is still to be started.
        """
        remembered = self._memory.all().get(record.instance)
        if lost and request.power is not None:
            # What was asked of its power may have been done long ago: only our own memory can say that it was not.
            record = replace(record, power=remembered.record.power if remembered else request.power.id)
        held = allocations.consumer(self._control.placement, request.instance)
        differs = difference(request.allocations, held.allocations)
        spec = self._shape.spec(self._control.compute, request)
        if not record.addresses:
            plain = tuple(Interface(name, mac) for mac, (_, name) in zip(spec.macs, spec.networks, strict=True))
            record = replace(record, addresses=plain)
            with suppress(BuildFailed):  # it has whatever address it has
                record = self.reserve(record, spec)
        record = replace(record, fault='its record was lost' if lost else record.fault)
        starts = starts and not (guest.running or differs)
        failed = self._switch.start_built(record.at(BUILDING, self._control.now()), revision) if starts else None
        faults = failed, record.fault, differs
        record = replace(self.up(record), fault='; '.join(filter(None, faults)) or None)
        is_off = not guest.running and (not starts or failed)
        # One that ran when it was last written down is seen to be off, or started after a reboot, by the next plan.
        if is_off and not (remembered is not None and remembered.record.state == ACTIVE):
            record = record.off(self._control.now())
        self._records.write(record, revision)
        self._memory.remember(request, record)
        log.info('instance %s is %s%s', record.instance, record.state, f': {record.fault}' if record.fault else '')

    def reserve(self, record: Record, spec: GuestSpec) -> Record:
        """Reserve the guest's addresses where libvirt gives them out; the record with what is expected."""
        interfaces = []
        for mac, (kind, name) in zip(spec.macs, spec.networks, strict=True):
            reserved = self._hypervisor.reserve(record.instance, mac, name) if kind == 'network' else None
            interfaces.append(Interface(name, mac, expected=reserved))
        failpoint('reserved')
        return replace(record, addresses=tuple(interfaces))

    def up(self, record: Record) -> Record:
        """The record of a guest that runs."""
        console = self._hypervisor.console(record.instance)
        record = replace(record, console=f'{self._shape.hostname}:{console}' if console else None)
        # A guest that runs has its image and its disk, whether or not that could be written when it was so.
        now = self._control.now()
        return record.at(ACTIVE, now, 'image', 'disk', 'started').on(CREATED, now)

    def as_it_is(self, record: Record, guest: Guest) -> Record:
        """The record of a whole guest, running or off."""
        return self.up(record) if guest.running else self.up(record).off(self._control.now())
