"""Images: downloads, checks for newer versions, malformed state, progress and local files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.images import fetch, remote, sources
from ecomp.agent.images.cache import BaseVolumes
from ecomp.agent.images.sources import EgressPolicy, ServerUnavailable
from ecomp.agent.instance.build import Cancelled
from ecomp.errors import BuildFailed
from tests.functional.image_content import get_base_name, list_url_entries, make_raw_image, sha256
from tests.kit.image_server import Handler, ImageServer
from tests.kit.images import LIMITS, MIB, assert_refused, get_base, list_cached, make_cache
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until

# Downloads that succeed


@pytest.mark.parametrize('path', ['good', 'without_length', 'moved', 'moved_twice'])
def test_image_is_stored_under_the_name_of_its_content(
    web: ImageServer, directory: Path, image: bytes, path: str
) -> None:
    volume = get_base(make_cache(directory), web.url + path)
    assert (volume.format, volume.virtual_size) == ('qcow2', 16 * MIB)
    assert Path(volume.path).read_bytes() == image
    assert list_cached(directory) == [Path(volume.path).name]
    assert volume.path == str(directory / f'base-{hashlib.sha256(image).hexdigest()}.qcow2')
    assert Path(volume.path).stat().st_mode & 0o777 == 0o644


def test_concurrent_requests_are_one_download(web: ImageServer, directory: Path) -> None:
    since = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(get_base, make_cache(directory), web.url + 'slowly', since=since) for _ in range(4)]
        wait_until(lambda: web.requests, 10, 'somebody downloads')
        web.may_go_on.set()
        volumes = {future.result(SLOWDOWN_FACTOR * 30) for future in futures}
    assert len(volumes) == 1
    # The waiting builds use the result, and do not check the server for a newer image.
    assert web.requests == ['slowly', 'SHA256SUMS']


# Downloads that fail


@pytest.mark.parametrize(
    ('path', 'reason'),
    [
        ('error', 'the server returned HTTP 500'),
        ('nothing', 'is empty'),
        ('reset', 'cut off|connection broke|cannot be reached'),
        ('unpacked_by_nobody', 'the server compresses it .Content-Encoding.. Fix: have the server send'),
        ('no_http', 'cannot be reached'),
        ('to_another_scheme', 'redirected to an invalid image URL'),
        ('to_nowhere', 'redirected to an invalid image URL'),
    ],
)
def test_bad_answer_is_refused(web: ImageServer, directory: Path, path: str, reason: str) -> None:
    assert_refused(directory, web.url + path, reason)
    # The next download is not affected.
    assert get_base(make_cache(directory), web.url + 'good').format == 'qcow2'


def test_malformed_content_length_is_ignored_or_refused(web: ImageServer, directory: Path, image: bytes) -> None:
    try:
        volume = get_base(make_cache(directory), web.url + 'no_number')
    except BuildFailed:
        assert list_cached(directory) == []
    else:
        assert Path(volume.path).read_bytes() == image


def test_chunked_answer_is_limited_by_the_cache_not_by_content_length(
    web: ImageServer, directory: Path, image: bytes
) -> None:
    """A chunked answer ignores Content-Length, so room is reserved for each chunk."""
    assert get_base(make_cache(directory), web.url + 'more_in_chunks').format == 'qcow2'
    shutil.rmtree(directory)
    with pytest.raises(BuildFailed, match='but `image_cache:` allows'):
        get_base(make_cache(directory, limit=len(image) // 2), web.url + 'more_in_chunks')
    assert list_cached(directory) == []


def test_local_image_that_grows_while_it_is_read_is_refused(directory: Path, shelf: Path, image: bytes) -> None:
    real_open = sources.LocalSource.open

    def read() -> bytes:
        return image[: len(image) // 2]

    def open_growing(local: sources.LocalSource) -> sources.Stream:
        return replace(real_open(local), read=read)

    path = shelf / 'growing'
    path.write_bytes(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.LocalSource, 'open', open_growing)
        assert_refused(directory, path.as_uri(), f'longer than the {len(image)} bytes that the server announced', shelf)


@pytest.mark.parametrize('status', [407, 599])
def test_refusal_of_a_proxy_is_reported_by_its_status(web: ImageServer, status: int) -> None:

    def do_CONNECT(handler: Handler) -> None:  # noqa: N802
        handler.send_response(status, 'ask \x1b[7m me')
        handler.end_headers()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, 'do_CONNECT', do_CONNECT, raising=False)
        source = remote.RemoteSource('https://cloud.example/x', EgressPolicy(proxy_url=web.url))
        with pytest.raises(ServerUnavailable) as caught:
            source.open()
        source.close()
    assert caught.value.reason == f'https://cloud.example/x: the proxy returned HTTP {status}'


@pytest.mark.parametrize('url', ['', 'x', '/etc/shadow', 'ftp://h/x', 'http:///x', 'file://host/x', 'http://h/\udcff'])
def test_invalid_url_is_refused_without_a_request(directory: Path, url: str) -> None:
    assert_refused(directory, url, 'the image ')
    assert not directory.exists()


def test_silent_server_times_out(web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, 'TIMEOUT_SECONDS', (1.0, 0.3))
    assert_refused(directory, web.url + 'silence', 'does not answer in time|connection broke')


@pytest.mark.parametrize('path', ['drip', 'dripping/good'])
def test_endless_slow_download_times_out(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The second path drips the list of checksums."""
    monkeypatch.setattr(fetch, 'MAX_DOWNLOAD_SECONDS', 0.5)
    started_at = time.monotonic()
    assert_refused(directory, web.url + path, r'not complete after 0\.5 s, [0-9]+ bytes so far')
    assert time.monotonic() - started_at < SLOWDOWN_FACTOR * 5


