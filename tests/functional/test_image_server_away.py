"""What the image cache gives while a server is away, is silent, or has the image no more."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecomp.agent.images import download
from tests.functional.image_content import raw
from tests.kit.image_server import Handler, Web
from tests.kit.images import MIB, cache, get, refused


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
