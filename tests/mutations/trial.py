"""Run the tests of a row in a copy of the tree in which its mistake was made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.kit.servers import TOP
from tests.mutations.rows import Row

# pytest's exit codes if all tests passed, and if one failed; any other says that it could not run them.
PASSED = 0
FAILED = 1


class Trial(NamedTuple):
    has_failed: bool
    seconds: float
    failure: str


@contextmanager
def make_mistake(row: Row, tree: Path) -> Iterator[None]:
    """Make the mistake in this copy of the tree, and restore the file at the end."""
    path = tree / row.file
    text = path.read_text()
    count = text.count(row.old)
    assert count == 1, f'{row.file} has {count} times: {row.old}'
    path.write_text(text.replace(row.old, row.new))
    try:
        yield
    finally:
        # With the time of the file, so that the bytecode of the mistake is not used for it.
        shutil.copy2(TOP / row.file, path)


def run_tests(row: Row, tree: Path) -> Trial:
    # No process of the tests imports another tree.
    # Console scripts and processes in other directories import by this path, too.
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join((str(tree), str(tree / 'md_server')))}
    command = [sys.executable, '-m', 'pytest', '-x', '-q', '-n0', '-p', 'no:cacheprovider', '--tb=line', *row.tests]
    started_at = time.monotonic()
    process = subprocess.run(
        command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors='replace', check=False,
    )  # fmt: skip
    assert process.returncode in (PASSED, FAILED), process.stdout
    failure = re.search('^(?:FAILED|ERROR) tests/.*', process.stdout, re.MULTILINE)
    return Trial(process.returncode == FAILED, time.monotonic() - started_at, failure[0] if failure else '')
