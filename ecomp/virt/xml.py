"""PURE: the XML libvirt is given for our domains, volumes, pool and network filters, and what is read from its own.

Everything is built with ElementTree, so a value can never become markup. Formats: libvirt.org/formatdomain.html,
formatstorage.html, formatcaps.html, formatnwfilter.html, formatnetwork.html.

The filters have few rules: each is a program that libvirt runs at every start, some 20 ms. Other rules need another
name: what is defined under a name is taken as it is.

Of a network it is the DHCP: what it may give out, what is reserved, and which address to reserve.
"""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Collection, Set
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import NamedTuple

from ecomp.model.guest import METADATA_ADDRESS, Attachment, GuestSpec

MARK_NAMESPACE = 'urn:ecomp:1'
ARCHITECTURE = 'x86_64'
# Cirros 0.3.6 has no driver for modern-only virtio: i440fx gives transitional devices, q35 would not.
MACHINE = 'pc'

AGENT = 'org.qemu.guest_agent.0'
"""The name of the channel that a guest's agent opens."""


@dataclass(frozen=True)
class Mark:
    """What says that a domain is ours: the uuids of its instance and of the compute that made it."""

    instance: str
    compute: str


@dataclass(frozen=True)
class Cpu:
    """A processor: a model that libvirt knows, the features it has beside the model's, and those of them it lacks."""

    model: str
    more: frozenset[str] = frozenset()
    fewer: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Capabilities:
    """What a host's libvirt offers: domain types for ARCHITECTURE, and the user and group QEMU runs as."""

    domain_types: frozenset[str]
    qemu_uid: int
    qemu_gid: int


def seed_url(instance: str) -> str:
    """The URL at which the metadata server has the NoCloud seed of an instance."""
    return f'http://{METADATA_ADDRESS}/seed/{instance}/'


def domain_xml(
    spec: GuestSpec,
    disk: str,
    console_log: str,
    *,
    seed: str | None = None,
    control: Collection[Service] | None = (),
    without_ipv6: Collection[Attachment] = (),
    hold_addresses: bool = False,
) -> str:
    """The definition of a guest's domain, with the instance's uuid as name and uuid, and our mark in its metadata.

    `disk` is the overlay's path, `console_log` that of the file the serial console is copied to, `seed` that of the
    NoCloud disk, None where the guest asks the metadata server. `control` are the services that the guest's filter
    blocks; None where libvirt has no filters. On the networks `without_ipv6` it blocks IPv6. `hold_addresses`: on
    bridges it holds the guest to the address that DHCP gives it.
    """
    domain = ET.Element('domain', type=spec.virt_type)
    _text(domain, 'name', spec.instance)
    _text(domain, 'uuid', spec.instance)
    mark = {'xmlns:ecomp': MARK_NAMESPACE, 'uuid': spec.instance, 'compute': spec.compute, 'version': '1'}
    ET.SubElement(ET.SubElement(domain, 'metadata'), 'ecomp:instance', mark)
    _text(domain, 'memory', str(spec.memory_mb), unit='MiB')
    _text(domain, 'vcpu', str(spec.vcpus))
    _firmware(domain, spec, None if seed else seed_url(spec.instance))
    # Where it is emulated, too: QEMU's own choice, qemu64, is too old for what is built for x86-64-v2 (EL 9) or -v3.
    ET.SubElement(domain, 'cpu', mode='host-model')
    ET.SubElement(domain, 'clock', offset='utc')
    # A crashed guest stays off: to start it again for the user would be to guess.
    for event, action in (('poweroff', 'destroy'), ('reboot', 'restart'), ('crash', 'destroy')):
        _text(domain, f'on_{event}', action)
    devices = ET.SubElement(domain, 'devices')
    _disks(devices, spec, disk, seed)
    _devices(devices, spec, console_log)
    if control is not None:
        addresses = dict(zip(spec.macs, spec.reserved, strict=False))
        for interface, mac, network in zip(devices.findall('interface'), spec.macs, spec.networks, strict=True):
            mac6 = None if network in without_ipv6 else mac
            by_dhcp = hold_addresses and network.kind == 'bridge'
            reference(interface, addresses.get(mac), control, mac6, by_dhcp)
    return _serialized(domain)


