"""The metadata server: leases, guest files, metadata trees, ready report and mdserver.conf."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call
from wsgiref.util import setup_testing_defaults

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mdserver import conf, files, guests
from mdserver.conf import MAX_USER_DATA_BYTES, ConfError, Config, load, parse
from mdserver.files import Files
from mdserver.guests import BrokenFileError, ForgedAddressError, KnownGuest, UnknownGuestError, parse_leases
from mdserver.metadata import find_body, make_seed, make_version_list
from mdserver.server import App

from ecomp.agent.host.metadata import GuestData, MetadataServer, serve_metadata

# From address to guest: leases, neighbours and guest files, malformed ones included.


UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
A = '52:54:00:aa:00:01'
B = '52:54:00:bb:00:02'
IP = '192.168.122.7'
IP2 = '192.168.122.8'
NOW = 1_000_000.0
ARP = 'IP address       HW type     Flags       HW address            Mask     Device\n'
FIELDS = ['ip-address', 'mac-address', 'expiry-time', 'instance', 'hostname', 'public_keys', 'user_data']
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(FIELDS), inner),
)


def make_lease_entry(
    address: object = IP, mac: object = A, expiry: object = 1_000_100, **more: object
) -> dict[str, object]:
    return {'ip-address': address, 'mac-address': mac, 'expiry-time': expiry, **more}


def format_arp(*entries: tuple[str, str, str], device: str = 'virbr0') -> str:
    return ARP + ''.join(f'{ip:16} 0x1    {flags}    {mac}     *        {device}\n' for ip, mac, flags in entries)


@pytest.mark.parametrize('data', [b'', b'  \n'])
def test_parse_leases_of_an_empty_file(data: bytes) -> None:
    assert parse_leases(data) == []


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_malformed_files_raise_only_value_error(data: bytes) -> None:
    for parse_file in (parse_leases, lambda text: guests.parse_guest(text, A)):
        with contextlib.suppress(ValueError):
            parse_file(data)


def test_parse_neighbours() -> None:
    text = format_arp((IP, A, '0x2'), (IP, B.upper(), '0x6'), (IP2, '00:00:00:00:00:00', '0x0')) + 'short\n'
    assert guests.parse_neighbours(text + format_arp((IP2, A, '0x2'), device='br0'), 'virbr0') == {
        IP: frozenset({A, B})
    }


class Host:
    """The input files of one host's metadata server, in a temporary directory."""

    def __init__(self, root: Path) -> None:
        self.guests = root / 'metadata'
        self.arp = root / 'arp'
        self.status = root / 'virbr0.status'
        self.guests.mkdir()
        self.file = self.guests / f'{A}.json'
        self.file.write_text(json.dumps({'instance': UUID, 'hostname': 'web1'}))
        self.arp.write_text(format_arp((IP, A, '0x2')))
        self.status.write_text(json.dumps([make_lease_entry()]))

    def find_guest(self, address: str = IP, now: float = NOW) -> KnownGuest:
        tree = Files(conf.Config(leases=str(self.status.parent / '*.status'), neighbours=self.arp, guests=self.guests))
        return tree.read_guest(tree.find_leased_mac(address, now))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_guest_is_found_despite_a_broken_status_file(host: Host) -> None:
    (host.status.parent / 'a.status').write_text('{')
    assert host.find_guest().instance == UUID


def test_neighbours_on_other_interfaces_are_ignored(host: Host) -> None:
    """A single ARP packet from the LAN used to cut a guest off from its metadata."""
    host.arp.write_text(format_arp((IP, A, '0x2')) + format_arp((IP, B, '0x2'), device='eth0'))
    assert host.find_guest().instance == UUID


@pytest.mark.parametrize('text', [format_arp((IP, B, '0x2')), format_arp((IP, A, '0x2'), (IP, B, '0x2'))])
def test_address_used_by_another_machine_is_forged(host: Host, text: str) -> None:
    host.arp.write_text(text)
    with pytest.raises(ForgedAddressError, match='leased to another machine') as caught:
        host.find_guest()
    assert A not in str(caught.value)
    assert A in caught.value.detail
    assert B in caught.value.detail


