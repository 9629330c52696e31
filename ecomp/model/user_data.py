"""User-data and ssh keys for a guest, and the host keys and failures that it reports. Pure.

A guest is trusted only about itself. Errors name a line and never quote it, because they go to terminals and logs.
Sources: cloud-init's "User data formats" and `user_data.py`, RFC 4253 6.6 for public keys, sshd(8) for their lines.
"""

from __future__ import annotations

import binascii
from typing import Any, NamedTuple, Self

from ecomp.model.json_object import load_object_or_empty
from ecomp.model.parsers import NONEMPTY, TEXT
from ecomp.model.stored import Field, decode, encode, lenient, nested, optional, parse_fields, stored
from ecomp.model.text import make_printable

# Host keys of other types, further keys, and longer ones are dropped. 3000 characters hold an RSA key of 16384 bits.
HOST_KEY_TYPES = ('ssh-ed25519', 'ecdsa-sha2-nistp256', 'ecdsa-sha2-nistp384', 'ecdsa-sha2-nistp521', 'ssh-rsa')
MAX_HOST_KEYS = 4
MAX_HOST_KEY_CHARACTERS = 3000

# Characters of cloud-init's failed stage and error; longer text is truncated and ends in `…`.
MAX_STAGE_CHARACTERS = 40
MAX_REASON_CHARACTERS = 500


@stored(
    stage=lambda value: make_printable(NONEMPTY(value), MAX_STAGE_CHARACTERS),
    reason=lambda value: make_printable(TEXT(value), MAX_REASON_CHARACTERS),
)
class GuestFailure(NamedTuple):
    """A failure of a guest's cloud-init: cloud-init's name of the stage, and its message."""

    stage: str
    reason: str


def parse_host_keys(value: object) -> tuple[str, ...]:
    """Return the first MAX_HOST_KEYS valid keys of HOST_KEY_TYPES, without comments."""
    host_keys: dict[str, None] = {}
    for text in value if isinstance(value, list) else ():
        fields = text.split()[:2] if isinstance(text, str) and len(text) <= MAX_HOST_KEY_CHARACTERS else ['']
        try:
            if fields and fields[0] in HOST_KEY_TYPES:
                host_keys[parse_public_key(fields)] = None
        except ValueError:
            continue
    return tuple(host_keys)[:MAX_HOST_KEYS]


@stored(host_keys=optional(parse_host_keys), failure=lenient(nested(GuestFailure)))
class GuestReport(NamedTuple):
    host_keys: tuple[str, ...] = ()
    failure: GuestFailure | None = None


def parse_guest_report(data: bytes) -> GuestReport:
    """Parse a stored report, leaving out malformed parts."""
    report = load_object_or_empty(data)  # empty from an older server
    return parse_fields(GuestReport, {**report, 'failure': {**report, 'reason': report.get('error')}})


# More user-data, or more ssh keys of an instance in total, are refused. A request contains user-data as base64.
MAX_USER_DATA_BYTES = 256 * 1024
MAX_SSH_KEYS_BYTES = 32 * 1024

GZIP_MAGIC = b'\x1f\x8b'
# The beginnings of user-data that cloud-init accepts; it also accepts a MIME header near the beginning.
USER_DATA_PREFIXES = ('#cloud-config', '#cloud-boothook', '#!', '#include', '#part-handler', '## template: jinja')
# Gzipped user-data that unpacks to more bytes is not inspected.
MAX_UNPACKED_BYTES = 16 * 1024 * 1024


