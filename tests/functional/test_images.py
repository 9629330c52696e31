"""The image cache against a web server that does everything wrong, and files that are no images."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images import download
from ecomp.agent.images.cache import Bases, ImageCache
from ecomp.agent.images.connections import Reach
from ecomp.agent.images.download import Away
from ecomp.agent.instance.build import Cancelled
from ecomp.errors import BuildFailed
from ecomp.model.guest import BaseImage
from tests.kit.image_server import Handler, Web
from tests.kit.images import LIMITS, LOOPBACK, MIB, cache, get, kept, refused
from tests.kit.servers import PATIENCE, free_port, until

# What works


@pytest.mark.parametrize('path', ['good', 'without_length', 'moved', 'moved_twice'])
def test_an_image_is_kept_whole_under_a_name_of_its_content(web: Web, directory: Path, image: bytes, path: str) -> None:
    found = get(cache(directory), web.url + path)
    assert (found.format, found.virtual_size) == ('qcow2', 16 * MIB)
    assert Path(found.path).read_bytes() == image
    assert kept(directory) == [Path(found.path).name]
    assert found.path == str(directory / f'base-{hashlib.sha256(image).hexdigest()}.qcow2')
    assert Path(found.path).stat().st_mode & 0o777 == 0o644


def test_many_at_once_are_one_download(web: Web, directory: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(get, cache(directory), web.url + 'slowly') for _ in range(4)]
        until(lambda: web.asked, 10, 'somebody downloads')
        web.may_go_on.set()
        found = {each.result(PATIENCE * 30) for each in asking}
    assert len(found) == 1
    # Whoever waited for it has it: nobody asks again, not even whether it is the same.
    assert web.asked == ['slowly', 'SHA256SUMS']


def test_a_leftover_of_a_killed_worker_is_no_image(web: Web, directory: Path) -> None:
    url = web.url + 'good'
    part = Bases(directory, LIMITS.cache).part(url)
    directory.mkdir()
    part.write_bytes(b'half of it')
    found = get(cache(directory), url)
    assert kept(directory) == [Path(found.path).name]
    part.write_bytes(b'half of it')
    cache(directory).sweep()
    assert kept(directory) == [Path(found.path).name]


# What does not


@pytest.mark.parametrize(
    ('path', 'reason'),
    [
        ('error', 'the server answers HTTP 500'),
        ('nothing', 'is empty'),
        ('reset', 'cut off|connection broke|cannot be reached'),
        ('unpacked_by_nobody', 'the server sends it packed .Content-Encoding.. Fix: have the server send'),
        ('no_http', 'cannot be reached'),
        ('to_another_scheme', 'redirected to what is no URL of an image'),
        ('to_nowhere', 'redirected to what is no URL of an image'),
    ],
)
def test_a_bad_answer_is_no_image(web: Web, directory: Path, path: str, reason: str) -> None:
    refused(directory, web.url + path, reason)
    # And poisons nothing.
    assert get(cache(directory), web.url + 'good').format == 'qcow2'


def test_a_length_that_is_no_number_is_passed_over_or_refused(web: Web, directory: Path, image: bytes) -> None:
    try:
        found = get(cache(directory), web.url + 'no_number')
    except BuildFailed:
        assert kept(directory) == []
    else:
        assert Path(found.path).read_bytes() == image


def test_nothing_is_written_that_was_not_announced(web: Web, directory: Path, image: bytes) -> None:
    """In chunks it is as long as they are, and room is made for each: a length that is said besides limits nothing."""
    assert get(cache(directory), web.url + 'more_in_chunks').format == 'qcow2'
    shutil.rmtree(directory)
    with pytest.raises(BuildFailed, match='and `image_cache:` here is'):
        get(cache(directory, limit=len(image) // 2), web.url + 'more_in_chunks')
    assert kept(directory) == []


def test_what_grows_while_it_is_read_is_refused(directory: Path, shelf: Path, image: bytes) -> None:
    reads: list[Path] = []
    opened = download.Local.open

    def read() -> bytes:
        reads.append(path)
        return image[: len(image) // 2]

    def grows(local: download.Local, known: download.Version | None) -> download.Stream | None:
        stream = opened(local, known)
        assert stream is not None
        return replace(stream, read=read)

    path = shelf / 'growing'
    path.write_bytes(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.Local, 'open', grows)
        refused(directory, path.as_uri(), f'sends more than the {len(image)} bytes that it has announced', shelf)
    assert len(reads) == 3


def test_nobody_there(directory: Path) -> None:
    refused(directory, f'http://127.0.0.1:{free_port()}/x', 'the server cannot be reached: it refuses the connection')
    refused(directory, 'http://no-such-host.invalid/x', 'the server cannot be reached: ', ' name')


@pytest.mark.parametrize(
    ('status', 'says'), [(407, '407 Proxy Authentication Required'), (403, '403 Forbidden'), (599, '599')]
)
def test_what_a_proxy_answers_in_place_of_an_https_server_is_said(web: Web, status: int, says: str) -> None:
    """By its number's name: the words beside it are the proxy's own."""

    def do_CONNECT(handler: Handler) -> None:
        handler.send_response(status, 'ask \x1b[7m me')
        handler.end_headers()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, 'do_CONNECT', do_CONNECT, raising=False)
        asked = download.Remote('https://cloud.example/x', Reach(proxy=web.url))
        with pytest.raises(Away) as away:
            asked.open(None)
        asked.close()
    assert away.value.reason == f'https://cloud.example/x: the proxy answers HTTP {says}'


@pytest.mark.parametrize('url', ['', 'x', '/etc/shadow', 'ftp://h/x', 'http:///x', 'file://host/x', 'http://h/\udcff'])
def test_what_is_no_url_is_asked_of_nobody(directory: Path, url: str) -> None:
    refused(directory, url, 'the image ')
    assert not directory.exists()


def test_a_silent_server_is_given_up(web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, 'TIMEOUT', (1.0, 0.3))
    refused(directory, web.url + 'silence', 'no answer in time|connection broke')


@pytest.mark.parametrize('path', ['drip', 'dripping/good'])
def test_an_endless_drip_is_given_up(web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Also one in the list of checksums beside it."""
    monkeypatch.setattr(download, 'DEADLINE', 0.5)
    began = time.monotonic()
    refused(directory, web.url + path, r'not here after 0\.5 s, [0-9]+ bytes so far')
    assert time.monotonic() - began < PATIENCE * 5


