"""The storage pool `ecompute` with the instances' overlays, and the seeds."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from ecomp.errors import BuildFailed, Conflict, EcompError, Unreachable
from ecomp.files import get_part_path, write_durably
from ecomp.model import keys
from ecomp.model.allocation import GIB
from ecomp.model.guest import GuestSpec
from ecomp.virt import image, xml
from ecomp.virt.connection import Connection, IgnoredErrors, describe_error, is_broken, libvirt, raise_build_failed

SEED_LABEL = 'cidata'


class _InstanceFiles:
    """A directory with at most one file for each instance, `<instance><suffix>`."""

    suffix = ''

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get_path(self, instance: str) -> Path:
        return self.directory / (instance + self.suffix)

    def list_instances(self) -> Set[str]:
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            # Not an empty set: the instances would seem to be removed.
            reason = f'{error.strerror} (its file system may not be mounted)'
            raise Unreachable(f'{self.directory} cannot be read: {reason}') from error
        stems = (name.removesuffix(self.suffix) for name in names if name.endswith(self.suffix))
        return {stem for stem in stems if keys.is_uuid(stem)}


class Seeds(_InstanceFiles):
    suffix = '.iso'

    def create(self, instance: str, files: Mapping[str, bytes]) -> None:
        try:
            # Only root may read it, because user-data may hold secrets: libvirt gives it to QEMU's user at the start.
            write_durably(self.get_path(instance), make_iso(files))
        except OSError as error:
            raise BuildFailed('disk', f'{self.get_path(instance)}: {error.strerror}') from error

    def delete(self, instance: str) -> None:
        for path in (get_part_path(self.get_path(instance)), self.get_path(instance)):
            path.unlink(missing_ok=True)


def make_iso(files: Mapping[str, bytes]) -> bytes:
    """Return an ISO 9660 image of {name: content}, with Rock Ridge (Linux) and Joliet names."""
    import pycdlib  # late: most ecomputes write no seed, and every worker imports this module

    disk = pycdlib.PyCdlib()
    disk.new(interchange_level=3, vol_ident=SEED_LABEL, joliet=3, rock_ridge='1.09')
    for name, content in files.items():
        iso_path = f'/{name.upper().replace("-", "_")}.;1'
        disk.add_fp(BytesIO(content), len(content), iso_path, rr_name=name, joliet_path=f'/{name}')
    image_file = BytesIO()
    disk.write_fp(image_file)
    disk.close()
    return image_file.getvalue()


POOL = 'ecompute'
# Seconds for which libvirt may refuse to refresh the pool; then its error is raised.
REFRESH_TIMEOUT_SECONDS = 20.0
# Seconds for which another worker may be setting up the pool; then libvirt's error is raised.
POOL_SETUP_TIMEOUT_SECONDS = 2.0
# With fewer bytes free, or without a free inode, a file system is full: a guest's disk begins with 200 KiB.
MIN_FREE_BYTES = 64 * 2**20
POOL_SETUP_RACE_ERRORS = libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_OPERATION_FAILED


class Volumes(_InstanceFiles):
    # list_instances() does not use libvirt's list of the pool: that is a cache, and refreshing it opens every volume.
    suffix = '.qcow2'

    def __init__(self, connection: Connection, directory: Path) -> None:
        super().__init__(directory)
        self._connection = connection

    def check(self) -> None:
        """Raise Conflict if the storage pool is in another directory."""
        with self._connection.use(f'looking for the storage pool {POOL}') as connection:
            self._find_pool(connection)

    def find_troubles(self) -> Iterator[str]:
        with self._connection.use(f'looking for the storage pool {POOL}') as connection:
            pool = self._find_pool(connection)
            if pool is None or not pool.isActive():
                yield f'storage pool {POOL} is off'
        if problem := self._find_full(MIN_FREE_BYTES)[0]:
            yield problem

    def prepare(self) -> None:
        with self._connection.use(f'preparing the storage pool {POOL}') as connection:
            self._set_up_pool(connection)

    def _set_up_pool(self, connection: libvirt.virConnect) -> None:
        pool = self._find_pool(connection)
        if pool is None:
            pool = connection.storagePoolDefineXML(xml.make_pool_xml(POOL, str(self.directory)))
            pool.build()
        if not pool.isActive():
            pool.create()
        if not pool.autostart():
            pool.setAutostart(True)

    def _find_pool(self, connection: libvirt.virConnect) -> libvirt.virStoragePool | None:
        try:
            pool = connection.storagePoolLookupByName(POOL)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_STORAGE_POOL:
                raise
            return None
        target = xml.parse_pool_target(pool.XMLDesc())
        if os.path.realpath(target) != os.path.realpath(self.directory):
            raise Conflict(
                f'the storage pool {POOL} is in {target}, not {self.directory}: it belongs to another ecompute, '
                f'or `state:` in compute.yaml was changed. Fix: correct `state:`, or, if no ecompute needs the pool, '
                f'`virsh pool-destroy {POOL}; virsh pool-undefine {POOL}`'
            )
        return pool

    def list_missing_bases(self) -> Mapping[str, str]:
        bases = {instance: image.find_backing_file(self.get_path(instance)) for instance in self.list_instances()}
        exists = {base: os.path.exists(base) for base in set(bases.values()) if base}
        return {instance: base for instance, base in bases.items() if base and not exists[base]}

    def list_snapshots(self, instance: str) -> list[Path]:
        """List the external snapshots of the disk: other files in its directory that overlay it."""
        disk, disks = os.path.realpath(self.get_path(instance)), set(map(self.get_path, self.list_instances()))
        snapshots = list[Path]()
        for path in {*self.directory.iterdir()} - disks:
            with suppress(OSError):  # removed concurrently
                if path.is_file() and not path.is_symlink() and disk in image.read_backing_chain(path):
                    snapshots.append(path)
        return snapshots

    def measure_disk_gb(self, instance: str) -> int:
        """Return the size of the disk in GiB, rounded up, or 0 if it is unreadable."""
        with suppress(OSError, struct.error):
            return -(-image.read_base_volume(self.get_path(instance)).virtual_size // GIB)
        return 0

    def create(self, spec: GuestSpec) -> None:
        """Create or replace the overlay, which no running domain may use, or raise BuildFailed."""
        path, base = self.get_path(spec.instance), spec.base
        description = xml.make_volume_xml(path.name, image.determine_capacity(spec), base.path, base.format)
        if not os.path.exists(base.path):
            raise BuildFailed('disk', f'the base volume {base.path} is missing')
        if path.exists():
            self.delete(spec.instance)  # gone even if the next step fails
        with self._connection.use(f'creating the disk of {spec.instance}') as connection:
            try:
                self._run_in_pool(connection, lambda pool: _create(pool, description))
            except libvirt.libvirtError as error:
                if is_broken(error):
                    raise
                with suppress(EcompError):
                    self.delete(spec.instance)
                # qemu-img only reports exit status 1, so the file system is queried.
                raise BuildFailed('disk', ''.join(self._find_full(2**20)) or describe_error(error)) from error

    def grow(self, instance: str, size: int) -> None:
        """Let the overlay of a guest that is off grow to `size` bytes."""
        name = self.get_path(instance).name
        use = self._connection.use(f'resizing the disk of {instance}')
        with use as connection, raise_build_failed('disk'):
            self._run_in_pool(connection, lambda pool: pool.storageVolLookupByName(name).resize(size))

    def delete(self, instance: str) -> None:
        """Remove the instance's overlay, if it has one, even if libvirt does not know it."""
        path = self.get_path(instance)
        with self._connection.use(f'deleting the disk of {instance}') as connection:
            self._run_in_pool(connection, lambda pool: _delete(pool, path))
            if not os.path.lexists(path):
                return
            self._find_pool(connection)
        # The pool is over our directory, and libvirt does not consider this a volume: a link, for example.
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise EcompError(f'{path} cannot be removed: {error.strerror}') from error

    def _run_in_pool(self, connection: libvirt.virConnect, action: Callable[[libvirt.virStoragePool], None]) -> None:
        """Call `action` with the pool, which is set up if it is missing or off."""
        deadline, is_late = time.monotonic() + POOL_SETUP_TIMEOUT_SECONDS, False
        while True:
            try:
                # Checking the pool first would slow down every disk.
                action(connection.storagePoolLookupByName(POOL))
                return
            except libvirt.libvirtError as error:
                missing = error.get_error_code() in (libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_OPERATION_INVALID)
                if not missing or is_late:
                    raise
            is_late = time.monotonic() > deadline
            # Another worker is setting it up: it may have defined the pool, but not started it yet.
            with IgnoredErrors(*(() if is_late else POOL_SETUP_RACE_ERRORS)):
                self._set_up_pool(connection)
            time.sleep(0.05)

    def _find_full(self, min_free_bytes: int) -> tuple[str, str]:
        """Return why the file system holds no more files, and what is free, or two ''."""
        try:
            free = os.statvfs(self.directory)
        except OSError as error:
            return f'{self.directory}: {error.strerror}', ''
        free_bytes = free.f_bavail * free.f_frsize
        if free_bytes >= min_free_bytes and (free.f_favail or not free.f_files):
            return '', ''
        rest = f': {free_bytes // 1024} KiB and {free.f_favail} inodes are free'
        return f'the file system of {self.directory} is full', rest


def _create(pool: libvirt.virStoragePool, description: str) -> None:
    with IgnoredErrors(libvirt.VIR_ERR_STORAGE_VOL_EXIST):
        pool.createXML(description)
        return
    # libvirt remembers a volume whose file was removed outside libvirt.
    _refresh(pool)
    pool.createXML(description)


def _delete(pool: libvirt.virStoragePool, path: Path) -> None:
    for refreshed in (False, True):
        with IgnoredErrors(libvirt.VIR_ERR_NO_STORAGE_VOL):
            pool.storageVolLookupByName(path.name).delete()
            return
        if refreshed or not path.exists():
            return
        # The file exists, but libvirt does not know it: libvirtd was killed while creating the volume.
        _refresh(pool)


def _refresh(pool: libvirt.virStoragePool) -> None:
    deadline = time.monotonic() + REFRESH_TIMEOUT_SECONDS
    while True:
        try:
            pool.refresh()
            return
        except libvirt.libvirtError as error:
            busy = error.get_error_code() == libvirt.VIR_ERR_INTERNAL_ERROR and not is_broken(error)
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.05)
