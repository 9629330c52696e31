"""The doctor and its canaries."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from ecomp import read_version
from ecomp.model.cluster import holes
from tests.kit.commands import Control, Ecompute, Result, eschedule, run, write_config
from tests.kit.hands import Eschedule
from tests.kit.lab import Lab
from tests.kit.servers import free_port, until

# `eschedule doctor` on real servers: nothing where all is well, and of what is not, what mends it.


def findings(control: Control) -> dict[str, Any]:
    """What it finds, by the check, but of etcd's version, which is the machine's; its words are as it ends."""
    result = control.eschedule('doctor', '-f', 'json')
    said = json.loads(result.stdout)
    found = {each['check']: each for each in said['findings']}
    assert result.code == (8 if found else 0)
    assert (found.pop('etcd-version', None) is not None) == (holes(said['etcd']['version']) is not None)
    assert said['configuration'] == str(control.schedule_yaml)
    assert said['placement'] == {'name': f'placement at {control.placement.url}', 'microversion': '1.39'}
    return found


def test_a_compute_that_was_stopped(cluster: Control) -> None:
    compute = cluster.ecompute()
    assert findings(cluster) == {}
    compute.stop()
    closed = findings(cluster)
    assert list(closed) == ['compute']
    assert closed['compute']['what'].endswith(
        ' is closed: its ecompute was stopped, or it only watches, for etcd is not the one that it knew'
    )
    assert closed['compute']['cure'] == (
        'systemctl start ecompute on its host; where that runs, journalctl -u ecompute says why'
    )
    table = cluster.eschedule('doctor')
    assert table.code == 8
    assert table.stdout.splitlines()[-1] == (
        f'compute: {closed["compute"]["what"]}. Mend it: {closed["compute"]["cure"]}'
    )
    assert f', by {cluster.schedule_yaml}' in table.stderr
    compute.start()
    assert findings(cluster) == {}


def test_a_compute_of_another_version(cluster: Control) -> None:
    compute = cluster.ecompute()
    lease = cluster.etcd.grant()
    other = '0b5e55ed-0000-4000-8000-000000000000'
    cluster.etcd.put('/computes/none', '[', lease)
    try:
        for version, named in (('0.9', ['version']), ("0.9\n'; reboot; '", [])):  # a cure is typed
            says = {'token': 'x', 'version': version, 'hostname': 'old'}
            cluster.etcd.put(f'/computes/{other}', json.dumps(says), lease)
            found = findings(cluster)
            assert list(found) == named
            if named:
                assert found['version']['what'] == f'compute old runs ecomp 0.9, and this is {read_version()}'
    finally:
        cluster.etcd.delete(f'/computes/{other}')
        cluster.etcd.delete('/computes/none')
    assert findings(cluster) == {}
    compute.stop()


def test_a_backend_that_is_away_is_a_finding(cluster: Control) -> None:
    for etcd, placement, away in (
        (f'127.0.0.1:{free_port()}', cluster.placement.url, 'etcd'),
        (cluster.etcd.endpoint, f'http://127.0.0.1:{free_port()}', 'placement'),
    ):
        config = write_config(cluster.directory / 'away.yaml', etcd, placement)
        result = eschedule(config, 'doctor', '-f', 'json')
        assert result.code == 7
        assert f'{away} at' in result.stderr
        found = {each['check']: each['cure'] for each in json.loads(result.stdout)['findings']}
        assert found[away].startswith(f'{config} told where it is')


def test_check_goes_with_nothing_else(cluster: Control) -> None:
    for words in (['--fake', 'VCPU:1'], ['--accept-new-etcd'], ['--unit']):
        refused = run('ecomp.compute', '--check', *words, directory=cluster.directory)
        assert (refused.code, refused.stdout) == (2, '')


# `eschedule doctor --canary`: what it says of hosts of every kind, and that nothing of a canary is left.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NO_KEY = 'there is no ssh key: name one with --ssh-key'
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@laptop\n'


def said(result: Result) -> dict[str, Any]:
    """Its document, whose exit code is that of a finding if there is one, of whichever check."""
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.code == (8 if document['findings'] else 0), result
    return document


def findings_of(result: Result) -> list[tuple[str, str]]:
    """What its canaries found: what, and the cure."""
    return [(each['what'], each['cure']) for each in said(result)['findings'] if each['check'] == 'canary']


def canary(control: Control, *words: str) -> Result:
    """A doctor with canaries, to its end."""
    return control.eschedule('doctor', '--canary', '-f', 'json', *words)


def begun(control: Control, *words: str) -> Eschedule:
    """The same, a process that goes on."""
    return Eschedule(control, 'doctor', '--canary', '-f', 'json', *words)


def left(control: Control) -> list[str]:
    """The keys that a canary has, while it is there; nor does placement know of it when there are none."""
    prefixes = ('/hosts/', '/instances/', '/names/', '/requests/', '/booted/', '/groups/')
    return [key for prefix in prefixes for key in control.etcd.keys(prefix)]


def nothing_is_left(control: Control, *computes: Ecompute) -> None:
    assert left(control) == []
    assert [control.placement.consumers(each.uuid) for each in computes] == [{} for _ in computes]


def placed_on(control: Control, *computes: Ecompute) -> None:
    """Return when each has been asked for an instance."""
    asked = [f'/hosts/{each.uuid}/' for each in computes]
    until(lambda: all(map(control.etcd.keys, asked)), 30, 'each host is asked for a canary')


def test_every_host_that_is_up_has_one_and_of_others_it_is_said_why_not(cluster: Control) -> None:
    one, two, disabled, closed = (cluster.ecompute() for _ in range(4))
    full = cluster.ecompute('VCPU:1,DISK_GB:1,MEMORY_MB:128')
    assert cluster.eschedule('host', 'disable', disabled.uuid).code == 0
    closed.stop()
    result = canary(cluster)
    assert findings_of(result) == []
    found = {each['compute']: each for each in said(result)['canaries']}
    for compute in (one, two):
        each = found.pop(compute.uuid)
        assert each['name'] == f'canary-{each["instance"][:8]}'
        assert (each['reached'], each['seconds'] > 0, each['gone']) == ('addressed', True, True)
        assert each['said'] == NO_KEY
        assert f'{each["name"]} booted after ' in result.stderr
    assert {compute: each['said'] for compute, each in found.items()} == {
        disabled.uuid: 'it is disabled',
        closed.uuid: 'it is closed',
        full.uuid: 'MEMORY_MB short by 128 (free 128 of 128)',
    }
    assert {(each['instance'], each['reached'], each['gone']) for each in found.values()} == {(None, None, None)}
    assert result.stderr.count(': no canary: ') == 3
    nothing_is_left(cluster, one, two, full)
    # As a table the findings alone are data.
    table = cluster.eschedule('doctor', '--canary', SMALL)
    assert not [line for line in table.stdout.splitlines() if line.startswith('canary:')]
    assert table.stderr.count(' booted after ') == 2


def test_one_host_alone_and_a_flavor(cluster: Control) -> None:
    one, two = cluster.ecompute(), cluster.ecompute()
    assert cluster.eschedule('flavor', 'set', 'tiny', 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:16').code == 0
    image = 'http://images.example/small.qcow2'
    [each] = said(canary(cluster, '--on', two.uuid, '--flavor', 'tiny', image, '--for', 'disk'))['canaries']
    assert (each['compute'], each['reached'], each['said']) == (two.uuid, 'disk', NO_KEY)
    assert f'INSTANTIATE INSTANCE {each["instance"]} WITH IMAGE {image}' in two.log.read_text()
    assert each['instance'] not in one.log.read_text()
    nothing_is_left(cluster, one, two)


def test_a_query_that_no_guest_can_be_made_of_is_nothing_of_a_host(cluster: Control, compute: Ecompute) -> None:
    for query, why in (('resources=VCPU:1', 'a guest needs'), ('resources=VCPU:1,NONE:1', 'no resource class NONE')):
        refused = canary(cluster, query)
        assert (refused.code, refused.stdout) == (2, '')
        assert why in refused.stderr
    nothing_is_left(cluster, compute)


def test_where_there_is_room_nowhere_that_is_found(cluster: Control, compute: Ecompute) -> None:
    [(what, cure)] = findings_of(canary(cluster, 'resources=VCPU:99,DISK_GB:1,MEMORY_MB:16'))
    assert what.startswith('no canary was placed: ')
    assert cure.startswith('eschedule hosts ')
    nothing_is_left(cluster, compute)


def test_a_guest_that_never_says_it_is_ready(cluster: Control, compute: Ecompute) -> None:
    """With a key it has to, for it is to be entered."""
    (cluster.directory / 'key.pub').write_text(KEY)
    result = canary(cluster, '--ssh-key', str(cluster.directory / 'key.pub'), '--timeout', '1')
    [(what, cure)] = findings_of(result)
    assert what.endswith(' a canary did not come through: 1 s are up, still waiting for: cloud-init to finish')
    assert '--for addressed' in cure
    [each] = said(result)['canaries']
    assert (each['reached'], each['seconds'], each['gone']) == ('addressed', None, True)
    nothing_is_left(cluster, compute)


def test_a_host_that_builds_nothing_and_the_one_beside_it(cluster: Control) -> None:
    well, frozen = cluster.ecompute(), cluster.ecompute()
    frozen.pause()
    result = canary(cluster, '--timeout', '2')
    broke, remains = findings_of(result)
    assert broke[0].endswith(': 2 s are up, still waiting for: its compute to take it')
    assert broke[1].startswith('systemctl restart ecompute')
    found = {each['compute']: each for each in said(result)['canaries']}
    name, instance = found[frozen.uuid]['name'], found[frozen.uuid]['instance']
    assert remains[0].startswith(f'{name} on ')
    assert remains[1] == f'eschedule destroy --wait {instance}'
    assert (found[well.uuid]['gone'], found[frozen.uuid]['gone']) == (True, False)
    # It is asked to destroy it, and does so once it can.
    frozen.resume()
    assert cluster.eschedule(*remains[1].split()[1:]).code in (0, 4)
    assert cluster.eschedule('clear').code == 0
    nothing_is_left(cluster, well, frozen)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_in_the_middle(cluster: Control, number: int) -> None:
    """Of all hosts, which are asked at once: where each waits for ever, a second one would not be asked."""
    computes = [cluster.ecompute(), cluster.ecompute()]
    for each in computes:
        each.pause()
    with begun(cluster) as under_way:
        placed_on(cluster, *computes)
        under_way.send(number)
        under_way.send(signal.SIGINT)  # as timeout(1) does: it changes nothing
        until(lambda: 'are being destroyed' in under_way.stderr, 30, 'it heard')
        for each in computes:
            each.resume()
        ended = under_way.end()
    found = json.loads(ended.stdout)
    assert ended.code == (8 if found['findings'] else 1)
    assert [each['check'] for each in found['findings'] if each['check'] == 'canary'] == []
    assert {(each['said'], each['gone']) for each in found['canaries']} == {('interrupted', True)}
    nothing_is_left(cluster, *computes)


def test_who_does_not_wait_for_the_end_is_told_what_may_be_left(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    with begun(cluster) as under_way:
        placed_on(cluster, compute)

        def ended() -> bool:
            under_way.send(signal.SIGINT)
            return under_way.has_ended

        until(ended, 60, 'it does not wait any more')
        result = under_way.end()
    [(what, cure)] = findings_of(result)
    assert what.endswith(' may be left: interrupted')
    compute.resume()
    assert cluster.eschedule(*cure.split()[1:]).code in (0, 4)
    assert cluster.eschedule('clear').code == 0
    nothing_is_left(cluster, compute)


def test_an_etcd_that_goes_away_meanwhile(own_control: Control, compute: Ecompute) -> None:
    """Then it cannot be destroyed, and what is to be typed is said."""
    compute.pause()
    with begun(own_control, '--timeout', '5') as under_way:
        placed_on(own_control, compute)
        own_control.etcd.kill()
        result = under_way.end()
    assert result.code == 8
    found = json.loads(result.stdout)
    [each] = found['canaries']
    assert each['gone'] is False
    assert f'eschedule destroy --wait {each["instance"]}' in [every['cure'] for every in found['findings']]
    own_control.etcd.start()
    compute.resume()
    assert own_control.eschedule('destroy', '--wait', each['instance']).code == 0


def test_real_guests_boot_and_go(lab: Lab) -> None:
    """On three hosts at once; and an image that is not there is a finding of each of them."""
    result = lab.eschedule('doctor', '--canary', '-f', 'json', SMALL, lab.url('guest.qcow2'), '--for', 'ready')
    assert findings_of(result) == []
    assert {(each['host'], each['reached'], each['gone']) for each in said(result)['canaries']} == {
        (host, 'ready', True) for host in lab.hosts
    }
    assert not any(map(lab.domains, lab.hosts))
    assert not any(map(lab.disks, lab.hosts))
    gone = lab.eschedule('doctor', '--canary', '-f', 'json', SMALL, lab.url('nowhere.qcow2'))
    assert len(findings_of(gone)) == len(lab.hosts)
    for what, cure in findings_of(gone):
        assert 'failed at stage image' in what
        assert 'nowhere.qcow2' in what
        assert 'IMAGE_URL' in cure
    assert {each['gone'] for each in said(gone)['canaries']} == {True}
    assert lab.etcd('/instances/') == {}
