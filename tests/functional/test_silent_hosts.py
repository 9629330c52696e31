"""What a silent host reported last is shown as old, with hosts that are only keys."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import StillGoing
from ecomp.model import keys
from ecomp.model.host import StoredHostname
from ecomp.model.order import Request
from ecomp.model.record import Failure, Interface, Record
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, STAGES
from ecomp.model.stored import encode
from ecomp.model.text import format_time
from ecomp.placement import providers
from ecomp.scheduler.changes import wait as wait_module
from ecomp.scheduler.changes.wait import Deadline, SilenceDetector, Wait, wait_for_stage
from ecomp.scheduler.queries.computes import describe_if_silent
from ecomp.store.client import Store
from tests.functional.cloud import IMAGE, SMALL, Cloud, make_uuid
from tests.kit.commands import Command, Result, run_eschedule, run_eschedule_process, write_config
from tests.kit.servers import wait_until

HOST_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f'
ADDRESS = Interface('default', '52:54:00:00:00:01', '10.9.0.7', 'lease')


@dataclass
class Hosts:
    cloud: Cloud
    config: Path
    project: str
    up: str
    closed: str
    silent: str

    def add(self, compute: str, name: str, state: str = ACTIVE, **fields: Any) -> str:
        """Write an instance's request and record, as eschedule and its compute do."""
        instance = make_uuid()
        named = {'name': f'{name}-{self.project}', 'project_id': self.project, 'image': IMAGE}
        request = Request(instance, {compute: SMALL}, **named, stages={'requested': f't{name}'})
        self.cloud.etcd.put(keys.request(compute, instance), encode(request))
        self.cloud.etcd.put(keys.name(named['name']), json.dumps({'version': 1, 'instance': instance}))
        if state:
            stages = {**dict.fromkeys(STAGES, 't'), 'requested': f't{name}'}
            record = Record(instance, compute, state, **named, stages=stages, addresses=(ADDRESS,))
            self.cloud.etcd.put_record(encode(replace(record, **fields)))
        return instance

    def run(self, *words: str) -> Result:
        return run_eschedule(self.config, *words)

    def list(self, *words: str) -> list[list[str]]:
        shown = self.run('list', '--project', self.project, '-f', 'value', '-c', 'NAME,STATE,REASON', *words)
        assert (shown.code, shown.stderr) == (0, ''), shown
        lines = shown.stdout.replace(f'-{self.project}', '').splitlines()
        return [line.split('\t') for line in lines]

    def revive(self, compute: str) -> None:
        self.cloud.etcd.put(keys.compute(compute), '{}', self.cloud.etcd.grant())


@pytest.fixture
def hosts(cloud: Cloud, tmp_path: Path) -> Iterator[Hosts]:
    for key in [*cloud.etcd.list_keys(keys.HOSTS), *cloud.etcd.list_keys(keys.INSTANCES)]:
        cloud.etcd.delete(key)  # other tests leave malformed records, which `list` reports
    config = write_config(tmp_path / 'schedule.yaml', cloud.etcd.endpoint, cloud.server.url)
    up, closed, silent = cloud.make_compute(), cloud.make_compute(alive=False), cloud.make_compute(alive=False)
    providers.set_inventory(cloud.placement, closed, {'VCPU': {'total': 2, 'reserved': 2}})
    for name, compute in (('up', up), ('closed', closed), ('silent', silent)):
        cloud.etcd.put(keys.hostname(compute), encode(StoredHostname(f'hv-{name}')))
    yield Hosts(cloud, config, f'p{make_uuid()[:8]}', up, closed, silent)
    for compute in (up, closed, silent):  # other tests use this etcd, too
        for key in [*cloud.etcd.list_keys(keys.HOSTS), *cloud.etcd.list_keys(keys.INSTANCES)]:
            if compute in key:
                cloud.etcd.delete(key)
        cloud.etcd.delete(keys.hostname(compute))
        cloud.etcd.delete(keys.compute(compute))


