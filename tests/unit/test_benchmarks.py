"""A benchmark's figure is the same after it was told as JSON, whatever its counts are held in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from tests.kit.servers import TOP


def test_a_figure_is_read_as_it_was_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(TOP / 'bench'))
    result = importlib.import_module('result')
    held: tuple[Mapping[str, float], ...] = ({'calls': 6}, MappingProxyType({}))
    for counts in held:
        each = result.paired('look', 'list', [3.0, 4.0], [1.0, 2.0], 2.5, counts=counts)
        result.tell(each, True)
        assert result.read(capsys.readouterr().out) == each
