"""From which addresses an image may be fetched: what a URL names is somebody else's word, and the fetcher is root.

Addresses as IANA has them: iana.org/assignments/iana-ipv4-special-registry and …-ipv6-…; those with an IPv4 address
inside: RFC 4291 2.5.5, RFC 6052, RFC 3056, RFC 4380, RFC 2765.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK = 'a loopback address'
LINK_LOCAL = 'a link-local address'
METADATA = 'the metadata address of a cloud'
NO_HOST = 'not the address of a host'
TRANSLATED = 'an address that is translated to another one'

REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), what)
    for what, networks in {
        LOOPBACK: ('127.0.0.0/8', '::1'),
        LINK_LOCAL: ('169.254.0.0/16', 'fe80::/10', 'fec0::/10'),
        NO_HOST: ('0.0.0.0/8', '::', '224.0.0.0/4', 'ff00::/8', '255.255.255.255'),
        # Not link-local: Alibaba; Oracle (classic, OCI); Azure; AWS (EC2, EKS); Google; Akamai; Scaleway.
        METADATA: (
            *('100.100.100.200', '192.0.0.192', 'fd00:c1::a9fe:a9fe', '168.63.129.16', 'fd00:ec2::254', 'fd00:ec2::23'),
            *('fd20:ce::254', 'fd00:a9fe:a9fe::1', 'fd00:42::42'),
        ),
        TRANSLATED: ('64:ff9b:1::/48',),  # to which one, only the building's NAT64 knows
    }.items()
    for network in networks
)
# In their last four bytes: compatible, mapped, translated (RFC 2765), NAT64.
EMBEDDING = tuple(map(IPv6Network, ('::/96', '::ffff:0:0/96', '::ffff:0:0:0/96', '64:ff9b::/96')))


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
        if int(address) > 1 and any(address in network for network in EMBEDDING):
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
        for network, what in REFUSED:
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
