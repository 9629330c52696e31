"""etcd roles: which keys the owner of a certificate may write. Pure.

A certificate's common name is etcd's user: compute-NAME, scheduler-NAME, operator-NAME. Each compute has its own role,
of the same name, for the keys below its uuid; the schedulers share one; operators have etcd's own role `root`. Every
role may read all keys. https://etcd.io/docs/v3.4/op-guide/authentication/
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ecomp.model import keys

READ = 'read'
WRITE = 'write'
BOTH = 'readwrite'
# etcd's own user, which authentication needs, and its own role, which may do everything.
ROOT = 'root'
SCHEDULER = 'scheduler'
KINDS = ('compute-', 'scheduler-', 'operator-')


class Permission(NamedTuple):
    """READ, WRITE or BOTH for one key or, with `range_end`, for keys from `key` up to that."""

    kind: str
    key: str
    range_end: str = ''


Grants = frozenset[Permission]


@dataclass(frozen=True)
class Roles:
    """The roles of each user and the permissions of each role, by name."""

    users: Mapping[str, frozenset[str]]
    roles: Mapping[str, Grants]


class AddRole(NamedTuple):
    """Adds a role without permissions."""

    role: str


class AddUser(NamedTuple):
    """Adds a user without roles."""

    user: str


class Grant(NamedTuple):
    """Grants a permission to a role, replacing the one for the same keys."""

    role: str
    permission: Permission


class Give(NamedTuple):
    """Grants a role to a user."""

    user: str
    role: str


class Take(NamedTuple):
    """Revokes a role from a user."""

    user: str
    role: str


class Revoke(NamedTuple):
    """Revokes the permission for these keys from a role."""

    role: str
    permission: Permission


Change = AddRole | AddUser | Grant | Give | Take | Revoke


def below(prefix: str, kind: str = WRITE) -> Permission:
    """Return the permission for all keys below a prefix, which ends with a slash."""
    return Permission(kind, prefix, f'{prefix[:-1]}0')  # the character after a slash


EVERYTHING = below('/', READ)
# Permissions of every compute and scheduler: their transactions change these keys of any instance.
SHARED = frozenset(map(below, (keys.QUEUES, keys.NAMES, keys.GROUPS, keys.QUOTAS, keys.RELEASED, keys.BOOTED)))


def of_compute(compute: str) -> Grants:
    """Return a compute's permissions: the shared ones, and to write the keys with its uuid."""
    own = (below(f'{prefix}{compute}/') for prefix in (keys.HOSTS, keys.INSTANCES, keys.DIGESTS))
    named = keys.compute(compute), keys.hostname(compute), keys.accepted(compute)
    alone = (Permission(WRITE, key) for key in named)
    return SHARED | {EVERYTHING, *own, *alone}


def of_scheduler() -> Grants:
    """Return the permissions of a machine that runs eschedule."""
    own = (keys.ATTEMPTS, keys.HOSTS, keys.USER_DATA, keys.INSTANCES, keys.AUDIT, keys.DIGESTS, keys.HOSTNAMES)
    return SHARED | {EVERYTHING, *map(below, own)}


def wanted(computes: Mapping[str, str], schedulers: Collection[str], operators: Collection[str]) -> Roles:
    """Return the users and roles that there should be; `computes` is {user: compute's uuid}."""
    users = {user: frozenset({user}) for user in computes}
    users |= {user: frozenset({SCHEDULER}) for user in schedulers}
    users |= {user: frozenset({ROOT}) for user in (ROOT, *operators)}
    return Roles(users, {SCHEDULER: of_scheduler(), **{name: of_compute(uuid) for name, uuid in computes.items()}})


def changes(found: Roles, wanted: Roles) -> list[Change]:
    """Return the changes, in order, from `current` to `target`; other users and roles stay.

    Between two changes no user lacks a permission that it has both before and after all of them.
    """
    additions: list[Change] = []
    removals: list[Change] = []
    for role, permissions in wanted.roles.items():
        if role not in found.roles:
            additions.append(AddRole(role))
        before = found.roles.get(role, frozenset())
        has_keys, keeps_keys = ({each[1:] for each in granted} for granted in (before, permissions))
        missing = sorted(permissions - before, key=lambda each: each[1:])
        additions += [Grant(role, each) for each in missing if each[1:] not in has_keys]
        # A grant replaces the kind of an existing permission, maybe by less: so after all additions, and the narrower
        # range first, because the wider one may have stood in for it.
        removals += [Grant(role, each) for each in reversed(missing) if each[1:] in has_keys]
        removals += [Revoke(role, each) for each in sorted(before) if each[1:] not in keeps_keys]
    for user, roles in wanted.users.items():
        if user not in found.users:
            additions.append(AddUser(user))
        current_roles = found.users.get(user, frozenset())
        additions += [Give(user, role) for role in sorted(roles - current_roles)]
        removals += [Take(user, role) for role in sorted(current_roles - roles)]
    return [*additions, *removals]


def unknown(found: Roles, wanted: Roles) -> list[str]:
    """Return the users in etcd whose names have our prefixes and that are not in `target`."""
    return sorted(user for user in found.users.keys() - wanted.users.keys() if user.startswith(KINDS))


def without_role(computes: Collection[str], found: Roles, wanted: Roles) -> list[str]:
    """Return the uuids of `computes` for which neither `current` nor `target` has a role."""
    granted = {permission for permissions in {**found.roles, **wanted.roles}.values() for permission in permissions}
    return sorted(compute for compute in computes if Permission(WRITE, keys.compute(compute)) not in granted)


def described(change: Change) -> str:
    """Describe a change for the user."""
    match change:
        case AddRole(role):
            return f'role {role}: added'
        case AddUser(user):
            return f'user {user}: added'
        case Grant(role, permission):
            return f'role {role}: may {_words(permission)}'
        case Give(user, role):
            return f'user {user}: has role {role}'
        case Take(user, role):
            return f'user {user}: has role {role} no more'
        case Revoke(role, permission):
            return f'role {role}: may no more {_words(permission)}'


def _words(permission: Permission) -> str:
    kind, key, range_end = permission
    return f'{kind} {key}' if not range_end or permission == below(key, kind) else f'{kind} {key} to {range_end}'
