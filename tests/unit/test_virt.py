"""The libvirt driver without libvirt: rights, addresses, XML, and the fake."""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.errors import EcompError, UsageError
from ecomp.model.guest import Attachment, BaseImage, GuestSpec
from ecomp.virt import image, libvirt_host, xml
from ecomp.virt.fake import FakeHypervisor
from ecomp.virt.xml import ClosedService, Dhcp, Reservation, choose_address, make_host_xml, parse_dhcp

# Access rights to directories, and the available virtualization type.


QEMU = libvirt_host.QemuUser('qemu', 4711, frozenset({4712, 4713}))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='only root can ask as another user')


@needs_root
@pytest.mark.parametrize(('mode', 'group', 'entry', 'can_enter', 'can_write'), [
    (0o711, 0, (), True, False), (0o700, 0, (), False, False), (0o706, 0, (), False, True),
    (0o710, 4713, (), True, False), (0o701, 4713, (), False, False), (0o700, 0, (2, 1, 4711), True, False),
    (0o700, 0, (8, 7, 4713), True, True),
])  # fmt: skip
def test_access_of_another_user(
    mode: int, group: int, entry: tuple[int, ...], tmp_path: Path, *, can_enter: bool, can_write: bool
) -> None:
    tmp_path.chmod(mode)
    os.chown(tmp_path, 0, group)
    if entry:  # acl(5): tag, permissions and id, for the owner, a user or group, the mask and others
        entries = sorted([(1, 7, 0), (4, 0, 0), entry, (16, 7, 0), (32, 0, 0)])
        acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *each) for each in entries)
        os.setxattr(tmp_path, 'system.posix_acl_access', acl)
    assert libvirt_host.has_access(libvirt_host.ENTER, tmp_path, QEMU) == can_enter
    assert libvirt_host.has_access(libvirt_host.READ_WRITE, tmp_path, QEMU) == can_write
    assert libvirt_host.has_access(libvirt_host.ENTER, tmp_path, libvirt_host.QemuUser('root', 0, frozenset({0})))


@needs_root
def test_unreachable_directory_is_named_with_the_command(tmp_path: Path) -> None:
    (tmp_path / 'a b' / 'images').mkdir(parents=True)
    for step in (tmp_path, *tmp_path.parents):
        if not libvirt_host.has_access(libvirt_host.ENTER, step, QEMU):
            step.chmod(step.stat().st_mode | 0o001)
    assert libvirt_host.explain_blocked(tmp_path / 'a b' / 'images', QEMU) is None
    (tmp_path / 'a b').chmod(0o700)
    quoted = f"'{tmp_path}/a b'"
    problem = libvirt_host.explain_blocked(tmp_path / 'a b' / 'images', QEMU)
    assert problem is not None
    assert problem.what == f'QEMU runs as qemu, which cannot enter {tmp_path}/a b above the disks'
    assert problem.cure == f'setfacl -m u:qemu:x {quoted} || chmod o+x {quoted}'


@needs_root
@pytest.mark.parametrize(('cpu_flag', 'device', 'offered'), list(itertools.product((False, True), repeat=3)))
def test_virt_type(
    *, cpu_flag: bool, device: bool, offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'cpuinfo').write_text('flags : fpu vmx' if cpu_flag else 'flags : fpu')
    (tmp_path / 'kvm').touch()
    (tmp_path / 'kvm').chmod(0o666 if device else 0o600)
    monkeypatch.setattr(libvirt_host, 'CPUINFO', tmp_path / 'cpuinfo')
    monkeypatch.setattr(libvirt_host, 'KVM_DEVICE', tmp_path / 'kvm')
    no_kvm = libvirt_host.explain_no_kvm(QEMU, {'kvm', 'qemu'} if offered else {'qemu'})

    def choose(virt_type: str) -> str:
        return libvirt_host.choose_virt_type(virt_type, no_kvm)

    closed = (
        'qemu cannot open /dev/kvm: guests are emulated, and each start of a guest or of ecompute takes up to a minute '
        'longer. Fix: chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
    )
    assert str(libvirt_host.explain_closed_kvm(QEMU) or '') == ('' if device else closed)
    assert choose('qemu') == 'qemu'
    if cpu_flag and device and offered:
        assert (choose('auto'), choose('kvm')) == ('kvm', 'kvm')
        return
    assert choose('auto') == 'qemu'
    with pytest.raises(UsageError) as refused:
        choose('kvm')
    assert str(refused.value).endswith('. Fix: set `virt_type: auto` in compute.yaml')
    assert ('vmx' in str(refused.value)) == (not cpu_flag)
    assert ('/dev/kvm' in str(refused.value)) == (not device)
    assert ('libvirt' in str(refused.value)) == (not offered)


