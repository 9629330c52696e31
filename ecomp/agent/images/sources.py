"""Where images come from: the policy for addresses, and the files of this host."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from ecomp.addresses import is_own_address, resolve_addresses
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed
from ecomp.model import image
from ecomp.model.image import Address, ImageSources, expand_address, parse_image_sources

CONTROL_PLANE = 'the address of etcd or placement'
OWN_ADDRESS = 'an address of this host that `image_sources:` does not list exactly'
CHUNK_BYTES = 1024**2  # bytes of one read, at most
SUMS_FILE = 'SHA256SUMS'
MAX_SUMS_BYTES = 1024**2


class AddressRefused(Exception):
    """No image is fetched from `target`, an address or a host, because it is `reason`."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)
        self.target, self.reason = target, reason


@dataclass(frozen=True)
class EgressPolicy:
    """The hosts that images may be fetched from, but never etcd and placement.

    `sources` None allows what no general rule refuses. A proxy resolves names, so only their text is checked.
    """

    sources: ImageSources | None = None
    proxy_url: str | None = None
    control_endpoints: tuple[tuple[str, int], ...] = ()

    def resolve(self, host: str, port: int) -> list[Address]:
        """Resolve a host to connect to, and check each address unless it is the proxy's.

        Raises:
            AddressRefused: an address is refused.
            OSError: the name cannot be resolved.
            ValueError: an address is malformed.
        """
        addresses = resolve_addresses(host)
        if self.proxy_url is None:
            for address in addresses:
                self._require_allowed(host, port, address)
        return addresses

    def require_allowed_url(self, url: str) -> None:
        """Raise AddressRefused if there is a proxy, and it must not be asked for this host."""
        if self.proxy_url is None:
            return
        # The C library of the proxy would take 169.254.169.254. for an address, too.
        host, port = (urlsplit(url).hostname or '').rstrip('.'), get_port(urlsplit(url))
        if '%' in host:  # a link of this host, or an encoding that the proxy may decode
            raise AddressRefused(host, image.NO_HOST)
        try:
            numeric_addresses = resolve_addresses(host, socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            reason = image.find_host_refusal(host, self.sources)
            if reason is None and (host, port) in self.control_endpoints:
                reason = CONTROL_PLANE
            if reason is not None:
                raise AddressRefused(host, reason) from None
        else:
            for address in numeric_addresses:
                self._require_allowed(host, port, address)

    def _require_allowed(self, host: str, port: int, address: Address) -> None:
        reason = image.find_address_refusal(host, address, self.sources)
        if reason is None and self._resolves_to_control(port, address):
            reason = CONTROL_PLANE
        # A host reaches itself past its firewall by its own addresses, as it does by loopback.
        if reason is None and not image.is_listed_exactly(address, self.sources):
            is_own = any(is_own_address(part) and not part.is_loopback for part in expand_address(address))
            reason = OWN_ADDRESS if is_own else None
        if reason is not None:
            raise AddressRefused(f'{host} is {address}', reason)

    def _resolves_to_control(self, port: int, address: Address) -> bool:
        targets = set(expand_address(address))
        for host, control_port in self.control_endpoints:
            if control_port == port:
                with suppress(OSError, ValueError):  # a name that has no address now has none to compare
                    controls = {part for each in resolve_addresses(host) for part in expand_address(each)}
                    is_local = any(part.is_loopback for part in controls)
                    if targets & controls or (is_local and any(map(is_own_address, targets))):
                        return True
        return False


def make_egress_policy(config: ComputeConfig) -> EgressPolicy:
    """Make the policy of compute.yaml, which denies etcd and placement to images."""
    endpoints = [urlsplit(f'//{url}') for url in config.etcd.endpoints] + [urlsplit(config.placement.endpoint)]
    control = tuple((endpoint.hostname or '', get_port(endpoint)) for endpoint in endpoints)
    sources = None if config.image_sources is None else parse_image_sources(config.image_sources)
    return EgressPolicy(sources, config.image_proxy, control)


def get_port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == 'https' else 80)


class ServerUnavailable(BuildFailed):
    """The server does not answer now, but may later, so its cached image is used until then."""


@dataclass(frozen=True)
class Version:
    """A version of the image at a URL: its server's ETag, its date, and the length in bytes."""

    # '' and None mean unknown.
    etag: str = ''
    modified: str = ''
    length: int | None = None
    # The URL after redirects, without its query, which may be a signature.
    answered: str = ''

    def is_same(self, other: Version) -> bool:
        """Return whether the ETags or, without them, date and length are known and the same."""
        # ETags of two URLs, as of mirrors after redirects, cannot be compared (RFC 9110, 8.8.3). Then, and if only one
        # version has an ETag, date and length must be known and the same.
        moved = bool(self.answered and other.answered) and self.answered != other.answered
        if self.etag and other.etag and (self.etag == other.etag or not moved):
            return self.etag == other.etag
        known_fields = (bool(self.modified), self.length is not None)
        is_known = all(known_fields) if moved or self.etag or other.etag else any(known_fields)
        return is_known and (self.modified, self.length) == (other.modified, other.length)


@dataclass(frozen=True)
class Download:
    """A downloaded image: SHA-256, size in bytes, and the server's version."""

    sha256: str
    size: int
    version: Version


@dataclass(frozen=True)
class Stream:
    """The bytes of an image from the first one, and their version."""

    version: Version
    # The next bytes, at most CHUNK_BYTES; none at the end.
    read: Callable[[], bytes]
    close: Callable[[], None]


class LocalSource:
    """An image of this host, which must lie below `directory`."""

    deadline = math.inf  # a file is read without waiting

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url, self._directory = url, directory

    def open(self) -> Stream:
        """Open the image, or raise BuildFailed if it is refused, missing or unreadable."""
        with self._translate_errors():
            path = self._resolve_path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this host')
            file = path.open('rb')
            status = os.fstat(file.fileno())  # of the open file: its name may have another one now
            version = Version(f'{status.st_ino}-{status.st_size}-{status.st_mtime_ns}', '', status.st_size)
            return Stream(version, self._translate_errors()(partial(file.read, CHUNK_BYTES)), file.close)

    def has_version(self, version: Version) -> bool:
        with closing(self.open()) as stream:
            return version.is_same(stream.version)

    def read_sums(self) -> str | None:
        """Return the start of SHA256SUMS beside the file, or None if there is none."""
        with self._translate_errors():
            path = self._resolve_path().with_name(SUMS_FILE)
            if not path.is_file():
                return None
            with path.open('rb') as file:
                return file.read(MAX_SUMS_BYTES).decode(errors='replace')

    def close(self) -> None:
        """No-op: nothing is open."""

    def _resolve_path(self) -> Path:
        if self._directory is None:
            reason = 'this host accepts no local images. Fix: set `images:` in its compute.yaml'
            raise BuildFailed('image', f'{self._url}: {reason}')
        path = Path(unquote(urlsplit(self._url).path)).resolve()
        if not path.is_relative_to(self._directory.resolve()):
            raise BuildFailed('image', f'{self._url}: this host accepts only local images under {self._directory}')
        return path

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BuildFailed('image', f'{self._url}: cannot be read: {error.strerror}') from error
        except (ValueError, RuntimeError) as error:  # a zero byte in its path, or a cyclic link
            raise BuildFailed('image', f'{self._url}: {error}') from error
