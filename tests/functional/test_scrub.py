"""What a base volume was when it was fetched, it has to be the day after."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path

import pytest

from ecomp.agent.images.cache import DAY, Bases, Scrubber, bad
from tests.functional.image_content import overlay
from tests.functional.present import start_and_stop
from tests.kit.image_server import Web
from tests.kit.images import LIMITS, MIB, cache, get
from tests.kit.servers import until

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
