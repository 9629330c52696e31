"""ecompute's arguments."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from ecomp import __version__, systemd
from ecomp.arguments import Parser
from ecomp.errors import UsageError
from ecomp.yaml_file import path_of_option

SERVICE_CONFIG = '/etc/ecomp/compute.yaml'
"""The configuration of the service, whatever directory its unit is printed in."""
MOST = 1000
"""Pretended computes in one process: with more it is busy with saying that they live."""


def parser() -> argparse.ArgumentParser:
    """ecompute's command line. parse_args() raises UsageError."""
    what = 'Take requests for this machine from etcd and make them VMs, until a signal. Logs to stderr; needs root.'
    made = Parser('ecompute', description=what)
    config = "in place of $ECOMP_CONFIG's, or of compute.yaml in ./, ~/.config/ecomp/ or /etc/ecomp/"
    made.add_argument('--config', metavar='FILE', help=config)
    made.add_argument('--fake', metavar='INVENTORY', help="pretend: 'VCPU:4,DISK_GB:10,MEMORY_MB:512', no libvirt")
    made.add_argument('--count', metavar='N', type=_count, help=f'with --fake: pretend so many, 1 to {MOST}')
    accept = 'etcd was wiped, restored or exchanged, and is to be used: first publish again what runs here'
    made.add_argument('--accept-new-etcd', action='store_true', help=accept)
    check = 'only look at this machine, at etcd and at placement: what is wrong, a line each, and what mends it'
    made.add_argument('--check', action='store_true', help=check)
    unit = 'print the systemd unit that runs it, with /etc/ecomp/compute.yaml or the FILE of --config, and end'
    made.add_argument('--unit', action='store_true', help=unit)
    made.add_argument('--version', action='version', version=f'ecompute {__version__}')
    return made


def unit(options: argparse.Namespace, program: Sequence[str]) -> str:
    """The unit that --unit prints, for ecompute as this `program` runs it. UsageError beside other options."""
    if options.fake is not None or options.count is not None or options.accept_new_etcd or options.check:
        raise UsageError('--unit goes with --config alone')
    config = os.path.abspath(path_of_option(options.config) or SERVICE_CONFIG)
    return systemd.unit('ecompute.service', [*program, '--config', config])


def _count(text: str) -> int:
    if re.fullmatch('[0-9]{1,6}', text) and 1 <= int(text) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text[:20]!r} is no number from 1 to {MOST}')
