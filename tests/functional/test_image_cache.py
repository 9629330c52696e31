"""The image cache: eviction, checksums, unreachable servers and periodic checks of files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecomp.agent.images import cache as cache_module
from ecomp.agent.images import fetch
from ecomp.agent.images.cache import DAY_SECONDS, BaseVolumes, Scrubber, list_bad, list_image_hashes
from ecomp.agent.instance.build import Cancelled
from ecomp.errors import BuildFailed
from ecomp.model.facts import MAX_CACHED_IMAGES
from ecomp.model.image import hash_image
from tests.functional.image_content import create_overlay, get_base_name, list_url_entries, make_raw_image, sha256
from tests.functional.present import start_and_stop
from tests.kit.image_server import Handler, ImageServer
from tests.kit.images import (
    LIMITS,
    MIB,
    assert_refused,
    get_base,
    list_cached,
    make_cache,
)
from tests.kit.servers import SLOWDOWN_FACTOR, free_port, wait_until

# Eviction: which base volumes are removed to make room, and which are always kept.


def test_least_recently_used_image_is_evicted(web: ImageServer, directory: Path) -> None:
    contents = {name: make_raw_image(MIB, number) for number, name in enumerate('abc')}
    image_cache = make_cache(directory, limit=2 * MIB)
    for name in 'aba':
        web.image = contents[name]
        get_base(image_cache, f'{web.url}good?{name}#sha256={sha256(web.image)}')
    web.image = contents['c']
    get_base(image_cache, web.url + 'good?c')
    assert list_cached(directory) == sorted([get_base_name(contents['a']), get_base_name(contents['c'])])
    # The note about its URL is removed, too.
    assert {json.loads(path.read_text())['url'][-1] for path in list_url_entries(directory)} == {'a', 'c'}
    web.image = contents['b']
    assert get_base(image_cache, web.url + 'good?b').virtual_size == MIB


def test_hashes_of_cached_images_are_listed(web: ImageServer, directory: Path) -> None:
    image_cache = make_cache(directory, limit=2 * MIB)
    assert list_image_hashes(directory) == []
    urls = [f'{web.url}good?{name}' for name in 'abc']
    pins = []
    for number, url in enumerate(urls):
        web.image = make_raw_image(MIB, number)
        pins.append(f'{url}#sha256={sha256(web.image)}')
        get_base(image_cache, pins[-1] if number == 1 else url)
    # The third image has evicted the first one.
    assert set(list_image_hashes(directory)) == {hash_image(each) for each in (*urls[1:], *pins[1:])}
    (directory / f'.bad-{sha256(web.image)}').touch()
    assert set(list_image_hashes(directory)) == {hash_image(urls[1]), hash_image(pins[1])}
    for number in range(MAX_CACHED_IMAGES + 1):
        (directory / f'base-{number:064x}.qcow2').touch()
        (directory / f'base-{number:064x}.part').touch()
    assert len(list_image_hashes(directory)) <= MAX_CACHED_IMAGES
    assert list_image_hashes(directory / 'missing') == []


def test_newer_image_may_evict_its_predecessor(web: ImageServer, directory: Path) -> None:
    image_cache = make_cache(directory, limit=3 * MIB - 1)
    web.image = make_raw_image(MIB)
    get_base(image_cache, web.url + 'good')
    web.image = make_raw_image(2 * MIB, 1)
    assert get_base(image_cache, web.url + 'good').virtual_size == 2 * MIB
    assert list_cached(directory) == [get_base_name(web.image)]


def test_image_is_kept_during_a_question(web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evict() -> None:
        with pytest.raises(BuildFailed, match='in use take'), (directory / 'new').open('wb') as file:
            BaseVolumes(directory, 2 * MIB).reserve(file.fileno(), 2 * MIB, 0)
        web.may_go_on.set()

    first = get_base(make_cache(directory), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_silence)
    assert get_base(make_cache(directory), web.url + 'good', evict) == first
    # A newer one may evict it, but its download is not repeated if it breaks off.
    monkeypatch.setattr(cache_module, 'UNREACHABLE_SECONDS', 0.0)
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_cut)
    web.image = make_raw_image(3 * MIB)
    with pytest.raises(BuildFailed):
        get_base(make_cache(directory, limit=3 * MIB), web.url + 'good')
    assert web.requests[2:] == ['good', 'good', 'good', 'SHA256SUMS']


def test_cancelled_check_of_the_server_leaves_nothing(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.url + 'good'
    first = get_base(make_cache(directory), url)

    def cancel_once_asked() -> None:
        if len(web.requests) > request_count:
            raise Cancelled

    request_count = len(web.requests)
    monkeypatch.setattr(cache_module, 'MAX_CHECK_SECONDS', 1.0)
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_silence)
    with pytest.raises(Cancelled):
        get_base(make_cache(directory), url, cancel_once_asked)
    wait_until(
        lambda: not any(thread.name == 'question' for thread in threading.enumerate()), 20, 'its thread has ended'
    )
    assert list_cached(directory) == [Path(first.path).name]


def test_base_volumes_of_disks_and_builds_are_not_evicted(web: ImageServer, directory: Path) -> None:
    contents = {name: make_raw_image(MIB, number) for number, name in enumerate('abcd')}
    image_cache = make_cache(directory, limit=2 * MIB)
    web.image = contents['a']
    get_base(image_cache, web.url + 'good?a')
    create_overlay(directory, 'x.qcow2', get_base_name(contents['a']), 'raw')
    # The chain may have several files, with any names, in any directory.
    create_overlay(directory, 'y', 'x.qcow2', 'qcow2')
    (directory / 'x.qcow2').rename(directory.with_name('elsewhere'))
    subprocess.run(
        ['qemu-img', 'rebase', '-u', '-F', 'qcow2', '-b', str(directory.with_name('elsewhere')), str(directory / 'y')],
        check=True,
    )
    web.image = contents['b']
    with image_cache.hold(web.url + 'good?b', lambda: None, lambda *_: None) as volume:
        web.image = contents['c']
        before = list_cached(directory)
        with pytest.raises(BuildFailed) as caught:
            get_base(image_cache, web.url + 'good?c')
        assert caught.value.reason == (
            'the image is 1.0 MiB, but base volumes and downloads that are in use take 2.0 MiB of the 2.0 MiB that '
            '`image_cache:` allows. Fix: increase `image_cache:` in compute.yaml of this host'
        )
        assert list_cached(directory) == before
        assert Path(volume.path).exists()
    # The build has ended, and no disk lies on its base volume.
    assert get_base(image_cache, web.url + 'good?c').virtual_size == MIB
    assert get_base_name(contents['a']) in list_cached(directory)
    assert get_base_name(contents['b']) not in list_cached(directory)


def test_nothing_is_evicted_if_that_would_not_make_enough_room(web: ImageServer, directory: Path) -> None:
    contents = [make_raw_image(MIB, number) for number in range(2)]
    image_cache = make_cache(directory, limit=4 * MIB)
    for web.image in contents:
        get_base(image_cache, f'{web.url}good?{len(list_cached(directory))}')
    create_overlay(directory, 'x.qcow2', get_base_name(contents[0]), 'raw')
    before = list_cached(directory)
    web.image = make_raw_image(4 * MIB, 7)
    with pytest.raises(BuildFailed, match='the image is 4.0 MiB, but base volumes .* take 1.0 MiB of the 4.0 MiB'):
        get_base(image_cache, web.url + 'good?big')
    assert list_cached(directory) == before


@pytest.mark.parametrize('path', ['good', 'without_length'])
def test_image_above_the_limit_is_refused_during_the_download(web: ImageServer, directory: Path, path: str) -> None:
    web.image = make_raw_image(3 * MIB)
    image_cache = make_cache(directory, limit=2 * MIB)
    with pytest.raises(BuildFailed, match=r'the image is 2\.[0-9] MiB|the image is 3.0 MiB') as caught:
        get_base(image_cache, web.url + path)
    assert ', but `image_cache:` allows 2.0 MiB. Fix: increase' in caught.value.reason
    assert list_cached(directory) == []


def test_unreadable_disk_prevents_eviction(web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_cache = make_cache(directory, limit=MIB)
    web.image = make_raw_image(MIB)
    get_base(image_cache, web.url + 'good?a')

    def unreadable(path: Path) -> list[str]:
        raise OSError(5, 'Input/output error', str(path))

    monkeypatch.setattr('ecomp.agent.images.cache.read_backing_chain', unreadable)
    web.image = make_raw_image(MIB, 1)
    with pytest.raises(BuildFailed, match='cannot be stored in .*: Input/output error') as refused:
        get_base(image_cache, web.url + 'good?b')
    assert refused.value.is_host_fault
    assert list_cached(directory) == [get_base_name(make_raw_image(MIB))]


@pytest.mark.parametrize('path', ['without_length', 'more_in_chunks'])
def test_room_is_made_in_large_steps_if_the_length_is_unknown(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A check of the directory for each read took 25 s of processor time for 128 MiB in chunks."""
    lengths_path = directory.with_name('lengths')  # a file, because the downloads are processes of their own
    reserve = BaseVolumes.reserve

    def reserve_and_record(bases: BaseVolumes, descriptor: int, *args: int) -> int | None:
        answer = reserve(bases, descriptor, *args)
        with lengths_path.open('a') as file:
            file.write(f'{os.fstat(descriptor).st_size}\n')
        assert sum(path.stat().st_size for path in directory.glob('base-*')) <= limit
        return answer

    monkeypatch.setattr(BaseVolumes, 'reserve', reserve_and_record)
    monkeypatch.setattr(fetch, 'RESERVE_AHEAD_BYTES', MIB)
    # An image that fits exactly is accepted. Volumes are evicted for received bytes, not for those reserved ahead.
    limit = 5 * MIB
    ours = make_cache(directory, limit=limit)
    for number, size in enumerate((MIB, MIB, 3 * MIB)):
        web.image = make_raw_image(size, number)
        get_base(ours, f'{web.url}{path}?{number}')
    assert len(lengths_path.read_text().split()) < 20, 'of hundreds of reads'
    sizes = [file.stat().st_size for file in directory.glob('base-*')]
    assert sorted(sizes) == [MIB, MIB, 3 * MIB], 'and nothing more than the image stays'
    web.image = make_raw_image(limit, 4)
    assert get_base(ours, f'{web.url}{path}?4').virtual_size == limit
    assert list_cached(directory) == [get_base_name(web.image)]
    assert max(map(int, lengths_path.read_text().split())) == limit


