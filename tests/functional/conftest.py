"""Shared fixtures: stores, a cloud without hypervisors, images and a libvirt host."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.placement.client import Placement
from ecomp.store import http2_client
from ecomp.store.client import Store
from tests.functional import placement_client
from tests.functional.cloud import Cloud
from tests.functional.guest import COMPUTE, MakeSpec
from tests.functional.libvirt_host import LibvirtHost, describe_missing, start_libvirt_host
from tests.functional.queueing import flavor
from tests.functional.tended import no_replacements, pool, pool_of_two
from tests.functional.toy import ToyCompute, make_toy_compute
from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.image_server import ImageServer, serve_images
from tests.kit.images import MIB
from tests.kit.in_process import InMemoryPlacement, InProcessPlacement, remove_providers, start_placement
from tests.kit.light_placement import LightPlacement
from tests.kit.memory import MemoryEtcd, MemoryPlacement, patch_clients
from tests.kit.proxy import Proxy
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.store_client import open_store

if TYPE_CHECKING:
    from ecomp.virt.libvirt_host import Libvirt

__all__ = ['flavor', 'no_replacements', 'pool_of_two', 'pool']

# A test that uses one of these needs real servers for the rest, too.
REAL_SERVERS = {
    *('etcd', 'placement', 'etcd_proxy', 'own_etcd', 'own_placement', 'control', 'own_control'),
    'cluster',
}

# The store


@pytest.fixture
def store(etcd: Etcd) -> Iterator[Store]:
    with open_store(etcd.endpoint) as opened:
        yield opened


@pytest.fixture
def prefix() -> str:
    return f'/test/{uuid.uuid4()}/'


# A cloud without hypervisors


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Etcd and placement in memory, or real ones if the test or --all requires them."""
    is_real = REAL_SERVERS.intersection(request.fixturenames) or request.node.get_closest_marker('real_servers')
    if is_real or request.config.getoption('real_servers'):
        etcd, placement = request.getfixturevalue('etcd'), request.getfixturevalue('placement')
        with open_store(etcd.endpoint) as store, closing(Placement(placement.url)) as client:
            yield Cloud(etcd, placement, store, client)
        # The next test uses the same servers, and may use the same names and the same project.
        for key in etcd.list_keys('/'):
            etcd.delete(key)
        for provider in placement.call('GET', '/resource_providers')['resource_providers']:
            for consumer in placement.call('GET', f'/resource_providers/{provider["uuid"]}/allocations')['allocations']:
                placement.call('DELETE', f'/allocations/{consumer}')
            placement.call('DELETE', f'/resource_providers/{provider["uuid"]}')
        return
    with patch_clients():
        etcd, placement = MemoryEtcd(), MemoryPlacement()
        with open_store(etcd.endpoint) as store:
            yield Cloud(etcd, placement, store, Placement(placement.url))


@pytest.fixture(params=['placement', 'light'])
def each_placement(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlacementServer]:
    if request.param == 'placement':
        yield request.getfixturevalue('placement')
        return
    with LightPlacement(tmp_path / 'placement') as server:
        yield server


@pytest.fixture
def client(placement: PlacementServer) -> Iterator[Placement]:
    with placement_client.open_client(placement.url) as opened:
        yield opened


@pytest.fixture
def toy_compute(cloud: Cloud, tmp_path: Path) -> Iterator[ToyCompute]:
    with make_toy_compute(cloud, tmp_path) as compute:
        yield compute


@pytest.fixture(scope='session')
def _started_placement() -> InProcessPlacement:
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    return start_placement()


@pytest.fixture
def placement_in_process(request: pytest.FixtureRequest) -> Iterator[InProcessPlacement]:
    if not (request.node.get_closest_marker('real_servers') or request.config.getoption('real_servers')):
        yield InMemoryPlacement()
        return
    started: InProcessPlacement = request.getfixturevalue('_started_placement')
    yield started
    remove_providers(started)


@pytest.fixture
def etcd_proxy(etcd: Etcd) -> Iterator[Proxy]:
    with Proxy(etcd.port) as proxy:
        yield proxy


@pytest.fixture
def shaky_store(etcd_proxy: Proxy) -> Iterator[Store]:
    with open_store(etcd_proxy.address, timeout=3.0) as store:
        yield store


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that eschedule sends to etcd in this process, in their order."""
    sent: list[Any] = []
    call = http2_client.EtcdMember.call

    def record(self: http2_client.EtcdMember, request: Any, timeout_seconds: float) -> Any:
        sent.append(request)
        return call(self, request, timeout_seconds)

    monkeypatch.setattr(http2_client.EtcdMember, 'call', record)
    return sent


# Images


@pytest.fixture(scope='module')
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if shutil.which('qemu-img') is None:
        pytest.skip('qemu-img makes the images: apt-get install qemu-utils')
    directory = tmp_path_factory.mktemp('image')
    raw, qcow2 = directory / 'raw', directory / 'qcow2'
    raw.write_bytes(os.urandom(MIB))
    os.truncate(raw, 16 * MIB)
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(qcow2)], check=True)
    return qcow2.read_bytes()


@pytest.fixture
def web(image: bytes) -> Iterator[ImageServer]:
    with serve_images(image) as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / 'images'


# A libvirt host of the tests' own, and guests for it


@pytest.fixture(scope='module')
def host() -> Iterator[LibvirtHost]:
    if reason := describe_missing():
        pytest.skip(f'no libvirtd of our own: {reason}')
    with start_libvirt_host() as own_host:
        yield own_host


@pytest.fixture
def connection(host: LibvirtHost) -> Iterator[Any]:
    libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
    with closing(libvirt.open(host.uri)) as opened:
        yield opened


@pytest.fixture(scope='module')
def prepared_libvirt(host: LibvirtHost) -> Iterator[Libvirt]:
    from ecomp.virt.libvirt_host import Libvirt

    driver = Libvirt(host.root / 'state', uri=host.uri)
    driver.prepare()
    yield driver
    driver.close()


@pytest.fixture
def real_libvirt(prepared_libvirt: Libvirt) -> Iterator[Libvirt]:
    yield prepared_libvirt
    for instance in prepared_libvirt.list_guests():
        prepared_libvirt.destroy(instance, COMPUTE)
        prepared_libvirt.delete_disk(instance)
        prepared_libvirt.release_addresses(instance)
    assert prepared_libvirt.list_guests() == {}
    assert prepared_libvirt.list_seeds() == set()


@pytest.fixture(scope='module')
def base_image() -> Iterator[BaseImage]:
    # Not in pytest's own directories: QEMU's user cannot enter those.
    with TemporaryDirectory(prefix='evt-base-') as directory:
        Path(directory).chmod(0o711)
        path = Path(directory) / 'base.raw'
        path.write_bytes(make_boot_disk(HALT))
        yield BaseImage(str(path), 'raw', 2**20)


@pytest.fixture
def make_spec(base_image: BaseImage) -> MakeSpec:
    return lambda: GuestSpec(str(uuid4()), COMPUTE, 1, 32, 1, base_image, 'qemu')


@pytest.fixture
def spec(make_spec: MakeSpec) -> GuestSpec:
    return make_spec()
