"""What commands read beside options: files, stdin, names of images, and the owner of a request."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.cli.options import convert_to_usage_error
from ecomp.errors import UsageError
from ecomp.model import user_data
from ecomp.model.allocation import list_missing_classes
from ecomp.model.image import check_image
from ecomp.model.json_object import dump
from ecomp.model.text import format_suggestion, make_printable

if TYPE_CHECKING:
    from ecomp.conf import ScheduleConfig

STDIN = '-'
CLOUD_CONFIG = b'#cloud-config'


def resolve_image(config: ScheduleConfig, image: str) -> str:
    """Return the URL of an image, which may be a name in schedule.yaml.

    Raises:
        ValueError: it is neither a URL nor such a name, or no image may come from the URL.
    """
    if '/' not in image and image not in config.images and image != config.image:
        known = f', which has {", ".join(config.images)}' if config.images else ''
        problem = f'the image {image!r:.80} is neither a URL nor a name in `images:` of schedule.yaml'
        raise ValueError(problem + (format_suggestion(image, config.images) or known))
    return check_image(config.images.get(image, image))


def require_guest_classes(flavor: str, query: str) -> None:
    """Raise UsageError if the combined `query` lacks what every guest needs."""
    from ecomp.model.query import parse_names

    if lacking := list_missing_classes(parse_names(query).classes):
        advice = f"give a query with 'resources={','.join(f'{name}:…' for name in lacking)}'"
        raise UsageError(f'flavor {flavor} lacks {", ".join(lacking)}, which every guest needs. Fix: {advice}')


def describe_owner(since: str) -> dict[str, object]:
    """Return this process as owner of an attempt: host, pid and the time of the request."""
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}


def read_user_data(source: str | Path | bytes, warn: Callable[[str], None]) -> bytes:
    """Read user-data from a file, from stdin for `-`, or from bytes.

    `warn` gets a line if cloud-init would ignore the data. Another program in the guest may use such data.
    """
    label, data = 'user-data', source
    if not isinstance(data, bytes):
        label = f'user-data {make_printable(str(source), 200)}'
        advice = 'let the guest fetch the rest, or compress it with gzip'
        data = read_file(label, data, user_data.MAX_USER_DATA_BYTES, advice)
    with convert_to_usage_error(label):
        user_data.check_user_data(data)
    unpacked_data = user_data.unpack_user_data(data)
    if unpacked_data is None:
        warn(f'{label}: is damaged gzip, so cloud-init ignores it')
    elif user_data.is_unknown_user_data(unpacked_data):
        warn(f'{label}: does not begin with #cloud-config, #! or a MIME header, so cloud-init ignores it')
    elif unpacked_data.lstrip().split(b'\n', 1)[0].rstrip().lower() == CLOUD_CONFIG:
        from ecomp.yaml_graph import explain_invalid_mapping  # needed only with cloud-config

        if problem := explain_invalid_mapping(unpacked_data.decode(errors='replace')):
            warn(f'{label}: begins with #cloud-config, but {problem}, so cloud-init ignores it')
    return data


def read_ssh_keys(sources: Sequence[str | Path | bytes]) -> tuple[str, ...]:
    """Read the public keys of files, of stdin for `-`, and of bytes, and drop repeated ones."""
    unique_keys, limit = dict[str, None](), user_data.MAX_SSH_KEYS_BYTES
    for source in sources:
        label, data = 'ssh keys', source
        if not isinstance(data, bytes):
            label = f'ssh keys {make_printable(str(source), 200)}'
            data = read_file(label, data, limit, 'give files with fewer public keys')
        with convert_to_usage_error(label):
            unique_keys.update(dict.fromkeys(user_data.parse_public_keys(data)))
    size = len(dump(list(unique_keys)))
    if size > limit:
        raise UsageError(f'ssh keys: have {size} bytes in all; the limit is {limit}. Fix: give fewer keys')
    return tuple(unique_keys)


def read_file(label: str, path: str | Path, limit_bytes: int, advice: str) -> bytes:
    """Read a file, or stdin for `-`, or raise UsageError if it is larger than `limit_bytes`."""
    try:
        # Closed, sys.stdin could not be asked later whether it is a terminal.
        with open(0 if path == STDIN else path, 'rb', closefd=path != STDIN) as file:
            data = file.read(limit_bytes + 1)
            status = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f'{label}: cannot be read: {reason}') from error
    if len(data) > limit_bytes:
        size = status.st_size if stat.S_ISREG(status.st_mode) else f'more than {limit_bytes}'
        limit = f'{limit_bytes} ({limit_bytes // 1024} KiB)'
        raise UsageError(f'{label}: has {size} bytes; the limit is {limit}. Fix: {advice}')
    return data
