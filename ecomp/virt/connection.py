"""A connection to libvirt that is opened when needed, and again when it broke; libvirt's errors are translated here.

A broken connection never heals, and a new one knows no callbacks. libvirt.org/html/libvirt-libvirt-host.html.

What the user QEMU runs as can get at: directories above the disks (libvirt gives it the disks alone), and KVM.
"""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ecomp.errors import BuildFailed, EcompError, Unreachable, UsageError
from ecomp.model.backoff import Backoff

try:
    import libvirt
except ImportError as error:
    raise UsageError(
        f"libvirt-python is missing: in a clone of ecomp: {sys.executable} -m pip install '.[hypervisor]' "
        '(it needs libvirt-dev, pkg-config and gcc)'
    ) from error

__all__ = ['Connection', 'libvirt', 'reason']

log = logging.getLogger(__name__)

KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
"""Seconds, and how often: a libvirtd that is silent for interval * (count + 1) is gone. Else a call would never end."""
OPEN_TIMEOUT = 20.0
"""Seconds to wait for a connection; then it is Unreachable."""
REOPEN_FIRST, REOPEN_MOST = 0.2, 5.0
"""Seconds between two tries to open a lost connection: the first, and the longest, of the doubled ones after it."""

BROKEN_CODES = frozenset({libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_NO_CONNECT})
BROKEN_DOMAINS = frozenset({libvirt.VIR_FROM_REMOTE, libvirt.VIR_FROM_RPC})


def reason(error: libvirt.libvirtError) -> str:
    """libvirt's message as one line."""
    return ' '.join((error.get_error_message() or str(error)).split())


def is_broken(error: libvirt.libvirtError) -> bool:
    """Whether the connection broke; other errors are libvirtd's answers."""
    return error.get_error_code() in BROKEN_CODES and error.get_error_domain() in BROKEN_DOMAINS


class Ignored:
    """Ends the block at a libvirt error with one of these codes, and does not raise it."""

    def __init__(self, *codes: int) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, libvirt.libvirtError) and error.get_error_code() in self._codes


@contextmanager
def building(stage: str, what: str = '') -> Iterator[None]:
    """Raise libvirt's errors as BuildFailed in this stage; `what` is put before their message.

    Those of a broken connection are raised as they are.
    """
    try:
        yield
    except libvirt.libvirtError as error:
        if is_broken(error):
            raise
        raise BuildFailed(stage, what + reason(error)) from error