def write_reservations(host: Host, *lines: str, network: str = 'default', bridge: str = 'virbr0') -> None:
    (host.status.parent / f'{network}.conf').write_text(f'strict-order\ninterface={bridge}\ndhcp-no-override\n')
    (host.status.parent / f'{network}.hostsfile').write_text('\n'.join(lines))


# Leases after dnsmasq has dropped that of A, as it does when B sends the same client identifier.
LEASES_WITHOUT_A = [[], [make_lease_entry(expiry=999_999)], [make_lease_entry(IP2, B)], [make_lease_entry(IP2, A)]]


@pytest.mark.parametrize('leases', LEASES_WITHOUT_A)
def test_reservation_identifies_the_guest_without_a_lease(host: Host, leases: list[object]) -> None:
    host.status.write_text(json.dumps(leases))
    write_reservations(
        host, f'{A},{IP},{UUID}', f'{B},{IP2},{UUID},3600', 'id:00:01,web6,[fd00::5]', 'rubbish', f'{A.upper()},no'
    )
    assert host.find_guest().instance == UUID
    config = conf.Config(leases=str(host.status.parent / '*.status'), neighbours=host.arp, guests=host.guests)
    assert Files(config).has_lease(IP2, NOW)


@pytest.mark.parametrize(
    ('text', 'error'),
    [
        (format_arp((IP, B, '0x2')), ForgedAddressError),
        (format_arp((IP, A, '0x2'), (IP, B, '0x2')), ForgedAddressError),
        (ARP, UnknownGuestError),
        (format_arp((IP, A, '0x0')), UnknownGuestError),
        (format_arp((IP, A, '0x2'), device='br-lan'), UnknownGuestError),
    ],
)
def test_reservation_without_a_lease_needs_a_matching_neighbour(
    host: Host, text: str, error: type[UnknownGuestError]
) -> None:
    host.status.write_text('[]')
    write_reservations(host, f'{A},{IP},{UUID}')
    host.arp.write_text(text)
    with pytest.raises(UnknownGuestError) as caught:
        host.find_guest()
    assert type(caught.value) is error


def test_reservation_of_an_inactive_network_is_ignored(host: Host) -> None:
    """Two networks may have the same addresses if one of them is inactive."""
    write_reservations(host, f'{B},{IP},{UUID}', network='old', bridge='virbr9')
    assert host.find_guest().instance == UUID
    host.status.write_text('[]')
    with pytest.raises(UnknownGuestError):
        host.find_guest()


def test_address_without_a_lease_is_unknown(host: Host) -> None:
    with pytest.raises(UnknownGuestError, match=f'no current DHCP lease for {IP2}$'):
        host.find_guest(IP2)
    with pytest.raises(UnknownGuestError, match='no current DHCP lease'):
        host.find_guest(now=NOW + 1000)
    host.status.unlink()
    with pytest.raises(UnknownGuestError, match='no current DHCP lease'):
        host.find_guest()


def test_half_written_lease_file_is_named_in_the_detail(host: Host) -> None:
    host.status.write_text('[{')
    with pytest.raises(UnknownGuestError, match='no current DHCP lease') as caught:
        host.find_guest()
    assert caught.value.detail == f'{host.status}: is not JSON'


def test_leases_are_read_at_most_once_a_second(host: Host) -> None:
    """Reading all leases for each of 750 connections a second used to block every guest."""
    requests: list[str] = []
    config = conf.Config(leases=str(host.status.parent / '*.status'))
    reader = Files(config, lambda what: requests.append(what) or files.carry_out(config, what))
    for _ in range(50):
        assert [reader.has_lease(ip, NOW + 0.9) for ip in (IP, IP2, IP, '10.0.0.1')] == [True, False, True, False]
    assert requests == ['leases']
    # A new lease is read after a second; a clock that was set back causes another read.
    host.status.write_text(json.dumps([make_lease_entry(), make_lease_entry(IP2, B)]))
    assert not reader.has_lease(IP2, NOW + 1.8)
    assert reader.has_lease(IP2, NOW + 1.9)
    host.status.write_text('[]')
    assert not reader.has_lease(IP2, NOW - 3600)
    assert requests == ['leases'] * 3


