"""What guests' agents say of their addresses, where a guest has one. It is the guest's word, and may be anything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from ipaddress import IPv4Address
from queue import SimpleQueue
from typing import Any

from ecomp.errors import EcompError
from ecomp.virt import xml
from ecomp.virt.connection import Connection, libvirt

log = logging.getLogger(__name__)

PATIENCE = 1
"""Seconds an agent has for each answer, then it has given none; libvirt's default is to wait for ever."""


class Agents:
    """Asks guests' agents one by one, in a thread and on a connection of its own, so a silent one delays no caller."""

    def __init__(self, uri: str) -> None:
        self._connection = Connection(uri)
        self._thread: threading.Thread | None = None
        self._to_ask: SimpleQueue[tuple[str, Future[Mapping[str, Any]]] | None] = SimpleQueue()
        self._asked: dict[str, Future[Mapping[str, Any]]] = {}

    def addresses(self, instance: str, macs: Iterable[str]) -> Mapping[str, str]:
        """{MAC: IPv4 address} of these MACs by the agent's last answer; it is asked again for the next call."""
        asked = self._asked.get(instance)
        if asked is not None and not asked.done():
            return {}
        if self._thread is None:
            # Not an executor's: those are waited for at the end of the process, and libvirtd may be frozen.
            thread = threading.Thread(target=self._ask_each, name='agents', daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.debug('agents are asked later: %s', error)
                return {}
            self._thread = thread
        self._asked[instance] = Future()
        self._to_ask.put((instance, self._asked[instance]))
        return said(asked.result(), macs) if asked is not None else {}

    def forget(self, instance: str) -> None:
        """Drop the answer of an instance that has ended."""
        self._asked.pop(instance, None)

    def close(self) -> None:
        self._to_ask.put(None)
        self._connection.close()

    def _ask_each(self) -> None:
        while (each := self._to_ask.get()) is not None:
            instance, answer = each
            answer.set_result(self._ask(instance))

    def _ask(self, instance: str) -> Mapping[str, Any]:
        try:
            with self._connection.use(f'asking the agent of {instance}') as connection:
                domain = connection.lookupByUUIDString(instance)
                if not xml.has_agent(domain.XMLDesc()):
                    return {}
                domain.agentSetResponseTimeout(PATIENCE)
                answer: Mapping[str, Any] = domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT)
                return answer
        except (EcompError, ValueError) as error:  # ValueError: a name in the answer that is no text
            log.debug('the agent of %s: %s', instance, error)
            return {}


def said(answer: Mapping[str, Any], macs: Iterable[str]) -> dict[str, str]:
    """{MAC: address}: of each of these MACs the first in virDomainInterfaceAddresses' answer that others can reach."""
    wanted = set(macs)
    found: dict[str, str] = {}
    for interface in answer.values():
        mac = str(interface['hwaddr'] or '').lower()
        if mac in wanted:
            addresses = (str(each['addr']) for each in interface['addrs'] or ())
            usable = next(filter(_usable, addresses), None)
            if usable is not None:
                found.setdefault(mac, usable)
    return found


def _usable(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except ValueError:
        return False
    others = address.is_loopback or address.is_link_local or address.is_multicast
    return not others and not address.is_reserved and not address.is_unspecified
