"""etcd's own authentication: its users and roles, and whether it asks for them.

Nobody logs in: etcd takes the common name of a client's certificate for the user (--client-cert-auth). That a user may
have no password at all etcd3's messages cannot say, so each gets one that nobody keeps.
https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (service Auth)
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from etcd3 import etcdrpc
from etcd3.etcdrpc import auth_pb2

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, Unreachable, UsageError
from ecomp.model.roles import (
    BOTH,
    READ,
    ROOT,
    WRITE,
    AddRole,
    AddUser,
    Change,
    Give,
    Grant,
    Permission,
    Revoke,
    Roles,
    Take,
)
from ecomp.store.by_etcd3 import METADATA, failures
from ecomp.store.client import Store
from ecomp.store.reasons import FAILED_PRECONDITION, INVALID_ARGUMENT, CallFailure

_TYPES = {READ: auth_pb2.Permission.READ, WRITE: auth_pb2.Permission.WRITE, BOTH: auth_pb2.Permission.READWRITE}
_KINDS = {number: kind for kind, number in _TYPES.items()}


class Accounts(Store):
    """A Store of an operator's. Denied for everything but is_on() where it is on, and we have not the role root."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self._connection.use_etcd3()  # only etcd3 has the messages

    def is_on(self) -> bool:
        """Whether authentication is on. An etcd before 3.5 says so only to somebody it does not know."""

        def ask(client: Any, limit: float) -> bool:
            try:
                self._call('Authenticate', etcdrpc.AuthenticateRequest(name='-'), client, limit)
            except CallFailure as error:
                if error.code in (FAILED_PRECONDITION, INVALID_ARGUMENT):
                    return 'not enabled' not in error.details
                raise
            return True

        return self._connection.ask(ask, Unreachable)

    def turn_on(self) -> None:
        """Turn authentication on; there has to be a user named `root`, who has the role `root`.

        UsageError if etcd knows nobody by a certificate, for it would let nobody do anything then: as it was before.
        """
        password = secrets.token_urlsafe(32)
        self._change('UserChangePassword', etcdrpc.AuthUserChangePasswordRequest(name=ROOT, password=password))
        self._change('AuthEnable', etcdrpc.AuthEnableRequest())
        try:
            self.check()
        except Unreachable:
            raise
        except EcompError as error:
            token = self._look('Authenticate', etcdrpc.AuthenticateRequest(name=ROOT, password=password)).token
            self._change('AuthDisable', etcdrpc.AuthDisableRequest(), ('token', token))
            reason = 'knows nobody by a certificate: start it with --client-cert-auth, each of its members'
            raise UsageError(f'etcd at {self.where} {reason}') from error

    def turn_off(self) -> None:
        """Turn authentication off; users and roles stay."""
        self._change('AuthDisable', etcdrpc.AuthDisableRequest())

    def check(self) -> None:
        """Denied if we may do none of this."""
        self._look('UserList', etcdrpc.AuthUserListRequest())

    def roles(self) -> Roles:
        """Read all users and roles."""
        users = self._look('UserList', etcdrpc.AuthUserListRequest()).users
        names = self._look('RoleList', etcdrpc.AuthRoleListRequest()).roles
        return Roles(
            {each: frozenset(self._look('UserGet', etcdrpc.AuthUserGetRequest(name=each)).roles) for each in users},
            {
                each: frozenset(map(_permission, self._look('RoleGet', etcdrpc.AuthRoleGetRequest(role=each)).perm))
                for each in names
            },
        )

    def apply(self, change: Change) -> None:
        """Make one change; UnknownOutcome when no answer came: look again."""
        match change:
            case AddRole(role):
                self._change('RoleAdd', etcdrpc.AuthRoleAddRequest(name=role))
            case AddUser(user):
                self._change('UserAdd', etcdrpc.AuthUserAddRequest(name=user, password=secrets.token_urlsafe(32)))
            case Grant(role, Permission(kind, key, end)):
                permission = auth_pb2.Permission(permType=_TYPES[kind], key=key.encode(), range_end=end.encode())
                request = etcdrpc.AuthRoleGrantPermissionRequest(name=role, perm=permission)
                self._change('RoleGrantPermission', request)
            case Revoke(role, Permission(_, key, end)):
                # etcd3's messages have text here, in which a key that is none does not fit: it is of somebody else's.
                request = etcdrpc.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=end)
                self._change('RoleRevokePermission', request)
            case Give(user, role):
                self._change('UserGrantRole', etcdrpc.AuthUserGrantRoleRequest(user=user, role=role))
            case Take(user, role):
                self._change('UserRevokeRole', etcdrpc.AuthUserRevokeRoleRequest(name=user, role=role))

    def _look(self, name: str, request: Any) -> Any:
        return self._read(partial(self._call, name, request))

    def _change(self, name: str, request: Any, *told: tuple[str, str]) -> None:
        self._write(partial(self._call, name, request, told=told))

    @staticmethod
    def _call(name: str, request: Any, client: Any, limit: float, told: Sequence[tuple[str, str]] = ()) -> Any:
        with failures():
            return getattr(etcdrpc.AuthStub(client.channel), name)(request, limit, metadata=(*METADATA, *told))


def _permission(found: Any) -> Permission:
    key, end = found.key.decode(errors='replace'), found.range_end.decode(errors='replace')
    return Permission(_KINDS[found.permType], key, end)