def test_list_shows_what_a_silent_host_reported_as_unknown(hosts: Hosts) -> None:
    hosts.add(hosts.up, '1')
    hosts.add(hosts.closed, '2')
    instance = hosts.add(hosts.silent, '3', fault='its disk is full')
    hosts.add(hosts.silent, '4', '')
    hosts.add(hosts.silent, '5', ERROR, error=Failure('image', 'not found', 'nothing to clean'))
    hosts.add(hosts.silent, '6', DESTROYING)
    destroyed = hosts.add(hosts.silent, '7', BUILDING)
    assert hosts.run('destroy', destroyed).code == 0
    unknown = [
        ['3', 'unknown', 'hv-silent silent, was active; its disk is full'],
        ['4', 'unknown', 'hv-silent silent, was scheduled'],
    ]
    destroying = [[name, 'destroying', 'waiting for hv-silent'] for name in '67']
    failed = ['5', 'error', 'not found (stage image)']
    assert hosts.list() == [['1', 'active', '-'], ['2', 'active', '-'], *unknown, failed, *destroying]
    assert hosts.list('--state', 'unknown') == unknown
    assert hosts.list('--state', 'active') == [['1', 'active', '-'], ['2', 'active', '-']]
    assert hosts.list('--state', 'scheduled,building,error,destroying') == [failed, *destroying]
    assert hosts.list('--state', 'unknown', '--host', 'hv-up') == []

    listed = json.loads(hosts.run('list', '--project', hosts.project, '-f', 'json').stdout)
    assert [(item['state'], item['host_state'], item['stale']) for item in listed] == [
        ('active', 'up', False), ('active', 'closed', True), ('active', 'silent', True), ('scheduled', 'silent', True),
        ('error', None, False), ('destroying', 'silent', True), ('building', 'silent', True),
    ]  # fmt: skip
    assert json.loads(hosts.run('show', instance, '-f', 'json').stdout) in listed
    # The same in the table of a host, and as before once the host is back.
    lines = hosts.run('hosts', 'hv-silent').stdout.splitlines()
    assert ['unknown' in line for line in lines if instance in line] == [True]
    hosts.revive(hosts.silent)
    assert hosts.list('--state', 'unknown') == []
    assert ['3', 'active', 'its disk is full'] in hosts.list()


