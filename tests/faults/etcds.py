"""What the fault rows do to etcd and placement: wipe, restore and fill them; etcd with several members or TLS."""

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
from tests.kit.servers import Etcd, PlacementServer, until

DATABASE = 'placement.sqlite'


def wipe(etcd: Etcd) -> None:
    """Take everything from it, while it is down; it comes back with nothing."""
    if etcd.is_running:
        etcd.kill()
    shutil.rmtree(etcd.directory / 'data')
    etcd.start()


class Snapshot:
    """A copy of an etcd's data, as a backup of the machine's disk would be."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._copy = etcd.directory / 'copy'
        shutil.rmtree(self._copy, ignore_errors=True)
        etcd.stop()
        shutil.copytree(etcd.directory / 'data', self._copy)
        etcd.start()

    def restore(self) -> None:
        """Go back to it."""
        if self._etcd.is_running:
            self._etcd.kill()
        shutil.rmtree(self._etcd.directory / 'data')
        shutil.copytree(self._copy, self._etcd.directory / 'data')
        self._etcd.start()


class SavedSnapshot:
    """A snapshot made and restored with etcdctl, as etcd's documentation says."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._file = etcd.directory / 'saved.db'
        self._file.unlink(missing_ok=True)
        _etcdctl(f'--endpoints={etcd.endpoint}', 'snapshot', 'save', str(self._file))

    def restore(self) -> None:
        """Go back to it, under the same names."""
        if self._etcd.is_running:
            self._etcd.kill()
        data = self._etcd.directory / 'data'
        shutil.rmtree(data)
        options = {each.partition('=')[0]: each for each in self._etcd.command()[1:]}
        names = [options['--initial-cluster'], options['--initial-advertise-peer-urls']]
        _etcdctl('snapshot', 'restore', str(self._file), f'--data-dir={data}', *names)
        self._etcd.start()


def save_placement(control: Control) -> None:
    """Take a copy of placement's database. It is stopped meanwhile, so that it is whole."""
    control.placement.stop()
    shutil.copy(control.placement.directory / DATABASE, control.directory / DATABASE)
    control.placement.start()


def restore_placement(control: Control) -> None:
    """Put the copy back."""
    control.placement.stop()
    for each in control.placement.directory.glob(f'{DATABASE}-*'):
        each.unlink()  # a journal of the newer one
    shutil.copy(control.directory / DATABASE, control.placement.directory / DATABASE)
    control.placement.start()


def fill(etcd: Etcd) -> None:
    """Fill an etcd that has a small quota until its alarm is raised."""

    def is_full() -> bool:
        try:
            etcd.put('/fill', 'x' * (1 << 20))
        except urllib.error.HTTPError:
            return True
        return False

    until(is_full, 30, 'etcd has no space left')
    assert etcd.call('maintenance/alarm', {'action': 'GET'}).get('alarms'), 'the alarm is raised'


def make_room(etcd: Etcd) -> None:
    """What an operator does about NOSPACE: https://etcd.io/docs/v3.4/op-guide/maintenance/#space-quota"""
    etcd.delete('/fill')
    etcd.compact()
    etcd.call('maintenance/defragment', {})
    for alarm in etcd.call('maintenance/alarm', {'action': 'GET'}).get('alarms', []):
        etcd.call('maintenance/alarm', {**alarm, 'action': 'DEACTIVATE'})


class EtcdCluster:
    """Three members, by the names their clients call them; `with` starts them, and ends them in whatever state."""

    def __init__(self, directory: Path, hosts: Sequence[str], tls: Sequence[Tls | None] = (None, None, None)) -> None:
        names = [f'm{number}' for number in range(3)]
        self.members = [
            Member(directory / name, name, files, host) for name, files, host in zip(names, tls, hosts, strict=True)
        ]
        initial = ','.join(each.initial for each in self.members)
        for each in self.members:
            each.initial = initial

    def __enter__(self) -> Self:
        try:
            for each in self.members:
                each.launch()
            for each in self.members:
                each.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.members:
            each.close()

    def replace(self, number: int) -> None:
        """Exchange a member that is lost for one without data, at the same addresses."""
        lost, other = self.members[number], self.members[(number + 1) % 3]
        self.move_leader(other)  # or all would wait for an election
        lost.kill()

        def is_removed() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # 503 while it still counts the lost one as connected
                known = other.call('cluster/member/list', {})['members']
                for each in known:
                    if each['name'] == lost.member:
                        known = other.call('cluster/member/remove', {'ID': each['ID']})['members']
                return all(each['name'] != lost.member for each in known)
            return False

        def is_added() -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # not while a leader is being elected
                return bool(other.call('cluster/member/add', {'peerURLs': [lost.peer]}))
            return False

        until(is_removed, 20, f'{lost.member} is removed')
        until(is_added, 20, f'{lost.member} is added')
        shutil.rmtree(lost.directory / 'data')
        lost.state = 'existing'
        lost.start()

    @property
    def endpoints(self) -> list[str]:
        """All of them, as `endpoints:` has them."""
        return [each.endpoint for each in self.members]

    def leader(self) -> Member:
        """Who leads now."""

        def found() -> Member | None:
            for each in self.members:
                with contextlib.suppress(OSError, KeyError):
                    status = each.call('maintenance/status', {}, timeout=1) if each.is_running else {}
                    if status and status['leader'] == status['header']['member_id']:
                        return each
            return None

        leader = until(found, 20, 'a member leads')
        assert leader is not None
        return leader

    def move_leader(self, to: Member) -> None:
        """Let this member lead."""
        leader = self.leader()
        if leader is not to:
            status = to.call('maintenance/status', {})
            _etcdctl(f'--endpoints={leader.endpoint}', 'move-leader', f'{int(status["header"]["member_id"]):x}')


class EtcdControl(Control):
    """A Control whose commands read `section` as the `etcd:` of their configuration; the checks ask `etcd` itself."""

    def __init__(self, etcd: Etcd, placement: PlacementServer, directory: Path, section: Mapping[str, Any]) -> None:
        super().__init__(etcd, placement, directory, mortal=True)
        self.section = dict(section)
        self.configure(self.schedule_yaml)

    def configure(self, path: Path) -> None:
        """Have a configuration file say the section as it is now."""
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), 'etcd': self.section}))

    def ecompute(self, inventory: str | None = 'VCPU:4,DISK_GB:10,MEMORY_MB:512', **settings: Any) -> Ecompute:
        """A started fake ecompute, ended with this."""
        compute = _Compute(self.etcd, self.placement.url, inventory, **settings)
        self.configure(compute.config)
        return self.at_exit.enter_context(compute)


class _Compute(Ecompute):
    def __init__(self, etcd: Etcd, placement: str, inventory: str | None, **settings: Any) -> None:
        super().__init__(etcd.endpoint, placement, inventory, **settings)
        self._asked = etcd

    def is_ready(self) -> bool:
        """As any ecompute, told by the etcd that the checks ask."""
        try:
            there = self._asked.get(f'/computes/{self.uuid}') is not None
        except OSError:
            return False
        return there and f' {self.pid} ready: ' in self.last_words(1000)


def _etcdctl(*words: str) -> None:
    settings = {**os.environ, 'ETCDCTL_API': '3'}
    done = subprocess.run(['etcdctl', *words], capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr
