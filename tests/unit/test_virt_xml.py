"""The XML given to libvirt, whole, against files; and that no value can become markup."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from ecomp.model.guest import Attachment, BaseImage, GuestSpec
from ecomp.virt import image, xml
from ecomp.virt.xml import Service

GOLDEN = Path(__file__).parent / 'golden'
IMAGES = '/var/lib/ecompute/images'
SPEC = GuestSpec(
    instance='0b4e5b1e-4f3c-4b58-9d1f-6f1a3e1f0001',
    compute='c0ffee00-0000-4000-8000-000000000001',
    vcpus=2,
    memory_mb=512,
    disk_gb=3,
    base=BaseImage(f'{IMAGES}/base-cirros.qcow2', 'qcow2', 117_440_512),
    virt_type='qemu',
)
DISK = f'{IMAGES}/{SPEC.instance}.qcow2'
LOG = f'/var/lib/ecompute/console/{SPEC.instance}.log'

V4, V6 = Service(IPv4Address('10.0.0.2'), 2379), Service(IPv6Address('fd00::2'), 8080)
SECOND = Service(IPv4Address('10.0.0.3'), 2379)
TWO = (Attachment('network', 'default'), Attachment('bridge', 'br0'))
CASES = {
    'domain-qemu.xml': xml.domain_xml(SPEC, DISK, LOG),
    'domain-kvm.xml': xml.domain_xml(replace(SPEC, virt_type='kvm'), DISK, LOG, control=[V4, V6, SECOND]),
    'domain-bridge-raw.xml': xml.domain_xml(
        replace(
            SPEC, networks=TWO, reserved=('10.0.0.5', None), base=BaseImage(f'{IMAGES}/base-debian.raw', 'raw', 2**31)
        ),
        DISK,
        LOG,
        without_ipv6=TWO[:1],
        hold_addresses=True,
    ),
    'domain-iso.xml': xml.domain_xml(SPEC, DISK, LOG, seed=f'/var/lib/ecompute/seeds/{SPEC.instance}.iso'),
    'domain-unfiltered.xml': xml.domain_xml(replace(SPEC, reserved=('10.0.0.5',)), DISK, LOG, control=None),
    'volume.xml': xml.volume_xml(f'{SPEC.instance}.qcow2', image.capacity(SPEC), SPEC.base.path, 'qcow2'),
    'volume-no-resize.xml': xml.volume_xml(
        f'{SPEC.instance}.qcow2', image.capacity(replace(SPEC, disk_gb=None)), f'{IMAGES}/base-debian.raw', 'raw'
    ),
    'pool.xml': xml.pool_xml('ecompute', IMAGES),
}


@pytest.mark.parametrize('name', CASES)
def test_whole(name: str) -> None:
    assert CASES[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    'text',
    ['"/><source file="/etc/shadow', "' x='", ']]>', '&x;', '<disk type="file"/>', '-name', 'a b', 'é☃'],
)
def test_no_value_becomes_markup(text: str) -> None:
    plugged = (Attachment('network', text), Attachment('bridge', text))
    spec = replace(SPEC, compute=text, networks=plugged, base=BaseImage(f'/{text}', 'qcow2', 1))
    harmless = replace(SPEC, compute='c', networks=TWO, base=BaseImage('/base', 'qcow2', 1))
    got = ET.fromstring(xml.domain_xml(spec, f'/disk{text}', f'/log{text}'))
    expected = ET.fromstring(xml.domain_xml(harmless, '/disk', '/log'))

    assert [element.tag for element in got.iter()] == [element.tag for element in expected.iter()]
    assert got.find('devices/disk/source').attrib == {'file': f'/disk{text}'}
    assert got.find('devices/disk/backingStore/source').attrib == {'file': f'/{text}'}
    sources = [source.attrib for source in got.findall('devices/interface/source')]
    assert sources == [{'network': text}, {'bridge': text}]
    assert xml.mark(ET.tostring(got.find('metadata')[0], encoding='unicode')) == xml.Mark(SPEC.instance, text)


@pytest.mark.parametrize('text', ['<m/>', '<m uuid="x"/>', '<m compute="x"/>', '<m uuid="" compute="x"/>'])
def test_half_a_mark_is_none(text: str) -> None:
    assert xml.mark(text) is None


def test_capabilities() -> None:
    found = xml.capabilities("""
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
    assert found == xml.Capabilities(frozenset({'qemu'}), 64055, 109)


def test_capabilities_without_a_user_is_root() -> None:
    assert xml.capabilities('<capabilities><host/></capabilities>') == xml.Capabilities(frozenset(), 0, 0)


def test_interfaces() -> None:
    plugged = xml.interfaces(CASES['domain-bridge-raw.xml'])
    bridges = [each.name if each.kind == 'bridge' else '' for each in TWO]
    plugs = [xml.Plug(*each) for each in zip(TWO, bridges, strict=True)]
    assert list(plugged.items()) == list(zip(replace(SPEC, networks=TWO).macs, plugs, strict=True))
    assert xml.interfaces('<domain/>') == {}


def test_a_seed_disk_is_read_only_and_no_base() -> None:
    seed = ET.fromstring(CASES['domain-iso.xml']).findall('devices/disk')[1]
    assert {each.tag: each.attrib for each in seed} == {
        'driver': {'name': 'qemu', 'type': 'raw'},
        'source': {'file': f'/var/lib/ecompute/seeds/{SPEC.instance}.iso'},
        'target': {'dev': 'vdb', 'bus': 'virtio'},
        'readonly': {},
    }
    assert set(xml.disks(CASES['domain-iso.xml'])) - set(xml.disks(CASES['domain-qemu.xml'])) == {
        f'/var/lib/ecompute/seeds/{SPEC.instance}.iso'
    }
    assert 'nocloud' not in CASES['domain-iso.xml']


def test_pool_target() -> None:
    assert xml.pool_target(xml.pool_xml('ecompute', IMAGES)) == IMAGES
    assert xml.pool_target("<pool type='rbd'><name>x</name></pool>") == ''
