"""A guest's word that it is ready, at the very moment at which it is removed."""

from __future__ import annotations

import json
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import pytest
from mdserver import files
from mdserver.conf import Config
from mdserver.server import make_app

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MAC, ADDRESS = '52:54:00:aa:00:01', '192.168.122.11'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """One guest with a lease that does not end."""
    (tmp_path / 'guests').mkdir()
    (tmp_path / f'guests/{MAC}.json').write_text(json.dumps({'instance': UUID, 'hostname': 'web1'}))
    leases = [{'ip-address': ADDRESS, 'mac-address': MAC, 'expiry-time': 0}]
    (tmp_path / 'virbr0.status').write_text(json.dumps(leases))
    (tmp_path / 'arp').write_text('')
    return Config(guests=tmp_path / 'guests', leases=str(tmp_path / '*.status'), neighbours=tmp_path / 'arp')


def say_ready(config: Config) -> str:
    """What the server answers to this guest's word."""
    environ = {'REMOTE_ADDR': ADDRESS, 'REQUEST_METHOD': 'POST', 'PATH_INFO': f'/phone-home/{UUID}/'}
    setup_testing_defaults(environ)
    answered = []
    list(make_app(files.Files(config))(environ, lambda status, *_: answered.append(status)))
    return answered[0]


def test_it_is_noted(config: Config) -> None:
    assert say_ready(config) == '200 OK'
    said = {'version': 1, 'host_keys': [], 'stage': None, 'error': None}
    assert json.loads((config.guests / f'{UUID}.ready').read_text()) == said


def test_of_one_that_is_removed_meanwhile_nothing_stays(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = files._is_there

    def removed_since(config: Config, mac: str, instance: str) -> bool:
        was_there = is_there(config, mac, instance)
        (config.guests / f'{MAC}.json').unlink(missing_ok=True)
        return was_there

    monkeypatch.setattr(files, '_is_there', removed_since)
    assert say_ready(config) == '404 Not Found'
    assert list(config.guests.iterdir()) == []


def test_one_whose_directory_is_full_is_told_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(files, '_leave_word', full)
    assert say_ready(config).startswith('500 ')