def test_disk_removed_during_eviction_keeps_no_base_volume(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker destroys the disk after the directory is listed, before the disk is read."""
    image_cache = make_cache(directory, limit=MIB)
    web.image = make_raw_image(MIB)
    get_base(image_cache, web.url + 'good?a')
    disk = directory / 'x.qcow2'
    create_overlay(directory, disk.name, get_base_name(web.image), 'raw')
    is_file = Path.is_file

    def remove_after_check(path: Path) -> bool:
        result = is_file(path)
        if path == disk:
            disk.unlink(missing_ok=True)
        return result

    monkeypatch.setattr(Path, 'is_file', remove_after_check)
    web.image = make_raw_image(MIB, 1)
    assert get_base(image_cache, web.url + 'good?b').virtual_size == MIB
    assert list_cached(directory) == [get_base_name(web.image)]


def test_download_reserves_its_room_at_the_start(web: ImageServer, directory: Path) -> None:
    web.image = make_raw_image(MIB)
    image_cache = make_cache(directory, limit=2 * MIB - 1)
    with ThreadPoolExecutor(1) as threads:
        other_download = threads.submit(get_base, image_cache, web.url + 'half')
        # At first the file is empty, while the server is queried for SHA256SUMS.
        wait_until(lambda: [path.stat().st_size for path in directory.glob('*.part')] == [MIB], 10, 'it has its room')
        with pytest.raises(BuildFailed, match='base volumes and downloads that are in use take'):
            get_base(image_cache, web.url + 'good')
        web.may_go_on.set()
        other_download.result(SLOWDOWN_FACTOR * 30)


# Checksums: pinned in the URL, and listed beside the image on the server.


def test_cached_pinned_image_needs_no_network(web: ImageServer, directory: Path, image: bytes) -> None:
    url = f'{web.url}good#sha256={sha256(image)}'
    first = get_base(make_cache(directory), url)
    requests = list(web.requests)
    assert requests == ['good'], 'whoever says the checksum needs none of the server'
    web.shutdown()
    web.server_close()
    assert get_base(make_cache(directory), url) == first
    # The URL that it came from does not matter either.
    assert get_base(make_cache(directory), f'http://127.0.0.1:{free_port()}/x#SHA256={sha256(image).upper()}') == first
    assert get_base(make_cache(directory), f'file:///nowhere#sha256={sha256(image)}') == first


def test_cached_pinned_image_does_not_wait_for_downloads(web: ImageServer, directory: Path, image: bytes) -> None:
    first = get_base(make_cache(directory), web.url + 'good')
    with ThreadPoolExecutor(1) as threads:
        other_download = threads.submit(get_base, make_cache(directory), web.url + 'slowly')
        wait_until(lambda: 'slowly' in web.requests, 10, 'somebody downloads')
        assert get_base(make_cache(directory), f'{web.url}slowly#sha256={sha256(image)}') == first
        assert not other_download.done()
        web.may_go_on.set()
        assert other_download.result(SLOWDOWN_FACTOR * 30) == first


def test_changed_image_does_not_replace_the_pinned_one(web: ImageServer, directory: Path, image: bytes) -> None:
    url = web.url + 'good'
    first = get_base(make_cache(directory), url)
    web.image = make_raw_image(MIB)
    second = get_base(make_cache(directory), url)
    assert second != first
    assert get_base(make_cache(directory), f'{url}#sha256={sha256(image)}') == first
    assert get_base(make_cache(directory), url) == second


def test_list_of_checksums_beside_the_image_is_checked(web: ImageServer, directory: Path, image: bytes) -> None:
    web.sums = f'{"0" * 64}  another\n{sha256(image)} *good\n'.encode()
    first = get_base(make_cache(directory), web.url + 'good')
    web.sums = f'{"0" * 64}  good\n'.encode()
    assert get_base(make_cache(directory), web.url + 'good') == first, 'what is the same was checked'
    assert_refused(
        directory, web.url + 'good?2', f'its SHA-256 is {sha256(image)}, but SHA256SUMS in its directory has 000'
    )
    assert get_base(make_cache(directory), f'{web.url}good?3#sha256={sha256(image)}') == first


def test_unreadable_list_of_checksums_is_an_error(web: ImageServer, directory: Path) -> None:
    assert_refused(directory, web.url + 'broken/good', 'broken/SHA256SUMS: the server returned HTTP 500')
    web.sums = b'x' * (MIB + 1)
    assert_refused(directory, web.url + 'good', 'SHA256SUMS: is longer than 1 MiB. Fix: add #sha256=')
    web.sums = b'<html>whatever you ask for</html>'
    assert get_base(make_cache(directory), web.url + 'good').format == 'qcow2'


@pytest.mark.parametrize('says', [{'etag': '"1"'}, {'last-modified': 'yesterday'}])
def test_image_that_changes_during_the_download_is_refused(
    web: ImageServer, directory: Path, says: dict[str, str]
) -> None:
    web.image, web.headers = make_raw_image(MIB, 1), says
    assert_refused(directory, web.url + 'changing', 'changed during the download')
    assert Path(get_base(make_cache(directory), web.url + 'changing').path).name == get_base_name(web.image)


def test_mirrors_with_different_etags_cause_no_second_download(web: ImageServer, directory: Path) -> None:
    """Each redirect leads to another mirror."""
    url = web.url + 'mirrored'
    web.headers = {'etag': '1', 'last-modified': 'Sat, 21 Nov 2026 10:00:00 GMT'}
    first = get_base(make_cache(directory), url)
    fetched = web.sent_bodies.copy()
    for _ in range(4):
        assert get_base(make_cache(directory), url) == first
    assert web.requests.count('SHA256SUMS') == 1
    assert all('signed' not in path.read_text() for path in list_url_entries(directory))
    assert fetched == ['mirror1', 'mirror0'], 'the second one by the check, which does not read it'
    web.image, web.headers = make_raw_image(MIB, 3), {'etag': '2', 'last-modified': 'Sun, 22 Nov 2026 10:00:00 GMT'}
    for _ in range(2):
        assert Path(get_base(make_cache(directory), url).path).name == get_base_name(web.image)
    # Without a date nothing shows that two mirrors have the same image.
    web.headers, web.image = {'etag': '3'}, make_raw_image(MIB, 4)
    with pytest.raises(BuildFailed, match='changed during the download'):
        get_base(make_cache(directory), url)


def test_expired_redirect_is_requested_again(web: ImageServer, directory: Path) -> None:
    """Signed URLs of an object store may expire before the download ends."""
    web.headers = {'etag': '"1"'}
    assert get_base(make_cache(directory), web.url + 'signed').format == 'qcow2'
    # The image; the checksums; then a check, by another redirect.
    assert web.requests == ['signed', 'once', 'SHA256SUMS', 'signed', 'once']


# Servers that are unreachable or silent, or no longer have the image.


def test_cached_image_is_used_while_its_server_is_unreachable(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_module, 'MAX_CHECK_SECONDS', 0.3)
    url = web.url + 'good'
    first = get_base(make_cache(directory), url)
    for answer in ('error', 'no_http', 'silence', 'reset'):
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('ecomp.agent.images.cache.UNREACHABLE_SECONDS', 0.0)
            patch.setattr('tests.kit.image_server.Handler.answer_good', getattr(Handler, f'answer_{answer}'))
            if answer == 'reset':
                patch.setattr(web, 'image', web.image + bytes(512))  # a new image, whose download breaks off
            with caplog.at_level(logging.WARNING):
                assert get_base(make_cache(directory), url) == first
        assert [record.levelname for record in caplog.records] == ['WARNING'], answer
        assert 'the cached image is used without a check for a newer one: http' in caplog.text
    (note,) = directory.glob('.asked-*')
    note.unlink()
    web.shutdown()
    web.server_close()
    caplog.clear()
    for _ in range(3):
        assert get_base(make_cache(directory), url) == first
    # It is logged once: builds of all workers use the note instead of waiting for the server.
    assert len(caplog.records) == 1


def test_concurrent_builds_ask_a_silent_server_once(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has its own cache object: their builds used to time out one after the other."""
    monkeypatch.setattr(cache_module, 'MAX_CHECK_SECONDS', 0.5)
    url = web.url + 'good'
    first = get_base(make_cache(directory), url)
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_silence)
    before = len(web.requests)
    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(lambda _: get_base(make_cache(directory), url), range(4))) == [first] * 4
    assert len(web.requests) == before + 1
    assert len(list(directory.glob('.asked-*'))) == 1
    monkeypatch.setattr('ecomp.agent.images.cache.UNREACHABLE_SECONDS', 0.0)
    get_base(make_cache(directory), url)
    assert len(web.requests) == before + 2
    # A note of an earlier boot, or a partial one, is ignored.
    monkeypatch.setattr('ecomp.agent.images.cache.UNREACHABLE_SECONDS', 30.0)
    (note,) = directory.glob('.asked-*')
    for number, text in enumerate((str(time.monotonic() + 3600), '', 'nan', b'\xff'), 3):
        note.write_bytes(text if isinstance(text, bytes) else text.encode())
        get_base(make_cache(directory), url)
        assert len(web.requests) == before + number
    # The note is removed with the URL's entry.
    Path(first.path).unlink()
    make_cache(directory).sweep()
    assert not list(directory.glob('.asked-*'))


