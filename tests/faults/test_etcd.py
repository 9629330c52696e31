"""F7, F8, F11: one etcd killed, frozen, compacted while nobody listens.

Of several members: test_etcd_members.py; without space: test_etcd_full.py.
"""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from tests.faults.etcd_away import LOST, is_refused, said, said_back, share_while_away
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import running, settled
from tests.kit.proxy import Proxy
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, boot, one_line, place, reached, reserved


def test_killed_and_started_again(own_control: Control, compute: Ecompute) -> None:
    """F7: etcd killed for a while: said once, little CPU, guests stay, eschedule exits 7, all goes on (fake)"""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.kill()
    until(lambda: said(compute, LOST), 15, 'the loss is logged')
    for words in ((SMALL,), ('destroy', instance), (instance,), ('list',)):
        is_refused(own_control, etcd, *words)
    assert own_control.placement.consumers(compute.uuid).keys() == {instance}
    share = share_while_away(compute)
    assert running(compute) == {instance}
    etcd.start()
    until(lambda: said_back(compute), 6, 'it follows etcd again')
    assert share < 0.05
    boot(own_control)
    assert (said(compute, LOST), said_back(compute)) == (1, 1)
    assert compute.stop() == 0
    assert reserved(own_control, compute.uuid) == 4


@pytest.mark.slow
def test_killed_again_and_again(own_control: Control) -> None:
    """F7: etcd in a restart loop while instances come and go: each request is answered for (fake)"""
    etcd, compute = own_control.etcd, own_control.ecompute('VCPU:64,DISK_GB:99,MEMORY_MB:9999')
    instances = [str(uuid.uuid4()) for _ in range(8)]
    ended = threading.Event()

    def restart() -> None:
        # Longer each time: on a machine that is busy with others no command may be through in the first ones.
        up = 1.5
        while not ended.wait(up):
            etcd.kill()
            etcd.start()
            up *= 1.05

    # Whoever started a server's process is the one whose thread must live on: so the clients are in threads.
    results: dict[str, int] = {}

    def ask() -> None:
        for instance in instances:
            words = (SMALL, '--uuid', instance)
            while (done := own_control.eschedule(*words)).code == 7:
                one_line(done, 7, 'etcd at ')
            results[instance] = done.code
            if instance in instances[:4]:
                while (done := own_control.eschedule('destroy', instance)).code == 7:
                    one_line(done, 7, 'etcd at ')
        ended.set()

    client = threading.Thread(target=ask)
    client.start()
    try:
        restart()
    finally:
        ended.set()
        client.join()
    etcd.wait_ready()
    assert set(results.values()) == {0}
    for instance in instances[4:]:
        reached(own_control, instance, 'active')
    for instance in instances[:4]:
        reached(own_control, instance, 'gone')
    settled(own_control, compute)


def test_frozen(own_control: Control, compute: Ecompute) -> None:
    """F8: etcd frozen: noticed in 15 s, little CPU, guests stay, eschedule exits 7, all goes on (fake)"""
    etcd = own_control.etcd
    instance = boot(own_control)
    etcd.pause()
    began = time.monotonic()
    until(lambda: said(compute, LOST), 16, 'it is noticed')
    detected = time.monotonic() - began
    assert detected <= 15
    is_refused(own_control, etcd, SMALL)
    is_refused(own_control, etcd, 'destroy', instance)
    share = share_while_away(compute)
    assert running(compute) == {instance}
    etcd.resume()
    until(lambda: said_back(compute), 15, 'it follows etcd again')
    # Frozen for longer than a lease lives: the key that says alive went with it, and comes again at once.
    until(lambda: etcd.keys('/computes/'), 5, 'the compute says again that it is alive')
    assert share < 0.05
    boot(own_control)


def test_compacted_while_away(own_control: Control) -> None:
    """F11: what a compute missed was compacted meanwhile: it lists anew (fake)"""
    with Proxy(own_control.etcd.port) as proxy:
        compute = own_control.at_exit.enter_context(Ecompute(proxy.address, own_control.placement.url))
        before = boot(own_control)
        proxy.go_away()
        until(lambda: said(compute, LOST), 15, 'the loss is logged')
        _, missed = place(own_control)
        assert own_control.eschedule('destroy', before).code == 0
        own_control.etcd.compact()
        proxy.come_back()
        addressed(own_control, missed)
        reached(own_control, before, 'gone')
        settled(own_control, compute)
