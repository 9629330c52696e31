"""What a file of user-data is warned of: cloud-init would pass over it in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecomp.cli.given import user_data

SAYS = 'begins with #cloud-config, but '


@pytest.mark.parametrize(
    ('data', 'says'),
    [
        (b'#cloud-config\npackages: [nginx]\n', ''),
        (b'#cloud-config\n', ''),
        (b'#cloud-config\n# nothing\n', ''),
        (b'#cloud-config\na: &a [1]\nb: *a\n', ''),
        (b'#cloud-config-archive\n- content: x\n', ''),
        (b'#!/bin/sh\n[', ''),
        (b'#cloud-config\npackages: [nginx\n', f'{SAYS}line 3 is not YAML'),
        (b'#cloud-config\nruncmd:\n\t- x\n', f'{SAYS}line 3 is not YAML'),
        (b'#cloud-config\n- a\n', f'{SAYS}it is not keys with values'),
        (b'#cloud-config\nhello\n', f'{SAYS}it is not keys with values'),
        (b'#cloud-config\na: "\\UFFFFFFFF"\n', f'{SAYS}'),
    ],
)
def test_cloud_config_that_is_none(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / 'data').write_bytes(data)
    told: list[str] = []
    assert user_data(tmp_path / 'data', told.append) == data
    assert len(told) == bool(says)
    assert says in ''.join(told)
    assert 'nginx' not in ''.join(told)


def test_many_aliases_cost_nothing(tmp_path: Path) -> None:
    lines = ['#cloud-config', 'a0: &a0 [x]', *(f'a{n}: &a{n} [{", ".join([f"*a{n - 1}"] * 9)}]' for n in range(1, 40))]
    (tmp_path / 'data').write_text('\n'.join(lines))
    told: list[str] = []
    user_data(tmp_path / 'data', told.append)
    assert told == []
