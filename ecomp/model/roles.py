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
"""etcd's own: the user without whom there is no authentication, and the role that may do everything."""
SCHEDULER = 'scheduler'
KINDS = ('compute-', 'scheduler-', 'operator-')


class Permission(NamedTuple):
    """`kind` is what may be done to `key` alone or, with a `range_end`, to all keys from `key` up to before that."""

    kind: str
    key: str
    range_end: str = ''


Grants = frozenset[Permission]


@dataclass(frozen=True)
class Roles:
    """Each user's roles, and what each role may do."""

    users: Mapping[str, frozenset[str]]
    roles: Mapping[str, Grants]


class AddRole(NamedTuple):
    """There is a role that may do nothing yet."""

    role: str


class AddUser(NamedTuple):
    """There is a user without a role."""

    user: str


class Grant(NamedTuple):
    """The role may do this, too, in place of what it might do to the same keys."""

    role: str
    permission: Permission


class Give(NamedTuple):
    """The user has the role, too."""

    user: str
    role: str


class Take(NamedTuple):
    """The user has the role no more."""

    user: str
    role: str


class Revoke(NamedTuple):
    """The role may do nothing to these keys as such."""

    role: str
    permission: Permission


Change = AddRole | AddUser | Grant | Give | Take | Revoke


def below(prefix: str, kind: str = WRITE) -> Permission:
    """That of all keys under a prefix that ends with a slash."""
    return Permission(kind, prefix, f'{prefix[:-1]}0')  # the character after a slash


EVERYTHING = below('/', READ)
SHARED = frozenset(map(below, (keys.QUEUES, keys.NAMES, keys.GROUPS, keys.QUOTAS, keys.RELEASED, keys.BOOTED)))
"""What computes and schedulers change in the same transactions, of whatever instance it is."""


def of_compute(compute: str) -> Grants:
    """What the compute of this uuid may do: its own requests, records, answers and presence, and what is shared."""
    own = (below(f'{prefix}{compute}/') for prefix in (keys.HOSTS, keys.INSTANCES, keys.DIGESTS))
    return SHARED | {EVERYTHING, *own, Permission(WRITE, keys.compute(compute))}


def of_scheduler() -> Grants:
    """What a machine may do where eschedule runs."""
    own = (keys.REQUESTS, keys.HOSTS, keys.USER_DATA, keys.INSTANCES, keys.AUDIT, keys.DIGESTS)
    return SHARED | {EVERYTHING, *map(below, own)}


def wanted(computes: Mapping[str, str], schedulers: Collection[str], operators: Collection[str]) -> Roles:
    """The roles of these users; of `computes` with their uuids."""
    users = {each: frozenset({each}) for each in computes}
    users |= {each: frozenset({SCHEDULER}) for each in schedulers}
    users |= {each: frozenset({ROOT}) for each in (ROOT, *operators)}
    return Roles(users, {SCHEDULER: of_scheduler(), **{name: of_compute(uuid) for name, uuid in computes.items()}})


def changes(found: Roles, wanted: Roles) -> list[Change]:
    """What makes `wanted` of what is there, in this order; other users and roles stay as they are.

    Whoever may do something before and after may do it in between.
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
    """The users of our kinds that are in etcd, and are not wanted."""
    return sorted(each for each in found.users.keys() - wanted.users.keys() if each.startswith(KINDS))


def without_role(computes: Collection[str], found: Roles, wanted: Roles) -> list[str]:
    """Of these uuids those whose compute none of the roles is for, once there are the wanted ones."""
    held = {each for permissions in {**found.roles, **wanted.roles}.values() for each in permissions}
    return sorted(each for each in computes if Permission(WRITE, keys.compute(each)) not in held)


def described(change: Change) -> str:
    """In words, for a person."""
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
