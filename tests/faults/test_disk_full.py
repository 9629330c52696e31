"""F21: the disk is full in each place: reported with reason and path, no partial file stays, and work resumes."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ecomp.agent.images.cache import ImageCache
from ecomp.errors import BuildFailed
from tests.kit.boot_sectors import HALT, boot_disk
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests, idle, lapse_requests
from tests.kit.image_server import serving
from tests.kit.images import LIMITS, LOOPBACK, get, inspect, kept
from tests.kit.invariants import check
from tests.kit.servers import PATIENCE, Etcd, PlacementServer, until
from tests.kit.story import SMALL, addressed, boot, log_of, logged, logs, one_line, place, reached, record
from tests.kit.tuned import tuned

KIB = 2**10
MIB = 2**20
PAGE = os.sysconf('SC_PAGE_SIZE')
FULL = 'No space left on device'


class SmallDisk:
    """A file system that can be filled to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / 'ballast'

    def fill(self) -> None:
        """Fill the file system, so that not even one more page fits."""
        with self._ballast.open('ab', buffering=0) as file:
            for size in (MIB, 4 * KIB, 1):
                try:
                    while file.write(b'x' * size):
                        pass
                except OSError:
                    continue
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        """Free the space."""
        self._ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """A function that mounts a file system of a number of bytes; it is unmounted last."""
    if os.geteuid() != 0:
        pytest.skip('mounting a tmpfs needs root')
    with ExitStack() as stack:

        def mount_disk(size: int) -> SmallDisk:
            path = tmp_path / f'small-{uuid.uuid4().hex[:6]}'
            path.mkdir()
            subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'ecomp-test', str(path)], check=True)
            # Lazily: a file that is still open there, as after a failed test, must not keep it mounted.
            stack.callback(subprocess.run, ['umount', '-l', str(path)], check=True)
            return SmallDisk(path)

        yield mount_disk


def pieces(directory: Path) -> list[str]:
    """List partial files below a directory."""
    return [str(path) for path in directory.rglob('*') if path.suffix in ('.part', '.new')]


