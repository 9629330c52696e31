"""A guest: what it is plugged into, what it is given, what a hypervisor makes of it, and what it says of itself. Pure.

It is believed about itself alone, and as far as it is well formed: whatever else it says counts as not said. Nothing
of user-data and keys is ever quoted: a reason says which line, for it goes to terminals and logs.

Sources: cloud-init's "User data formats" and `user_data.py`; RFC 4253 6.6 (a public key's blob is length-prefixed
strings, the first its type); sshd(8) for the line around it.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from ecomp.errors import BuildFailed
from ecomp.model.json_object import dump, load_if_object, load_object
from ecomp.model.text import printable

MOST_INTERFACES = 8
"""Interfaces of a guest; a configuration with more is refused."""


class Attachment(NamedTuple):
    """What an interface is plugged into: `kind` is `network` (libvirt's, by name) or `bridge` (the host's)."""

    kind: str
    name: str


METADATA_ADDRESS = '169.254.169.254'
"""Where guests look for a metadata server: EC2's, and link-local, so that no router knows it."""

DEFAULT_NETWORKS = (Attachment('network', 'default'),)

METRIC = 100
"""The metric of the first interface's routes, as networkd and NetworkManager have it; the next ones have multiples."""


def network_config(macs: Sequence[str]) -> dict[str, Any] | None:
    """What cloud-init is told of the interfaces with these MACs: DHCP on each, and the first one's routes come first.

    None for a single one, on which every image asks DHCP by itself. Netplan's version 2, which cloud-init hands on to
    netplan or translates; it finds the interfaces by their MACs, so that the keys need not be their names.
    Sources: cloud-init's "Networking config version 2" and network_state.py (22.4 to 25.1), netplan-yaml(5).
    """
    if len(macs) < 2:
        return None
    ethernets: dict[str, Any] = {}
    for number, mac in enumerate(macs):
        ethernets[f'eth{number}'] = {
            'match': {'macaddress': mac},
            'dhcp4': True,
            # Two default routes of one metric are two of which any may be taken.
            'dhcp4-overrides': {'route-metric': METRIC * (number + 1)},
            # A network without DHCP is not waited for.
            **({'optional': True} if number else {}),
        }
    return {'version': 2, 'ethernets': ethernets}


KINDS = ('ssh-ed25519', 'ecdsa-sha2-nistp256', 'ecdsa-sha2-nistp384', 'ecdsa-sha2-nistp521', 'ssh-rsa')
"""Types of host keys that count; of another type none is kept."""
MOST_KEYS = 4
"""Host keys of a guest; further ones are left out."""
LARGEST_KEY = 3000
"""Characters of a host key, of RSA with 16384 bits; a longer one is left out."""
LONGEST_STAGE, LONGEST_REASON = 40, 500
"""Characters of what cloud-init says failed; what is longer ends in `…`."""


@dataclass(frozen=True)
class GuestFailure:
    """What went wrong in a guest's cloud-init: the stage, as cloud-init calls it, and cloud-init's own words."""

    stage: str
    reason: str


class GuestWord(NamedTuple):
    """What a guest said. `host_keys` are `<type> <base64>`; `failed` None: its cloud-init did all it was told to."""

    host_keys: tuple[str, ...] = ()
    failed: GuestFailure | None = None


def parse_word(data: bytes) -> GuestWord:
    """What the metadata server wrote down of a guest's word. What cannot be read is a word without anything in it.

    So is an empty one: an older metadata server writes that.
    """
    said = load_if_object(data)
    return GuestWord(host_keys(said.get('host_keys')), failed(said.get('stage'), said.get('error')))


def host_keys(value: object) -> tuple[str, ...]:
    """The OpenSSH public keys in a list, without comments, each once; what is none, or too large, is left out."""
    found: dict[str, None] = {}
    for text in value if isinstance(value, list) else ():
        fields = text.split()[:2] if isinstance(text, str) and len(text) <= LARGEST_KEY else ['']
        try:
            if fields and fields[0] in KINDS:
                found[public_key(fields)] = None
        except ValueError:
            continue
    return tuple(found)[:MOST_KEYS]


