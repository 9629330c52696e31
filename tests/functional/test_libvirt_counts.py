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
LOCAL_CALLS = ('Free', 'IsAlive', 'GetUUIDString', 'GetName', 'GetLastError', 'GetConnect')


@pytest.fixture
def call_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls to libvirtd by this thread. `process` counts started processes."""
    counts: Counter[str] = Counter()
    here = threading.get_ident()  # the event loop has a thread of its own

    def count_calls(owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                counts[label] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in dir(libvirtmod):
        if name.startswith('vir') and callable(getattr(libvirtmod, name)) and not name.endswith(LOCAL_CALLS):
            count_calls(libvirtmod, name, name.removeprefix('vir'))
    for owner, name in ((os, 'fork'), (os, 'posix_spawn'), (subprocess.Popen, '__init__')):
        count_calls(owner, name, 'process')
    return counts


def test_calls_for_a_disk_a_start_and_an_end(real_libvirt: Libvirt, spec: GuestSpec, call_counts: Counter[str]) -> None:
    def count(action: Callable[[], object]) -> Counter[str]:
        call_counts.clear()
        action()
        return Counter(call_counts)

    lookups = {'DomainLookupByName': 1, 'DomainLookupByUUIDString': 1}
    pool = {'StoragePoolLookupByName': 1}
    assert count(lambda: real_libvirt.create_disk(spec)) == {**pool, 'StorageVolCreateXML': 1}
    assert count(lambda: real_libvirt.start(spec)) == {
        **lookups,
        **{'NWFilterLookupByName': 2, 'DomainDefineXML': 1, 'DomainCreate': 1},
        **{'NetworkLookupByName': 1, 'NetworkGetXMLDesc': 1},  # find out if its network has IPv6 to filter
    }
    assert count(lambda: real_libvirt.destroy(spec.instance, COMPUTE)) == {
        **{'DomainLookupByName': 2, 'DomainLookupByUUIDString': 2, 'DomainGetMetadata': 1, 'DomainIsActive': 1},
        **{'DomainDestroy': 1, 'DomainIsPersistent': 1, 'DomainUndefineFlags': 1},
    }
    assert count(lambda: real_libvirt.delete_disk(spec.instance)) == {
        **lookups,
        **pool,
        **{'StorageVolLookupByName': 1, 'StorageVolDelete': 1},
    }
