"""ecompute's front door: arguments, configuration, signals, exit codes.

Imports of h2 and libvirt are inside the functions that need them, for every spawned worker imports this
module anew.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ecomp import log as logs
from ecomp import read_version, systemd
from ecomp.arguments import Parser
from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model.text import printable, printable_lines
from ecomp.yaml_file import path_of_option, told_by

log = logging.getLogger(__name__)

SERVICE_CONFIG = '/etc/ecomp/compute.yaml'
"""The configuration of the service, whatever directory its unit is printed in."""
MOST = 1000
"""Pretended computes in one process: with more it is busy with saying that they live."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ecompute until a signal ends it; the exit code."""
    logs.hold_descriptors()
    logs.configure()
    config, checking, serves = ComputeConfig(), False, False
    service = systemd.Service.of(os.environ)
    # Until the daemon takes the signals over, either of them unwinds what has been started so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parser().parse_args(argv)
        if options.unit:
            logs.print_utf_8()
            print(unit(options, systemd.program(sys.argv[0], sys.executable, 'ecomp.compute')), end='', flush=True)
            return 0
        checking = options.check
        config = load_compute(path_of_option(options.config))
        if checking:
            return _check(config, options.fake is not None or options.count is not None or options.accept_new_etcd)
        with ExitStack() as at_exit:
            if options.fake is not None:
                config = _pretended(config, parse_inventory(options.fake), options.count, at_exit)
            elif options.count is not None:
                raise UsageError('--count goes with --fake: a machine is one compute')
            from ecomp.agent.process import Process

            serves = True
            fake, accept = options.fake is not None, options.accept_new_etcd
            process = Process(config, fake, options.count, accept, service, at_exit)
            process.register()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    signal.signal(number, lambda *_: process.end_soon())
            process.run()
            log.info('stopping; the guests go on')
    except EcompError as error:
        control = isinstance(error, Unreachable) and error.backend.startswith(('etcd at', 'placement at'))
        told = f' ({printable(told_by("compute.yaml", config.path))})' if control else ''
        _say(f'{error}{told}')
        return error.exit_code
    except OSError as error:
        with suppress(OSError):
            logs.flush()
        if serves or not isinstance(error, BrokenPipeError):  # whoever read us (head, less) has gone
            _say(f'{error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        _say('interrupted: not everything was looked at' if checking else 'stopped while starting')
        return int(checking)  # nothing is known to be well; a daemon ends well by a signal
    return 0


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
    made.add_argument('--version', action='version', version=f'ecompute {read_version()}')
    return made


def unit(options: argparse.Namespace, program: Sequence[str]) -> str:
    """The unit that --unit prints, for ecompute as this `program` runs it. UsageError beside other options."""
    if options.fake is not None or options.count is not None or options.accept_new_etcd or options.check:
        raise UsageError('--unit goes with --config alone')
    config = os.path.abspath(path_of_option(options.config) or SERVICE_CONFIG)
    return systemd.unit('ecompute.service', [*program, '--config', config])


def _check(config: ComputeConfig, mixed: bool) -> int:
    if mixed:
        raise UsageError('--check goes with --config alone')
    from ecomp.agent.checking import check
    from ecomp.model.health import exit_code, lines, summary

    backends, found = check(config)
    for line in lines(found):
        print(printable(line), flush=True)
    _say(summary(backends, found))
    return exit_code(backends, found)


def _count(text: str) -> int:
    if re.fullmatch('[0-9]{1,6}', text) and 1 <= int(text) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text[:20]!r} is no number from 1 to {MOST}')


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal changes nothing of how it ends
        print(f'ecompute: {printable_lines(logs.redact(text))}', file=sys.stderr, flush=True)


def _pretended(
    config: ComputeConfig, totals: Mapping[str, int], count: int | None, at_exit: ExitStack
) -> ComputeConfig:
    """The configuration of a fake: its own inventory, and a throw-away state unless `state:` says otherwise."""
    if config.uuid is not None and (count or 1) > 1:
        raise UsageError(f'--count {count}: `uuid:` in the configuration names one compute: leave it out')
    if config.state == ComputeConfig().state:
        temporary = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='ecompute-fake-'))
        # A throw-away state with a lasting uuid would be the same compute ten times over.
        config = replace(config, state=Path(temporary), uuid=None)
    return replace(config, inventory=totals, networks=ComputeConfig.networks)


if __name__ == '__main__':
    sys.exit(main())
