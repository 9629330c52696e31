"""Placement's traits: which a compute may have, and which follow from its processor. Pure.

The names are os-traits' (https://docs.openstack.org/os-traits/latest/reference/), the features libvirt's (its
cpu_map/x86_features.xml). Not for eschedule: importing os_traits takes a tenth of the time of a claim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import os_traits

from ecomp.model.status import CUSTOM_PREFIX, STATUS_TRAITS

# Features that os-traits names as libvirt does, in capitals and without - and dots.
_SAME_NAMES = (
    '3dnow abm amx-bf16 amx-int8 amx-tile avx avx2 avx512-vpopcntdq avx512bitalg avx512bw avx512cd avx512dq avx512er '
    'avx512f avx512ifma avx512pf avx512vbmi avx512vbmi2 avx512vl avx512vnni bmi2 f16c fma4 mmx mpx pdpe1gb sse sse2 '
    'sse4.1 sse4.2 sse4a ssse3 stibp tbm xop'
)
# The others, as libvirt's name:os-traits' name. Some have two names, old and new: a query may ask for either.
_OTHER_NAMES = (
    'aes:AESNI amd-no-ssb:AMD_NO_SSB amd-ssbd:AMD_SSBD bmi1:BMI fma:FMA3 gfni:AVX512GFNI ibpb:AMD_IBPB '
    'md-clear:INTEL_MD_CLEAR pcid:INTEL_PCID pclmuldq:CLMUL pni:SSE3 rtm:TSX sha-ni:SHA spec-ctrl:INTEL_SPEC_CTRL '
    'ssbd:INTEL_SSBD svm:SVM,AMD_SVM vmx:VMX,INTEL_VMX vaes:AVX512VAES virt-ssbd:AMD_VIRT_SSBD '
    'vpclmulqdq:AVX512VPCLMULQDQ'
)
_NAMES = {each: each.replace('-', '').replace('.', '').upper() for each in _SAME_NAMES.split()}
_NAMES |= dict(each.split(':') for each in _OTHER_NAMES.split())
# The traits of a processor's feature, by libvirt's name of it. Features that are not listed have no trait.
CPU_TRAITS = {
    each: tuple(getattr(os_traits, f'HW_CPU_X86_{name}') for name in names.split(',')) for each, names in _NAMES.items()
}


def list_cpu_traits(features: Iterable[str]) -> frozenset[str]:
    return frozenset(trait for feature in features for trait in CPU_TRAITS.get(feature, ()))


def check_trait(name: str) -> str:
    """Return a trait of os-traits or CUSTOM_…, or raise ValueError, also for STATUS_TRAITS."""
    if name in STATUS_TRAITS:
        raise ValueError('is not allowed here. Fix: use `eschedule host drain`, which sets it')
    if name.startswith(CUSTOM_PREFIX):
        if not re.fullmatch('[A-Z0-9_]{8,255}', name):
            raise ValueError('must be CUSTOM_ followed by capitals, digits and _, at most 255 characters in total')
    elif name not in os_traits.get_traits():
        raise ValueError('is not in os-traits, and a trait of your own must begin with CUSTOM_')
    return name
