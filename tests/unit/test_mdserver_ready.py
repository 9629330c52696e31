"""A guest's word that it is ready, at the very moment at which it is removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import pytest
from mdserver import files
from mdserver.conf import Config
from mdserver.server import make_app

from ecomp.agent.host.metadata import GuestData

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MAC, ADDRESS, OTHER = '52:54:00:aa:00:01', '192.168.122.11', '52:54:00:bb:00:02'
NEIGHBOURS = f'{ADDRESS} 0x1 0x2 {MAC} * virbr0\n'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """One guest with a lease that does not end."""
    (tmp_path / 'guests').mkdir()
    (tmp_path / f'guests/{MAC}.json').write_text(json.dumps({'instance': UUID, 'hostname': 'web1'}))
    leases = [{'ip-address': ADDRESS, 'mac-address': MAC, 'expiry-time': 0}]
    (tmp_path / 'virbr0.status').write_text(json.dumps(leases))
    (tmp_path / 'arp').write_text('')
    return Config(guests=tmp_path / 'guests', leases=str(tmp_path / '*.status'), neighbours=tmp_path / 'arp')


def ask(config: Config, server: Callable[..., Iterable[bytes]] | None = None, **environ: str) -> str:
    """What the server, a new one unless it is given, answers to this guest."""
    environ = {'REMOTE_ADDR': ADDRESS, 'HTTP_HOST': config.listen_address, **environ}
    setup_testing_defaults(environ)
    answered = []
    list((server or make_app(files.Files(config)))(environ, lambda status, *_: answered.append(status)))
    return answered[0]


def say_ready(config: Config) -> str:
    """What the server answers to this guest's word."""
    return ask(config, REQUEST_METHOD='POST', PATH_INFO=f'/phone-home/{UUID}/')


def look(config: Config, server: Callable[..., Iterable[bytes]] | None = None) -> str:
    return ask(config, server, REQUEST_METHOD='GET', PATH_INFO='/latest/meta-data/instance-id')


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


@pytest.mark.parametrize(('change', 'said'), [
    (lambda config: Path(config.leases.replace('*', 'virbr0')).write_text('[]'), 'no current DHCP lease for'),
    (lambda config: (config.guests / f'{MAC}.json').unlink(), 'no instance with the MAC address'),
    (lambda config: (config.guests / f'{MAC}.json').write_text('{'), 'cannot be read'),
    (lambda config: config.neighbours.write_text(NEIGHBOURS + NEIGHBOURS.replace(MAC, OTHER)), 'another machine'),
])
def test_ecompute_hears_of_a_guest_that_is_refused_until_it_is_answered(
    config: Config, change: Callable[[Config], object], said: str
) -> None:
    config.neighbours.write_text(NEIGHBOURS)
    kept = {path: path.read_text() for path in (config.guests / f'{MAC}.json', config.neighbours)}
    kept[Path(config.leases.replace('*', 'virbr0'))] = Path(config.leases.replace('*', 'virbr0')).read_text()
    server, data = make_app(files.Files(config)), GuestData(config.guests)
    for _ in range(2):
        assert look(config, server) == '200 OK'
        assert MAC not in data.read_refusals()
        change(config)
        assert look(config, server).startswith(('404', '500'))
        assert said in data.read_refusals()[MAC]
        for path, text in kept.items():
            path.write_text(text)
    assert look(config) == '200 OK'
    assert MAC not in data.read_refusals()


def test_who_sends_from_many_macs_does_not_fill_the_directory(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, 'MAX_REFUSALS', 3)
    Path(config.leases.replace('*', 'virbr0')).write_text('[]')
    server = make_app(files.Files(config))
    for number in range(9):
        config.neighbours.write_text(NEIGHBOURS.replace(MAC, f'52:54:00:00:00:0{number}'))
        look(config, server)
    refused = GuestData(config.guests).read_refusals()
    assert len(refused) == 3
    GuestData(config.guests).forget_refusals(refused)
    assert [path.name for path in config.guests.iterdir()] == [f'{MAC}.json']


def test_a_further_word_costs_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """One guest says it again and again: each was written to the disk, while all others waited."""
    say_ready(config)
    before = (config.guests / f'{UUID}.ready').stat()

    def written(_: int) -> None:
        raise AssertionError('it is written to the disk')

    monkeypatch.setattr(os, 'fsync', written)
    assert say_ready(config) == '200 OK'
    assert (config.guests / f'{UUID}.ready').stat() == before
    assert sorted(each.name for each in config.guests.iterdir()) == sorted([f'{UUID}.ready', f'{MAC}.json'])


def test_the_first_word_stays_although_its_server_was_killed_on_the_way(config: Config) -> None:
    """After the link and before the unlink: both names are of one file."""
    told = config.guests / f'{UUID}.ready'
    say_ready(config)
    told.write_text('{"the first": 1}')
    os.link(told, told.with_suffix('.said'))
    assert say_ready(config) == '200 OK'
    assert told.read_text() == '{"the first": 1}'
    assert not told.with_suffix('.said').exists()
    # Before the link there is no word yet: what is half written is none.
    told.rename(told.with_suffix('.said'))
    assert say_ready(config) == '200 OK'
    assert json.loads(told.read_text())['host_keys'] == []
    assert not told.with_suffix('.said').exists()


def test_who_says_it_several_times_at_once_is_told_each_time(config: Config) -> None:
    for _ in range(20):
        (config.guests / f'{UUID}.ready').unlink(missing_ok=True)
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(lambda _: say_ready(config), range(8))) == {'200 OK'}


def test_one_whose_directory_is_full_is_told_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(files, '_leave_word', full)
    assert say_ready(config).startswith('500 ')
