"""The cache of images: its room, checksums, a server that is away, and its periodic check."""

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

# What the image cache gives up where room is wanted, and what it keeps whatever is wanted.


def test_what_was_not_used_for_longest_goes(web: Web, directory: Path) -> None:
    contents = {name: raw(MIB, number) for number, name in enumerate('abc')}
    ours = cache(directory, limit=2 * MIB)
    for name in 'aba':
        web.image = contents[name]
        get(ours, f'{web.url}good?{name}#sha256={sha256(web.image)}')
    web.image = contents['c']
    get(ours, web.url + 'good?c')
    assert kept(directory) == sorted([base(contents['a']), base(contents['c'])])
    # Nothing is known any more of where it came from.
    assert {json.loads(each.read_text())['url'][-1] for each in entries(directory)} == {'a', 'c'}
    web.image = contents['b']
    assert get(ours, web.url + 'good?b').virtual_size == MIB


def test_a_newer_image_may_take_the_room_of_the_one_before(web: Web, directory: Path) -> None:
    ours = cache(directory, limit=3 * MIB - 1)
    web.image = raw(MIB)
    get(ours, web.url + 'good')
    web.image = raw(2 * MIB, 1)
    assert get(ours, web.url + 'good').virtual_size == 2 * MIB
    assert kept(directory) == [base(web.image)]


def test_a_disk_is_made_while_the_server_is_asked_and_removed_if_it_has_another_one(web: Web, directory: Path) -> None:
    ours = cache(directory, limit=3 * MIB - 1)
    web.image = raw(MIB)
    older = base(web.image)
    get(ours, web.url + 'good')
    for newer in (False, True):
        if newer:
            web.image = raw(2 * MIB, 1)
        made, asked = list[str](), len(web.asked)
        with ours.held(web.url + 'good', lambda: None, lambda *_: None) as bases:
            for each in bases:
                if each is None:
                    (directory / 'x.qcow2').unlink()
                    assert not list(directory.glob('*.part')), 'nothing is fetched before'
                    made.append('')
                else:
                    overlay(directory, 'x.qcow2', Path(each.path).name, 'raw')
                    made.append(Path(each.path).name)
        assert made == ([older, '', base(web.image)] if newer else [older])
        assert len(web.asked) == asked + 1 + newer, 'and for SHA256SUMS'
    # The disk is gone that was in the way of its room.
    assert kept(directory) == [base(web.image), 'x.qcow2']


def test_who_stops_while_the_server_is_asked_leaves_it_to_nobody(web: Web, directory: Path) -> None:
    ours = cache(directory)
    web.image = raw(MIB)
    get(ours, web.url + 'good')
    web.image = raw(2 * MIB, 1)
    with ours.held(web.url + 'good', lambda: None, lambda *_: None) as bases:
        assert next(bases) is not None
    until(lambda: not any(each.name == 'download' for each in threading.enumerate()), 20, 'its thread has ended')
    assert not list(directory.glob('*.part'))
    assert get(ours, web.url + 'good').virtual_size == 2 * MIB


def test_what_a_disk_lies_on_stays_and_so_does_what_a_build_has(web: Web, directory: Path) -> None:
    contents = {name: raw(MIB, number) for number, name in enumerate('abcd')}
    ours = cache(directory, limit=2 * MIB)
    web.image = contents['a']
    get(ours, web.url + 'good?a')
    overlay(directory, 'x.qcow2', base(contents['a']), 'raw')
    # Neither does it matter how far below a disk it lies, nor how that is called.
    overlay(directory, 'y', 'x.qcow2', 'qcow2')
    (directory / 'x.qcow2').rename(directory.with_name('elsewhere'))
    subprocess.run(
        ['qemu-img', 'rebase', '-u', '-F', 'qcow2', '-b', str(directory.with_name('elsewhere')), str(directory / 'y')],
        check=True,
    )
    web.image = contents['b']
    with ours.held(web.url + 'good?b', lambda: None, lambda *_: None) as bases:
        held = next(bases)
        assert held is not None
        web.image = contents['c']
        before = kept(directory)
        with pytest.raises(BuildFailed) as caught:
            get(ours, web.url + 'good?c')
        assert caught.value.reason == (
            'the image is 1.0 MiB; of the 2.0 MiB that `image_cache:` is here, 2.0 MiB are base volumes of disks or '
            'being downloaded, and cannot go'
        )
        assert kept(directory) == before
        assert Path(held.path).exists()
    # Let go, and no disk on it.
    assert get(ours, web.url + 'good?c').virtual_size == MIB
    assert base(contents['a']) in kept(directory)
    assert base(contents['b']) not in kept(directory)


