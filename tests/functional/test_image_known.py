"""What the image cache has written of its URLs and volumes, spoilt by somebody else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.functional.image_content import entries
from tests.kit.image_server import Web
from tests.kit.images import cache, get, kept

pytestmark = [
    pytest.mark.skipif(
        shutil.which('qemu-img') is None, reason='qemu-img makes the images: apt-get install qemu-utils'
    ),
]


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


def test_a_base_volume_that_is_gone_or_cut_off_is_fetched_again(web: Web, directory: Path, image: bytes) -> None:
    web.says = {'etag': '"1"'}
    first = get(cache(directory), web.url + 'good')
    Path(first.path).unlink()
    assert get(cache(directory), web.url + 'good') == first
    os.truncate(first.path, 1000)
    assert get(cache(directory), web.url + 'good') == first
    assert Path(first.path).read_bytes() == image
    assert len(web.sent) == 3
