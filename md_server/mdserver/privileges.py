"""Becoming another user, for good.

Sources: setresuid(2), capabilities(7) on what leaving uid 0 does, prctl(2) and PR_SET_NO_NEW_PRIVS, proc(5) for
/proc/PID/status.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_NO_NEW_PRIVS = 38
LARGEST = 2**32 - 2  # of a uid: the one above means "as it is"


class Ids(NamedTuple):
    """The number of a user and of its group."""

    uid: int
    gid: int


def find(user: str) -> Ids:
    """The numbers of a user by name or, as chown(1) takes it, by a number that no user need have. Raises ValueError."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        if not re.fullmatch('[0-9]{1,10}', user) or int(user) > LARGEST:
            raise ValueError(f'there is no user {user!r} here: name one that is, or give a number') from error
        ids = Ids(int(user), int(user))
        with suppress(KeyError):
            ids = Ids(ids.uid, pwd.getpwuid(ids.uid).pw_gid)
    else:
        ids = Ids(entry.pw_uid, entry.pw_gid)
    if ids.uid == 0:
        raise ValueError(f'{user!r} is root, who gives up nothing: name another user')
    return ids


def drop(ids: Ids) -> None:
    """Make this process that user, of that group alone, without any capability, for good. Raises OSError.

    Called while the process has one thread.
    """
    os.setgroups([])
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)
    # Nor by running a program that would change them.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'no_new_privs cannot be set')
    # Securebits can have them kept, across a change of user.
    if re.search(r'^Cap(Prm|Eff|Amb):\s*0*[1-9a-f]', Path('/proc/self/status').read_text(), re.MULTILINE):
        raise OSError(errno.EPERM, 'capabilities are kept')
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise OSError(errno.EPERM, 'it can become root again')
