"""The state directory: an ecompute's identity, lock, and memory of instances and of etcd.

<state>/uuid   the provider's uuid, made once, so that a restart never orphans a provider
<state>/token  identifies this state directory in etcd, with /computes/<uuid>
<state>/lock   flocked while an ecompute runs here; holds its pid
<state>/instances/<instance>.json  {"version", "request", "record"} of each instance whose build began here, and
                                   "failure": {"stage", "reason"} once it has failed and is being removed;
                                   {"version", "ended": ISO time} for a day after its end
<state>/boot   the machine's boot id, and the instances, one a line, that were here before that boot and have not been
               handled since

A start that is refused changes nothing, because save() writes the new uuid and token. The memory of instances may be
older than etcd, if the disk was full, so it is used only while etcd cannot be read.
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
# How many ends older than a day are forgotten at each new end, so that their number falls.
SWEPT = 10


@dataclass(frozen=True)
class MemoryEntry:
    """One instance as last saved; with a `failure` it ends in error, and may be partly removed."""

    request: Request
    record: Record
    failure: Failure | None = None


class Memory:
    """This compute's memory of its instances, in files. Thread-safe.

    A change becomes readable after the write of its file, for which readers do not wait. A write that fails, because
    the disk is full, is logged and does not raise; repair() writes the file of a running instance later.
    """

    def __init__(self, state: Path, compute: str, now: Callable[[], str], boot_file: Path = BOOT_ID) -> None:
        self._directory = state / 'instances'
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._boot_file = state / 'boot'
        self._boot_id = boot_id(boot_file)
        self._left: frozenset[str] | None = None  # as written since this boot; None: not yet
        self._now = now
        # Guards the fields below. Not held while a file is written, which may take seconds and concerns one instance.
        self._changed = threading.Condition()
        self._at_work: set[str] = set()
        self._known: dict[str, MemoryEntry] = {}
        # Instances whose file could not be written, and those whose file is malformed or of a newer ecomp.
        self._unwritten: set[str] = set()
        self._left_alone: set[str] = set()
        self._ended: dict[str, str] = {}
        for path in self._directory.glob('*.json'):
            self._load(path, compute)
        self._ended = dict(sorted(self._ended.items(), key=lambda each: each[1]))

    def remember(self, request: Request | None, record: Record, failure: Failure | None = None) -> None:
        """Save an instance; a `request` of None means the saved one.

        No-op for a tombstone, and for an instance without a request. With a `failure` the instance is being removed;
        None drops an earlier failure.
        """
        with self._alone_with(record.instance):
            previous = self._known.get(record.instance)
            request = request or (previous.request if previous else None)
            if request is None or request.is_tombstone:
                return
            entry = MemoryEntry(request, record, failure)
            if entry != previous:
                self._keep(entry)

    def put_right(self, request: Request, record: Record) -> None:
        """Save an instance that lives by its record, if its file is missing or not current.

        That is so after a full disk, in an older copy of a state directory, and if the entry says `building`. Entries
        with a failure and malformed files stay.
        """
        instance = record.instance
        with self._alone_with(instance):
            entry = self._known.get(instance)
            is_saved = entry is not None and instance not in self._unwritten and entry.record.state != BUILDING
            is_failing = entry is not None and entry.failure is not None
            if not (is_saved or is_failing or instance in self._left_alone):
                self._keep(MemoryEntry(request, record))

    def ended(self, instance: str) -> None:
        """Save that an instance is gone or failed, and that nothing of it is left here."""
        with self._alone_with(instance):
            when = self._now()
            self._write(instance, dump({'version': VERSION, 'ended': when}))
            with self._changed:
                self._known.pop(instance, None)
                self._ended.pop(instance, None)  # to keep the oldest first
                self._ended[instance] = when
        self._sweep()

    def all(self) -> Mapping[str, MemoryEntry]:
        """Return the entries of all instances that have not ended."""
        with self._changed:
            return dict(self._known)

    def all_ended(self) -> frozenset[str]:
        """Return the instances that ended here in the last day."""
        with self._changed:
            return frozenset(self._ended)

    def before_reboot(self) -> frozenset[str]:
        """Return the instances from before the last boot that were not handled since.

        Records tell which of them ran, because this memory may be older than etcd. May raise OSError.
        """
        try:
            boot, *unhandled = self._boot_file.read_text().split() or ['']
        except FileNotFoundError:
            self.dealt_with_all_but(frozenset())  # the first start here
            return frozenset()
        if boot != self._boot_id:
            return frozenset(self.all())
        self._left = frozenset(unhandled)
        return self._left

    def dealt_with_all_but(self, left: Set[str]) -> None:
        """Save the instances that were not handled since the boot; may raise OSError."""
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
        """Exclude other writers of the instance's entry, so that its file holds the last change."""
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
        data = {'version': VERSION, 'request': json.loads(requests.to_json(entry.request))}
        data['record'] = records.to_dict(record)
        if failure:
            data['failure'] = {'stage': failure.stage, 'reason': failure.reason}
        self._write(record.instance, dump(data))
        with self._changed:
            self._ended.pop(record.instance, None)  # the uuid was used again
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
        # Oldest first: usually the first one ends the loop.
        for instance, end_time in oldest:
            if datetime.fromisoformat(end_time) >= limit:
                return
            with self._alone_with(instance):
                with self._changed:
                    if self._ended.get(instance) != end_time:
                        continue  # its uuid was used again
                    del self._ended[instance]
                with suppress(OSError):  # the next start reads the file, and tries again
                    (self._directory / f'{instance}.json').unlink(missing_ok=True)


