"""The network filters that keep a guest from taking another one's address, as libvirt has them."""

from __future__ import annotations

import os
import shutil

from ecomp.virt import xml
from ecomp.virt.connection import Connection, is_broken, libvirt, reason

# A PATH that came through sudo may lack where root's programs are.
PLACES = os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin', '/sbin'))


class Filters:
    """Errors: Unreachable, EcompError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def prepare(self) -> str:
        """See that libvirt knows our filters: '', or in words why this host has none."""
        if shutil.which('ebtables', path=PLACES) is None:
            return 'ebtables is not installed'
        with self._connection.use('defining network filters') as connection:
            try:
                for name, definition in xml.FILTERS.items():
                    _define(connection, name, definition)
            except libvirt.libvirtError as error:
                # One daemon for all says the first; where each driver has its own, and this one is not there, the
                # daemon that was asked passes on that it cannot be reached, and lives.
                missing = error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT
                if not missing and not (is_broken(error) and connection.isAlive()):
                    raise
                return reason(error)
        return ''


def _define(connection: libvirt.virConnect, name: str, definition: str) -> None:
    try:
        connection.nwfilterLookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_NWFILTER:
            raise
        # Another process that does the same at this moment is no trouble: the uuid is the same, too.
        connection.nwfilterDefineXML(definition)
