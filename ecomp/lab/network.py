"""PURE: the names, addresses and definitions of a lab's networks.

A lab has its own /16, 10.N.0.0/16. Everything follows from N and the host's number i:

    10.N.0.0/24   the lab's LAN, a bridge in the control namespace: the machine .1, control .2, host i .(10+i),
                  and from .100 on the DHCP addresses of guests bridged to it
    10.N.i.0/24   the guests of host i, behind libvirt's network `default` there; the host is .1
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from ecomp.errors import EcompError, UsageError
from ecomp.model.guest import METADATA_ADDRESS

MAX_HOSTS = 64  # of one lab; more are refused
CONTROL = 'control'
DNSMASQ = 'http://libvirt.org/schemas/network/dnsmasq/1.0'
ETCD_PORT = 2379
PLACEMENT_PORT = 8080
# The lab's chain for each iptables chain of a host: it filters the traffic from virbr0.
FENCE_CHAINS = {'INPUT': 'elab-host', 'FORWARD': 'elab-lan'}
# First those that home routers, Docker (172.17/16) and libvirt (192.168.122/24) do not use.
SECOND_OCTETS = (*range(200, 255), *range(20, 200))


@dataclass(frozen=True)
class Layout:
    """The names and addresses of a lab, whose `network` is a /16."""

    name: str
    network: IPv4Network

    @property
    def number(self) -> int:
        return self.network.network_address.packed[1]

    @property
    def link(self) -> str:
        """The machine's interface into the lab: the only one outside the namespaces."""
        return f'elab{self.number}'

    @property
    def lan(self) -> IPv4Network:
        return self._make_subnet(0)

    @property
    def machine(self) -> IPv4Address:
        return self.lan[1]

    @property
    def control(self) -> IPv4Address:
        return self.lan[2]

    @property
    def images(self) -> str:
        return f'http://{self.control}/'

    def get_address(self, host: str) -> IPv4Address:
        return self.lan[10 + parse_host_number(host)]

    def get_guest_network(self, host: str) -> IPv4Network:
        return self._make_subnet(parse_host_number(host))

    def get_namespace(self, place: str) -> str:
        return f'elab-{self.name}-{place}'

    def get_mac(self, place: str) -> str:
        # The MAC of br0 is fixed. Otherwise a new port could change it, and ARP caches would be stale.
        return f'02:e1:ab:{self.number:02x}:00:{0 if place == CONTROL else parse_host_number(place):02x}'

    def _make_subnet(self, third: int) -> IPv4Network:
        return IPv4Network((int(self.network.network_address) + (third << 8), 24))


def parse_host_number(host: str) -> int:
    return int(host.removeprefix('hv'))


def require_lab_name(name: str) -> str:
    """Return the name, or raise UsageError if it is not valid for a lab."""
    if not re.fullmatch('[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?', name):
        raise UsageError(f'{name!r} is not a valid lab name: a name has at most 32 lower-case letters, digits and -')
    return name


