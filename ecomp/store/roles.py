"""etcd's authentication: users and roles.

https://etcd.io/docs/v3.4/dev-guide/api_reference_v3/ (service Auth).
etcd takes the common name of a client certificate as the user (--client-cert-auth).
"""

from __future__ import annotations

import secrets
from typing import Any

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, UnknownOutcome, Unreachable, UsageError
from ecomp.model import roles
from ecomp.store.connection import Connection
from ecomp.store.messages import FAILED_PRECONDITION, INVALID_ARGUMENT, AuthRequest, CallFailure, make_permission

# etcd's kinds of permissions, by number.
_KINDS = (roles.READ, roles.WRITE, roles.READ_WRITE)


class Accounts:
    """An operator's access to etcd's authentication, which needs the role root once enabled."""

    def __init__(self, config: EtcdConfig) -> None:
        self._connection = Connection(config)
        self.endpoints = self._connection.endpoints

    def close(self) -> None:
        self._connection.close()

    def is_enabled(self) -> bool:
        """Return whether authentication is enabled, for which no role is needed."""
        try:
            # As an unknown user: before 3.5 etcd reveals it to no other.
            self._query('Authenticate', '-')
        except EcompError as error:
            failure = error.__cause__
            if isinstance(failure, CallFailure) and failure.code in (FAILED_PRECONDITION, INVALID_ARGUMENT):
                return 'not enabled' not in failure.details
            raise
        return True

    def enable(self) -> None:
        """Enable authentication, for which a user named `root` with the role `root` must exist.

        After Unreachable or UnknownOutcome authentication may be enabled.
        The password of the etcd user `root` is replaced by a random one that is not kept.

        Raises:
            UsageError: etcd takes no user from certificates, so it would refuse everything. It is disabled again.
        """
        password = secrets.token_urlsafe(32)
        self._change('UserChangePassword', roles.ROOT, password)
        self._change('AuthEnable')
        try:
            self.require_access()
        except Unreachable:
            raise
        except EcompError as error:
            token = self._query('Authenticate', roles.ROOT, password).names[0]
            self._change('AuthDisable', token=token)
            cure = 'start each member with --client-cert-auth'
            raise UsageError(f'etcd at {self.endpoints} ignores the user in a certificate. Fix: {cure}') from error

    def disable(self) -> None:
        self._change('AuthDisable')  # users and roles stay

    def require_access(self) -> None:
        """Raise Denied if we may not read or change users and roles, by listing the users."""
        self._query('UserList')

    def read_roles(self) -> roles.Roles:
        """Read all users and roles, with a query for each."""
        users, names = self._query('UserList').names, self._query('RoleList').names
        return roles.Roles(
            {user: frozenset(self._query('UserGet', user).names) for user in users},
            {role: frozenset(map(_parse_permission, self._query('RoleGet', role).permissions)) for role in names},
        )

    def apply(self, change: roles.Change) -> None:
        """Make a change, after whose UnknownOutcome the roles have to be read again."""
        match change:
            case roles.AddRole(role):
                self._change('RoleAdd', role)
            case roles.AddUser(user):
                # etcd 3.3 has no users without a password, so each gets one that is not kept.
                self._change('UserAdd', user, secrets.token_urlsafe(32))
            case roles.GrantPermission(role, roles.Permission(kind, key, end)):
                self._change('RoleGrantPermission', role, make_permission(_KINDS.index(kind), key, end))
            case roles.RevokePermission(role, roles.Permission(_, key, end)):
                # A key that is not UTF-8 was read as other text, so this does not find it: it is not ours.
                self._change('RoleRevokePermission', role, key, end)
            case roles.GrantRole(user, role):
                self._change('UserGrantRole', user, role)
            case roles.RevokeRole(user, role):
                self._change('UserRevokeRole', user, role)

    def _query(self, name: str, *values: str | bytes) -> Any:
        return self._connection.ask(AuthRequest(name, dict(enumerate(values, 1))), Unreachable)

    def _change(self, name: str, *values: str | bytes, token: str = '') -> None:
        self._connection.ask(AuthRequest(name, dict(enumerate(values, 1)), token), UnknownOutcome)


def _parse_permission(message: Any) -> roles.Permission:
    key, end = message.key.decode(errors='replace'), message.range_end.decode(errors='replace')
    return roles.Permission(_KINDS[message.kind], key, end)
