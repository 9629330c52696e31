"""F21: the disk is full in each place: reported with its path, and work resumes."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ecomp.agent.images.cache import ImageCache
from ecomp.errors import BuildFailed
from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import assert_idle, expire_attempts, read_guests
from tests.kit.image_server import serve_images
from tests.kit.images import LIMITS, LOOPBACK_REACH, get_base, inspect_image, list_cached
from tests.kit.invariants import check_invariants
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, PlacementServer, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_log,
    read_record,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned

KIB = 2**10
MIB = 2**20
PAGE = os.sysconf('SC_PAGE_SIZE')
DISK_FULL_MESSAGE = 'No space left on device'


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / 'ballast'

    def fill(self) -> None:
        # Not even one more page fits.
        with self._ballast.open('ab', buffering=0) as file:
            for size in (MIB, 4 * KIB, 1):
                try:
                    while file.write(b'x' * size):
                        pass
                except OSError:
                    continue
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
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


def list_partial_files(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob('*') if path.suffix in ('.part', '.new')]


def test_image_download_without_room(make_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for an image: reported, .part removed, downloaded when there is room (fake)."""
    disk = make_disk(8 * MIB)
    directory = disk.path / 'images'
    cache = ImageCache(directory, inspect_image, None, LIMITS, LOOPBACK_REACH)
    with serve_images(make_boot_disk(HALT)) as server:
        first = get_base(cache, server.url + 'good')
        disk.fill()
        before = list_cached(directory)
        with pytest.raises(
            BuildFailed, match=f'good\\?2: cannot be stored in {directory}: {DISK_FULL_MESSAGE}'
        ) as caught:
            get_base(cache, server.url + 'good?2')
        assert caught.value.stage == 'image'
        assert list_cached(directory) == before
        assert get_base(cache, server.url + 'good') == first  # the cached image is still valid
        disk.free()
        assert get_base(cache, server.url + 'good?2').virtual_size == first.virtual_size


