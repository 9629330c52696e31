"""An image's name: which URLs may be asked for at all, and what a URL or a SHA256SUMS says of its content.

And from which addresses it may be fetched: what a URL names is somebody else's word, and the fetcher is root. Addresses
as IANA has them: iana.org/assignments/iana-ipv4-special-registry and …-ipv6-…; those with an IPv4 address inside:
RFC 4291 2.5.5, RFC 6052, RFC 3056, RFC 4380, RFC 2765.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import unquote, urlsplit

SCHEMES = ('http', 'https', 'file')
# An @ before the path, as URL parsers do it, and without // too.
USERINFO = re.compile(r'([^/?#]*//)?[^/?#]*@')
HOST = re.compile(r'[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})')
PIN = re.compile('sha256=([0-9a-f]{64})', re.IGNORECASE)
GNU_SUM = re.compile(r'([0-9a-f]{64}) [ *](.+)', re.IGNORECASE)
BSD_SUM = re.compile(r'SHA256 ?\((.+)\) ?= ?([0-9a-f]{64})', re.IGNORECASE)


def check_image(url: str) -> str:
    """The URL, if it is one an image may come from; else ValueError with the reason.

    http and https need a host; file needs an absolute path (each compute decides by its `images:`
    directory whether it takes it). A fragment can only be #sha256= and the 64 hexadecimal digits of its content.
    A user or a password is refused, and the reason does not quote it: an instance's image is for everybody to read.
    """
    if len(url) > 2048 or re.search(r'[\x00-\x20\x7f]', url):
        raise ValueError('the image is not a URL: it has a space or a control character, or more than 2048 characters')
    if USERINFO.match(url):
        raise ValueError(
            'the image has a user or a password in its URL, which everybody could read: put it where its server asks '
            'for none, or name a file of its compute (file:///…)'
        )
    try:
        url.encode()  # half of a surrogate pair cannot be sent, nor hashed for the cached file's name
        parts = urlsplit(url)
        parts.port  # noqa: B018  (reading it is what checks it)
    except ValueError as error:
        raise ValueError(f'the image {url!a} is not a URL: {error}') from error
    if parts.scheme not in SCHEMES:
        raise ValueError(f'the image {url} must be a URL that starts with http://, https:// or file:///')
    if parts.scheme == 'file':
        if parts.netloc or not parts.path.startswith('/'):
            raise ValueError(f'the image {url} must name an absolute path: file:///directory/image.qcow2')
    elif not parts.hostname:
        raise ValueError(f'the image {url} names no host')
    # Any other one would be passed over by everybody, and so would a checksum with a typing error.
    if parts.fragment and not PIN.fullmatch(parts.fragment):
        raise ValueError(f'the image {url} has a #fragment that is not #sha256= and 64 hexadecimal digits')
    return url


def check_source(text: str) -> str:
    """An entry of `image_sources:` as it is compared: a host's name in small letters, or a network. ValueError."""
    try:
        return str(ip_network(text))
    except ValueError:
        if HOST.fullmatch(text) and not text.replace('.', '').isdecimal():
            return text.lower().rstrip('.')
    raise ValueError('must be the name of a host, or a network like 10.1.0.0/16')


def pinned(url: str) -> tuple[str, str | None]:
    """A checked URL without its fragment, and the SHA-256 in that, which the content must have; None without one."""
    bare, _, fragment = url.partition('#')
    found = PIN.fullmatch(fragment)
    return bare, found[1].lower() if found else None


def sum_of(sums: str, url: str) -> str | None:
    """The SHA-256 that `sums`, as sha256sum or the BSDs write it, has for the last name in `url`; None for none."""
    name = unquote(urlsplit(url).path).rpartition('/')[2]
    for line in sums.splitlines():
        if found := GNU_SUM.fullmatch(line.strip()):
            digest, named = found[1], found[2]
        elif found := BSD_SUM.fullmatch(line.strip()):
            named, digest = found[1], found[2]
        else:
            continue
        if named.removeprefix('./') == name:
            return digest.lower()
    return None


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK = 'a loopback address'
LINK_LOCAL = 'a link-local address'
METADATA = 'the metadata address of a cloud'
NO_HOST = 'not the address of a host'
TRANSLATED = 'an address that is translated to another one'