def test_lease_without_a_guest_file_is_unknown(host: Host) -> None:
    host.file.unlink()
    with pytest.raises(UnknownGuestError, match=f'no instance with the MAC address {A}'):
        host.find_guest()


def test_missing_guest_fields_come_from_mdserver_conf(tmp_path: Path) -> None:
    (tmp_path / 'data').write_bytes(b'#!default')
    config = conf.Config(user_data=tmp_path / 'data', public_keys=(('ops', 'ssh-rsa O'),))
    network = {'version': 2}
    filled_in = Files(config).fill_in_defaults
    assert filled_in(KnownGuest(UUID, 'web1', None, None, network), IP) == KnownGuest(
        UUID, 'web1', (('ops', 'ssh-rsa O'),), b'#!default', network, IP
    )
    own = guests.parse_guest(
        json.dumps({'instance': UUID, 'public_keys': ['A', 'B'], 'user_data': '#!mine'}).encode(), A
    )
    assert filled_in(own) == KnownGuest(UUID, UUID, (('default', 'A'), ('key-1', 'B')), b'#!mine')
    assert filled_in(KnownGuest(UUID, 'web1', (), b'')) == KnownGuest(UUID, 'web1', (), b'')


def test_unusable_guest_file_is_broken(host: Host) -> None:
    secret = host.guests / 'elsewhere'
    host.file.rename(secret)
    host.file.symlink_to(secret)
    with pytest.raises(BrokenFileError, match=r'aa:00:01\.json: Too many levels of symbolic links'):
        host.find_guest()
    host.file.unlink()
    os.mkfifo(host.file)
    with pytest.raises(BrokenFileError, match='is not a regular file'):
        host.find_guest()
    host.file.unlink()
    host.file.write_bytes(b' ' * (files.MAX_FILE_BYTES + 1))
    with pytest.raises(BrokenFileError, match='is larger than'):
        host.find_guest()
    host.file.write_text('{"instance"')
    with pytest.raises(BrokenFileError, match='is not JSON'):
        host.find_guest()


# Every path of both metadata trees, as Cirros and cloud-init request them.


KEYS = (('default', 'ssh-ed25519 AAAA me@here'), ('second', 'ssh-rsa BBBB 100%: ü\U0001f511'))
GUEST = KnownGuest(UUID, 'web1', KEYS, b'\x1f\x8b\x00binary\n', address='192.168.122.7')
BARE = KnownGuest(UUID, UUID, address='192.168.122.7')
NETWORK = {'version': 2, 'ethernets': {'eth0': {'match': {'macaddress': '52:54:00:aa:00:01'}, 'dhcp4': True}}}


def test_the_root_lists_the_versions() -> None:
    assert make_version_list() == b'2009-04-04\nlatest'


@pytest.mark.parametrize('guest', [GUEST, BARE], ids=['full', 'bare'])
def test_every_listed_path_has_an_answer(guest: KnownGuest) -> None:
    """Crawl as cloud-init does: a listed path without a value would cost a guest all metadata."""

    def crawl(path: str) -> dict[str, object]:
        values: dict[str, object] = {}
        for entry in (find_body(path, guest) or b'').decode().splitlines():
            if entry.endswith('/'):
                values[entry.rstrip('/')] = crawl(path + entry)
                continue
            number, equals, name = entry.partition('=')
            value = find_body(f'{path}{number}/openssh-key' if equals else path + entry, guest)
            assert value is not None, path + entry
            assert b'\n' not in value, 'cloud-init would make a list of it'
            values[name or entry] = value.decode()
        return values

    expected: dict[str, object] = {
        'hostname': guest.hostname,
        'instance-id': UUID,
        'local-hostname': guest.hostname,
        'local-ipv4': '192.168.122.7',
    }
    if guest.public_keys:
        expected['public-keys'] = dict(KEYS)
    assert crawl('/2009-04-04/meta-data/') == expected


