"""Build and parse libvirt's XML of domains, volumes, pools, networks and filters. Pure.

ElementTree and quoteattr() escape all values. Formats: libvirt.org/format{domain,storage,caps,nwfilter,network}.html.
"""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Collection, Set
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from ecomp.errors import Problem
from ecomp.model.guest import METADATA_ADDRESS, Attachment, GuestSpec

MARK_NAMESPACE = 'urn:ecomp:1'
# Of a domain that ecomp did not create. Nothing that defines, deletes or filters accepts this mark.
ADOPTION_NAMESPACE = 'urn:ecomp:adopted:1'
ARCHITECTURE = 'x86_64'
# Cirros 0.3.6 cannot drive modern-only virtio: i440fx has transitional devices, q35 does not.
MACHINE = 'pc'

AGENT_CHANNEL = 'org.qemu.guest_agent.0'


@dataclass(frozen=True)
class Cpu:
    model: str
    extra_features: frozenset[str] = frozenset()
    missing_features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Capabilities:
    domain_types: frozenset[str]  # that libvirt offers for ARCHITECTURE
    qemu_uid: int
    qemu_gid: int


def make_seed_url(instance: str) -> str:
    return f'http://{METADATA_ADDRESS}/seed/{instance}/'


def make_domain_xml(  # noqa: PLR0913
    spec: GuestSpec,
    disk: str,
    console_log: str,
    *,
    seed: str | None = None,
    blocked_services: Collection[ClosedService] | None = (),
    without_ipv6: Collection[Attachment] = (),
    hold_addresses: bool = False,
) -> str:
    """Return the definition of a guest's domain, named by its uuid, with our owner mark.

    `disk`, `seed` and `console_log` are paths. Without a seed the guest asks the metadata server.
    The guest's filter blocks `blocked_services` (None: libvirt has no filters), and IPv6 on networks `without_ipv6`.
    With `hold_addresses` it blocks, on bridges, all addresses but the one that DHCP gives the guest.
    """
    serial = f"<entry name='serial'>ds=nocloud-net;s={make_seed_url(spec.instance)}</entry>" if seed is None else ''
    domain = ET.fromstring(f"""
<domain type={quoteattr(spec.virt_type)}>
  <name>{spec.instance}</name>
  <uuid>{spec.instance}</uuid>
  <metadata/>
  <memory unit='MiB'>{spec.memory_mb}</memory>
  <vcpu>{spec.vcpus}</vcpu>
  <!-- A current cloud-init looks for a network seed only if DMI's serial number names one. It finds a seed disk by its
       label, but would still ask the network if the serial number named it. -->
  <sysinfo type='smbios'><system>{serial}<entry name='uuid'>{spec.instance}</entry></system></sysinfo>
  <os><type arch='{ARCHITECTURE}' machine='{MACHINE}'>hvm</type><boot dev='hd'/><smbios mode='sysinfo'/></os>
  <features><acpi/><apic/></features>
  <!-- Also under emulation: QEMU's default, qemu64, is too old for binaries built for x86-64-v2 (EL 9) or -v3. -->
  <cpu mode='host-model'/>
  <clock offset='utc'/>
  <!-- A crashed guest stays off: the user decides whether to restart it. -->
  <on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>
  {_make_devices(spec, disk, seed, console_log)}
</domain>""")
    mark = {'xmlns:ecomp': MARK_NAMESPACE, 'uuid': spec.instance, 'compute': spec.compute, 'version': '1'}
    mark |= {'rebuilt': str(spec.rebuilt)} if spec.rebuilt else {}
    ET.SubElement(domain.findall('metadata')[0], 'ecomp:instance', mark)
    if blocked_services is not None:
        addresses = dict(zip(spec.macs, spec.reserved_addresses, strict=False))
        for interface, mac, network in zip(domain.findall('devices/interface'), spec.macs, spec.networks, strict=True):
            mac6 = None if network in without_ipv6 else mac
            by_dhcp = hold_addresses and network.kind == 'bridge'
            add_filter_reference(interface, addresses.get(mac), blocked_services, mac6, by_dhcp)
    return _serialize(domain)