def _firmware(domain: ET.Element, spec: GuestSpec, url: str | None) -> None:
    system = ET.SubElement(ET.SubElement(domain, 'sysinfo', type='smbios'), 'system')
    # A current cloud-init looks for a network seed only if DMI tells it to: the system's serial number does. One on a
    # disk it finds by the label, and would go on to ask the network if it were told to.
    if url is not None:
        _text(system, 'entry', f'ds=nocloud-net;s={url}', name='serial')
    _text(system, 'entry', spec.instance, name='uuid')
    os = ET.SubElement(domain, 'os')
    _text(os, 'type', 'hvm', arch=ARCHITECTURE, machine=MACHINE)
    ET.SubElement(os, 'boot', dev='hd')
    ET.SubElement(os, 'smbios', mode='sysinfo')
    features = ET.SubElement(domain, 'features')
    ET.SubElement(features, 'acpi')
    ET.SubElement(features, 'apic')


def _disks(devices: ET.Element, spec: GuestSpec, disk: str, seed: str | None) -> None:
    drive = ET.SubElement(devices, 'disk', type='file', device='disk')
    ET.SubElement(drive, 'driver', name='qemu', type='qcow2', discard='unmap', detect_zeroes='unmap')
    ET.SubElement(drive, 'source', file=disk)
    # The whole chain, and its end: what an image's header says never decides which file of the host is opened.
    base = ET.SubElement(drive, 'backingStore', type='file')
    ET.SubElement(base, 'format', type=spec.base.format)
    # It stays root's, whom libvirt would have give it to QEMU: one guest that broke out would write to all on it.
    source = ET.SubElement(base, 'source', file=spec.base.path)
    ET.SubElement(source, 'seclabel', model='dac', relabel='no')
    ET.SubElement(base, 'backingStore')
    ET.SubElement(drive, 'target', dev='vda', bus='virtio')
    if seed is None:
        return
    # A disk and not a CD: what boots here has virtio_blk, and need not have a driver for an IDE or SATA drive.
    drive = ET.SubElement(devices, 'disk', type='file', device='disk')
    ET.SubElement(drive, 'driver', name='qemu', type='raw')
    ET.SubElement(drive, 'source', file=seed)
    ET.SubElement(drive, 'target', dev='vdb', bus='virtio')
    ET.SubElement(drive, 'readonly')


def _devices(devices: ET.Element, spec: GuestSpec, console_log: str) -> None:
    ET.SubElement(devices, 'controller', type='usb', model='none')
    for mac, (kind, name) in zip(spec.macs, spec.networks, strict=True):
        interface = ET.SubElement(devices, 'interface', type=kind)
        ET.SubElement(interface, 'mac', address=mac)
        ET.SubElement(interface, 'source', {kind: name})
        ET.SubElement(interface, 'model', type='virtio')

    serial = ET.SubElement(devices, 'serial', type='pty')
    ET.SubElement(serial, 'log', file=console_log, append='on')
    ET.SubElement(serial, 'target', port='0')
    ET.SubElement(ET.SubElement(devices, 'console', type='pty'), 'target', type='serial', port='0')
    ET.SubElement(ET.SubElement(devices, 'channel', type='unix'), 'target', type='virtio', name=AGENT)
    _text(ET.SubElement(devices, 'rng', model='virtio'), 'backend', '/dev/urandom', model='random')
    ET.SubElement(devices, 'memballoon', model='virtio')


