"""S5, F1, R1: the presence key of a compute ends, is overwritten, and is restored: in one life."""

from __future__ import annotations

import json

import pytest

from tests.faults.etcds import SavedSnapshot
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import accept, guests, lapse
from tests.kit.servers import until
from tests.kit.story import addressed, boot, logged, logs, place, reached


@pytest.mark.history_broken('etcd is restored from an older copy')
def test_a_presence_key_that_ends_is_overwritten_and_is_restored(own_control: Control, compute: Ecompute) -> None:
    """S5: read-only while another holds the key, at work again once it is free; read-only in a restored etcd (fake)"""
    etcd = own_control.etcd
    key = f'/computes/{compute.uuid}'
    lapse(own_control, key)
    until(lambda: etcd.get(key), 30, 'the key is put again')
    boot(own_control)
    older = SavedSnapshot(etcd)

    lease = etcd.grant()
    etcd.put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}), lease)
    logs(compute, 'is held by another ecompute, on elsewhere', 'only watches')
    _, meanwhile = place(own_control)
    etcd.call('lease/revoke', {'ID': lease})
    logs(compute, 'is held by this ecompute again')
    addressed(own_control, meanwhile)
    addressed(own_control, place(own_control)[1])
    own = json.loads(etcd.get(key) or b'{}')
    assert own['pid'] == str(compute.pid)
    assert len(logged(compute, 'only watches')) == 1

    older.restore()
    logs(compute, 'is not the one this compute knew', 'only watches')
    assert compute.is_running
    assert len(guests(compute)) == 3
    accept(compute)
    reached(own_control, meanwhile, 'active')