def test_one_check_of_the_server_serves_all_builds_submitted_before_it(web: ImageServer, directory: Path) -> None:
    web.headers, url = {'etag': '"1"'}, web.url + 'good'

    def count_requests(since: float) -> int:
        before = web.requests.count('good')
        assert get_base(make_cache(directory), url, since=since) == first
        return web.requests.count('good') - before

    submitted_at = time.monotonic()
    first = get_base(make_cache(directory), url)
    assert [count_requests(submitted_at), count_requests(submitted_at)] == [0, 0], 'it was fetched since'
    submitted_at = time.monotonic()
    assert [count_requests(submitted_at), count_requests(submitted_at), count_requests(submitted_at)] == [1, 0, 0]
    # An earlier answer does not count for a later build.
    assert [count_requests(time.monotonic()), count_requests(time.monotonic())] == [1, 1]
    (note,) = directory.glob('.asked-*')
    for content in (b'', b'x', b'\xff', note.read_bytes().split()[0], note.read_bytes()[:40] + b'nan'):
        note.write_bytes(content)
        assert count_requests(submitted_at) == 1, content
    assert count_requests(submitted_at) == 0
    # An image that was fetched since counts, too.
    submitted_at, web.image, web.headers = time.monotonic(), make_raw_image(MIB), {'etag': '"2"'}
    first = get_base(make_cache(directory), url)
    assert count_requests(submitted_at) == 0
    Path(first.path).unlink()
    make_cache(directory).sweep()
    assert not list(directory.glob('.asked-*'))