def test_download(small_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for an image: reported, its .part is removed, and downloaded once there is room (fake)."""
    disk = small_disk(8 * MIB)
    directory = disk.path / 'images'
    cache = ImageCache(directory, inspect, None, LIMITS, LOOPBACK)
    with serving(boot_disk(HALT)) as server:
        first = get(cache, server.url + 'good')
        disk.fill()
        before = kept(directory)
        with pytest.raises(BuildFailed, match=f'good\\?2: cannot be kept in {directory}: {FULL}') as caught:
            get(cache, server.url + 'good?2')
        assert caught.value.stage == 'image'
        assert kept(directory) == before
        assert get(cache, server.url + 'good') == first  # the cached image is still valid
        disk.free()
        assert get(cache, server.url + 'good?2').virtual_size == first.virtual_size


def test_state_directory_while_running(cluster: Control, small_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room in the state directory: builds fail with the reason, destroys wait, others stay (fake)."""
    disk = small_disk(MIB)
    compute = cluster.ecompute(state=str(disk.path / 'state'))
    _, before = place(cluster)
    address = addressed(cluster, before)
    doomed = boot(cluster)
    disk.fill()
    failed = [place(cluster)[1] for _ in range(2)]
    for instance in failed:
        error = reached(cluster, instance, 'error')['error']
        assert FULL in error['reason'], error
        assert str(disk.path) in error['reason']
        assert error['stage'] in ('scheduled', 'image', 'disk')
        assert cluster.placement.allocations(instance) == {}
    # Their final state is written again and again beside its place, so such a file exists for a moment.
    until(lambda: pieces(disk.path) == [], 5, f'nothing half written stays in {disk.path}')
    # A guest is destroyed only after that can be written; until then it and its claim stay.
    assert cluster.eschedule('destroy', doomed).code == 0
    until(lambda: logged(compute, FULL, 'trying again'), 20, 'it says that it waits')
    with idle(compute.pid, 0.15):
        until(lambda: len(logged(compute, 'DESTROY', doomed)) >= 2, 30, 'it tries again')
    assert (record(cluster, doomed) or {})['state'] == 'destroying'
    assert cluster.placement.allocations(doomed)
    disk.free()
    reached(cluster, doomed, 'gone')
    addressed(cluster, place(cluster)[1])
    assert addressed(cluster, before) == address
    assert log_of(compute)
    cluster.eschedule('destroy', *failed)
    fake_guests(cluster, disk, compute)


def fake_guests(cluster: Control, disk: SmallDisk, compute: Ecompute) -> None:
    """Run the final checks; the link lets them read the guests of this compute."""
    (compute.directory / 'state').symlink_to(disk.path / 'state')
    check(cluster, compute)
    assert len(guests(compute)) == 2


def test_state_directory_at_start(cluster: Control, small_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for the uuid, token or memory at the start: one line, exit 1; with room it starts (fake)."""
    disk = small_disk(MIB)
    compute = tuned(cluster, start=False)
    text = compute.config.read_text().replace(str(compute.directory / 'state'), str(disk.path / 'state'))
    compute.config.write_text('\n'.join(line for line in text.splitlines() if not line.startswith('uuid:')))
    for existing in ('', 'uuid', 'token'):
        for path in (disk.path / 'state').glob('*'):
            assert path.name in ('lock', 'uuid', 'token', 'instances', 'metadata', 'cluster'), path
        disk.fill()
        compute.launch()
        assert compute._process is not None
        assert compute._process.wait(PATIENCE * 30) == 1, compute.last_words()
        lines = [line for line in log_of(compute) if line.startswith('ecompute: ')]
        assert FULL in lines[-1], lines
        assert str(disk.path / 'state') in lines[-1], lines
        assert pieces(disk.path) == []
        disk.free()
        # Write the file that it would have created, so that the next start lacks room for the next file.
        if existing == '':
            (disk.path / 'state' / 'uuid').write_text(f'{compute.uuid}\n')
        elif existing == 'uuid':
            (disk.path / 'state' / 'token').write_text(f'{uuid.uuid4()}\n')
    compute.start()
    addressed(cluster, place(cluster, f'{SMALL}&in_tree={compute.uuid}')[1])
    check(cluster)


def test_log(cluster: Control, small_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for ecompute's log: it keeps working and logs again once there is room (fake)."""
    disk = small_disk(MIB)
    compute = tuned(cluster, start=False)
    compute.log = disk.path / 'ecompute.log'
    compute.start()
    disk.fill()
    pages = -(-compute.log.stat().st_size // PAGE)
    instance = boot(cluster)
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    # The log grows to the end of its current page and no further.
    assert compute.log.stat().st_size <= pages * PAGE
    assert compute.is_running
    disk.free()
    instance = boot(cluster)
    assert logs(compute, 'INSTANTIATE', instance)
    check(cluster, compute)


def test_etcd(own_placement: PlacementServer, small_disk: Callable[[int], SmallDisk], tmp_path: Path) -> None:
    """F21: no room on etcd's disk, etcd panics: requests refused, guests stay; etcd's return is noticed (fake)."""
    # Two segments of its log are 64 MiB each, allocated in advance; only its database grows.
    disk = small_disk(140 * MIB)
    with Etcd(disk.path / 'etcd') as etcd:
        control = Control(etcd, own_placement, tmp_path, mortal=True)
        try:
            compute = control.ecompute()
            _, instance = place(control)
            address = addressed(control, instance)
            disk.fill()
            write_until_it_dies(etcd)
            refused = control.eschedule(SMALL)
            one_line(refused, 7, 'etcd', etcd.endpoint)
            assert list(own_placement.consumers(compute.uuid)) == [instance]
            until(lambda: logged(compute, 'etcd', 'trying again'), 20, 'the loss is said')
            assert compute.is_running
            assert guests(compute)[instance]['running']
            disk.free()
            etcd.start()
            until(lambda: logged(compute, 'etcd', 'is back'), 20, 'its return is said')
            assert len(logs(compute, 'etcd', 'trying again until it is back')) == 1
            assert addressed(control, instance) == address
            for key in etcd.keys('/filler/'):
                etcd.delete(key)
            addressed(control, place(control)[1])
            check(control, compute)
        finally:
            control.close()


def write_until_it_dies(etcd: Etcd) -> None:
    """Put large values until etcd ends."""
    for number in range(2000):
        try:
            etcd.put(f'/filler/{number}', os.urandom(256 * KIB))
        except OSError:
            until(lambda: not etcd.is_running, 30, 'etcd has ended')
            return
    raise AssertionError('etcd lives without a disk')


def test_placement(own_etcd: Etcd, small_disk: Callable[[int], SmallDisk], tmp_path: Path) -> None:
    """F21: no room for placement's database, it answers 500: exit 7, nothing claimed, destroys wait (fake)."""
    disk = small_disk(3 * MIB)
    with PlacementServer(disk.path / 'placement') as placement:
        control = Control(own_etcd, placement, tmp_path, mortal=True)
        try:
            compute = control.ecompute()
            instance = boot(control)
            disk.fill()
            result = control.eschedule(SMALL)
            one_line(result, 7, 'placement', 'HTTP 500')
            assert control.eschedule('destroy', instance).code == 0
            until(lambda: logged(compute, 'trying again'), 30, 'ecompute says that it waits')
            assert (record(control, instance) or {})['state'] == 'destroying'
            disk.free()
            reached(control, instance, 'gone')
            assert placement.consumers(compute.uuid) == {}
            lapse_requests(control)
            addressed(control, place(control)[1])
            check(control, compute)
        finally:
            control.close()
