"""What is waited for, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ecomp.model.text import printable


class Live:
    """One line on the terminal that is written over; nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> Callable[[str], None]:
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write('\r\x1b[K')
            sys.stderr.flush()

    def _tell(self, text: str) -> None:
        if sys.stderr.isatty():
            self._shown = True
            sys.stderr.write(f'\r\x1b[K{printable(text)}')
            sys.stderr.flush()
