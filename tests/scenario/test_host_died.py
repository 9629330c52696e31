"""A host of a lab dies with all its processes, is evacuated, and comes back."""

from __future__ import annotations

import json
import uuid
from collections import Counter

import pytest

from tests.kit.hypervisor import Hypervisor
from tests.kit.lab import BOOT_SECONDS, Lab, is_serving
from tests.kit.servers import wait_until

BOOTING = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
IDLE = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
PRESENCE_SECONDS = 60.0


def count_domains(lab: Lab) -> Counter[str]:
    """Count on how many living hosts each domain is."""
    return Counter(name for host in lab.hosts for name in lab.list_domains(host))


@pytest.mark.slow
def test_evacuated_guests_answer_on_their_new_hosts_and_none_lives_twice(lab: Lab) -> None:
    """A host is crashed with a guest that serves, and one that does nothing; then it boots again."""
    host, old = lab.place(BOOTING, lab.make_url('guest.qcow2'), '--name', 'web')
    compute = lab.read_compute(host)
    _, idle = lab.place(f'{IDLE}&in_tree={compute}', lab.make_url('idle.raw'), '--name', 'pinned', '--wait=started')
    other = next(name for name in lab.hosts if name != host)
    _, kept = lab.place(f'{IDLE}&in_tree={lab.read_compute(other)}', lab.make_url('idle.raw'), '--wait=started')
    address = lab.wait_address(old)
    wait_until(lambda: is_serving(address), BOOT_SECONDS, 'the guest serves')
    dead = Hypervisor(lab, host)
    dead.compute = compute
    refused = lab.eschedule('evacuate', host, '--fenced', '--yes')
    assert refused.code == 5, refused
    assert 'is alive' in refused.stderr

    dead.crash()
    wait_until(lambda: f'/computes/{compute}' not in lab.read_etcd('/computes/'), PRESENCE_SECONDS, 'it is silent')
    shown = json.loads(lab.eschedule('list', '--state', 'unknown', '-f', 'json').stdout)
    assert {row['name']: row['state'] for row in shown} == {'web': 'active', 'pinned': 'active'}
    result = lab.eschedule('evacuate', host, '--fenced', '--yes', '--wait', '-f', 'json')

    assert result.code == 3, result  # the pinned one stays
    rows = {row['name']: row for row in json.loads(result.stdout)}
    new = rows['web']['replaced_by']
    assert new == str(uuid.uuid5(uuid.UUID(old), 'evacuated'))
    assert (rows['pinned']['instance'], rows['pinned']['replaced_by']) == (idle, None)
    new_address = lab.eschedule('web').stdout.strip()
    assert new_address == rows['web']['address']
    wait_until(lambda: is_serving(new_address), BOOT_SECONDS, 'the guest serves on its new host')
    assert new in lab.list_domains(rows['web']['host'])

    (dead.state / 'boot').write_text(f'{uuid.uuid4()}\n')
    lab.start_ecomputes()
    wait_until(lambda: old not in lab.list_domains(host), 60, 'the host that is back destroys what was replaced')
    dead.wait_state(idle, 'active')
    assert lab.eschedule('host', 'enable', host).code == 0
    assert count_domains(lab) == Counter([new, idle, kept])
    assert is_serving(new_address)
    assert kept in lab.list_domains(other)
    lab.check()
