"""argparse's reading of a command line: of one that is not plainly written, and of --help and --version."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ecomp import __version__
from ecomp.arguments import Parser
from ecomp.cli.options import OPTIONS
from ecomp.errors import UsageError


def parser(help_text: Callable[[], str]) -> argparse.ArgumentParser:
    """Who takes any words and every option; which of them a command takes is looked at once the command is known."""
    made = _Reader('eschedule', add_help=True)
    made.help_text = help_text
    made.add_argument('words', nargs='*')
    made.add_argument('--version', action='version', version=f'eschedule {__version__}')
    for field, rows in OPTIONS.items():
        group = made.add_mutually_exclusive_group() if len(rows) > 1 else made
        for each in rows:
            how = {**each.more} if 'action' in each.more else {**each.more, 'action': _Once}
            group.add_argument(*each.flags, dest=field, **how)
    return made


class _Reader(Parser):
    """argparse, whose help is that of the command that is typed beside --help, if there is one."""

    help_text: Callable[[], str] = staticmethod(lambda: '')

    def format_help(self) -> str:
        """What --help prints."""
        return self.help_text()


class _Once(argparse.Action):
    """An option with a value: which of two is meant nobody can say."""

    def __call__(self, _: object, found: argparse.Namespace, value: Any, __: object = None) -> None:
        if getattr(found, self.dest) is not None:
            raise UsageError(f'{self.option_strings[-1]} is given twice')
        setattr(found, self.dest, value)
