"""What the image cache gives up where room is wanted, and what it keeps whatever is wanted."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecomp.agent.images import download
from ecomp.agent.images.cache import Bases
from ecomp.errors import BuildFailed
from tests.functional.image_content import base, entries, overlay, raw, sha256
from tests.kit.image_server import Web
from tests.kit.images import MIB, cache, get, kept
from tests.kit.servers import PATIENCE, until


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
