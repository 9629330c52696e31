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
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images import download
from ecomp.agent.images.cache import DAY, Bases, ImageCache, Scrubber, bad
from ecomp.errors import BuildFailed
from tests.functional.image_content import base, entries, overlay, raw, sha256
from tests.functional.present import start_and_stop
from tests.kit.image_server import Handler, Web
from tests.kit.images import LIMITS, LOOPBACK, MIB, cache, get, inspect, kept, refused
from tests.kit.servers import PATIENCE, free_port, until

# Eviction: which base volumes are removed to make room, and which are always kept.


def test_what_was_not_used_for_longest_goes(web: Web, directory: Path) -> None:
    contents = {name: raw(MIB, number) for number, name in enumerate('abc')}
    image_cache = cache(directory, limit=2 * MIB)
    for name in 'aba':
        web.image = contents[name]
        get(image_cache, f'{web.url}good?{name}#sha256={sha256(web.image)}')
    web.image = contents['c']
    get(image_cache, web.url + 'good?c')
    assert kept(directory) == sorted([base(contents['a']), base(contents['c'])])
    # The note about its URL is removed, too.
    assert {json.loads(path.read_text())['url'][-1] for path in entries(directory)} == {'a', 'c'}
    web.image = contents['b']
    assert get(image_cache, web.url + 'good?b').virtual_size == MIB


def test_a_newer_image_may_take_the_room_of_the_one_before(web: Web, directory: Path) -> None:
    image_cache = cache(directory, limit=3 * MIB - 1)
    web.image = raw(MIB)
    get(image_cache, web.url + 'good')
    web.image = raw(2 * MIB, 1)
    assert get(image_cache, web.url + 'good').virtual_size == 2 * MIB
    assert kept(directory) == [base(web.image)]


def test_a_disk_is_made_while_the_server_is_asked_and_removed_if_it_has_another_one(web: Web, directory: Path) -> None:
    image_cache = cache(directory, limit=3 * MIB - 1)
    web.image = raw(MIB)
    older = base(web.image)
    get(image_cache, web.url + 'good')
    for newer in (False, True):
        if newer:
            web.image = raw(2 * MIB, 1)
        names, request_count = list[str](), len(web.asked)
        with image_cache.held(web.url + 'good', lambda: None, lambda *_: None) as bases:
            for volume in bases:
                if volume is None:
                    (directory / 'x.qcow2').unlink()
                    assert not list(directory.glob('*.part')), 'nothing is fetched before'
                    names.append('')
                else:
                    overlay(directory, 'x.qcow2', Path(volume.path).name, 'raw')
                    names.append(Path(volume.path).name)
        assert names == ([older, '', base(web.image)] if newer else [older])
        assert len(web.asked) == request_count + 1 + newer, 'and for SHA256SUMS'
    # The removed disk had kept the room that the new image needs.
    assert kept(directory) == [base(web.image), 'x.qcow2']


def test_who_stops_while_the_server_is_asked_leaves_it_to_nobody(web: Web, directory: Path) -> None:
    image_cache = cache(directory)
    web.image = raw(MIB)
    get(image_cache, web.url + 'good')
    web.image = raw(2 * MIB, 1)
    with image_cache.held(web.url + 'good', lambda: None, lambda *_: None) as bases:
        assert next(bases) is not None
    until(lambda: not any(thread.name == 'download' for thread in threading.enumerate()), 20, 'its thread has ended')
    assert not list(directory.glob('*.part'))
    assert get(image_cache, web.url + 'good').virtual_size == 2 * MIB


