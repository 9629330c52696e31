"""Guests: their networks, keys, user-data and specifications, and their reports. Pure.

A guest is trusted only about itself; malformed parts of its report are ignored. User-data and keys are never quoted in
errors, which go to terminals and logs: an error names the line.

Sources: cloud-init's "User data formats" and `user_data.py`; RFC 4253 6.6 (a public key's blob is length-prefixed
strings, the first its type); sshd(8) for the line around it.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ecomp.errors import BuildFailed
from ecomp.model.json_object import load_object_or_empty
from ecomp.model.parsers import NONEMPTY, TEXT
from ecomp.model.stored import Field, decode, encode, lenient, nested, optional, parse_fields, stored
from ecomp.model.text import make_printable

# A configuration with more interfaces for each guest is refused.
MAX_INTERFACES = 8


class Attachment(NamedTuple):
    """The network of an interface: `kind` is libvirt's `network` or the host's `bridge`."""

    kind: str
    name: str


# The address of EC2's metadata server, at which guests look for one. It is link-local, so no router forwards to it.
METADATA_ADDRESS = '169.254.169.254'

DEFAULT_NETWORKS = (Attachment('network', 'default'),)

# The route metric of the first interface, the default of networkd and NetworkManager; further ones get multiples.
FIRST_ROUTE_METRIC = 100


def make_network_config(macs: Sequence[str]) -> dict[str, Any] | None:
    """Return cloud-init's network configuration: DHCP on each interface, the routes of the first one preferred.

    It is None for fewer than two interfaces: on a single one every image uses DHCP by default. The format is netplan's
    version 2, which cloud-init passes to netplan or translates; it matches by MAC, so the keys need not be names.
    Sources: cloud-init's "Networking config version 2" and network_state.py (22.4 to 25.1), netplan-yaml(5).
    """
    if len(macs) < 2:
        return None
    ethernets: dict[str, Any] = {}
    for index, mac in enumerate(macs):
        ethernets[f'eth{index}'] = {
            'match': {'macaddress': mac},
            'dhcp4': True,
            # With equal metrics a guest may use either default route.
            'dhcp4-overrides': {'route-metric': FIRST_ROUTE_METRIC * (index + 1)},
            # Do not delay the boot for a network without DHCP.
            **({'optional': True} if index else {}),
        }
    return {'version': 2, 'ethernets': ethernets}


class Usage(NamedTuple):
    """What a running guest has used since its start, and the host's memory that it uses now; None is unknown."""

    vcpu_seconds_total: float | None
    resident_memory_bytes: int
    disk_read_bytes_total: int = 0
    disk_written_bytes_total: int = 0


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
@dataclass(frozen=True)
class GuestFailure:
    """A failure of a guest's cloud-init: cloud-init's name of the stage, and its message."""

    stage: str
    reason: str


def parse_host_keys(value: object) -> tuple[str, ...]:
    """Return up to MAX_HOST_KEYS different valid keys of HOST_KEY_TYPES, without comments; () if it is no list."""
    accepted: dict[str, None] = {}
    for text in value if isinstance(value, list) else ():
        fields = text.split()[:2] if isinstance(text, str) and len(text) <= MAX_HOST_KEY_CHARACTERS else ['']
        try:
            if fields and fields[0] in HOST_KEY_TYPES:
                accepted[parse_public_key(fields)] = None
        except ValueError:
            continue
    return tuple(accepted)[:MAX_HOST_KEYS]


@stored(host_keys=optional(parse_host_keys), failure=lenient(nested(GuestFailure)))
class GuestReport(NamedTuple):
    """A guest's report. `host_keys` are `<type> <base64>`; `failure` is None if cloud-init reports none."""

    host_keys: tuple[str, ...] = ()
    failure: GuestFailure | None = None


def parse_guest_report(data: bytes) -> GuestReport:
    """Parse a stored report, leaving out malformed parts: all of a malformed or empty one (from an older server)."""
    report = load_object_or_empty(data)
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
    """Encode as base64."""
    return binascii.b2a_base64(data, newline=False).decode()


def parse_user_data(text: Any) -> bytes:
    """Decode base64; ValueError, which does not quote what may be secret, if malformed, empty or too large."""
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
    """User-data of a set: its SHA-256, for each request, and the value of the key that has it."""

    sha256: str
    text: str

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Hash and encode the user-data; it is not checked."""
        import hashlib  # loaded late, here and below: rarely needed, and slow to load

        return cls(hashlib.sha256(data).hexdigest(), encode(_UserData(data)))


def parse_shared_user_data(value: bytes, sha256: str) -> bytes:
    """Return the user-data of a set's key; raise ValueError if malformed, too large or altered."""
    import hashlib

    data = decode(_UserData, value).user_data
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError('its SHA-256 differs from the SHA-256 in its key')
    return data


def check_user_data(data: bytes) -> bytes:
    """Return user-data that begins like gzip or is UTF-8, not empty, without NUL; else ValueError, a sentence's end."""
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
    """Unpack gzip user-data, None if corrupt; data that is not gzip, or exceeds MAX_UNPACKED_BYTES, is unchanged."""
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
    """Return True for user-data that cloud-init would ignore: of no known format.

    It compares as type_from_starts_with() in cloud-init's cloudinit/handlers/__init__.py: only UTF-8, in lower case,
    without leading white space. Gzip, and a MIME header in the first 4096 bytes, are known, too.
    """
    text = data.decode(errors='replace')
    is_known = text.encode() == data and text.lower().lstrip().startswith(USER_DATA_PREFIXES)
    return not (is_known or data.startswith(GZIP_MAGIC) or b'mime-version:' in data[:4096].lower())


