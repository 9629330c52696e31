"""Files that somebody else writes, seen as they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


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
