"""A compute is its host's name wherever people read or type, also while it is away."""

from __future__ import annotations

import json
import uuid

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import until
from tests.kit.sharing import hosts, silence
from tests.kit.story import SMALL, boot, one_line, place


def rename(control: Control, compute: Ecompute, name: str) -> None:
    """Have another host name remembered of a compute that is away: those of a test are all on one host."""
    key = f'/hostnames/{compute.uuid}'
    until(lambda: control.etcd.keys(key), 30, 'it has written down its name')
    control.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))


def test_closed_and_silent_it_goes_by_its_name_until_it_is_forgotten(cluster: Control) -> None:
    here, closed, silent = (cluster.ecompute() for _ in range(3))
    instance = boot(cluster, f'{SMALL}&in_tree={silent.uuid}')
    closed.stop()
    rename(cluster, closed, 'hv4')
    silence(cluster, silent)
    rename(cluster, silent, 'hv5')

    assert {each: found['hostname'] for each, found in hosts(cluster).items()} == {
        here.uuid: hosts(cluster)[here.uuid]['hostname'], closed.uuid: 'hv4', silent.uuid: 'hv5',
    }  # fmt: skip
    (line,) = [each for each in cluster.eschedule('list').stdout.splitlines() if instance in each]
    assert 'hv5' in line
    assert json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)['host'] == 'hv5'
    found = cluster.eschedule('host', 'show', 'hv6', 'hv4')
    assert (found.code, 'hv4' in found.stdout) == (4, True), found
    assert found.stderr.startswith('eschedule: hv6: no compute has this host name or uuid')
    for command, done in (('disable', 'disabled: '), ('drain', 'is disabled already'), ('enable', 'enabled, as soon')):
        said = cluster.eschedule('host', command, 'hv4')
        assert (said.code, said.stderr.splitlines()[0][: len(done) + 16]) == (0, f'eschedule: hv4: {done}'), said
    refused = cluster.eschedule('--on', 'hv4', SMALL)
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n'), refused
    assert 'eschedule: hv4: is closed: its ecompute was stopped' in refused.stderr.splitlines()

    one_line(cluster.eschedule('host', 'forget', 'hv5'), 5, 'compute hv5 is not forgotten', instance)
    assert cluster.eschedule('destroy', instance).code == 0
    both = cluster.eschedule('host', 'forget', '--fenced', 'hv4', 'hv5', 'hv6')
    assert both.code == 4, both
    assert 'eschedule: hv4: its resource provider is removed' in both.stderr
    assert 'eschedule: hv5: its resource provider is removed' in both.stderr
    assert both.stderr.splitlines()[-1].startswith('eschedule: hv6: no compute has this host name or uuid')
    assert list(hosts(cluster)) == [here.uuid]
    assert cluster.etcd.keys('/hostnames/') == [f'/hostnames/{here.uuid}']
    # A record of what is gone there is kept for a day, and says nothing of a compute any more.
    assert silent.uuid not in cluster.eschedule('audit').stderr
    one_line(cluster.eschedule('host', 'forget', 'hv5'), 4, 'no compute has this host name')


def test_two_of_one_name_are_told_apart_by_their_uuids(cluster: Control) -> None:
    one, two = cluster.ecompute(), cluster.ecompute()
    name = str(hosts(cluster)[one.uuid]['hostname'])
    for words in (('--on', name, SMALL), ('host', 'drain', name), ('host', 'forget', name)):
        one_line(cluster.eschedule(*words), 5, f'{name} is the host name of 2 computes', one.uuid, two.uuid)
    assert place(cluster, SMALL, '--on', two.uuid[:6])[0] == two.uuid
    # A host that was set up anew, or one that calls itself as another does: the dead one has its name until forgotten.
    until(lambda: len(cluster.etcd.keys('/hostnames/')) == 2, 30, 'both have written down their names')
    one.stop()
    for words in (('--on', name, SMALL), ('host', 'forget', name)):
        one_line(cluster.eschedule(*words), 5, f'{name} is the host name of 2 computes', one.uuid, two.uuid)
    assert cluster.eschedule('host', 'forget', one.uuid[:8]).code == 0
    assert place(cluster, SMALL, '--on', name)[0] == two.uuid
    same = ['feed0000-0000-4000-8000-00000000000' + digit for digit in '12']
    for each in same:
        cluster.etcd.put(f'/hostnames/{each}', '{"version": 1, "hostname": "hv9"}')
    one_line(cluster.eschedule('host', 'enable', 'feed'), 2, 'feed: 2 computes begin so', *same)
    for each in same:
        assert cluster.eschedule('host', 'forget', each).stderr == f'eschedule: {each}: its name is forgotten\n'


def test_a_name_is_written_once_and_again_where_it_is_lost(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    until(lambda: cluster.etcd.keys(key), 30, 'it has written down its name')
    value = cluster.etcd.get(key)
    compute.restart()
    assert cluster.etcd.get(key) == value
    compute.stop()
    cluster.etcd.put(key, 'rubbish')
    name = str(hosts(cluster)[compute.uuid]['hostname'])
    assert name == 'None', 'what makes no sense is no name'
    compute.start()
    until(lambda: cluster.etcd.get(key) == value, 30, 'it has written it down again')


def test_what_is_written_there_is_believed_as_a_name_alone(cluster: Control) -> None:
    compute = cluster.ecompute()
    key = f'/hostnames/{compute.uuid}'
    until(lambda: cluster.etcd.keys(key), 30, 'it has written down its name')
    compute.stop()
    for name in ('\x1b[2J', 'a b', str(uuid.uuid4()), 'x' * 10_000, 7, None):
        cluster.etcd.put(key, json.dumps({'version': 1, 'hostname': name}))
        shown = cluster.eschedule('hosts')
        assert shown.code == 0, shown
        assert shown.stdout.splitlines()[1].split()[:3] == [compute.uuid, '-', 'closed']
