"""ecompute's arguments."""

from __future__ import annotations

import argparse
import re

from ecomp import __version__
from ecomp.arguments import Parser

MOST = 1000
"""Pretended computes in one process: with more it is busy with saying that they live."""


def parser() -> argparse.ArgumentParser:
    """Its parse_args() raises UsageError."""
    made = Parser('ecompute', description='Take requests for this machine from etcd and make them VMs.')
    config = 'in place of compute.yaml in ./, ~/.config/ecomp/ or /etc/ecomp/'
    made.add_argument('--config', metavar='FILE', help=config)
    made.add_argument('--fake', metavar='INVENTORY', help="pretend: 'VCPU:4,DISK_GB:10,MEMORY_MB:512', no libvirt")
    made.add_argument('--count', metavar='N', type=_count, help=f'with --fake: pretend so many, 1 to {MOST}')
    made.add_argument(
        '--accept-new-etcd', action='store_true', help='etcd was wiped, restored or exchanged, and is to be used'
    )
    made.add_argument('--version', action='version', version=f'ecompute {__version__}')
    return made


def _count(text: str) -> int:
    if re.fullmatch('[0-9]{1,6}', text) and 1 <= int(text) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text[:20]!r} is no number from 1 to {MOST}')
