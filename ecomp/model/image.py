"""An image's name: which URLs may be asked for at all."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SCHEMES = ('http', 'https', 'file')


def check_image(url: str) -> str:
    """The URL, if it is one an image may come from; else ValueError with the reason.

    http and https need a host; file needs an absolute path (each compute decides by its `images:`
    directory whether it takes it).
    """
    if len(url) > 2048 or re.search(r'[\x00-\x20\x7f]', url):
        raise ValueError('the image is not a URL: it has a space or a control character, or more than 2048 characters')
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
    return url
