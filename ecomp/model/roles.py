"""Who may write what in etcd: the role of each certificate. Pure.

A certificate's common name is etcd's user: compute-NAME, scheduler-NAME, operator-NAME. Each compute has a role of its
own, of the same name, for what lies below its uuid; the schedulers share one; operators have etcd's own role `root`.
Everybody who has a role reads all keys of ours.
https://etcd.io/docs/v3.4/op-guide/authentication/
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ecomp.model import keys

READ, WRITE, BOTH = 'read', 'write', 'readwrite'
ROOT = 'root'
"""The name of etcd's own user, which authentication needs, and of its own role, which may do everything."""
SCHEDULER = 'scheduler'
KINDS = ('compute-', 'scheduler-', 'operator-')


class Permission(NamedTuple):
    """What may be done, READ, WRITE or BOTH, to `key` alone or, with `range_end`, to keys from `key` up to there."""

    kind: str
    key: str
    range_end: str = ''


Grants = frozenset[Permission]


@dataclass(frozen=True)
class Roles:
    """The roles of each user, and the permissions of each role, by name."""

    users: Mapping[str, frozenset[str]]
    roles: Mapping[str, Grants]


class AddRole(NamedTuple):
    """Add a role without permissions."""

    role: str


class AddUser(NamedTuple):
    """Add a user without roles."""

    user: str


class Grant(NamedTuple):
    """Give the role this permission, in place of the one for the same keys."""

    role: str
    permission: Permission


class Give(NamedTuple):
    """Give the user the role."""

    user: str
    role: str


class Take(NamedTuple):
    """Take the role from the user."""

    user: str
    role: str


class Revoke(NamedTuple):
    """Take the permission for these keys from the role."""

    role: str
    permission: Permission


Change = AddRole | AddUser | Grant | Give | Take | Revoke


def below(prefix: str, kind: str = WRITE) -> Permission:
    """The permission for every key under a prefix that ends with a slash."""
    return Permission(kind, prefix, f'{prefix[:-1]}0')  # the character after a slash


EVERYTHING = below('/', READ)
SHARED = frozenset(map(below, (keys.QUEUES, keys.NAMES, keys.GROUPS, keys.QUOTAS, keys.RELEASED, keys.BOOTED)))
"""Permissions of every compute and scheduler: their transactions change these keys, of any instance."""


def of_compute(compute: str) -> Grants:
    """The permissions of the compute with this uuid: SHARED, and to write the keys that are named by its uuid."""
    own = (below(f'{prefix}{compute}/') for prefix in (keys.HOSTS, keys.INSTANCES, keys.DIGESTS))
    named = keys.compute(compute), keys.hostname(compute), keys.accepted(compute)
    alone = (Permission(WRITE, each) for each in named)
    return SHARED | {EVERYTHING, *own, *alone}


def of_scheduler() -> Grants:
    """The permissions of a machine that eschedule runs on."""
    own = (keys.ATTEMPTS, keys.HOSTS, keys.USER_DATA, keys.INSTANCES, keys.AUDIT, keys.DIGESTS, keys.HOSTNAMES)
    return SHARED | {EVERYTHING, *map(below, own)}


def wanted(computes: Mapping[str, str], schedulers: Collection[str], operators: Collection[str]) -> Roles:
    """The users and roles there should be; `computes` is {user: uuid of its compute}."""
    users = {each: frozenset({each}) for each in computes}
    users |= {each: frozenset({SCHEDULER}) for each in schedulers}
    users |= {each: frozenset({ROOT}) for each in (ROOT, *operators)}
    return Roles(users, {SCHEDULER: of_scheduler(), **{name: of_compute(uuid) for name, uuid in computes.items()}})


def changes(found: Roles, wanted: Roles) -> list[Change]:
    """The changes, in this order, that make `wanted` of `found`; other users and roles stay as they are.

    No user loses between two of them what it may do both before and after all of them.
    """
    gives: list[Change] = []
    takes: list[Change] = []
    for role, permissions in wanted.roles.items():
        if role not in found.roles:
            gives.append(AddRole(role))
        before = found.roles.get(role, frozenset())
        has, keeps = ({each[1:] for each in of} for of in (before, permissions))
        missing = sorted(permissions - before, key=lambda each: each[1:])
        gives += [Grant(role, each) for each in missing if each[1:] not in has]
        # In place of what may have been more; of two such the narrower first, which the wider one was instead of.
        takes += [Grant(role, each) for each in reversed(missing) if each[1:] in has]
        takes += [Revoke(role, each) for each in sorted(before) if each[1:] not in keeps]
    for user, roles in wanted.users.items():
        if user not in found.users:
            gives.append(AddUser(user))
        given = found.users.get(user, frozenset())
        gives += [Give(user, role) for role in sorted(roles - given)]
        takes += [Take(user, role) for role in sorted(given - roles)]
    return [*gives, *takes]


def unknown(found: Roles, wanted: Roles) -> list[str]:
    """The users of our KINDS that are in etcd and not in `wanted`."""
    return sorted(each for each in found.users.keys() - wanted.users.keys() if each.startswith(KINDS))


def without_role(computes: Collection[str], found: Roles, wanted: Roles) -> list[str]:
    """The uuids among `computes` for which neither `found` nor `wanted` has a role."""
    held = {each for permissions in {**found.roles, **wanted.roles}.values() for each in permissions}
    return sorted(each for each in computes if Permission(WRITE, keys.compute(each)) not in held)


def described(change: Change) -> str:
    """The change in words, for a person."""
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
