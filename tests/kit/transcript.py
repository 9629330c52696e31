"""Files with what programs print and accept, which tests compare and write."""

from __future__ import annotations

import os
from pathlib import Path

IS_WRITING = os.environ.get('ECOMP_GOLDEN') == 'write'


def compare_with_file(path: Path, text: str) -> None:
    if IS_WRITING:
        path.write_text(text)
    assert text == path.read_text(), f'{path.name}: write it with ECOMP_GOLDEN=write, and read the difference'
