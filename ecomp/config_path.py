"""A configuration that nobody named: where it is found, and from whom it is taken.

ecompute is root, and schedule.yaml names the file that goes to guests as user-data: whoever may put a file where the
next command is typed would be believed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ecomp.errors import UsageError

VARIABLE = 'ECOMP_CONFIG'


def named(word: str | None) -> Path | None:
    """The file that --config names; None where it is not there. UsageError for an empty word.

    That is a script's variable without a value: with another cluster's file its command would go there.
    """
    if word == '':
        raise UsageError("--config: '' names no file")
    return None if word is None else Path(word)


def find(name: str) -> Path | None:
    """The first file of this name in ./, ~/.config/ecomp/ and /etc/ecomp/, None if there is none.

    If $ECOMP_CONFIG names a directory, the file in that one; UsageError if it has none.
    """
    if own := os.environ.get(VARIABLE):
        path = Path(own) / name
        if not os.path.lexists(path):
            raise UsageError(f'{VARIABLE}={own}: has no {name}')
        return path
    places = (Path(), Path(os.path.expanduser('~/.config/ecomp')), Path('/etc/ecomp'))
    return next((place / name for place in places if os.path.lexists(place / name)), None)


def told(name: str, path: Path | None) -> str:
    """By which file of this name we were told where etcd and placement are, as the end of a sentence."""
    return f'told by {path}' if path is not None else f'a guess: no {name} was found, --config FILE names one'


def check(name: str, found: os.stat_result) -> None:
    """UsageError for a file that neither root nor the caller owns, that others can write to, or that is a pipe."""
    callers = {0, os.geteuid()}
    if os.geteuid() == 0 and (behind_sudo := os.environ.get('SUDO_UID', '')).isdecimal():
        callers.add(int(behind_sudo))
    if found.st_uid not in callers:
        raise UsageError(
            f'{name}: belongs to user {found.st_uid}, and a configuration that nobody named is taken from root and you '
            f'alone: chown it, or name it (--config)'
        )
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f'{name}: is no regular file: remove it, or name a configuration (--config)')
    # A user's own group has the user's number, and nobody else in it.
    others = 0o002 if found.st_gid == found.st_uid else 0o022
    if found.st_mode & others:
        raise UsageError(f'{name}: others can write to it: chmod go-w {name}')
