"""Read and write an etcd that enforces roles, as one of its users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from ecomp.errors import EcompError
from ecomp.model import roles
from ecomp.store.client import Put
from ecomp.store.roles import Accounts
from tests.kit.behind_roles import EtcdWithRoles
from tests.kit.secured import load_etcd_config


def read_roles(cloud: EtcdWithRoles, user: str = 'operator-ann') -> roles.Roles:
    with closing(Accounts(load_etcd_config(cloud.certs, user))) as accounts:
        return accounts.read_roles()


def put_key(cloud: EtcdWithRoles, key: str, user: str = 'compute-hv1', lease: int = 0) -> None:
    cloud.stores[user].commit([], [Put(key, 'x', lease)])


def is_allowed(action: Callable[[], None]) -> bool:
    try:
        action()
    except EcompError:
        return False
    return True