def _make_devices(spec: GuestSpec, disk: str, seed: str | None, console_log: str) -> str:
    return f"""
<devices>
  <disk type='file' device='disk'>
    <driver name='qemu' type='qcow2' discard='unmap' detect_zeroes='unmap'/>
    <source file={quoteattr(disk)}/>
    <!-- The complete backing chain: an image's header must never determine which file of the host is opened. -->
    <backingStore type='file'>
      <format type={quoteattr(spec.base.format)}/>
      <!-- Keep root as its owner. libvirt would give it to QEMU's user, and an escaped guest could then change all
           overlays. -->
      <source file={quoteattr(spec.base.path)}><seclabel model='dac' relabel='no'/></source>
      <backingStore/>
    </backingStore>
    <target dev='vda' bus='virtio'/>
  </disk>
  {_make_seed_disk(seed)}
  <controller type='usb' model='none'/>
  {''.join(map(_make_interface, spec.macs, spec.networks))}
  <serial type='pty'><log file={quoteattr(console_log)} append='on'/><target port='0'/></serial>
  <console type='pty'><target type='serial' port='0'/></console>
  <channel type='unix'><target type='virtio' name='{AGENT_CHANNEL}'/></channel>
  <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
  <memballoon model='virtio'/>
</devices>"""


def _make_seed_disk(seed: str | None) -> str:
    # A disk, not a CD: bootable guests have virtio_blk, but may lack a driver for IDE or SATA.
    devices = "<driver name='qemu' type='raw'/><source file={}/><target dev='vdb' bus='virtio'/><readonly/>"
    return '' if seed is None else f"<disk type='file' device='disk'>{devices.format(quoteattr(seed))}</disk>"


def _make_interface(mac: str, network: Attachment) -> str:
    source = f"<mac address='{mac}'/><source {network.kind}={quoteattr(network.name)}/><model type='virtio'/>"
    return f"<interface type='{network.kind}'>{source}</interface>"


def make_volume_xml(name: str, capacity: int, base: str, base_format: str) -> str:
    volume = ET.Element('volume', type='file')
    _add_text(volume, 'name', name)
    _add_text(volume, 'capacity', str(capacity), unit='bytes')
    target = ET.SubElement(volume, 'target')
    ET.SubElement(target, 'format', type='qcow2')
    # libvirt's default is the format of 2009, in which a discard over a backing file frees nothing.
    _add_text(target, 'compat', '1.1')
    _add_text(ET.SubElement(target, 'permissions'), 'mode', '0600')
    backing = ET.SubElement(volume, 'backingStore')
    _add_text(backing, 'path', base)
    ET.SubElement(backing, 'format', type=base_format)  # named, so that it is not probed
    return _serialize(volume)


def make_pool_xml(name: str, target: str) -> str:
    pool = ET.Element('pool', type='dir')
    _add_text(pool, 'name', name)
    _add_text(ET.SubElement(pool, 'target'), 'path', target)
    return _serialize(pool)


def parse_pool_target(xml: str) -> str:
    return ET.fromstring(xml).findtext('target/path', '')


def make_adoption_mark(instance: str, compute: str) -> str:
    # libvirt adds the namespace.
    return ET.tostring(ET.Element('instance', {'uuid': instance, 'compute': compute}), encoding='unicode')


def parse_owner_mark(xml: str, instance: str) -> tuple[str | None, int]:
    """Return compute and rebuild number of a mark, or None and 0 if it is another instance's."""
    element = ET.fromstring(xml)
    compute, rebuilt = element.get('compute') or None, element.get('rebuilt', '')
    return (compute, int(rebuilt) if rebuilt.isdecimal() else 0) if element.get('uuid') == instance else (None, 0)


class InterfaceLink(NamedTuple):
    """An interface's connection, whose `bridge` and `tap` are '' while the domain is off."""

    attachment: Attachment
    bridge: str
    tap: str = ''
    is_isolated: bool = False
    # The XML by which libvirt applies our filter to the tap, '' if the interface has none of ours.
    filter_binding: str = ''


