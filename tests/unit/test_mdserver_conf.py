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
    """A directory read as /proc/self/fd/N is reported by its path; its descriptor is closed."""
    descriptor = os.open(tmp_path, os.O_PATH)
    with pytest.raises(ConfError, match=f'^{tmp_path}: Is a directory. Fix: give a readable file'):
        load(Path(f'/proc/self/fd/{descriptor}'))
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(descriptor)
