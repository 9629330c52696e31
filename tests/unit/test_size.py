"""The cluster size that eschedule remembers from its last run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecomp.cli.create import LARGE, is_large, remember
from ecomp.conf import EtcdConfig

ONE = EtcdConfig(('one:2379', 'two:2379'))
OTHER = EtcdConfig(('other:2379',))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def test_what_was_seen_last_is_remembered_of_each_etcd(home: Path) -> None:
    assert not is_large(ONE)
    remember(ONE, LARGE)
    assert not home.exists()  # small clusters, the usual case, write nothing
    remember(ONE, LARGE + 1)
    remember(ONE, LARGE + 1)
    assert is_large(ONE)
    assert not is_large(OTHER)
    remember(OTHER, 5)
    assert is_large(ONE)
    remember(ONE, LARGE)
    assert not is_large(ONE)
    assert list((home / 'ecomp').iterdir()) == []


def test_what_cannot_be_remembered_is_no_error(home: Path) -> None:
    home.write_text('a file where a directory is to be')
    remember(ONE, LARGE + 1)
    assert not is_large(ONE)
    remember(ONE, 1)


def test_nobody_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_home() -> Path:
        raise RuntimeError('no home')

    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setattr(Path, 'home', raise_no_home)
    remember(ONE, LARGE + 1)
    assert not is_large(ONE)
