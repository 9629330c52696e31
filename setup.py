"""How ecomp is installed, as etcd-compute.

`pip install .`, and `.[hypervisor]`, `.[lab]`, `.[test]` for what a machine does besides.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

TOP = Path(__file__).resolve().parent

# Read, not imported: the package's own requirements are not there yet.
VERSION = re.search(r"^__version__ = '([^']+)'$", (TOP / 'ecomp/__init__.py').read_text(encoding='utf-8'), re.MULTILINE)
README = TOP / 'README.md'

# Not in the tree: after a `sudo pip install .` it would be root's, and nobody else could install from that clone; and
# modules that are removed from the tree would be in all later wheels.
WORK = tempfile.mkdtemp(prefix='ecomp-build-')
atexit.register(shutil.rmtree, WORK, ignore_errors=True)

REQUIRES = [
    'h2>=4.3',  # etcd, without gRPC, which is slow to load and large; 4.3 closes CVE-2025-57804
    'psutil>=5.9',
    'PyYAML>=6.0.1',
    'prometheus_client>=0.16',  # of `eschedule top -f prometheus`, and of ecompute with `metrics:`; loaded only there
    'os-traits>=3.9',  # the names of traits, which placement takes from there too
    'bottle>=0.13',  # of mdserver
    'waitress>=3.0.1',  # of mdserver, and of `eschedule ui`
]

HYPERVISOR = [
    'libvirt-python>=9.0',  # from source: needs libvirt-dev, pkg-config and gcc
    'oslo.utils[image-inspection]>=8.0',
    'pycdlib>=1.14',
    # Images come by them; certifi has the authorities. 2.32.4 closes CVE-2024-47081, 2.6 closes CVE-2025-66418.
    'requests>=2.32.4',
    'urllib3>=2.6',
    'certifi',
    'watchdog>=4.0',
]

# etcd by its own protocol: for what tests read back.
ETCD3 = [
    # The last release, of 2020, and we use its generated code more than its own: a newer one would be a surprise.
    'etcd3==0.12.0',
    # What etcd3 generated loads in protobuf 4 and later only with the pure-Python implementation, which
    # tests/kit/gateway.py selects. From 6.33.5 that one has its fixes (CVE-2025-4565, CVE-2026-0994); 8 is not known to
    # keep it.
    'protobuf>=6.33.5,<8',
    'grpcio>=1.65.4,<2',  # 1.65.4 closes CVE-2024-7246
]

LAB = [
    'cryptography>=43',  # elab certs
    'openstack-placement==16.0.0',
    'waitress>=3.0.1',
]

TEST = [
    'build>=1.2',  # makes the wheel as for the index
    'greenlet>=3',  # tests/model switches between its actors with it
    'hypothesis>=6.100',
    'jsonschema>=4.20',  # what -f json prints has its shape
    'mypy>=1.11',
    'pytest>=8.0,<9.2',  # in 9.2, pytest-xdist 3.8 passes over its groups
    'pytest-timeout>=2.3',
    'pytest-xdist>=3.7',  # --no-loadscope-reorder
    'requests>=2.32.4',  # what bench/look.py measures commands by
    'ruff>=0.6',
    'twine>=6.1',  # checks the wheel; before 6.1 it does not know metadata 2.4
    'types-PyYAML',
    'types-psutil',
]

setup(
    # On the index, ecomp is somebody else's project. Commands and imports keep that name.
    name='etcd-compute',
    version=VERSION[1] if VERSION else None,
    description='VMs on your own Linux machines, by placement, etcd and libvirt',
    long_description=README.read_text(encoding='utf-8') if README.exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=[
        *find_packages(include=['ecomp', 'ecomp.*']),
        *find_packages('md_server', include=['mdserver', 'mdserver.*']),
    ],
    package_dir={'mdserver': 'md_server/mdserver'},
    package_data={'ecomp': ['units/*.service', 'cli/help.txt', 'ui/page.html'], 'mdserver': ['*.service']},
    data_files=[
        (f'share/man/man{number}', [str(page.relative_to(TOP)) for page in sorted(TOP.glob(f'docs/man/*.{number}'))])
        for number in '158'
    ],
    install_requires=REQUIRES,
    options={'build': {'build_base': WORK}, 'egg_info': {'egg_base': WORK}},
    extras_require={'hypervisor': HYPERVISOR, 'lab': LAB, 'test': [*ETCD3, *TEST]},
    entry_points={
        'console_scripts': [
            'ecompute=ecomp.compute:main',
            'eschedule=ecomp.schedule:run',
            'elab=ecomp.lab.elab:main',
            'mdserver=mdserver.server:main',
        ]
    },
)