def test_vendor_data_reports_when_cloud_init_has_finished() -> None:
    body = find_body(f'/seed/{UUID}/vendor-data', BARE)
    assert body is not None
    assert body.startswith(b'#!/bin/sh\n')
    assert body.count(f"'http://169.254.169.254/phone-home/{UUID}/'".encode()) == 1


@pytest.mark.parametrize('name', ['user-data', 'network-config'])
def test_a_seed_has_all_its_files_even_when_empty(name: str) -> None:
    assert find_body(f'/seed/{UUID}/{name}', BARE) == b''


def test_seed_disk_equals_the_network_seed_except_dsmode() -> None:
    guest = replace(GUEST, network_config=NETWORK)
    files = make_seed(guest, with_phone_home=True)
    served = {name: find_body(f'/seed/{UUID}/{name}', guest) for name in files}
    local, net = (json.loads(tree.pop('meta-data')) for tree in (files, served))
    assert files == served
    assert files.keys() == {'user-data', 'vendor-data', 'network-config'}
    assert local == {name: value for name, value in net.items() if name != 'dsmode'}


def test_seed_disk_of_a_guest_without_options() -> None:
    assert make_seed(BARE, with_phone_home=False).keys() == {'meta-data', 'user-data'}
    assert make_seed(BARE, with_phone_home=False)['user-data'] == b''
    assert b'phone-home' in make_seed(BARE, with_phone_home=True)['vendor-data']


# The ready report of a guest, also of one that is removed at that moment.


