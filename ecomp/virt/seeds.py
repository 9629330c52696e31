"""The NoCloud disks: what a guest's cloud-init is told, on an ISO 9660 file system labelled `cidata`; `<instance>.iso`.

cloud-init's NoCloud source takes any disk of that label; blkid and the kernel know the file system by what is in it.
The only importer of pycdlib.

Sources: cloud-init's "NoCloud" and DataSourceNoCloud.py; pycdlib's documentation of PyCdlib.new and add_fp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from io import BytesIO
from pathlib import Path

from ecomp.errors import BuildFailed, Unreachable
from ecomp.files import part_of, write_durably
from ecomp.model import keys

SUFFIX = '.iso'
LABEL = 'cidata'


class Seeds:
    """The NoCloud disks in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, instance: str) -> Path:
        return self.directory / (instance + SUFFIX)

    def present(self) -> Set[str]:
        """The instances that have a NoCloud disk. Unreachable if the directory cannot be read."""
        return instances_in(self.directory, SUFFIX)

    def create(self, instance: str, files: Mapping[str, bytes]) -> None:
        """Write the instance's NoCloud disk anew. No domain may be running on it. BuildFailed('disk', reason)."""
        try:
            # Root's alone, for user-data may hold secrets: libvirt gives it to QEMU's user when the guest is started.
            write_durably(self.path(instance), iso(files))
        except OSError as error:
            raise BuildFailed('disk', f'{self.path(instance)}: {error.strerror}') from error

    def delete(self, instance: str) -> None:
        """Remove the instance's NoCloud disk, if it has one."""
        for path in (part_of(self.path(instance)), self.path(instance)):
            path.unlink(missing_ok=True)


def instances_in(directory: Path, suffix: str) -> Set[str]:
    """The uuids that with this suffix are names of files in the directory.

    Unreachable if it cannot be read: nothing may be taken for gone because of that.
    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise Unreachable(f'{directory}: {error.strerror}: is its file system mounted?') from error
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return {stem for stem in stems if keys.is_uuid(stem)}


def iso(files: Mapping[str, bytes]) -> bytes:
    """An ISO 9660 file system with these files, {name: content}, named in Rock Ridge, for Linux, and in Joliet."""
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
