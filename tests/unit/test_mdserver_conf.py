"""mdserver.conf: valid files, and every kind of error."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mdserver.conf import MAX_USER_DATA_BYTES, ConfError, Config, load, parse

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


@pytest.mark.parametrize(
    'text',
    [
        '',
        '# nothing\n',
        '[mdserver]\n',
        '[public-keys]\n[mdserver]\n',
        '\ufeff[mdserver]\n',
    ],
)
def test_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    file = tmp_path / 'mdserver.conf'
    file.write_text(text)
    assert load(file) == Config()


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
        '192.0.2.1',
        8775,
        tmp_path / 'state/metadata',
        f'{tmp_path}/dnsmasq/*.status',
        tmp_path / 'data',
        (
            ('default', make_key()),
            ('second', make_key('ssh-rsa', '100% me: %(x)s')),
            ('third', make_key('sk-ssh-ed25519@openssh.com', '')),
        ),
    )


def test_every_bad_key_is_named_with_its_line() -> None:
    text = f"""\
[mdserver]
# a comment
Prot = 80
port = http
listen_address = virbr0

[nova]
port = 1
[public-keys]
default = ssh-rsa [...]
good = {make_key()}
"""
    with pytest.raises(ConfError) as caught:
        parse(text, Path('m.conf'))
    assert str(caught.value) == (
        'm.conf: '
        'line 3: "prot": unknown key in [mdserver]: must be one of listen_address, port, guests, leases, user-data; '
        'line 4: "port": \'http\' is not a port from 0 to 65535; '
        'line 5: "listen_address": \'virbr0\' is not an IPv4 address; '
        'line 7: unknown section [nova]: must be [mdserver] or [public-keys]; '
        'line 10: "default": is not an OpenSSH public key: such a key is one line that begins like ssh-ed25519 AAAA'
    )


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            '[mdserver]\npassword = password',
            'line 2: "password": passwords for guests are no longer supported. Fix: remove `password`',
        ),
        ('port = 80', r'line 1: this line is before the first \[section\]'),
        ('[mdserver]\nport', r'line 2: must be \[section\] or'),
        ('[mdserver]\nport = 1\nport = 2', 'line 3: "port" is given more than once'),
        ('[mdserver]\n[mdserver]', r'line 2: \[mdserver\] is given more than once'),
        ('[DEFAULT]\nport = 1', r'line 1: unknown section \[DEFAULT\]'),
        ('[mdserver]\nport = 65536', 'not a port'),
        ('[mdserver]\nport = -1', 'not a port'),
        ('[mdserver]\nport =', 'not a port'),
        ('[mdserver]\nlisten_address = ::1', 'not an IPv4 address'),
        ('[mdserver]\nguests =', '"guests": is empty'),
        ('[mdserver]\nleases =', '"leases": is empty'),
        ('[mdserver]\nuser-data =', '"user-data": is empty'),
        ('[mdserver]\nuser-data = /no/such', 'line 2: "user-data": /no/such: No such file'),
        ('[mdserver]\nuser-data = /', 'Is a directory'),
        ('[public-keys]\na b = x', 'line 2: "a b": is not a valid name of a key'),
        ('[public-keys]\n0=x = y', 'line 2: "0": is not an OpenSSH public key'),
        ('[public-keys]\ndefault =', 'not an OpenSSH public key'),
        (f'[public-keys]\ndefault = {make_key()}\n  {make_key()}', 'not an OpenSSH public key'),
        (f'[public-keys]\ndefault = {make_key()[4:]}', 'not an OpenSSH public key'),
        (f'[public-keys]\ndefault = ssh-rsa {make_key().split()[1]}', 'not an OpenSSH public key'),
    ],
)
def test_invalid_file_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfError, match=message) as caught:
        parse(text, Path('m.conf'))
    assert str(caught.value).startswith('m.conf: ')
    assert '\n' not in str(caught.value)


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


@settings(max_examples=500)
@given(
    st.text()
    | st.text('[]=:#; \t\n\r\x85xİ')
    | st.lists(
        st.sampled_from(
            [
                '[mdserver]',
                '[public-keys]',
                '[x]',
                ' [x]',
                'port = 1',
                '  port = 1',
                'b = 1',
                ' b:',
                '# x',
                ' #',
                '',
                'x',
            ],
        )
    ).map('\n'.join)
)
def test_any_text_parses_or_fails_in_one_line(text: str) -> None:
    message = ''
    try:
        parse(text, Path('m.conf'))
    except ConfError as error:
        message = str(error)
    assert '\n' not in message


def test_error_names_the_path_of_an_open_descriptor(tmp_path: Path) -> None:
    """A directory read as /proc/self/fd/N is reported by its path; its descriptor is closed."""
    descriptor = os.open(tmp_path, os.O_PATH)
    with pytest.raises(ConfError, match=f'^{tmp_path}: Is a directory. Fix: give a readable file'):
        load(Path(f'/proc/self/fd/{descriptor}'))
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(descriptor)
