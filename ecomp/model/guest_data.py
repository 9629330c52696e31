"""What a guest is given for cloud-init, user-data and ssh keys, as a user's files hold it. Pure: bytes in, checked.

Nothing of either is ever quoted: a reason says which line, for it goes to terminals and logs.

Sources: cloud-init's "User data formats" and `user_data.py`; RFC 4253 6.6 (a public key's blob is length-prefixed
strings, the first its type); sshd(8) for the line around it.
"""

from __future__ import annotations

import binascii
from typing import NamedTuple, Self

from ecomp.model.json_object import dump, load_object

USER_DATA_LIMIT = 256 * 1024
"""Bytes of user-data; more is refused. A request holds it as base64."""
KEYS_LIMIT = 32 * 1024
"""Bytes of all ssh keys of an instance; more are refused."""

GZIP = b'\x1f\x8b'
KNOWN = ('#cloud-config', '#cloud-boothook', '#!', '#include', '#part-handler', '## template: jinja')
"""How user-data begins that cloud-init takes; it also takes what has a MIME header near its beginning."""
UNPACKED_LIMIT = 16 * 1024 * 1024
"""Bytes that are unpacked of gzip to look at them; what has more is not looked at."""


class SharedUserData(NamedTuple):
    """User-data of a set: its SHA-256, which the set's requests hold, and the value of the key that holds it once."""

    sha256: str
    text: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The SharedUserData of these bytes."""
        import hashlib  # here and below: seldom needed, and slow to load

        encoded = binascii.b2a_base64(data, newline=False).decode()
        return cls(hashlib.sha256(data).hexdigest(), dump({'version': 1, 'user_data': encoded}))


def shared_user_data(value: bytes, sha256: str) -> bytes:
    """The user-data in the value of a set's key. ValueError if its SHA-256 is another."""
    import hashlib

    try:
        data = binascii.a2b_base64(load_object(value)['user_data'], strict_mode=True)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError('it cannot be read') from error
    if len(data) > USER_DATA_LIMIT:
        raise ValueError(f'it has {len(data)} bytes; the limit is {USER_DATA_LIMIT}')
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError('it has another hash')
    return data


def check_user_data(data: bytes) -> bytes:
    """The user-data as it is; ValueError if cloud-init cannot read it. The size is not checked."""
    if not data:
        raise ValueError('is empty')
    if data.startswith(GZIP):
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise ValueError(f'line {line}: is neither text in UTF-8 nor gzip: cloud-init takes no other binary') from error
    if '\0' in text:
        raise ValueError(f'line {text.count(chr(10), 0, text.index(chr(0))) + 1}: has a NUL, so it is no text')
    return data


def unpacked(data: bytes) -> bytes | None:
    """What cloud-init reads of user-data: what is in it where it is gzip, None where that is broken.

    Of more than UNPACKED_LIMIT the data as it is.
    """
    if not data.startswith(GZIP):
        return data
    import gzip  # here and below: few give any
    import io
    import zlib

    try:
        found = gzip.GzipFile(fileobj=io.BytesIO(data)).read(UNPACKED_LIMIT + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return found if len(found) <= UNPACKED_LIMIT else data


def looks_unknown(data: bytes) -> bool:
    """True for user-data that cloud-init would ignore: it begins with none of KNOWN and has no MIME header.

    As type_from_starts_with() in cloud-init's cloudinit/handlers/__init__.py: of UTF-8 alone, lowered, left-stripped.
    """
    text = data.decode(errors='replace')
    is_known = text.encode() == data and text.lower().lstrip().startswith(KNOWN)
    return not (is_known or data.startswith(GZIP) or b'mime-version:' in data[:4096].lower())


def public_keys(data: bytes) -> tuple[str, ...]:
    """The keys in a file of OpenSSH public keys, a line each, without empty lines and comments.

    ValueError, with the line, for any other line.
    """
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f'line {data.count(bytes([10]), 0, error.start) + 1}: is not text in UTF-8') from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith('#'):
            try:
                found.append(public_key(line.split()))
            except ValueError as error:
                raise ValueError(f'line {number}: {error}') from error
    if not found:
        raise ValueError('has no key in it')
    return tuple(dict.fromkeys(found))


def public_key(fields: list[str]) -> str:
    """The OpenSSH public key that these words of a line are: type, base64, comment. ValueError if they are none."""
    key = ' '.join(fields)
    if 'PRIVATE KEY' in key or key.startswith('PuTTY-User-Key-File'):
        raise ValueError('is a private key: name the public one, whose file ends in .pub')
    if key.startswith('---- BEGIN SSH2 PUBLIC KEY'):
        raise ValueError("is a key in another format than OpenSSH's: ssh-keygen -i -f FILE converts it")
    wrong = 'is not an OpenSSH public key: it is one line that begins like ssh-ed25519 AAAA'
    if len(fields) < 2 or not key.isprintable():
        raise ValueError(wrong)
    kind = fields[0].encode()
    try:
        blob = binascii.a2b_base64(fields[1].encode('ascii'), strict_mode=True)
    except ValueError as error:
        raise ValueError(wrong) from error
    if not blob.startswith(len(kind).to_bytes(4, 'big') + kind):
        raise ValueError(wrong)
    # A certificate's blob also holds plain numbers.
    if b'-cert-v' not in kind and not _is_whole(blob):
        raise ValueError('is a part of a public key only: copy the whole line')
    return key


def _is_whole(blob: bytes) -> bool:
    """True when the blob is two strings or more, and ends where the last one does."""
    at = count = 0
    while at < len(blob):
        at += 4 + int.from_bytes(blob[at : at + 4], 'big')
        count += 1
    return at == len(blob) and count > 1