def encode_user_data(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def parse_user_data(text: Any) -> bytes:
    """Decode base64, or raise a ValueError that does not quote what may be secret."""
    try:
        decoded = binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else b''
    except ValueError:
        decoded = b''
    if not decoded:
        raise ValueError('expected base64')
    if len(decoded) > MAX_USER_DATA_BYTES:
        raise ValueError(f'has {len(decoded)} bytes; the limit is {MAX_USER_DATA_BYTES}')
    return decoded


@stored(1, 'user-data', user_data=Field(parse_user_data, encode_user_data))
class _UserData(NamedTuple):
    user_data: bytes


class SharedUserData(NamedTuple):
    """User-data of a set: each request has its `sha256`, and the key at /user-data the `text`."""

    sha256: str
    text: str

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        import hashlib  # loaded late, here and below: rarely needed, and slow to load

        return cls(hashlib.sha256(data).hexdigest(), encode(_UserData(data)))


def parse_shared_user_data(value: bytes, sha256: str) -> bytes:
    """Return the user-data of a set, or raise ValueError if malformed or of another SHA-256."""
    import hashlib

    data = decode(_UserData, value).user_data
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError('its SHA-256 differs from the SHA-256 in its key')
    return data


def check_user_data(data: bytes) -> bytes:
    """Return user-data if it is gzip or text in UTF-8, or raise ValueError with the reason."""
    if not data:
        raise ValueError('is empty')
    if len(data) > MAX_USER_DATA_BYTES:
        raise ValueError(f'has {len(data)} bytes; the limit is {MAX_USER_DATA_BYTES}')
    if data.startswith(GZIP_MAGIC):
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise ValueError(f'line {line}: is neither text in UTF-8 nor gzip: cloud-init accepts nothing else') from error
    if '\0' in text:
        raise ValueError(f'line {text.count(chr(10), 0, text.index(chr(0))) + 1}: contains a NUL, so it is not text')
    return data


def unpack_user_data(data: bytes) -> bytes | None:
    """Unpack gzip, or return None if it is corrupt, and other or too large data unchanged."""
    if not data.startswith(GZIP_MAGIC):
        return data
    import gzip  # loaded late: few users pass gzip
    import io
    import zlib

    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        return None
    return content if len(content) <= MAX_UNPACKED_BYTES else data


def is_unknown_user_data(data: bytes) -> bool:
    """Return whether user-data has no format that cloud-init knows, so that it is ignored."""
    # As type_from_starts_with() in cloud-init's cloudinit/handlers/__init__.py: only UTF-8, in lower case, without
    # leading white space. Gzip, and a MIME header in the first 4096 bytes, are known, too.
    text = data.decode(errors='replace')
    is_known = text.encode() == data and text.lower().lstrip().startswith(USER_DATA_PREFIXES)
    return not (is_known or data.startswith(GZIP_MAGIC) or b'mime-version:' in data[:4096].lower())


def parse_public_keys(data: bytes) -> tuple[str, ...]:
    """Return the OpenSSH public keys in a file, each once, or raise ValueError for a bad line."""
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f'line {data.count(bytes([10]), 0, error.start) + 1}: is not text in UTF-8') from error
    accepted = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith('#'):
            try:
                accepted.append(parse_public_key(line.split()))
            except ValueError as error:
                raise ValueError(f'line {number}: {error}') from error
    if not accepted:
        raise ValueError('contains no key')
    return tuple(dict.fromkeys(accepted))


def parse_public_key(fields: list[str]) -> str:
    """Join type, base64 and comment to an OpenSSH public key, or raise ValueError."""
    key = ' '.join(fields)
    if 'PRIVATE KEY' in key or key.startswith('PuTTY-User-Key-File'):
        raise ValueError('is a private key. Fix: give the public key, whose file ends in .pub')
    if key.startswith('---- BEGIN SSH2 PUBLIC KEY'):
        raise ValueError("is a key in another format than OpenSSH's. Fix: convert it with `ssh-keygen -i -f FILE`")
    wrong = 'is not an OpenSSH public key: such a key is one line that begins like ssh-ed25519 AAAA'
    if len(fields) < 2 or not key.isprintable():
        raise ValueError(wrong)
    kind = fields[0].encode()
    try:
        blob = binascii.a2b_base64(fields[1].encode('ascii'), strict_mode=True)
    except ValueError as error:
        raise ValueError(wrong) from error
    # RFC 4253 6.6: the blob is length-prefixed strings, the first its type.
    if not blob.startswith(len(kind).to_bytes(4, 'big') + kind):
        raise ValueError(wrong)
    # A certificate's blob is not checked, because it also contains plain numbers.
    if b'-cert-v' not in kind and not _is_complete_blob(blob):
        raise ValueError('is only a part of a public key. Fix: copy the whole line')
    return key


def _is_complete_blob(blob: bytes) -> bool:
    position = count = 0
    while position < len(blob):
        position += 4 + int.from_bytes(blob[position : position + 4], 'big')
        count += 1
    return position == len(blob) and count > 1
