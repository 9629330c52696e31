"""What the image cache has written of its URLs and volumes, spoilt by somebody else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.functional.image_content import base, entries, raw
from tests.kit.image_server import Web
from tests.kit.images import MIB, cache, get, kept


@pytest.mark.parametrize(
    'content',
    ['', 'nonsense', '[]', '{}', '{"version": 2}', '{"version": 1, "url": 7}', b'\xff\0', 'null', '{"version": 1'],
)
def test_what_is_known_and_cannot_be_read_is_learnt_again(web: Web, directory: Path, content: str | bytes) -> None:
    web.says = {'etag': '"1"'}
    first = get(cache(directory), web.url + 'good')
    (path,) = entries(directory)
    good = json.loads(path.read_text())
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert get(cache(directory), web.url + 'good') == first
    assert json.loads(path.read_text()) == good
    assert len(web.sent) == 2
    assert kept(directory) == [Path(first.path).name]


def test_every_spoilt_field_of_it_is_survived(web: Web, directory: Path) -> None:
    web.says = {'etag': '"1"'}
    first = get(cache(directory), web.url + 'good')
    (path,) = entries(directory)
    good = json.loads(path.read_text())
    for name in good['found']:
        for value in (None, [], {}, 'x', '../x', {'etag': 7}, {'x': ''}):
            path.write_text(json.dumps({**good, 'found': {**good['found'], name: value}}))
            assert get(cache(directory), web.url + 'good') == first, (name, value)
        path.write_text(json.dumps({**good, 'found': {k: v for k, v in good['found'].items() if k != name}}))
        assert get(cache(directory), web.url + 'good') == first, name
    assert json.loads(path.read_text()) == good


def test_a_base_volume_is_fetched_once_and_again_where_it_is_gone_or_cut_off(
    web: Web, directory: Path, image: bytes
) -> None:
    web.says = {'etag': '"1"'}
    first = get(cache(directory), web.url + 'good')
    for _ in range(2):
        assert get(cache(directory), web.url + 'good') == first
    assert web.sent == ['good']
    Path(first.path).unlink()
    assert get(cache(directory), web.url + 'good') == first
    os.truncate(first.path, 1000)
    assert get(cache(directory), web.url + 'good') == first
    assert Path(first.path).read_bytes() == image
    assert len(web.sent) == 3


@pytest.mark.parametrize(
    ('says', 'times'),
    [
        ({'last-modified': 'Fri, 27 Aug 2021 17:41:20 GMT'}, 3),  # then date and length say that it is the same
        ({}, 9),  # nothing does: each build has it twice, and asks between
    ],
)
def test_servers_behind_one_name_may_have_etags_of_their_own(
    web: Web, directory: Path, caplog: pytest.LogCaptureFixture, says: dict[str, str], times: int
) -> None:
    web.says, web.refuses_head = says, None
    url = web.url + 'farm'
    first = get(cache(directory), url)
    for _ in range(2):
        assert get(cache(directory), url) == first
    assert len(web.sent) == times
    told = [line.message for line in caplog.records if line.levelname == 'WARNING']
    assert len(told) == times // 3
    assert all('another version each time. Fix: put #sha256=' in each for each in told)
    # Another image is seen to be another one.
    web.image, web.says = raw(MIB, 7), {**says, 'last-modified': 'Sat, 28 Aug 2021 17:41:20 GMT'}
    assert Path(get(cache(directory), url).path).name == base(web.image)


def test_a_date_that_is_the_time_of_the_answer_makes_no_loop(web: Web, directory: Path) -> None:
    first = get(cache(directory), web.url + 'now')
    assert get(cache(directory), web.url + 'now') == first


def test_a_sparse_image_stays_sparse(web: Web, directory: Path, tmp_path: Path) -> None:
    """From a file and by HTTP; what is in it is the same."""
    path = tmp_path / 'sparse.raw'
    with path.open('wb') as file:
        file.truncate(64 * MIB)
        file.write(raw(MIB))
        file.seek(40 * MIB + 1234)
        file.write(os.urandom(MIB))
    web.image = path.read_bytes()
    for url, local in ((path.as_uri(), tmp_path), (web.url + 'good', None)):
        held = Path(get(cache(directory, local), url).path)
        assert (held.name, held.stat().st_size, held.read_bytes()) == (base(web.image), 64 * MIB, web.image)
        assert held.stat().st_blocks * 512 < 4 * MIB
        held.unlink()