def volume_xml(name: str, capacity: int, base: str, base_format: str) -> str:
    """The definition of an overlay: a qcow2 of `capacity` bytes over `base`, whose format is named, not probed."""
    volume = ET.Element('volume', type='file')
    _text(volume, 'name', name)
    _text(volume, 'capacity', str(capacity), unit='bytes')
    target = ET.SubElement(volume, 'target')
    ET.SubElement(target, 'format', type='qcow2')
    # libvirt's default is the format of 2009, in which a guest's discard over a backing file frees nothing.
    _text(target, 'compat', '1.1')
    _text(ET.SubElement(target, 'permissions'), 'mode', '0600')
    backing = ET.SubElement(volume, 'backingStore')
    _text(backing, 'path', base)
    ET.SubElement(backing, 'format', type=base_format)
    return _serialized(volume)


def pool_xml(name: str, target: str) -> str:
    """The definition of a storage pool over the directory `target`."""
    pool = ET.Element('pool', type='dir')
    _text(pool, 'name', name)
    _text(ET.SubElement(pool, 'target'), 'path', target)
    return _serialized(pool)


def pool_target(xml: str) -> str:
    """The directory of a pool by its definition, '' if it has none."""
    return ET.fromstring(xml).findtext('target/path', '')


def mark(xml: str) -> Mark | None:
    """The mark in the metadata element of our namespace; None if a part of it is missing."""
    element = ET.fromstring(xml)
    instance, compute = element.get('uuid'), element.get('compute')
    return Mark(instance, compute) if instance and compute else None


class Plug(NamedTuple):
    """What an interface is plugged into; `bridge` and `tap` are the host's, '' where the domain does not run."""

    attachment: Attachment
    bridge: str
    tap: str = ''
    isolated: bool = False


def interfaces(xml: str) -> dict[str, Plug]:
    """{MAC: what it is plugged into} of a domain's interfaces, in order."""
    found = {}
    for interface in ET.fromstring(xml).iterfind('devices/interface'):
        mac, source, kind = interface.find('mac'), interface.find('source'), interface.get('type', '')
        if mac is not None:
            name, bridge = (source.get(each, '') if source is not None else '' for each in (kind, 'bridge'))
            tap = next((each.get('dev', '') for each in interface.iterfind('target')), '')
            isolated = interface.find("port[@isolated='yes']") is not None
            found[mac.get('address', '').lower()] = Plug(Attachment(kind, name), bridge, tap, isolated)
    return found


def has_agent(xml: str) -> bool:
    """Whether an agent in the guest has opened its channel, by the definition of the running domain."""
    targets = ET.fromstring(xml).iterfind('devices/channel/target')
    return any(target.get('name') == AGENT and target.get('state') == 'connected' for target in targets)


def disks(xml: str) -> tuple[str, ...]:
    """The paths of a domain's disks and of the files they lie on."""
    return tuple(source.get('file', '') for source in ET.fromstring(xml).iterfind('devices/disk//source'))


def capabilities(xml: str) -> Capabilities:
    """The Capabilities in libvirt's answer to getCapabilities."""
    root = ET.fromstring(xml)
    domains = root.iterfind(f"guest[os_type='hvm']/arch[@name='{ARCHITECTURE}']/domain")
    # "+64055:+64055"; a libvirt that does not change users says nothing, and its QEMU is root.
    label = root.findtext("host/secmodel[model='dac']/baselabel", '+0:+0')
    uid, _, gid = label.replace('+', '').partition(':')
    return Capabilities(frozenset(each.get('type', '') for each in domains), int(uid), int(gid))


def guest_cpu(domain_capabilities: str) -> Cpu | None:
    """The processor that a guest has by domain_xml(), from libvirt's answer to getDomainCapabilities for its type.

    None if that does not say.
    """
    host_model = ET.fromstring(domain_capabilities).find("cpu/mode[@name='host-model'][@supported='yes']")
    model = host_model.findtext('model') if host_model is not None else None
    if host_model is None or not model:
        return None
    fewer = frozenset(_names(host_model, 'disable') | _names(host_model, 'forbid'))
    return Cpu(model, frozenset(_names(host_model) - fewer), fewer)