def parse_interfaces(xml: str) -> dict[str, InterfaceLink]:
    """Return {MAC: InterfaceLink} of a domain's interfaces, in order."""
    links, domain = {}, ET.fromstring(xml)
    for interface in domain.iterfind('devices/interface'):
        mac, source, kind = interface.find('mac'), interface.find('source'), interface.get('type', '')
        if mac is not None:
            name, bridge = (source.get(attribute, '') if source is not None else '' for attribute in (kind, 'bridge'))
            tap = next((target.get('dev', '') for target in interface.iterfind('target')), '')
            isolated = interface.find("port[@isolated='yes']") is not None
            binding = _make_filter_binding(domain, mac, interface.find('filterref'), tap)
            attachment = Attachment(kind, name)
            links[mac.get('address', '').lower()] = InterfaceLink(attachment, bridge, tap, isolated, binding)
    return links


def _make_filter_binding(domain: ET.Element, mac: ET.Element, reference: ET.Element | None, tap: str) -> str:
    if reference is None or not reference.get('filter', '').startswith(FILTER_PREFIX):
        return ''
    binding = ET.Element('filterbinding')
    owner = ET.SubElement(binding, 'owner')
    for tag in ('name', 'uuid'):
        _add_text(owner, tag, domain.findtext(tag, ''))
    ET.SubElement(binding, 'portdev', name=tap)
    binding.extend((mac, reference))
    return _serialize(binding)


def has_agent(xml: str) -> bool:
    targets = ET.fromstring(xml).iterfind('devices/channel/target')
    return any(target.get('name') == AGENT_CHANNEL and target.get('state') == 'connected' for target in targets)


def parse_disks(xml: str) -> dict[str, str]:
    """Return {target: file or device} of a domain's disks, without CD-ROMs and floppies."""
    every = ET.fromstring(xml).iterfind('devices/disk')
    disks = [each for each in every if each.get('device', 'disk') in ('disk', 'lun')]
    sources = [(each.find('target'), each.find('source')) for each in disks]
    return {
        target.get('dev', ''): source.get('file') or source.get('dev') or source.get('name') or ''
        for target, source in sources
        if target is not None and source is not None
    }


def has_console(xml: str) -> bool:
    return ET.fromstring(xml).find('devices/console') is not None


def parse_disk_paths(xml: str) -> tuple[str, ...]:
    # '' for one that is no file
    return tuple(source.get('file', '') for source in ET.fromstring(xml).iterfind('devices/disk//source'))


def parse_capabilities(xml: str) -> Capabilities:
    root = ET.fromstring(xml)
    domains = root.iterfind(f"guest[os_type='hvm']/arch[@name='{ARCHITECTURE}']/domain")
    # "+64055:+64055"; missing if libvirt does not change users: QEMU is then root.
    label = root.findtext("host/secmodel[model='dac']/baselabel", '+0:+0')
    uid, _, gid = label.replace('+', '').partition(':')
    return Capabilities(frozenset(domain.get('type', '') for domain in domains), int(uid), int(gid))


def parse_guest_cpu(domain_capabilities: str) -> Cpu | None:
    """Return a guest's CPU from getDomainCapabilities' answer, or None without a host model."""
    host_model = ET.fromstring(domain_capabilities).find("cpu/mode[@name='host-model'][@supported='yes']")
    model = host_model.findtext('model') if host_model is not None else None
    if host_model is None or not model:
        return None
    return Cpu(model, *_split_features(host_model))


def make_cpu_xml(model: str) -> str:
    cpu = ET.Element('cpu')
    _add_text(cpu, 'model', model)
    return _serialize(cpu)


def parse_cpu_features(xml: str) -> frozenset[str]:
    return _split_features(ET.fromstring(xml))[0]


def _split_features(cpu: ET.Element) -> tuple[frozenset[str], frozenset[str]]:
    features = [(each.get('name', ''), each.get('policy') in ('disable', 'forbid')) for each in cpu.iterfind('feature')]
    missing = frozenset(name for name, is_missing in features if is_missing)
    return frozenset(name for name, _ in features) - missing, missing


def _add_text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text


def _serialize(element: ET.Element) -> str:
    ET.indent(element)
    return ET.tostring(element, encoding='unicode') + '\n'


FILTER_PREFIX = 'ecompute-'  # of every release
MAC_FILTER = 'ecompute-guest-mac-3'
ADDRESS_FILTER = 'ecompute-guest-address-3'

