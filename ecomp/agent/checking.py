"""Find faults of this machine, etcd and placement (`ecompute --check`), and close DHCP."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from ecomp import backends
from ecomp.agent.host import metadata, provider
from ecomp.agent.host.provider import require_names
from ecomp.agent.host.state import Identity
from ecomp.compute_conf import ComputeConfig, explain_unsafe_metrics
from ecomp.errors import Conflict, EcompError, Problem, UsageError, explain_error
from ecomp.files import get_search_path
from ecomp.model import health
from ecomp.model.allocation import REQUIRED_CLASSES
from ecomp.model.finding import MACHINE, SERVERS, Finding, run_checks
from ecomp.placement.client import Placement

PROXY_VARIABLES = ('http_proxy', 'https_proxy', 'all_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY')


def probe_machine(config: ComputeConfig) -> tuple[health.Backends, list[Finding]]:
    """Return the state of etcd and placement, and findings about them and this machine."""
    status = backends.probe_backends(config.etcd, config.placement, config.path, 'compute.yaml')
    machine = _read_machine(config, not status.placement_failure)
    findings = [*run_checks(health.CHECKS, SERVERS, status), *run_checks(health.CHECKS, MACHINE, machine)]
    return status, [finding for finding in findings if finding.code not in config.ignore_warnings]


def close_dhcp(config: ComputeConfig) -> Iterator[str]:
    """Close our networks' DHCP to unknown MACs, or raise Conflict if ecompute runs here."""
    from ecomp.virt.connection import Connection
    from ecomp.virt.networks import Networks

    names = dict.fromkeys(name for kind, name in config.networks if kind == 'network')
    with ExitStack() as at_exit:
        networks = Networks(at_exit.enter_context(closing(Connection('qemu:///system'))))
        open_networks = {name: found for name in names if (found := networks.find_open_dhcp(name))}
        if not open_networks:
            yield 'nothing to do: no network in `networks:` has DHCP that serves unknown MACs'
            return
        try:
            at_exit.callback(Identity(config.state).close)
        except Conflict as error:
            problem = f'{error.problem.what}, which may start a guest while a network is restarted'
            raise Conflict(f'{problem}. Fix: systemctl stop ecompute, and repeat the command') from error
        for name, found in open_networks.items():
            yield networks.close_dhcp(name, found)


def find_refusals(config: ComputeConfig, has_placement: bool) -> list[Problem]:
    """List why a start would fail: wrong ratios, or traits and classes that placement lacks."""
    classes = sorted({*REQUIRED_CLASSES, *(config.inventory or ())})
    found = [explain_error(partial(provider.add_ratios, dict.fromkeys(classes, {}), config.allocation_ratios))]
    # A start waits for a placement that does not answer, so the configuration is not wrong then.
    with closing(Placement(config.placement)) as placement, suppress(EcompError):
        if has_placement:
            found.append(explain_error(partial(require_names, placement, config.traits, config.inventory or ())))
    return [problem for problem in found if problem]


def explain_missing_images(config: ComputeConfig) -> Problem | None:
    if config.images is None or os.path.isdir(config.images):
        return None
    what = f'`images:` {config.images} is not a directory: each file:// image fails'
    return Problem(what, f'run `mkdir -p {shlex.quote(str(config.images))}`, or correct `images:` in compute.yaml')


def _read_machine(config: ComputeConfig, has_placement: bool) -> health.MachineFacts:
    refused = [Problem(f'ecompute cannot start: {what}', cure) for what, cure in find_refusals(config, has_placement)]
    problems: dict[str, Sequence[Problem | None]] = {'configuration': refused}
    problems |= {'images': [explain_missing_images(config)], 'metrics': [explain_unsafe_metrics(config.metrics)]}
    libvirt_facts = None
    try:
        from ecomp.virt.libvirt_host import probe_libvirt
    except UsageError as error:
        problems['libvirt'] = [error.problem]
    else:
        try:
            libvirt_facts = probe_libvirt(config.state, config.networks, virt_type=config.virt_type)
        except EcompError as error:
            is_installed = shutil.which('libvirtd', path=get_search_path()) is not None
            cure = 'systemctl start libvirtd' if is_installed else 'apt-get install libvirt-daemon-system'
            problems['libvirt'] = [Problem(error.problem.what, cure)]
    return health.MachineFacts(
        state=_read_state_directory(config.state),
        libvirt=libvirt_facts,
        configured_uuid=config.uuid,
        metadata_mode=config.metadata,
        proxy_variables=tuple(name for name in PROXY_VARIABLES if os.environ.get(name)),
        has_image_proxy=config.image_proxy is not None,
        is_metadata_port_taken=metadata.is_address_taken(),
        problems=problems,
    )


def _read_state_directory(directory: Path) -> health.StateDirectory:
    owner, saved_uuid = None, ''
    with suppress(OSError, ValueError):  # before the first start, or not readable, which the owner explains
        owner = directory.stat().st_uid
        saved_uuid = (directory / 'uuid').read_text().strip()
    # Below a directory we may not enter, os.path.exists() returns False, where Path.exists() raises.
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    free_bytes = shutil.disk_usage(nearest).free
    return health.StateDirectory(str(directory), os.geteuid(), owner, saved_uuid, free_bytes)
