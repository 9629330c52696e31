"""The argument parser of all commands."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ecomp.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse's parser, which raises a one-line UsageError for an invalid command line.

    --help and --version still exit, or raise OSError.
    """

    def error(self, message: str) -> NoReturn:
        raise UsageError(f'{message}. Try: --help')

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's method ignores a full disk, or leaves it to Python's shutdown: exit 120.
        file.write(message)
        file.flush()
