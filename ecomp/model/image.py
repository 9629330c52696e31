"""An image's name: which URLs may be asked for at all, and what a URL or a SHA256SUMS says of its content."""

from __future__ import annotations

import re
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
    from ipaddress import ip_network  # for those who list some

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
