"""`eschedule adopt` on real etcd and placement, with guests that ecomp did not create."""

from __future__ import annotations

import json
import os
import re
import tty
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ecomp.model import keys
from ecomp.model.foreign import ForeignGuest, encode_foreign, parse_foreign
from ecomp.model.keys import make_uuid
from ecomp.virt.volumes import make_iso
from tests.kit.by_hand import put_claim
from tests.kit.commands import Control, Ecompute
from tests.kit.foreign import list_marked, make_foreign, read_foreign, start_with_foreign
from tests.kit.invariants import read_allocations
from tests.kit.lab import BOOT_SECONDS, Lab
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse, read_usage
from tests.kit.story import wait_state


def list_fits(control: Control, *words: str) -> dict[str, Any]:
    listed = control.eschedule('adopt', *words, '-f', 'json')
    assert listed.code == 0, listed
    return {row['name']: row['fits'] for row in json.loads(listed.stdout)}


def adopt(control: Control, compute: Ecompute, *words: str) -> str:
    adopted = control.eschedule('adopt', compute.uuid, *words)
    assert adopted.code == 0, adopted
    return adopted.stderr


def refuse(control: Control, code: int, reason: str, *words: str) -> None:
    refused = control.eschedule(*words)
    assert (refused.code, reason in refused.stderr) == (code, True), refused


def read_state(control: Control) -> str:
    return str(json.loads(control.eschedule('hosts', '-f', 'json').stdout)[0]['state'])


