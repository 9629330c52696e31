"""The entry point of ecompute."""

# Spawned workers import this module again, so functions import h2 and libvirt only where needed.
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
from ecomp.errors import EcompError, Unreachable, UsageError, put_before_fix
from ecomp.model.text import make_lines_printable, make_printable
from ecomp.version import read_version
from ecomp.yaml_file import describe_source, parse_config_option

log = logging.getLogger(__name__)

# The configuration file of the systemd unit, independent of the directory that --unit runs in.
SERVICE_CONFIG = '/etc/ecomp/compute.yaml'
MAX_BOOT_SECONDS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run ecompute until a signal, and return the exit code."""
    logs.hold_descriptors()
    logs.configure()
    run = _Run(systemd.Service.from_environment(os.environ))
    # Until the daemon installs its own handlers, either signal unwinds what has been started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run.carry_out(make_parser().parse_args(argv))
    except EcompError as error:
        message = str(error)
        if isinstance(error, Unreachable) and error.backend.startswith(('etcd at', 'placement at')):
            source = make_printable(describe_source('compute.yaml', run.config.path))
            effect = 'no guest is started before it answers'
            message = put_before_fix(message, f' ({source}); {effect}. Try: ecompute --check')
        _print_message(message)
        return error.exit_code
    except OSError as error:
        with suppress(OSError):
            logs.flush_stdout()
        if run.is_serving or not isinstance(error, BrokenPipeError):  # stdout's reader (head, less) has exited
            _print_message(f'{error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        what = f'interrupted: the {run.activity} is incomplete' if run.activity else 'stopped before it was ready'
        _print_message(what)
        return int(bool(run.activity))  # an interrupted check has no result; a signal is a daemon's normal end


class _Run:
    """One run of ecompute, with its `activity` ('' for a daemon) for messages."""

    def __init__(self, service: systemd.Service) -> None:
        self._service = service
        self.config, self.activity, self.is_serving = ComputeConfig(), '', False

    def carry_out(self, options: argparse.Namespace) -> int:
        if options.unit:
            logs.switch_stdout_to_utf8()
            program = systemd.make_command(sys.argv[0], sys.executable, 'ecomp.compute')
            print(render_unit(options, program), end='', flush=True)
            return 0
        self.activity = 'check' if options.check else 'change' if options.close_dhcp else ''
        self.config = load_compute(parse_config_option(options.config))
        if self.activity:
            _require_alone(options, 'check' if options.check else 'close_dhcp')
            return _run_check(self.config) if options.check else _close_dhcp(self.config)
        with ExitStack() as at_exit:
            self._serve(options, at_exit)
        return 0

    def _serve(self, options: argparse.Namespace, at_exit: ExitStack) -> None:
        if options.fake is not None:
            self.config = _make_fake_config(self.config, parse_inventory(options.fake), at_exit)
        elif (options.name, options.boot) != (None, None):
            raise UsageError('--name and --boot need --fake: a real machine has its own name')
        from ecomp.agent.process import ComputeProcess
        from ecomp.virt.fake import Fake

        self.is_serving = True
        fake = None if options.fake is None else Fake(options.name or '', options.boot)
        process = ComputeProcess(self.config, fake, options.accept_new_etcd, self._service, at_exit)
        process.register()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: process.end_soon())
        process.run()
        log.info('stopping; guests keep running')


def make_parser() -> argparse.ArgumentParser:
    about = 'Build and run the requested VMs on this machine until a signal ends ecompute'
    command = Parser('ecompute', description=f'{about}; the VMs keep running after that. Logs to stderr; needs root.')
    default = 'compute.yaml in $ECOMP_CONFIG, else the first in ./, ~/.config/ecomp/ or /etc/ecomp/'
    command.add_argument('--config', metavar='FILE', help=f'configuration file. Default: {default}')
    fake_help = "run without libvirt, with fake guests and this inventory, as in 'VCPU:4,DISK_GB:10,MEMORY_MB:512'"
    command.add_argument('--fake', metavar='INVENTORY', help=fake_help)
    name_help = "with --fake: the fake's host name. Default: that of this machine"
    command.add_argument('--name', metavar='HOST', help=name_help)
    boot = 'with --fake: seconds until a started guest has its address, and as many until it is ready'
    boot_help = f'{boot}. Default: it has its address immediately, and is never ready'
    command.add_argument('--boot', metavar='SECONDS', type=_parse_seconds, help=boot_help)
    accept_help = 'accept an etcd that was wiped, restored or replaced, after writing the instances of this host to it'
    command.add_argument('--accept-new-etcd', action='store_true', help=accept_help)
    check_help = 'only check this machine, etcd and placement: print a line with a fix for each problem, and exit'
    command.add_argument('--check', action='store_true', help=check_help)
    close_help = 'let the libvirt networks in `networks:` give addresses only to guests of ecompute, and exit'
    command.add_argument('--close-dhcp', action='store_true', help=close_help)
    unit = 'print the systemd unit that runs ecompute with --config FILE (default: /etc/ecomp/compute.yaml), and exit'
    command.add_argument('--unit', action='store_true', help=unit)
    command.add_argument('--version', action='version', version=f'ecompute {read_version()}')
    return command


def render_unit(options: argparse.Namespace, program: Sequence[str]) -> str:
    """Render the systemd unit, or raise UsageError for options besides --unit and --config."""
    _require_alone(options, 'unit')
    config = os.path.abspath(parse_config_option(options.config) or SERVICE_CONFIG)
    return systemd.render_unit('ecompute.service', [*program, '--config', config])


def _require_alone(options: argparse.Namespace, name: str) -> None:
    if any(value not in (None, False) for other, value in vars(options).items() if other not in (name, 'config')):
        raise UsageError(f'--{name.replace("_", "-")} accepts only --config')


def _run_check(config: ComputeConfig) -> int:
    from ecomp.agent.checking import probe_machine
    from ecomp.model.finding import get_exit_code

    backends, findings = probe_machine(config)
    for finding in findings:
        print(make_printable(str(finding)), flush=True)
    _print_message(backends.summarize(findings))
    return get_exit_code(findings)


def _close_dhcp(config: ComputeConfig) -> int:
    from ecomp.agent.checking import close_dhcp

    for line in close_dhcp(config):
        print(make_printable(line), flush=True)
    return 0


def _parse_seconds(text: str) -> int:
    if re.fullmatch('[0-9]{1,6}', text) and 1 <= int(text) <= MAX_BOOT_SECONDS:
        return int(text)
    raise argparse.ArgumentTypeError(f'{text[:20]!r} is not a number from 1 to {MAX_BOOT_SECONDS}')


def _print_message(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal does not change the exit code
        print(f'ecompute: {make_lines_printable(logs.redact(text))}', file=sys.stderr, flush=True)


def _make_fake_config(config: ComputeConfig, totals: Mapping[str, int], at_exit: ExitStack) -> ComputeConfig:
    """Return the configuration of a fake, in a temporary directory unless `state` is set."""
    if config.state == ComputeConfig().state:
        temporary = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='ecompute-fake-'))
        # A temporary state with a fixed uuid would make every fake started this way the same compute.
        config = replace(config, state=Path(temporary), uuid=None)
    return replace(config, inventory=totals, networks=ComputeConfig.networks)


if __name__ == '__main__':
    sys.exit(main())