# All rules are on the Ethernet level: traffic between two guests of one bridge is invisible on the IP level.
_NO_SERVER_RULES = """\
  <rule action='drop' direction='out' priority='10'><ip protocol='udp' srcportstart='67'/></rule>
  <rule action='drop' direction='out' priority='20'><ipv6 protocol='udp' srcportstart='547'/></rule>
  <rule action='drop' direction='out' priority='30'><ipv6 protocol='icmpv6' type='134'/></rule>
  <rule action='drop' direction='out' priority='40'><ipv6 protocol='icmpv6' type='137'/></rule>
"""
_NO_CONTROL_RULES = """\
  <rule action='drop' direction='out' priority='50'>
    <ip protocol='tcp' dstipaddr='$CONTROL4[@1]' dstportstart='$PORT4[@1]'/>
  </rule>
  <rule action='drop' direction='out' priority='60'>
    <ipv6 protocol='tcp' dstipaddr='$CONTROL6[@1]' dstportstart='$PORT6[@1]'/>
  </rule>
"""

# The filters by name. On every interface a guest may not act as a DHCP server (port 67, DHCPv6: 547) or router (router
# advertisements and redirects: ICMPv6 134 and 137), nor reach etcd or placement. It may send only IPv4, ARP and, where
# the network has it, IPv6, all from its own MAC ($MAC6 is that MAC where the network has IPv6). With a reserved
# address, its IPv4 and ARP must be from that address; broadcasts are allowed so that it can request one.
# Each rule costs 20 ms at every start, because libvirt runs a program for it, so there are few. libvirt keeps a filter
# that exists under a name: changed rules need a new name.
FILTERS = {
    # Pass only what is verifiably from the guest. A VLAN tag hides a frame's content from ebtables, and other protocols
    # than IP and ARP may address the switch. ebtables cannot parse ARP of other hardware types, which Linux accepts.
    MAC_FILTER: f"""\
<filter name='{MAC_FILTER}' chain='root'>
  <uuid>d25464e4-1908-4f05-afa1-acd9b6b44141</uuid>
{_NO_SERVER_RULES}{_NO_CONTROL_RULES}\
  <rule action='accept' direction='out' priority='100'><ip srcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='200'><arp srcmacaddr='$MAC' arpsrcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='300'><ipv6 srcmacaddr='$MAC6'/></rule>
  <rule action='drop' direction='out' priority='500'><mac/></rule>
</filter>
""",
    ADDRESS_FILTER: f"""\
<filter name='{ADDRESS_FILTER}' chain='root'>
  <uuid>1e2e5c91-3a39-419c-915b-b9adad333217</uuid>
{_NO_SERVER_RULES}{_NO_CONTROL_RULES}\
  <rule action='accept' direction='out' priority='100'><ip srcmacaddr='$MAC' srcipaddr='$IP'/></rule>
  <rule action='accept' direction='out' priority='200'><ip srcmacaddr='$MAC' dstipaddr='255.255.255.255'/></rule>
  <rule action='accept' direction='out' priority='300'>
    <arp srcmacaddr='$MAC' arpsrcmacaddr='$MAC' arpsrcipaddr='$IP'/>
  </rule>
  <rule action='accept' direction='out' priority='400'><ipv6 srcmacaddr='$MAC6'/></rule>
  <rule action='drop' direction='out' priority='500'><mac/></rule>
</filter>
""",
}


@dataclass(frozen=True)
class ClosedService:
    address: IPv4Address | IPv6Address
    port: int


# A variable of a libvirt filter needs a value; nothing listens at these.
_PLACEHOLDER_SERVICES = (ClosedService(IPv4Address('0.0.0.0'), 1), ClosedService(IPv6Address('::'), 1))
_UNUSED_MAC = '00:00:00:00:00:00'  # Linux's bridge drops frames from this MAC


