"""What goes into the small guest: its archive, and how a program that needs no libraries is known."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ecomp.lab import guest

FILES = [
    ('bin', stat.S_IFDIR | 0o755, b''),
    ('dev', stat.S_IFDIR | 0o755, b''),
    ('dev/console', stat.S_IFCHR | 0o600, b'5,1'),
    ('bin/one', stat.S_IFREG | 0o755, b'#!/bin/sh\n'),
    ('bin/a-longer-name', stat.S_IFREG | 0o644, bytes(range(256)) * 3 + b'x'),
]


def test_the_archive_is_what_cpio_takes_for_one(tmp_path: Path) -> None:
    busybox = Path('/bin/busybox')
    if not busybox.exists():
        pytest.skip('busybox is not installed: apt-get install busybox-static')
    packed = guest.archive(FILES)

    listed = subprocess.run([busybox, 'cpio', '-tv'], input=packed, capture_output=True, check=True).stdout.decode()
    lines = [line.split() for line in listed.splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [
        ('drwxr-xr-x', 'bin'),
        ('drwxr-xr-x', 'dev'),
        ('crw-------', 'dev/console'),
        ('-rwxr-xr-x', 'bin/one'),
        ('-rw-r--r--', 'bin/a-longer-name'),
    ]
    subprocess.run([busybox, 'cpio', '-id', 'bin/*'], input=packed, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / 'bin/a-longer-name').read_bytes() == FILES[-1][2]
    assert (tmp_path / 'bin/one').stat().st_mode & 0o777 == 0o755


def test_the_archive_is_the_same_every_time() -> None:
    assert guest.archive(FILES) == guest.archive(FILES)
    assert len(guest.archive(FILES)) % 4 == 0


def test_a_program_with_libraries_is_not_static() -> None:
    assert not guest.is_static(Path(sys.executable).read_bytes())
    assert not guest.is_static(b'#!/bin/sh\n')


@pytest.mark.parametrize('script', [guest.INIT, guest.ON_LEASE, guest.POWER_BUTTON])
def test_the_scripts_are_shell(script: str) -> None:
    subprocess.run(['sh', '-n'], input=script.encode(), check=True)
    assert script.startswith('#!/bin/')
