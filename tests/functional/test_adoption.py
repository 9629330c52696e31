"""Domains that plain libvirt made are listed, marked and switched, and otherwise left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ecomp.errors import BuildFailed, Conflict
from ecomp.model.guest import Guest, GuestSpec
from tests.functional.guest import COMPUTE

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402

DOMAIN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='KiB'>33000</memory>
<currentMemory unit='MiB'>16</currentMemory><vcpu>2</vcpu><metadata><own xmlns='urn:someone'>kept</own></metadata>
<os><type>hvm</type></os><devices>{devices}</devices></domain>"""
DISK = """<disk type='file' device='disk'><driver name='qemu' type='{form}'/><source file='{path}'/>
<target dev='{dev}'/></disk>"""
CD = "<disk type='file' device='cdrom'><source file='{path}'/><target dev='hdc'/></disk>"
NETWORK = "<interface type='network'><source network='default'/><mac address='52:54:00:aa:bb:cc'/></interface>"
CONSOLE = "<serial type='pty'/><console type='pty'/>"
SIZE = {'VCPU': 2, 'MEMORY_MB': 33}  # of 33,000 KiB

MakeDomain = Callable[..., Any]


@pytest.fixture
def make_domain(connection: Any) -> Iterator[MakeDomain]:
    made = []

    def make(name: str, *devices: str, running: bool = False, transient: bool = False) -> Any:
        text = DOMAIN.format(name=name, uuid=uuid4(), devices=''.join(devices))
        domain = connection.createXML(text) if transient else connection.defineXML(text)
        made.append(domain)
        if running:
            domain.create()
        return domain

    yield make
    for domain in made:
        with suppress(libvirt.libvirtError):
            domain.destroy()
        with suppress(libvirt.libvirtError):
            domain.undefine()


def describe(domain: Any) -> tuple[str, str]:
    """Describe a domain without what libvirt changes by itself."""
    live = domain.XMLDesc() if domain.isActive() else ''
    return domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE), live


def without_mark(text: str) -> str:
    start, end = text.find('<ecomp-adopted:'), text.find('/>', text.find('<ecomp-adopted:')) + 2
    assert start > 0, text
    return text[:start].rstrip() + text[end:]


def squeeze(text: str) -> str:
    return ''.join(text.split())


@pytest.mark.slow
def test_guests_of_others_are_listed_with_their_real_size(real_libvirt: Libvirt, make_domain: MakeDomain) -> None:
    pool = real_libvirt.get_image_directory()
    assert pool is not None
    raw, qcow, elsewhere = pool / 'their.raw', pool / 'their.qcow2', Path('/dev/shm') / f'{uuid4()}.raw'
    for path, form, size in ((raw, 'raw', '1500M'), (qcow, 'qcow2', '2G'), (elsewhere, 'raw', '3G')):
        subprocess.run(['qemu-img', 'create', '-q', '-f', form, path, size], check=True)
    fifo = pool / 'fifo'
    os.mkfifo(fifo)  # libvirt would wait forever to open it
    try:
        disks = [DISK.format(form='raw', path=raw, dev='hda'), DISK.format(form='qcow2', path=qcow, dev='hdb')]
        disks += [DISK.format(form='raw', path=elsewhere, dev='hdd'), CD.format(path=raw)]
        large = make_domain('Odd_Name', *disks, NETWORK, CONSOLE)
        bare, lost = (
            make_domain('bare', running=True),
            make_domain('lost', DISK.format(form='raw', path='/gone', dev='hda')),
        )
        passing = make_domain('passing', transient=True)
        make_domain('piped', DISK.format(form='raw', path=fifo, dev='hda'))
        foreign = {each.name: each for each in real_libvirt.list_foreign().values()}
        assert foreign.keys() == {'Odd_Name', 'bare', 'lost', 'passing', 'piped'}
        odd = foreign['Odd_Name']
        # 1,500 MiB and 2 GiB are on the file system of the pool, and together 4 whole GiB.
        assert (odd.instance, odd.size) == (large.UUIDString(), {**SIZE, 'DISK_GB': 4})
        assert odd.disks == (str(raw), str(qcow), str(elsewhere))
        assert (odd.interfaces, odd.has_console) == ((('default', '52:54:00:aa:bb:cc'),), True)
        assert (foreign['bare'].state, foreign['passing'].state) == ('running', 'running, transient')
        for name in ('lost', 'piped'):
            assert (foreign[name].size, foreign[name].state) == (SIZE, 'off')
        assert real_libvirt.list_foreign(odd.instance) == {odd.instance: odd}
        assert real_libvirt.list_foreign(str(uuid4())) == {}
        assert bare.isActive()
        assert passing.isActive()
        assert lost.info()[0] == libvirt.VIR_DOMAIN_SHUTOFF
    finally:
        elsewhere.unlink()
        raw.unlink()
        qcow.unlink()
        fifo.unlink()


