"""The storage pool and its overlays after somebody has changed them by hand, and starts that fail; on real libvirt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ecomp.errors import BuildFailed, Conflict, Unreachable
from ecomp.model.guest import GuestSpec
from tests.functional.guest import COMPUTE, MakeSpec, build
from tests.functional.libvirt_host import LibvirtHost

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import xml  # noqa: E402
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402
from ecomp.virt.volumes import POOL  # noqa: E402


@pytest.fixture
def connection(host: LibvirtHost) -> Iterator[Any]:
    """A connection of the test's own, to do what ecompute does not."""
    opened = libvirt.open(host.uri)
    yield opened
    opened.close()


def remove_pool(connection: Any) -> None:
    pool = connection.storagePoolLookupByName(POOL)
    pool.destroy()
    pool.undefine()


def disk(real: Libvirt, spec: GuestSpec) -> Path:
    directory = real.image_directory()
    assert directory is not None
    return directory / f'{spec.instance}.qcow2'


def test_a_pool_that_somebody_removed_is_defined_again(real: Libvirt, spec: GuestSpec, connection: Any) -> None:
    remove_pool(connection)
    real.create_disk(spec)
    assert disk(real, spec).exists()
    remove_pool(connection)
    real.delete_disk(spec.instance)
    assert not disk(real, spec).exists()
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
        patch.setattr('ecomp.virt.filters.search_path', lambda: '/nowhere')
        with pytest.raises(Unreachable, match='ebtables is not installed.*no guest is made'):
            build(worker, spec)
    assert not real.runs(spec.instance)
    build(worker, spec)
    assert real.runs(spec.instance)
    worker.close()


def test_no_guest_is_made_beside_an_etcd_without_an_address(host: LibvirtHost, spec: GuestSpec) -> None:
    worker = Libvirt(host.root / 'state', uri=host.uri, control=[('etcd.invalid', 2379)], filters=True)
    with pytest.raises(Unreachable, match=r'etcd\.invalid'):
        build(worker, spec)
    assert not worker.runs(spec.instance)
    worker.delete_disk(spec.instance)
    worker.close()
