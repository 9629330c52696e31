"""What is said of an etcd by its version."""

from __future__ import annotations

import pytest

from ecomp.model.cluster import holes


@pytest.mark.parametrize('version', ['3.5.33', '3.5.40', '3.6.14', '3.7.1', '3.8.0', '4.0.0', '', 'HEAD', '3'])
def test_nothing_is_known_of_these(version: str) -> None:
    assert holes(version) is None


@pytest.mark.parametrize('version', ['3.5.32', '3.5.16', '3.6.13', '3.7.0', '3.7.0-rc.0'])
def test_holes_that_are_known(version: str) -> None:
    cure = '3.5.33, 3.6.14, 3.7.1 and newer have none that is known'
    assert holes(version) == f'etcd {version} has holes that are known: {cure}'


@pytest.mark.parametrize('version', ['3.4.23', '3.4.99', '3.3.0', '2.3.8'])
def test_end_of_life(version: str) -> None:
    said = holes(version)
    assert said is not None
    assert said.startswith(f'etcd {version} is end-of-life, and its roles are no boundary: ')