def add_filter_reference(
    interface: ET.Element, address: str | None, blocked: Collection[ClosedService], mac6: str | None, by_dhcp: bool
) -> None:
    """Add a filter that blocks the services `blocked` to a domain's `<interface>`.

    The guest may send only from its reserved `address`, or without one, if `by_dhcp`, from one that DHCP gives it.
    Without both, only its MAC is checked. `mac6` is the MAC that may send IPv6, None for none.
    """
    # With `by_dhcp` and no reserved address it may only send DHCP until libvirt has seen which address it is given.
    reference = ET.SubElement(interface, 'filterref', filter=ADDRESS_FILTER if address or by_dhcp else MAC_FILTER)
    ET.SubElement(reference, 'parameter', name='MAC6', value=mac6 or _UNUSED_MAC)
    if address:
        ET.SubElement(reference, 'parameter', name='IP', value=address)
    elif by_dhcp:
        ET.SubElement(reference, 'parameter', name='CTRL_IP_LEARNING', value='dhcp')
    for version, nowhere in zip((4, 6), _PLACEHOLDER_SERVICES, strict=True):
        for service in [service for service in blocked if service.address.version == version] or [nowhere]:
            ET.SubElement(reference, 'parameter', name=f'CONTROL{version}', value=str(service.address))
            ET.SubElement(reference, 'parameter', name=f'PORT{version}', value=str(service.port))


# Forward modes in which libvirt gives out no addresses, because it did not create the network.
UNSERVED_FORWARD_MODES = frozenset({'bridge', 'private', 'vepa', 'passthrough', 'hostdev'})
SECONDS_PER_UNIT = {'seconds': 1, 'minutes': 60, 'hours': 3600}
DNSMASQ_NAMESPACE = 'http://libvirt.org/schemas/network/dnsmasq/1.0'
RESERVED_ONLY_OPTION = 'dhcp-ignore=tag:!known'


@dataclass(frozen=True)
class Reservation:
    # dnsmasq gives this address only to this MAC.
    mac: str
    address: str
    name: str


@dataclass(frozen=True)
class Dhcp:
    """The DHCP of a network, which gives out the addresses of `ranges` but `own_addresses`.

    `ranges` are pairs of first and last. `lease_seconds` has the duration of a lease in each, 0 for unlimited.
    `is_served` is False if the bridge is not libvirt's. With `reserved_only` only MACs with a reservation are served.
    `has_ipv6` is False only if the bridge is libvirt's and has no IPv6.
    Networks.explain_unfit() returns the `problems`. dnsmasq answers at `server`.
    """

    ranges: tuple[tuple[IPv4Address, IPv4Address], ...]
    own_addresses: frozenset[IPv4Address]
    reservations: tuple[Reservation, ...]
    is_served: bool
    reserved_only: bool = False
    lease_seconds: tuple[int, ...] = ()
    has_ipv6: bool = True
    problems: tuple[Problem | None, Problem | None] = (None, None)
    server: IPv4Address | None = None

    @property
    def is_open(self) -> bool:
        return bool(self.ranges) and self.is_served and not self.reserved_only

    def get_lease_seconds(self, address: IPv4Address) -> int:
        """Return the seconds of a lease of this address, or 0 if unlimited or unknown."""
        ranges = zip(self.ranges, self.lease_seconds, strict=True)
        return next((seconds for (first, last), seconds in ranges if first <= address <= last), 0)

    def find_reservation(self, mac: str) -> Reservation | None:
        return next((reservation for reservation in self.reservations if reservation.mac == mac), None)

    def can_give(self, address: IPv4Address) -> bool:
        """Return whether DHCP may give out the address, even if it is in use now."""
        return address not in self.own_addresses and any(first <= address <= last for first, last in self.ranges)


def parse_dhcp(xml: str) -> Dhcp:
    root = ET.fromstring(xml)
    forward = root.find('forward')
    ranges, seconds, own, reservations, server = [], [], set(), [], None
    ipv4_elements = [ip for ip in root.iterfind('ip') if ip.get('family', 'ipv4') == 'ipv4']
    for element in ipv4_elements:
        mask = element.get('prefix') or element.get('netmask') or '32'
        address = IPv4Address(element.get('address', '0.0.0.0'))
        network = IPv4Network((address, mask), strict=False)
        own |= {address, network.network_address, network.broadcast_address}
        server = server if element.find('dhcp') is None else address
        served_ranges = element.findall('dhcp/range')
        ranges += [(IPv4Address(entry.get('start', '')), IPv4Address(entry.get('end', ''))) for entry in served_ranges]
        seconds += [_parse_lease_seconds(entry.find('lease')) for entry in served_ranges]
        hosts = [[host.get(name, '') for name in ('mac', 'ip', 'name')] for host in element.iterfind('dhcp/host')]
        reservations += [Reservation(mac.lower(), ip, name) for mac, ip, name in hosts]
    mode = forward.get('mode', 'nat') if forward is not None else ''
    # https://libvirt.org/formatnetwork.html#network-namespaces; dnsmasq(8): a reservation sets the tag `known`.
    options = root.iterfind(f'{{{DNSMASQ_NAMESPACE}}}options/{{{DNSMASQ_NAMESPACE}}}option')
    closed = RESERVED_ONLY_OPTION in {option.get('value') for option in options}
    served = mode not in UNSERVED_FORWARD_MODES
    ipv6 = not served or root.get('ipv6') == 'yes' or root.find("ip[@family='ipv6']") is not None
    unfit = _explain_unfit(root, served, ipv4_elements, not ranges)
    return Dhcp(tuple(ranges), frozenset(own), tuple(reservations), served, closed, tuple(seconds), ipv6, unfit, server)


