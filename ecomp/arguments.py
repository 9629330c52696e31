"""What the arguments of all commands have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ecomp.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line like all others: UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f'{message}; --help shows all')
