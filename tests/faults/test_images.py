"""F22, F23: images that are invalid, hostile or changing."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ecomp.agent.images import remote
from ecomp.agent.images.cache import ImageCache
from ecomp.errors import BuildFailed
from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.commands import Command, Result
from tests.kit.hypervisor import REACTION_SECONDS, Hypervisor
from tests.kit.image_server import Handler, ImageServer, serve_images
from tests.kit.images import LIMITS, LOOPBACK_REACH, MIB, get_base, inspect_image, list_cached
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until
from tests.kit.slow_images import SlowImages

# F22, F23: invalid and hostile images are refused with a reason, and the cache stays valid after any killed download.
#
# tests/functional/test_images.py tests the many kinds of answers; its test_image_*.py test what is kept and evicted.


pytestmark = [
    pytest.mark.skipif(
        shutil.which('qemu-img') is None, reason='qemu-img makes the images: apt-get install qemu-utils'
    ),
]

MEBIBYTE = 2**20
TIB = 2**40


def make_qcow2(directory: Path, size: int = 16 * MEBIBYTE, content: bytes = b'') -> bytes:
    raw, converted = directory / 'raw', directory / 'qcow2'
    raw.write_bytes(content)
    os.truncate(raw, len(content) or 512)
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(converted)], check=True)
    subprocess.run(['qemu-img', 'resize', '-q', '-f', 'qcow2', str(converted), str(size)], check=True)
    return converted.read_bytes()


@pytest.fixture(scope='module')
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_qcow2(tmp_path_factory.mktemp('image'), content=os.urandom(MEBIBYTE))


@pytest.fixture
def web(image: bytes) -> Iterator[ImageServer]:
    with serve_images(image) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache(tmp_path / 'images', inspect_image, None, LIMITS, LOOPBACK_REACH)


def check_refused(cache: ImageCache, directory: Path, url: str, reason: str) -> None:
    before = list_cached(directory)
    with pytest.raises(BuildFailed, match=reason) as caught:
        get_base(cache, url)
    assert '\n' not in str(caught.value)
    assert list_cached(directory) == before


# Each kind of hostile image, complete, beside an image that is cached.
HOSTILE_IMAGES: list[tuple[str, str, str]] = [
    ('an error page with 200', 'page', 'is not a disk image'),
    ('ends early without a length', 'cut_without_length', 'cut-off qcow2'),
    ('redirects without an end', 'loop', 'more than 5 redirects'),
    ('stalls', 'half', 'does not answer in time|connection broke'),
    ('truncates, or says more than there is', 'cut', 'cut off after [0-9]+ of [0-9]+ bytes|connection broke'),
    ('says less than there is', 'too_much', 'cut-off qcow2'),
    ('changes the file half-way', 'changing', 'changed during the download|cut-off|not a disk'),
    ('redirects to a file of the host', 'to_a_file', 'redirected to a local file'),
    ('a backing file of /etc/shadow', 'backing', 'not safe to use: .*backing'),
    ('an external data file', 'data_file', 'not safe to use: .*data'),
    ('100 TB', 'huge', 'the image needs 102400.0 GiB, but this host has 100.0 GiB for disks'),
    ('a vmdk', 'vmdk', 'is in vmdk format'),
    ('a wrong checksum on its URL', 'good#sha256=' + '0' * 64, 'but its URL has 0000'),
    ('a wrong checksum beside it', 'listed', 'but SHA256SUMS in its directory has 1111'),
]


@pytest.mark.parametrize(('what', 'path', 'reason'), HOSTILE_IMAGES, ids=[what for what, _, _ in HOSTILE_IMAGES])
def test_hostile_image_is_refused_and_cache_unchanged(  # noqa: PLR0913
    web: ImageServer,
    cache: ImageCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    path: str,
    reason: str,
) -> None:
    """F22: a hostile answer is refused with its reason, and the cache is unchanged (fake)."""
    hostile = tmp_path / what.replace('/', '-')
    run = subprocess.run
    if path == 'backing':
        hostile.write_bytes(make_qcow2(tmp_path, content=os.urandom(MEBIBYTE)))
        run(['qemu-img', 'rebase', '-u', '-f', 'qcow2', '-F', 'raw', '-b', '/etc/shadow', str(hostile)], check=True)
    elif path == 'data_file':
        outside = tmp_path / 'data'
        command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-o', f'data_file={outside},data_file_raw=on']
        run([*command, str(hostile), '16M'], check=True)
    elif path == 'huge':
        hostile.write_bytes(make_qcow2(tmp_path, 100 * TIB))
    elif path == 'vmdk':
        (tmp_path / 'raw').write_bytes(make_boot_disk(b'\xf4'))
        run(['qemu-img', 'convert', '-f', 'raw', '-O', 'vmdk', str(tmp_path / 'raw'), str(hostile)], check=True)
    first = get_base(cache, web.url + 'good')
    before = read_contents(tmp_path / 'images')
    if hostile.exists():
        web.image = hostile.read_bytes()
        monkeypatch.setattr(Handler, f'answer_{path}', Handler.answer_good, raising=False)
    web.headers = {'etag': '"1"'} if path == 'changing' else {}
    web.sums = f'{"1" * 64}  listed\n'.encode()
    monkeypatch.setattr(Handler, 'answer_listed', Handler.answer_good, raising=False)
    monkeypatch.setattr(remote, 'TIMEOUT_SECONDS', (5.0, 0.5))
    check_refused(cache, tmp_path / 'images', web.url + path, reason)
    assert read_contents(tmp_path / 'images') == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, 'answer_good', Handler.answer_error)
        assert get_base(cache, web.url + 'good') == first


def read_contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# Those of the worker, and those of the program that downloads for it.
WORKER_FAILPOINTS = ('image-part', 'image-kept')
PROGRAM_FAILPOINTS = ('image-begun', 'image-evicted')
FETCH_SCRIPT = """
import sys
from pathlib import Path
from ecomp.agent.images.cache import ImageCache, CacheLimits
from ecomp.agent.images.inspection import inspect
from tests.kit.images import LOOPBACK_REACH

