"""A directory for labs of a test's own, on a machine where no lab has a namespace."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from ecomp.lab import machine, state
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import Layout
from ecomp.lab.state import Lab


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    labs = tmp_path / 'labs'
    labs.mkdir()
    monkeypatch.setattr(state, 'ROOT', labs)
    monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path / 'state'))
    monkeypatch.setattr(state.load, '__defaults__', (labs,))
    monkeypatch.setattr(state.list_labs, '__defaults__', (labs,))
    return labs


@pytest.fixture
def fake_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, 'require_root', lambda *_: None)
    monkeypatch.setattr(machine, 'list_namespaces', lambda _: [])


def make_lab(root: Path, name: str = 'one', hosts: int = 1, **processes: ServerProcess) -> Lab:
    (root / name).mkdir(exist_ok=True)
    layout = Layout(name, IPv4Network('10.33.0.0/16'))
    lab = Lab(directory=root / name, layout=layout, host_count=hosts, processes=dict(processes))
    lab.save()
    return lab
