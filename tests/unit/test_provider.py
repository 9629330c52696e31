"""A compute's report to placement: its traits, status and inventory."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import os_traits
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.compute import Compute
from ecomp.agent.host.provider import (
    MachineUsage,
    PlacementInventory,
    add_ratios,
    choose_cache_gib,
    make_inventory,
    measure_machine,
    reserve_all_vcpus,
    settle_reserved,
)
from ecomp.agent.host.provider import make_fixed_inventory as stated
from ecomp.errors import Unreachable, UsageError
from ecomp.model import status
from ecomp.model.allocation import GIB, MIB
from ecomp.model.foreign import ForeignGuest
from ecomp.model.status import ADOPTING, DISABLED, STATUS_TRAITS, find_managed_names, merge_names
from ecomp.model.traits import CPU_TRAITS, list_cpu_traits
from ecomp.virt import xml

FEATURES = Path('/usr/share/libvirt/cpu_map/x86_features.xml')

COMPUTE = 'c0000000-0000-4000-8000-000000000001'

CAPABILITIES = """<domainCapabilities><cpu>
  <mode name='host-passthrough' supported='yes'/>
  <mode name='host-model' supported='yes'>
    <model fallback='forbid'>EPYC</model>
    <vendor>AMD</vendor>
    <feature policy='require' name='vaes'/>
    <feature policy='require' name='hypervisor'/>
    <feature policy='disable' name='sha-ni'/>
  </mode>
  <mode name='custom' supported='yes'><model usable='yes'>qemu64</model></mode>
