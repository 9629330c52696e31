"""Image URLs, the checksums of images, and the addresses from which they may be downloaded.

A URL is not trusted, and ecompute downloads as root. Reserved addresses are those of IANA's registries
(iana.org/assignments/iana-ipv4-special-registry, …-ipv6-…). IPv4 inside IPv6: RFC 4291 2.5.5, 6052, 3056, 4380, 2765.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

SCHEMES = ('http', 'https', 'file')
IMAGE_HASH_DIGITS = 12
# An @ before the path, where URL parsers look for it; matches without // too.
USERINFO_PATTERN = r'([^/?#]*//)?[^/?#]*@'
HOST_PATTERN = r'[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})'
PIN_PATTERN = '(?i)sha256=([0-9a-f]{64})'
GNU_SUM_PATTERN = r'(?i)([0-9a-f]{64}) [ *](.+)'
BSD_SUM_PATTERN = r'(?i)SHA256 ?\((.+)\) ?= ?([0-9a-f]{64})'


def check_image(url: str) -> str:
    """Return the URL if an image may come from it, or raise ValueError with the reason."""
    if len(url) > 2048 or re.search(r'[\x00-\x20\x7f]', url):
        raise ValueError('the image is not a URL: it has a space or a control character, or more than 2048 characters')
    if re.match(USERINFO_PATTERN, url):
        # The reason does not quote it, because an instance's image is public.
        problem = 'the image has a user or a password in its URL, and every user could read the URL'
        cure = 'serve the image without a password, or give a file:///… URL of a file on the compute'
        raise ValueError(f'{problem}. Fix: {cure}')
    try:
        url.encode()  # half of a surrogate pair can neither be sent nor hashed for the cached file's name
        parts = urlsplit(url)
        parts.port  # noqa: B018  (the property raises ValueError for an invalid port)
    except ValueError as error:
        raise ValueError(f'the image {url!a} is not a URL: {error}') from error
    if parts.scheme not in SCHEMES:
        raise ValueError(f'the image {url} must be a URL that starts with http://, https:// or file:///')
    if parts.scheme == 'file':  # each compute compares the path with its `images:`
        if parts.netloc or not parts.path.startswith('/'):
            raise ValueError(f'the image {url} must name an absolute path: file:///directory/image.qcow2')
    elif not parts.hostname:
        raise ValueError(f'the image {url} must name a host')
    # Any other fragment would be ignored, and so would a mistyped checksum.
    if parts.fragment and not re.fullmatch(PIN_PATTERN, parts.fragment):
        raise ValueError(f'the image {url} has a #fragment that is not #sha256= and 64 hexadecimal digits')
    return url


def check_source(text: str) -> str:
    """Normalize an `image_sources:` entry, a host name or a network, or raise ValueError."""
    try:
        return str(ip_network(text))
    except ValueError:
        if re.fullmatch(HOST_PATTERN, text) and not text.replace('.', '').isdecimal():
            return text.lower().rstrip('.')
    raise ValueError('must be a host name, or a network like 10.1.0.0/16')


def split_pin(url: str) -> tuple[str, str | None]:
    """Return the URL without its #fragment, and the SHA-256 in that fragment, or None."""
    bare, _, fragment = url.partition('#')
    match = re.fullmatch(PIN_PATTERN, fragment)
    return bare, match[1].lower() if match else None


def hash_url(url: str) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of a URL."""
    import hashlib  # imported here because most commands of eschedule do not need it

    return hashlib.sha256(url.encode(errors='replace')).hexdigest()[:32]


def hash_image(url: str) -> str:
    """Return 12 digits that stand for an image: the start of its pin, or its URL's CRC-32."""
    import zlib  # hashlib would take a create 3 ms, and a wrong match only changes a preference

    bare, pin = split_pin(url)
    return pin[:IMAGE_HASH_DIGITS] if pin else f'{zlib.crc32(bare.encode(errors="replace")):0{IMAGE_HASH_DIGITS}x}'