def test_image_that_the_server_removed_is_refused(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_base(make_cache(directory), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_missing)
    assert_refused(directory, web.url + 'good', 'the server returned HTTP 404')


# Base volumes are read again each day, and must not have changed since they were fetched.


# A day and a second, because a file's time may be slightly ahead of the test's clock.
MORE_THAN_A_DAY_SECONDS = DAY_SECONDS + 1


def corrupt(path: Path) -> None:
    """Change one byte and keep the times, as a broken disk or root would."""
    before = path.stat()
    with path.open('r+b') as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_changed_base_volume_is_found_and_fetched_again(
    web: ImageServer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetched = get_base(make_cache(directory), web.url + 'good')
    path = Path(fetched.path)
    content = path.read_bytes()
    instance = 'instance'
    create_overlay(directory, f'{instance}.qcow2', path.name, 'qcow2')
    scrubber = Scrubber(directory)
    corrupt(path)
    scrubber.scrub(time.time())
    assert list_bad(directory) == [], 'it was read when it was fetched'
    with caplog.at_level(logging.ERROR):
        scrubber.scrub(time.time() + MORE_THAN_A_DAY_SECONDS)
    assert caplog.messages == [
        f'{path}: the content of this base volume has changed since its download: no new disk uses it; '
        f'guests that depend on it: {instance}'
    ]
    assert list_bad(directory) == [hashlib.sha256(content).hexdigest()]

    # The next build fetches it again, under the same name: the guest on it uses the new file after its next start.
    request_count = len(web.requests)
    fetched_again = get_base(make_cache(directory), web.url + 'good')
    assert len(web.requests) > request_count
    assert fetched_again == fetched
    assert path.read_bytes() == content
    assert list_bad(directory) == []


def test_changed_pinned_base_volume_is_fetched_again(web: ImageServer, directory: Path) -> None:
    digest = hashlib.sha256(Path(get_base(make_cache(directory), web.url + 'good').path).read_bytes()).hexdigest()
    pinned = f'{web.url}good#sha256={digest}'
    path = Path(get_base(make_cache(directory), pinned).path)
    corrupt(path)
    Scrubber(directory).scrub(time.time() + MORE_THAN_A_DAY_SECONDS)
    request_count = len(web.requests)
    get_base(make_cache(directory), pinned)
    assert len(web.requests) > request_count
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_repaired_base_volume_is_used_again(web: ImageServer, directory: Path) -> None:
    path = Path(get_base(make_cache(directory), web.url + 'good').path)
    content, tomorrow = path.read_bytes(), time.time() + MORE_THAN_A_DAY_SECONDS
    corrupt(path)
    Scrubber(directory).scrub(tomorrow)
    assert list_bad(directory)
    path.write_bytes(content)
    Scrubber(directory).scrub(tomorrow + MORE_THAN_A_DAY_SECONDS)
    assert list_bad(directory) == []


def test_base_volumes_are_read_once_a_day_and_after_a_boot(
    web: ImageServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('time.clock_gettime', lambda _: 2 * DAY_SECONDS)
    get_base(make_cache(directory), web.url + 'good')
    path = Path(get_base(make_cache(directory), web.url + 'good?2').path)
    note = next(file for file in directory.glob('.read-*') if file.name.removeprefix('.read-') in path.name)
    os.utime(note, (1.0, 1.0))
    scrubber = Scrubber(directory)
    scrubber.scrub(time.time())
    assert time.time() - note.stat().st_mtime < 60
    os.utime(note, (time.time() - DAY_SECONDS + 60,) * 2)
    before = note.stat().st_mtime
    scrubber.scrub(time.time())
    assert note.stat().st_mtime == before
    # After a power cut the file may have zeros.
    corrupt(path)
    monkeypatch.setattr('time.clock_gettime', lambda _: 3600.0)
    scrubber.scrub(time.time())
    assert list_bad(directory) == [note.name.removeprefix('.read-')]
    path.unlink()
    BaseVolumes(directory, LIMITS.cache_bytes).sweep()
    assert not note.exists()


def test_base_volume_with_a_note_from_the_future_is_read_now(web: ImageServer, directory: Path) -> None:
    """A clock that had been five years ahead kept base volumes unread for five years."""
    path = Path(get_base(make_cache(directory), web.url + 'good').path)
    (note,) = directory.glob('.read-*')
    os.utime(note, (time.time() + 5 * 365 * DAY_SECONDS,) * 2)
    corrupt(path)
    Scrubber(directory).scrub(time.time())
    assert len(list_bad(directory)) == 1
    assert note.stat().st_mtime <= time.time()


def test_second_download_does_not_count_as_reading_the_base_volume(web: ImageServer, directory: Path) -> None:
    """A download of the same content from another URL does not read the cached file."""
    path = Path(get_base(make_cache(directory), web.url + 'good').path)
    (note,) = directory.glob('.read-*')
    os.utime(note, (1.0, 1.0))
    corrupt(path)
    assert get_base(make_cache(directory), web.url + 'good?same').path == str(path)
    Scrubber(directory).scrub(time.time())
    assert len(list_bad(directory)) == 1


def test_scrubber_reads_slowly_and_stops_quickly(web: ImageServer, directory: Path) -> None:
    path = Path(get_base(make_cache(directory), web.url + 'good').path)
    for note in directory.glob('.read-*'):
        note.unlink()
    with start_and_stop(Scrubber(directory, bytes_per_second=1)):
        started_at = time.monotonic()
        time.sleep(0.2)
    assert time.monotonic() - started_at < 10
    assert not list(directory.glob('.read-*')), 'it was not read to its end'
    with start_and_stop(Scrubber(directory, bytes_per_second=64 * MIB)):
        wait_until(lambda: list(directory.glob('.read-*')), 20, f'{path} is read')


def test_scrubber_accepts_a_missing_directory(tmp_path: Path) -> None:
    Scrubber(tmp_path / 'nowhere').scrub(time.time())
    assert list_bad(tmp_path / 'nowhere') == []
