"""An etcd with certificates and roles, for two computes, a scheduler and an operator."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ecomp.lab import certs
from ecomp.store.client import Store
from tests.kit.secured import SecuredEtcd, certify, load_etcd_config

USERS = ('compute-hv1', 'compute-hv2', 'scheduler-shell', 'operator-ann')


class EtcdWithRoles:
    """An etcd with roles. `stores` maps each user to a store with the user's certificate."""

    def __init__(self, directory: Path, at_exit: ExitStack) -> None:
        self.certs = directory / 'certs'
        self._at_exit = at_exit
        certify(self.certs, 1)
        self.etcd = at_exit.enter_context(SecuredEtcd(directory / 'etcd', self.certs))
        self.computes = {f'compute-hv{number}': str(uuid.uuid4()) for number in (1, 2)}
        uuids_by_host = {user.removeprefix('compute-'): compute for user, compute in self.computes.items()}
        certify(self.certs, self.etcd.port, uuids_by_host, ('shell',), ('ann',))
        self.stores = {user: self.open_store(user) for user in USERS}

    def open_store(self, user: str) -> Store:
        store = Store(load_etcd_config(self.certs, user))
        self._at_exit.callback(store.close)
        return store

    def enable(self) -> list[str]:
        # The warning about this etcd's version is left out.
        output: list[str] = []
        certs.enable_roles(self.certs, datetime.now(UTC), output.append)
        return [line for line in output if not line.startswith('warning: ')]

    def disable(self) -> list[str]:
        output: list[str] = []
        certs.disable_roles(self.certs, output.append)
        return output

    def write_config(self, user: str, placement: str, **settings: Any) -> Path:
        etcd = {'endpoints': [f'localhost:{self.etcd.port}'], 'ca_cert': 'ca.crt'}
        etcd |= {'cert_cert': 'client.crt', 'cert_key': 'client.key'}
        path = self.certs / user / 'other.yaml'
        path.write_text(yaml.safe_dump({'etcd': etcd, 'placement': {'endpoint': placement}, **settings}))
        return path

    def etcdctl(self, user: str, *words: str) -> tuple[int, str]:
        user_certs = self.certs / user
        command = ['etcdctl', '--endpoints', f'localhost:{self.etcd.port}', f'--cacert={user_certs}/ca.crt']
        command += [f'--cert={user_certs}/client.crt', f'--key={user_certs}/client.key', *words]
        environment = {**os.environ, 'ETCDCTL_API': '3'}
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        return result.returncode, result.stdout + result.stderr


@contextmanager
def start_etcd_with_roles(directory: Path) -> Iterator[EtcdWithRoles]:
    """Start an etcd whose roles are not enabled yet."""
    with ExitStack() as at_exit:
        yield EtcdWithRoles(directory, at_exit)