def find_sha256(checksums: str, url: str) -> str | None:
    """Return the SHA-256 of a URL's file from `checksums`, in GNU or BSD format, or None."""
    name = unquote(urlsplit(url).path).rpartition('/')[2]
    for line in checksums.splitlines():
        if match := re.fullmatch(GNU_SUM_PATTERN, line.strip()):
            digest, listed_name = match[1], match[2]
        elif match := re.fullmatch(BSD_SUM_PATTERN, line.strip()):
            listed_name, digest = match[1], match[2]
        else:
            continue
        if listed_name.removeprefix('./') == name:
            return digest.lower()
    return None


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK = 'a loopback address'
UNLISTED = 'not in the `image_sources:` of this compute'
LINK_LOCAL = 'a link-local address'
METADATA = 'the metadata address of a cloud'
NO_HOST = 'not the address of a host'
TRANSLATED = 'an address that NAT64 translates to another one'

REFUSED_NETWORKS = {
    LOOPBACK: ('127.0.0.0/8', '::1'),
    LINK_LOCAL: ('169.254.0.0/16', 'fe80::/10', 'fec0::/10'),
    NO_HOST: ('0.0.0.0/8', '::', '224.0.0.0/4', 'ff00::/8', '255.255.255.255'),
    # Not link-local: Alibaba; Oracle (classic, OCI); Azure; AWS (EC2, EKS); Google; Akamai; Scaleway.
    METADATA: (
        *('100.100.100.200', '192.0.0.192', 'fd00:c1::a9fe:a9fe', '168.63.129.16', 'fd00:ec2::254', 'fd00:ec2::23'),
        *('fd20:ce::254', 'fd00:a9fe:a9fe::1', 'fd00:42::42'),
    ),
    TRANSLATED: ('64:ff9b:1::/48',),  # only the site's NAT64 knows the translated address
}
# The last four bytes are an IPv4 address: compatible, mapped, translated (RFC 2765), NAT64.
EMBEDDING_NETWORKS = ('::/96', '::ffff:0:0/96', '::ffff:0:0:0/96', '64:ff9b::/96')


@cache  # not at import: it takes 2 ms, and most commands of eschedule do not need it
def _parse_networks(networks: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(map(ip_network, networks))


class ImageSources(NamedTuple):
    """The host names (lower case) and networks of `image_sources:`, which refuses all others."""

    names: tuple[str, ...]
    networks: tuple[Network, ...]


def parse_image_sources(entries: Sequence[str]) -> ImageSources:
    networks: list[Network] = []
    names: list[str] = []
    for entry in entries:
        try:
            networks.append(ip_network(entry))
        except ValueError:
            names.append(entry)
    return ImageSources(tuple(names), tuple(networks))


def expand_address(address: Address) -> Iterator[Address]:
    """Yield the address, and each IPv4 address that is embedded in it."""
    yield address
    if isinstance(address, IPv6Address):
        if int(address) > 1 and any(address in network for network in _parse_networks(EMBEDDING_NETWORKS)):
            yield IPv4Address(int(address) & 0xFFFFFFFF)
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo


def find_host_refusal(host: str, sources: ImageSources | None) -> str | None:
    """Return why no image may come from a host of this name, or None if one may."""
    name = host.lower().rstrip('.')
    if sources is not None and name not in sources.names:
        return UNLISTED
    return LOOPBACK if name == 'localhost' or name.endswith('.localhost') else None


def find_address_refusal(host: str, address: Address, sources: ImageSources | None) -> str | None:
    """Return why no image may be downloaded from this address of a host, or None if one may."""
    # A listed network allows loopback addresses only if it lies within loopback, and no other refused address, because
    # 0.0.0.0/0 is meant for other hosts. A listed name allows all addresses but refused ones.
    listed = sources.networks if sources is not None else ()
    for inner in expand_address(address):
        for why, networks in REFUSED_NETWORKS.items():
            for network in _parse_networks(networks):
                allowed = why == LOOPBACK and any(_allows_loopback(source, network, inner) for source in listed)
                if inner in network and not allowed:
                    return why
    if sources is None or host.lower().rstrip('.') in sources.names:
        return None
    is_listed = any(inner in network for network in listed for inner in expand_address(address))
    return None if is_listed else UNLISTED


def is_listed_exactly(address: Address, sources: ImageSources | None) -> bool:
    """Return whether a network of `image_sources:` has only this address or an embedded one."""
    single = [network for network in sources.networks if network.num_addresses == 1] if sources is not None else []
    return any(inner in network for network in single for inner in expand_address(address))


def _allows_loopback(source: Network, loopback: Network, address: Address) -> bool:
    return address in source and source.prefixlen >= loopback.prefixlen


def parse_address(text: str) -> Address:
    """Parse an IP address, without the zone of a link-local one (`%eth0`)."""
    return ip_address(text.partition('%')[0])
