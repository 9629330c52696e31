"""What the arguments of all commands have in common."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ecomp.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line like all others: UsageError. OSError where a help cannot be written."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f'{message}; --help shows all')

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own passes over a full disk, or leaves it to Python's end, which is exit 120.
        file.write(message)
        file.flush()
