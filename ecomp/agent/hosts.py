"""The host of a compute: this machine, or what is only pretended.

A host is opened by a function that registers with `at_exit` how each part ends, beside the line that begins it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from contextlib import ExitStack

from ecomp.agent.host import inventory
from ecomp.agent.host.inventory import Inventory
from ecomp.agent.host.metadata import GuestData
from ecomp.agent.host.metadata_server import keep_served
from ecomp.agent.images.cache import CacheLimits
from ecomp.agent.images.reach import reach_of
from ecomp.agent.images.scrub import Scrubber
from ecomp.agent.instance.inline import FakeImages, Inline
from ecomp.agent.instance.pool import Workers
from ecomp.agent.instance.surroundings import Host
from ecomp.agent.instance.worker import WorkerSettings
from ecomp.compute_conf import ComputeConfig
from ecomp.model.allocation import GIB
from ecomp.virt import Hypervisor

MOST_WORKERS = 8
"""Worker processes at most, one a processor, where compute.yaml has no `workers:`."""

Admit = Callable[[Set[str]], None]
"""Told the computes whose guests are here, it raises where this one must not begin beside them."""


def pretended(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """A host for `ecompute --fake`: no libvirt, and a job runs in the thread that asks for it."""
    from ecomp.virt.fake import FakeHypervisor

    hypervisor = FakeHypervisor(config.state)
    hypervisor.prepare()
    hypervisor.virt_type(config.virt_type)
    admit({each.compute for each in hypervisor.guests().values() if each.compute})
    runner = Inline(hypervisor, FakeImages())
    at_exit.callback(runner.stop)
    return Host(hypervisor, runner, GuestData(config.state / 'metadata'))


def real(config: ComputeConfig, at_exit: ExitStack, admit: Admit) -> Host:
    """This machine, of which nothing is changed before `admit` has let this compute begin.

    Errors: those of the hypervisor, and EcompError where no metadata server comes up.
    """
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks, control=reach_of(config).control)
    at_exit.callback(libvirt.close)
    libvirt.check()
    libvirt.virt_type(config.virt_type)
    admit(libvirt.computes())
    libvirt.prepare()
    # After the networks are there: the server listens on an address of their bridge.
    look_after = keep_served(libvirt, config.state, config.directory, config.metadata == 'network', at_exit)
    # No instance is given more than what there is in all, so no image above that is of use here.
    disk = (config.inventory or {}).get('DISK_GB', 0) * GIB or inventory.look(config.state, []).disk
    limits = CacheLimits(_image_cache(config) * GIB, disk)
    settings = WorkerSettings(
        config.state, config.images, os.getpid(), limits, libvirt.filters, reach_of(config), config.hold_addresses
    )
    pool = Workers(workers(config), settings)
    at_exit.callback(pool.stop)
    scrubber = Scrubber(config.state / 'images')
    at_exit.callback(scrubber.stop)
    scrubber.start()
    data = GuestData(config.state / 'metadata')
    return Host(libvirt, pool, data, look_after, lambda: libvirt.bridge_name() is not None)


def inventory_of(config: ComputeConfig, fake: bool, hypervisor: Hypervisor) -> Inventory:
    """What placement is told that there is here. UsageError for an allocation ratio of what there is not."""
    found = {}
    if not fake:
        found = inventory.inventory(inventory.look(config.state, list(hypervisor.guests())), _image_cache(config))
    # What `inventory:` does not name keeps the machine's own truth.
    return inventory.with_ratios({**found, **inventory.given(config.inventory or {})}, config.allocation_ratios)


def traits_of(hypervisor: Hypervisor, virt_type: str) -> frozenset[str]:
    """The traits of what this host's guests run on."""
    features = hypervisor.cpu_features(virt_type)
    if not features:
        return frozenset()
    from ecomp.model.traits import cpu_traits

    return cpu_traits(features)


def workers(config: ComputeConfig) -> int:
    """How many worker processes there are."""
    return config.workers or min(os.cpu_count() or 1, MOST_WORKERS)


def _image_cache(config: ComputeConfig) -> int:
    return config.image_cache or inventory.default_cache(config.state)