MAC = '52:54:00:aa:00:01'
ADDRESS = '192.168.122.11'
NEIGHBOUR = '52:54:00:bb:00:02'
NEIGHBOURS = f'{ADDRESS} 0x1 0x2 {MAC} * virbr0\n'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration with one guest, whose lease does not expire."""
    (tmp_path / 'guests').mkdir()
    (tmp_path / f'guests/{MAC}.json').write_text(json.dumps({'instance': UUID, 'hostname': 'web1'}))
    leases = [{'ip-address': ADDRESS, 'mac-address': MAC, 'expiry-time': 0}]
    (tmp_path / 'virbr0.status').write_text(json.dumps(leases))
    (tmp_path / 'arp').write_text('')
    return Config(guests=tmp_path / 'guests', leases=str(tmp_path / '*.status'), neighbours=tmp_path / 'arp')


def send_request(config: Config, server: Callable[..., Iterable[bytes]] | None = None, **environ: str) -> str:
    environ = {'REMOTE_ADDR': ADDRESS, 'HTTP_HOST': config.listen_address, **environ}
    setup_testing_defaults(environ)
    statuses = []
    list((server or App(files.Files(config)))(environ, lambda status, *_: statuses.append(status)))
    return statuses[0]


def report_ready(config: Config) -> str:
    return send_request(config, REQUEST_METHOD='POST', PATH_INFO=f'/phone-home/{UUID}/')


def request_instance_id(config: Config, server: Callable[..., Iterable[bytes]] | None = None) -> str:
    return send_request(config, server, REQUEST_METHOD='GET', PATH_INFO='/latest/meta-data/instance-id')


def test_ready_report_is_written(config: Config) -> None:
    assert report_ready(config) == '200 OK'
    report = {'version': 1, 'host_keys': [], 'stage': None, 'error': None}
    assert json.loads((config.guests / f'{UUID}.ready').read_text()) == report


def test_report_of_a_guest_removed_concurrently_leaves_no_file(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = files._is_guest_present

    def check_then_remove(config: Config, mac: str, instance: str) -> bool:
        was_there = is_there(config, mac, instance)
        (config.guests / f'{MAC}.json').unlink(missing_ok=True)
        return was_there

    monkeypatch.setattr(files, '_is_guest_present', check_then_remove)
    assert report_ready(config) == '404 Not Found'
    assert list(config.guests.iterdir()) == []


@pytest.mark.parametrize(
    ('change', 'refusal'),
    [
        (lambda config: Path(config.leases.replace('*', 'virbr0')).write_text('[]'), 'no current DHCP lease for'),
        (lambda config: (config.guests / f'{MAC}.json').unlink(), 'no instance with the MAC address'),
        (lambda config: (config.guests / f'{MAC}.json').write_text('{'), 'cannot be read'),
        (
            lambda config: config.neighbours.write_text(NEIGHBOURS + NEIGHBOURS.replace(MAC, NEIGHBOUR)),
            'another machine',
        ),
    ],
)
def test_refusal_is_reported_until_the_guest_is_answered(
    config: Config, change: Callable[[Config], object], refusal: str
) -> None:
    config.neighbours.write_text(NEIGHBOURS)
    contents = {path: path.read_text() for path in (config.guests / f'{MAC}.json', config.neighbours)}
    contents[Path(config.leases.replace('*', 'virbr0'))] = Path(config.leases.replace('*', 'virbr0')).read_text()
    server, data = App(files.Files(config)), GuestData(config.guests)
    for _ in range(2):
        assert request_instance_id(config, server) == '200 OK'
        assert MAC not in data.read_refusals()
        change(config)
        assert request_instance_id(config, server).startswith(('404', '500'))
        assert refusal in data.read_refusals()[MAC]
        for path, text in contents.items():
            path.write_text(text)
    assert request_instance_id(config) == '200 OK'
    assert MAC not in data.read_refusals()


def test_refusals_of_many_macs_are_limited(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, 'MAX_REFUSALS', 3)
    Path(config.leases.replace('*', 'virbr0')).write_text('[]')
    server = App(files.Files(config))
    for number in range(9):
        config.neighbours.write_text(NEIGHBOURS.replace(MAC, f'52:54:00:00:00:0{number}'))
        request_instance_id(config, server)
    refused = GuestData(config.guests).read_refusals()
    assert len(refused) == 3
    GuestData(config.guests).remove_refusals(refused)
    assert [path.name for path in config.guests.iterdir()] == [f'{MAC}.json']


def test_repeated_ready_report_is_not_written(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeated report of a guest used to be written to disk while all other guests waited."""
    report_ready(config)
    before = (config.guests / f'{UUID}.ready').stat()

    def refuse_fsync(_: int) -> None:
        raise AssertionError('it is written to the disk')

    monkeypatch.setattr(os, 'fsync', refuse_fsync)
    assert report_ready(config) == '200 OK'
    assert (config.guests / f'{UUID}.ready').stat() == before
    assert sorted(path.name for path in config.guests.iterdir()) == sorted([f'{UUID}.ready', f'{MAC}.json'])


def test_first_report_survives_a_server_killed_while_writing(config: Config) -> None:
    """A server killed between link and unlink leaves two names of one file."""
    report = config.guests / f'{UUID}.ready'
    report_ready(config)
    report.write_text('{"the first": 1}')
    os.link(report, report.with_suffix('.said'))
    assert report_ready(config) == '200 OK'
    assert report.read_text() == '{"the first": 1}'
    assert not report.with_suffix('.said').exists()
    # Killed before the link, the server leaves only a partial file, which does not count.
    report.rename(report.with_suffix('.said'))
    assert report_ready(config) == '200 OK'
    assert json.loads(report.read_text())['host_keys'] == []
    assert not report.with_suffix('.said').exists()


def test_concurrent_reports_are_all_acknowledged(config: Config) -> None:
    for _ in range(20):
        (config.guests / f'{UUID}.ready').unlink(missing_ok=True)
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(lambda _: report_ready(config), range(8))) == {'200 OK'}


def test_report_to_a_full_directory_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(files, '_write_report', raise_no_space)
    assert report_ready(config).startswith('500 ')


def test_address_that_could_not_be_noted_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libvirt = Mock(**{'has_metadata_address.return_value': False})
    monkeypatch.setattr(MetadataServer, 'ensure', Mock())
    with contextlib.ExitStack() as at_exit:
        serve_metadata(libvirt, tmp_path / 'missing', tmp_path, warns_without_bridge=True, at_exit=at_exit)
    assert libvirt.set_metadata_address.mock_calls == [call(True), call(False)]


