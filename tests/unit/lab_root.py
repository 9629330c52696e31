"""Where labs are, in a test's own directory, and a machine on which none has a namespace."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from ecomp.lab import machine, state
from ecomp.lab.machine import Process
from ecomp.lab.network import Layout
from ecomp.lab.state import Lab


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of all labs, empty."""
    found = tmp_path / 'labs'
    found.mkdir()
    monkeypatch.setattr(state, 'ROOT', found)
    monkeypatch.setattr(state.load, '__defaults__', (found,))
    monkeypatch.setattr(state.all_labs, '__defaults__', (found,))
    return found


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lab has a namespace, and nobody needs to be root."""
    monkeypatch.setattr(machine, 'require_root', lambda _: None)
    monkeypatch.setattr(machine, 'of_lab', lambda _: [])


def make_lab(root: Path, name: str = 'one', hosts: int = 1, **processes: Process) -> Lab:
    """A lab that elab remembers, of whose servers these were started."""
    (root / name).mkdir(exist_ok=True)
    lab = Lab(root / name, Layout(name, IPv4Network('10.33.0.0/16')), hosts, dict(processes))
    lab.save()
    return lab
