"""The cluster size that eschedule remembers from its last run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecomp.cli.create import LARGE_CLUSTER_SIZE, is_large_cluster, remember_cluster_size
from ecomp.conf import EtcdConfig

ONE = EtcdConfig(('one:2379', 'two:2379'))
OTHER = EtcdConfig(('other:2379',))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def test_large_cluster_is_remembered_per_etcd(home: Path) -> None:
    assert not is_large_cluster(ONE)
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE)
    assert not home.exists()  # small clusters, the usual case, write nothing
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE + 1)
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE + 1)
    assert is_large_cluster(ONE)
    assert not is_large_cluster(OTHER)
    remember_cluster_size(OTHER, 5)
    assert is_large_cluster(ONE)
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE)
    assert not is_large_cluster(ONE)
    assert list((home / 'ecomp').iterdir()) == []


def test_unwritable_cache_is_ignored(home: Path) -> None:
    home.write_text('a file where a directory is to be')
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE + 1)
    assert not is_large_cluster(ONE)
    remember_cluster_size(ONE, 1)


def test_missing_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_home() -> Path:
        raise RuntimeError('no home')

    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setattr(Path, 'home', raise_no_home)
    remember_cluster_size(ONE, LARGE_CLUSTER_SIZE + 1)
    assert not is_large_cluster(ONE)