# mdserver.conf: valid files, and every kind of error.


TOP = Path(__file__).parents[2]


def make_key(kind: str = 'ssh-ed25519', comment: str = 'me@here') -> str:
    blob = base64.b64encode(len(kind).to_bytes(4, 'big') + kind.encode() + bytes(36)).decode()
    return f'{kind} {blob} {comment}'.strip()


def test_without_a_file() -> None:
    config = load(None)
    assert (config.listen_address, config.port) == ('169.254.169.254', 80)
    assert config.guests == Path('/var/lib/ecompute/metadata')
    assert config.leases == '/var/lib/libvirt/dnsmasq/*.status'
    assert (config.user_data, config.public_keys) == (None, ())


def test_example_file_gives_the_defaults_and_names_every_key() -> None:
    text = (TOP / 'mdserver.conf').read_text()
    assert parse(text, TOP / 'mdserver.conf') == Config()
    text = re.sub('^# (?=[a-z_-]+ = )', '', text, flags=re.MULTILINE).replace('ssh-ed25519 AAAA... me@here', make_key())
    filled = parse(text, TOP / 'mdserver.conf')
    assert filled == Config(user_data=TOP / 'userdata.file', public_keys=(('default', make_key()),))


def test_a_full_file(tmp_path: Path) -> None:
    (tmp_path / 'data').write_bytes(b'\x1f\x8b')
    text = f"""\
[mdserver]
listen_address = 192.0.2.1
port = 8775
guests = state/metadata
leases = dnsmasq/*.status
user-data = data
[public-keys]
default = {make_key()}
second: {make_key('ssh-rsa', '100% me: %(x)s')}
third = {make_key('sk-ssh-ed25519@openssh.com', '')}
"""
    assert parse(text, tmp_path / 'mdserver.conf') == Config(
        '192.0.2.1', 8775, tmp_path / 'state/metadata', f'{tmp_path}/dnsmasq/*.status', tmp_path / 'data',
        (
            ('default', make_key()),
            ('second', make_key('ssh-rsa', '100% me: %(x)s')),
            ('third', make_key('sk-ssh-ed25519@openssh.com', '')),
        ),
    )  # fmt: skip


def test_user_data_too_large(tmp_path: Path) -> None:
    (tmp_path / 'data').write_bytes(b' ' * (MAX_USER_DATA_BYTES + 1))
    with pytest.raises(ConfError, match='is larger than 1048576 bytes'):
        parse('[mdserver]\nuser-data = data', tmp_path / 'm.conf')


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfError, match=r'm\.conf: No such file or directory\. Fix: give a readable file'):
        load(tmp_path / 'm.conf')
    (tmp_path / 'm.conf').write_bytes(b'\xff')
    with pytest.raises(ConfError, match='is not UTF-8'):
        load(tmp_path / 'm.conf')


LINES = st.sampled_from(
    ['[mdserver]', '[public-keys]', '[x]', ' [x]', 'port = 1', '  port = 1', 'b = 1', ' b:', '# x', ' #', '', 'x']
)


@settings(max_examples=200)
@given(st.text() | st.text('[]=:#; \t\n\r\x85xİ') | st.lists(LINES).map('\n'.join))
def test_any_text_parses_or_fails_in_one_line(text: str) -> None:
    message = ''
    try:
        parse(text, Path('m.conf'))
    except ConfError as error:
        message = str(error)
    assert '\n' not in message


def test_error_names_the_path_of_an_open_descriptor(tmp_path: Path) -> None:
    """A directory read as /proc/self/fd/N is reported by its path, and its descriptor closed."""
    descriptor = os.open(tmp_path, os.O_PATH)
    with pytest.raises(ConfError, match=f'^{tmp_path}: Is a directory. Fix: give a readable file'):
        load(Path(f'/proc/self/fd/{descriptor}'))
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(descriptor)