class Connection:
    """One process's connection to libvirt at `uri`, shared by its threads.

    Errors: Unreachable when it cannot be opened or breaks (the next use opens a new one).
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._name = f'libvirt {uri}'
        self._lock = threading.Lock()
        self._open: libvirt.virConnect | None = None
        self._opening: Future[libvirt.virConnect] | None = None
        self._notify: Callable[[str], None] | None = None
        self._look: Callable[[str], None] | None = None
        self._registered: tuple[libvirt.virConnect, int, int | None] | None = None
        self._lost = threading.Event()
        self._closed = threading.Event()

    @contextmanager
    def use(self, doing: str) -> Iterator[libvirt.virConnect]:
        """The open connection. libvirt's errors leave the block as Unreachable, if it broke, or as EcompError.

        `doing` is for their messages, 'listing domains' for one.
        """
        connection = self._get()
        try:
            yield connection
        except libvirt.libvirtError as error:
            if is_broken(error):
                self._drop(connection)
                raise Unreachable(f'{self._name} is gone while {doing}: {reason(error)}', self._name) from error
            raise EcompError(f'libvirt: {doing}: {reason(error)}') from error

    def watch(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
        """From now on call notify(reason) when a domain's state changes, or the connection is lost or back.

        Call look(reason), None for nothing, when a network was started or stopped: what was put on its bridge is lost.
        From now on a lost connection is opened again as soon as libvirtd answers, also while nothing uses it.
        """
        first, self._notify, self._look = self._notify is None, notify, look
        with self.use('registering for events') as connection:
            self._register(connection)
        if first:
            threading.Thread(target=self._keep_open, name='libvirt-reopen', daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._lost.set()
        with self._lock:
            connection, self._open = self._open, None
        if connection is not None:
            self._release(connection)
            with suppress(libvirt.libvirtError):
                connection.close()

    def _get(self) -> libvirt.virConnect:
        with self._lock:
            if self._closed.is_set():
                raise EcompError(f'libvirt {self.uri}: the connection was closed by us')
            # isAlive asks nobody: the event loop saw the socket close, or the keepalive fail.
            if self._open is not None and self._open.isAlive():
                return self._open
            if self._open is not None:
                self._release(self._open)
                self._open = None
            opening = self._opening or self._begin_opening()
        # libvirt waits for a frozen daemon for ever: the thread is left to it, the next call waits for the same one.
        try:
            return opening.result(OPEN_TIMEOUT)
        except TimeoutError as error:
            raise Unreachable(f'{self._name} does not answer: is libvirtd overloaded?', self._name) from error
        except libvirt.libvirtError as error:
            raise Unreachable(f'{self._name}: {reason(error)} (is libvirtd running?)', self._name) from error

    def _begin_opening(self) -> Future[libvirt.virConnect]:
        """Have it opened by a thread. With the lock held. Unreachable where none can be started: soon again."""
        opening: Future[libvirt.virConnect] = Future()
        try:
            _run_event_loop()
            threading.Thread(target=self._connect, args=(opening,), name='libvirt-open', daemon=True).start()
        except RuntimeError as error:
            raise Unreachable(f'{self._name}: no thread can be started to open it: {error}', self._name) from error
        self._opening = opening
        return opening

    def _connect(self, result: Future[libvirt.virConnect]) -> None:
        connection = None
        try:
            connection = libvirt.open(self.uri)
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
            connection.registerCloseCallback(self._on_close, None)
            if self._notify is not None:
                self._register(connection)
        except Exception as error:
            # Whatever it is, it belongs to those who wait for the result.
            if connection is not None:
                self._release(connection)
                # Nobody else has it. Not left to the last reference: the error has one, and is in a circle with us.
                with suppress(libvirt.libvirtError):
                    connection.close()
            with self._lock:
                self._opening = None
            result.set_exception(error)
        else:
            with self._lock:
                self._open, self._opening = connection, None
            result.set_result(connection)

    def _drop(self, connection: libvirt.virConnect) -> None:
        with self._lock:
            if self._open is connection:
                self._open = None
        self._release(connection)
        self._lost.set()

    def _register(self, connection: libvirt.virConnect) -> None:
        # Asked by watch, and by the open that watch itself may have caused.
        if self._registered is None or self._registered[0] is not connection:
            lifecycle = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
            number = connection.domainEventRegisterAny(None, lifecycle, self._on_lifecycle, None)
            self._registered = (connection, number, None)  # so that it is taken off, whatever comes
            self._registered = (connection, number, self._register_networks(connection))

    def _register_networks(self, connection: libvirt.virConnect) -> int | None:
        try:
            lifecycle = libvirt.VIR_NETWORK_EVENT_ID_LIFECYCLE
            return int(connection.networkEventRegisterAny(None, lifecycle, self._on_network, None))
        except libvirt.libvirtError as error:
            if is_broken(error):
                raise
            # Without their driver, on a host of bridges.
            log.debug('libvirt tells nothing of networks: %s', reason(error))
            return None

    def _release(self, connection: libvirt.virConnect) -> None:
        """Take our callbacks off: libvirt holds the connection, and its socket, as long as they are on.

        It is not closed here, for another thread may be in a call on it: the last reference does that.
        """
        with suppress(libvirt.libvirtError):
            connection.unregisterCloseCallback()
        if self._registered is not None and self._registered[0] is connection:
            (_, domains, networks), self._registered = self._registered, None
            with suppress(libvirt.libvirtError):
                connection.domainEventDeregisterAny(domains)
            with suppress(libvirt.libvirtError):
                if networks is not None:
                    connection.networkEventDeregisterAny(networks)

    # The callbacks run in the event loop's thread, where a call to libvirt could wait for itself.
    def _on_lifecycle(
        self, _connection: object, domain: libvirt.virDomain, event: int, detail: int, _opaque: object
    ) -> None:
        if self._notify is not None:
            self._notify(f'libvirt: domain {domain.name()}: event {event}.{detail}')

    def _on_network(
        self, _connection: object, network: libvirt.virNetwork, event: int, _detail: int, _opaque: object
    ) -> None:
        if self._look is not None and event in (libvirt.VIR_NETWORK_EVENT_STARTED, libvirt.VIR_NETWORK_EVENT_STOPPED):
            self._look(f'libvirt: network {network.name()} was started or stopped')

    def _on_close(self, _connection: object, why: int, _opaque: object) -> None:
        self._lost.set()
        if self._notify is not None and not self._closed.is_set():
            self._notify(f'libvirt: connection lost (reason {why})')

    def _keep_open(self) -> None:
        while not self._closed.is_set():
            self._lost.wait()
            self._lost.clear()
            backoff = Backoff(REOPEN_FIRST, REOPEN_MOST)
            while not self._closed.is_set():
                try:
                    self._get()
                except EcompError as error:
                    log.debug('%s', error)
                    self._closed.wait(backoff.next())
                else:
                    if self._notify is not None:
                        # Events in the gap are gone: whoever listens must look at everything again.
                        self._notify('libvirt: connection is back')
                    break


@cache
def _run_event_loop() -> None:
    """Start libvirt's event loop once in this process, before its first open; libvirt cannot end one."""
    # libvirt prints every error to stderr by itself; ours are raised.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, name='libvirt-events', daemon=True).start()


ACL = 'system.posix_acl_access'
ACL_USER, ACL_GROUP_OBJ, ACL_GROUP, ACL_MASK = 0x02, 0x04, 0x08, 0x10
ENTER, READ_WRITE = 0o1, 0o6