def test_unknown_virt_type() -> None:
    with pytest.raises(UsageError, match='xen'):
        libvirt_host.choose_virt_type('xen', '')


# DHCP in a libvirt network's definition, and the address that is chosen.


NETWORK = """<network><name>default</name><forward mode='nat'/>
<ip address='10.0.0.1' netmask='255.255.255.0'><dhcp>
<range start='10.0.0.0' end='10.0.0.3'/><range start='10.0.0.254' end='10.0.0.255'/>
<host mac='52:54:00:AA:00:01' name='a' ip='10.0.0.2'/><host name='b' ip='10.0.0.9'/><host mac='52:54:00:aa:00:02'/>
</dhcp></ip>
<ip address='169.254.169.254' netmask='255.255.255.255'/>
<ip family='ipv6' address='fd00::1' prefix='64'><dhcp><range start='fd00::2' end='fd00::ff'/></dhcp></ip>
</network>"""
MAC = '52:54:00:00:00:01'
macs = st.integers(0, 2**24 - 1).map(lambda number: f'52:54:00:{number.to_bytes(3, "big").hex(":")}')


def make_addresses(*last: int) -> set[IPv4Address]:
    return {IPv4Address(f'10.0.0.{number}') for number in last}


def test_read_dhcp() -> None:
    dhcp = parse_dhcp(NETWORK)
    assert [(str(first), str(last)) for first, last in dhcp.ranges] == [
        ('10.0.0.0', '10.0.0.3'),
        ('10.0.0.254', '10.0.0.255'),
    ]
    assert dhcp.own_addresses == {*make_addresses(0, 1, 255), IPv4Address('169.254.169.254')}
    assert dhcp.find_reservation('52:54:00:aa:00:01') == Reservation('52:54:00:aa:00:01', '10.0.0.2', 'a')
    assert dhcp.find_reservation(MAC) is None
    assert dhcp.is_served
    assert [last for last in range(256) if dhcp.can_give(IPv4Address(f'10.0.0.{last}'))] == [2, 3, 254]


@given(macs, st.sets(st.sampled_from([2, 3, 254])))
def test_chosen_address_is_free_and_stable(mac: str, used: set[int]) -> None:
    dhcp = parse_dhcp(NETWORK)
    chosen = choose_address(dhcp, make_addresses(*used), mac)
    assert chosen == choose_address(dhcp, make_addresses(*used), mac)
    if len(used) == 3:
        assert chosen is None
    else:
        assert chosen in make_addresses(2, 3, 254) - make_addresses(*used)
        first = choose_address(dhcp, set(), mac)
        assert first in make_addresses(*used) or chosen == first


def test_address_is_chosen_in_a_wide_range() -> None:
    wide = Dhcp(((IPv4Address('10.0.0.0'), IPv4Address('10.255.255.255')),), frozenset(), (), True)
    assert choose_address(wide, set(), MAC) is not None


def test_host_xml_omits_missing_attributes() -> None:
    assert make_host_xml(Reservation(MAC, '10.0.0.2', '"x')) == f'<host mac="{MAC}" ip="10.0.0.2" name="&quot;x" />'
    assert make_host_xml(Reservation('', '10.0.0.2', 'b')) == '<host ip="10.0.0.2" name="b" />'


# The fake alone: its guests are kept in a file.


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        *(('fake.json', each) for each in ('', '{', '{}x', '[1]', '[{"instance": "x"}]', '{"a": 1}')),
        *(
            ('fake-reserved.json', each)
            for each in ('', '{', '[1]', 'null', '{"52:54:00:00:00:01": 7}', '{"x": [1, 2, 3]}')
        ),
        *(('fake-seeds.json', each) for each in ('', '{', '7', 'null')),
    ],
)
def test_foreign_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(EcompError, match=rf'{re.escape(name)} .* remove the file'):
        FakeHypervisor(tmp_path).prepare()


