"""What may be a guest's user-data and ssh keys; what is refused, by its line, and never quoted.

What is taken as user-data is in test_given.py.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.guest import (
    USER_DATA_LIMIT,
    SharedUserData,
    check_user_data,
    public_keys,
    shared_user_data,
)

CANARY = 'canary0123456789'


def packed(*strings: bytes) -> bytes:
    return b''.join(len(each).to_bytes(4, 'big') + each for each in strings)


def blob(*strings: bytes) -> str:
    return base64.b64encode(packed(*strings)).decode()


def key(kind: str = 'ssh-ed25519', *strings: bytes) -> str:
    return f'{kind} {blob(kind.encode(), *(strings or (bytes(32),)))}'


CERTIFICATE = 'ssh-ed25519-cert-v01@openssh.com'
PRIVATE = f'-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n-----END OPENSSH PRIVATE KEY-----\n'
SSH2 = f'---- BEGIN SSH2 PUBLIC KEY ----\nComment: "x"\n{CANARY}\n---- END SSH2 PUBLIC KEY ----\n'


# User-data


@pytest.mark.parametrize(
    ('data', 'reason'),
    [
        (b'', 'is empty'),
        (b'\x89PNG\r\n', 'line 1: is neither text'),
        (b'#!/bin/sh\n\xff', 'line 2: is neither text'),
        (b'#!/bin/sh\n\n\0', 'line 3: has a NUL'),
    ],
)
def test_no_user_data(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        check_user_data(data)


# Keys


@pytest.mark.parametrize(
    'line',
    [
        key(),
        key() + ' me@here',
        key() + ' me at home, 100 %',
        key('ssh-rsa', b'\1\0\1', bytes(256)),
        key('ecdsa-sha2-nistp256', b'nistp256', bytes(65)),
        key('sk-ssh-ed25519@openssh.com', bytes(32), b'ssh:'),
        # It has a serial number in it, which is no string.
        f'{CERTIFICATE} {base64.b64encode(packed(CERTIFICATE.encode(), bytes(32)) + bytes(7)).decode()}',
    ],
)
def test_a_key(line: str) -> None:
    assert public_keys(line.encode()) == (line,)


def test_a_file_of_several() -> None:
    one, two = key() + ' one', key('ssh-rsa', b'\1\0\1', bytes(256)) + ' two'
    text = f'# mine\n\n{one}\r\n  {two}  \n\t# and again\n{one}\n'
    assert public_keys(text.encode()) == (one, two)


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('', 'has no key in it'),
        ('# nothing\n\n', 'has no key in it'),
        (PRIVATE, 'line 1: is a private key'),
        (f'{key()}\n{PRIVATE}', 'line 2: is a private key'),
        (f'PuTTY-User-Key-File-3: ssh-ed25519\n{CANARY}', 'line 1: is a private key'),
        (SSH2, 'line 1: is a key in another format'),
        (CANARY, 'line 1: is not an OpenSSH public key'),
        (f'ssh-ed25519 {CANARY}', 'line 1: is not an OpenSSH public key'),
        (f'ssh-ed25519 {CANARY}é', 'line 1: is not an OpenSSH public key'),
        ('ssh-ed25519', 'line 1: is not an OpenSSH public key'),
        (f'ssh-rsa {blob(b"ssh-ed25519", bytes(32))}', 'line 1: is not an OpenSSH public key'),
        (f'no-pty {key()}', 'line 1: is not an OpenSSH public key'),
        (key() + ' \x1b[2J', 'line 1: is not an OpenSSH public key'),
        (f'{key()}\n{key()[:40]}', 'line 2: is a part of a public key only'),
        (f'ssh-ed25519 {blob(b"ssh-ed25519")}', 'line 1: is a part of a public key only'),
        ('\ufeff' + key(), 'line 1: is not an OpenSSH public key'),
    ],
)
def test_no_keys(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        public_keys(text.encode())
    assert CANARY not in str(caught.value)


def reason(check: Callable[[bytes], object], data: bytes) -> str:
    try:
        check(data)
    except ValueError as error:
        return str(error)
    return ''


@given(st.binary(max_size=300))
def test_whatever_it_is_a_reason_is_short(data: bytes) -> None:
    for check in (public_keys, check_user_data):
        said = reason(check, data)
        assert len(said) < 200
        assert said.isprintable()


@given(st.binary(min_size=1, max_size=2000))
def test_shared_user_data_is_read_as_it_was(data: bytes) -> None:
    shared = SharedUserData.of(data)
    assert shared_user_data(shared.text.encode(), shared.sha256) == data


LARGE = SharedUserData.of(bytes(USER_DATA_LIMIT + 1))


@pytest.mark.parametrize(
    ('value', 'sha256', 'why'),
    [
        (SharedUserData.of(b'a').text.encode(), SharedUserData.of(b'b').sha256, 'it has another hash'),
        (LARGE.text.encode(), LARGE.sha256, f'it has {USER_DATA_LIMIT + 1} bytes'),
        *((junk, 'f' * 64, 'it cannot be read') for junk in (b'', b'[]', b'{}', b'7', b'\xff', b'[' * 100_000)),
        (b'{"user_data": 7}', 'f' * 64, 'it cannot be read'),
        (b'{"user_data": "%%%"}', 'f' * 64, 'it cannot be read'),
    ],
)
def test_what_is_no_shared_user_data(value: bytes, sha256: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shared_user_data(value, sha256)
