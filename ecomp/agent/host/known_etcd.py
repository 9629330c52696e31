"""Which etcd this compute knows (rule 10), as its state directory remembers it: <state>/etcd.json, <state>/first-seen.

The highest revision changes with everything that happens, so it is written by a thread, once a second at most; a kill
loses what was seen in the last second.
"""

from __future__ import annotations

import logging
import threading
import uuid
from pathlib import Path

from ecomp.errors import EcompError, StrangeEtcd, UsageError
from ecomp.files import write_durably
from ecomp.model import cluster
from ecomp.model.cluster import KnownCluster
from ecomp.store.client import Store
from ecomp.store.guard import Guard

log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two writes at least."""


def is_familiar(guard: Guard, store: Store, now: str) -> bool:
    """Whether etcd is the one we knew; with nothing remembered, it is from now on (rule 10)."""
    try:
        if guard.known.identity:
            store.recognise()
        else:
            store.adopt(cluster.new(str(uuid.uuid4()), now))
    except StrangeEtcd:
        return False  # not an end: started again and again, it would be away as often, and its guests' metadata with it
    return True


class KnownEtcd:
    """The file of what is known of etcd. note() may be called from any thread; nothing is written before start()."""

    def __init__(self, directory: Path) -> None:
        self._path, self._accepted = directory / 'etcd.json', directory / 'accepted'
        self._first = directory / 'first-seen'
        self._known = KnownCluster()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='known etcd', daemon=True)

    def load(self) -> KnownCluster:
        """What is remembered; nothing before the first time. UsageError if the file cannot be understood."""
        try:
            self._known = cluster.from_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError as error:
            raise UsageError(f'{self._path}: {error}: restore it, or ecompute --accept-new-etcd') from error
        return self._known

    def accepted(self) -> int:
        """Read the revision at which ecomp 1.1 accepted another etcd, for /accepted; 0 for none. UsageError."""
        return self._number(self._accepted)

    def first_seen(self) -> int:
        """Read etcd's revision when this compute first saw or accepted it; 0: an older ecompute did. UsageError."""
        return self._number(self._first)

    def note_first_seen(self, revision: int, has_noted_acceptance: bool) -> None:
        """Remember that revision; `has_noted_acceptance`: etcd has what was in the file of 1.1, which goes.

        Raises:
            EcompError: it cannot be written.
        """
        try:
            if revision != self.first_seen():
                write_durably(self._first, f'{revision}\n')
            if has_noted_acceptance:
                self._accepted.unlink(missing_ok=True)
        except OSError as error:
            raise EcompError(f'{self._first}: {error.strerror}') from error

    def _number(self, path: Path) -> int:
        try:
            return int(path.read_text())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise UsageError(f'{path}: {error}. Fix: restore it, or ecompute --accept-new-etcd') from error

    def note(self, known: KnownCluster) -> None:
        """Have this written soon."""
        self._known = known
        self._changed.set()

    def start(self) -> None:
        """Begin to write, what was noted before first."""
        self._thread.start()

    def stop(self) -> None:
        """Write the last, and end."""
        self._stopped.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        written, failed, last = KnownCluster(), False, False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last, known = self._stopped.is_set(), self._known
            if known != written and known.identity:
                try:
                    write_durably(self._path, cluster.to_json(known) + '\n')
                    written, failed = known, False
                except OSError as error:
                    if not failed:
                        log.warning('%s: %s: what is seen of etcd is not remembered', self._path, error.strerror)
                    failed = True
            self._stopped.wait(EVERY)