def choose_network(used_networks: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first free 10.N.0.0/16, or raise EcompError."""
    networks = list(used_networks)
    for number in SECOND_OCTETS:
        network = IPv4Network(f'10.{number}.0.0/16')
        if not any(network.overlaps(other) for other in networks):
            return network
    raise EcompError('no free network for a lab: this machine has routes to all from 10.20.0.0/16 to 10.254.0.0/16')


def parse_routed_networks(routes: Iterable[dict[str, object]]) -> list[IPv4Network]:
    """Parse the destinations narrower than /8 that `ip -json -4 route show table all` prints."""
    # Wider ones are general routes, such as a VPN's (0.0.0.0/1, 10.0.0.0/8). A lab's /16 takes precedence.
    destinations = (str(route.get('dst', 'default')) for route in routes)
    networks = (IPv4Network(destination, strict=False) for destination in destinations if destination != 'default')
    return [network for network in networks if network.prefixlen > 8]


def render_backends(host: str, etcd_port: int, placement: str, certificate_directory: str = '') -> str:
    """Render the sections etcd and placement of a configuration, with a certificate and a token.

    `host` is YAML. `placement` is a URL. `certificate_directory` ends with a slash. '' means the directory of the file.
    """
    names = {'ca_cert': 'ca.crt', 'cert_cert': 'client.crt', 'cert_key': 'client.key'}
    files = ''.join(f'  {key}: {certificate_directory}{name}\n' for key, name in names.items())
    etcd = f'etcd:\n  host: {host}\n  port: {etcd_port}\n{files}'
    return f'{etcd}placement:\n  endpoint: {placement}\n{files}  token_file: {certificate_directory}token\n'


def render_network_xml(guests: IPv4Network, uuid: str) -> str:
    """Render libvirt's network `default` of a host (https://libvirt.org/formatnetwork.html)."""
    root = ET.Element('network', {'xmlns:dnsmasq': DNSMASQ})
    ET.SubElement(root, 'name').text = 'default'
    ET.SubElement(root, 'uuid').text = uuid
    # libvirt neither routes nor filters, so the machine reaches the guests. Without a default route in the namespace
    # nothing leaves it.
    ET.SubElement(root, 'forward', mode='open')
    ET.SubElement(root, 'bridge', name='virbr0', stp='off', delay='0')
    ET.SubElement(root, 'dns', enable='no')  # its servers could not be reached
    gateway = ET.SubElement(root, 'ip', address=str(guests[1]), netmask=str(guests.netmask))
    dhcp = ET.SubElement(gateway, 'dhcp')
    ET.SubElement(dhcp, 'range', start=str(guests[2]), end=str(guests[-2]))
    # Guests reach this address through their gateway; on the bridge only this host has it.
    ET.SubElement(root, 'ip', address=METADATA_ADDRESS, netmask='255.255.255.255')
    # DHCP answers only reserved MACs: otherwise one guest with many MACs could take all addresses.
    ET.SubElement(ET.SubElement(root, 'dnsmasq:options'), 'dnsmasq:option', value='dhcp-ignore=tag:!known')
    return ET.tostring(root, encoding='unicode')


def render_fence_rules(layout: Layout) -> str:
    """Render FENCE_CHAINS for iptables-restore, without the jumps to them.

    Guests reach DHCP, port 80 (metadata) and ICMP of their host. On the LAN (the machine, etcd, placement, hosts) they
    reach only the image server, elsewhere everything. They may answer any machine.
    """
    allowed = {
        'INPUT': ('-p udp --dport 67', '-p tcp --dport 80', '-p icmp'),
        'FORWARD': (f'! -d {layout.lan}', f'-d {layout.control} -p tcp --dport 80'),
    }
    chains = [f':{chain} - [0:0]' for chain in FENCE_CHAINS.values()]
    appended = []
    for hook, chain in FENCE_CHAINS.items():
        rules = ('-m conntrack --ctstate ESTABLISHED,RELATED', *allowed[hook])
        appended += [f'-A {chain} {rule} -j RETURN' for rule in rules]
        appended.append(f'-A {chain} -j REJECT --reject-with icmp-admin-prohibited')
    return '\n'.join(('*filter', *chains, *appended, 'COMMIT', ''))


def divide_resources(cores: int, ram_mb: int, disk_gb: int, hosts: int) -> dict[str, int]:
    """Return one host's share of cores, memory (MiB) and disk (GiB), at least 4, 512 and 1."""
    return {'VCPU': max(4, cores // hosts), 'MEMORY_MB': max(512, ram_mb // hosts), 'DISK_GB': max(1, disk_gb // hosts)}


def reduce_inventory(compute_yaml: str, maximum: Mapping[str, int]) -> str:
    """Return compute.yaml with each amount in a line `  CLASS: AMOUNT` limited to `maximum`."""
    return re.sub(
        r'(?m)^(  )(\w+)(: )(\d{1,18})$',
        lambda match: f'{match[1]}{match[2]}{match[3]}{min(int(match[4]), maximum.get(match[2], int(match[4])))}',
        compute_yaml,
    )


def bracket_address(address: str) -> str:
    return f'[{address}]' if ':' in address else address
