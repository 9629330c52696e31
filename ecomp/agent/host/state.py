"""The state directory: one ecompute's lasting identity, the lock that keeps it one, and what it remembers.

<state>/uuid   the provider's uuid, made once, so that a restart never orphans a provider
<state>/token  identifies this state directory in etcd, with /computes/<uuid>
<state>/lock   flocked while an ecompute runs here; holds its pid
<state>/instances/<instance>.json  {"version", "request", "record"} of each instance that was begun here, and "failure":
                                   {"stage", "reason"} once it is to end so; or {"version", "ended": ISO time} for a
                                   day after its end
<state>/boot   the machine's boot id, and the instances, one a line, that were here before that boot and have not been
               handled since

A start that is refused changes nothing: what is new is written by keep(). The memory of instances is used only while
etcd cannot be read, because it is behind etcd by what could not be written.

etcd's highest revision changes with everything that happens, so a thread writes it, at most once a second; a kill
loses what was seen in the last second.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ecomp.errors import Conflict, EcompError, StrangeEtcd, UsageError
from ecomp.files import BOOT_ID, boot_id, wait_for_lock, write_durably
from ecomp.model import cluster, keys
from ecomp.model import order as requests
from ecomp.model import record as records
from ecomp.model.cluster import KnownCluster
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import Invalid, Request
from ecomp.model.record import BUILDING, Failure, Record
from ecomp.store.client import Guard, Store

log = logging.getLogger(__name__)

VERSION = 1
SWEPT = 10
"""Of what ended more than a day ago, how much is forgotten at each end: more than comes in."""


@dataclass(frozen=True)
class MemoryEntry:
    """One instance as last written down. `failure` is what it is to end with: some of it may be removed already."""

    request: Request
    record: Record
    failure: Failure | None = None


class Memory:
    """What this compute remembers of its instances, in files. From any thread; `now` gives ISO 8601 times.

    Whoever asks is told of no change before its file is written, and does not wait for that.
    What cannot be written, because the disk is full, is said in the log; what lives is written by put_right() later.
    """

    def __init__(self, state: Path, compute: str, now: Callable[[], str], boot_file: Path = BOOT_ID) -> None:
        self._directory = state / 'instances'
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._boot_file = state / 'boot'
        self._boot_id = boot_id(boot_file)
        self._left: frozenset[str] | None = None  # as written; None: nothing is, of this boot
        self._now = now
        # For what is below alone, never while a file is written: a disk may take seconds, and it is one instance's.
        self._changed = threading.Condition()
        self._at_work: set[str] = set()
        self._known: dict[str, MemoryEntry] = {}
        # Those whose file could not be written, and those whose file is not understood, a newer ecomp's perhaps.
        self._unwritten: set[str] = set()
        self._left_alone: set[str] = set()
        self._ended: dict[str, str] = {}
        for path in self._directory.glob('*.json'):
            self._load(path, compute)
        self._ended = dict(sorted(self._ended.items(), key=lambda each: each[1]))

    def remember(self, request: Request | None, record: Record, failure: Failure | None = None) -> None:
        """Keep what is known of an instance; None: the request is as it was, nothing is kept without one.

        `failure`: it is to end with this; None: it is not.
        """
        with self._alone_with(record.instance):
            before = self._known.get(record.instance)
            request = request or (before.request if before else None)
            if request is None or request.is_tombstone:
                return
            new = MemoryEntry(request, record, failure)
            if new != before:
                self._keep(new)

    def put_right(self, request: Request, record: Record) -> None:
        """Keep this of an instance that lives, by etcd, if it is not written down, or as one that is being built.

        So it is after a full disk, or where the state directory is an older copy. What was found and left alone stays.
        """
        instance = record.instance
        with self._alone_with(instance):
            known = self._known.get(instance)
            is_right = known is not None and instance not in self._unwritten and known.record.state != BUILDING
            is_to_end = known is not None and known.failure is not None
            if not (is_right or is_to_end or instance in self._left_alone):
                self._keep(MemoryEntry(request, record))

    def ended(self, instance: str) -> None:
        """The instance is gone, or failed: nothing of it is here, and it is not to be made again."""
        with self._alone_with(instance):
            when = self._now()
            self._write(instance, dump({'version': VERSION, 'ended': when}))
            with self._changed:
                self._known.pop(instance, None)
                self._ended.pop(instance, None)  # the oldest are first
                self._ended[instance] = when
        self._sweep()

    def all(self) -> Mapping[str, MemoryEntry]:
        """Everything that has not ended, by instance."""
        with self._changed:
            return dict(self._known)

    def all_ended(self) -> frozenset[str]:
        """What ended here in the last day."""
        with self._changed:
            return frozenset(self._ended)

    def before_reboot(self) -> frozenset[str]:
        """What was here when the machine went down, if it was booted since, and has not been dealt with.

        Which of them ran, their records say: this may be behind etcd.
        """
        try:
            boot, *left = self._boot_file.read_text().split() or ['']
        except FileNotFoundError:
            self.dealt_with_all_but(frozenset())  # the first start here
            return frozenset()
        if boot != self._boot_id:
            return frozenset(self.all())
        self._left = frozenset(left)
        return self._left

    def dealt_with_all_but(self, left: Set[str]) -> None:
        """What ran before the reboot runs again, or its record says why not; these alone are left. OSError."""
        if left != self._left:
            write_durably(self._boot_file, '\n'.join((self._boot_id, *sorted(left))) + '\n')
            self._left = frozenset(left)

    def _load(self, path: Path, compute: str) -> None:
        try:
            data = load_object(path.read_bytes())
            if not keys.is_uuid(path.stem) or data.get('version') != VERSION:
                raise ValueError(f'version {data.get("version")!r}')
            if 'ended' in data:
                self._ended[path.stem] = str(data['ended'])
                return
            key = keys.request(compute, path.stem)
            request = requests.parse_request(compute, key, dump(data['request']).encode())
            if isinstance(request, Invalid):
                raise ValueError(request.reason)
            record = records.from_json(dump(data['record']).encode())
            failure = data.get('failure')
            failed = Failure(str(failure['stage']), str(failure['reason']), '') if failure else None
            self._known[path.stem] = MemoryEntry(request, record, failed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._left_alone.add(path.stem)
            log.warning('%s: not a memory of ours, and left alone: %s', path, error)

    @contextmanager
    def _alone_with(self, instance: str) -> Iterator[None]:
        """Let nobody else change what is kept of the instance meanwhile: its file holds what was said of it last."""
        with self._changed:
            self._changed.wait_for(lambda: instance not in self._at_work)
            self._at_work.add(instance)
        try:
            yield
        finally:
            with self._changed:
                self._at_work.remove(instance)
                self._changed.notify_all()

    def _keep(self, entry: MemoryEntry) -> None:
        record, failure = entry.record, entry.failure
        known = {'version': VERSION, 'request': json.loads(requests.to_json(entry.request))}
        known['record'] = records.to_dict(record)
        if failure:
            known['failure'] = {'stage': failure.stage, 'reason': failure.reason}
        self._write(record.instance, dump(known))
        with self._changed:
            self._ended.pop(record.instance, None)  # a uuid used again: the file says that it lives
            self._known[record.instance] = entry

    def _write(self, instance: str, text: str) -> None:
        try:
            write_durably(self._directory / f'{instance}.json', text + '\n')
        except OSError as error:
            if instance not in self._unwritten:
                log.warning('%s: %s: what runs here is not remembered', self._directory, error.strerror)
            self._unwritten.add(instance)
        else:
            self._unwritten.discard(instance)

    def _sweep(self) -> None:
        limit = datetime.fromisoformat(self._now()) - timedelta(seconds=records.KEPT[records.GONE])
        with self._changed:
            oldest = list(itertools.islice(self._ended.items(), SWEPT))
        # Oldest first: mostly one look is enough.
        for instance, when in oldest:
            if datetime.fromisoformat(when) >= limit:
                return
            with self._alone_with(instance):
                with self._changed:
                    if self._ended.get(instance) != when:
                        continue  # its uuid was used again meanwhile: the file says that it lives
                    del self._ended[instance]
                with suppress(OSError):  # the next start reads it, and tries again
                    (self._directory / f'{instance}.json').unlink(missing_ok=True)


PATIENCE = 2.0
"""Seconds in which the lock has to be free. One that was killed as it started a program leaves it to that one for the
moment until it runs: fork(2) hands it on, execve(2) closes it. So who starts anew at once is not refused. Those of
ecomp.files that are a process's are not handed on; this one is an earlier version's, too, which may run here."""


class Identity:
    """Who an ecompute lastingly is, by its state directory, which is open and locked.

    Conflict if another ecompute has it, UsageError if it cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            _make(directory)
            self._lock = os.open(directory / 'lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f'state directory {directory}: {error.strerror}: run as root, or set `state:` in compute.yaml'
            ) from error
        if not wait_for_lock(PATIENCE, lambda: fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            holder = os.pread(self._lock, 64, 0).decode(errors='replace').strip()
            os.close(self._lock)
            raise Conflict(
                f'state directory {directory} is used by the ecompute with pid {holder or "unknown"}: '
                'stop it, or set another `state:` and `uuid:`'
            )
        self._new: dict[str, str] = {}
        self._holder = os.pread(self._lock, 64, 0)
        self._say(f'{os.getpid()}\n'.encode())

    def compute_uuid(self, configured: str | None) -> str:
        """The provider's uuid: from compute.yaml, or the one kept here, or a new one."""
        if configured is None:
            return self._lasting('uuid')
        self._new['uuid'] = configured
        return configured

    def token(self) -> str:
        """A secret of this state directory, which a copy of its uuid elsewhere lacks."""
        return self._lasting('token')

    def keep(self) -> None:
        """From now on the next start finds this uuid and this token here. Called once nothing refuses this one."""
        # QEMU runs as another user and has to get through to its disks: x for all, r for nobody else.
        self.directory.chmod(0o711)
        # Of whoever was killed while writing: nobody else is at work in this state directory.
        for part in [*self.directory.glob('*.part'), *self.directory.glob('*/*.part')]:
            with suppress(OSError):
                part.unlink()
        for name, text in self._new.items():
            path = self.directory / name
            if not path.exists() or path.read_text().strip() != text:
                write_durably(path, text + '\n')

    def close(self) -> None:
        """Let the lock go; it says what it said before."""
        self._say(self._holder)
        os.close(self._lock)

    def _say(self, holder: bytes) -> None:
        with suppress(OSError):  # a full disk: who holds it is then not said, and all that matters is locked
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, holder, 0)

    def _lasting(self, name: str) -> str:
        if name in self._new:
            return self._new[name]
        path = self.directory / name
        try:
            text = path.read_text().strip()
        except FileNotFoundError:
            text = self._new[name] = str(uuid.uuid4())
        if not keys.is_uuid(text):
            raise UsageError(f'{path}: holds {text[:60]!r}, not a uuid: put the right one there, or remove the file')
        return text


def _make(directory: Path) -> None:
    """Make it, and what is missing above it, so that any user gets through, whatever the umask is. OSError."""
    # QEMU's user has to, or this start is refused, and each later one too, for it finds the directory as it is.
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        each.chmod(each.stat().st_mode | 0o111)


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
