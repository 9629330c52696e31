"""PURE: the names, addresses and definitions of a lab's networks.

A lab has a /16 of its own, 10.N.0.0/16, and everything follows from N and the host's number i:

    10.N.0.0/24   the lab's LAN, a bridge in the control namespace: the machine .1, control .2, host i .(10+i),
                  and from .100 on what its DHCP gives to guests that are bridged to it
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

MOST_HOSTS = 64  # of one lab; more are refused
CONTROL = 'control'
DNSMASQ = 'http://libvirt.org/schemas/network/dnsmasq/1.0'
ETCD_PORT = 2379
PLACEMENT_PORT = 8080

FENCED = {'INPUT': 'elab-host', 'FORWARD': 'elab-lan'}
"""{chain of iptables: our chain} in a host: what virbr0 brings to the first is decided by the second."""

# Far from what home routers, Docker (172.17/16) and libvirt (192.168.122/24) take; the others only if those are taken.
SECOND_OCTETS = (*range(200, 255), *range(20, 200))


@dataclass(frozen=True)
class Layout:
    """The names and addresses of one lab. `network` is its /16; its hosts are hv1, hv2 …"""

    name: str
    network: IPv4Network

    @property
    def number(self) -> int:
        return self.network.network_address.packed[1]

    @property
    def link(self) -> str:
        """The machine's own interface into the lab: the only thing outside the namespaces."""
        return f'elab{self.number}'

    @property
    def lan(self) -> IPv4Network:
        return self._subnet(0)

    @property
    def machine(self) -> IPv4Address:
        return self.lan[1]

    @property
    def control(self) -> IPv4Address:
        return self.lan[2]

    @property
    def etcd(self) -> str:
        """Where etcd answers, as host:port."""
        return f'{self.control}:{ETCD_PORT}'

    @property
    def placement(self) -> str:
        return f'https://{self.control}:{PLACEMENT_PORT}'

    @property
    def images(self) -> str:
        """The URL of the lab's directory images/, with a slash at its end."""
        return f'http://{self.control}/'

    def address(self, host: str) -> IPv4Address:
        """The address of `hv<i>` on the LAN."""
        return self.lan[10 + host_number(host)]

    def guests(self, host: str) -> IPv4Network:
        """The network that libvirt's DHCP on a host gives its guests addresses of."""
        return self._subnet(host_number(host))

    def namespace(self, place: str) -> str:
        """The network namespace of a host, or of `control`."""
        return f'elab-{self.name}-{place}'

    def mac(self, place: str) -> str:
        """The MAC of the bridge br0 of a host or of `control`.

        Without one of its own a bridge changes its MAC with every port, and neighbours remember the old one.
        """
        return f'02:e1:ab:{self.number:02x}:00:{0 if place == CONTROL else host_number(place):02x}'

    def _subnet(self, third: int) -> IPv4Network:
        return IPv4Network((int(self.network.network_address) + (third << 8), 24))


def host_names(count: int) -> list[str]:
    """The names hv1 … hv<count>."""
    return [f'hv{number}' for number in range(1, count + 1)]


def host_number(host: str) -> int:
    """The i of the name hv<i>."""
    return int(host.removeprefix('hv'))


def check_name(name: str) -> str:
    """The name of a lab: it becomes a directory and part of namespaces' names. UsageError."""
    if not re.fullmatch('[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?', name):
        raise UsageError(f'a lab is named with at most 32 lower-case letters, digits and -, not {name!r}')
    return name


def choose_network(taken: Iterable[IPv4Network]) -> IPv4Network:
    """The first 10.N.0.0/16 that overlaps none of the `taken` ones: routes of this machine, and other labs' networks.

    EcompError when all are taken.
    """
    used = list(taken)
    for number in SECOND_OCTETS:
        network = IPv4Network(f'10.{number}.0.0/16')
        if not any(network.overlaps(other) for other in used):
            return network
    raise EcompError('no free network for a lab: every 10.20.0.0/16 to 10.254.0.0/16 is routed somewhere already')


def routed_networks(routes: Iterable[dict[str, object]]) -> list[IPv4Network]:
    """The destinations in `ip -json -4 route show table all` that are narrower than 10.0.0.0/8.

    Wider ones are ways to everywhere, of a VPN for one (0.0.0.0/1 and 128.0.0.0/1, or all of 10.0.0.0/8): a lab's own
    /16 goes before them.
    """
    destinations = (str(route.get('dst', 'default')) for route in routes)
    networks = (IPv4Network(each, strict=False) for each in destinations if each != 'default')
    return [each for each in networks if each.prefixlen > 8]


