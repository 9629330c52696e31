"""Traits by placement's names: those a compute may be given, and those its guests' processor makes true. Pure.

The names are os-traits' (https://docs.openstack.org/os-traits/latest/reference/), the features libvirt's (its
cpu_map/x86_features.xml). Not for eschedule: os_traits takes as long to import as a tenth of a claim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import os_traits

from ecomp.model.status import CUSTOM, STATUS

# Where os-traits has an old name and a new one, both: a query may ask for either.
CPU = {
    '3dnow': (os_traits.HW_CPU_X86_3DNOW,),
    'abm': (os_traits.HW_CPU_X86_ABM,),
    'aes': (os_traits.HW_CPU_X86_AESNI,),
    'amd-no-ssb': (os_traits.HW_CPU_X86_AMD_NO_SSB,),
    'amd-ssbd': (os_traits.HW_CPU_X86_AMD_SSBD,),
    'amx-bf16': (os_traits.HW_CPU_X86_AMXBF16,),
    'amx-int8': (os_traits.HW_CPU_X86_AMXINT8,),
    'amx-tile': (os_traits.HW_CPU_X86_AMXTILE,),
    'avx': (os_traits.HW_CPU_X86_AVX,),
    'avx2': (os_traits.HW_CPU_X86_AVX2,),
    'avx512-vpopcntdq': (os_traits.HW_CPU_X86_AVX512VPOPCNTDQ,),
    'avx512bitalg': (os_traits.HW_CPU_X86_AVX512BITALG,),
    'avx512bw': (os_traits.HW_CPU_X86_AVX512BW,),
    'avx512cd': (os_traits.HW_CPU_X86_AVX512CD,),
    'avx512dq': (os_traits.HW_CPU_X86_AVX512DQ,),
    'avx512er': (os_traits.HW_CPU_X86_AVX512ER,),
    'avx512f': (os_traits.HW_CPU_X86_AVX512F,),
    'avx512ifma': (os_traits.HW_CPU_X86_AVX512IFMA,),
    'avx512pf': (os_traits.HW_CPU_X86_AVX512PF,),
    'avx512vbmi': (os_traits.HW_CPU_X86_AVX512VBMI,),
    'avx512vbmi2': (os_traits.HW_CPU_X86_AVX512VBMI2,),
    'avx512vl': (os_traits.HW_CPU_X86_AVX512VL,),
    'avx512vnni': (os_traits.HW_CPU_X86_AVX512VNNI,),
    'bmi1': (os_traits.HW_CPU_X86_BMI,),
    'bmi2': (os_traits.HW_CPU_X86_BMI2,),
    'f16c': (os_traits.HW_CPU_X86_F16C,),
    'fma': (os_traits.HW_CPU_X86_FMA3,),
    'fma4': (os_traits.HW_CPU_X86_FMA4,),
    'gfni': (os_traits.HW_CPU_X86_AVX512GFNI,),
    'ibpb': (os_traits.HW_CPU_X86_AMD_IBPB,),
    'md-clear': (os_traits.HW_CPU_X86_INTEL_MD_CLEAR,),
    'mmx': (os_traits.HW_CPU_X86_MMX,),
    'mpx': (os_traits.HW_CPU_X86_MPX,),
    'pcid': (os_traits.HW_CPU_X86_INTEL_PCID,),
    'pclmuldq': (os_traits.HW_CPU_X86_CLMUL,),
    'pdpe1gb': (os_traits.HW_CPU_X86_PDPE1GB,),
    'pni': (os_traits.HW_CPU_X86_SSE3,),
    'rtm': (os_traits.HW_CPU_X86_TSX,),
    'sha-ni': (os_traits.HW_CPU_X86_SHA,),
    'spec-ctrl': (os_traits.HW_CPU_X86_INTEL_SPEC_CTRL,),
    'ssbd': (os_traits.HW_CPU_X86_INTEL_SSBD,),
    'sse': (os_traits.HW_CPU_X86_SSE,),
    'sse2': (os_traits.HW_CPU_X86_SSE2,),
    'sse4.1': (os_traits.HW_CPU_X86_SSE41,),
    'sse4.2': (os_traits.HW_CPU_X86_SSE42,),
    'sse4a': (os_traits.HW_CPU_X86_SSE4A,),
    'ssse3': (os_traits.HW_CPU_X86_SSSE3,),
    'stibp': (os_traits.HW_CPU_X86_STIBP,),
    'svm': (os_traits.HW_CPU_X86_SVM, os_traits.HW_CPU_X86_AMD_SVM),
    'tbm': (os_traits.HW_CPU_X86_TBM,),
    'vaes': (os_traits.HW_CPU_X86_AVX512VAES,),
    'virt-ssbd': (os_traits.HW_CPU_X86_AMD_VIRT_SSBD,),
    'vmx': (os_traits.HW_CPU_X86_VMX, os_traits.HW_CPU_X86_INTEL_VMX),
    'vpclmulqdq': (os_traits.HW_CPU_X86_AVX512VPCLMULQDQ,),
    'xop': (os_traits.HW_CPU_X86_XOP,),
}
"""What each feature of a processor is called, by libvirt's name for it. The others have no trait."""


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
