"""What a file of user-data is warned of: cloud-init would pass over it in silence."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ecomp.cli.create import read_user_data
from ecomp.model.guest import UNPACKED_LIMIT

SAYS = 'begins with #cloud-config, but '
UNKNOWN = 'does not begin with #cloud-config, #! or a MIME header, so cloud-init passes over it'
BROKEN = 'is gzip, and broken, so cloud-init passes over it'


@pytest.mark.parametrize(
    ('data', 'says'),
    [
        (b'#cloud-config\npackages: [nginx]\n', ''),
        (b'#cloud-config\n', ''),
        (b'#cloud-config\n# nothing\n', ''),
        (b'#cloud-config\na: &a [1]\nb: *a\n', ''),
        (b'#cloud-config-archive\n- content: x\n', ''),
        (b'#!/bin/sh\n[', ''),
        (b' #!', ''),
        (b'x #!', UNKNOWN),
        (b'Content-Type: multipart/mixed; boundary="x"\nMIME-Version: 1.0\n\n--x--\n', ''),
        (b'## template: jinja\n#cloud-config\n', ''),
        (b'#include\nhttp://h/x\n', ''),
        (b'#cloud-config\npackages: [nginx\n', f'{SAYS}line 3 is not YAML'),
        (b'#cloud-config\nruncmd:\n\t- x\n', f'{SAYS}line 3 is not YAML'),
        (b'#cloud-config\n- a\n', f'{SAYS}it is not keys with values'),
        (b'#cloud-config\nhello\n', f'{SAYS}it is not keys with values'),
        (b'#cloud-config\na: "\\UFFFFFFFF"\n', f'{SAYS}'),
        (b'#cloud-config\n---\na: 1\n', ''),
        (b'#cloud-config\na: 1\n---\nb: 2\n', f'{SAYS}line 3 begins a second document'),
        (b'#cloud-confg\na: 1\n', UNKNOWN),
        (b'#cloud\n', UNKNOWN),
        (b'## template: mako\n', UNKNOWN),
        (b'#cloud-boothook\n', ''),
        (b'\n#cloud-config\na: 1\n', ''),
        (b'\r\n  #Cloud-Config\r\na: 1\n', ''),
        (b'#CLOUD-CONFIG\n- a\n', f'{SAYS}it is not keys with values'),
        (b'\xc2\xa0\n#!/bin/sh\n', ''),  # a no-break space is white space to Python, in which cloud-init is written
        (b'\n## Template: Jinja\n#cloud-config\n', ''),
        (b'\n#Include\nhttp://a/b\n', ''),
        (b'\xef\xbb\xbf#cloud-config\na: 1\n', UNKNOWN),
        (b'# cloud-config\na: 1\n', UNKNOWN),
        (b'packages: []\n', UNKNOWN),
        (b'{"ignition": {}}', UNKNOWN),
        (b'#cloud_config\na: 1\n', UNKNOWN),
        (b'a: 1\n#cloud-config\n', UNKNOWN),
        (gzip.compress(b'#!/bin/sh\n\xff\n', mtime=0), UNKNOWN),  # no text, so cloud-init gives it no type
        (gzip.compress(b'#cloud-config\na: 1\n', mtime=0), ''),
        (gzip.compress(b'#cloud-config\n- a\n', mtime=0), f'{SAYS}it is not keys with values'),
        (gzip.compress(b'hello\n', mtime=0), UNKNOWN),
        (gzip.compress(b'#!/bin/sh\n', mtime=0)[:-3], BROKEN),
        (gzip.compress(b'#!/bin/sh\n', mtime=0) + b'more', BROKEN),
        (b'\x1f\x8b', BROKEN),
        (b'\x1f\x8bhello', BROKEN),
        pytest.param(gzip.compress(bytes(UNPACKED_LIMIT + 1), mtime=0), '', id='too large'),
    ],
)
def test_cloud_config_that_is_none(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / 'data').write_bytes(data)
    told: list[str] = []
    assert read_user_data(tmp_path / 'data', told.append) == data
    assert len(told) == bool(says)
    assert says in ''.join(told)
    assert 'nginx' not in ''.join(told)


def test_many_aliases_cost_nothing(tmp_path: Path) -> None:
    lines = ['#cloud-config', 'a0: &a0 [x]', *(f'a{n}: &a{n} [{", ".join([f"*a{n - 1}"] * 9)}]' for n in range(1, 40))]
    (tmp_path / 'data').write_text('\n'.join(lines))
    told: list[str] = []
    read_user_data(tmp_path / 'data', told.append)
    assert told == []