# A destroy meanwhile


def cancel() -> None:
    raise Cancelled


def test_so_is_the_wait_for_another_s_download(web: Web, directory: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(get, cache(directory), web.url + 'slowly')
        until(lambda: web.asked, 10, 'somebody downloads')
        with pytest.raises(Cancelled):
            get(cache(directory), web.url + 'slowly', cancel)
        web.may_go_on.set()
        assert Path(other.result(PATIENCE * 30).path).exists()


# The disk


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(BuildFailed, match='file: '):
        get(cache(tmp_path / 'file'), 'http://h/x')


# Local images


@pytest.fixture
def shelf(tmp_path: Path, image: bytes) -> Path:
    """A directory of local images, and a secret beside it."""
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
def test_an_image_on_the_shelf_is_taken(directory: Path, shelf: Path, image: bytes, name: str) -> None:
    found = get(cache(directory, shelf), f'file://{shelf}/{name}')
    assert Path(found.path).read_bytes() == image
    assert not Path(found.path).is_symlink()


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('../secret.qcow2', 'only images under'),
        ('%2e%2e/secret.qcow2', 'only images under'),
        ('..%2Fsecret.qcow2', 'only images under'),
        ('outside', 'only images under'),
        ('up/secret.qcow2', 'only images under'),
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
def test_what_is_not_on_the_shelf_is_not(directory: Path, shelf: Path, name: str, reason: str) -> None:
    refused(directory, f'file://{shelf}/{name}', reason, local=shelf)


def test_a_neighbour_that_begins_with_the_same_letters_is_not_on_it(directory: Path, shelf: Path, image: bytes) -> None:
    other = shelf.with_name('shelf2')
    other.mkdir()
    (other / 'a.qcow2').write_bytes(image)
    refused(directory, f'file://{other}/a.qcow2', 'only images under', local=shelf)


def test_without_a_shelf_no_local_image_is_taken(directory: Path, shelf: Path) -> None:
    refused(directory, f'file://{shelf}/a.qcow2', 'this compute takes no local images')


def test_what_inspect_refuses_is_not_kept(web: Web, directory: Path) -> None:
    def particular(path: Path, _: Callable[[], None]) -> BaseImage:
        assert path.suffix == '.part'
        raise BuildFailed('image', f'{path.stat().st_size} bytes are too many')

    with pytest.raises(BuildFailed, match='bytes are too many'):
        get(ImageCache(directory, particular, None, LIMITS, LOOPBACK), web.url + 'good')
    assert kept(directory) == []