def test_fake_offers_no_kvm() -> None:
    assert FakeHypervisor().choose_virt_type('auto') == 'qemu'
    with pytest.raises(UsageError):
        FakeHypervisor().choose_virt_type('kvm')


def test_libvirt_is_not_needed() -> None:
    """Neither eschedule nor `ecompute --fake` needs libvirt-python, unlike the real driver."""
    script = """
import sys
sys.modules['libvirt'] = None
import ecomp.virt, ecomp.virt.fake, ecomp.virt.xml, ecomp.virt.image
from ecomp.errors import UsageError
try:
    import ecomp.virt.libvirt_host
except UsageError as error:
    assert f"then run `{sys.executable} -m pip install '.[hypervisor]'` in a clone of ecomp" in str(error), error
else:
    sys.exit('no UsageError')
"""
    subprocess.run([sys.executable, '-c', script], check=True, env={'PYTHONPATH': ':'.join(sys.path)})


# The XML for libvirt, compared with golden files; no value can become markup.


GOLDEN = Path(__file__).parent / 'golden'
IMAGES = '/var/lib/ecompute/images'
FULL = GuestSpec(
    instance='0b4e5b1e-4f3c-4b58-9d1f-6f1a3e1f0001', compute='c0ffee00-0000-4000-8000-000000000001', vcpus=2,
    memory_mb=512, disk_gb=3, base=BaseImage(f'{IMAGES}/base-cirros.qcow2', 'qcow2', 117_440_512), virt_type='qemu',
)  # fmt: skip
DISK = f'{IMAGES}/{FULL.instance}.qcow2'
LOG = f'/var/lib/ecompute/console/{FULL.instance}.log'

V4 = ClosedService(IPv4Address('10.0.0.2'), 2379)
V6 = ClosedService(IPv6Address('fd00::2'), 8080)
SECOND = ClosedService(IPv4Address('10.0.0.3'), 2379)
TWO = (Attachment('network', 'default'), Attachment('bridge', 'br0'))
CASES = {
    'domain-qemu.xml': xml.make_domain_xml(FULL, DISK, LOG),
    'domain-kvm.xml': xml.make_domain_xml(replace(FULL, virt_type='kvm'), DISK, LOG, blocked_services=[V4, V6, SECOND]),
    'domain-bridge-raw.xml': xml.make_domain_xml(
        replace(
            FULL,
            networks=TWO,
            reserved_addresses=('10.0.0.5', None),
            base=BaseImage(f'{IMAGES}/base-debian.raw', 'raw', 2**31),
        ),
        DISK,
        LOG,
        without_ipv6=TWO[:1],
        hold_addresses=True,
    ),
    'domain-iso.xml': xml.make_domain_xml(FULL, DISK, LOG, seed=f'/var/lib/ecompute/seeds/{FULL.instance}.iso'),
    'domain-unfiltered.xml': xml.make_domain_xml(
        replace(FULL, reserved_addresses=('10.0.0.5',)), DISK, LOG, blocked_services=None
    ),
    'volume.xml': xml.make_volume_xml(
        f'{FULL.instance}.qcow2', image.determine_capacity(FULL), FULL.base.path, 'qcow2'
    ),
    'volume-no-resize.xml': xml.make_volume_xml(
        f'{FULL.instance}.qcow2',
        image.determine_capacity(replace(FULL, disk_gb=None)),
        f'{IMAGES}/base-debian.raw',
        'raw',
    ),
    'pool.xml': xml.make_pool_xml('ecompute', IMAGES),
}