def failed(stage: object, reason: object) -> GuestFailure | None:
    """The failure that two words tell of; None unless both are texts, and the first is not empty."""
    if not isinstance(stage, str) or not isinstance(reason, str) or not stage:
        return None
    return GuestFailure(printable(stage, LONGEST_STAGE), printable(reason, LONGEST_REASON))


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


CRASHED = 'its QEMU process crashed or was killed'
NO_SPACE = 'it is paused, for its disk cannot be written: is the file system full?'
PAUSED = 'it is paused outside of ecomp. Fix: virsh resume, or virsh dompmwakeup where it was put to sleep'
UNLIKE = 'its domain differs from its claim'
UNPLUGGED = 'its interface is on no bridge'
REFUSED_METADATA = 'the metadata server refuses it'


class Address(NamedTuple):
    """An IPv4 address a guest has, and what says so: `lease` (libvirt's DHCP), `arp` (the host's table) or `agent`.

    `since` is the ISO time at which a lease was given, or given again; '' where that is not known.
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
    """A cached image, ready to be overlaid. `virtual_size` is in bytes."""

    path: str
    format: str
    virtual_size: int


@dataclass(frozen=True)
class GuestSpec:
    """All a hypervisor needs to make one guest. Memory is in MiB, disk in GiB.

    `disk_gb` None means the image's own size (`resize: False`). The guest has an interface on each of `networks`, at
    most MOST_INTERFACES; `reserved` has their IPv4 addresses in the same order, None or nothing where none is reserved.
    `virt_type` is libvirt's domain type, `kvm` or `qemu`. `seed` has the files of its NoCloud disk, {name: content};
    None means that it has no such disk and asks the metadata server.
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
    reserved: tuple[str | None, ...] = ()

    @property
    def macs(self) -> tuple[str, ...]:
        """The MAC addresses of the interfaces, in the order of `networks`."""
        return tuple(mac_address(self.instance, number) for number in range(len(self.networks)))


@dataclass(frozen=True)
class Guest:
    """What a host has of one instance: a domain with our mark, its disk, or both.

    `compute` is the provider uuid in the domain's mark, None when only a disk is there. `trouble` is what is wrong with
    it on this host (its QEMU crashed, or is paused for want of disk), in plain words; '' if nothing is. `size` is what
    its domain has by the names of resource classes, where that is known; `MEMORY_MB now` is what its balloon leaves it.
    """

    instance: str
    compute: str | None
    defined: bool
    running: bool
    disk: bool
    trouble: str = ''
    size: Mapping[str, int] = field(default_factory=dict, compare=False)

    def with_trouble(self, trouble: str) -> Guest:
        """Return the guest with this trouble beside what it has."""
        return replace(self, trouble='; '.join(filter(None, (self.trouble, trouble))))

    @property
    def is_built(self) -> bool:
        """Whether it runs, or may have run: a domain is defined last, on a disk that is there by then."""
        return self.running or (self.defined and self.disk)


def mac_address(instance: str, number: int) -> str:
    """The MAC of an instance's interface: the same every time, in QEMU's own range 52:54:00."""
    import hashlib

    digest = hashlib.sha256(f'{instance}/{number}'.encode()).hexdigest()
    return f'52:54:00:{digest[0:2]}:{digest[2:4]}:{digest[4:6]}'


def all_macs(instance: str) -> tuple[str, ...]:
    """Every MAC an interface of the instance can have, for as many networks as it can be on."""
    return tuple(mac_address(instance, number) for number in range(MOST_INTERFACES))


def same_mac(mac: str, other: str) -> BuildFailed:
    """Why no guest is made whose MAC the instance `other` of this host has: that is 24 bits of a hash."""
    why = f'its MAC {mac} is that of instance {other} here'
    return BuildFailed('scheduled', f'{why}: ask again, a new uuid has another')