def test_state_directory_full_while_running(cluster: Control, make_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room in the state directory: builds fail, destroys wait, others stay (fake)."""
    disk = make_disk(MIB)
    compute = cluster.ecompute(state=str(disk.path / 'state'))
    _, before = place(cluster)
    address = wait_address(cluster, before)
    doomed = boot(cluster)
    disk.fill()
    failed = [place(cluster)[1] for _ in range(2)]
    for instance in failed:
        error = wait_state(cluster, instance, 'error')['error']
        assert DISK_FULL_MESSAGE in error['reason'], error
        assert str(disk.path) in error['reason']
        assert error['stage'] in ('scheduled', 'image', 'disk')
        assert cluster.placement.read_allocations(instance) == {}
    # Their final state is written again and again beside its place, so such a file exists for a moment.
    wait_until(lambda: list_partial_files(disk.path) == [], 5, f'nothing half written stays in {disk.path}')
    # A guest is destroyed only after that can be written; until then it and its claim stay.
    assert cluster.eschedule('destroy', doomed).code == 0
    wait_until(lambda: find_log_lines(compute, DISK_FULL_MESSAGE, 'trying again'), 20, 'it says that it waits')
    with assert_idle(compute.pid, 0.15):
        wait_until(lambda: len(find_log_lines(compute, 'DESTROY', doomed)) >= 2, 30, 'it tries again')
    assert (read_record(cluster, doomed) or {})['state'] == 'destroying'
    assert cluster.placement.read_allocations(doomed)
    disk.free()
    wait_state(cluster, doomed, 'gone')
    wait_address(cluster, place(cluster)[1])
    assert wait_address(cluster, before) == address
    assert read_log(compute)
    cluster.eschedule('destroy', *failed)
    check_guests(cluster, disk, compute)


def check_guests(cluster: Control, disk: SmallDisk, compute: Ecompute) -> None:
    # The link lets the checks read the guests of this compute.
    (compute.directory / 'state').symlink_to(disk.path / 'state')
    check_invariants(cluster, compute)
    assert len(read_guests(compute)) == 2


def test_state_directory_full_at_start(cluster: Control, make_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for uuid, token or memory at the start: one line, exit 1 (fake)."""
    disk = make_disk(MIB)
    compute = make_tuned(cluster, start=False)
    text = compute.config.read_text().replace(str(compute.directory / 'state'), str(disk.path / 'state'))
    compute.config.write_text('\n'.join(line for line in text.splitlines() if not line.startswith('uuid:')))
    for existing in ('', 'uuid', 'token'):
        for path in (disk.path / 'state').glob('*'):
            assert path.name in ('lock', 'uuid', 'token', 'instances', 'metadata', 'cluster'), path
        disk.fill()
        compute.launch()
        assert compute._process is not None
        assert compute._process.wait(SLOWDOWN_FACTOR * 30) == 1, compute.tail_log()
        lines = [line for line in read_log(compute) if line.startswith('ecompute: ')]
        assert DISK_FULL_MESSAGE in lines[-1], lines
        assert str(disk.path / 'state') in lines[-1], lines
        assert list_partial_files(disk.path) == []
        disk.free()
        # Write the file that it would have created, so that the next start lacks room for the next file.
        if existing == '':
            (disk.path / 'state' / 'uuid').write_text(f'{compute.uuid}\n')
        elif existing == 'uuid':
            (disk.path / 'state' / 'token').write_text(f'{uuid.uuid4()}\n')
    compute.start()
    wait_address(cluster, place(cluster, f'{SMALL_QUERY}&in_tree={compute.uuid}')[1])
    check_invariants(cluster)


def test_log_disk_full(cluster: Control, make_disk: Callable[[int], SmallDisk]) -> None:
    """F21: no room for the log: ecompute keeps working, and logs again with room (fake)."""
    disk = make_disk(MIB)
    compute = make_tuned(cluster, start=False)
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
    assert wait_log_lines(compute, 'INSTANTIATE', instance)
    check_invariants(cluster, compute)


def test_etcd_disk_full(own_placement: PlacementServer, make_disk: Callable[[int], SmallDisk], tmp_path: Path) -> None:
    """F21: no room on etcd's disk, etcd panics: requests refused, guests stay (fake)."""
    # Two segments of its log are 64 MiB each, allocated in advance; only its database grows.
    disk = make_disk(140 * MIB)
    with (
        Etcd(disk.path / 'etcd') as etcd,
        closing(Control(etcd, own_placement, tmp_path, is_mortal=True)) as control,
    ):
        compute = control.ecompute()
        _, instance = place(control)
        address = wait_address(control, instance)
        disk.fill()
        write_until_etcd_dies(etcd)
        refused = control.eschedule(SMALL_QUERY)
        assert_one_line(refused, 7, 'etcd', etcd.endpoint)
        assert list(own_placement.read_consumers(compute.uuid)) == [instance]
        wait_until(lambda: find_log_lines(compute, 'etcd', 'trying again'), 20, 'the loss is said')
        assert compute.is_running
        assert read_guests(compute)[instance]['running']
        disk.free()
        etcd.start()
        wait_until(lambda: find_log_lines(compute, 'etcd', 'is back'), 20, 'its return is said')
        assert len(wait_log_lines(compute, 'etcd', 'trying again until it is back')) == 1
        assert wait_address(control, instance) == address
        for key in etcd.list_keys('/filler/'):
            etcd.delete(key)
        wait_address(control, place(control)[1])
        check_invariants(control, compute)


def write_until_etcd_dies(etcd: Etcd) -> None:
    # The values are small: etcd accepts some hundred in the log before it notices, and must have room for them when it
    # starts.
    for number in range(2000):
        try:
            etcd.put(f'/filler/{number}', os.urandom(16 * KIB))
        except OSError:
            wait_until(lambda: not etcd.is_running, 30, 'etcd has ended')
            return
    raise AssertionError('etcd lives without a disk')


def test_placement_disk_full(own_etcd: Etcd, make_disk: Callable[[int], SmallDisk], tmp_path: Path) -> None:
    """F21: no room for placement, it answers 500: exit 7, no claim, destroys wait (fake)."""
    disk = make_disk(3 * MIB)
    with (
        PlacementServer(disk.path / 'placement') as placement,
        closing(Control(own_etcd, placement, tmp_path, is_mortal=True)) as control,
    ):
        compute = control.ecompute()
        instance = boot(control)
        disk.fill()
        result = control.eschedule(SMALL_QUERY)
        assert_one_line(result, 7, 'placement', 'HTTP 500')
        assert control.eschedule('destroy', instance).code == 0
        wait_until(lambda: find_log_lines(compute, 'trying again'), 30, 'ecompute says that it waits')
        assert (read_record(control, instance) or {})['state'] == 'destroying'
        disk.free()
        wait_state(control, instance, 'gone')
        assert placement.read_consumers(compute.uuid) == {}
        expire_attempts(control)
        wait_address(control, place(control)[1])
        check_invariants(control, compute)