</cpu></domainCapabilities>"""


def test_cpu_traits() -> None:
    assert list_cpu_traits([]) == frozenset()
    assert list_cpu_traits(['avx2', 'pni', 'sse4.1', 'cmov', 'no-such']) == {
        'HW_CPU_X86_AVX2',
        'HW_CPU_X86_SSE3',
        'HW_CPU_X86_SSE41',
    }
    # Some features have two traits.
    assert list_cpu_traits(['vmx']) == {'HW_CPU_X86_VMX', 'HW_CPU_X86_INTEL_VMX'}
    assert list_cpu_traits(['svm']) == {'HW_CPU_X86_SVM', 'HW_CPU_X86_AMD_SVM'}


def test_every_trait_is_in_os_traits_and_has_one_feature() -> None:
    traits = [trait for names in CPU_TRAITS.values() for trait in names]
    assert set(traits) <= set(os_traits.get_traits('HW_CPU_X86_'))
    assert len(traits) == len(set(traits))


@pytest.mark.skipif(not FEATURES.exists(), reason='libvirt is not installed')
def test_every_feature_is_known_to_libvirt() -> None:
    libvirt_names = {element.get('name') for element in ET.parse(FEATURES).getroot().iter('feature')}
    libvirt_names |= {element.get('name') for element in ET.parse(FEATURES).getroot().iter('alias')}
    newer = {'amx-bf16', 'amx-int8', 'amx-tile'}
    assert set(CPU_TRAITS) - libvirt_names <= newer


def test_guest_cpu() -> None:
    cpu = xml.Cpu('EPYC', frozenset({'vaes', 'hypervisor'}), frozenset({'sha-ni'}))
    assert xml.parse_guest_cpu(CAPABILITIES) == cpu
    without = CAPABILITIES.replace("'host-model' supported='yes'", "'host-model' supported='no'")
    assert xml.parse_guest_cpu(without) is None
    assert xml.parse_guest_cpu('<domainCapabilities/>') is None


def test_cpu_xml_and_cpu_features() -> None:
    assert ET.fromstring(xml.make_cpu_xml('EPYC')).findtext('model') == 'EPYC'
    answer = "<cpu><model>x</model><feature policy='require' name='avx'/><feature policy='disable' name='svm'/></cpu>"
    assert xml.parse_cpu_features(answer) == {'avx'}


IMPORT_SCRIPT = """
import sys
import {module}
assert 'os_traits' not in sys.modules, [each for each in sys.modules if 'trait' in each]
"""


@pytest.mark.parametrize(
    'module',
    [
        'ecomp.schedule, ecomp.scheduler.placing.create, ecomp.scheduler.operations.forget',
        'ecomp.compute, ecomp.agent.instance.pool',
        'ecomp.agent.host.provider',
    ],
)
def test_module_does_not_import_os_traits(module: str) -> None:
    subprocess.run([sys.executable, '-c', IMPORT_SCRIPT.format(module=module)], check=True, timeout=60)


# Owners of traits, and the traits that disable a compute.


NAMES = st.frozensets(st.sampled_from('ABCDEF'))


def test_disabled_is_a_trait_of_os_traits() -> None:
    assert os_traits.COMPUTE_STATUS_DISABLED == DISABLED


@given(NAMES, NAMES, NAMES)
def test_own_traits_are_set_and_others_stay(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """The compute sets `before`, then `now`, then nothing, beside the traits of others."""
    ours = find_managed_names(theirs, before, frozenset())
    assert not ours & theirs
    traits = merge_names(theirs, before, ours)
    assert traits == theirs | before
    later = find_managed_names(traits, now, ours)
    traits = merge_names(traits, now, ours | later)
    assert traits == theirs | now
    assert merge_names(traits, frozenset(), later) == theirs


@given(NAMES, NAMES, NAMES)
def test_kill_around_the_write_loses_no_own_trait(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """Old and new traits are noted before the write, so the next start knows both."""
    ours = find_managed_names(theirs, before, frozenset())
    noted = ours | find_managed_names(theirs | before, now, ours)
    for traits in (theirs | before, theirs | now):
        assert merge_names(traits, now, noted) == theirs | now
        assert merge_names(traits, frozenset(), noted) == theirs


def test_disabled_and_enabled() -> None:
    disabled = {'A', *STATUS_TRAITS} - {ADOPTING}
    assert status.apply_disable({'A'}) == status.apply_disable({'A', *STATUS_TRAITS}) == disabled
    assert status.apply_enable({'A', *STATUS_TRAITS}, is_alive=True) == {'A'}
    assert status.apply_enable({'A', *STATUS_TRAITS}, is_alive=False) == {'A', DISABLED}
    assert status.apply_enable({'A', DISABLED}, is_alive=True) == {'A'}


def test_vcpus_of_running_guests_of_others_are_reserved_but_never_all() -> None:
    cores = MACHINE.cores
    assert [make_inventory(MACHINE, 5, vcpus)['VCPU']['reserved'] for vcpus in (0, 1, cores, 99)] == [
        0, 1, cores - 1, cores - 1
    ]  # fmt: skip


def test_small_changes_of_what_others_use_are_not_written() -> None:
    before = add_ratios({'MEMORY_MB': {'total': 1000, 'reserved': 100}, 'VCPU': {'total': 4, 'reserved': 0}}, {})

    def settle(memory: int, is_exact: bool = False) -> float:
        measured = add_ratios({'MEMORY_MB': {'total': 1000, 'reserved': memory}, 'VCPU': before['VCPU']}, {})
        settled = settle_reserved(before, measured, is_exact)
        assert {**settled, 'MEMORY_MB': measured['MEMORY_MB']} == measured
        return settled['MEMORY_MB']['reserved']

    assert [settle(memory) for memory in (50, 49, 150, 151)] == [100, 49, 100, 151]
    assert settle(99, is_exact=True) == 99


def test_adopted_guest_is_left_out_exactly_once_placement_answers() -> None:
    """What it uses is less than the tolerance, and the first look fails."""

    def measure(*arguments: Any) -> PlacementInventory:
        return add_ratios({'MEMORY_MB': {'total': 1000, 'reserved': 0 if arguments[-1] else 9}}, {})

    compute = cast(Any, Compute.__new__(Compute))
    compute._measure_inventory = measure
    host, provider, store, daemon, presence = (MagicMock() for _ in range(5))
    compute.uuid, compute._requests = COMPUTE, {}
    compute.host, compute._provider, compute.store, compute.daemon = host, provider, store, daemon
    compute._presence, compute._adoptees, compute._inventory = presence, set(), measure(())
    host.hypervisor.list_foreign.return_value = {'a': ForeignGuest('a', 'old', True, adopted_by=COMPUTE)}
    store.get.return_value = None
    provider.update_inventory.side_effect = [Unreachable('no answer. Try: later', 'placement'), None]
    with pytest.raises(Unreachable):
        compute._measure()
    assert not presence.publish.called
    compute._measure()
    assert [call.args[0]['MEMORY_MB']['reserved'] for call in provider.update_inventory.call_args_list] == [0, 0]
    assert presence.publish.called


def test_adoption_enables_only_what_it_disabled() -> None:
    end = partial(status.end_adoption, is_alive=True)
    assert end(status.apply_adoption({'A'})) == {'A'}
    disabled = status.apply_disable({'A'})
    assert end(status.apply_adoption(disabled)) == disabled
    # A kill, then a repetition; or a drain in between.
    assert end(status.apply_adoption(status.apply_adoption({'A'}))) == {'A'}
    drained = status.apply_disable(status.apply_adoption({'A'}))
    assert end(drained) == disabled
    # Its ecompute was stopped in the meantime.
    assert status.end_adoption(status.apply_adoption({'A'}), is_alive=False) == {'A', DISABLED}


def test_a_stop_and_a_start() -> None:
    assert status.apply_stop({'A'}) == {'A', DISABLED}
    assert status.apply_start({'A', DISABLED}) == {'A'}
    assert status.apply_start(status.apply_stop({'A', *STATUS_TRAITS})) == {'A', *STATUS_TRAITS}, (
        'an operator disabled it'
    )


# The inventory of a machine, and the reserved share of it.


MACHINE = MachineUsage(
    cores=4, memory=8 * GIB, memory_used=3 * GIB, memory_guests=1 * GIB, disk=100 * GIB, disk_used=40 * GIB,
    disk_guests=10 * GIB, disk_cached=2 * GIB,
)  # fmt: skip


def test_only_what_others_use_is_reserved() -> None:
    assert make_inventory(MACHINE, 5) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'MEMORY_MB': {'total': 8192, 'reserved': 2048},
        'DISK_GB': {'total': 100, 'reserved': 28 + 5},
    }


def test_image_cache_is_reserved_before_and_beyond_its_use() -> None:
    assert make_inventory(replace(MACHINE, disk_used=38 * GIB, disk_cached=0), 5)['DISK_GB']['reserved'] == 28 + 5
    assert make_inventory(replace(MACHINE, disk_used=45 * GIB, disk_cached=7 * GIB), 5)['DISK_GB']['reserved'] == 28 + 7
    assert make_inventory(MACHINE, 1000)['DISK_GB'] == {'total': 100, 'reserved': 100}


def test_partly_used_unit_is_reserved() -> None:
    almost = replace(MACHINE, memory=8 * GIB + MIB - 1, memory_used=2 * GIB + 1, memory_guests=GIB)
    assert make_inventory(almost, 1)['MEMORY_MB'] == {'total': 8192, 'reserved': 1025}


amounts = st.integers(0, 2**50)


@given(amounts, amounts, amounts)
def test_any_inventory_is_valid_for_placement(total: int, used: int, ours: int) -> None:
    for entry in make_inventory(replace(MACHINE, memory=total, memory_used=used, memory_guests=ours), 1).values():
        assert entry['total'] >= 1
        assert 0 <= entry['reserved'] <= entry['total']


def test_stated_inventory_reserves_nothing() -> None:
    assert stated({'VCPU': 4, 'CUSTOM_X': 2}) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'CUSTOM_X': {'total': 2, 'reserved': 0},
    }


def test_closed_inventory_only_reserves_all_vcpus() -> None:
    before = make_inventory(MACHINE, 1)
    shut = reserve_all_vcpus(before)
    assert shut == {**before, 'VCPU': {'total': 4, 'reserved': 4}}
    assert before['VCPU']['reserved'] == 0
    assert reserve_all_vcpus({'DISK_GB': {'total': 1, 'reserved': 0}}) == {'DISK_GB': {'total': 1, 'reserved': 0}}


def test_allocation_ratios() -> None:
    totals = {'VCPU': {'total': 4, 'reserved': 0}, 'DISK_GB': {'total': 10, 'reserved': 1}}
    rated = add_ratios(totals, {'VCPU': 16})
    assert rated == {
        'VCPU': {'total': 4, 'reserved': 0, 'allocation_ratio': 16},
        'DISK_GB': {'total': 10, 'reserved': 1, 'allocation_ratio': 1},
    }
    assert reserve_all_vcpus(rated)['VCPU'] == {'total': 4, 'reserved': 4, 'allocation_ratio': 16}
    with pytest.raises(UsageError, match='allocation_ratios: the inventory has no VGPU, only VCPU, DISK_GB'):
        add_ratios(totals, {'VCPU': 16, 'VGPU': 2})


def test_measurements_of_this_machine(tmp_path: Path) -> None:
    overlays = tmp_path / 'images'
    overlays.mkdir()
    (overlays / 'ours.qcow2').write_bytes(b'x' * 10_000)
    (overlays / 'another.qcow2').write_bytes(b'x' * 100_000)
    (overlays / 'base-1.qcow2').write_bytes(b'x' * 200_000)
    (overlays / 'base-2.raw').write_bytes(b'x' * 200_000)
    (overlays / 'base-3.part').write_bytes(b'x' * 200_000)
    machine = measure_machine(tmp_path, ['ours'])
    assert machine.cores >= 1
    assert 0 < machine.memory_used < machine.memory
    assert 0 < machine.disk_used < machine.disk
    assert 10_000 <= machine.disk_guests < 100_000
    assert 600_000 <= machine.disk_cached < 700_000
    assert machine.memory_guests == 0
    assert 1 <= choose_cache_gib(tmp_path) <= 20
