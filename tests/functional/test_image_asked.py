"""What of an image is asked for again, and when it is fetched again, against a web server that counts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ecomp.agent.images import download
from tests.functional.image_content import base, entries, raw
from tests.kit.image_server import Handler, Web
from tests.kit.images import MIB, cache, get, kept


@pytest.mark.parametrize('says', [{'etag': '"1"'}, {'last-modified': 'Sat, 21 Nov 2026 10:00:00 GMT'}])
@pytest.mark.parametrize('compares', [True, False])
def test_an_image_is_fetched_again_only_when_it_changed(
    web: Web, directory: Path, says: dict[str, str], compares: bool
) -> None:
    """Also from a server that says what it has, and does not look at what it is asked."""
    web.says, web.compares = says, compares
    first = get(cache(directory), web.url + 'good')
    sums = web.asked.count('SHA256SUMS')
    for _ in range(3):
        assert get(cache(directory), web.url + 'good') == first
    assert web.asked.count('SHA256SUMS') == sums == 1
    before = len(web.sent)
    web.image = raw(MIB)
    web.says = {name: value.replace('1', '2') for name, value in says.items()}
    second = get(cache(directory), web.url + 'good')
    # Where a GET is all that it knows, the second one is not read: it asks whether the image is still that.
    assert len(web.sent) == before + (1 if compares and 'etag' in says else 2)
    assert Path(second.path).name == base(web.image)
    # Disks lie on the first one.
    assert Path(first.path).exists()
    assert get(cache(directory), web.url + 'good') == second


@pytest.mark.parametrize('path', ['good', 'moved', 'mirrored'])
def test_a_server_without_etags_is_asked_for_its_date_and_sends_nothing_for_that(
    web: Web, directory: Path, path: str
) -> None:
    """By HEAD, where it answers that."""
    web.refuses_head = None
    for web.image, day in ((raw(MIB), 'Sat, 21'), (raw(MIB, 1), 'Fri, 20')):
        web.says, before = {'last-modified': f'{day} Nov 2026 10:00:00 GMT'}, len(web.sent)
        for _ in range(3):
            assert Path(get(cache(directory), web.url + path).path).name == base(web.image)
        assert len(web.sent) == before + 1
    assert web.heads.count(path) >= 5


@pytest.mark.parametrize('how', ['missing', 'error', 'nothing', 'no_http', 'reset', 'silence'])
def test_whatever_a_server_makes_of_a_head_it_is_asked_by_get(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(download, 'HEAD_TIMEOUT', (1.0, 0.3), raising=False)
    web.refuses_head = getattr(Handler, f'answer_{how}')
    for web.image, day in ((raw(MIB), 'Sat, 21'), (raw(MIB, 1), 'Fri, 20')):
        web.says = {'last-modified': f'{day} Nov 2026 10:00:00 GMT'}
        for _ in range(2):
            assert Path(get(cache(directory), web.url + 'good').path).name == base(web.image)
    assert web.asked.count('SHA256SUMS') == 2, 'fetched when it changed, and not else'


def test_an_image_that_was_put_back_to_an_older_one_is_taken(tmp_path: Path, directory: Path) -> None:
    """By Python's own server, which calls whatever is older than the date it is asked by not modified."""
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    older, newer = raw(MIB, 1), raw(2 * MIB, 2)
    handler = partial(SimpleHTTPRequestHandler, directory=str(shelf))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever, 0.02)
        try:
            for content, changed in ((older, 1_700_000_000), (newer, 1_700_600_000), (older, 1_700_000_000)):
                (shelf / 'a.raw').write_bytes(content)
                os.utime(shelf / 'a.raw', (changed, changed))
                url = f'http://127.0.0.1:{server.server_port}/a.raw'
                assert Path(get(cache(directory), url).path).name == base(content)
        finally:
            server.shutdown()


def test_without_a_word_on_versions_the_length_is_one(web: Web, directory: Path) -> None:
    web.image = raw(MIB)
    first = get(cache(directory), web.url + 'good')
    assert (first.format, first.virtual_size, Path(first.path).name) == ('raw', MIB, base(web.image))
    web.image = raw(MIB, 1)
    assert get(cache(directory), web.url + 'good') == first
    web.image = raw(2 * MIB, 1)
    assert get(cache(directory), web.url + 'good').virtual_size == 2 * MIB


def test_what_says_nothing_at_all_is_fetched_each_time_and_kept_once(web: Web, directory: Path) -> None:
    first = get(cache(directory), web.url + 'without_length')
    assert get(cache(directory), web.url + 'without_length') == first
    assert web.asked.count('without_length') == 2
    assert kept(directory) == [Path(first.path).name]


def test_one_content_from_two_urls_is_one_base_volume(web: Web, directory: Path) -> None:
    first = get(cache(directory), web.url + 'good?1')
    second = get(cache(directory), web.url + 'good?2')
    assert first == second
    assert kept(directory) == [Path(first.path).name]
    assert len(entries(directory)) == 2
