"""What the metadata server is told of guests: a file for each, 0600, named by MAC. Neither side imports the other."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ecomp.files import watch, write_durably
from ecomp.model.guest import same_mac
from ecomp.model.guest_word import GuestWord, parse_word
from ecomp.model.instance import REASON_LIMIT, Request
from ecomp.model.network import network_config
from ecomp.model.text import printable

log = logging.getLogger(__name__)

VERSION = 1
READY = '.ready'
REFUSED = '.refused'
"""The suffix of the file, named by MAC, in which the metadata server says why it refused a guest."""
BEING_TOLD = '.said'
"""Where the metadata server writes a guest's word, before that is whole; one that is killed leaves it."""
WORD_LIMIT = 32 * 1024
"""Bytes of a guest's word; what is longer cannot be read, and says no more than that the guest is ready."""


class GuestData:
    """What the metadata server is told of guests: files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Never held while a file is written: a disk may take seconds, and it is one instance's.
        self._lock = threading.Lock()
        self._being_told: dict[str, str] = {}
        """Of each MAC whose file is being written, the instance."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, request: Request, macs: Sequence[str], here: Callable[[], Container[str]] = tuple) -> None:
        """Tell the metadata server of an instance. Keys and user-data null: those of mdserver.conf.

        BuildFailed where a MAC is that of another instance that is `here`; what another one has left is overwritten.
        """
        with self._lock:  # two that have one MAC may come at once, so who is here is asked under it
            for mac in macs:
                other = self._being_told.get(mac) or self._whose(mac)
                # Whoever is being told of is here, too.
                if other not in (None, request.instance) and (mac in self._being_told or other in here()):
                    raise same_mac(mac, other)
            self._being_told.update(dict.fromkeys(macs, request.instance))
        try:
            self._write(request, macs)
        finally:
            with self._lock:
                for mac in macs:
                    self._being_told.pop(mac, None)

    def _write(self, request: Request, macs: Sequence[str]) -> None:
        self.off(request.instance)  # a guest that was undone may have said that it is ready
        keys, user_data = request.ssh_keys, request.user_data
        for mac in macs:
            data = {
                'version': VERSION,
                'instance': request.instance,
                'mac': mac,
                'hostname': request.name or f'vm-{request.instance[:8]}',
                'public_keys': None if keys is None else list(keys),
                # What is no UTF-8 (gzip) survives as halves of surrogate pairs, which JSON can say.
                'user_data': None if user_data is None else user_data.decode(errors='surrogateescape'),
                'network_config': network_config(macs),
            }
            write_durably(self.directory / f'{mac}.json', json.dumps(data) + '\n')

    def all(self) -> dict[str, str]:
        """Whose data is there: the instance of each MAC, and of each word that one is ready, by the instance itself.

        A file that is none of ours is passed over.
        """
        words = (path for suffix in (READY, BEING_TOLD) for path in self.directory.glob(f'*{suffix}'))
        found = {path.stem: path.stem for path in words}
        for path in self.directory.glob('*.json'):
            if (instance := self._whose(path.stem)) is not None:
                found[path.stem] = instance
        return found

    def ready(self) -> set[str]:
        """The instances whose cloud-init has said that it is through: the metadata server leaves a file for each."""
        try:
            return {path.stem for path in self.directory.glob(f'*{READY}')}
        except OSError as error:
            # It is seen at the next look; nothing that is planned may wait for it.
            log.debug('%s cannot be read: %s', self.directory, error)
            return set()

    def read_refusals(self) -> dict[str, str]:
        """Return why the metadata server refuses guests, {MAC: reason}."""
        with suppress(OSError):  # one is removed this moment, for it was answered: the next look has the others
            paths = self.directory.glob(f'*{REFUSED}')
            return {path.stem: printable(path.read_text(errors='replace')[:REASON_LIMIT]) for path in paths}
        return {}

    def forget_refusals(self, macs: Iterable[str]) -> None:
        """Remove what the metadata server said of refused guests, by MAC."""
        for mac in macs:
            with suppress(OSError):  # it is tried again at the next look
                (self.directory / f'{mac}{REFUSED}').unlink(missing_ok=True)

    def word(self, instance: str) -> GuestWord:
        """What a guest said when its cloud-init was through. OSError."""
        with self._ready(instance).open('rb') as file:
            return parse_word(file.read(WORD_LIMIT))

    def on_ready(self, notify: Callable[[str], None]) -> Callable[[], None]:
        """From now on notify(reason) when one says so; returns what ends it."""
        try:
            return watch(self.directory, READY, lambda path: notify(f'{path.name} was written'))
        except OSError as error:
            log.warning('%s cannot be watched (%s): a guest is seen ready when next looked at', self.directory, error)
            return lambda: None

    def off(self, instance: str) -> None:
        """Forget that the instance was ready: its guest is off, and is to say so again when it was started."""
        try:
            self._take_back(instance)
        except OSError as error:
            # What is written of a guest that went off does not wait for this; and where the file system is read-only,
            # what is not there cannot be removed either.
            if instance in self.ready():
                told = f'{error.filename}: {error.strerror}'
                log.warning('%s: instance %s will be called ready as soon as it is started again', told, instance)

    def remove(self, instance: str, macs: Sequence[str]) -> None:
        """Forget an instance. Nothing there is success."""
        self.forget_refusals(macs)
        for mac in macs:
            with self._lock:  # else it may be another's, that has the MAC, too, by the time that it is removed
                if (self._being_told.get(mac) or self._whose(mac)) in (None, instance):
                    (self.directory / f'{mac}.json').unlink(missing_ok=True)
        self._take_back(instance)  # last: without the others the metadata server takes its word back

    def _take_back(self, instance: str) -> None:
        """Remove the instance's word. OSError."""
        (self.directory / f'{instance}{BEING_TOLD}').unlink(missing_ok=True)
        self._ready(instance).unlink(missing_ok=True)

    def _whose(self, mac: str) -> str | None:
        """The instance in the MAC's file; None where there is none, or it is none of ours."""
        try:
            return str(json.loads((self.directory / f'{mac}.json').read_bytes())['instance'])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _ready(self, instance: str) -> Path:
        return self.directory / f'{instance}{READY}'
