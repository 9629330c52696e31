"""ecompute's front door: arguments, configuration, signals, exit codes, and `--check`, which changes nothing.

Imports of h2 and libvirt are inside the functions that need them, for every spawned worker imports this module anew.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ecomp import __version__, backends, systemd
from ecomp import log as logs
from ecomp.agent.host import metadata, provider
from ecomp.agent.host.provider import check_names
from ecomp.arguments import Parser
from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model import health, keys
from ecomp.model.allocation import NEEDED
from ecomp.model.health import Ailment, Backends
from ecomp.model.text import printable, printable_lines
from ecomp.placement.client import Placement
from ecomp.yaml_file import path_of_option, told_by

PROXIES = ('http_proxy', 'https_proxy', 'all_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY')


def check(config: ComputeConfig) -> tuple[Backends, list[Ailment]]:
    """How etcd and placement are met, and all that is wrong."""
    found = backends.look(config.etcd, config.placement, config.path, 'compute.yaml')
    return found, [*health.of_backends(found), *health.of_machine(_machine(config, not found.no_placement))]


def refused(config: ComputeConfig, has_placement: bool) -> Iterator[str]:
    """What of the configuration a start would refuse, and reading it does not: names, where placement answers, too."""
    classes = sorted({*NEEDED, *(config.inventory or ())})
    try:
        provider.with_ratios(dict.fromkeys(classes, {}), config.allocation_ratios)
    except UsageError as error:
        yield str(error)
    if not has_placement:
        return
    placement = Placement(config.placement)
    try:
        check_names(placement, config.traits, config.inventory or ())
    except UsageError as error:
        yield str(error)
    except EcompError:
        pass  # it does not answer any more: what a start would wait for is no mistake
    finally:
        placement.close()


def no_images(config: ComputeConfig) -> str:
    """The directory of `images:` where that is none; '' where it is one, or where there are to be none."""
    return '' if config.images is None or os.path.isdir(config.images) else str(config.images)


def _machine(config: ComputeConfig, has_placement: bool) -> health.Machine:
    there, why, no_library = None, '', ''
    try:
        from ecomp.virt.libvirt_host import look
    except UsageError as error:
        no_library = str(error)
    else:
        try:
            there = look(config.state, config.networks)
        except EcompError as error:
            why = str(error)
    return health.Machine(
        state=_state(config.state),
        libvirt=there,
        no_libvirt=why,
        no_library=no_library,
        has_libvirtd=shutil.which('libvirtd', path=f'{os.environ.get("PATH", os.defpath)}:/usr/sbin') is not None,
        configured=config.uuid,
        wanted=config.virt_type,
        metadata=config.metadata,
        proxies=tuple(name for name in PROXIES if os.environ.get(name)),
        image_proxy=config.image_proxy is not None,
        is_taken=metadata.is_taken(),
        refused=tuple(refused(config, has_placement)),
        no_images=no_images(config),
    )


def _state(directory: Path) -> health.StateDirectory:
    owner, kept = None, ''
    try:
        owner = directory.stat().st_uid
        kept = (directory / 'uuid').read_text().strip()
    except (OSError, ValueError):
        pass  # before the first start, or not for us to read, which its owner says
    # os.path's is false, and no error, below what we may not enter.
    nearest = next(each for each in (directory, *directory.absolute().parents) if os.path.exists(each))
    free = shutil.disk_usage(nearest).free
    return health.StateDirectory(str(directory), os.geteuid(), owner, kept, keys.is_uuid(kept), free)


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
    made.add_argument('--version', action='version', version=f'ecompute {__version__}')
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