def raise_cancelled() -> None:
    raise Cancelled


def test_wait_for_the_download_of_another_build_can_be_cancelled(web: ImageServer, directory: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        other_download = pool.submit(get_base, make_cache(directory), web.url + 'slowly')
        wait_until(lambda: web.requests, 10, 'somebody downloads')
        with pytest.raises(Cancelled):
            get_base(make_cache(directory), web.url + 'slowly', raise_cancelled)
        web.may_go_on.set()
        assert Path(other_download.result(SLOWDOWN_FACTOR * 30).path).exists()


def test_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(BuildFailed, match='file: '):
        get_base(make_cache(tmp_path / 'file'), 'http://h/x')


# Local images


@pytest.fixture
def shelf(tmp_path: Path, image: bytes) -> Path:
    shelf = tmp_path / 'shelf'
    (shelf / 'sub').mkdir(parents=True)
    for name in ('a.qcow2', 'with space.qcow2', 'sub/b.qcow2'):
        (shelf / name).write_bytes(image)
    (tmp_path / 'secret.qcow2').write_bytes(image)
    (shelf / 'inside').symlink_to('sub/b.qcow2')
    (shelf / 'outside').symlink_to(tmp_path / 'secret.qcow2')
    (shelf / 'up').symlink_to(tmp_path)
    (shelf / 'nowhere').symlink_to('missing')
    (shelf / 'loop').symlink_to('loop')
    (shelf / 'text.qcow2').write_text('root:secret:0:0')
    os.mkfifo(shelf / 'pipe')
    return shelf


@pytest.mark.parametrize(
    'name', ['a.qcow2', 'with%20space.qcow2', 'sub/b.qcow2', 'sub/../a.qcow2', 'inside', 'a%2Eqcow2']
)
def test_local_image_in_the_directory_is_copied(directory: Path, shelf: Path, image: bytes, name: str) -> None:
    volume = get_base(make_cache(directory, shelf), f'file://{shelf}/{name}')
    assert Path(volume.path).read_bytes() == image
    assert not Path(volume.path).is_symlink()


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('../secret.qcow2', 'only local images under'),
        ('%2e%2e/secret.qcow2', 'only local images under'),
        ('..%2Fsecret.qcow2', 'only local images under'),
        ('outside', 'only local images under'),
        ('up/secret.qcow2', 'only local images under'),
        ('nowhere', 'no such file'),
        ('missing', 'no such file'),
        ('sub', 'no such file'),
        ('', 'no such file'),
        ('pipe', 'no such file'),
        ('text.qcow2', 'is not a disk image'),
        ('a%00b', 'null (byte|character)|no such file'),
        ('loop', 'loop|no such file'),
    ],
)
def test_local_path_outside_the_directory_or_not_an_image_is_refused(
    directory: Path, shelf: Path, name: str, reason: str
) -> None:
    assert_refused(directory, f'file://{shelf}/{name}', reason, local=shelf)


