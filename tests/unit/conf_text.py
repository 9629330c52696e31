"""Load a text as compute.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ecomp.compute_conf import ComputeConfig, load_compute

UUID = 'b8756be5-a30d-4311-920c-0ad996367a8e'


@pytest.fixture
def compute_config(tmp_path: Path) -> Callable[[str | bytes], ComputeConfig]:
    def load(content: str | bytes) -> ComputeConfig:
        path = tmp_path / 'compute.yaml'
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_compute(path)

    return load