REFUSED = {
    LOOPBACK: ('127.0.0.0/8', '::1'),
    LINK_LOCAL: ('169.254.0.0/16', 'fe80::/10', 'fec0::/10'),
    NO_HOST: ('0.0.0.0/8', '::', '224.0.0.0/4', 'ff00::/8', '255.255.255.255'),
    # Not link-local: Alibaba; Oracle (classic, OCI); Azure; AWS (EC2, EKS); Google; Akamai; Scaleway.
    METADATA: (
        *('100.100.100.200', '192.0.0.192', 'fd00:c1::a9fe:a9fe', '168.63.129.16', 'fd00:ec2::254', 'fd00:ec2::23'),
        *('fd20:ce::254', 'fd00:a9fe:a9fe::1', 'fd00:42::42'),
    ),
    TRANSLATED: ('64:ff9b:1::/48',),  # to which one, only the building's NAT64 knows
}
# In their last four bytes: compatible, mapped, translated (RFC 2765), NAT64.
EMBEDDING = ('::/96', '::ffff:0:0/96', '::ffff:0:0:0/96', '64:ff9b::/96')


@cache  # not at import: every command of eschedule reads URLs, and would spend 2 ms on networks it never asks about
def _refused() -> tuple[tuple[Network, str], ...]:
    return tuple((ip_network(network), what) for what, networks in REFUSED.items() for network in networks)


@cache
def _embedding() -> tuple[Network, ...]:
    return tuple(map(ip_network, EMBEDDING))


@dataclass(frozen=True)
class ImageSources:
    """The hosts that `image_sources:` allows, all others being refused: names in small letters, and networks."""

    names: tuple[str, ...]
    networks: tuple[Network, ...]


def image_sources(said: Sequence[str]) -> ImageSources:
    """The ImageSources of texts that check_source() accepted."""
    networks: list[Network] = []
    names: list[str] = []
    for each in said:
        try:
            networks.append(ip_network(each))
        except ValueError:
            names.append(each)
    return ImageSources(tuple(names), tuple(networks))


def all_of(address: Address) -> Iterator[Address]:
    """The address and, of an IPv6 address, the IPv4 addresses that are embedded in it."""
    yield address
    if isinstance(address, IPv6Address):
        if int(address) > 1 and any(address in network for network in _embedding()):
            yield IPv4Address(int(address) & 0xFFFFFFFF)
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo


def why_not_name(host: str, sources: ImageSources | None) -> str | None:
    """Why no image is fetched from a host of this name, whatever its address; None if one may be.

    `sources` None means that no configuration lists any.
    """
    name = host.lower().rstrip('.')
    if sources is not None and name not in sources.names:
        return 'not in the `image_sources:` of this compute'
    return LOOPBACK if name == 'localhost' or name.endswith('.localhost') else None


def why_not(host: str, address: Address, sources: ImageSources | None) -> str | None:
    """Why no image is fetched from this address of this host; None if one may be.

    A listed network allows loopback addresses only if it lies within loopback, and no other address in REFUSED:
    0.0.0.0/0 is meant for the addresses of others.
    """
    listed = sources.networks if sources is not None else ()
    for each in all_of(address):
        for network, what in _refused():
            if each in network and not (what == LOOPBACK and any(_opens(one, network, each) for one in listed)):
                return what
    if sources is None or host.lower().rstrip('.') in sources.names:
        return None
    named = any(each in network for network in listed for each in all_of(address))
    return None if named else 'not in the `image_sources:` of this compute'


def is_listed_alone(address: Address, sources: ImageSources | None) -> bool:
    """Whether `image_sources:` lists this very address, as opposed to its name or a network that it is in."""
    listed = sources.networks if sources is not None else ()
    return any(network.num_addresses == 1 and each in network for network in listed for each in all_of(address))


def _opens(listed: Network, loopback: Network, address: Address) -> bool:
    return address in listed and listed.prefixlen >= loopback.prefixlen


def without_zone(text: str) -> Address:
    """The address in getaddrinfo's text, without its zone. ValueError."""
    return ip_address(text.partition('%')[0])