def test_time_of_the_last_sign_of_life_is_shown(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.model.host.LIFE_MARGIN_SECONDS', 2)
    monkeypatch.setattr(wait_module, 'SILENCE_CHECK_SECONDS', 0.1)
    store, hostname = hosts.cloud.store, keys.hostname(hosts.silent)
    renewed, anchor = leases = store.grant(600), store.grant(600)
    hosts.cloud.etcd.put(hostname, encode(StoredHostname('hv-silent', leases)))
    name, now = f'a-{hosts.project}', format_time(datetime.now(UTC))
    old = hosts.add(hosts.silent, 'a', stages=dict.fromkeys(STAGES[:-1], now))
    hosts.add(hosts.up, 'b')

    def read_json(*words: str) -> Any:
        return json.loads(hosts.run(*words, '-f', 'json').stdout)

    # As after a restart of etcd, which makes both as old as each other.
    assert hosts.list()[0] == ['a', 'unknown', 'hv-silent silent, was active']
    assert read_json('show', old)['host_last_seen'] is None
    wait_until(lambda: (store.read_lease_age(anchor) or 0) >= 3, 20, 'the anchor is older')
    store.keep_alive(renewed)
    before = datetime.now(UTC)

    def is_right(last_seen: str) -> bool:
        # etcd reports seconds, so two answers may differ by one.
        return abs((datetime.fromisoformat(last_seen) - before).total_seconds()) <= 3

    assert is_right(read_json('show', old)['host_last_seen'])
    listed = {item['name'][0]: item['host_last_seen'] for item in read_json('list', '--project', hosts.project)}
    assert (is_right(listed['a']), listed['b']) == (True, None)
    times = ' since (....-..-.. )?..:..:..'
    assert re.fullmatch(f'hv-silent silent{times}, was active', hosts.list()[0][2])
    line = f'eschedule: {name}: unknown: hv-silent silent{times}, was active\n'
    for words in ([name], ['show', name], ['why', name]):
        assert re.fullmatch(line, hosts.run(*words).stderr)
    assert re.search(f'reached addressed, but its host hv-silent is silent{times}. Try', hosts.run('wait', old).stderr)
    assert re.search(f'its host hv-silent is silent{times} .the op', hosts.run('wait', old, '--for', 'ready').stderr)
    last_seen = {host['host']: host['last_seen'] for host in read_json('hosts')}
    assert is_right(last_seen['hv-silent'])
    assert last_seen['hv-up'] is last_seen['hv-closed'] is None
    assert 'LAST SEEN' in hosts.run('hosts', 'hv-silent').stdout
    assert 'LAST SEEN' not in hosts.run('hosts', 'hv-up').stdout

    # One lease is gone.
    store.revoke(anchor)
    assert read_json('show', old)['host_last_seen'] is None


def test_selectors_follow_the_states_that_list_shows(hosts: Hosts) -> None:
    running, unknown = hosts.add(hosts.up, '1'), hosts.add(hosts.silent, '2')

    def stop(state: str) -> Result:
        return hosts.run('stop', '--state', state, '--name', f'*-{hosts.project}')

    def read_power(compute: str, instance: str) -> str | None:
        power = hosts.cloud.read_request(compute, instance).power
        return power.action if power else None

    assert stop('stopped').code == 4
    assert stop('unknown').code == 0
    assert (read_power(hosts.up, running), read_power(hosts.silent, unknown)) == (None, 'stop')
    assert stop('active').stderr.count('stop accepted') == 1
    assert read_power(hosts.up, running) == 'stop'


def test_commands_about_one_instance_say_that_its_host_is_silent(hosts: Hosts) -> None:
    hosts.add(hosts.silent, 'a')
    name = f'a-{hosts.project}'
    line = f'eschedule: {name}: unknown: hv-silent silent, was active\n'
    assert hosts.run(name) == Result(0, '10.9.0.7\n', line)
    assert json.loads(hosts.run(name, '-f', 'json').stdout)['said'] == line.removeprefix('eschedule: ').rstrip()
    shown = hosts.run('show', name)
    assert (shown.code, shown.stderr) == (0, line)
    fields = dict(row.split(None, 1) for row in shown.stdout.splitlines())
    assert (fields['state'], fields['reason']) == ('unknown', 'hv-silent silent, was active')
    explained = hosts.run('why', name)
    assert (explained.code, explained.stderr) == (0, line)

    # The reason why there is no address yet, and this, are one line.
    waiting = hosts.add(hosts.silent, 'w', BUILDING, addresses=(), stages={'requested': 't', 'scheduled': 't'})
    line = f'eschedule: {waiting}: no address yet: building, waiting for its image; hv-silent silent, was building\n'
    assert hosts.run(waiting) == Result(6, '', line)

    assert hosts.run('destroy', name).code == 0
    assert hosts.run(name).stderr == f'eschedule: {name}: destroying: waiting for hv-silent\n'
    # Of a host that was stopped cleanly and of one that is up, nothing is said.
    for compute, name in ((hosts.closed, 'b'), (hosts.up, 'c')):
        hosts.add(compute, name)
        assert hosts.run(f'{name}-{hosts.project}') == Result(0, '10.9.0.7\n', '')


@pytest.mark.real_servers
def test_ssh_says_that_the_host_is_silent_and_goes_on(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.add(hosts.silent, 'a', host_keys=(HOST_KEY,), addresses=(ADDRESS._replace(source='arp'),))
    program = tmp_path / 'ssh'
    program.write_text('#!/bin/sh\necho connected\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setenv('HOME', str(tmp_path))
    entered = run_eschedule_process(hosts.config, 'ssh', f'a-{hosts.project}')
    line = f'eschedule: a-{hosts.project}: unknown: hv-silent silent, was active\n'
    assert entered == Result(0, 'connected\n', line)


def test_without_placement_a_closed_host_is_shown_as_silent_with_the_reason(hosts: Hosts, tmp_path: Path) -> None:
    hosts.add(hosts.closed, '1')
    config = write_config(tmp_path / 'away.yaml', hosts.cloud.etcd.endpoint, 'http://127.0.0.1:1')
    listed = run_eschedule(config, 'list', '--project', hosts.project)
    assert (listed.code, 'hv-closed silent, was active' in listed.stdout) == (1, True)
    assert 'a host that was stopped cleanly is shown as silent, too' in listed.stderr
    asked = run_eschedule(config, f'1-{hosts.project}')
    assert (asked.code, asked.stdout, asked.stderr.count('\n')) == (0, '10.9.0.7\n', 1)
    assert 'a host that was stopped cleanly is shown as silent, too' in asked.stderr
    # With living hosts alone, placement is not asked.
    hosts.revive(hosts.closed)
    assert run_eschedule(config, 'list', '--project', hosts.project).code == 0


def test_list_reads_no_requests_while_all_hosts_live(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.add(hosts.up, '1')
    silent_instance = hosts.add(hosts.silent, '2')
    reads, read = list[str](), Store.read

    def record_read(store: Store, requested_keys: Any) -> Any:
        reads.extend(requested_keys)
        return read(store, requested_keys)

    monkeypatch.setattr(Store, 'read', record_read)
    assert [row[0] for row in hosts.list('--host', 'hv-up')] == ['1']
    assert reads == []
    assert [row[0] for row in hosts.list()] == ['1', '2']
    assert reads == [keys.request(hosts.silent, silent_instance), keys.hostname(hosts.silent)]


# Waiting


def test_wait_ends_for_an_instance_on_a_silent_host(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, 'SILENCE_CHECK_SECONDS', 0.1)
    hosts.add(hosts.silent, 'a', addresses=(), stages=dict.fromkeys(STAGES[:-2], 't'))
    hosts.add(hosts.silent, 'b', '')
    reached = hosts.add(hosts.silent, 'c')
    for name, event in (('a', 'its DHCP lease'), ('b', 'its compute to accept the request')):
        waited = hosts.run('wait', f'{name}-{hosts.project}', '--timeout', '60')
        back = '(the operation continues once the host is back)'
        sentence = f'its host hv-silent is silent {back}, still waiting for {event}. Try: eschedule hosts'
        assert waited == Result(6, '', f'eschedule: {name}-{hosts.project}: {sentence}\n')
    # The guest of a stage that was reached before may be off by now.
    waited = hosts.run('wait', reached)
    assert (waited.code, waited.stdout) == (6, '')
    assert 'reached addressed, but its host hv-silent is silent' in waited.stderr


def test_wait_goes_on_while_the_host_is_closed_or_starts(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, 'SILENCE_CHECK_SECONDS', 0.1)
    instance = hosts.add(hosts.closed, 'a', addresses=(), stages={'requested': 't'})
    checked, real_check = threading.Event(), SilenceDetector.check

    def check(detector: SilenceDetector, *words: str) -> None:
        real_check(detector, *words)
        checked.set()

    monkeypatch.setattr(SilenceDetector, 'check', check)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_wait_in_thread, hosts, instance)
        for _ in range(3):
            checked.clear()
            assert checked.wait(30)
        assert not waiting.done()
        record = Record(instance, hosts.closed, ACTIVE, image=IMAGE, stages={'requested': 't', 'addressed': 't'})
        hosts.cloud.etcd.put_record(encode(record))
        assert waiting.result(60) == ACTIVE


def _wait_in_thread(hosts: Hosts, instance: str) -> str:
    silence = SilenceDetector(lambda compute: describe_if_silent(hosts.cloud.store, hosts.cloud.placement, compute))
    config = EtcdConfig((hosts.cloud.etcd.endpoint,))
    wait = Wait(config, instance, Deadline(60), lambda _: None, silence=silence)
    return wait_for_stage(wait, 'addressed').state


def test_host_is_silent_after_two_checks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
    answers = iter(['hv2 is silent', None, 'hv2 is silent', 'hv2 is silent'])
    detector = SilenceDetector(lambda _: next(answers))
    for now in (100.0, 104.0, 105.0, 110.0, 114.0):
        clock[0] = now
        detector.check('i', 'c', 'x')
    clock[0] = 115.0
    for compute_instance in 'ij':  # the second one is not checked again
        with pytest.raises(StillGoing, match='hv2 is silent'):
            detector.check(compute_instance, 'c', 'x')


@pytest.mark.real_servers
def test_watch_follows_the_presence_of_hosts(hosts: Hosts) -> None:
    hosts.add(hosts.silent, '1')
    command = ['list', '--watch', '--project', hosts.project]
    words = [sys.executable, '-m', 'ecomp.schedule', '--config', str(hosts.config), *command]
    with Command(words, hosts.config.parent) as watching:
        wait_until(lambda: 'unknown' in watching.stdout, 30, 'the first table is drawn')
        hosts.revive(hosts.silent)
        wait_until(lambda: 'active ' in watching.stdout.rpartition('INSTANCE')[2], 30, 'it is drawn again')