def cpu_xml(model: str) -> str:
    """A processor of this model as baselineHypervisorCPU takes it."""
    cpu = ET.Element('cpu')
    _text(cpu, 'model', model)
    return _serialized(cpu)


def cpu_features(xml: str) -> frozenset[str]:
    """The features in an expanded answer of baselineHypervisorCPU."""
    cpu = ET.fromstring(xml)
    return frozenset(_names(cpu) - _names(cpu, 'disable') - _names(cpu, 'forbid'))


def _names(cpu: ET.Element, policy: str | None = None) -> set[str]:
    return {each.get('name', '') for each in cpu.iterfind('feature') if policy in (None, each.get('policy'))}


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text


def _serialized(element: ET.Element) -> str:
    ET.indent(element)
    return ET.tostring(element, encoding='unicode') + '\n'


GUEST_MAC, GUEST_ADDRESS = 'ecompute-guest-mac-3', 'ecompute-guest-address-3'

# All on Ethernet's level: what two guests of one bridge send each other is not seen on that of IP.
_NO_SERVER = """\
  <rule action='drop' direction='out' priority='10'><ip protocol='udp' srcportstart='67'/></rule>
  <rule action='drop' direction='out' priority='20'><ipv6 protocol='udp' srcportstart='547'/></rule>
  <rule action='drop' direction='out' priority='30'><ipv6 protocol='icmpv6' type='134'/></rule>
  <rule action='drop' direction='out' priority='40'><ipv6 protocol='icmpv6' type='137'/></rule>
"""
_NO_CONTROL = """\
  <rule action='drop' direction='out' priority='50'>
    <ip protocol='tcp' dstipaddr='$CONTROL4[@1]' dstportstart='$PORT4[@1]'/>
  </rule>
  <rule action='drop' direction='out' priority='60'>
    <ipv6 protocol='tcp' dstipaddr='$CONTROL6[@1]' dstportstart='$PORT6[@1]'/>
  </rule>
"""

