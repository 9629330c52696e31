"""What a processor's features are called in placement."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import os_traits
import pytest

from ecomp.model.status import BY_OPERATOR, DISABLED
from ecomp.model.traits import CPU, check_trait, cpu_traits
from ecomp.virt import xml

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
    # Of both names.
    assert cpu_traits(['vmx']) == {'HW_CPU_X86_VMX', 'HW_CPU_X86_INTEL_VMX'}
    assert cpu_traits(['svm']) == {'HW_CPU_X86_SVM', 'HW_CPU_X86_AMD_SVM'}


def test_every_trait_is_one_of_os_traits_and_of_one_feature() -> None:
    named = [trait for each in CPU.values() for trait in each]
    assert set(named) <= set(os_traits.get_traits('HW_CPU_X86_'))
    assert len(named) == len(set(named))


@pytest.mark.skipif(not FEATURES.exists(), reason='libvirt is not installed')
def test_every_feature_is_one_that_libvirt_knows() -> None:
    known = {each.get('name') for each in ET.parse(FEATURES).getroot().iter('feature')}
    known |= {each.get('name') for each in ET.parse(FEATURES).getroot().iter('alias')}
    newer = {'amx-bf16', 'amx-int8', 'amx-tile'}
    assert set(CPU) - known <= newer


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