def test_nothing_goes_if_that_would_not_be_enough(web: Web, directory: Path) -> None:
    contents = [raw(MIB, number) for number in range(2)]
    ours = cache(directory, limit=4 * MIB)
    for web.image in contents:
        get(ours, f'{web.url}good?{len(kept(directory))}')
    overlay(directory, 'x.qcow2', base(contents[0]), 'raw')
    before = kept(directory)
    web.image = raw(4 * MIB, 7)
    with pytest.raises(BuildFailed, match='the image is 4.0 MiB; of the 4.0 MiB .* 1.0 MiB are base volumes'):
        get(ours, web.url + 'good?big')
    assert kept(directory) == before


@pytest.mark.parametrize('path', ['good', 'without_length'])
def test_an_image_above_the_limit_is_refused_before_it_is_here(web: Web, directory: Path, path: str) -> None:
    web.image = raw(3 * MIB)
    ours = cache(directory, limit=2 * MIB)
    with pytest.raises(BuildFailed, match=r'the image is 2\.[0-9] MiB|the image is 3.0 MiB') as caught:
        get(ours, web.url + path)
    assert caught.value.reason.endswith('and `image_cache:` here is 2.0 MiB')
    assert kept(directory) == []


def test_a_disk_that_cannot_be_read_may_lie_on_anything(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cache(directory, limit=MIB)
    web.image = raw(MIB)
    get(ours, web.url + 'good?a')

    def unreadable(path: Path) -> list[str]:
        raise OSError(5, 'Input/output error', str(path))

    monkeypatch.setattr('ecomp.agent.images.cache.chain', unreadable)
    web.image = raw(MIB, 1)
    with pytest.raises(BuildFailed, match='cannot be kept in .*: Input/output error'):
        get(ours, web.url + 'good?b')
    assert kept(directory) == [base(raw(MIB))]


@pytest.mark.parametrize('path', ['without_length', 'more_in_chunks'])
def test_room_for_an_image_of_unknown_length_is_made_in_large_steps(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Each read of some kilobytes looked at the whole directory: 25 s of a processor for 128 MiB in chunks."""
    lengths: list[int] = []
    reserve = Bases.reserve

    def noted(bases: Bases, descriptor: int, *given: int) -> int | None:
        answer = reserve(bases, descriptor, *given)
        lengths.append(os.fstat(descriptor).st_size)
        assert sum(each.stat().st_size for each in directory.glob('base-*')) <= limit
        return answer

    monkeypatch.setattr(Bases, 'reserve', noted)
    monkeypatch.setattr(download, 'AHEAD', MIB, raising=False)
    # What fits exactly is taken, and what is here goes for what comes, not for what is reserved ahead.
    limit = 5 * MIB
    ours = cache(directory, limit=limit)
    for number, size in enumerate((MIB, MIB, 3 * MIB)):
        web.image = raw(size, number)
        get(ours, f'{web.url}{path}?{number}')
    assert len(lengths) < 20, 'of hundreds of reads'
    sizes = [each.stat().st_size for each in directory.glob('base-*')]
    assert sorted(sizes) == [MIB, MIB, 3 * MIB], 'and nothing more than the image stays'
    web.image = raw(limit, 4)
    assert get(ours, f'{web.url}{path}?4').virtual_size == limit
    assert kept(directory) == [base(web.image)]
    assert max(lengths) == limit


def test_a_disk_that_is_removed_while_room_is_made_lies_on_nothing(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's destroy, between a look at the directory and one into the disk."""
    ours = cache(directory, limit=MIB)
    web.image = raw(MIB)
    get(ours, web.url + 'good?a')
    disk = directory / 'x.qcow2'
    overlay(directory, disk.name, base(web.image), 'raw')
    is_file = Path.is_file

    def removed_since(path: Path) -> bool:
        found = is_file(path)
        if path == disk:
            disk.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, 'is_file', removed_since)
    web.image = raw(MIB, 1)
    assert get(ours, web.url + 'good?b').virtual_size == MIB
    assert kept(directory) == [base(web.image)]


def test_downloads_take_room_from_their_beginning(web: Web, directory: Path) -> None:
    web.image = raw(MIB)
    ours = cache(directory, limit=2 * MIB - 1)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(get, ours, web.url + 'half')
        # Its file is there, and empty, while the server is asked for SHA256SUMS.
        until(lambda: [each.stat().st_size for each in directory.glob('*.part')] == [MIB], 10, 'it has its room')
        with pytest.raises(BuildFailed, match='being downloaded, and cannot go'):
            get(ours, web.url + 'good')
        web.may_go_on.set()
        other.result(PATIENCE * 30)


def test_base_volumes_of_before_serve_their_disks_and_then_go(web: Web, directory: Path) -> None:
    """They were named by the URL."""
    directory.mkdir()
    old = directory / 'base-0123456789abcdef0123456789abcdef.raw'
    old.write_bytes(raw(MIB))
    os.utime(old, (0, 0))
    overlay(directory, 'x.qcow2', old.name, 'raw')
    ours = cache(directory, limit=2 * MIB)
    for number in range(3):
        web.image = raw(MIB, number + 1)
        get(ours, f'{web.url}good?{number}')
        assert old.exists()
    (directory / 'x.qcow2').unlink()
    web.image = raw(MIB, 9)
    get(ours, web.url + 'good?9')
    assert not old.exists()


# What the image cache makes of checksums: those that are asked for, and those that a server has beside an image.


def test_a_pinned_image_needs_no_network_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    url = f'{web.url}good#sha256={sha256(image)}'
    first = get(cache(directory), url)
    asked = list(web.asked)
    assert asked == ['good'], 'whoever says the checksum needs none of the server'
    web.shutdown()
    web.server_close()
    assert get(cache(directory), url) == first
    # Nor does it matter where it came from.
    assert get(cache(directory), f'http://127.0.0.1:{free_port()}/x#SHA256={sha256(image).upper()}') == first
    assert get(cache(directory), f'file:///nowhere#sha256={sha256(image)}') == first


def test_a_pinned_image_waits_for_nobody_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    first = get(cache(directory), web.url + 'good')
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(get, cache(directory), web.url + 'slowly')
        until(lambda: 'slowly' in web.asked, 10, 'somebody downloads')
        assert get(cache(directory), f'{web.url}slowly#sha256={sha256(image)}') == first
        assert not other.done()
        web.may_go_on.set()
        assert other.result(PATIENCE * 30) == first


def test_another_content_than_pinned_is_refused(web: Web, directory: Path, image: bytes) -> None:
    wrong = '0' * 64
    reason = f'good: its SHA-256 is {sha256(image)}, and its URL says {wrong}'
    refused(directory, f'{web.url}good#sha256={wrong}', reason)
    # Nor is what is cached of the same URL taken for it.
    get(cache(directory), web.url + 'good')
    refused(directory, f'{web.url}good#sha256={wrong}', reason)


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
    """A redirect leads to another one each time; the image is fetched once, and again when it has changed."""
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
    # Without a date nothing says that what two mirrors have is the same.
    web.says, web.image = {'etag': '3'}, raw(MIB, 4)
    get(cache(directory), url)
    before = web.asked.count('SHA256SUMS')
    get(cache(directory), url)
    assert web.asked.count('SHA256SUMS') == before + 1


def test_a_place_that_was_named_for_a_short_time_is_asked_for_anew(web: Web, directory: Path) -> None:
    """As a store's signed URLs are, which may have ended by the end of the download."""
    web.says = {'etag': '"1"'}
    assert get(cache(directory), web.url + 'signed').format == 'qcow2'
    # The image, that it is still the same there, and that it is from where it is asked for.
    assert web.asked == ['signed', 'once', 'SHA256SUMS', 'once', 'signed', 'once']


def test_an_image_above_what_the_host_could_give_is_refused(web: Web, directory: Path) -> None:
    small = ImageCache(directory, inspect, None, replace(LIMITS, disk=8 * MIB), LOOPBACK)
    web.image = raw(8 * MIB + 512)
    with pytest.raises(BuildFailed, match='the image is 0.0 GiB, and this host has 0.0 GiB for disks'):
        get(small, web.url + 'good')
    assert kept(directory) == []
    web.image = raw(8 * MIB)
    assert get(small, web.url + 'good').virtual_size == 8 * MIB


# What the image cache gives while a server is away, is silent, or has the image no more.


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
                patch.setattr(web, 'image', web.image + bytes(512))  # it is new, and then breaks off
            with caplog.at_level(logging.WARNING):
                assert get(cache(directory), url) == first
        assert [each.levelname for each in caplog.records] == ['WARNING'], answer
        assert 'its image is cached, and used as it was' in caplog.text
    (noted,) = directory.glob('.away-*')
    noted.unlink()
    web.shutdown()
    web.server_close()
    caplog.clear()
    for _ in range(3):
        assert get(cache(directory), url) == first
    # Said once: not every build is to wait for a server that is away, whichever worker makes it.
    assert len(caplog.records) == 1


def test_builds_that_wait_for_a_question_that_is_not_answered_do_not_ask_themselves(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has a cache of its own: they came one after the other, ten seconds apart."""
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
    # What was noted in an earlier boot, or half, is no reason not to ask.
    monkeypatch.setattr('ecomp.agent.images.cache.AWAY', 30.0)
    (noted,) = directory.glob('.away-*')
    for number, text in enumerate((str(time.monotonic() + 3600), '', 'nan', b'\xff'), 3):
        noted.write_bytes(text if isinstance(text, bytes) else text.encode())
        get(cache(directory), url)
        assert len(web.asked) == before + number
    # With what was known of its URL goes that, too.
    Path(first.path).unlink()
    cache(directory).sweep()
    assert not list(directory.glob('.away-*'))


def test_what_is_asked_after_builds_were_handed_in_is_asked_for_all_of_them(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for none that was handed in since it was asked, or in an earlier boot."""
    web.says, url = {'etag': '"1"'}, web.url + 'good'

    def asks(since: float) -> int:
        before = web.asked.count('good')
        assert get(cache(directory), url, since=since) == first
        return web.asked.count('good') - before

    handed_in = time.monotonic()
    first = get(cache(directory), url)
    assert [asks(handed_in), asks(handed_in)] == [0, 0], 'it was fetched since'
    handed_in = time.monotonic()
    assert [asks(handed_in), asks(handed_in), asks(handed_in)] == [1, 0, 0]
    # What was asked before is no answer to who comes later.
    assert [asks(time.monotonic()), asks(time.monotonic())] == [1, 1]
    (noted,) = directory.glob('.asked-*')
    for content in (b'', b'x', b'\xff', noted.read_bytes().split()[0], noted.read_bytes()[:40] + b'nan'):
        noted.write_bytes(content)
        assert asks(handed_in) == 1, content
    assert asks(handed_in) == 0
    monkeypatch.setattr('ecomp.agent.images.cache.boot_id', lambda: '22222222-0000-4000-8000-000000000000')
    assert [asks(handed_in), asks(handed_in)] == [1, 0]
    # What has come meanwhile is theirs, too.
    handed_in, web.image, web.says = time.monotonic(), raw(MIB), {'etag': '"2"'}
    first = get(cache(directory), url)
    assert asks(handed_in) == 0
    Path(first.path).unlink()
    cache(directory).sweep()
    assert not list(directory.glob('.asked-*'))


def test_an_image_that_was_taken_away_is_refused(web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(cache(directory), web.url + 'good')
    monkeypatch.setattr(Handler, 'answer_good', Handler.answer_missing)
    refused(directory, web.url + 'good', 'the server answers HTTP 404')


# What a base volume was when it was fetched, it has to be the day after.


LATER = DAY + 1
"""A second more than a day: a clock may be put back by a little between a file's time and ours."""


def change(path: Path) -> None:
    """As a broken disk does, or somebody with root's rights: one byte, and no other time."""
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

    # The next one is made of what the server has, in the same place: the guest on it has that from its next start on.
    asked = len(web.asked)
    again = get(cache(directory), web.url + 'good')
    assert len(web.asked) > asked
    assert again == fetched
    assert path.read_bytes() == content
    assert bad(directory) == []


def test_one_that_is_pinned_is_fetched_again_as_well(web: Web, directory: Path) -> None:
    digest = hashlib.sha256(Path(get(cache(directory), web.url + 'good').path).read_bytes()).hexdigest()
    pinned = f'{web.url}good#sha256={digest}'
    path = Path(get(cache(directory), pinned).path)
    change(path)
    Scrubber(directory).scrub(time.time() + LATER)
    asked = len(web.asked)
    get(cache(directory), pinned)
    assert len(web.asked) > asked
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
    mark = next(each for each in directory.glob('.read-*') if each.name.removeprefix('.read-') in path.name)
    os.utime(mark, (1.0, 1.0))
    scrubber = Scrubber(directory)
    scrubber.scrub(time.time())
    assert time.time() - mark.stat().st_mtime < 60
    os.utime(mark, (time.time() - DAY + 60,) * 2)
    before = mark.stat().st_mtime
    scrubber.scrub(time.time())
    assert mark.stat().st_mtime == before
    path.unlink()
    Bases(directory, LIMITS.cache).sweep()
    assert not mark.exists()


def test_one_that_was_read_in_the_future_is_read_now(web: Web, directory: Path) -> None:
    """The clock was five years ahead then, and was put right: nothing was read for five years."""
    path = Path(get(cache(directory), web.url + 'good').path)
    (mark,) = directory.glob('.read-*')
    os.utime(mark, (time.time() + 5 * 365 * DAY,) * 2)
    change(path)
    Scrubber(directory).scrub(time.time())
    assert len(bad(directory)) == 1
    assert mark.stat().st_mtime <= time.time()


def test_one_that_is_fetched_by_another_name_is_read_all_the_same(web: Web, directory: Path) -> None:
    """The one that is here was not read then: only what came was."""
    path = Path(get(cache(directory), web.url + 'good').path)
    (mark,) = directory.glob('.read-*')
    os.utime(mark, (1.0, 1.0))
    change(path)
    assert get(cache(directory), web.url + 'good?same').path == str(path)
    Scrubber(directory).scrub(time.time())
    assert len(bad(directory)) == 1


def test_a_thread_reads_slowly_and_stops_at_once(web: Web, directory: Path) -> None:
    path = Path(get(cache(directory), web.url + 'good').path)
    for mark in directory.glob('.read-*'):
        mark.unlink()
    with start_and_stop(Scrubber(directory, rate=1)):
        began = time.monotonic()
        time.sleep(0.2)
    assert time.monotonic() - began < 10
    assert not list(directory.glob('.read-*')), 'it was not read to its end'
    with start_and_stop(Scrubber(directory, rate=64 * MIB)):
        until(lambda: list(directory.glob('.read-*')), 20, f'{path} is read')


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    Scrubber(tmp_path / 'nowhere').scrub(time.time())
    assert bad(tmp_path / 'nowhere') == []
