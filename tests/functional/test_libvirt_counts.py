"""The exact calls to libvirtd for a guest's start and end. They start no process here.

Change a number together with the change that makes it cheaper or dearer, and give the reason in the commit.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ecomp.model.guest import GuestSpec
from tests.functional.guest import COMPUTE

libvirtmod = pytest.importorskip('libvirtmod', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402

# Calls that libvirt's client answers without libvirtd.
LOCAL = ('Free', 'IsAlive', 'GetUUIDString', 'GetName', 'GetLastError', 'GetConnect')


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls to libvirtd by this thread. `process` counts started processes."""
    counts: Counter[str] = Counter()
    here = threading.get_ident()  # the event loop has a thread of its own

    def counted(of: Any, name: str, said: str) -> None:
        real = getattr(of, name)

        def call(*given: Any, **named: Any) -> Any:
            if threading.get_ident() == here:
                counts[said] += 1
            return real(*given, **named)

        monkeypatch.setattr(of, name, call)

    for name in dir(libvirtmod):
        if name.startswith('vir') and callable(getattr(libvirtmod, name)) and not name.endswith(LOCAL):
            counted(libvirtmod, name, name.removeprefix('vir'))
    for owner, name in ((os, 'fork'), (os, 'posix_spawn'), (subprocess.Popen, '__init__')):
        counted(owner, name, 'process')
    return counts


def test_a_disk_a_start_and_an_end_ask_this_much(real: Libvirt, spec: GuestSpec, asked: Counter[str]) -> None:
    def taken(do: Callable[[], object]) -> Counter[str]:
        asked.clear()
        do()
        return Counter(asked)

    lookups = {'DomainLookupByName': 1, 'DomainLookupByUUIDString': 1}
    pool = {'StoragePoolLookupByName': 1}
    assert taken(lambda: real.create_disk(spec)) == {**pool, 'StorageVolCreateXML': 1}
    assert taken(lambda: real.start(spec)) == {
        **lookups,
        **{'NWFilterLookupByName': 2, 'DomainDefineXML': 1, 'DomainCreate': 1},
        **{'NetworkLookupByName': 1, 'NetworkGetXMLDesc': 1},  # find out if its network has IPv6 to filter
    }
    assert taken(lambda: real.destroy(spec.instance, COMPUTE)) == {
        **{'DomainLookupByName': 2, 'DomainLookupByUUIDString': 2, 'DomainGetMetadata': 1, 'DomainIsActive': 1},
        **{'DomainDestroy': 1, 'DomainIsPersistent': 1, 'DomainUndefineFlags': 1},
    }
    assert taken(lambda: real.delete_disk(spec.instance)) == {
        **lookups,
        **pool,
        **{'StorageVolLookupByName': 1, 'StorageVolDelete': 1},
    }