def test_sibling_directory_with_the_same_prefix_is_refused(directory: Path, shelf: Path, image: bytes) -> None:
    sibling = shelf.with_name('shelf2')
    sibling.mkdir()
    (sibling / 'a.qcow2').write_bytes(image)
    assert_refused(directory, f'file://{sibling}/a.qcow2', 'only local images under', local=shelf)


def test_local_image_is_refused_without_a_directory(directory: Path, shelf: Path) -> None:
    assert_refused(directory, f'file://{shelf}/a.qcow2', 'this host accepts no local images')


# Checks for newer versions, and repeated downloads, against a web server that counts requests.


@pytest.mark.parametrize('says', [{'etag': '"1"'}, {'last-modified': 'Sat, 21 Nov 2026 10:00:00 GMT'}])
@pytest.mark.parametrize('compares', [True, False])
def test_image_is_fetched_again_only_after_a_change(
    web: ImageServer, directory: Path, says: dict[str, str], compares: bool
) -> None:
    """A server without `compares` sends validators, but ignores conditional requests."""
    web.headers, web.compares = says, compares
    first = get_base(make_cache(directory), web.url + 'good')
    sums = web.requests.count('SHA256SUMS')
    for _ in range(3):
        assert get_base(make_cache(directory), web.url + 'good') == first
    assert web.requests.count('SHA256SUMS') == sums == 1
    before = len(web.sent_bodies)
    web.image = make_raw_image(MIB)
    web.headers = {name: value.replace('1', '2') for name, value in says.items()}
    second = get_base(make_cache(directory), web.url + 'good')
    # One GET checks for changes and another one downloads. The last one checks again, without conditional requests.
    assert len(web.sent_bodies) == before + (2 if compares and 'etag' in says else 3)
    assert Path(second.path).name == get_base_name(web.image)
    # Disks lie on the first one, so it stays.
    assert Path(first.path).exists()
    assert get_base(make_cache(directory), web.url + 'good') == second


def test_image_replaced_by_an_older_one_is_fetched(tmp_path: Path, directory: Path) -> None:
    """Python's own server answers 304 if the file is older than the date of the request."""
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    older, newer = make_raw_image(MIB, 1), make_raw_image(2 * MIB, 2)
    handler = partial(SimpleHTTPRequestHandler, directory=str(shelf))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever, 0.02)
        try:
            for content, changed in ((older, 1_700_000_000), (newer, 1_700_600_000), (older, 1_700_000_000)):
                (shelf / 'a.raw').write_bytes(content)
                os.utime(shelf / 'a.raw', (changed, changed))
                url = f'http://127.0.0.1:{server.server_port}/a.raw'
                assert Path(get_base(make_cache(directory), url).path).name == get_base_name(content)
        finally:
            server.shutdown()


def test_length_is_the_version_if_the_server_sends_no_other(web: ImageServer, directory: Path) -> None:
    web.image = make_raw_image(MIB)
    first = get_base(make_cache(directory), web.url + 'good')
    assert (first.format, first.virtual_size, Path(first.path).name) == ('raw', MIB, get_base_name(web.image))
    web.image = make_raw_image(MIB, 1)
    assert get_base(make_cache(directory), web.url + 'good') == first
    web.image = make_raw_image(2 * MIB, 1)
    assert get_base(make_cache(directory), web.url + 'good').virtual_size == 2 * MIB


