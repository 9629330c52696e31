"""ecompute's entry point: arguments, configuration, signals, exit codes.

h2 and libvirt are imported in the functions that need them, because every spawned worker imports this module again.
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
from ecomp import systemd
from ecomp.arguments import Parser
from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model.text import printable, printable_lines
from ecomp.version import read_version
from ecomp.yaml_file import path_of_option, told_by

log = logging.getLogger(__name__)

# The configuration file of the systemd unit, independent of the directory that --unit runs in.
SERVICE_CONFIG = '/etc/ecomp/compute.yaml'
# Limit of fake computes in one process: more keep it busy with refreshing their presence.
MOST = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run ecompute until a signal stops it, and return the exit code."""
    logs.hold_descriptors()
    logs.configure()
    config, is_checking, is_serving = ComputeConfig(), False, False
    service = systemd.Service.of(os.environ)
    # Until the daemon installs its own handlers, either signal unwinds what has been started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parser().parse_args(argv)
        if options.unit:
            logs.print_utf_8()
            print(unit(options, systemd.program(sys.argv[0], sys.executable, 'ecomp.compute')), end='', flush=True)
            return 0
        is_checking = options.check
        config = load_compute(path_of_option(options.config))
        if is_checking:
            return _check(config, options.fake is not None or options.count is not None or options.accept_new_etcd)
        with ExitStack() as at_exit:
            if options.fake is not None:
                config = _pretended(config, parse_inventory(options.fake), options.count, at_exit)
            elif options.count is not None:
                raise UsageError('--count goes with --fake: a machine is one compute')
            from ecomp.agent.process import Process

            is_serving = True
            is_fake, accept_new_etcd = options.fake is not None, options.accept_new_etcd
            process = Process(config, is_fake, options.count, accept_new_etcd, service, at_exit)
            process.register()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    signal.signal(number, lambda *_: process.end_soon())
            process.run()
            log.info('stopping; the guests go on')
    except EcompError as error:
        backend_failed = isinstance(error, Unreachable) and error.backend.startswith(('etcd at', 'placement at'))
        config_source = f' ({printable(told_by("compute.yaml", config.path))})' if backend_failed else ''
        _say(f'{error}{config_source}')
        return error.exit_code
    except OSError as error:
        with suppress(OSError):
            logs.flush()
        if is_serving or not isinstance(error, BrokenPipeError):  # stdout's reader (head, less) has exited
            _say(f'{error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        _say('interrupted: not everything was looked at' if is_checking else 'stopped while starting')
        return int(is_checking)  # an interrupted check has no result; a signal is a daemon's normal end
    return 0


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line; its parse_args() raises UsageError."""
    about = 'Take requests for this machine from etcd and make them VMs, until a signal. Logs to stderr; needs root.'
    command = Parser('ecompute', description=about)
    config_help = "in place of $ECOMP_CONFIG's, or of compute.yaml in ./, ~/.config/ecomp/ or /etc/ecomp/"
    command.add_argument('--config', metavar='FILE', help=config_help)
    command.add_argument('--fake', metavar='INVENTORY', help="pretend: 'VCPU:4,DISK_GB:10,MEMORY_MB:512', no libvirt")
    command.add_argument('--count', metavar='N', type=_count, help=f'with --fake: pretend so many, 1 to {MOST}')
    accept_help = 'etcd was wiped, restored or exchanged, and is to be used: first publish again what runs here'
    command.add_argument('--accept-new-etcd', action='store_true', help=accept_help)
    check_help = 'only look at this machine, at etcd and at placement: what is wrong, a line each, and what mends it'
    command.add_argument('--check', action='store_true', help=check_help)
    unit_help = 'print the systemd unit that runs it, with /etc/ecomp/compute.yaml or the FILE of --config, and end'
    command.add_argument('--unit', action='store_true', help=unit_help)
    command.add_argument('--version', action='version', version=f'ecompute {read_version()}')
    return command


def unit(options: argparse.Namespace, program: Sequence[str]) -> str:
    """Render the unit for ecompute started as `program`; raise UsageError for other options."""
    if options.fake is not None or options.count is not None or options.accept_new_etcd or options.check:
        raise UsageError('--unit goes with --config alone')
    config = os.path.abspath(path_of_option(options.config) or SERVICE_CONFIG)
    return systemd.unit('ecompute.service', [*program, '--config', config])


def _check(config: ComputeConfig, mixed: bool) -> int:
    if mixed:
        raise UsageError('--check goes with --config alone')
    from ecomp.agent.checking import check
    from ecomp.model.health import exit_code, lines, summary

    backends, findings = check(config)
    for line in lines(findings):
        print(printable(line), flush=True)
    _say(summary(backends, findings))
    return exit_code(backends, findings)


def _count(text: str) -> int:
    if re.fullmatch('[0-9]{1,6}', text) and 1 <= int(text) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text[:20]!r} is no number from 1 to {MOST}')


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal does not change the exit code
        print(f'ecompute: {printable_lines(logs.redact(text))}', file=sys.stderr, flush=True)


def _pretended(
    config: ComputeConfig, totals: Mapping[str, int], count: int | None, at_exit: ExitStack
) -> ComputeConfig:
    """Make the configuration of a fake; raise UsageError for a uuid with `count` above 1."""
    if config.uuid is not None and (count or 1) > 1:
        raise UsageError(f'--count {count}: `uuid:` in the configuration names one compute: leave it out')
    if config.state == ComputeConfig().state:
        temporary = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='ecompute-fake-'))
        # A temporary state with a fixed uuid would make every fake started this way the same compute.
        config = replace(config, state=Path(temporary), uuid=None)
    return replace(config, inventory=totals, networks=ComputeConfig.networks)


if __name__ == '__main__':
    sys.exit(main())
