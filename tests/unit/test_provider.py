"""A compute's report to placement: its traits, status and inventory."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import os_traits
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.host.provider import Machine, closed, default_cache, inventory, look, with_ratios
from ecomp.agent.host.provider import given as stated
from ecomp.errors import UsageError
from ecomp.model import status
from ecomp.model.allocation import GIB, MIB
from ecomp.model.status import BY_OPERATOR, DISABLED, STATUS, changed, ours_then
from ecomp.model.traits import CPU, check_trait, cpu_traits
from ecomp.virt import xml

# Features of a processor, and their traits in placement.


FEATURES = Path('/usr/share/libvirt/cpu_map/x86_features.xml')

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


def test_features_and_their_traits() -> None:
    assert cpu_traits([]) == frozenset()
    assert cpu_traits(['avx2', 'pni', 'sse4.1', 'cmov', 'no-such']) == {
        'HW_CPU_X86_AVX2',
        'HW_CPU_X86_SSE3',
        'HW_CPU_X86_SSE41',
    }
    # Some features have two traits.
    assert cpu_traits(['vmx']) == {'HW_CPU_X86_VMX', 'HW_CPU_X86_INTEL_VMX'}
    assert cpu_traits(['svm']) == {'HW_CPU_X86_SVM', 'HW_CPU_X86_AMD_SVM'}


def test_every_trait_is_one_of_os_traits_and_of_one_feature() -> None:
    traits = [trait for names in CPU.values() for trait in names]
    assert set(traits) <= set(os_traits.get_traits('HW_CPU_X86_'))
    assert len(traits) == len(set(traits))


@pytest.mark.skipif(not FEATURES.exists(), reason='libvirt is not installed')
def test_every_feature_is_one_that_libvirt_knows() -> None:
    libvirt_names = {element.get('name') for element in ET.parse(FEATURES).getroot().iter('feature')}
    libvirt_names |= {element.get('name') for element in ET.parse(FEATURES).getroot().iter('alias')}
    newer = {'amx-bf16', 'amx-int8', 'amx-tile'}
    assert set(CPU) - libvirt_names <= newer


def test_what_may_be_configured() -> None:
    for name in ('HW_CPU_X86_AVX2', 'STORAGE_DISK_SSD', 'CUSTOM_RACK_7'):
        assert check_trait(name) == name
    for name in ('HW_CPU_X86_AVX3', 'avx2', '', 'CUSTOM_', 'CUSTOM_a', 'CUSTOM_' + 'A' * 249, DISABLED, BY_OPERATOR):
        with pytest.raises(ValueError, match='os-traits|CUSTOM_|eschedule'):
            check_trait(name)


def test_the_processor_a_guest_gets() -> None:
    cpu = xml.Cpu('EPYC', frozenset({'vaes', 'hypervisor'}), frozenset({'sha-ni'}))
    assert xml.guest_cpu(CAPABILITIES) == cpu
    without = CAPABILITIES.replace("'host-model' supported='yes'", "'host-model' supported='no'")
    assert xml.guest_cpu(without) is None
    assert xml.guest_cpu('<domainCapabilities/>') is None


def test_a_processor_as_libvirt_takes_and_gives_it() -> None:
    assert ET.fromstring(xml.cpu_xml('EPYC')).findtext('model') == 'EPYC'
    answer = "<cpu><model>x</model><feature policy='require' name='avx'/><feature policy='disable' name='svm'/></cpu>"
    assert xml.cpu_features(answer) == {'avx'}


LIGHT = """
import sys
import {module}
assert 'os_traits' not in sys.modules, [each for each in sys.modules if 'trait' in each]
"""


@pytest.mark.parametrize(
    'module',
    [
        'ecomp.schedule, ecomp.scheduler.placing.create, ecomp.scheduler.operating.decommission',
        'ecomp.compute, ecomp.agent.instance.pool',
        'ecomp.agent.host.provider',
    ],
)
def test_who_does_not_wait_for_os_traits(module: str) -> None:
    subprocess.run([sys.executable, '-c', LIGHT.format(module=module)], check=True, timeout=60)


# Owners of traits, and the traits that disable a compute.


NAMES = st.frozensets(st.sampled_from('ABCDEF'))


def test_the_name_is_that_of_os_traits() -> None:
    assert os_traits.COMPUTE_STATUS_DISABLED == DISABLED


@given(NAMES, NAMES, NAMES)
def test_what_is_wanted_is_there_and_what_is_others_stays(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """The compute sets `before`, then `now`, then nothing, beside the traits of others."""
    ours = ours_then(theirs, before, frozenset())
    assert not ours & theirs
    traits = changed(theirs, before, ours)
    assert traits == theirs | before
    later = ours_then(traits, now, ours)
    traits = changed(traits, now, ours | later)
    assert traits == theirs | now
    assert changed(traits, frozenset(), later) == theirs


@given(NAMES, NAMES, NAMES)
def test_killed_before_or_after_the_write_nothing_of_ours_is_forgotten(
    theirs: frozenset[str], before: frozenset[str], now: frozenset[str]
) -> None:
    """Old and new traits are noted before the write, so the next start knows both."""
    ours = ours_then(theirs, before, frozenset())
    noted = ours | ours_then(theirs | before, now, ours)
    for traits in (theirs | before, theirs | now):
        assert changed(traits, now, noted) == theirs | now
        assert changed(traits, frozenset(), noted) == theirs


def test_disabled_and_enabled() -> None:
    assert status.disabled({'A'}) == {'A', *STATUS}
    assert status.enabled({'A', *STATUS}, alive=True) == {'A'}
    assert status.enabled({'A', *STATUS}, alive=False) == {'A', DISABLED}
    assert status.enabled({'A', DISABLED}, alive=True) == {'A'}


def test_a_stop_and_a_start() -> None:
    assert status.stopped({'A'}) == {'A', DISABLED}
    assert status.opened({'A', DISABLED}) == {'A'}
    assert status.opened(status.stopped({'A', *STATUS})) == {'A', *STATUS}, 'an operator disabled it'


# The inventory of a machine, and the reserved share of it.


MACHINE = Machine(
    cores=4,
    memory=8 * GIB,
    memory_used=3 * GIB,
    memory_ours=1 * GIB,
    disk=100 * GIB,
    disk_used=40 * GIB,
    disk_ours=10 * GIB,
    disk_cached=2 * GIB,
)


def test_what_others_use_is_reserved_and_what_ours_use_is_not() -> None:
    assert inventory(MACHINE, 5) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'MEMORY_MB': {'total': 8192, 'reserved': 2048},
        'DISK_GB': {'total': 100, 'reserved': 28 + 5},
    }


def test_room_for_images_is_reserved_before_it_is_used_and_beyond_if_more_is() -> None:
    assert inventory(replace(MACHINE, disk_used=38 * GIB, disk_cached=0), 5)['DISK_GB']['reserved'] == 28 + 5
    assert inventory(replace(MACHINE, disk_used=45 * GIB, disk_cached=7 * GIB), 5)['DISK_GB']['reserved'] == 28 + 7
    assert inventory(MACHINE, 1000)['DISK_GB'] == {'total': 100, 'reserved': 100}


def test_a_unit_somebody_uses_a_part_of_cannot_be_given() -> None:
    almost = replace(MACHINE, memory=8 * GIB + MIB - 1, memory_used=2 * GIB + 1, memory_ours=GIB)
    assert inventory(almost, 1)['MEMORY_MB'] == {'total': 8192, 'reserved': 1025}


amounts = st.integers(0, 2**50)


@given(amounts, amounts, amounts)
def test_placement_takes_whatever_a_machine_says(total: int, used: int, ours: int) -> None:
    for entry in inventory(replace(MACHINE, memory=total, memory_used=used, memory_ours=ours), 1).values():
        assert entry['total'] >= 1
        assert 0 <= entry['reserved'] <= entry['total']


def test_what_a_person_states_is_theirs_to_give() -> None:
    assert stated({'VCPU': 4, 'CUSTOM_X': 2}) == {
        'VCPU': {'total': 4, 'reserved': 0},
        'CUSTOM_X': {'total': 2, 'reserved': 0},
    }


def test_a_closed_inventory_has_no_vcpu_left_and_is_otherwise_the_same() -> None:
    before = inventory(MACHINE, 1)
    shut = closed(before)
    assert shut == {**before, 'VCPU': {'total': 4, 'reserved': 4}}
    assert before['VCPU']['reserved'] == 0
    assert closed({'DISK_GB': {'total': 1, 'reserved': 0}}) == {'DISK_GB': {'total': 1, 'reserved': 0}}


def test_ratios() -> None:
    totals = {'VCPU': {'total': 4, 'reserved': 0}, 'DISK_GB': {'total': 10, 'reserved': 1}}
    rated = with_ratios(totals, {'VCPU': 16})
    assert rated == {
        'VCPU': {'total': 4, 'reserved': 0, 'allocation_ratio': 16},
        'DISK_GB': {'total': 10, 'reserved': 1, 'allocation_ratio': 1},
    }
    assert closed(rated)['VCPU'] == {'total': 4, 'reserved': 4, 'allocation_ratio': 16}
    with pytest.raises(UsageError, match='allocation_ratios: there is no VGPU here, only VCPU, DISK_GB'):
        with_ratios(totals, {'VCPU': 16, 'VGPU': 2})


def test_this_machine(tmp_path: Path) -> None:
    overlays = tmp_path / 'images'
    overlays.mkdir()
    (overlays / 'ours.qcow2').write_bytes(b'x' * 10_000)
    (overlays / 'another.qcow2').write_bytes(b'x' * 100_000)
    (overlays / 'base-1.qcow2').write_bytes(b'x' * 200_000)
    (overlays / 'base-2.raw').write_bytes(b'x' * 200_000)
    (overlays / 'base-3.part').write_bytes(b'x' * 200_000)
    machine = look(tmp_path, ['ours'])
    assert machine.cores >= 1
    assert 0 < machine.memory_used < machine.memory
    assert 0 < machine.disk_used < machine.disk
    assert 10_000 <= machine.disk_ours < 100_000
    assert 600_000 <= machine.disk_cached < 700_000
    assert machine.memory_ours == 0
    assert 1 <= default_cache(tmp_path) <= 20
