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
from tests.functional.guest import COMPUTE, FOREIGN_DOMAIN_XML, MakeSpec, build
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


def get_disk_path(real: Libvirt, spec: GuestSpec) -> Path:
    directory = real.get_image_directory()
    assert directory is not None
    return directory / f'{spec.instance}.qcow2'


@pytest.mark.parametrize('spoil', [remove_pool, lambda connection: connection.storagePoolLookupByName(POOL).destroy()])
def test_removed_or_stopped_pool_is_started_again(
    real_libvirt: Libvirt, spec: GuestSpec, connection: Any, spoil: Callable[[Any], object]
) -> None:
    spoil(connection)
    real_libvirt.create_disk(spec)
    assert get_disk_path(real_libvirt, spec).exists()
    assert real_libvirt.list_guests().keys() == {spec.instance}
    spoil(connection)
    real_libvirt.delete_disk(spec.instance)
    assert not get_disk_path(real_libvirt, spec).exists()
    assert real_libvirt.list_guests() == {}
    pool = connection.storagePoolLookupByName(POOL)
    assert pool.isActive()
    assert pool.autostart()


def test_disk_is_not_deleted_through_a_pool_of_another_directory(
    real_libvirt: Libvirt, spec: GuestSpec, connection: Any, tmp_path: Path
) -> None:
    real_libvirt.create_disk(spec)
    remove_pool(connection)
    connection.storagePoolDefineXML(xml.make_pool_xml(POOL, str(tmp_path))).create()
    try:
        with pytest.raises(Conflict, match='is in .* it belongs to another ecompute'):
            real_libvirt.delete_disk(spec.instance)
        assert get_disk_path(real_libvirt, spec).exists()
    finally:
        remove_pool(connection)
        real_libvirt.prepare()
    real_libvirt.delete_disk(spec.instance)
    assert not get_disk_path(real_libvirt, spec).exists()


def test_disk_that_is_a_broken_link_is_removed(real_libvirt: Libvirt, spec: GuestSpec) -> None:
    real_libvirt.create_disk(spec)
    get_disk_path(real_libvirt, spec).unlink()
    get_disk_path(real_libvirt, spec).symlink_to('/nowhere/disk.qcow2')
    real_libvirt.delete_disk(spec.instance)
    assert spec.instance not in real_libvirt.list_guests()