def backends_yaml(host: str, etcd_port: int, placement: str, own: str = '') -> str:
    """The sections of a compute.yaml or schedule.yaml that reach etcd and placement by a certificate.

    `placement` is its URL; `own` is the directory of the certificate with a slash at its end, '' for the file's own.
    """
    names = {'ca_cert': 'ca.crt', 'cert_cert': 'client.crt', 'cert_key': 'client.key'}
    files = ''.join(f'  {key}: {own}{name}\n' for key, name in names.items())
    etcd = f'etcd:\n  host: {host}\n  port: {etcd_port}\n{files}'
    return f'{etcd}placement:\n  endpoint: {placement}\n{files}  token_file: {own}token\n'


def network_xml(guests: IPv4Network, uuid: str) -> str:
    """libvirt's network `default` of one host, for virNetworkDefineXML. https://libvirt.org/formatnetwork.html

    `open`: libvirt routes and filters nothing, so the machine reaches the guests, and without a default route in the
    namespace nothing gets out. No DNS: it could only ask servers that cannot be reached from here. DHCP answers only
    MACs with a reservation: a guest that asks as many others would take all addresses there are.
    """
    root = ET.Element('network', {'xmlns:dnsmasq': DNSMASQ})
    ET.SubElement(root, 'name').text = 'default'
    ET.SubElement(root, 'uuid').text = uuid
    ET.SubElement(root, 'forward', mode='open')
    ET.SubElement(root, 'bridge', name='virbr0', stp='off', delay='0')
    ET.SubElement(root, 'dns', enable='no')
    own = ET.SubElement(root, 'ip', address=str(guests[1]), netmask=str(guests.netmask))
    dhcp = ET.SubElement(own, 'dhcp')
    ET.SubElement(dhcp, 'range', start=str(guests[2]), end=str(guests[-2]))
    # Guests reach it through their gateway; on the bridge it is this host's and nobody else's.
    ET.SubElement(root, 'ip', address=METADATA_ADDRESS, netmask='255.255.255.255')
    ET.SubElement(ET.SubElement(root, 'dnsmasq:options'), 'dnsmasq:option', value='dhcp-ignore=tag:!known')
    return ET.tostring(root, encoding='unicode')


def fence(layout: Layout) -> str:
    """The rules for guests behind virbr0, as iptables-restore takes them.

    They reach DHCP and the metadata server of their host; of the LAN (the machine, etcd, placement, hosts) the image
    server alone; and they may answer any machine.
    """
    let_pass = {
        'INPUT': ('-p udp --dport 67', '-p tcp --dport 80', '-p icmp'),
        'FORWARD': (f'! -d {layout.lan}', f'-d {layout.control} -p tcp --dport 80'),
    }
    made = [f':{chain} - [0:0]' for chain in FENCED.values()]
    added = []
    for hook, chain in FENCED.items():
        rules = ('-m conntrack --ctstate ESTABLISHED,RELATED', *let_pass[hook])
        added += [f'-A {chain} {rule} -j RETURN' for rule in rules]
        added.append(f'-A {chain} -j REJECT --reject-with icmp-admin-prohibited')
    return '\n'.join(('*filter', *made, *added, 'COMMIT', ''))


def share(cores: int, memory_mb: int, disk_gb: int, hosts: int) -> dict[str, int]:
    """One host's inventory: cores, MiB of memory and GiB of disk of this machine, divided by the number of `hosts`.

    Never less than 4, 512 and 1, so several hosts may be given the same cores: emulated guests are small.
    """
    return {
        'VCPU': max(4, cores // hosts),
        'MEMORY_MB': max(512, memory_mb // hosts),
        'DISK_GB': max(1, disk_gb // hosts),
    }


def with_less(compute_yaml: str, part: Mapping[str, int]) -> str:
    """The text of a compute.yaml, with each amount of its inventory that is above the host's `part` made that."""
    return re.sub(
        r'(?m)^(  )(\w+)(: )(\d{1,18})$',
        lambda found: f'{found[1]}{found[2]}{found[3]}{min(int(found[4]), part.get(found[2], int(found[4])))}',
        compute_yaml,
    )


def bracketed(address: str) -> str:
    """An address or name as it is written before a colon and a port: IPv6 in brackets."""
    return f'[{address}]' if ':' in address else address
