"""`ecompute --check`: look at this machine and at what it needs, change nothing, and say what mends it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ecomp import backends
from ecomp.agent.host import metadata, provider
from ecomp.agent.host.provider import check_names
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import EcompError, UsageError
from ecomp.model import health, keys
from ecomp.model.allocation import NEEDED
from ecomp.model.health import Ailment, Backends
from ecomp.placement.client import Placement

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
