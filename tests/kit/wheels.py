"""Wheels of a tree, built with this environment's setuptools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def build_wheel(clone: Path, directory: Path) -> Path:
    (directory / 'temporary').mkdir(parents=True, exist_ok=True)
    build = 'import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))'
    command = [sys.executable, '-c', build, str(directory)]
    env = {**os.environ, 'TMPDIR': str(directory / 'temporary')}
    process = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return directory / process.stdout.splitlines()[-1]