CPUINFO = Path('/proc/cpuinfo')
KVM = Path('/dev/kvm')
# libvirt then holds its own cache of what QEMU can do for outdated whenever it looks.
UNUSABLE_KVM = (
    'cannot be opened by {name}: every start of a guest, and this one of ecompute, takes up to a minute longer, while '
    'libvirt probes QEMU again. chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
)


@dataclass(frozen=True)
class User:
    """The user QEMU runs as: its name, its number, and the numbers of all its groups."""

    name: str
    uid: int
    groups: frozenset[int]


def user(uid: int, gid: int) -> User:
    """The user of this host with these numbers."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return User(str(uid), uid, frozenset({gid}))
    # libvirt's group for QEMU need not be the user's own: it has both.
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return User(entry.pw_name, uid, frozenset({*groups, gid}))


def check_reachable(directory: Path, qemu: User) -> None:
    """UsageError, with the command that helps, for the first directory on the way that QEMU cannot enter.

    One that is not there is made by ecompute, so that it can.
    """
    if (step := blocked(directory, qemu)) is not None:
        raise UsageError(
            f'QEMU runs as {qemu.name}, who cannot enter {step}, on the way to the disks in {directory}: '
            f'setfacl -m u:{qemu.name}:x {shlex.quote(str(step))} (or chmod o+x, or another `state:`)'
        )


def blocked(directory: Path, qemu: User) -> Path | None:
    """The first directory that is there on the way, and that QEMU cannot enter."""
    real = directory.resolve()
    steps = (*reversed(real.parents), real)
    # os.path's is false, and no error, below what we may not enter.
    return next((step for step in steps if os.path.exists(step) and not can(ENTER, step, qemu)), None)


def can(wanted: int, path: Path, qemu: User) -> bool:
    """Whether QEMU may use an existing file or directory in the `wanted` way, ENTER or READ_WRITE.

    By that file's own mode and ACL; the directories above it are not looked at.
    """
    status = path.stat()
    try:
        acl = os.getxattr(path, ACL)
    except OSError:
        # None set, or a file system without them: the mode alone counts.
        acl = b''
    permissions = granted(status.st_mode, status.st_uid, status.st_gid, acl, qemu)
    return permissions & wanted == wanted


def granted(mode: int, owner: int, group: int, acl: bytes, qemu: User) -> int:
    """The rwx bits a user has on a file with this owner, group, mode and ACL (b'' is none): acl(5)'s algorithm."""
    if qemu.uid == 0:
        return 0o7
    if owner == qemu.uid:
        return mode >> 6 & 0o7
    if not acl:
        return mode >> 3 & 0o7 if group in qemu.groups else mode & 0o7
    # A version number, then (tag, permissions, id) for each entry.
    entries = list(struct.iter_unpack('<HHI', acl[4:]))
    mask = next((permissions for tag, permissions, _ in entries if tag == ACL_MASK), 0o7)
    for tag, permissions, number in entries:
        if tag == ACL_USER and number == qemu.uid:
            return permissions & mask
    by_group = [
        permissions
        for tag, permissions, number in entries
        if (tag == ACL_GROUP and number in qemu.groups) or (tag == ACL_GROUP_OBJ and group in qemu.groups)
    ]
    if by_group:
        # One entry must grant all that is wanted, says acl(5); we want one bit, or two that are given together.
        return max(by_group) & mask
    return mode & 0o7


def is_kvm_closed(qemu: User) -> bool:
    """Whether /dev/kvm is there, and QEMU may not open it."""
    return KVM.exists() and not can(READ_WRITE, KVM, qemu)


def explain_no_kvm(qemu: User, domain_types: Collection[str]) -> str:
    """Why guests cannot have KVM here, in words; '' if they can. libvirt offers `domain_types`.

    /dev/kvm alone proves nothing: it may be there where the CPU cannot do it, and a guest then hangs for ever.
    """
    flags = CPUINFO.read_text(errors='replace').split()
    needed = {
        'the CPU has neither vmx nor svm': 'vmx' in flags or 'svm' in flags,
        '/dev/kvm is not there for QEMU to open': KVM.exists() and not is_kvm_closed(qemu),
        'libvirt does not offer it': 'kvm' in domain_types,
    }
    return '; '.join(what for what, there in needed.items() if not there)


def choose_virt_type(wanted: str, no_kvm: str) -> str:
    """`kvm` or `qemu` for a `wanted` auto, kvm or qemu. UsageError where kvm is wanted and `no_kvm` says why not."""
    if wanted == 'qemu' or (wanted == 'auto' and no_kvm):
        return 'qemu'
    if wanted not in ('auto', 'kvm'):
        raise UsageError(f'virt_type {wanted!r} is not known: auto, kvm or qemu')
    if no_kvm:
        raise UsageError(f'virt_type kvm cannot be had: {no_kvm}. Use virt_type: auto or qemu')
    return 'kvm'
