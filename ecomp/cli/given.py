"""What a new guest is given, read from the files the user names: nothing in them is ever quoted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ecomp.conf import ScheduleConfig
from ecomp.errors import UsageError
from ecomp.model.guest import KEYS_LIMIT, USER_DATA_LIMIT, check_user_data, looks_unknown, public_keys, unpacked
from ecomp.model.json_object import dump
from ecomp.model.text import printable

STDIN = '-'
CLOUD_CONFIG = b'#cloud-config'


def given(
    config: ScheduleConfig, keys: Sequence[str] | None, data: str | None, tell: Callable[[str], None]
) -> tuple[tuple[str, ...] | None, bytes | None]:
    """The ssh keys and the user-data for a new guest; None: those of its compute's mdserver.conf.

    They are in the files that the command line names, or else schedule.yaml. UsageError, see below.
    """
    key_files: Sequence[str | Path] = config.ssh_keys if keys is None else keys
    data_file = config.user_data if data is None else data
    if [*key_files, data_file].count(STDIN) > 1:
        raise UsageError('--ssh-key, --user-data: standard input can be read once: name - for one of them alone')
    return ssh_keys(key_files) if key_files else None, None if data_file is None else user_data(data_file, tell)


def user_data(path: str | Path, tell: Callable[[str], None]) -> bytes:
    """The user-data in a file; `-` is standard input. UsageError names the file.

    `tell` gets a line if it is nothing that cloud-init takes: other programs in guests read user-data, too.
    """
    what = f'user-data {printable(str(path), 200)}'
    data = _read(what, path, USER_DATA_LIMIT, 'have the guest fetch the rest, or compress it with gzip')
    try:
        check_user_data(data)
    except ValueError as error:
        raise UsageError(f'{what}: {error}') from error
    inside = unpacked(data)
    if inside is None:
        tell(f'{what}: is gzip, and broken, so cloud-init passes over it')
    elif looks_unknown(inside):
        tell(f'{what}: does not begin with #cloud-config, #! or a MIME header, so cloud-init passes over it')
    elif inside.lstrip().split(b'\n', 1)[0].rstrip().lower() == CLOUD_CONFIG:
        from ecomp.yaml_file import why_no_mapping  # for those who give some

        if why := why_no_mapping(inside.decode(errors='replace')):
            tell(f'{what}: begins with #cloud-config, but {why}, so cloud-init passes over it')
    return data


def ssh_keys(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """The public keys in all the files, each once. UsageError names the file and the line."""
    found: dict[str, None] = {}
    for path in paths:
        what = f'ssh keys {printable(str(path), 200)}'
        data = _read(what, path, KEYS_LIMIT, 'name files of a few public keys')
        try:
            found.update(dict.fromkeys(public_keys(data)))
        except ValueError as error:
            raise UsageError(f'{what}: {error}') from error
    size = len(dump(list(found)))
    if size > KEYS_LIMIT:
        raise UsageError(f'ssh keys: have {size} bytes together, and {KEYS_LIMIT} is the limit: name fewer')
    return tuple(found)


def _read(what: str, path: str | Path, limit: int, cure: str) -> bytes:
    try:
        with open(0 if path == STDIN else path, 'rb', closefd=path != STDIN) as file:
            data = file.read(limit + 1)
            about = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f'{what}: cannot be read: {reason}') from error
    if len(data) > limit:
        size = about.st_size if stat.S_ISREG(about.st_mode) else f'more than {limit}'
        raise UsageError(f'{what}: has {size} bytes, and {limit} ({limit // 1024} KiB) is the limit: {cure}')
    return data