def test_image_without_any_version_is_fetched_each_time_and_stored_once(web: ImageServer, directory: Path) -> None:
    first = get_base(make_cache(directory), web.url + 'without_length')
    assert get_base(make_cache(directory), web.url + 'without_length') == first
    assert web.requests.count('without_length') == 3
    assert list_cached(directory) == [Path(first.path).name]


# Malformed notes about URLs and base volumes.


@pytest.mark.parametrize(
    'content',
    ['', 'nonsense', '[]', '{}', '{"version": 2}', '{"version": 1, "url": 7}', b'\xff\0', 'null', '{"version": 1'],
)
def test_malformed_url_entry_is_written_again(web: ImageServer, directory: Path, content: str | bytes) -> None:
    web.headers = {'etag': '"1"'}
    first = get_base(make_cache(directory), web.url + 'good')
    (path,) = list_url_entries(directory)
    good = json.loads(path.read_text())
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert get_base(make_cache(directory), web.url + 'good') == first
    assert json.loads(path.read_text()) == good
    assert len(web.sent_bodies) == 2
    assert list_cached(directory) == [Path(first.path).name]


def test_malformed_fields_of_a_url_entry_are_tolerated(web: ImageServer, directory: Path) -> None:
    web.headers = {'etag': '"1"'}
    first = get_base(make_cache(directory), web.url + 'good')
    (path,) = list_url_entries(directory)
    good = json.loads(path.read_text())
    for name in good['found']:
        for value in (None, [], {}, 'x', '../x', {'etag': 7}, {'x': ''}):
            path.write_text(json.dumps({**good, 'found': {**good['found'], name: value}}))
            assert get_base(make_cache(directory), web.url + 'good') == first, (name, value)
        path.write_text(json.dumps({**good, 'found': {k: v for k, v in good['found'].items() if k != name}}))
        assert get_base(make_cache(directory), web.url + 'good') == first, name
    assert json.loads(path.read_text()) == good


def test_missing_or_truncated_base_volume_is_fetched_again(web: ImageServer, directory: Path, image: bytes) -> None:
    web.headers = {'etag': '"1"'}
    first = get_base(make_cache(directory), web.url + 'good')
    for _ in range(2):
        assert get_base(make_cache(directory), web.url + 'good') == first
    assert web.sent_bodies == ['good']
    Path(first.path).unlink()
    assert get_base(make_cache(directory), web.url + 'good') == first
    os.truncate(first.path, 1000)
    assert get_base(make_cache(directory), web.url + 'good') == first
    assert Path(first.path).read_bytes() == image
    assert len(web.sent_bodies) == 3


@pytest.mark.parametrize('path', ['farm', 'now'])
def test_server_with_another_version_in_each_answer_needs_a_checksum(
    web: ImageServer, directory: Path, path: str
) -> None:
    assert_refused(
        directory, web.url + path, 'changed during the download. Fix: create the instance again, or add #sha256='
    )
    pinned = f'{web.url}{path}#sha256={sha256(web.image)}'
    assert sha256(web.image) in get_base(make_cache(directory), pinned).path


def test_sparse_image_stays_sparse(web: ImageServer, directory: Path, tmp_path: Path) -> None:
    path = tmp_path / 'sparse.raw'
    with path.open('wb') as file:
        file.truncate(64 * MIB)
        file.write(make_raw_image(MIB))
        file.seek(40 * MIB + 1234)
        file.write(os.urandom(MIB))
    web.image = path.read_bytes()
    for url, local in ((path.as_uri(), tmp_path), (web.url + 'good', None)):
        volume = Path(get_base(make_cache(directory, local), url).path)
        assert (volume.name, volume.stat().st_size, volume.read_bytes()) == (
            get_base_name(web.image),
            64 * MIB,
            web.image,
        )
        assert volume.stat().st_blocks * 512 < 4 * MIB
        volume.unlink()


