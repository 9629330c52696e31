"""What this compute runs, as the state directory remembers it: for when etcd has forgotten, or the host was rebooted.

<state>/instances/<instance>.json  {"version", "request", "record"} of each instance that was begun here, and "failure":
                                   {"stage", "reason"} once it is to end so; or {"version", "ended": ISO time} for a
                                   day after its end
<state>/boot                       the machine's boot id, and the instances, a line each, that were here before that
                                   boot and have not been dealt with yet

Never asked while etcd can be: it is behind etcd by what could not be written, and is only a memory.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ecomp.files import BOOT_ID, boot_id, write_durably
from ecomp.model import instance as requests
from ecomp.model import keys
from ecomp.model import record as records
from ecomp.model.instance import Invalid, Request
from ecomp.model.json_object import dump, load_object
from ecomp.model.record import BUILDING, Failure, Record

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

    def failure(self, instance: str) -> Failure | None:
        """What the instance was to end with, and has not yet; None where it was not."""
        with self._changed:
            known = self._known.get(instance)
            return known.failure if known else None

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
        record = entry.record
        self._write(record.instance, _to_json(entry))
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


def _to_json(each: MemoryEntry) -> str:
    request, record = json.loads(requests.to_json(each.request)), records.to_dict(each.record)
    failure = {'failure': {'stage': each.failure.stage, 'reason': each.failure.reason}} if each.failure else {}
    return dump({'version': VERSION, 'request': request, 'record': record, **failure})
