"""Read and write an etcd that enforces roles, as one of its users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from ecomp.errors import EcompError
from ecomp.model import roles
from ecomp.store.client import Put
from ecomp.store.roles import Accounts
from tests.kit.behind_roles import BehindRoles
from tests.kit.secured import etcd_of


def found(cloud: BehindRoles, user: str = 'operator-ann') -> roles.Roles:
    with closing(Accounts(etcd_of(cloud.certs, user))) as accounts:
        return accounts.roles()


def put(cloud: BehindRoles, key: str, user: str = 'compute-hv1', lease: int = 0) -> None:
    cloud.stores[user].commit([], [Put(key, 'x', lease)])


def works(deed: Callable[[], None]) -> bool:
    try:
        deed()
    except EcompError:
        return False
    return True