@pytest.mark.parametrize('running', [pytest.param(False, marks=pytest.mark.slow), True])
def test_adoption_changes_a_domain_by_its_mark_alone(
    real_libvirt: Libvirt, make_domain: MakeDomain, spec: GuestSpec, running: bool
) -> None:
    domain = make_domain('theirs', NETWORK, CONSOLE, running=running)
    domain.setAutostart(1)
    instance, before = domain.UUIDString(), describe(domain)
    for _ in range(2):
        real_libvirt.set_adoption(instance, COMPUTE)
    marked = describe(domain)
    assert [squeeze(without_mark(text)) for text in marked if text] == [squeeze(text) for text in before if text]
    guest = real_libvirt.list_guests()[instance]
    assert guest == Guest(instance, COMPUTE, defined=True, running=running, disk=True, is_adopted=True)
    assert guest.describe_trouble(SIZE) == ''
    assert real_libvirt.list_foreign()[instance].adopted_by == COMPUTE
    # Nothing but the power is changed, and another compute does not even do that.
    assert real_libvirt.list_computes() == set()
    real_libvirt.disable_autostart()
    real_libvirt.restore_filters()
    real_libvirt.replug_interfaces()
    real_libvirt.destroy(instance, COMPUTE)
    real_libvirt.delete_disk(instance)
    real_libvirt.release_addresses(instance)
    with pytest.raises(Conflict, match='not created by ecompute'):
        real_libvirt.start(replace(spec, instance=instance))
    with pytest.raises(Conflict, match='belongs to compute'):
        real_libvirt.switch_off(instance, str(uuid4()))
    assert (describe(domain), domain.autostart(), domain.isActive()) == (marked, 1, running)
    (real_libvirt.switch_off if running else real_libvirt.start_existing)(instance, COMPUTE)
    assert domain.isActive() != running
    for _ in range(2):
        real_libvirt.set_adoption(instance, None)
    assert squeeze(describe(domain)[0]) == squeeze(before[0])
    assert instance not in real_libvirt.list_guests()
    assert domain.isActive() != running


@pytest.mark.slow
def test_transient_domain_is_not_switched_off(real_libvirt: Libvirt, make_domain: MakeDomain) -> None:
    domain = make_domain('passing', transient=True)
    instance = domain.UUIDString()
    real_libvirt.set_adoption(instance, COMPUTE)
    assert real_libvirt.list_guests()[instance] == Guest(instance, COMPUTE, False, True, True, is_adopted=True)
    for change in (real_libvirt.switch_off, real_libvirt.shutdown):
        with pytest.raises(Conflict, match='is transient: switched off, it would be gone'):
            change(instance, COMPUTE)
    assert domain.isActive()


@pytest.mark.slow
def test_our_own_or_a_missing_domain_is_not_adopted(real_libvirt: Libvirt, spec: GuestSpec) -> None:
    real_libvirt.set_adoption(spec.instance, None)
    with pytest.raises(BuildFailed, match='its domain is gone'):
        real_libvirt.set_adoption(spec.instance, COMPUTE)
    real_libvirt.create_disk(spec)
    real_libvirt.start(spec)
    with pytest.raises(Conflict, match='was created by ecompute'):
        real_libvirt.set_adoption(spec.instance, str(uuid4()))
    assert real_libvirt.list_foreign() == {}