def test_what_a_disk_lies_on_stays_and_so_does_what_a_build_has(web: Web, directory: Path) -> None:
    contents = {name: raw(MIB, number) for number, name in enumerate('abcd')}
    image_cache = cache(directory, limit=2 * MIB)
    web.image = contents['a']
    get(image_cache, web.url + 'good?a')
    overlay(directory, 'x.qcow2', base(contents['a']), 'raw')
    # The chain may have several files, with any names, in any directory.
    overlay(directory, 'y', 'x.qcow2', 'qcow2')
    (directory / 'x.qcow2').rename(directory.with_name('elsewhere'))
    subprocess.run(
        ['qemu-img', 'rebase', '-u', '-F', 'qcow2', '-b', str(directory.with_name('elsewhere')), str(directory / 'y')],
        check=True,
    )
    web.image = contents['b']
    with image_cache.held(web.url + 'good?b', lambda: None, lambda *_: None) as bases:
        volume = next(bases)
        assert volume is not None
        web.image = contents['c']
        before = kept(directory)
        with pytest.raises(BuildFailed) as caught:
            get(image_cache, web.url + 'good?c')
        assert caught.value.reason == (
            'the image is 1.0 MiB; of the 2.0 MiB that `image_cache:` is here, 2.0 MiB are base volumes of disks or '
            'being downloaded, and cannot go'
        )
        assert kept(directory) == before
        assert Path(volume.path).exists()
    # The build has ended, and no disk lies on its base volume.
    assert get(image_cache, web.url + 'good?c').virtual_size == MIB
    assert base(contents['a']) in kept(directory)
    assert base(contents['b']) not in kept(directory)


def test_nothing_goes_if_that_would_not_be_enough(web: Web, directory: Path) -> None:
    contents = [raw(MIB, number) for number in range(2)]
    image_cache = cache(directory, limit=4 * MIB)
    for web.image in contents:
        get(image_cache, f'{web.url}good?{len(kept(directory))}')
    overlay(directory, 'x.qcow2', base(contents[0]), 'raw')
    before = kept(directory)
    web.image = raw(4 * MIB, 7)
    with pytest.raises(BuildFailed, match='the image is 4.0 MiB; of the 4.0 MiB .* 1.0 MiB are base volumes'):
        get(image_cache, web.url + 'good?big')
    assert kept(directory) == before


@pytest.mark.parametrize('path', ['good', 'without_length'])
def test_an_image_above_the_limit_is_refused_before_it_is_here(web: Web, directory: Path, path: str) -> None:
    web.image = raw(3 * MIB)
    image_cache = cache(directory, limit=2 * MIB)
    with pytest.raises(BuildFailed, match=r'the image is 2\.[0-9] MiB|the image is 3.0 MiB') as caught:
        get(image_cache, web.url + path)
    assert caught.value.reason.endswith('and `image_cache:` here is 2.0 MiB')
    assert kept(directory) == []