def test_guest_is_not_built_if_filters_disappeared(
    host: LibvirtHost, real_libvirt: Libvirt, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert real_libvirt.has_filters
    worker, spec = Libvirt(host.root / 'state', uri=host.uri, has_filters=real_libvirt.has_filters), make_spec()
    with monkeypatch.context() as patch:
        patch.setattr('ecomp.virt.libvirt_host.get_search_path', lambda: '/nowhere')
        with pytest.raises(Unreachable, match='ebtables is not installed.*starts no guest'):
            build(worker, spec)
    assert not real_libvirt.is_running(spec.instance)
    with pytest.raises(BuildFailed, match='br-none'):  # the filters are back
        build(worker, replace(spec, networks=(Attachment('bridge', 'br-none'),)))
    worker.close()


def test_guest_is_not_built_if_etcd_s_name_has_no_address(host: LibvirtHost, spec: GuestSpec) -> None:
    with closing(
        Libvirt(host.root / 'state', uri=host.uri, control_endpoints=[('etcd.invalid', 2379)], has_filters=True)
    ) as worker:
        with pytest.raises(Unreachable, match=r'etcd\.invalid'):
            build(worker, spec)
        assert not worker.is_running(spec.instance)
        worker.delete_disk(spec.instance)


def test_disk_without_a_size_has_the_image_s_size(real_libvirt: Libvirt, spec: GuestSpec, connection: Any) -> None:
    real_libvirt.create_disk(replace(spec, disk_gb=None))
    volume = connection.storageVolLookupByPath(str(get_disk_path(real_libvirt, spec)))
    assert volume.info()[1] == spec.base.virtual_size


def test_missing_base_volume_fails_the_build(real_libvirt: Libvirt, spec: GuestSpec) -> None:
    with pytest.raises(BuildFailed, match='disk: the base volume /gone is missing'):
        real_libvirt.create_disk(replace(spec, base=spec.base._replace(path='/gone')))
    assert real_libvirt.list_guests() == {}


def test_overlay_of_a_deleted_base_volume_is_listed(
    real_libvirt: Libvirt, spec: GuestSpec, make_spec: MakeSpec
) -> None:
    other, other_base = make_spec(), Path(spec.base.path).with_name('other.raw')
    other_base.write_bytes(Path(spec.base.path).read_bytes())
    real_libvirt.create_disk(spec)
    real_libvirt.create_disk(replace(other, base=other.base._replace(path=str(other_base))))
    assert real_libvirt.list_missing_bases() == {}
    other_base.unlink()
    assert real_libvirt.list_missing_bases() == {other.instance: str(other_base)}


def test_foreign_domain_with_our_disk_is_listed_as_user(
    real_libvirt: Libvirt, spec: GuestSpec, connection: object
) -> None:
    real_libvirt.create_disk(spec)
    path = real_libvirt.get_image_directory() / f'{spec.instance}.qcow2'
    device = f"<disk type='file' device='disk'><source file='{path}'/><target dev='vda'/></disk>"
    text = FOREIGN_DOMAIN_XML.format(name='stranger', uuid=uuid4()).replace(
        '</domain>', f'<devices>{device}</devices></domain>'
    )
    stranger = connection.defineXML(text)
    try:
        assert real_libvirt.list_disk_users(spec.instance) == {'stranger'}
    finally:
        stranger.undefine()
    assert real_libvirt.list_disk_users(spec.instance) == set()


def test_partial_build_is_repeated(real_libvirt: Libvirt, spec: GuestSpec, connection: object) -> None:
    """Check a defined domain whose bridge is missing and whose disk libvirt does not list."""
    real_libvirt.create_disk(spec)
    with pytest.raises(BuildFailed, match=r'started: .*br-none'):
        real_libvirt.start(replace(spec, networks=(Attachment('bridge', 'br-none'),)))
    guest = real_libvirt.list_guests()[spec.instance]
    assert (guest.defined, guest.running) == (True, False)
    disk = real_libvirt.get_image_directory() / f'{spec.instance}.qcow2'
    disk.unlink()
    connection.storagePoolLookupByName('ecompute').refresh()
    disk.write_bytes(b'half')
    build(real_libvirt, spec)
    assert real_libvirt.list_guests()[spec.instance].running
    assert disk.stat().st_size > 1000
    # One that fails to start again did not crash.
    real_libvirt.switch_off(spec.instance, COMPUTE)
    disk.unlink()
    with pytest.raises(BuildFailed):
        real_libvirt.start_existing(spec.instance, COMPUTE)
    assert real_libvirt.list_guests()[spec.instance].troubles == ()


def test_disk_removed_outside_ecomp_is_recreated(real_libvirt: Libvirt, spec: GuestSpec) -> None:
    disk = real_libvirt.get_image_directory() / f'{spec.instance}.qcow2'
    real_libvirt.create_disk(spec)
    disk.unlink()
    assert real_libvirt.list_guests() == {}
    real_libvirt.create_disk(spec)
    assert disk.exists()
    disk.unlink()
    real_libvirt.delete_disk(spec.instance)
    real_libvirt.create_disk(spec)


def test_pool_started_by_another_worker_is_used(
    host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec, connection: object
) -> None:
    pool, tries = connection.storagePoolLookupByName('ecompute'), []
    pool.destroy()

    def find(active_pool: libvirt.virStoragePool) -> None:
        tries.append(active_pool)
        try:
            active_pool.storageVolLookupByName(f'{spec.instance}.qcow2')
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID:
                pool.create()  # the other worker, before we check whether the pool is active
            raise

    with pytest.raises(libvirt.libvirtError) as caught:
        Volumes(Connection(host.uri), real_libvirt.get_image_directory())._run_in_pool(connection, find)
    assert caught.value.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_VOL
    assert len(tries) == 2


# test_libvirt.py::test_foreign_domains_are_ignored_and_not_changed has a running one in the usual run.
@pytest.mark.parametrize('runs', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_disk_of_a_foreign_domain_is_kept(
    real_libvirt: Libvirt, spec: GuestSpec, connection: object, runs: bool
) -> None:
    real_libvirt.create_disk(spec)
    path = real_libvirt.get_image_directory() / f'{spec.instance}.qcow2'
    disk = f"<disk type='file'><driver name='qemu' type='qcow2'/><source file='{path}'/><target dev='vda'/></disk>"
    definition = FOREIGN_DOMAIN_XML.format(name='theirs', uuid=spec.instance)
    foreign = connection.defineXML(definition.replace('</os>', f'</os><devices>{disk}</devices>'))
    try:
        if runs:
            foreign.create()
        real_libvirt.destroy(spec.instance, COMPUTE)
        with pytest.raises(Conflict, match=r'domain theirs \(.*\), not created by ecompute, uses .*: the file is kept'):
            real_libvirt.delete_disk(spec.instance)
        assert path.exists()
        assert foreign.isActive() == runs
    finally:
        if runs:
            foreign.destroy()
        foreign.undefine()
    real_libvirt.delete_disk(spec.instance)
    assert not path.exists()


def test_only_files_named_by_uuid_are_overlays(real_libvirt: Libvirt) -> None:
    uuid = 'abcdef00-0000-4000-8000-00000000abcd'
    names = ['base-1.qcow2', 'x.qcow2', f'{uuid}.raw', f'{uuid.upper()}.qcow2', f'{{{uuid}}}.qcow2', f'{uuid}.part']
    files = [real_libvirt.get_image_directory() / name for name in names]
    for file in files:
        file.touch()
    try:
        assert real_libvirt.list_guests() == {}
    finally:
        for file in files:
            file.unlink()


def test_missing_image_directory_is_not_taken_for_empty(real_libvirt: Libvirt) -> None:
    images = real_libvirt.get_image_directory()
    images.rename(images.with_name('away'))
    try:
        with pytest.raises(Unreachable, match='mounted'):
            real_libvirt.list_guests()
    finally:
        images.with_name('away').rename(images)


def fill_file_system(file: Path) -> None:
    with file.open('wb', buffering=0) as filler, suppress(OSError):
        while filler.write(b'x' * 4096):
            pass


def test_full_file_system_fails_the_build(
    host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec, connection: object
) -> None:
    pool = connection.storagePoolLookupByName('ecompute')
    pool.destroy()
    pool.undefine()
    small = Libvirt(host.root / 'small', uri=host.uri)
    try:
        small.prepare()
        fill_file_system(host.root / 'small' / 'filler')
        with pytest.raises(BuildFailed, match=r'disk: the file system of .*/images is full: \d+ KiB'):
            small.create_disk(spec)
        assert small.list_guests() == {}
        assert list(small.get_image_directory().iterdir()) == []
        (host.root / 'small' / 'filler').unlink()
        small.create_disk(spec)
        small.delete_disk(spec.instance)
    finally:
        small.close()
        pool = connection.storagePoolLookupByName('ecompute')
        pool.destroy()
        pool.undefine()
        real_libvirt.prepare()
