"""What the image cache makes of checksums: those that are asked for, and those that a server has beside an image."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images.cache import ImageCache
from ecomp.errors import BuildFailed
from tests.functional.image_content import base, entries, raw, sha256
from tests.kit.image_server import Web
from tests.kit.images import LIMITS, LOOPBACK, MIB, cache, get, inspect, kept, refused
from tests.kit.servers import PATIENCE, free_port, until


def test_a_pinned_image_needs_no_network_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    url = f'{web.url}good#sha256={sha256(image)}'
    first = get(cache(directory), url)
    asked = list(web.asked)
    assert asked == ['good'], 'whoever says the checksum needs none of the server'
    web.shutdown()
    web.server_close()
    assert get(cache(directory), url) == first
    # Nor does it matter where it came from.
    assert get(cache(directory), f'http://127.0.0.1:{free_port()}/x#SHA256={sha256(image).upper()}') == first
    assert get(cache(directory), f'file:///nowhere#sha256={sha256(image)}') == first


def test_a_pinned_image_waits_for_nobody_once_it_is_cached(web: Web, directory: Path, image: bytes) -> None:
    first = get(cache(directory), web.url + 'good')
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(get, cache(directory), web.url + 'slowly')
        until(lambda: 'slowly' in web.asked, 10, 'somebody downloads')
        assert get(cache(directory), f'{web.url}slowly#sha256={sha256(image)}') == first
        assert not other.done()
        web.may_go_on.set()
        assert other.result(PATIENCE * 30) == first


def test_another_content_than_pinned_is_refused(web: Web, directory: Path, image: bytes) -> None:
    wrong = '0' * 64
    reason = f'good: its SHA-256 is {sha256(image)}, and its URL says {wrong}'
    refused(directory, f'{web.url}good#sha256={wrong}', reason)
    # Nor is what is cached of the same URL taken for it.
    get(cache(directory), web.url + 'good')
    refused(directory, f'{web.url}good#sha256={wrong}', reason)


def test_a_changed_image_does_not_hide_the_pinned_one(web: Web, directory: Path, image: bytes) -> None:
    url = web.url + 'good'
    first = get(cache(directory), url)
    web.image = raw(MIB)
    second = get(cache(directory), url)
    assert second != first
    assert get(cache(directory), f'{url}#sha256={sha256(image)}') == first
    assert get(cache(directory), url) == second


def test_a_list_of_checksums_beside_it_is_believed(web: Web, directory: Path, image: bytes) -> None:
    web.sums = f'{"0" * 64}  another\n{sha256(image)} *good\n'.encode()
    first = get(cache(directory), web.url + 'good')
    web.sums = f'{"0" * 64}  good\n'.encode()
    assert get(cache(directory), web.url + 'good') == first, 'what is the same was checked'
    refused(directory, web.url + 'good?2', f'its SHA-256 is {sha256(image)}, and the SHA256SUMS beside it says 000')
    assert get(cache(directory), f'{web.url}good?3#sha256={sha256(image)}') == first


def test_a_list_that_cannot_be_read_is_not_passed_over(web: Web, directory: Path) -> None:
    refused(directory, web.url + 'broken/good', 'broken/SHA256SUMS: the server answers HTTP 500')
    web.sums = b'x' * (MIB + 1)
    refused(directory, web.url + 'good', 'SHA256SUMS: is too long for checksums; put #sha256=')
    web.sums = b'<html>whatever you ask for</html>'
    assert get(cache(directory), web.url + 'good').format == 'qcow2'


@pytest.mark.parametrize('says', [{'etag': '"1"'}, {'last-modified': 'yesterday'}])
def test_an_image_that_changes_on_its_way_is_refused(web: Web, directory: Path, says: dict[str, str]) -> None:
    web.image, web.says = raw(MIB, 1), says
    refused(directory, web.url + 'changing', 'changed while it was downloaded')
    assert Path(get(cache(directory), web.url + 'changing').path).name == base(web.image)


def test_mirrors_have_etags_of_their_own(web: Web, directory: Path) -> None:
    """A redirect leads to another one each time; the image is fetched once, and again when it has changed."""
    url = web.url + 'mirrored'
    web.says = {'etag': '1', 'last-modified': 'Sat, 21 Nov 2026 10:00:00 GMT'}
    first = get(cache(directory), url)
    fetched = web.sent.copy()
    for _ in range(4):
        assert get(cache(directory), url) == first
    assert web.asked.count('SHA256SUMS') == 1
    assert all('signed' not in path.read_text() for path in entries(directory))
    assert fetched == ['mirror1']
    web.image, web.says = raw(MIB, 3), {'etag': '2', 'last-modified': 'Sun, 22 Nov 2026 10:00:00 GMT'}
    for _ in range(2):
        assert Path(get(cache(directory), url).path).name == base(web.image)
    # Without a date nothing says that what two mirrors have is the same.
    web.says, web.image = {'etag': '3'}, raw(MIB, 4)
    get(cache(directory), url)
    before = web.asked.count('SHA256SUMS')
    get(cache(directory), url)
    assert web.asked.count('SHA256SUMS') == before + 1


def test_a_place_that_was_named_for_a_short_time_is_asked_for_anew(web: Web, directory: Path) -> None:
    """As a store's signed URLs are, which may have ended by the end of the download."""
    web.says = {'etag': '"1"'}
    assert get(cache(directory), web.url + 'signed').format == 'qcow2'
    # The image, that it is still the same there, and that it is from where it is asked for.
    assert web.asked == ['signed', 'once', 'SHA256SUMS', 'once', 'signed', 'once']


def test_an_image_above_what_the_host_could_give_is_refused(web: Web, directory: Path) -> None:
    small = ImageCache(directory, inspect, None, replace(LIMITS, disk=8 * MIB), LOOPBACK)
    web.image = raw(8 * MIB + 512)
    with pytest.raises(BuildFailed, match='the image is 0.0 GiB, and this host has 0.0 GiB for disks'):
        get(small, web.url + 'good')
    assert kept(directory) == []
    web.image = raw(8 * MIB)
    assert get(small, web.url + 'good').virtual_size == 8 * MIB
