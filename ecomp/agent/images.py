"""The image cache: one base volume for each image URL, downloaded once however many ask.

A download goes to a `.part` file, is checked, made durable and renamed, so what has a base volume's name is whole.
An flock for each image keeps several workers from doing the same; the kernel drops it with a killed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError

from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.guest import BaseImage
from ecomp.model.image import check_image

CHUNK = 1024**2
DEADLINE = 3600.0
"""Seconds a whole download may take. A time-out between two bytes alone lets a slow drip go on for ever."""
TIMEOUT = (5.0, 60.0)
REDIRECTS = 5

Checkpoint = Callable[[], None]


class ImageCache:
    """Base volumes in `directory`. `inspect` says what a file is; `local` is where file:// URLs may point, if anywhere.

    Errors: BuildFailed('image', reason), and whatever the checkpoint raises.
    """

    def __init__(self, directory: Path, inspect: Callable[[Path], BaseImage], local: Path | None) -> None:
        self._directory = directory
        self._inspect = inspect
        self._local = local

    def get(self, url: str, checkpoint: Checkpoint) -> BaseImage:
        """The base volume of an image, fetched if it is not there. `checkpoint` is called all the while."""
        try:
            check_image(url)
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        stem = 'base-' + hashlib.sha256(url.encode()).hexdigest()[:32]
        with self._locked(stem, checkpoint):
            for suffix in ('qcow2', 'raw'):
                path = self._directory / f'{stem}.{suffix}'
                if path.exists():
                    return self._inspect(path)
            part = self._directory / f'{stem}.part'
            try:
                with part.open('wb') as file:
                    self._fetch(url, file, checkpoint)
                    file.flush()
                    os.fsync(file.fileno())
                image = self._inspect(part)
                failpoint('image-part')
                # Readable by QEMU's user; an image is no secret, the overlays are.
                part.chmod(0o644)
                final = self._directory / f'{stem}.{image.format}'
                part.rename(final)
            except OSError as error:
                raise BuildFailed('image', f'{url}: cannot be kept in {self._directory}: {error.strerror}') from error
            except (ValueError, RuntimeError) as error:
                # A redirect to what is no URL, a zero byte in a path, a link that leads to itself.
                raise BuildFailed('image', f'{url}: {error}') from error
            finally:
                part.unlink(missing_ok=True)
            return BaseImage(str(final), image.format, image.virtual_size)

    def sweep(self) -> None:
        """Remove what a worker that was killed in the middle of a download left."""
        for part in self._directory.glob('*.part'):
            with suppress(OSError), idle(part) as nobody:
                if nobody:
                    part.unlink(missing_ok=True)

    def _fetch(self, url: str, file: IO[bytes], checkpoint: Checkpoint) -> None:
        if urlsplit(url).scheme == 'file':
            self._copy(url, file)
        else:
            _download(url, file, checkpoint)

    def _copy(self, url: str, file: IO[bytes]) -> None:
        if self._local is None:
            raise BuildFailed('image', f'{url}: this compute takes no local images: set `images:` in its compute.yaml')
        path = Path(unquote(urlsplit(url).path)).resolve()
        if not path.is_relative_to(self._local.resolve()):
            raise BuildFailed('image', f'{url}: only images under {self._local} are taken here')
        if not path.is_file():
            raise BuildFailed('image', f'{url}: no such file on this compute')
        with path.open('rb') as source:
            shutil.copyfileobj(source, file, CHUNK)

    @contextmanager
    def _locked(self, stem: str, checkpoint: Checkpoint) -> Iterator[None]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # One of 256 lock files, which stay: removing a lock file that others may just have opened is a race.
            lock = os.open(self._directory / f'.lock-{stem[-2:]}', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BuildFailed('image', f'{self._directory}: {error.strerror}') from error
        try:
            # Not a blocking flock: a destroy must not wait for another instance's download.
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    checkpoint()
                    time.sleep(0.1)
            yield
        finally:
            os.close(lock)


@contextmanager
def idle(part: Path) -> Iterator[bool]:
    """Whether nobody is downloading to this .part file; if so, nobody begins inside. Always true of other files."""
    try:
        lock = os.open(part.parent / f'.lock-{part.stem[-2:]}', os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _download(url: str, file: IO[bytes], checkpoint: Checkpoint) -> None:
    end = time.monotonic() + DEADLINE
    try:
        with requests.Session() as session:
            answer = _open(session, url)
            with answer:
                expected = answer.headers.get('content-length', '')
                got = 0
                # Not iter_content: it would unpack what is transferred with gzip, bombs included. read1, or a
                # slow drip would be inside one read, deadline or not.
                while chunk := answer.raw.read1(CHUNK, decode_content=False):
                    checkpoint()
                    file.write(chunk)
                    got += len(chunk)
                    if time.monotonic() > end:
                        raise BuildFailed('image', f'{url}: not here after {DEADLINE:g} s, {got} bytes so far')
        if expected.isdecimal() and int(expected) != got:
            raise BuildFailed('image', f'{url}: cut off after {got} of {expected} bytes')
        if not got:
            raise BuildFailed('image', f'{url}: is empty')
    except requests.RequestException as error:
        raise BuildFailed('image', f'{url}: {_reason(error)}') from error
    except HTTPError as error:
        raise BuildFailed('image', f'{url}: the connection broke: {type(error).__name__}') from error


def _open(session: requests.Session, url: str) -> requests.Response:
    """The answer to a GET, redirects followed by us: each hop is checked like the first URL."""
    here = url
    for _ in range(REDIRECTS + 1):
        _check_host(url, here)
        answer = session.get(
            here, stream=True, timeout=TIMEOUT, allow_redirects=False, headers={'accept-encoding': 'identity'}
        )
        if not answer.is_redirect:
            if answer.status_code != 200:
                answer.close()
                raise BuildFailed('image', f'{url}: the server answers HTTP {answer.status_code} {answer.reason}')
            return answer
        answer.close()
        here = urljoin(here, answer.headers['location'])
        try:
            check_image(here)
        except ValueError as error:
            raise BuildFailed('image', f'{url}: redirected: {error}') from error
        if urlsplit(here).scheme == 'file':
            raise BuildFailed('image', f'{url}: redirected to a local file, which is not followed')
    raise BuildFailed('image', f'{url}: more than {REDIRECTS} redirects')


def _check_host(url: str, here: str) -> None:
    """Nothing is fetched from a link-local address: there are metadata services, and what they say is a secret."""
    host = urlsplit(here).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # the request that follows says it
    for *_, (address, *_) in found:
        ip = ipaddress.ip_address(str(address).partition('%')[0])
        if (getattr(ip, 'ipv4_mapped', None) or ip).is_link_local:
            raise BuildFailed('image', f'{url}: {host} is {ip}, a link-local address: no image is taken from there')


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return 'the server gives no answer in time'
    if isinstance(error, requests.ConnectionError):
        return 'the server cannot be reached'
    return type(error).__name__
