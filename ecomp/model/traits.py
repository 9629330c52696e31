"""Traits by placement's names: those a compute may be given, and those its guests' processor makes true. Pure.

The names are os-traits' (https://docs.openstack.org/os-traits/latest/reference/), the features libvirt's (its
cpu_map/x86_features.xml). Not for eschedule: os_traits takes as long to import as a tenth of a claim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import os_traits

from ecomp.model.status import CUSTOM, STATUS

_SAME = (
    '3dnow abm amx-bf16 amx-int8 amx-tile avx avx2 avx512-vpopcntdq avx512bitalg avx512bw avx512cd avx512dq avx512er '
    'avx512f avx512ifma avx512pf avx512vbmi avx512vbmi2 avx512vl avx512vnni bmi2 f16c fma4 mmx mpx pdpe1gb sse sse2 '
    'sse4.1 sse4.2 sse4a ssse3 stibp tbm xop'
)
"""The features that os-traits names as libvirt does, in capitals and without - and dots."""
_OTHERWISE = {
    'aes': ('AESNI',),
    'amd-no-ssb': ('AMD_NO_SSB',),
    'amd-ssbd': ('AMD_SSBD',),
    'bmi1': ('BMI',),
    'fma': ('FMA3',),
    'gfni': ('AVX512GFNI',),
    'ibpb': ('AMD_IBPB',),
    'md-clear': ('INTEL_MD_CLEAR',),
    'pcid': ('INTEL_PCID',),
    'pclmuldq': ('CLMUL',),
    'pni': ('SSE3',),
    'rtm': ('TSX',),
    'sha-ni': ('SHA',),
    'spec-ctrl': ('INTEL_SPEC_CTRL',),
    'ssbd': ('INTEL_SSBD',),
    # An old name and a new one: a query may ask for either.
    'svm': ('SVM', 'AMD_SVM'),
    'vmx': ('VMX', 'INTEL_VMX'),
    'vaes': ('AVX512VAES',),
    'virt-ssbd': ('AMD_VIRT_SSBD',),
    'vpclmulqdq': ('AVX512VPCLMULQDQ',),
}
_NAMES = {each: (each.replace('-', '').replace('.', '').upper(),) for each in _SAME.split()} | _OTHERWISE
CPU = {each: tuple(getattr(os_traits, f'HW_CPU_X86_{name}') for name in names) for each, names in _NAMES.items()}
"""The traits of each feature of a processor, by libvirt's name for it. Other features have no trait."""


def cpu_traits(features: Iterable[str]) -> frozenset[str]:
    """The traits of a processor with these features."""
    return frozenset(trait for feature in features for trait in CPU.get(feature, ()))


def check_trait(name: str) -> str:
    """The name as it is; ValueError if no compute may be given that trait."""
    if name in STATUS:
        raise ValueError('is not for configurations: eschedule host disable sets it, and host enable takes it off')
    if name.startswith(CUSTOM):
        if not re.fullmatch('[A-Z0-9_]{8,255}', name):
            raise ValueError('must be CUSTOM_ and then capitals, digits and _, 255 in all at most')
    elif name not in os_traits.get_traits():
        raise ValueError('is none of os-traits, and one of your own begins with CUSTOM_')
    return name