# How long a start waits for the lock. An ecompute killed while it started a program leaves the lock to that program
# until execve(2) closes what fork(2) passed on; the wait lets an immediate restart succeed. Process locks (as in
# ecomp.files) are not passed on, but an earlier version, which uses this one, may be running here.
PATIENCE = 2.0


class Identity:
    """An ecompute's lasting identity: its state directory, locked until close().

    Raises Conflict if another ecompute has the lock, UsageError if the directory or its lock file is unusable.
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
        """Return the provider's uuid: configured, saved or new; may raise UsageError or OSError."""
        if configured is None:
            return self._lasting('uuid')
        self._new['uuid'] = configured
        return configured

    def token(self) -> str:
        """Return the secret that a copy of the uuid lacks; may raise UsageError or OSError."""
        return self._lasting('token')

    def keep(self) -> None:
        """Save the uuid and token, once nothing can refuse this start; may raise OSError."""
        # QEMU runs as another user and has to traverse the directory to its disks.
        self.directory.chmod(0o711)
        # Left by killed processes; the lock excludes a living writer.
        for partial in [*self.directory.glob('*.part'), *self.directory.glob('*/*.part')]:
            with suppress(OSError):
                partial.unlink()
        for name, text in self._new.items():
            path = self.directory / name
            if not path.exists() or path.read_text().strip() != text:
                write_durably(path, text + '\n')

    def close(self) -> None:
        """Release the lock, and restore the pid that the file held before."""
        self._say(self._holder)
        os.close(self._lock)

    def _say(self, holder: bytes) -> None:
        with suppress(OSError):  # the disk is full: the lock holds without the pid
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
    """Make the directory and its parents traversable for all users; may raise OSError."""
    # QEMU's user must get through, or this start is refused, and so is every later one, which keeps the mode.
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        path.chmod(path.stat().st_mode | 0o111)


# Etcd's revision changes all the time; a kill loses what was seen since the last write.
EVERY = 1.0


def is_familiar(guard: Guard, store: Store, now: str) -> bool:
    """Return whether etcd is the remembered one; adopt a first one (rule 10); its errors pass."""
    try:
        if guard.known.identity:
            store.recognise()
        else:
            store.adopt(cluster.new(str(uuid.uuid4()), now))
    except StrangeEtcd:
        return False  # not an error: ecompute would be restarted repeatedly, its guests without metadata
    return True


class KnownEtcd:
    """The file with what is known of etcd, which a thread writes between start() and stop()."""

    def __init__(self, directory: Path) -> None:
        self._path, self._accepted = directory / 'etcd.json', directory / 'accepted'
        self._first = directory / 'first-seen'
        self._known = KnownCluster()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='known etcd', daemon=True)

    def load(self) -> KnownCluster:
        """Read the file, empty if there is none; UsageError if it is malformed."""
        try:
            self._known = cluster.from_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError as error:
            raise UsageError(f'{self._path}: {error}: restore it, or ecompute --accept-new-etcd') from error
        return self._known

    def accepted(self) -> int:
        """Read the revision at which ecomp 1.1 accepted an etcd; 0: none; UsageError if malformed."""
        return self._number(self._accepted)

    def first_seen(self) -> int:
        """Read etcd's revision when first seen or accepted; 0: not noted; UsageError if malformed."""
        return self._number(self._first)

    def note_first_seen(self, revision: int, has_noted_acceptance: bool) -> None:
        """Save that revision; remove ecomp 1.1's file if etcd has it; may raise EcompError."""
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
        """Have the thread write this soon."""
        self._known = known
        self._changed.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the last write."""
        self._stopped.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        written, has_failed, is_last = KnownCluster(), False, False
        while not is_last:
            self._changed.wait()
            self._changed.clear()
            is_last, current = self._stopped.is_set(), self._known
            if current != written and current.identity:
                try:
                    write_durably(self._path, cluster.to_json(current) + '\n')
                    written, has_failed = current, False
                except OSError as error:
                    if not has_failed:
                        log.warning('%s: %s: what is seen of etcd is not remembered', self._path, error.strerror)
                    has_failed = True
            self._stopped.wait(EVERY)
