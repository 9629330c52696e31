"""The pure tree: every path of both trees, as Cirros and cloud-init ask for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mdserver.guests import Guest
from mdserver.metadata import answer, seed, versions

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
OTHER = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
KEYS = (('default', 'ssh-ed25519 AAAA me@here'), ('second', 'ssh-rsa BBBB 100%: ü\U0001f511'))
GUEST = Guest(UUID, 'web1', KEYS, b'\x1f\x8b\x00binary\n', address='192.168.122.7')
BARE = Guest(UUID, UUID, address='192.168.122.7')
NETWORK = {'version': 2, 'ethernets': {'eth0': {'match': {'macaddress': '52:54:00:aa:00:01'}, 'dhcp4': True}}}

EC2 = [
    ('', b'meta-data\nuser-data'),
    ('/meta-data', b'hostname\ninstance-id\nlocal-hostname\nlocal-ipv4\npublic-keys/'),
    ('/meta-data/hostname', b'web1'),
    ('/meta-data/instance-id', UUID.encode()),
    ('/meta-data/local-hostname', b'web1'),
    ('/meta-data/local-ipv4', b'192.168.122.7'),
    ('/meta-data/public-keys', b'0=default\n1=second'),
    ('/meta-data/public-keys/0', b'openssh-key'),
    ('/meta-data/public-keys/0/openssh-key', KEYS[0][1].encode()),
    ('/meta-data/public-keys//0/openssh-key', KEYS[0][1].encode()),
    ('/meta-data/public-keys/1', b'openssh-key'),
    ('/meta-data/public-keys/1/openssh-key', KEYS[1][1].encode()),
    ('/user-data', b'\x1f\x8b\x00binary\n'),
]
NOTHING = [
    '/latest/api/token',
    '/latest/dynamic/instance-identity/document',
    '/latest/meta-data/ami-launch-index',
    '/latest/meta-data/block-device-mapping/',
    '/latest/meta-data/hostname/more',
    '/latest/meta-data/instance-type',
    '/latest/meta-data/placement/availability-zone',
    '/latest/meta-data/public-ipv4',
    '/latest/meta-data/public-keys/2',
    '/latest/meta-data/public-keys/0=default',
    '/latest/meta-data/public-keys/0/openssh-key/more',
    '/latest/meta-data/..',
    '/2021-03-23/meta-data/instance-id',
    '/1.0/meta-data/',
    '/instance-id',
    '/openstack/latest/meta_data.json',
    '/seed',
    f'/seed/{UUID.upper()}/meta-data',
    f'/seed/{UUID}/phone-home',
    f'/seed/{OTHER}',
    f'/seed/{OTHER}/meta-data',
    f'/seed/{OTHER}/user-data',
]


@pytest.mark.parametrize('slash', ['', '/'])
@pytest.mark.parametrize('version', ['2009-04-04', 'latest'])
@pytest.mark.parametrize(('path', 'body'), EC2)
def test_ec2(version: str, path: str, slash: str, body: bytes) -> None:
    assert answer(f'/{version}{path}{slash}', GUEST) == body


@pytest.mark.parametrize('slash', ['', '/'])
@pytest.mark.parametrize('path', NOTHING)
def test_nothing_there(path: str, slash: str) -> None:
    assert answer(path + slash, GUEST) is None


def test_the_root_lists_the_versions() -> None:
    assert versions() == b'2009-04-04\nlatest'


def test_ec2_without_keys_and_user_data() -> None:
    assert answer('/latest/', BARE) == b'meta-data'
    assert answer('/latest/user-data', BARE) is None
    assert answer('/latest/meta-data/', BARE) == b'hostname\ninstance-id\nlocal-hostname\nlocal-ipv4'
    assert answer('/latest/meta-data/public-keys/', BARE) is None


@pytest.mark.parametrize('guest', [GUEST, BARE], ids=['full', 'bare'])
def test_what_the_index_lists_answers(guest: Guest) -> None:
    """Crawled by cloud-init's rules; one value that does not answer would cost a guest all of them."""

    def crawl(path: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for entry in (answer(path, guest) or b'').decode().splitlines():
            if entry.endswith('/'):
                found[entry.rstrip('/')] = crawl(path + entry)
                continue
            number, equals, name = entry.partition('=')
            value = answer(f'{path}{number}/openssh-key' if equals else path + entry, guest)
            assert value is not None, path + entry
            assert b'\n' not in value, 'cloud-init would make a list of it'
            found[name or entry] = value.decode()
        return found

    expected: dict[str, object] = {
        'hostname': guest.hostname,
        'instance-id': UUID,
        'local-hostname': guest.hostname,
        'local-ipv4': '192.168.122.7',
    }
    if guest.public_keys:
        expected['public-keys'] = dict(KEYS)
    assert crawl('/2009-04-04/meta-data/') == expected


@pytest.mark.parametrize('load', [json.loads, yaml.safe_load])
def test_seed(load: object) -> None:
    body = answer(f'/seed/{UUID}/meta-data', GUEST)
    assert body is not None
    assert load(body) == {  # type: ignore[operator]
        'instance-id': UUID,
        'local-hostname': 'web1',
        'public-keys': [key for _, key in KEYS],
        'dsmode': 'net',
    }
    assert answer(f'/seed/{UUID}/user-data', GUEST) == GUEST.user_data


def test_vendor_data_is_a_script_that_says_when_cloud_init_is_through() -> None:
    body = answer(f'/seed/{UUID}/vendor-data', BARE)
    assert body is not None
    assert body.startswith(b'#!/bin/sh\n')
    assert body.count(f"'http://169.254.169.254/phone-home/{UUID}/'".encode()) == 1


@pytest.mark.parametrize('name', ['user-data', 'network-config'])
def test_a_seed_has_all_its_files_even_when_empty(name: str) -> None:
    assert answer(f'/seed/{UUID}/{name}', BARE) == b''


def test_network_config_is_yaml_and_json() -> None:
    body = answer(f'/seed/{UUID}/network-config', replace(BARE, network_config=NETWORK))
    assert body is not None
    assert json.loads(body) == yaml.safe_load(body) == NETWORK


def test_a_seed_disk_has_what_the_network_seed_has_and_is_found_without_it() -> None:
    guest = replace(GUEST, network_config=NETWORK)
    files = seed(guest, phones_home=True)
    served = {name: answer(f'/seed/{UUID}/{name}', guest) for name in files}
    local, net = (json.loads(each.pop('meta-data')) for each in (files, served))
    assert files == served
    assert files.keys() == {'user-data', 'vendor-data', 'network-config'}
    assert local == {name: value for name, value in net.items() if name != 'dsmode'}


def test_a_seed_disk_without_what_nobody_said() -> None:
    assert seed(BARE, phones_home=False).keys() == {'meta-data', 'user-data'}
    assert seed(BARE, phones_home=False)['user-data'] == b''
    assert b'phone-home' in seed(BARE, phones_home=True)['vendor-data']


@given(st.text())
def test_any_path_is_an_answer_or_nothing(path: str) -> None:
    assert isinstance(answer(path, GUEST), bytes | None)
