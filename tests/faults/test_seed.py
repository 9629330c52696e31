"""F2, F3, F4, F26: guests with a seed disk (`metadata: iso`), killed or destroyed when it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import wait_until

SEED_FAILPOINTS = ('seed-written',)
(SEED_STEP,) = SEED_FAILPOINTS


@pytest.fixture
def iso_host(host: Hypervisor) -> Iterator[Hypervisor]:
    """A host whose guests get a seed disk."""
    config = host.directory / 'compute.yaml'
    before = config.read_text()
    config.write_text(yaml.safe_dump({**yaml.safe_load(before), 'metadata': 'iso'}))
    try:
        host.restart()
        yield host
    finally:
        config.write_text(before)
        host.restart()


def has_seed(host: Hypervisor, instance: str) -> bool:
    """Return True if exactly the complete seed of the instance exists."""
    return [path.name for path in host.state.glob(f'seeds/{instance}*')] == [f'{instance}.iso']


@pytest.mark.slow
def test_every_worker_killed_with_a_seed_written(iso_host: Hypervisor) -> None:
    """F3: every worker that writes a guest's seed is killed: error, and nothing is left (libvirt)."""
    iso_host.restart(f'{SEED_STEP}:kill')
    instance = iso_host.place()
    assert iso_host.wait_state(instance, 'error')['attempts'] == 3
    assert iso_host.fired_failpoints == [SEED_STEP] * 3
    iso_host.assert_removed(instance)
    iso_host.check_settled()


@pytest.mark.slow
def test_ecompute_killed_while_a_worker_is_frozen_with_a_seed(iso_host: Hypervisor) -> None:
    """F4: kill -9 of ecompute while a worker is frozen with a seed written: the next one completes it (libvirt)."""
    iso_host.restart(f'{SEED_STEP}:stop:1')
    instance = iso_host.place()
    iso_host.wait_frozen_at(SEED_STEP)
    assert has_seed(iso_host, instance)
    assert iso_host.get_disk_path(instance).exists(), 'by its overlay an instance is known to be here'
    iso_host.kill()
    wait_until(lambda: iso_host.is_free(instance), 10, 'its lock is free')
    iso_host.restart()
    iso_host.wait_state(instance, 'active')
    assert iso_host.list_qemus() == [instance]
    assert has_seed(iso_host, instance)
    iso_host.check_settled()