FILTERS = {
    # Only what is seen to be its own passes. A VLAN tag hides from ebtables what is in a frame, and what is neither IP
    # nor ARP may be for the switch. Of ARP for other kinds of hardware ebtables sees nothing, and Linux believes it.
    GUEST_MAC: f"""\
<filter name='{GUEST_MAC}' chain='root'>
  <uuid>d25464e4-1908-4f05-afa1-acd9b6b44141</uuid>
{_NO_SERVER}{_NO_CONTROL}\
  <rule action='accept' direction='out' priority='100'><ip srcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='200'><arp srcmacaddr='$MAC' arpsrcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='300'><ipv6 srcmacaddr='$MAC6'/></rule>
  <rule action='drop' direction='out' priority='500'><mac/></rule>
</filter>
""",
    GUEST_ADDRESS: f"""\
<filter name='{GUEST_ADDRESS}' chain='root'>
  <uuid>1e2e5c91-3a39-419c-915b-b9adad333217</uuid>
{_NO_SERVER}{_NO_CONTROL}\
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
"""By name. On each interface: a guest is no DHCP server (its port is 67, DHCPv6's 547) and no router (router
advertisements and redirects are ICMPv6 134 and 137) of its neighbours, and reaches neither etcd nor placement. It sends
IPv4, ARP and, where the network has it, IPv6, all from its own MAC, and nothing else; where it has a reserved address,
IPv4 and ARP are from that alone, or to all, as it asks for one. $MAC6 is its MAC where the network has IPv6.
"""


@dataclass(frozen=True)
class Service:
    """A TCP service that no guest reaches."""

    address: IPv4Address | IPv6Address
    port: int


# A variable of libvirt's has at least one value; nobody listens there.
_NOWHERE = (Service(IPv4Address('0.0.0.0'), 1), Service(IPv6Address('::'), 1))
_NOBODY = '00:00:00:00:00:00'  # Linux's bridge drops what is from it


def reference(
    interface: ET.Element, address: str | None, control: Collection[Service], mac6: str | None, by_dhcp: bool = False
) -> None:
    """Add the filter to a domain's `<interface>`; `address` is its reserved IPv4 address, None for none.

    `control` are the services that the guest may not reach, `mac6` the MAC that it sends IPv6 from, None for no IPv6.
    `by_dhcp`: without a reserved address it sends nothing but DHCP before libvirt has seen which one it is given.
    """
    filtered = ET.SubElement(interface, 'filterref', filter=GUEST_ADDRESS if address or by_dhcp else GUEST_MAC)
    ET.SubElement(filtered, 'parameter', name='MAC6', value=mac6 or _NOBODY)
    if address:
        ET.SubElement(filtered, 'parameter', name='IP', value=address)
    elif by_dhcp:
        ET.SubElement(filtered, 'parameter', name='CTRL_IP_LEARNING', value='dhcp')
    for version, nowhere in zip((4, 6), _NOWHERE, strict=True):
        for each in [each for each in control if each.address.version == version] or [nowhere]:
            ET.SubElement(filtered, 'parameter', name=f'CONTROL{version}', value=str(each.address))
            ET.SubElement(filtered, 'parameter', name=f'PORT{version}', value=str(each.port))


NOT_SERVED = frozenset({'bridge', 'private', 'vepa', 'passthrough', 'hostdev'})
"""Forward modes in which libvirt gives out no addresses: the network is made by others."""
UNITS = {'seconds': 1, 'minutes': 60, 'hours': 3600}
DNSMASQ = 'http://libvirt.org/schemas/network/dnsmasq/1.0'


@dataclass(frozen=True)
class Reservation:
    """One `<host>`: dnsmasq gives this address to this MAC and to no other. `name` is its `name`, '' for none."""

    mac: str
    address: str
    name: str


@dataclass(frozen=True)
class Dhcp:
    """What a network gives out: `ranges` of IPv4 addresses, (first, last), but none of its `own`.

    `seconds` is how long the leases of each range last, 0 for ever. `served` False means that the bridge is not
    libvirt's; `known_only` that only MACs with a reservation are answered; `ipv6` False that the bridge is libvirt's
    and has no IPv6. `unfit`: see Networks.explain_unfit().
    """

    ranges: tuple[tuple[IPv4Address, IPv4Address], ...]
    own: frozenset[IPv4Address]
    reservations: tuple[Reservation, ...]
    served: bool
    known_only: bool = False
    seconds: tuple[int, ...] = ()
    ipv6: bool = True
    unfit: tuple[str, str] = ('', '')

    def lasts(self, address: IPv4Address) -> int:
        """The seconds for which a lease of this address lasts; 0 for ever, or where that is not known."""
        ranges = zip(self.ranges, self.seconds, strict=True)
        return next((seconds for (first, last), seconds in ranges if first <= address <= last), 0)

    def of(self, mac: str) -> Reservation | None:
        """The reservation of a MAC, None if it has none."""
        return next((each for each in self.reservations if each.mac == mac), None)

    def may_give(self, address: IPv4Address) -> bool:
        """Whether the network may give out the address."""
        return address not in self.own and any(first <= address <= last for first, last in self.ranges)


def read_dhcp(xml: str) -> Dhcp:
    """The DHCP of a network by its definition in XML; without `<dhcp>` it has no ranges."""
    root = ET.fromstring(xml)
    forward = root.find('forward')
    ranges, seconds, own, reservations = [], [], set(), []
    of_ipv4 = [each for each in root.iterfind('ip') if each.get('family', 'ipv4') == 'ipv4']
    for element in of_ipv4:
        mask = element.get('prefix') or element.get('netmask') or '32'
        network = IPv4Network((element.get('address', '0.0.0.0'), mask), strict=False)
        own |= {IPv4Address(element.get('address', '0.0.0.0')), network.network_address, network.broadcast_address}
        served_ranges = element.findall('dhcp/range')
        ranges += [(IPv4Address(each.get('start', '')), IPv4Address(each.get('end', ''))) for each in served_ranges]
        seconds += [_lasts(each.find('lease')) for each in served_ranges]
        reservations += [
            Reservation(each.get('mac', '').lower(), each.get('ip', ''), each.get('name', ''))
            for each in element.iterfind('dhcp/host')
        ]
    mode = forward.get('mode', 'nat') if forward is not None else ''
    # https://libvirt.org/formatnetwork.html#network-namespaces, and dnsmasq(8): a reservation sets the tag.
    options = {each.get('value') for each in root.iterfind(f'{{{DNSMASQ}}}options/{{{DNSMASQ}}}option')}
    known_only = 'dhcp-ignore=tag:!known' in options
    served = mode not in NOT_SERVED
    ipv6 = not served or root.get('ipv6') == 'yes' or root.find("ip[@family='ipv6']") is not None
    unfit = _explain_unfit(root, served, of_ipv4, not ranges)
    return Dhcp(tuple(ranges), frozenset(own), tuple(reservations), served, known_only, tuple(seconds), ipv6, unfit)


def _explain_unfit(root: ET.Element, served: bool, of_ipv4: list[ET.Element], rangeless: bool) -> tuple[str, str]:
    name, unfilterable, unaddressed = f'network {root.findtext("name")}', '', ''
    ports = [*root.iterfind('virtualport[@type]'), *root.iterfind("portgroup[@default='yes']/virtualport[@type]")]
    # virDomainActualNetDefValidate() in libvirt's src/conf/domain_conf.c takes a filter for a tap on a Linux bridge.
    if ports or not (served or root.find('bridge') is not None):
        kind = f'a port of {ports[0].get("type")}' if ports else 'the network card itself (macvtap or hostdev)'
        cure = 'name a Linux bridge in its place under `networks:` (docs/howto/bridge.md), as in `{bridge: br0}`'
        unfilterable = f'{name} is {kind}, where libvirt cannot filter guests, so none is made. Fix: {cure}'
    if served and rangeless and any(each.find('dhcp') is not None for each in of_ipv4):
        cure = f'virsh net-update {root.findtext("name")} add ip-dhcp-range "<range start=\'FIRST\' end=\'LAST\'/>"'
        unaddressed = f'{name} has DHCP without a <range>: guests wait for ever. Fix: {cure} --live --config'
    elif served and not of_ipv4 and root.find('ip') is not None:
        cure = 'give it an <ip> of IPv4 with a <dhcp><range> by virsh net-edit, and restart it'
        unaddressed = f'{name} has IPv6 alone: a guest waits for an IPv4 address for ever. Fix: {cure}'
    return unfilterable, unaddressed


def _lasts(lease: ET.Element | None) -> int:
    """The seconds that a range's `<lease>` says; without one dnsmasq's own hour."""
    if lease is None:
        return 3600
    return int(lease.get('expiry', '0')) * UNITS[lease.get('unit', 'minutes')]


def choose_address(dhcp: Dhcp, taken: Set[IPv4Address], mac: str) -> IPv4Address | None:
    """An address in the ranges that is not in `taken`, for one MAC always the same while it is free; None: all are."""
    taken = taken | dhcp.own
    sizes = [int(last) - int(first) + 1 for first, last in dhcp.ranges]
    start = int.from_bytes(hashlib.sha256(mac.encode()).digest()[:8], 'big')
    # One more look than there are addresses that could be in the way.
    for step in range(min(sum(sizes), len(taken) + 1)):
        index = (start + step) % sum(sizes)
        for (first, _), size in zip(dhcp.ranges, sizes, strict=True):
            if index < size:
                if (found := first + index) not in taken:
                    return found
                break
            index -= size
    return None


def host_xml(reservation: Reservation) -> str:
    """The reservation as virNetworkUpdate takes it. dnsmasq tells the guest the name, as its host name."""
    attributes = {'mac': reservation.mac, 'ip': reservation.address, 'name': reservation.name}
    return ET.tostring(ET.Element('host', {key: value for key, value in attributes.items() if value}), 'unicode')