cache = ImageCache(Path(sys.argv[1]), inspect, None, CacheLimits(int(sys.argv[3]), 2**40), LOOPBACK_REACH)
cache.sweep()
with cache.hold(sys.argv[2], lambda: None, lambda *_: None) as base:
    print(base.path)
"""


def fetch(directory: Path, url: str, limit: int, failpoint: str = '') -> Result:
    """Download an image as a worker does, in a process that a failpoint may kill."""
    words = [sys.executable, '-c', FETCH_SCRIPT, str(directory), url, str(limit)]
    with Command(words, directory.parent, {'ECOMP_FAILPOINT': f'{failpoint}:kill' if failpoint else ''}) as command:
        return command.wait()


@pytest.mark.parametrize('step', WORKER_FAILPOINTS)
def test_killed_during_a_download(web: ImageServer, tmp_path: Path, step: str) -> None:
    """F22: kill -9 at each step of a download: the next restarts or has it (fake)."""
    directory = tmp_path / 'images'
    web.headers = {'etag': '"1"'}
    assert fetch(directory, web.url + 'good', 2**30, step).code == -signal.SIGKILL
    assert list_cached(directory)
    repeated = fetch(directory, web.url + 'good', 2**30)
    assert list_cached(directory) == [Path(repeated.stdout.strip()).name], repeated
    assert fetch(directory, web.url + 'good', 2**30).stdout == repeated.stdout
    assert len(web.sent_bodies) == 2


def test_worker_killed_during_a_download_ends_the_download(web: ImageServer, tmp_path: Path) -> None:
    """F22: kill -9 of a worker: its download dies, the next start removes the file (fake)."""
    directory, words = tmp_path / 'images', [sys.executable, '-c', FETCH_SCRIPT]
    with Command([*words, str(tmp_path / 'images'), web.url + 'half', str(2**30)], tmp_path) as worker:
        (program,) = wait_until(lambda: psutil.Process(worker.pid).children(), 20, 'the program runs')
        wait_until(lambda: list(directory.glob('*.part')), 20, 'it downloads')
        worker.send_signal(signal.SIGKILL)
        psutil.wait_procs([program], 20)
        assert not program.is_running()
    assert [name.rpartition('.')[2] for name in list_cached(directory)] == ['part']
    web.may_go_on.set()
    repeated = fetch(directory, web.url + 'good', 2**30)
    assert list_cached(directory) == [Path(repeated.stdout.strip()).name], repeated


def test_killed_program_fails_its_download(web: ImageServer, tmp_path: Path) -> None:
    """F22: kill -9 of the downloading program: reported, and nothing is left (fake)."""
    result = fetch(tmp_path / 'images', web.url + 'good', 2**30, PROGRAM_FAILPOINTS[0])
    assert 'the download ended with exit code -9' in result.stderr
    assert list_cached(tmp_path / 'images') == []


def test_killed_during_eviction_keeps_used_bases(web: ImageServer, tmp_path: Path) -> None:
    """F23: kill -9 while base volumes are evicted: those under a disk stay (fake)."""
    directory, size = tmp_path / 'images', 2**20
    disks = [make_boot_disk(bytes([number])) for number in range(3)]
    for number, web.image in enumerate(disks[:2]):
        assert fetch(directory, f'{web.url}good?{number}', 2 * size).code == 0
    base = min(directory.glob('base-*'), key=lambda path: path.stat().st_mtime_ns)
    command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'raw', '-b', str(base), str(directory / 'x.qcow2')]
    subprocess.run(command, check=True)
    web.image = disks[2]
    assert fetch(directory, f'{web.url}good?2', 2 * size, PROGRAM_FAILPOINTS[1]).code == 1
    assert list(directory.glob('base-*.raw')) == [base]
    repeated = fetch(directory, f'{web.url}good?2', 2 * size)
    assert set(list_cached(directory)) == {base.name, Path(repeated.stdout.strip()).name, 'x.qcow2'}
    # The kill lost the information which files were removed.
    assert len(list(directory.glob('.url-*.json'))) == 2


# F23: an image that changes, and many builds of one: one download for all, and guests keep their base.


@pytest.mark.slow
def test_changed_image_is_used_by_new_builds_only(host: Hypervisor) -> None:
    """F23: another image at the same URL: new builds use it, guests keep theirs (libvirt)."""
    served = host.lab.directory / 'images' / 'changes.raw'
    try:
        served.write_bytes(make_boot_disk(HALT))
        first = host.place('changes.raw')
        host.wait_state(first, 'active')
        pid = host.find_qemu(first)
        base = find_base(host, first)
        before = base.read_bytes()
        repeated = host.place('changes.raw')
        host.wait_state(repeated, 'active')
        assert find_base(host, repeated) == base
        changed = make_boot_disk(b'\xf4\xeb\xfd\x90')
        served.write_bytes(changed)
        later = served.stat().st_mtime + 10
        os.utime(served, (later, later))  # the server's times are in whole seconds, and the test is faster
        second = host.place('changes.raw')
        host.wait_state(second, 'active')
        assert (find_base(host, first), base.read_bytes()) == (base, before)
        assert find_base(host, second).read_bytes() == changed
        assert host.find_qemu(first) == pid
    finally:
        served.unlink(missing_ok=True)


def find_base(host: Hypervisor, instance: str) -> Path:
    output = subprocess.run(
        ['qemu-img', 'info', '-U', str(host.get_disk_path(instance))], check=True, capture_output=True, text=True
    ).stdout
    return next(Path(line.partition(': ')[2]) for line in output.splitlines() if line.startswith('backing file: '))


BIG_IMAGE_BYTES = 8 * MIB


def make_padded_disk(path: Path, size: int) -> Path:
    with path.open('wb') as file:
        file.write(make_boot_disk(HALT))
        for _ in range(size // MIB - 1):
            file.write(os.urandom(MIB))
    return path


@pytest.mark.slow
def test_five_builds_share_one_download(host: Hypervisor, slow_images: SlowImages) -> None:
    """F23: five builds of a cold image: one download, other builds do not wait (libvirt)."""
    host.ensure_unarmed()
    served = make_padded_disk(host.lab.directory / 'images/big.raw', BIG_IMAGE_BYTES)
    try:
        with ThreadPoolExecutor(4) as threads:
            instances = list(threads.map(lambda _: host.place(slow_images.make_url('big.raw')), range(5)))
        for instance in instances:
            host.wait_state(instance, 'building')
        # More builds than workers wait for the server, and one of them does so in a worker.
        host.start_instance()
        progress = {'stage': 'image', 'done': BIG_IMAGE_BYTES // 2, 'total': BIG_IMAGE_BYTES}
        reporting = wait_until(
            lambda: [name for name in instances if host.read_record(name)['progress'] == progress],
            REACTION_SECONDS,
            'is told',
        )
        for doomed in (reporting[0], next(name for name in instances if name != reporting[0])):
            instances.remove(doomed)
            host.request_destroy(doomed)
            began = time.monotonic()
            host.wait_state(doomed, 'gone')
            assert time.monotonic() - began < SLOWDOWN_FACTOR * 10, 'a silent server keeps nobody'
            host.assert_removed(doomed)
        slow_images.release()
        for instance in instances:
            assert host.wait_state(instance, 'active')['progress'] is None
        assert len(slow_images.list_recipients()) == 1
        bases = {find_base(host, instance) for instance in instances}
        assert [base.name for base in bases] == [f'base-{hashlib.sha256(served.read_bytes()).hexdigest()}.raw']
        host.check_settled()
    finally:
        served.unlink()
