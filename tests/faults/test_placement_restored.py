"""F17: placement's database is replaced by an older copy: it has forgotten what was claimed since, or claims too much.

What runs goes on, whatever it says. ecompute makes its provider and its inventory again and releases what nobody stands
behind; a claim that is missing is shown by the audit.
"""

from __future__ import annotations

import pytest

from tests.faults.etcds import restore_placement as restore
from tests.faults.etcds import save_placement as save
from tests.kit.audit import findings
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import guests, look_twice, losses, settled
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, boot, boot_all, known, log_of, logs, notified, place, reached, reserved


def unharmed(control: Control, compute: Ecompute, instance: str, address: str) -> None:
    """The instance runs, and its record is as it was."""
    found = known(control, instance)
    assert (found['state'], found['addresses'][0]['address']) == ('active', address)
    assert guests(compute)[instance]['running']


def test_claims_are_missing(own_control: Control, compute: Ecompute) -> None:
    """F17: placement restored from before a create: the guest runs on, the audit shows it, a destroy works (fake)"""
    before = boot(own_control)
    save(own_control)
    _, since = place(own_control)
    address = addressed(own_control, since)
    restore(own_control)
    assert own_control.placement.consumers(compute.uuid).keys() == {before}
    found = findings(own_control)
    assert [each['subject'] for each in found] == [since], found
    assert 'holds nothing' in str(found), found
    compute.stop()
    compute.start()  # nor does a restart harm it
    unharmed(own_control, compute, since, address)
    assert own_control.eschedule('destroy', since, before).code == 0
    for instance in (since, before):
        reached(own_control, instance, 'gone')


def test_a_claim_too_many(own_control: Control, compute: Ecompute) -> None:
    """F17: placement restored from before a destroy: what it still claims is released by its compute (fake)"""
    kept, since = boot_all(own_control, 2)
    save(own_control)
    assert own_control.eschedule('destroy', '--wait', since).code == 0
    restore(own_control)
    assert own_control.placement.consumers(compute.uuid).keys() == {kept, since}
    look_twice(own_control, compute, guests(compute))
    assert own_control.placement.consumers(compute.uuid).keys() == {kept}


def test_the_provider_is_gone(own_control: Control) -> None:
    """F17: placement restored from before this compute: it makes its provider again by itself (fake)"""
    save(own_control)
    compute = own_control.ecompute()
    _, instance = place(own_control)
    address = addressed(own_control, instance)
    restore(own_control)
    assert own_control.placement.inventory(compute.uuid) == {}
    unharmed(own_control, compute, instance, address)
    compute.stop()
    compute.start()
    assert own_control.placement.inventory(compute.uuid)['VCPU']['total'] == 4
    unharmed(own_control, compute, instance, address)
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert notified(own_control.eschedule(SMALL))[0] == compute.uuid
    settled(own_control, compute)


@pytest.mark.slow
def test_the_provider_is_gone_and_nobody_restarts_anything(own_control: Control) -> None:
    """F17: placement restored from before this compute: within a minute its provider is there again (fake)"""
    save(own_control)
    compute = own_control.ecompute()
    _, instance = place(own_control)
    address = addressed(own_control, instance)
    restore(own_control)
    until(lambda: own_control.placement.inventory(compute.uuid), 80, 'its inventory is there')
    assert own_control.placement.inventory(compute.uuid)['VCPU']['reserved'] == 0
    unharmed(own_control, compute, instance, address)
    assert len(logs(compute, 'registering again')) == 1
    lost, _ = losses(compute, '')  # its provider, and placement itself if it looked while that was away
    until(lambda: losses(compute, '') == (lost, lost), 20, 'each return is logged')
    assert 1 <= lost <= 2, log_of(compute)
    assert own_control.eschedule('destroy', '--wait', instance).code == 0
    assert compute.stop() == 0
    assert reserved(own_control, compute.uuid) == 4
    compute.start()
    settled(own_control, compute)