# During a download: progress is reported, it can be cancelled, and a local image may change.


def test_progress_is_reported_at_intervals(web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, 'REPORT_SECONDS', 0.1)
    reports: list[tuple[int, int | None]] = []

    def report_progress(done: int, total: int | None) -> None:
        reports.append((done, total))
        if done == MIB // 2:
            web.may_go_on.set()

    web.image = make_raw_image(MIB)
    get_base(make_cache(directory), web.url + 'half', report_progress=report_progress)
    assert (MIB // 2, MIB) in reports
    assert reports == sorted(set(reports)), 'only what is new is told'
    reports.clear()
    monkeypatch.setattr(fetch, 'REPORT_SECONDS', 30.0)
    get_base(make_cache(directory), web.url + 'half', report_progress=report_progress)
    assert reports == [], 'what is here soon is not told'


@pytest.mark.parametrize('path', ['silence', 'half'])
def test_download_from_a_silent_server_can_be_cancelled(web: ImageServer, directory: Path, path: str) -> None:
    web.image = make_raw_image(MIB)
    checkpoints: list[float] = []

    def checkpoint() -> None:
        checkpoints.append(time.monotonic())
        if web.requests and len(checkpoints) > 4:
            raise Cancelled

    started_at = time.monotonic()
    with pytest.raises(Cancelled):
        get_base(make_cache(directory), web.url + path, checkpoint)
    assert time.monotonic() - started_at < SLOWDOWN_FACTOR * 10
    gaps = [after - before for before, after in zip(checkpoints, checkpoints[1:], strict=False)]
    assert max(gaps) < 1.0
    assert list_cached(directory) == []
    web.may_go_on.set()
    assert get_base(make_cache(directory), web.url + 'good').virtual_size == MIB
    assert list_cached(directory) == [get_base_name(web.image)]


# Local images


def test_local_image_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old content was recorded with the new file's version, and used until the next change."""
    path, newer = tmp_path / 'a.raw', tmp_path / 'newer'
    path.write_bytes(make_raw_image(MIB))
    newer.write_bytes(make_raw_image(MIB, 1))
    real_open = Path.open

    def open_and_replace(opened_path: Path, *args: Any, **kwargs: Any) -> Any:
        file = real_open(opened_path, *args, **kwargs)
        if opened_path == path and newer.exists():
            newer.rename(path)
        return file

    monkeypatch.setattr(Path, 'open', open_and_replace)
    assert_refused(
        directory, path.as_uri(), 'changed during the download. Fix: create the instance again', local=tmp_path
    )
    assert Path(get_base(make_cache(directory, tmp_path), path.as_uri()).path).name == get_base_name(
        make_raw_image(MIB, 1)
    )


def test_local_image_is_copied_again_after_a_change(tmp_path: Path, directory: Path) -> None:
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    path, url = shelf / 'a.raw', f'file://{shelf}/a.raw'
    path.write_bytes(make_raw_image(MIB))
    first = get_base(make_cache(directory, shelf), url)
    assert get_base(make_cache(directory, shelf), url) == first
    path.write_bytes(make_raw_image(MIB, 1))
    second = get_base(make_cache(directory, shelf), url)
    assert Path(second.path).name == get_base_name(make_raw_image(MIB, 1))
    (shelf / 'SHA256SUMS').write_text(f'{"0" * 64}  a.raw\n')
    assert get_base(make_cache(directory, shelf), url) == second
    path.write_bytes(make_raw_image(MIB, 2))
    assert_refused(directory, url, 'but SHA256SUMS in its directory has 0000', local=shelf)
    path.unlink()
    assert_refused(directory, url, 'no such file', local=shelf)
    assert BaseVolumes(directory, LIMITS.cache_bytes).read_url_entry(url) is not None
