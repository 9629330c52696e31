"""Files: those that somebody else writes, seen as they are written; our own, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BOOT_ID = Path('/proc/sys/kernel/random/boot_id')


def boot_id(path: Path = BOOT_ID) -> str:
    """Which boot of this machine this is. proc_sys_kernel(5)"""
    return path.read_text().strip()


def watch(directory: Path, suffix: str, written: Callable[[Path], None]) -> Callable[[], None]:
    """From now on written(path) within milliseconds of a file that ends so being written; returns what ends it.

    OSError if the directory cannot be watched.
    """
    # Late: only an ecompute with a real hypervisor watches.
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            # Most write a new file and rename it; some write in place.
            path = Path(str(event.dest_path or event.src_path))
            if event.event_type in ('moved', 'modified', 'created') and path.name.endswith(suffix):
                written(path)

    observer = Observer()
    observer.schedule(Handler(), str(directory))
    observer.start()

    def stop() -> None:
        observer.stop()
        observer.join()

    return stop


def write_durably(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, also across a power cut. OSError names it; nothing half written stays."""
    temporary = part_of(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, 'wb') as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync(path.parent)


def part_of(path: Path) -> Path:
    """Where a file is while it is written; whoever is killed then leaves it there."""
    return path.with_name(f'.{path.name}.part')


def sync(directory: Path) -> None:
    """See that what was made or renamed in a directory is there after a power cut. OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def search_path() -> str:
    """PATH, and where Debian keeps root's programs: sudo's or a plain user's PATH may lack those."""
    return os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin', '/sbin'))
