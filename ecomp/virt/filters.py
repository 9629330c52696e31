"""The network filters that say what a guest may send, as libvirt has them; and what it is kept from."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

from ecomp.addresses import addresses, is_own
from ecomp.errors import Unreachable
from ecomp.files import search_path
from ecomp.model.image import Address as IpAddress
from ecomp.virt import xml
from ecomp.virt.connection import Connection, is_broken, libvirt, reason
from ecomp.virt.networks import own_addresses
from ecomp.virt.xml import Service

log = logging.getLogger(__name__)


class Filters:
    """The filters of one libvirt. `control` is host and port of etcd and of placement. Unreachable, EcompError."""

    def __init__(self, connection: Connection, control: Sequence[tuple[str, int]]) -> None:
        self._connection = connection
        self._control = control
        self._found: dict[str, list[IpAddress]] = {}

    def prepare(self) -> str:
        """Define our filters where libvirt does not have them; '', or in words why this host can have none."""
        return self._try('defining network filters', _define_all)

    def missing(self) -> str:
        """What prepare() would say, and nothing is defined."""
        return self._try('looking for network filters', lambda connection: connection.listAllNWFilters())

    def _try(self, doing: str, call: Callable[[libvirt.virConnect], object]) -> str:
        if shutil.which('ebtables', path=search_path()) is None:
            return 'ebtables is not installed'
        with self._connection.use(doing) as connection:
            try:
                call(connection)
            except libvirt.libvirtError as error:
                # One daemon for all says the first; where each driver has its own, and this one is not there, the
                # daemon that was asked passes on that it cannot be reached, and lives.
                missing = error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT
                if not missing and not (is_broken(error) and connection.isAlive()):
                    raise
                return reason(error)
        return ''

    def services(self) -> list[Service]:
        """The services no guest may reach: etcd and placement, at each address that their names have now.

        A service on this host is listed with all of the host's addresses, for a guest could reach it by any.
        Unreachable where a name never had an address in this process.
        """
        found: dict[Service, None] = {}
        for host, port in self._control:
            there = self._addresses(host)
            if any(map(is_own, there)):
                there = own_addresses()
            found |= {Service(address, port): None for address in there}
        return list(found)

    def _addresses(self, host: str) -> list[IpAddress]:
        try:
            self._found[host] = addresses(host)
        except (OSError, ValueError) as error:
            if host not in self._found:
                name = f'the address of {host}'
                raise Unreachable(f'{name}, which no guest is to reach, cannot be found: {error}', name) from error
            log.warning('%s has no address now (%s): guests are kept from those it had', host, error)
        return self._found[host]


def _define_all(connection: libvirt.virConnect) -> None:
    for name, definition in xml.FILTERS.items():
        _define(connection, name, definition)


def _define(connection: libvirt.virConnect, name: str, definition: str) -> None:
    try:
        connection.nwfilterLookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_NWFILTER:
            raise
        # Another process that does the same at this moment is no trouble: the uuid is the same, too.
        connection.nwfilterDefineXML(definition)
