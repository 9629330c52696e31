"""What the fault rows measured: a JSON line each, appended to the file that $ECOMP_FAULT_FIGURES names, if it does."""

from __future__ import annotations

import json
import os


def figure(row: str, **seconds: float) -> None:
    """Note what a row measured, such as detected_s and recovered_s."""
    path = os.environ.get('ECOMP_FAULT_FIGURES')
    if path:
        with open(path, 'a') as file:
            file.write(json.dumps({'row': row, **{name: round(each, 2) for name, each in seconds.items()}}) + '\n')