def test_guests_are_adopted_used_and_given_back(cluster: Control) -> None:
    database = make_foreign('bank', size={'VCPU': 2, 'MEMORY_MB': 256, 'DISK_GB': 5}, disks=['/srv/bank.qcow2'])
    mail, huge = make_foreign('Odd_Name', is_running=False), make_foreign('huge', size={'VCPU': 90, 'MEMORY_MB': 64})
    passing = make_foreign('passing', is_transient=True)
    compute = start_with_foreign(cluster, database, mail, huge, passing)
    assert cluster.eschedule('quota', 'set', 'shop', 'instances=2').code == 0
    assert list_fits(cluster, compute.uuid) == {'Odd_Name': True, 'bank': True, 'huge': False, 'passing': True}
    said = adopt(cluster, compute, 'bank', 'Odd_Name', '--project', 'shop')
    assert 'Odd_Name: this is not a valid name of an instance, so the instance gets no name' in said
    assert f'bank: adopted with uuid {database["instance"]} and name bank' in said
    record = wait_state(cluster, database['instance'], 'active')
    assert (record['adopted'], record['resources'], record['image']) == (True, database['size'], None)
    wait_state(cluster, mail['instance'], 'stopped')
    assert read_usage(cluster, 'shop') == {'VCPU': 3, 'MEMORY_MB': 320, 'DISK_GB': 5, 'instances': 2}
    refuse(
        cluster, 3, 'the quota of project shop has no room for 1', 'adopt', compute.uuid, 'passing', '--project', 'shop'
    )
    refuse(cluster, 3, 'set allocation_ratios: {VCPU: 2.33}', 'adopt', compute.uuid, 'huge')
    assert read_allocations(cluster).keys() == {database['instance'], mail['instance']}
    assert read_state(cluster) == 'up'
    assert 'is already adopted' in adopt(cluster, compute, 'bank', '--project', 'shop')
    # It is stopped, started and waited for as others are; it is not destroyed, and no command creates it.
    assert cluster.eschedule('stop', 'bank', '--wait').code == 0
    assert not read_foreign(compute)['bank']['is_running']
    assert cluster.eschedule('start', 'bank', '--wait').code == 0
    refuse(cluster, 5, 'Fix: eschedule release bank, then virsh undefine', 'destroy', 'bank', '--yes')
    refuse(cluster, 5, 'no command creates it', 'show', 'bank', '--command')
    refuse(cluster, 5, 'exists, but was requested by `adopt`', 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64', '--uuid',
           database['instance'])  # fmt: skip
    adopt(cluster, compute, 'passing')
    wait_state(cluster, passing['instance'], 'active')
    wait_until(lambda: 'is not defined' in cluster.eschedule('show', 'passing').stdout, 20, 'its fault is known')
    refuse(cluster, 5, 'its domain is transient', 'stop', 'passing')
    drained = cluster.eschedule('host', 'drain', compute.uuid)
    assert 'bank: active (adopted: it cannot be moved)' in drained.stderr
    # A host that was disabled before stays so.
    assert cluster.eschedule('release', 'passing').code == 0
    wait_state(cluster, passing['instance'], 'gone')
    adopt(cluster, compute, 'passing', '--name', 'twice')
    assert wait_state(cluster, passing['instance'], 'active')['name'] == 'twice'
    assert read_state(cluster) == 'disabled'
    assert cluster.eschedule('host', 'enable', compute.uuid).code == 0
    told = cluster.eschedule('events', 'bank').stdout
    assert 'bank: adopted on ' in told
    assert cluster.eschedule('release', '--every').code == 0
    for guest in (database, mail, passing):
        wait_state(cluster, guest['instance'], 'gone')
    assert (read_allocations(cluster), list_marked(compute)) == ({}, set())
    assert read_foreign(compute)['bank']['is_running']
    refuse(cluster, 5, 'has been gone since', 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64', '--uuid', mail['instance'])


@pytest.mark.slow
def test_guest_that_another_host_placement_or_ecomp_knows_is_not_adopted(cluster: Control) -> None:
    twin, claimed, undefined = (make_foreign(name) for name in ('twin', 'claimed', 'undefined'))
    first, second = start_with_foreign(cluster, twin, claimed), start_with_foreign(cluster, twin, undefined)
    put_claim(cluster, claimed['instance'], second.uuid)
    for compute, name in ((first, 'twin'), (second, 'twin'), (first, 'claimed')):
        refuse(cluster, 5, 'Fix: give the domain a new uuid, here or there', 'adopt', compute.uuid, name)
    refuse(cluster, 4, 'has no guest of this name or uuid', 'adopt', first.uuid, 'undefined')
    assert list_marked(first) == list_marked(second) == set()
    cluster.placement.call('DELETE', f'/allocations/{claimed["instance"]}')


def test_adopted_guests_of_a_dead_host_are_released_and_run_on_when_it_returns(cluster: Control) -> None:
    old, other = make_foreign('old'), make_foreign('other')
    dead = start_with_foreign(cluster, old, other)
    adopt(cluster, dead, '--all')
    for guest in (old, other):
        wait_state(cluster, guest['instance'], 'active')
    cluster.ecompute()
    plan = cluster.eschedule('evacuate', '--dry-run', dead.uuid)
    assert (plan.code, plan.stdout.count('it is adopted')) == (3, 2), plan
    kill_and_lapse(cluster, dead)
    moved = cluster.eschedule('evacuate', dead.uuid, '--fenced', '--yes')
    assert (moved.code, moved.stderr.count('is not managed any more')) == (3, 2), moved
    forgotten = cluster.eschedule('host', 'forget', dead.uuid, '--fenced')
    assert forgotten.code == 0, forgotten
    assert read_allocations(cluster) == {}
    dead.start()
    wait_until(lambda: list_marked(dead) == set(), 60, 'their marks are gone')
    assert read_foreign(dead)['old']['is_running']
    assert list_fits(cluster, dead.uuid) == {'old': True, 'other': True}
    adopt(cluster, dead, 'old')
    wait_state(cluster, old['instance'], 'active')
    assert cluster.etcd.get(keys.name('other')) is None


def test_uuid_that_is_queued_released_or_made_by_ecomp_is_not_adopted(cluster: Control) -> None:
    queued, made, released = (make_foreign(name) for name in ('queued', 'made', 'released'))
    compute = start_with_foreign(cluster, queued, made, released)
    query = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
    assert cluster.eschedule('flavor', 'set', 'small', query).code == 0
    assert cluster.eschedule('--queue', '--flavor', 'small', '--uuid', queued['instance']).code == 0
    refuse(cluster, 5, 'was used by ecomp before', 'adopt', compute.uuid, 'queued')
    assert cluster.eschedule(query, '--uuid', made['instance'], '--name', 'taken').code == 0
    refuse(cluster, 5, 'is used by ecomp', 'adopt', compute.uuid, 'made')
    adopt(cluster, compute, 'released')
    wait_state(cluster, released['instance'], 'active')
    assert cluster.eschedule('release', 'released').code == 0
    wait_state(cluster, released['instance'], 'gone')
    # A failed adoption leaves the record: the uuid is used for nothing else.
    refuse(cluster, 5, 'this name belongs to', 'adopt', compute.uuid, 'released', '--name', 'taken')
    refuse(cluster, 5, 'has been gone since', query, '--uuid', released['instance'])
    assert read_state(cluster) == 'up'
    assert cluster.eschedule('destroy', queued['instance'], made['instance'], '--yes').code == 0


@pytest.mark.slow
def test_name_that_is_taken_is_left_out(cluster: Control) -> None:
    first, second = make_foreign('web1'), make_foreign('web1')
    one, two = start_with_foreign(cluster, first), start_with_foreign(cluster, second, make_foreign('web2'))
    adopt(cluster, one, '--all')
    assert 'web1: this is the name of another instance, so the instance gets no name' in adopt(cluster, two, '--all')
    assert wait_state(cluster, second['instance'], 'active')['name'] is None


@pytest.mark.slow  # the host does not answer for ten seconds
def test_malformed_list_of_a_host_is_its_own_damage(cluster: Control) -> None:
    good, bad = start_with_foreign(cluster, make_foreign('good')), cluster.ecompute()
    bad.kill()  # it still counts as alive
    cluster.etcd.put(keys.foreign(bad.uuid), '{"version": 1, "guests": [{"size": {"X": 1}}]}')
    listed = cluster.eschedule('list', '--foreign')
    assert (listed.code, 'good' in listed.stdout, 'its list is malformed' in listed.stderr) == (1, True, True), listed
    adopt(cluster, good, '--all')
    cluster.etcd.delete(keys.foreign(bad.uuid))


def test_each_guest_of_a_full_list_is_listed_once_the_others_are_adopted() -> None:
    uuids = [make_uuid(number.to_bytes(16, 'big')) for number in range(2000)]
    guests = {instance: ForeignGuest(instance, 'x' * 150, True) for instance in uuids}
    while waiting := [each for each in guests.values() if not each.adopted_by]:
        listed = parse_foreign((encode_foreign(guests, ()) or '').encode())
        assert listed.omitted == len(guests) - len(listed.guests)
        new = [each for each in listed.guests if not each.adopted_by]
        assert new or not waiting
        guests |= {each.instance: each._replace(adopted_by=uuids[0]) for each in new}
    assert encode_foreign(guests, uuids * 9) is not None


# A Linux that plain virsh started on a real host. After its boot it runs the script on its second disk, which answers
# each line from the serial console.

HOST = 'hv2'
DOMAIN = """<domain type='qemu'><name>theirs</name><uuid>{uuid}</uuid><memory unit='MiB'>192</memory>
<os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features><devices>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{directory}/theirs.qcow2'/><target dev='vda'/></disk>
<disk type='file'><source file='{directory}/theirs.iso'/><target dev='vdb'/><readonly/></disk>
<serial type='pty'><log file='{directory}/theirs.log' append='on'/></serial></devices></domain>"""
SCRIPT = b"""#!/bin/sh
while read -r line; do echo "$line $(cat /proc/sys/kernel/random/boot_id) $(cat /proc/uptime)"; done
"""


@pytest.fixture
def running_linux(lab: Lab, guest_image: Path) -> Iterator[str]:
    """The uuid of that guest, which is removed at the end."""
    instance, directory = str(uuid.uuid4()), lab.directory
    (directory / 'theirs.qcow2').write_bytes(guest_image.read_bytes())
    # The guest's findfs ignores a disk of 64 KiB, which it would be without the zeros.
    (directory / 'theirs.iso').write_bytes(make_iso({'user-data': SCRIPT}).ljust(2**20, b'\0'))
    (directory / 'theirs.xml').write_text(DOMAIN.format(uuid=instance, directory=directory))
    lab.virsh(HOST, 'define', str(directory / 'theirs.xml'))
    lab.virsh(HOST, 'start', 'theirs')
    yield instance
    lab.virsh(HOST, 'undefine', 'theirs')
    lab.virsh(HOST, 'destroy', 'theirs')


def read_boot(lab: Lab, boot_count: int) -> tuple[str, float]:
    """Ask the guest, once it has booted so many times, for its boot id and the seconds since its boot."""

    def find_all(pattern: str) -> list[tuple[str, str]]:
        return re.findall(pattern, (lab.directory / 'theirs.log').read_text(errors='replace'), re.MULTILINE)

    wait_until(lambda: len(find_all('^ecomp-guest: ready')) >= boot_count, BOOT_SECONDS, 'it has booted')
    line = uuid.uuid4().hex
    console = os.open(lab.virsh(HOST, 'ttyconsole', 'theirs').strip(), os.O_RDWR | os.O_NOCTTY)
    try:
        tty.setraw(console)
        os.write(console, f'{line}\n'.encode())
        answers = wait_until(lambda: find_all(rf'^{line} (\S+) (\S+) '), 30, 'its script answers')
    finally:
        os.close(console)
    return answers[0][0], float(answers[0][1])


@pytest.mark.slow
def test_guest_boots_only_when_its_adopter_starts_it(lab: Lab, running_linux: str) -> None:
    def run(command: str, state: str) -> None:
        done = lab.eschedule(*command.split())
        assert done.code == 0, done
        wait_until(lambda: json.loads(lab.read_record(running_linux) or b'{}').get('state') == state, 20, state)

    adopt, release = (f'adopt {HOST} theirs', 'active'), ('release theirs', 'gone')
    boots = [read_boot(lab, 1)]
    for command in (adopt, (f'host drain {HOST}', 'active'), (f'host enable {HOST}', 'active'), release):
        run(*command)
        boots.append(read_boot(lab, 1))
    assert len({boot_id for boot_id, _ in boots}) == 1, boots
    assert all(earlier < later for (_, earlier), (_, later) in pairwise(boots)), boots
    for command in (adopt, ('stop theirs --wait', 'stopped'), ('start theirs --wait', 'active')):
        run(*command)
    assert read_boot(lab, 2)[0] != boots[0][0]
    run(*release)
