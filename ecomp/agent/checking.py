"""`ecompute --check`: report faults of this machine, etcd and placement, with fixes; `--close-dhcp` fixes one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from ecomp import backends
from ecomp.agent.host import metadata, provider
from ecomp.agent.host.provider import check_names
from ecomp.agent.host.state import Identity
from ecomp.compute_conf import ComputeConfig, explain_unsafe_metrics
from ecomp.errors import Conflict, EcompError, UsageError, split_fix
from ecomp.model import health, keys
from ecomp.model.allocation import REQUIRED_CLASSES
from ecomp.model.health import Ailment, Backends
from ecomp.placement.client import Placement

PROXY_VARIABLES = ('http_proxy', 'https_proxy', 'all_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY')


def check_machine(config: ComputeConfig) -> tuple[Backends, list[Ailment]]:
    """Check etcd, placement and this machine; return the backends' state and the ailments, except ignored warnings."""
    status = backends.probe_backends(config.etcd, config.placement, config.path, 'compute.yaml')
    machine = _read_machine(config, not status.placement_failure)
    ailments = [*health.run_checks(health.BACKEND_CHECKS, status), *health.check_machine(machine)]
    return status, [ailment for ailment in ailments if ailment.check not in config.ignore_warnings]


def close_dhcp(config: ComputeConfig) -> Iterator[str]:
    """Close the DHCP of our networks to unknown MACs, and yield what was done.

    Raises UsageError if a network is missing, Conflict if an ecompute or a guest would be affected, libvirt's errors.
    """
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
            problem = f'{split_fix(str(error))[0]}, which may start a guest while a network is restarted'
            raise Conflict(f'{problem}. Fix: systemctl stop ecompute, and repeat the command') from error
        for name, found in open_networks.items():
            yield networks.close_dhcp(name, found)


def find_refusals(config: ComputeConfig, has_placement: bool) -> Iterator[str]:
    """Yield, as text, a start's UsageErrors about ratios and, if `has_placement` and it answers, traits and classes."""
    classes = sorted({*REQUIRED_CLASSES, *(config.inventory or ())})
    try:
        provider.add_ratios(dict.fromkeys(classes, {}), config.allocation_ratios)
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
        pass  # placement does not answer; a start would wait for it, so the configuration is not wrong
    finally:
        placement.close()


def find_missing_images(config: ComputeConfig) -> str:
    """Return the path of `images:` if that is set and not a directory, else ''."""
    return '' if config.images is None or os.path.isdir(config.images) else str(config.images)


def _read_machine(config: ComputeConfig, has_placement: bool) -> health.MachineFacts:
    """Collect health.check_machine()'s facts; libvirt's errors become reasons. `has_placement`: see find_refusals()."""
    libvirt_state, no_libvirt, no_library = None, '', ''
    try:
        from ecomp.virt.libvirt_host import probe_libvirt
    except UsageError as error:
        no_library = str(error)
    else:
        try:
            libvirt_state = probe_libvirt(config.state, config.networks)
        except EcompError as error:
            no_libvirt = str(error)
    return health.MachineFacts(
        state=_read_state_directory(config.state),
        libvirt=libvirt_state,
        no_libvirt_reason=no_libvirt,
        no_library_reason=no_library,
        has_libvirtd=shutil.which('libvirtd', path=f'{os.environ.get("PATH", os.defpath)}:/usr/sbin') is not None,
        configured_uuid=config.uuid,
        virt_type=config.virt_type,
        metadata_mode=config.metadata,
        proxy_variables=tuple(name for name in PROXY_VARIABLES if os.environ.get(name)),
        has_image_proxy=config.image_proxy is not None,
        is_metadata_port_taken=metadata.is_address_taken(),
        refused_settings=tuple(find_refusals(config, has_placement)),
        missing_image_directory=find_missing_images(config),
        metrics_problem=explain_unsafe_metrics(config.metrics),
    )


def _read_state_directory(directory: Path) -> health.StateDirectory:
    """Read owner and text of `uuid` (None, '' if unreadable), and the free bytes where the directory is or will be."""
    owner, saved_uuid = None, ''
    try:
        owner = directory.stat().st_uid
        saved_uuid = (directory / 'uuid').read_text().strip()
    except (OSError, ValueError):
        pass  # before the first start, or not readable, which the owner explains
    # Below a directory we may not enter, os.path.exists() returns False, where Path.exists() raises.
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    free_bytes = shutil.disk_usage(nearest).free
    return health.StateDirectory(str(directory), os.geteuid(), owner, saved_uuid, keys.is_uuid(saved_uuid), free_bytes)
