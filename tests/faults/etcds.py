"""Wipe, restore and fill etcd and placement, and run etcd with several members or TLS."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.kit.commands import Control, Ecompute
from tests.kit.etcd_member import Member as Member
from tests.kit.etcd_member import Tls as Tls
from tests.kit.servers import Etcd, PlacementServer, wait_until

DATABASE = 'placement.sqlite'


def wipe(etcd: Etcd) -> None:
    if etcd.is_running:
        etcd.kill()
    shutil.rmtree(etcd.directory / 'data')
    etcd.start()


class Snapshot:
    """A copy of etcd's data directory, like a backup of the machine's disk."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._copy = etcd.directory / 'copy'
        shutil.rmtree(self._copy, ignore_errors=True)
        etcd.stop()
        shutil.copytree(etcd.directory / 'data', self._copy)
        etcd.start()

    def restore(self) -> None:
        if self._etcd.is_running:
            self._etcd.kill()
        shutil.rmtree(self._etcd.directory / 'data')
        shutil.copytree(self._copy, self._etcd.directory / 'data')
        self._etcd.start()


class SavedSnapshot:
    """A snapshot saved and restored with etcdctl, as etcd's documentation describes."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._file = etcd.directory / 'saved.db'
        self._file.unlink(missing_ok=True)
        _run_etcdctl(f'--endpoints={etcd.endpoint}', 'snapshot', 'save', str(self._file))

    def restore(self) -> None:
        """Restore the snapshot under the same member names."""
        if self._etcd.is_running:
            self._etcd.kill()
        data = self._etcd.directory / 'data'
        shutil.rmtree(data)
        options = {option.partition('=')[0]: option for option in self._etcd.command()[1:]}
        names = [options['--initial-cluster'], options['--initial-advertise-peer-urls']]
        _run_etcdctl('snapshot', 'restore', str(self._file), f'--data-dir={data}', *names)
        self._etcd.start()


def save_placement(control: Control) -> None:
    # Placement is stopped, so that the copy is consistent.
    control.placement.stop()
    shutil.copy(control.placement.directory / DATABASE, control.directory / DATABASE)
    control.placement.start()


def restore_placement(control: Control) -> None:
    control.placement.stop()
    for journal in control.placement.directory.glob(f'{DATABASE}-*'):
        journal.unlink()  # the write-ahead log of the newer database
    shutil.copy(control.directory / DATABASE, control.placement.directory / DATABASE)
    control.placement.start()


def fill(etcd: Etcd) -> None:
    """Fill an etcd that has a small quota until it raises its NOSPACE alarm."""

    def is_full() -> bool:
        try:
            etcd.put('/fill', 'x' * (1 << 20))
        except urllib.error.HTTPError:
            return True
        return False

    wait_until(is_full, 30, 'etcd has no space left')
    assert etcd.call('maintenance/alarm', {'action': 'GET'}).get('alarms'), 'the alarm is raised'


def clear_space_alarm(etcd: Etcd) -> None:
    # See https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota.
    etcd.delete('/fill')
    etcd.compact()
    etcd.call('maintenance/defragment', {})
    for alarm in etcd.call('maintenance/alarm', {'action': 'GET'}).get('alarms', []):
        etcd.call('maintenance/alarm', {**alarm, 'action': 'DEACTIVATE'})


class EtcdCluster:
    """Three members under the names that their clients use."""

    def __init__(self, directory: Path, hosts: Sequence[str], tls: Sequence[Tls | None] = (None, None, None)) -> None:
        names = [f'm{number}' for number in range(3)]
        self.members = [
            Member(directory / name, name, files, host) for name, files, host in zip(names, tls, hosts, strict=True)
        ]
        initial = ','.join(member.initial for member in self.members)
        for member in self.members:
            member.initial = initial

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.launch()
            for member in self.members:
                member.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()

    def replace(self, number: int) -> None:
        lost, other = self.members[number], self.members[(number + 1) % 3]
        self.move_leader(other)  # otherwise every client would wait for an election
        lost.kill()

        def is_removed() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # 503 while it still counts the lost member as connected
                members = other.call('cluster/member/list', {})['members']
                for member in members:
                    if member['name'] == lost.member:
                        members = other.call('cluster/member/remove', {'ID': member['ID']})['members']
                return all(member['name'] != lost.member for member in members)
            return False

        def is_added() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # refused while a leader is being elected
                return bool(other.call('cluster/member/add', {'peerURLs': [lost.peer]}))
            return False

        wait_until(is_removed, 20, f'{lost.member} is removed')
        wait_until(is_added, 20, f'{lost.member} is added')
        shutil.rmtree(lost.directory / 'data')
        lost.state = 'existing'
        lost.start()

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def find_leader(self) -> Member:
        def find_leading_member() -> Member | None:
            for member in self.members:
                with contextlib.suppress(OSError, KeyError):
                    status = member.call('maintenance/status', {}, timeout=1) if member.is_running else {}
                    if status and status['leader'] == status['header']['member_id']:
                        return member
            return None

        leader = wait_until(find_leading_member, 20, 'a member leads')
        assert leader is not None
        return leader

    def move_leader(self, to: Member) -> None:
        leader = self.find_leader()
        if leader is not to:
            status = to.call('maintenance/status', {})
            _run_etcdctl(f'--endpoints={leader.endpoint}', 'move-leader', f'{int(status["header"]["member_id"]):x}')


class EtcdControl(Control):
    """A Control whose commands read `section` as their `etcd:`. The checks query `etcd`."""

    def __init__(self, etcd: Etcd, placement: PlacementServer, directory: Path, section: Mapping[str, Any]) -> None:
        super().__init__(etcd, placement, directory, is_mortal=True)
        self.section = dict(section)
        self.configure(self.schedule_yaml)

    def configure(self, path: Path) -> None:
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), 'etcd': self.section}))

    def ecompute(self, inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512', **settings: Any) -> Ecompute:
        compute = _Compute(self.etcd, self.placement.url, inventory, **settings)
        self.configure(compute.config)
        return self.at_exit.enter_context(compute)


class _Compute(Ecompute):
    def __init__(self, etcd: Etcd, placement: str, inventory: str | None, **settings: Any) -> None:
        super().__init__(etcd.endpoint, placement, inventory, **settings)
        self._checking_etcd = etcd

    def is_ready(self) -> bool:
        try:
            is_present = self._checking_etcd.get(f'/computes/{self.uuid}') is not None
        except OSError:
            return False
        return is_present and f' {self.pid} ready: ' in self.tail_log(1000)


def _run_etcdctl(*words: str) -> None:
    settings = {**os.environ, 'ETCDCTL_API': '3'}
    process = subprocess.run(['etcdctl', *words], capture_output=True, text=True, check=False, env=settings)
    assert process.returncode == 0, process.stderr
