"""Test disks on a real libvirt: pools and overlays that are changed, full or foreign."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ecomp.errors import BuildFailed, Conflict, Unreachable
from ecomp.model.guest import Attachment, GuestSpec
from tests.functional.guest import COMPUTE, FOREIGN, MakeSpec, build
from tests.functional.libvirt_host import LibvirtHost

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import xml  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402
from ecomp.virt.volumes import POOL, Volumes  # noqa: E402


def remove_pool(connection: Any) -> None:
    pool = connection.storagePoolLookupByName(POOL)
    pool.destroy()
    pool.undefine()


def disk(real: Libvirt, spec: GuestSpec) -> Path:
    directory = real.image_directory()
    assert directory is not None
    return directory / f'{spec.instance}.qcow2'


@pytest.mark.parametrize('spoil', [remove_pool, lambda connection: connection.storagePoolLookupByName(POOL).destroy()])
def test_a_pool_that_somebody_removed_or_stopped_is_started_again(
    real: Libvirt, spec: GuestSpec, connection: Any, spoil: Callable[[Any], object]
) -> None:
    spoil(connection)
    real.create_disk(spec)
    assert disk(real, spec).exists()
    assert real.guests().keys() == {spec.instance}
    spoil(connection)
    real.delete_disk(spec.instance)
    assert not disk(real, spec).exists()
    assert real.guests() == {}
    pool = connection.storagePoolLookupByName(POOL)
    assert pool.isActive()
    assert pool.autostart()


def test_a_disk_in_a_pool_that_is_over_another_directory_by_now_is_not_called_removed(
    real: Libvirt, spec: GuestSpec, connection: Any, tmp_path: Path
) -> None:
    real.create_disk(spec)
    remove_pool(connection)
    connection.storagePoolDefineXML(xml.pool_xml(POOL, str(tmp_path))).create()
    try:
        with pytest.raises(Conflict, match='is over'):
            real.delete_disk(spec.instance)
        assert disk(real, spec).exists()
    finally:
        remove_pool(connection)
        real.prepare()
    real.delete_disk(spec.instance)
    assert not disk(real, spec).exists()


def test_a_disk_that_is_a_link_to_nowhere_is_removed(real: Libvirt, spec: GuestSpec) -> None:
    real.create_disk(spec)
    disk(real, spec).unlink()
    disk(real, spec).symlink_to('/nowhere/disk.qcow2')
    real.delete_disk(spec.instance)
    assert spec.instance not in real.guests()


def test_a_guest_that_could_not_be_started_has_not_crashed(real: Libvirt, spec: GuestSpec) -> None:
    build(real, spec)
    real.switch_off(spec.instance, COMPUTE)
    disk(real, spec).unlink()
    with pytest.raises(BuildFailed):
        real.resume(spec.instance, COMPUTE)
    assert real.guests()[spec.instance].trouble == ''


def test_no_guest_is_made_without_filters_where_there_were_some(
    host: LibvirtHost, real: Libvirt, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert real.filters
    worker, spec = Libvirt(host.root / 'state', uri=host.uri, filters=real.filters), make_spec()
    with monkeypatch.context() as patch:
        patch.setattr('ecomp.virt.libvirt_host.search_path', lambda: '/nowhere')
        with pytest.raises(Unreachable, match='ebtables is not installed.*no guest is made'):
            build(worker, spec)
    assert not real.runs(spec.instance)
    build(worker, spec)
    assert real.runs(spec.instance)
    worker.close()


def test_no_guest_is_made_beside_an_etcd_without_an_address(host: LibvirtHost, spec: GuestSpec) -> None:
    with closing(Libvirt(host.root / 'state', uri=host.uri, control=[('etcd.invalid', 2379)], filters=True)) as worker:
        with pytest.raises(Unreachable, match=r'etcd\.invalid'):
            build(worker, spec)
        assert not worker.runs(spec.instance)
        worker.delete_disk(spec.instance)


def test_the_images_own_size(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    build(real, replace(spec, disk_gb=None))
    assert connection.lookupByUUIDString(spec.instance).blockInfo('vda')[0] == spec.base.virtual_size


def test_a_missing_base(real: Libvirt, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed, match='disk: the base volume /gone is gone'):
        real.create_disk(replace(spec, base=replace(spec.base, path='/gone')))
    assert real.guests() == {}


def test_a_base_that_went_away(real: Libvirt, spec: GuestSpec, make_spec: MakeSpec) -> None:
    other, other_base = make_spec(), Path(spec.base.path).with_name('other.raw')
    other_base.write_bytes(Path(spec.base.path).read_bytes())
    real.create_disk(spec)
    real.create_disk(replace(other, base=replace(other.base, path=str(other_base))))
    assert real.without_base() == {}
    other_base.unlink()
    assert real.without_base() == {other.instance: str(other_base)}


def test_a_stranger_that_has_a_disk_of_ours(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    real.create_disk(spec)
    path = real.image_directory() / f'{spec.instance}.qcow2'
    device = f"<disk type='file' device='disk'><source file='{path}'/><target dev='vda'/></disk>"
    text = FOREIGN.format(name='stranger', uuid=uuid4()).replace('</domain>', f'<devices>{device}</devices></domain>')
    stranger = connection.defineXML(text)
    try:
        assert real.users(spec.instance) == {'stranger'}
    finally:
        stranger.undefine()
    assert real.users(spec.instance) == set()


def test_a_half_made_build_is_made_anew(real: Libvirt, spec: GuestSpec, connection: object) -> None:
    """Check a defined domain whose bridge is missing and whose disk libvirt does not list."""
    real.create_disk(spec)
    with pytest.raises(BuildFailed, match=r'started: .*br-none'):
        real.start(replace(spec, networks=(Attachment('bridge', 'br-none'),)))
    guest = real.guests()[spec.instance]
    assert (guest.defined, guest.running) == (True, False)
    disk = real.image_directory() / f'{spec.instance}.qcow2'
    disk.unlink()
    connection.storagePoolLookupByName('ecompute').refresh()
    disk.write_bytes(b'half')
    build(real, spec)
    assert real.guests()[spec.instance].running
    assert disk.stat().st_size > 1000


def test_a_disk_removed_by_hand(real: Libvirt, spec: GuestSpec) -> None:
    disk = real.image_directory() / f'{spec.instance}.qcow2'
    real.create_disk(spec)
    disk.unlink()
    assert real.guests() == {}
    real.create_disk(spec)
    assert disk.exists()
    disk.unlink()
    real.delete_disk(spec.instance)
    real.create_disk(spec)


def test_a_pool_that_another_worker_starts_is_used(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec, connection: object
) -> None:
    pool, tries = connection.storagePoolLookupByName('ecompute'), []
    pool.destroy()

    def find(each: libvirt.virStoragePool) -> None:
        tries.append(each)
        try:
            each.storageVolLookupByName(f'{spec.instance}.qcow2')
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID:
                pool.create()  # the other worker, before we check whether the pool is active
            raise

    with pytest.raises(libvirt.libvirtError) as caught:
        Volumes(Connection(host.uri), real.image_directory())._in_pool(connection, find)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_VOL
    assert len(tries) == 2


@pytest.mark.parametrize('runs', [False, True])
def test_a_disk_that_a_stranger_has_stays(real: Libvirt, spec: GuestSpec, connection: object, runs: bool) -> None:
    real.create_disk(spec)
    path = real.image_directory() / f'{spec.instance}.qcow2'
    disk = f"<disk type='file'><driver name='qemu' type='qcow2'/><source file='{path}'/><target dev='vda'/></disk>"
    definition = FOREIGN.format(name='theirs', uuid=spec.instance)
    foreign = connection.defineXML(definition.replace('</os>', f'</os><devices>{disk}</devices>'))
    try:
        if runs:
            foreign.create()
        real.destroy(spec.instance, COMPUTE)
        with pytest.raises(Conflict, match=r'domain theirs \(.*\), not made by ecompute, has .*: that is not removed'):
            real.delete_disk(spec.instance)
        assert path.exists()
        assert foreign.isActive() == runs
    finally:
        if runs:
            foreign.destroy()
        foreign.undefine()
    real.delete_disk(spec.instance)
    assert not path.exists()


def test_only_uuids_are_overlays(real: Libvirt) -> None:
    uuid = 'abcdef00-0000-4000-8000-00000000abcd'
    names = ['base-1.qcow2', 'x.qcow2', f'{uuid}.raw', f'{uuid.upper()}.qcow2', f'{{{uuid}}}.qcow2', f'{uuid}.part']
    files = [real.image_directory() / name for name in names]
    for file in files:
        file.touch()
    try:
        assert real.guests() == {}
    finally:
        for file in files:
            file.unlink()


def test_a_directory_that_is_away_is_not_empty(real: Libvirt) -> None:
    images = real.image_directory()
    images.rename(images.with_name('away'))
    try:
        with pytest.raises(Unreachable, match='mounted'):
            real.guests()
    finally:
        images.with_name('away').rename(images)


def fill(file: Path) -> None:
    with file.open('wb', buffering=0) as filler, suppress(OSError):
        while filler.write(b'x' * 4096):
            pass


def test_disk_full(host: LibvirtHost, real: Libvirt, spec: GuestSpec, connection: object) -> None:
    pool = connection.storagePoolLookupByName('ecompute')
    pool.destroy()
    pool.undefine()
    small = Libvirt(host.root / 'small', uri=host.uri)
    try:
        small.prepare()
        fill(host.root / 'small' / 'filler')
        with pytest.raises(BuildFailed, match=r'disk: the file system of .*/images is full: \d+ KiB'):
            small.create_disk(spec)
        assert small.guests() == {}
        assert list(small.image_directory().iterdir()) == []
        (host.root / 'small' / 'filler').unlink()
        build(small, spec)
        small.destroy(spec.instance, COMPUTE)
        small.delete_disk(spec.instance)
    finally:
        small.close()
        pool = connection.storagePoolLookupByName('ecompute')
        pool.destroy()
        pool.undefine()
        real.prepare()
