"""What happens while an image comes: it is told how far it is, it can be left, and a local one may change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.images import download
from ecomp.agent.images.cache import Bases
from ecomp.agent.instance.build import Cancelled
from tests.functional.image_content import base, raw
from tests.kit.image_server import Web
from tests.kit.images import LIMITS, MIB, cache, get, kept, refused
from tests.kit.servers import PATIENCE


def test_how_far_it_is_is_told_now_and_then(web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, 'TICK', 0.02)
    monkeypatch.setattr(download, 'TOLD_EVERY', 0.1)
    told: list[tuple[int, int | None]] = []

    def tell(done: int, total: int | None) -> None:
        told.append((done, total))
        if done == MIB // 2:
            web.may_go_on.set()

    web.image = raw(MIB)
    get(cache(directory), web.url + 'half', tell=tell)
    assert (MIB // 2, MIB) in told
    assert told == sorted(set(told)), 'only what is new is told'
    told.clear()
    monkeypatch.setattr(download, 'TOLD_EVERY', 30.0)
    get(cache(directory), web.url + 'half', tell=tell)
    assert told == [], 'what is here soon is not told'


def test_a_drip_of_unknown_length_is_told_and_can_be_left(
    web: Web, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, 'TICK', 0.02)
    monkeypatch.setattr(download, 'TOLD_EVERY', 0.2)
    told: list[int] = []

    def tell(done: int, total: int | None) -> None:
        assert total is None
        told.append(done)
        if len(told) > 2:
            raise Cancelled

    began = time.monotonic()
    with pytest.raises(Cancelled):
        get(cache(directory), web.url + 'drip', tell=tell)
    assert time.monotonic() - began >= 0.5
    assert told == sorted(set(told))
    assert kept(directory) == []


@pytest.mark.parametrize('path', ['silence', 'half'])
def test_a_silent_server_keeps_nobody_from_being_destroyed(web: Web, directory: Path, path: str) -> None:
    web.image = raw(MIB)
    asked_at: list[float] = []

    def checkpoint() -> None:
        asked_at.append(time.monotonic())
        if web.asked and len(asked_at) > 4:
            raise Cancelled

    began = time.monotonic()
    with pytest.raises(Cancelled):
        get(cache(directory), web.url + path, checkpoint)
    assert time.monotonic() - began < PATIENCE * 10
    gaps = [after - before for before, after in zip(asked_at, asked_at[1:], strict=False)]
    assert max(gaps) < 1.0
    assert kept(directory) == []
    # Whatever the left thread still reads goes nowhere.
    web.may_go_on.set()
    assert get(cache(directory), web.url + 'good').virtual_size == MIB
    assert kept(directory) == [base(web.image)]


# Local images


def test_what_takes_the_place_of_a_local_image_while_it_is_opened_is_another_one(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old content had the new one's version, and was used until the next change."""
    path, newer = tmp_path / 'a.raw', tmp_path / 'newer'
    path.write_bytes(raw(MIB))
    newer.write_bytes(raw(MIB, 1))
    opened = Path.open

    def replaced_since(which: Path, *given: Any, **named: Any) -> Any:
        file = opened(which, *given, **named)
        if which == path and newer.exists():
            newer.rename(path)
        return file

    monkeypatch.setattr(Path, 'open', replaced_since)
    refused(directory, path.as_uri(), 'changed while it was downloaded: ask again', local=tmp_path)
    assert Path(get(cache(directory, tmp_path), path.as_uri()).path).name == base(raw(MIB, 1))


def test_a_local_image_is_copied_again_when_it_changed(tmp_path: Path, directory: Path) -> None:
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    path, url = shelf / 'a.raw', f'file://{shelf}/a.raw'
    path.write_bytes(raw(MIB))
    first = get(cache(directory, shelf), url)
    assert get(cache(directory, shelf), url) == first
    path.write_bytes(raw(MIB, 1))
    second = get(cache(directory, shelf), url)
    assert Path(second.path).name == base(raw(MIB, 1))
    (shelf / 'SHA256SUMS').write_text(f'{"0" * 64}  a.raw\n')
    assert get(cache(directory, shelf), url) == second
    path.write_bytes(raw(MIB, 2))
    refused(directory, url, 'and the SHA256SUMS beside it says 0000', local=shelf)
    path.unlink()
    refused(directory, url, 'no such file', local=shelf)
    assert Bases(directory, LIMITS.cache).entry(url) is not None