def parse_public_keys(data: bytes) -> tuple[str, ...]:
    """Return a file's OpenSSH public keys, each once; ValueError, the end of a sentence, for a bad line or no key."""
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
    """Join type, base64 and comment to an OpenSSH public key; ValueError, the end of a sentence, if invalid."""
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


CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'
PAUSED = 'it is paused outside of ecomp. Fix: virsh resume, or virsh dompmwakeup where it was put to sleep'
UNLIKE = 'its domain differs from its claim'
UNPLUGGED = 'its interface is on no bridge'
INTERFACE_DOWN = 'its interface is down'
UNFILTERED = 'its interface has no filter'
REFUSED_METADATA = 'the metadata server refuses it'
TROUBLE_KINDS = CRASHED, NO_SPACE, PAUSED, UNLIKE, UNPLUGGED, INTERFACE_DOWN, UNFILTERED, REFUSED_METADATA


class Address(NamedTuple):
    """An IPv4 address of a guest; `source` is `lease` (DHCP), `arp` (the host's) or `agent`.

    `since` is the ISO time at which the lease was granted or renewed; '' if it is not known.
    """

    address: str
    source: str
    since: str = ''


class ReservedAddress(NamedTuple):
    """An IPv4 address that a network's DHCP reserves for an interface of an instance."""

    instance: str
    address: str


@dataclass(frozen=True)
class BaseImage:
    """A cached image, ready for overlays. `virtual_size` is in bytes."""

    path: str
    format: str
    virtual_size: int


@dataclass(frozen=True)
class GuestSpec:
    """The specification from which a hypervisor makes a guest; memory is in MiB, disk in GiB.

    `disk_gb` None means the image's own size (`resize: False`). The guest has one interface on each of `networks`, at
    most MAX_INTERFACES. `reserved_addresses` are their IPv4 addresses in the same order; None, or a missing one, means
    that none is reserved. `virt_type` is libvirt's domain type, `kvm` or `qemu`. `seed` has the files of the NoCloud
    disk, {name: content}; None means that there is no such disk and the guest uses the metadata server.
    """

    instance: str
    compute: str
    vcpus: int
    memory_mb: int
    disk_gb: int | None
    base: BaseImage
    virt_type: str
    networks: tuple[Attachment, ...] = DEFAULT_NETWORKS
    seed: Mapping[str, bytes] | None = field(default=None, repr=False)
    reserved_addresses: tuple[str | None, ...] = ()

    @property
    def macs(self) -> tuple[str, ...]:
        return tuple(make_mac_address(self.instance, index) for index in range(len(self.networks)))


class GuestTrouble(NamedTuple):
    """What is wrong with a guest on its host: a kind, such as PAUSED, and the end of its sentence."""

    kind: str
    detail: str = ''


@dataclass(frozen=True)
class Guest:
    """An instance's guest as it is on a host: a domain with our owner mark, a disk, or both.

    `compute` is the uuid in the owner mark, None if there is only a disk. `size` has the domain's amounts by resource
    class, if known; `MEMORY_MB now` is the memory that its balloon leaves it.
    """

    instance: str
    compute: str | None
    defined: bool
    running: bool
    disk: bool
    troubles: tuple[GuestTrouble, ...] = ()
    size: Mapping[str, int] = field(default_factory=dict, compare=False)

    def with_trouble(self, trouble: GuestTrouble | None) -> Guest:
        return replace(self, troubles=(*self.troubles, trouble)) if trouble else self

    def list_troubles(self, claim: Mapping[str, int]) -> tuple[GuestTrouble, ...]:
        """Return the `troubles`, and how `size` differs from the claim, by resource class."""
        sizes = [(name, size, claim.get(name.partition(' ')[0], size)) for name, size in self.size.items()]
        # A disk may be smaller: without `resize` it is as large as its image.
        differences = [
            f'{name}:{size} for {amount}'
            for name, size, amount in sizes
            if size > amount or (size < amount and name != 'DISK_GB')
        ]
        return (*self.troubles, *([GuestTrouble(UNLIKE, f': {", ".join(differences)}')] if differences else ()))

    def describe_trouble(self, claim: Mapping[str, int]) -> str:
        return '; '.join(map(''.join, self.list_troubles(claim)))

    @property
    def condition(self) -> str:
        return 'runs' if self.running else 'is defined'

    @property
    def is_built(self) -> bool:
        """True if it runs or may have run: a build defines the domain last, after the disk."""
        return self.running or (self.defined and self.disk)


def make_mac_address(instance: str, number: int) -> str:
    """Return the MAC of an interface: a hash of both arguments in QEMU's range 52:54:00."""
    import hashlib

    digest = hashlib.sha256(f'{instance}/{number}'.encode()).hexdigest()
    return f'52:54:00:{digest[0:2]}:{digest[2:4]}:{digest[4:6]}'


def list_macs(instance: str) -> tuple[str, ...]:
    """Return every MAC that an interface of the instance can have."""
    return tuple(make_mac_address(instance, index) for index in range(MAX_INTERFACES))


def make_mac_conflict(mac: str, other: str) -> BuildFailed:
    """Make the error, of stage `scheduled`, for a MAC (24 bits of a hash) that `other` on this host has, too."""
    reason = f'its MAC {mac} is also that of instance {other} on this host'
    return BuildFailed('scheduled', f'{reason}. Fix: create the instance with another uuid, which gives another MAC')
