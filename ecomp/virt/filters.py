"""The network filters that say what a guest may send, as libvirt has them; and what it is kept from."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence

from ecomp.addresses import addresses, is_own
from ecomp.model.image_sources import Address
from ecomp.virt import filter_xml
from ecomp.virt.connection import Connection, is_broken, libvirt, reason
from ecomp.virt.filter_xml import Service
from ecomp.virt.networks import own_addresses

log = logging.getLogger(__name__)

# A PATH that came through sudo may lack where root's programs are.
PLACES = os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin', '/sbin'))


class Filters:
    """`control` is host and port of etcd and placement. Errors: Unreachable, EcompError."""

    def __init__(self, connection: Connection, control: Sequence[tuple[str, int]]) -> None:
        self._connection = connection
        self._control = control
        self._found: dict[str, list[Address]] = {}

    def prepare(self) -> str:
        """See that libvirt knows our filters: '', or in words why this host has none."""
        if shutil.which('ebtables', path=PLACES) is None:
            return 'ebtables is not installed'
        with self._connection.use('defining network filters') as connection:
            try:
                for name, definition in filter_xml.FILTERS.items():
                    _define(connection, name, definition)
            except libvirt.libvirtError as error:
                # One daemon for all says the first; where each driver has its own, and this one is not there, the
                # daemon that was asked passes on that it cannot be reached, and lives.
                missing = error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT
                if not missing and not (is_broken(error) and connection.isAlive()):
                    raise
                return reason(error)
        return ''

    def services(self) -> list[Service]:
        """What no guest reaches: etcd and placement, at each address that their names have now.

        What is on this host itself a guest would reach by any of this host's addresses.
        """
        found: dict[Service, None] = {}
        for host, port in self._control:
            there = self._addresses(host)
            if any(map(is_own, there)):
                there = own_addresses()
            found |= {Service(address, port): None for address in there}
        return list(found)

    def _addresses(self, host: str) -> list[Address]:
        try:
            self._found[host] = addresses(host)
        except (OSError, ValueError) as error:
            log.warning('%s has no address now (%s): guests are kept from those it had', host, error)
        return self._found.get(host, [])


def _define(connection: libvirt.virConnect, name: str, definition: str) -> None:
    try:
        connection.nwfilterLookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_NWFILTER:
            raise
        # Another process that does the same at this moment is no trouble: the uuid is the same, too.
        connection.nwfilterDefineXML(definition)