@pytest.mark.parametrize('name', CASES)
def test_xml_equals_the_golden_file(name: str) -> None:
    assert CASES[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    'text', ['"/><source file="/etc/shadow', "' x='", ']]>', '&x;', '<disk type="file"/>', '-name', 'a b', 'é☃']
)
def test_no_value_becomes_markup(text: str) -> None:
    attachments = (Attachment('network', text), Attachment('bridge', text))
    spec = replace(FULL, compute=text, networks=attachments, base=BaseImage(f'/{text}', 'qcow2', 1))
    harmless = replace(FULL, compute='c', networks=TWO, base=BaseImage('/base', 'qcow2', 1))
    root = ET.fromstring(xml.make_domain_xml(spec, f'/disk{text}', f'/log{text}'))
    expected = ET.fromstring(xml.make_domain_xml(harmless, '/disk', '/log'))

    assert [element.tag for element in root.iter()] == [element.tag for element in expected.iter()]
    assert root.find('devices/disk/source').attrib == {'file': f'/disk{text}'}
    assert root.find('devices/disk/backingStore/source').attrib == {'file': f'/{text}'}
    sources = [source.attrib for source in root.findall('devices/interface/source')]
    assert sources == [{'network': text}, {'bridge': text}]
    mark = ET.tostring(root.find('metadata')[0], encoding='unicode')
    assert xml.parse_owner_mark(mark, FULL.instance) == (text, 0)
    assert xml.parse_owner_mark(mark, 'other') == (None, 0)


@pytest.mark.parametrize('text', ['<m/>', '<m uuid="x"/>', '<m compute="x"/>', '<m uuid="" compute="x"/>'])
def test_incomplete_owner_mark_is_ignored(text: str) -> None:
    assert xml.parse_owner_mark(text, 'x') == (None, 0)


def test_owner_mark_has_the_number_of_a_rebuild() -> None:
    root = ET.fromstring(xml.make_domain_xml(replace(FULL, rebuilt=1606754775), '/disk', '/log'))
    mark = ET.tostring(root.find('metadata')[0], encoding='unicode')
    assert xml.parse_owner_mark(mark, FULL.instance) == (FULL.compute, 1606754775)
    junk = mark.replace('1606754775', '-1')
    assert xml.parse_owner_mark(junk, FULL.instance) == (FULL.compute, 0)


def test_capabilities() -> None:
    capabilities = xml.parse_capabilities("""
        <capabilities>
          <host>
            <secmodel><model>none</model></secmodel>
            <secmodel><model>dac</model>
              <baselabel type='kvm'>+64055:+109</baselabel><baselabel type='qemu'>+64055:+109</baselabel></secmodel>
          </host>
          <guest><os_type>hvm</os_type><arch name='i686'><domain type='kvm'/></arch></guest>
          <guest><os_type>xen</os_type><arch name='x86_64'><domain type='xen'/></arch></guest>
          <guest><os_type>hvm</os_type><arch name='x86_64'><domain type='qemu'/></arch></guest>
        </capabilities>""")
    assert capabilities == xml.Capabilities(frozenset({'qemu'}), 64055, 109)


def test_interfaces() -> None:
    interfaces = xml.parse_interfaces(CASES['domain-bridge-raw.xml'])
    bridges = [attachment.name if attachment.kind == 'bridge' else '' for attachment in TWO]
    plugs = [xml.InterfaceLink(*attachment) for attachment in zip(TWO, bridges, strict=True)]
    links = [(mac, link._replace(filter_binding='')) for mac, link in interfaces.items()]
    assert links == list(zip(replace(FULL, networks=TWO).macs, plugs, strict=True))
    assert xml.parse_interfaces('<domain/>') == {}


def test_binding_of_our_filter_is_that_of_the_interface() -> None:
    text = CASES['domain-bridge-raw.xml']
    for mac, link in xml.parse_interfaces(text).items():
        binding = ET.fromstring(link.filter_binding)
        assert [part.tag for part in binding] == ['owner', 'portdev', 'mac', 'filterref']
        assert [binding.findtext(f'owner/{tag}') for tag in ('name', 'uuid')] == [FULL.instance, FULL.instance]
        assert [part.attrib for part in binding.iterfind('mac')] == [{'address': mac}]
        assert binding.find("filterref/parameter[@name='MAC6']") is not None
    foreign = text.replace('ecompute-guest-', 'clean-traffic-')
    assert {link.filter_binding for link in xml.parse_interfaces(foreign).values()} == {''}
