"""An etcd behind certificates that holds each to its role: two computes, a scheduler and an operator."""

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
from tests.kit.secured import Secured, certify, etcd_of

USERS = ('compute-hv1', 'compute-hv2', 'scheduler-shell', 'operator-ann')


class BehindRoles:
    """`stores` by user, each with that one's certificate; `computes` are uuids by user."""

    def __init__(self, directory: Path, at_exit: ExitStack) -> None:
        self.certs = directory / 'certs'
        self._at_exit = at_exit
        certify(self.certs, 1)
        self.etcd = at_exit.enter_context(Secured(directory / 'etcd', self.certs))
        self.computes = {f'compute-hv{number}': str(uuid.uuid4()) for number in (1, 2)}
        named = {user.removeprefix('compute-'): each for user, each in self.computes.items()}
        certify(self.certs, self.etcd.port, named, ('shell',), ('ann',))
        self.stores = {user: self.store(user) for user in USERS}

    def store(self, user: str) -> Store:
        store = Store(etcd_of(self.certs, user))
        self._at_exit.callback(store.close)
        return store

    def enable(self) -> list[str]:
        """What elab certs --enable does; what it says but for the warning of this etcd's version."""
        said: list[str] = []
        certs.enable(self.certs, datetime.now(UTC), said.append)
        return [line for line in said if not line.startswith('warning: ')]

    def disable(self) -> list[str]:
        """What elab certs --disable does; what it says."""
        said: list[str] = []
        certs.disable(self.certs, said.append)
        return said

    def configured(self, user: str, placement: str, **settings: Any) -> Path:
        """A configuration of this user's, for a placement that takes everybody."""
        etcd = {'endpoints': [f'localhost:{self.etcd.port}'], 'ca_cert': 'ca.crt'}
        etcd |= {'cert_cert': 'client.crt', 'cert_key': 'client.key'}
        path = self.certs / user / 'other.yaml'
        path.write_text(yaml.safe_dump({'etcd': etcd, 'placement': {'endpoint': placement}, **settings}))
        return path

    def etcdctl(self, user: str, *words: str) -> tuple[int, str]:
        """The exit code and what etcd's own client says with this user's certificate, whatever ecomp thinks."""
        own = self.certs / user
        command = ['etcdctl', '--endpoints', f'localhost:{self.etcd.port}', f'--cacert={own}/ca.crt']
        command += [f'--cert={own}/client.crt', f'--key={own}/client.key', *words]
        environment = {**os.environ, 'ETCDCTL_API': '3'}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        return done.returncode, done.stdout + done.stderr


@contextmanager
def behind_roles(directory: Path) -> Iterator[BehindRoles]:
    """One that does not ask for roles yet."""
    with ExitStack() as at_exit:
        yield BehindRoles(directory, at_exit)