def close_dhcp(xml: str) -> str:
    """Return a network's definition, changed to serve only MACs with a reservation by DHCP."""
    root = ET.fromstring(xml)
    # libvirt joins this element with another one of its name.
    options = ET.SubElement(root, f'{{{DNSMASQ_NAMESPACE}}}options')
    ET.SubElement(options, f'{{{DNSMASQ_NAMESPACE}}}option', value=RESERVED_ONLY_OPTION)
    return ET.tostring(root, encoding='unicode')


def _explain_unfit(
    root: ET.Element, is_served: bool, ipv4_elements: list[ET.Element], has_no_range: bool
) -> tuple[Problem | None, Problem | None]:
    name, unfilterable, unaddressed = f'network {root.findtext("name")}', None, None
    ports = [*root.iterfind('virtualport[@type]'), *root.iterfind("portgroup[@default='yes']/virtualport[@type]")]
    # virDomainActualNetDefValidate() in libvirt's src/conf/domain_conf.c: filters require a tap on a Linux bridge.
    if ports or not (is_served or root.find('bridge') is not None):
        kind = f'a port of {ports[0].get("type")}' if ports else 'the network card itself (macvtap or hostdev)'
        fix = 'name a Linux bridge instead under `networks:`, like `- bridge: br0`, as docs/howto/bridge.md describes'
        why = f'{name} uses {kind}, where libvirt cannot filter guests'
        unfilterable = Problem(f'{why}: no guest can run there', fix)
    if is_served and has_no_range and any(element.find('dhcp') is not None for element in ipv4_elements):
        fix = f"virsh net-update {root.findtext('name')} add ip-dhcp-range \"<range start='FIRST' end='LAST'/>\""
        unaddressed = Problem(f'{name} has DHCP without a <range>: guests get no address', f'{fix} --live --config')
    elif is_served and not ipv4_elements and root.find('ip') is not None:
        fix = 'add an <ip> of IPv4 with a <dhcp><range> with `virsh net-edit`, and restart the network'
        unaddressed = Problem(f'{name} has only IPv6: guests wait for an IPv4 address forever', fix)
    return unfilterable, unaddressed


def _parse_lease_seconds(lease: ET.Element | None) -> int:
    if lease is None:
        return 3600
    return int(lease.get('expiry', '0')) * SECONDS_PER_UNIT[lease.get('unit', 'minutes')]


def choose_address(dhcp: Dhcp, taken_addresses: Set[IPv4Address], mac: str) -> IPv4Address | None:
    """Return a free address or None, always the same one for a MAC while that stays free."""
    taken_addresses = taken_addresses | dhcp.own_addresses
    sizes = [int(last) - int(first) + 1 for first, last in dhcp.ranges]
    start = int.from_bytes(hashlib.sha256(mac.encode()).digest()[:8], 'big')
    # One more step than there are taken addresses reaches a free one.
    for step in range(min(sum(sizes), len(taken_addresses) + 1)):
        index = (start + step) % sum(sizes)
        for (first, _), size in zip(dhcp.ranges, sizes, strict=True):
            if index < size:
                if (address := first + index) not in taken_addresses:
                    return address
                break
            index -= size
    return None


def make_host_xml(reservation: Reservation) -> str:
    # dnsmasq sends the name as host name.
    attributes = {'mac': reservation.mac, 'ip': reservation.address, 'name': reservation.name}
    return ET.tostring(ET.Element('host', {key: value for key, value in attributes.items() if value}), 'unicode')
