"""A table that is drawn anew as etcd tells of changes: `list --watch`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ecomp.cli.terminal import broken, width
from ecomp.conf import EtcdConfig
from ecomp.errors import Unreachable
from ecomp.model.text import printable
from ecomp.store.watch import Follower

PAUSE = 0.2
"""Seconds between two drawings at least: what changes meanwhile is drawn together."""

HOME = '\x1b[H\x1b[2J'
"""What has a terminal begin again at its top. https://www.xfree86.org/current/ctlseqs.html"""


class Drawing(NamedTuple):
    """A table as text, and what there is to say below it, a line each."""

    table: str
    below: Sequence[str] = ()


def watch(config: EtcdConfig, prefixes: Sequence[str], see: Callable[[], Drawing], draw: Callable[[str], None]) -> None:
    """Draw what `see` finds, now and whenever anything below one of the prefixes has changed, until Ctrl-C.

    While etcd is away the last drawing stays, with a line below it. Errors: those of `see`, the first time.
    """
    changed, lost = threading.Event(), list[str]()

    def told(trouble: str = '') -> None:
        lost[:] = [trouble] if trouble else []
        changed.set()

    # An event is a nudge and the list is the truth, as everywhere.
    subscriptions = [(prefix, lambda _: told()) for prefix in prefixes]
    follower = Follower(config, subscriptions, on_lost=lambda error: told(str(error)), on_back=told)
    shown = see()
    try:
        follower.start()
        draw(screen(shown, lost))
        while changed.wait():
            changed.clear()
            try:
                shown = shown if lost else see()
            except Unreachable as error:
                lost[:] = [str(error)]
            draw(screen(shown, lost))
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        pass
    finally:
        follower.stop()


def screen(shown: Drawing, lost: Sequence[str]) -> str:
    """The drawing as a terminal is to show it, from its top and no longer than it; elsewhere with an empty line behind.

    Of a table that is too long for it the end is left out, and not what is said below.
    """
    said = [*map(printable, shown.below), *(f'{printable(each)}; it is tried again' for each in lost)]
    lines, below = shown.table.split('\n'), [part for each in said for part in broken(each, width()).split('\n')]
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines if sys.stdout.isatty() else 0
    except OSError:
        height = 0
    if not height:
        return '\n'.join([*lines, *below, ''])
    below = below[: max(height - 3, 0)]
    most = max(height - 1 - len(below), 2)  # the last line is the cursor's
    if len(lines) > most:
        lines = [*lines[: most - 1], f'{len(lines) - most + 1} more']
    return HOME + '\n'.join([*lines, *below])