def test_a_disk_that_cannot_be_read_may_lie_on_anything(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_cache = cache(directory, limit=MIB)
    web.image = raw(MIB)
    get(image_cache, web.url + 'good?a')

    def unreadable(path: Path) -> list[str]:
        raise OSError(5, 'Input/output error', str(path))

    monkeypatch.setattr('ecomp.agent.images.cache.chain', unreadable)
    web.image = raw(MIB, 1)
    with pytest.raises(BuildFailed, match='cannot be kept in .*: Input/output error'):
        get(image_cache, web.url + 'good?b')
    assert kept(directory) == [base(raw(MIB))]


@pytest.mark.parametrize('path', ['without_length', 'more_in_chunks'])
def test_room_for_an_image_of_unknown_length_is_made_in_large_steps(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A check of the directory for each read took 25 s of processor time for 128 MiB in chunks."""
    lengths: list[int] = []
    reserve = Bases.reserve

    def noted(bases: Bases, descriptor: int, *given: int) -> int | None:
        answer = reserve(bases, descriptor, *given)
        lengths.append(os.fstat(descriptor).st_size)
        assert sum(file.stat().st_size for file in directory.glob('base-*')) <= limit
        return answer

    monkeypatch.setattr(Bases, 'reserve', noted)
    monkeypatch.setattr(download, 'AHEAD', MIB, raising=False)
    # An image that fits exactly is accepted. Volumes are evicted for received bytes, not for those reserved ahead.
    limit = 5 * MIB
    ours = cache(directory, limit=limit)
    for number, size in enumerate((MIB, MIB, 3 * MIB)):
        web.image = raw(size, number)
        get(ours, f'{web.url}{path}?{number}')
    assert len(lengths) < 20, 'of hundreds of reads'
    sizes = [file.stat().st_size for file in directory.glob('base-*')]
    assert sorted(sizes) == [MIB, MIB, 3 * MIB], 'and nothing more than the image stays'
    web.image = raw(limit, 4)
    assert get(ours, f'{web.url}{path}?4').virtual_size == limit
    assert kept(directory) == [base(web.image)]
    assert max(lengths) == limit


def test_a_disk_that_is_removed_while_room_is_made_lies_on_nothing(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker destroys the disk after the directory is listed, before the disk is read."""
    image_cache = cache(directory, limit=MIB)
    web.image = raw(MIB)
    get(image_cache, web.url + 'good?a')
    disk = directory / 'x.qcow2'
    overlay(directory, disk.name, base(web.image), 'raw')
    is_file = Path.is_file

    def remove_after_check(path: Path) -> bool:
        result = is_file(path)
        if path == disk:
            disk.unlink(missing_ok=True)
        return result

    monkeypatch.setattr(Path, 'is_file', remove_after_check)
    web.image = raw(MIB, 1)
    assert get(image_cache, web.url + 'good?b').virtual_size == MIB
    assert kept(directory) == [base(web.image)]


def test_downloads_take_room_from_their_beginning(web: Web, directory: Path) -> None:
    web.image = raw(MIB)
    image_cache = cache(directory, limit=2 * MIB - 1)
    with ThreadPoolExecutor(1) as threads:
        other_download = threads.submit(get, image_cache, web.url + 'half')
        # At first the file is empty, while the server is queried for SHA256SUMS.
        until(lambda: [path.stat().st_size for path in directory.glob('*.part')] == [MIB], 10, 'it has its room')
        with pytest.raises(BuildFailed, match='being downloaded, and cannot go'):
            get(image_cache, web.url + 'good')
        web.may_go_on.set()
        other_download.result(PATIENCE * 30)


def test_base_volumes_of_before_serve_their_disks_and_then_go(web: Web, directory: Path) -> None:
    """Earlier versions named them by the URL."""
    directory.mkdir()
    old = directory / 'base-0123456789abcdef0123456789abcdef.raw'
    old.write_bytes(raw(MIB))
    os.utime(old, (0, 0))
    overlay(directory, 'x.qcow2', old.name, 'raw')
    image_cache = cache(directory, limit=2 * MIB)
    for number in range(3):
        web.image = raw(MIB, number + 1)
        get(image_cache, f'{web.url}good?{number}')
        assert old.exists()
    (directory / 'x.qcow2').unlink()
    web.image = raw(MIB, 9)
    get(image_cache, web.url + 'good?9')
    assert not old.exists()


# Checksums: pinned in the URL, and listed beside the image on the server.


def test_a_pinned_image_needs_no_network_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    url = f'{web.url}good#sha256={sha256(image)}'
    first = get(cache(directory), url)
    requests = list(web.asked)
    assert requests == ['good'], 'whoever says the checksum needs none of the server'
    web.shutdown()
    web.server_close()
    assert get(cache(directory), url) == first
    # The URL that it came from does not matter either.
    assert get(cache(directory), f'http://127.0.0.1:{free_port()}/x#SHA256={sha256(image).upper()}') == first
    assert get(cache(directory), f'file:///nowhere#sha256={sha256(image)}') == first


def test_a_pinned_image_waits_for_nobody_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    first = get(cache(directory), web.url + 'good')
    with ThreadPoolExecutor(1) as threads:
        other_download = threads.submit(get, cache(directory), web.url + 'slowly')
        until(lambda: 'slowly' in web.asked, 10, 'somebody downloads')
        assert get(cache(directory), f'{web.url}slowly#sha256={sha256(image)}') == first
        assert not other_download.done()
        web.may_go_on.set()
        assert other_download.result(PATIENCE * 30) == first


def test_another_content_than_pinned_is_refused(web: Web, directory: Path, image: bytes) -> None:
    other_digest = '0' * 64
    reason = f'good: its SHA-256 is {sha256(image)}, and its URL says {other_digest}'
    refused(directory, f'{web.url}good#sha256={other_digest}', reason)
    # The cached image of the same URL is not used instead.
    get(cache(directory), web.url + 'good')
    refused(directory, f'{web.url}good#sha256={other_digest}', reason)


def test_a_changed_image_does_not_hide_the_pinned_one(web: Web, directory: Path, image: bytes) -> None:
    url = web.url + 'good'
    first = get(cache(directory), url)
    web.image = raw(MIB)
    second = get(cache(directory), url)
    assert second != first
    assert get(cache(directory), f'{url}#sha256={sha256(image)}') == first
    assert get(cache(directory), url) == second


def test_a_list_of_checksums_beside_it_is_believed(web: Web, directory: Path, image: bytes) -> None:
    web.sums = f'{"0" * 64}  another\n{sha256(image)} *good\n'.encode()
    first = get(cache(directory), web.url + 'good')
    web.sums = f'{"0" * 64}  good\n'.encode()
    assert get(cache(directory), web.url + 'good') == first, 'what is the same was checked'
    refused(directory, web.url + 'good?2', f'its SHA-256 is {sha256(image)}, and the SHA256SUMS beside it says 000')
    assert get(cache(directory), f'{web.url}good?3#sha256={sha256(image)}') == first


def test_a_list_that_cannot_be_read_is_not_passed_over(web: Web, directory: Path) -> None:
    refused(directory, web.url + 'broken/good', 'broken/SHA256SUMS: the server answers HTTP 500')
    web.sums = b'x' * (MIB + 1)
    refused(directory, web.url + 'good', 'SHA256SUMS: is too long for checksums; put #sha256=')
    web.sums = b'<html>whatever you ask for</html>'
    assert get(cache(directory), web.url + 'good').format == 'qcow2'


@pytest.mark.parametrize('says', [{'etag': '"1"'}, {'last-modified': 'yesterday'}])
def test_an_image_that_changes_on_its_way_is_refused(web: Web, directory: Path, says: dict[str, str]) -> None:
    web.image, web.says = raw(MIB, 1), says
    refused(directory, web.url + 'changing', 'changed while it was downloaded')
    assert Path(get(cache(directory), web.url + 'changing').path).name == base(web.image)


def test_mirrors_have_etags_of_their_own(web: Web, directory: Path) -> None:
    """Each redirect leads to another mirror.

    The image is fetched again only when it has changed.
    """
    url = web.url + 'mirrored'
    web.says = {'etag': '1', 'last-modified': 'Sat, 21 Nov 2026 10:00:00 GMT'}
    first = get(cache(directory), url)
    fetched = web.sent.copy()
    for _ in range(4):
        assert get(cache(directory), url) == first
    assert web.asked.count('SHA256SUMS') == 1
    assert all('signed' not in path.read_text() for path in entries(directory))
    assert fetched == ['mirror1']
    web.image, web.says = raw(MIB, 3), {'etag': '2', 'last-modified': 'Sun, 22 Nov 2026 10:00:00 GMT'}
    for _ in range(2):
        assert Path(get(cache(directory), url).path).name == base(web.image)
    # Without a date nothing shows that two mirrors have the same image.
    web.says, web.image = {'etag': '3'}, raw(MIB, 4)
    get(cache(directory), url)
    before = web.asked.count('SHA256SUMS')
    get(cache(directory), url)
    assert web.asked.count('SHA256SUMS') == before + 1


def test_a_place_that_was_named_for_a_short_time_is_asked_for_anew(web: Web, directory: Path) -> None:
    """Signed URLs of an object store may expire before the download ends."""
    web.says = {'etag': '"1"'}
    assert get(cache(directory), web.url + 'signed').format == 'qcow2'
    # The image; the checksums; then a check of the first redirect's target, and of the image's URL.
    assert web.asked == ['signed', 'once', 'SHA256SUMS', 'once', 'signed', 'once']


def test_an_image_above_what_the_host_could_give_is_refused(web: Web, directory: Path) -> None:
    small = ImageCache(directory, inspect, None, replace(LIMITS, disk=8 * MIB), LOOPBACK)
    web.image = raw(8 * MIB + 512)
    with pytest.raises(BuildFailed, match='the image is 0.0 GiB, and this host has 0.0 GiB for disks'):
        get(small, web.url + 'good')
    assert kept(directory) == []
    web.image = raw(8 * MIB)
    assert get(small, web.url + 'good').virtual_size == 8 * MIB


# Servers that are unreachable or silent, or no longer have the image.


def test_a_cached_image_is_used_while_its_server_cannot_be_asked(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download, 'PATIENCE', 0.3)
    url = web.url + 'good'
    first = get(cache(directory), url)
    for answer in ('error', 'no_http', 'silence', 'reset'):
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('ecomp.agent.images.cache.AWAY', 0.0)
            patch.setattr('tests.kit.image_server.Handler.answer_good', getattr(Handler, f'answer_{answer}'))
            if answer == 'reset':
                patch.setattr(web, 'image', web.image + bytes(512))  # a new image, whose download breaks off
            with caplog.at_level(logging.WARNING):
                assert get(cache(directory), url) == first
        assert [record.levelname for record in caplog.records] == ['WARNING'], answer
        assert 'its image is cached, and used as it was' in caplog.text
    (note,) = directory.glob('.away-*')
    note.unlink()
    web.shutdown()
    web.server_close()
    caplog.clear()
    for _ in range(3):
        assert get(cache(directory), url) == first
    # It is logged once: builds of all workers use the note instead of waiting for the server.
    assert len(caplog.records) == 1


def test_builds_that_wait_for_a_question_that_is_not_answered_do_not_ask_themselves(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has its own cache object: their builds used to time out one after the other."""
    monkeypatch.setattr(download, 'PATIENCE', 0.5)
    url = web.url + 'good'
    first = get(cache(directory), url)
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_silence)
    before = len(web.asked)
    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(lambda _: get(cache(directory), url), range(4))) == [first] * 4
    assert len(web.asked) == before + 1
    assert len(list(directory.glob('.away-*'))) == 1
    monkeypatch.setattr('ecomp.agent.images.cache.AWAY', 0.0)
    get(cache(directory), url)
    assert len(web.asked) == before + 2
    # A note of an earlier boot, or a partial one, is ignored.
    monkeypatch.setattr('ecomp.agent.images.cache.AWAY', 30.0)
    (note,) = directory.glob('.away-*')
    for number, text in enumerate((str(time.monotonic() + 3600), '', 'nan', b'\xff'), 3):
        note.write_bytes(text if isinstance(text, bytes) else text.encode())
        get(cache(directory), url)
        assert len(web.asked) == before + number
    # The note is removed with the URL's entry.
    Path(first.path).unlink()
    cache(directory).sweep()
    assert not list(directory.glob('.away-*'))


def test_what_is_asked_after_builds_were_handed_in_is_asked_for_all_of_them(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer counts for a build that was submitted before the question, in the same boot."""
    web.says, url = {'etag': '"1"'}, web.url + 'good'

    def count_requests(since: float) -> int:
        before = web.asked.count('good')
        assert get(cache(directory), url, since=since) == first
        return web.asked.count('good') - before

    submitted_at = time.monotonic()
    first = get(cache(directory), url)
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
    monkeypatch.setattr('ecomp.agent.images.cache.boot_id', lambda: '22222222-0000-4000-8000-000000000000')
    assert [count_requests(submitted_at), count_requests(submitted_at)] == [1, 0]
    # An image that was fetched since counts, too.
    submitted_at, web.image, web.says = time.monotonic(), raw(MIB), {'etag': '"2"'}
    first = get(cache(directory), url)
    assert count_requests(submitted_at) == 0
    Path(first.path).unlink()
    cache(directory).sweep()
    assert not list(directory.glob('.asked-*'))


def test_an_image_that_was_taken_away_is_refused(web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(cache(directory), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_missing)
    refused(directory, web.url + 'good', 'the server answers HTTP 404')


# Base volumes are read again each day, and must not have changed since they were fetched.


# A day and a second, because a file's time may be slightly ahead of the test's clock.
LATER = DAY + 1


def change(path: Path) -> None:
    """Change one byte and keep the times, as a broken disk or root would."""
    before = path.stat()
    with path.open('r+b') as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_was_fetched_is_read_again_a_day_later(
    web: Web, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetched = get(cache(directory), web.url + 'good')
    path = Path(fetched.path)
    content = path.read_bytes()
    instance = 'instance'
    overlay(directory, f'{instance}.qcow2', path.name, 'qcow2')
    scrubber = Scrubber(directory)
    change(path)
    scrubber.scrub(time.time())
    assert bad(directory) == [], 'it was read when it was fetched'
    with caplog.at_level(logging.ERROR):
        scrubber.scrub(time.time() + LATER)
    assert caplog.messages == [
        f'{path} is not what it was when it was fetched: no disk is made of it any more, '
        f'and the guests on it read what is there now: {instance}'
    ]
    assert bad(directory) == [hashlib.sha256(content).hexdigest()]

    # The next build fetches it again, under the same name: the guest on it uses the new file after its next start.
    request_count = len(web.asked)
    fetched_again = get(cache(directory), web.url + 'good')
    assert len(web.asked) > request_count
    assert fetched_again == fetched
    assert path.read_bytes() == content
    assert bad(directory) == []


def test_one_that_is_pinned_is_fetched_again_as_well(web: Web, directory: Path) -> None:
    digest = hashlib.sha256(Path(get(cache(directory), web.url + 'good').path).read_bytes()).hexdigest()
    pinned = f'{web.url}good#sha256={digest}'
    path = Path(get(cache(directory), pinned).path)
    change(path)
    Scrubber(directory).scrub(time.time() + LATER)
    request_count = len(web.asked)
    get(cache(directory), pinned)
    assert len(web.asked) > request_count
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_one_that_is_good_again_is_taken_again(web: Web, directory: Path) -> None:
    path = Path(get(cache(directory), web.url + 'good').path)
    content, tomorrow = path.read_bytes(), time.time() + LATER
    change(path)
    Scrubber(directory).scrub(tomorrow)
    assert bad(directory)
    path.write_bytes(content)
    Scrubber(directory).scrub(tomorrow + LATER)
    assert bad(directory) == []


def test_each_is_read_once_a_day_and_what_is_gone_is_forgotten(web: Web, directory: Path) -> None:
    get(cache(directory), web.url + 'good')
    path = Path(get(cache(directory), web.url + 'good?2').path)
    note = next(file for file in directory.glob('.read-*') if file.name.removeprefix('.read-') in path.name)
    os.utime(note, (1.0, 1.0))
    scrubber = Scrubber(directory)
    scrubber.scrub(time.time())
    assert time.time() - note.stat().st_mtime < 60
    os.utime(note, (time.time() - DAY + 60,) * 2)
    before = note.stat().st_mtime
    scrubber.scrub(time.time())
    assert note.stat().st_mtime == before
    path.unlink()
    Bases(directory, LIMITS.cache).sweep()
    assert not note.exists()


def test_one_that_was_read_in_the_future_is_read_now(web: Web, directory: Path) -> None:
    """A clock that had been five years ahead kept base volumes unread for five years."""
    path = Path(get(cache(directory), web.url + 'good').path)
    (note,) = directory.glob('.read-*')
    os.utime(note, (time.time() + 5 * 365 * DAY,) * 2)
    change(path)
    Scrubber(directory).scrub(time.time())
    assert len(bad(directory)) == 1
    assert note.stat().st_mtime <= time.time()


def test_one_that_is_fetched_by_another_name_is_read_all_the_same(web: Web, directory: Path) -> None:
    """A download of the same content from another URL does not read the cached file."""
    path = Path(get(cache(directory), web.url + 'good').path)
    (note,) = directory.glob('.read-*')
    os.utime(note, (1.0, 1.0))
    change(path)
    assert get(cache(directory), web.url + 'good?same').path == str(path)
    Scrubber(directory).scrub(time.time())
    assert len(bad(directory)) == 1


def test_a_thread_reads_slowly_and_stops_at_once(web: Web, directory: Path) -> None:
    path = Path(get(cache(directory), web.url + 'good').path)
    for note in directory.glob('.read-*'):
        note.unlink()
    with start_and_stop(Scrubber(directory, rate=1)):
        started_at = time.monotonic()
        time.sleep(0.2)
    assert time.monotonic() - started_at < 10
    assert not list(directory.glob('.read-*')), 'it was not read to its end'
    with start_and_stop(Scrubber(directory, rate=64 * MIB)):
        until(lambda: list(directory.glob('.read-*')), 20, f'{path} is read')


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    Scrubber(tmp_path / 'nowhere').scrub(time.time())
    assert bad(tmp_path / 'nowhere') == []
