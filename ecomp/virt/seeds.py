"""The NoCloud disks: what a guest's cloud-init is told, on an ISO 9660 file system labelled `cidata`; `<instance>.iso`.

cloud-init's NoCloud source takes any disk of that label; blkid and the kernel know the file system by what is in it.
The only importer of pycdlib.

Sources: cloud-init's "NoCloud" and DataSourceNoCloud.py; pycdlib's documentation of PyCdlib.new and add_fp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from ecomp.errors import BuildFailed, Unreachable
from ecomp.model import keys

SUFFIX = '.iso'
LABEL = 'cidata'


class Seeds:
    """The files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, instance: str) -> Path:
        return self.directory / (instance + SUFFIX)

    def present(self) -> Set[str]:
        """The instances that have one. Unreachable if that cannot be seen."""
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise Unreachable(f'{self.directory}: {error.strerror}: is its file system mounted?') from error
        stems = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return {stem for stem in stems if keys.is_uuid(stem)}

    def create(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write it, in place of one that is there. No domain may be running on it. BuildFailed('disk', reason)."""
        part = self._part(instance)
        try:
            # Root's alone, for user-data may hold secrets: libvirt gives it to QEMU's user when the guest is started.
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, 'wb') as file:
                file.write(iso(files))
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.path(instance))
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise BuildFailed('disk', f'{self.path(instance)}: {error.strerror}') from error

    def delete(self, instance: str) -> None:
        """Remove it. Nothing there is success."""
        for path in (self._part(instance), self.path(instance)):
            path.unlink(missing_ok=True)

    def _part(self, instance: str) -> Path:
        return self.directory / f'{instance}{SUFFIX}.part'


def iso(files: Mapping[str, bytes]) -> bytes:
    """An ISO 9660 file system of these files, with their names in Rock Ridge, for Linux, and in Joliet, for others."""
    import pycdlib  # late: most ecomputes write none, and each worker imports this module anew

    disk = pycdlib.PyCdlib()
    disk.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge='1.09')
    for name, content in files.items():
        plain = f'/{name.upper().replace("-", "_")}.;1'
        disk.add_fp(BytesIO(content), len(content), plain, rr_name=name, joliet_path=f'/{name}')
    out = BytesIO()
    disk.write_fp(out)
    disk.close()
    return out.getvalue()
