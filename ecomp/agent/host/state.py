"""The state directory: an ecompute's identity, lock, and memory of instances and of etcd.

<state>/uuid   the provider's uuid, made once, so that a restart never orphans a provider
<state>/token  identifies this state directory in etcd, with /computes/<uuid>
<state>/lock   flocked while an ecompute runs here; holds its pid
<state>/instances/<instance>.json  {"version", "request", "record"} of each instance whose build began here, and
                                   "failure": {"stage", "reason"} once it has failed and is being removed;
                                   {"version", "ended": ISO time} for a day after its end
<state>/boot   the machine's boot id, and the instances, one a line, that were here before that boot and have not been
               handled since
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ecomp.agent.jobs import Loop
from ecomp.errors import Conflict, StrangeEtcd, UsageError
from ecomp.files import BOOT_ID, read_boot_id, wait_for_lock, write_durably
from ecomp.model import keys, states
from ecomp.model import order as requests
from ecomp.model import record as records
from ecomp.model.cluster import ClusterIdentity, KnownCluster
from ecomp.model.json_object import dump, load_object
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.record import Failure, Record
from ecomp.model.states import BUILDING
from ecomp.model.stored import decode, encode
from ecomp.store.client import Guard, Store

log = logging.getLogger(__name__)

VERSION = 1
# How many ends older than a day are forgotten at each new end, so that their number falls.
MAX_SWEPT_PER_END = 10


@dataclass(frozen=True)
class MemoryEntry:
    """An instance as last saved, which is being removed if it has a `failure`."""

    request: Request
    record: Record
    failure: Failure | None = None


class Memory:
    """This compute's memory of its instances, in files (thread-safe).

    A change becomes readable after the write of its file, for which readers do not wait. A write that fails, because
    the disk is full, is logged and does not raise. So etcd's records may be newer, and take precedence.
    """

    def __init__(self, state: Path, compute: str, now: Callable[[], str], boot_id_file: Path = BOOT_ID) -> None:
        self._directory = state / 'instances'
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._boot_file = state / 'boot'
        self._boot_id = read_boot_id(boot_id_file)
        self._unhandled: frozenset[str] | None = None  # as written since this boot; None: not yet
        self._now = now
        # Guards the fields below. Not held while a file is written, which may take seconds and concerns one instance.
        self._condition = threading.Condition()
        self._locked: set[str] = set()
        self._entries: dict[str, MemoryEntry] = {}
        # Instances whose file could not be written, and those whose file is malformed or of a newer ecomp.
        self._unsaved: set[str] = set()
        self._unreadable: set[str] = set()
        self._end_times: dict[str, str] = {}
        for path in self._directory.glob('*.json'):
            self._load(path, compute)
        self._end_times = dict(sorted(self._end_times.items(), key=lambda each: each[1]))

    def remember(self, request: Request | None, record: Record, failure: Failure | None = None) -> None:
        """Save an instance, with a `failure` if it is being removed.

        A `request` of None means the saved one. Tombstones, and instances without a request, are not saved.
        """
        with self._lock_instance(record.instance):
            previous = self._entries.get(record.instance)
            request = request or (previous.request if previous else None)
            if request is None or request.is_tombstone:
                return
            entry = MemoryEntry(request, record, failure)
            if entry != previous:
                self._save(entry)

    def repair(self, request: Request, record: Record) -> None:
        """Save an active or stopped instance whose file is missing, outdated or says `building`."""
        instance = record.instance
        with self._lock_instance(instance):
            entry = self._entries.get(instance)
            is_saved = entry is not None and instance not in self._unsaved and entry.record.state != BUILDING
            is_failing = entry is not None and entry.failure is not None
            if not (is_saved or is_failing or instance in self._unreadable):
                self._save(MemoryEntry(request, record))

    def record_end(self, instance: str) -> None:
        """Save that an instance ended and left nothing here."""
        with self._lock_instance(instance):
            when = self._now()
            self._write(instance, dump({'version': VERSION, 'ended': when}))
            with self._condition:
                self._entries.pop(instance, None)
                self._end_times.pop(instance, None)  # to keep the oldest first
                self._end_times[instance] = when
        self._forget_old_ends()

    def get_entries(self) -> Mapping[str, MemoryEntry]:
        with self._condition:
            return dict(self._entries)

    def get_ended(self) -> frozenset[str]:
        """Return the instances whose end here is remembered, for a day at least."""
        with self._condition:
            return frozenset(self._end_times)

    def load_unhandled(self) -> frozenset[str]:
        """Return the instances from before the last boot that were not handled since."""
        try:
            boot, *unhandled = self._boot_file.read_text().split() or ['']
        except FileNotFoundError:
            self.save_unhandled(frozenset())  # the first start here
            return frozenset()
        if boot != self._boot_id:
            # All remembered ones: records tell which of them ran, because this memory may be older than etcd.
            return frozenset(self.get_entries())
        self._unhandled = frozenset(unhandled)
        return self._unhandled

    def save_unhandled(self, instances: Set[str]) -> None:
        if instances != self._unhandled:
            write_durably(self._boot_file, '\n'.join((self._boot_id, *sorted(instances))) + '\n')
            self._unhandled = frozenset(instances)

    def _load(self, path: Path, compute: str) -> None:
        try:
            data = load_object(path.read_bytes())
            if not keys.is_uuid(path.stem) or data.get('version') != VERSION:
                raise ValueError(f'version {data.get("version")!r}')
            if 'ended' in data:
                self._end_times[path.stem] = str(data['ended'])
                return
            key = keys.request(compute, path.stem)
            request = requests.parse_request(compute, key, dump(data['request']).encode())
            if isinstance(request, InvalidRequest):
                raise ValueError(request.reason)
            record = records.from_json(dump(data['record']).encode())
            failure = data.get('failure')
            failed = Failure(str(failure['stage']), str(failure['reason']), '') if failure else None
            self._entries[path.stem] = MemoryEntry(request, record, failed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._unreadable.add(path.stem)
            log.warning('%s: cannot be read or is malformed, so it is ignored and left as it is: %s', path, error)

    @contextmanager
    def _lock_instance(self, instance: str) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: instance not in self._locked)
            self._locked.add(instance)
        try:
            yield
        finally:
            with self._condition:
                self._locked.remove(instance)
                self._condition.notify_all()

    def _save(self, entry: MemoryEntry) -> None:
        record, failure = entry.record, entry.failure
        data = {'version': VERSION, 'request': json.loads(encode(entry.request)), 'record': json.loads(encode(record))}
        if failure:
            data['failure'] = {'stage': failure.stage, 'reason': failure.reason}
        self._write(record.instance, dump(data))
        with self._condition:
            self._end_times.pop(record.instance, None)  # the uuid was used again
            self._entries[record.instance] = entry

    def _write(self, instance: str, text: str) -> None:
        try:
            write_durably(self._directory / f'{instance}.json', text + '\n')
        except OSError as error:
            if instance not in self._unsaved:
                log.warning('%s: %s: changes of instances are not saved', self._directory, error.strerror)
            self._unsaved.add(instance)
        else:
            self._unsaved.discard(instance)

    def _forget_old_ends(self) -> None:
        limit = datetime.fromisoformat(self._now()) - timedelta(seconds=states.RETENTION_SECONDS[states.GONE])
        with self._condition:
            oldest = list(itertools.islice(self._end_times.items(), MAX_SWEPT_PER_END))
        # Oldest first: usually the first one ends the loop.
        for instance, end_time in oldest:
            if datetime.fromisoformat(end_time) >= limit:
                return
            with self._lock_instance(instance):
                with self._condition:
                    if self._end_times.get(instance) != end_time:
                        continue  # its uuid was used again
                    del self._end_times[instance]
                with suppress(OSError):  # the next start reads the file, and tries again
                    (self._directory / f'{instance}.json').unlink(missing_ok=True)


# How long a start waits for the lock. An ecompute killed while it started a program leaves the lock to that program
# until execve(2) closes what fork(2) passed on; the wait lets an immediate restart succeed. Process locks (as in
# ecomp.files) are not passed on, but an earlier version, which uses this one, may be running here.
LOCK_WAIT_SECONDS = 2.0


class Identity:
    """An ecompute's lasting identity: its state directory, locked until close().

    Raises:
        Conflict: another ecompute has the lock.
        UsageError: the directory or its lock file is unusable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            _make_directory(directory)
            self._lock = os.open(directory / 'lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            fix = 'run as root, or set `state:` in compute.yaml'
            raise UsageError(f'state directory {directory}: {error.strerror}. Fix: {fix}') from error
        if not wait_for_lock(LOCK_WAIT_SECONDS, lambda: fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            holder = os.pread(self._lock, 64, 0).decode(errors='replace').strip()
            os.close(self._lock)
            raise Conflict(
                f'state directory {directory} is used by the ecompute with pid {holder or "unknown"}. '
                'Fix: stop that ecompute, or set another `state:` and another `uuid:` for this one'
            )
        self._unsaved: dict[str, str] = {}
        self._previous_holder = os.pread(self._lock, 64, 0)
        self._write_holder(f'{os.getpid()}\n'.encode())

    def choose_uuid(self, setting: str | None) -> str:
        """Return the setting, else the saved uuid, else a new one, which save() then writes."""
        if setting is None:
            return self._read_or_make('uuid')
        self._unsaved['uuid'] = setting
        return setting

    def choose_token(self) -> str:
        return self._read_or_make('token')

    def save(self) -> None:
        """Save uuid and token, once nothing can refuse this start any more."""
        # QEMU runs as another user and has to traverse the directory to its disks.
        self.directory.chmod(0o711)
        # Left by killed processes; the lock excludes a living writer.
        for partial in [*self.directory.glob('*.part'), *self.directory.glob('*/*.part')]:
            with suppress(OSError):
                partial.unlink()
        # Only this writes uuid and token, so a start that is refused earlier changes neither.
        for name, text in self._unsaved.items():
            path = self.directory / name
            if not path.exists() or path.read_text().strip() != text:
                write_durably(path, text + '\n')

    def close(self) -> None:
        """Release the lock, and restore the pid that the file held before."""
        self._write_holder(self._previous_holder)
        os.close(self._lock)

    def _write_holder(self, holder: bytes) -> None:
        with suppress(OSError):  # the disk is full: the lock holds without the pid
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, holder, 0)

    def _read_or_make(self, name: str) -> str:
        if name in self._unsaved:
            return self._unsaved[name]
        path = self.directory / name
        try:
            text = path.read_text().strip()
        except FileNotFoundError:
            text = self._unsaved[name] = str(uuid.uuid4())
        if not keys.is_uuid(text):
            raise UsageError(f'{path}: contains {text[:60]!r}, not a uuid. Fix: correct it, or remove the file')
        return text


def _make_directory(directory: Path) -> None:
    # QEMU's user must get through, or this start is refused, and so is every later one, which keeps the mode.
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        path.chmod(path.stat().st_mode | 0o111)


# Etcd's revision changes all the time; a kill loses what was seen since the last write.
WRITE_INTERVAL_SECONDS = 1.0


def verify_or_adopt(guard: Guard, store: Store, now: str) -> bool:
    """Return whether etcd is familiar (rule: familiar-etcd). A first one gets /cluster."""
    try:
        if guard.known_cluster.identity:
            store.require_identity()
        else:
            # This writes /cluster if it does not exist.
            store.adopt(encode(ClusterIdentity(str(uuid.uuid4()), now)))
    except StrangeEtcd:
        return False  # not an error: ecompute would be restarted repeatedly, its guests without metadata
    return True


class KnownEtcd:
    """The file with what is known of etcd, which a thread writes between start() and stop()."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / 'etcd.json'
        self._cluster = self._content = KnownCluster()
        self._is_started = self._has_failed = False
        self._loop = Loop('known etcd', self._write)

    def load(self) -> KnownCluster:
        """Read the file, or return an empty KnownCluster if there is none."""
        try:
            with suppress(FileNotFoundError):
                self._cluster = decode(KnownCluster, self._path.read_bytes())
        except ValueError as error:
            cure = 'restore the file, or run `ecompute --accept-new-etcd`'
            raise UsageError(f'{self._path}: is malformed: {error}. Fix: {cure}') from error
        return self._cluster

    def schedule_write(self, known_cluster: KnownCluster) -> None:
        """Have the thread write `known_cluster` within WRITE_INTERVAL_SECONDS."""
        self._cluster = known_cluster
        if self._is_started:
            self._loop.schedule(time.monotonic() + WRITE_INTERVAL_SECONDS)

    def start(self) -> None:
        self._is_started = True
        self._loop.schedule()

    def stop(self) -> None:
        self._loop.join()
        if self._is_started:
            self._write()

    def _write(self) -> float:
        current = self._cluster
        if current != self._content and current.identity:
            try:
                write_durably(self._path, encode(current) + '\n')
                self._content, self._has_failed = current, False
            except OSError as error:
                if not self._has_failed:
                    log.warning('%s: %s: the revision of etcd is not saved', self._path, error.strerror)
                self._has_failed = True
        return math.inf
