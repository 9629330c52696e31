"""etcd roles: which keys the owner of a certificate may write. Pure.

The common name of a certificate is a user of etcd: compute-NAME, scheduler-NAME or operator-NAME. Each compute has a
role with the name of its user, for the keys below its uuid. All schedulers share one role. Operators have etcd's own
role `root`. Every role may read all keys. https://etcd.io/docs/v3.4/op-guide/authentication/
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ecomp.model import keys

READ = 'read'
WRITE = 'write'
READ_WRITE = 'readwrite'
# etcd's own user, which authentication needs, and its own role, which may do everything.
ROOT = 'root'
SCHEDULER = 'scheduler'
USER_PREFIXES = ('compute-', 'scheduler-', 'operator-')


class Permission(NamedTuple):
    """READ, WRITE or READ_WRITE for one key, or for keys from `key` up to `range_end`."""

    kind: str
    key: str
    range_end: str = ''


Permissions = frozenset[Permission]


@dataclass(frozen=True)
class Roles:
    """The roles of each user and the permissions of each role, by name."""

    users: Mapping[str, frozenset[str]]
    roles: Mapping[str, Permissions]


class AddRole(NamedTuple):
    role: str


class AddUser(NamedTuple):
    user: str


class GrantPermission(NamedTuple):
    """Grants a permission to a role, replacing the one for the same keys."""

    role: str
    permission: Permission


class GrantRole(NamedTuple):
    user: str
    role: str


class RevokeRole(NamedTuple):
    user: str
    role: str


class RevokePermission(NamedTuple):
    role: str
    permission: Permission


Change = AddRole | AddUser | GrantPermission | GrantRole | RevokeRole | RevokePermission


def make_prefix_permission(prefix: str, kind: str = WRITE) -> Permission:
    return Permission(kind, prefix, f'{prefix[:-1]}0')  # the character after a slash


READ_ALL = make_prefix_permission('/', READ)
# Permissions of every compute and scheduler: their transactions change these keys of any instance.
_SHARED = (keys.QUEUES, keys.NAMES, keys.GROUPS, keys.QUOTAS, keys.RELEASED, keys.BOOTED, keys.USER_DATA)
SHARED_PERMISSIONS = frozenset(map(make_prefix_permission, _SHARED))


def list_compute_permissions(compute: str) -> Permissions:
    own = (make_prefix_permission(f'{prefix}{compute}/') for prefix in (keys.HOSTS, keys.INSTANCES))
    published = (keys.facts, keys.troubles, keys.findings, keys.foreign, keys.usage)
    alone = (Permission(WRITE, key(compute)) for key in (keys.compute, keys.hostname, keys.acceptance, *published))
    return SHARED_PERMISSIONS | {READ_ALL, *own, *alone}


def list_scheduler_permissions() -> Permissions:
    own = (keys.ATTEMPTS, keys.HOSTS, keys.STACKS, keys.INSTANCES, keys.AUDIT, keys.HOSTNAMES)
    return SHARED_PERMISSIONS | {READ_ALL, *map(make_prefix_permission, own)}


def make_roles(computes: Mapping[str, str], schedulers: Collection[str], operators: Collection[str]) -> Roles:
    """Return the users and roles that there should be, where `computes` is {user: uuid}."""
    users = {user: frozenset({user}) for user in computes}
    users |= {user: frozenset({SCHEDULER}) for user in schedulers}
    users |= {user: frozenset({ROOT}) for user in (ROOT, *operators)}
    roles = {name: list_compute_permissions(uuid) for name, uuid in computes.items()}
    return Roles(users, {SCHEDULER: list_scheduler_permissions(), **roles})


def plan_changes(current: Roles, target: Roles) -> list[Change]:
    """Return the changes, in order, from `current` to `target`, keeping other users and roles.

    Between two changes no user lacks a permission that it has both before and after all of them.
    """
    additions, removals = list[Change](), list[Change]()
    for role, permissions in target.roles.items():
        if role not in current.roles:
            additions.append(AddRole(role))
        before = current.roles.get(role, frozenset())
        has_keys, keeps_keys = ({each[1:] for each in granted} for granted in (before, permissions))
        missing = sorted(permissions - before, key=lambda each: each[1:])
        additions += [GrantPermission(role, each) for each in missing if each[1:] not in has_keys]
        # A grant replaces the kind of an existing permission, maybe by less: so after all additions, and the narrower
        # range first, because the wider one may have stood in for it.
        removals += [GrantPermission(role, each) for each in reversed(missing) if each[1:] in has_keys]
        removals += [RevokePermission(role, each) for each in sorted(before) if each[1:] not in keeps_keys]
    for user, roles in target.users.items():
        if user not in current.users:
            additions.append(AddUser(user))
        current_roles = current.users.get(user, frozenset())
        additions += [GrantRole(user, role) for role in sorted(roles - current_roles)]
        removals += [RevokeRole(user, role) for role in sorted(current_roles - roles)]
    return [*additions, *removals]


def list_unknown_users(current: Roles, target: Roles) -> list[str]:
    """Return the users in etcd whose names have our prefixes and that are not in `target`."""
    return sorted(user for user in current.users.keys() - target.users.keys() if user.startswith(USER_PREFIXES))


def list_computes_without_role(computes: Collection[str], current: Roles, target: Roles) -> list[str]:
    """Return the computes for whose presence key, by itself, no role has a WRITE permission."""
    granted = {permission for permissions in {**current.roles, **target.roles}.values() for permission in permissions}
    return sorted(compute for compute in computes if Permission(WRITE, keys.compute(compute)) not in granted)


def describe_change(change: Change) -> str:
    match change:
        case AddRole(role):
            return f'role {role}: added'
        case AddUser(user):
            return f'user {user}: added'
        case GrantPermission(role, permission):
            return f'role {role}: may {_describe_permission(permission)}'
        case GrantRole(user, role):
            return f'user {user}: has role {role}'
        case RevokeRole(user, role):
            return f'user {user}: no longer has role {role}'
        case RevokePermission(role, permission):
            return f'role {role}: may no longer {_describe_permission(permission)}'


def _describe_permission(permission: Permission) -> str:
    kind, key, range_end = permission
    if not range_end or permission == make_prefix_permission(key, kind):
        return f'{kind} {key}'
    return f'{kind} {key} to {range_end}'
