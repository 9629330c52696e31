"""Groups: instances that are to share one compute, or not to. Pure.

The key /groups/<name> holds JSON: {"version", "policy": "affinity" or "anti-affinity", "strict": true or false,
"members": {instance: the uuid of its compute, or "" while it waits in a queue}}. What a group is, its first member
says; with its last one it is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ecomp.errors import Conflict, UsageError
from ecomp.model import keys
from ecomp.model.json_object import dump, is_version, load_object
from ecomp.model.text import check_plain

VERSION = 1
AFFINITY, ANTI_AFFINITY = 'affinity', 'anti-affinity'
POLICIES = (AFFINITY, ANTI_AFFINITY)
LARGEST = 1000
"""Members of a group; one more is refused. Its key is rewritten with each, beside a set of up to 1.4 MB."""


class Membership(NamedTuple):
    """What a request says of its group. `policy` or `strict` None: it does not say, and takes the group as it is."""

    name: str
    policy: str | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class Group:
    """A group; `members` is {instance: its compute, '' while it waits in a queue}."""

    name: str
    policy: str
    strict: bool = True
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def membership(self) -> Membership:
        """The Membership that a member's request has."""
        return Membership(self.name, self.policy, self.strict)

    @property
    def rule(self) -> str:
        """`strict anti-affinity`."""
        return f'{"strict" if self.strict else "soft"} {self.policy}'

    @cached_property
    def on(self) -> Counter[str]:
        """{compute: how many members are on it}."""
        return Counter(compute for compute in self.members.values() if compute)

    def with_members(self, members: Mapping[str, str]) -> Group:
        """The group with these members, too; those it has already are moved to the compute named."""
        return replace(self, members={**self.members, **members})

    def without(self, *instances: str) -> Group:
        """The group without these members."""
        return replace(self, members={name: each for name, each in self.members.items() if name not in instances})

    def admits(self, compute: str, on: Mapping[str, int]) -> bool:
        """Whether one more member may be on the compute; `on` is how many are on each compute already."""
        if not self.strict or not compute or not any(on.values()):
            return True
        return bool(on.get(compute)) == (self.policy == AFFINITY)

    def excludes(self, compute: str, called: Callable[[str], str] = str) -> str | None:
        """Why no other member may be placed on a compute, as the end of a sentence; None if one may.

        `called` says what a compute is called.
        """
        on = self.on
        if self.admits(compute, on):
            return None
        if self.policy == ANTI_AFFINITY:
            return f'group {self.name} has a member there ({self.rule})'
        return f'group {self.name} is on {", ".join(sorted(map(called, on)))} ({self.rule})'

    @property
    def sign(self) -> int:
        """1 for affinity, -1 for anti-affinity."""
        return 1 if self.policy == AFFINITY else -1

    def preference(self, compute: str) -> int:
        """How much the group prefers this compute for its next member: the largest number first."""
        return self.sign * self.on[compute]

    def broken(self) -> list[str]:
        """A line for each breach of a strict rule: members on several computes, or several members on one."""
        on = self.on
        if not self.strict:
            return []
        if self.policy == AFFINITY:
            return [f'its members are on {len(on)} computes: {", ".join(sorted(on))}'] if len(on) > 1 else []
        crowded = sorted(compute for compute, count in on.items() if count > 1)
        return [f'{on[compute]} of its members are on compute {compute}' for compute in crowded]


def check_group_name(name: str) -> str:
    """The name as it is; ValueError if it is none."""
    return check_plain(name, 'a group')


def settle(there: Group | None, wanted: Membership) -> Group:
    """The group `there`, or a new one if None, as the request wants it.

    UsageError if a new one has no policy; Conflict if the request says other than the group is.
    """
    name = wanted.name
    if there is None:
        if wanted.policy is None:
            raise UsageError(f'there is no group {name} yet: --policy {" or ".join(POLICIES)} says what it is')
        return Group(name, wanted.policy, wanted.strict is not False)
    if wanted.policy not in (None, there.policy) or wanted.strict not in (None, there.strict):
        raise Conflict(f'group {name} is {there.rule}, as its first member said, until its last one has gone')
    return there


def allowed(group: Group, places: Mapping[str, str]) -> list[str]:
    """The instances of `places`, {instance: compute}, that may be members there, if they come in this order."""
    found: list[str] = []
    now = group.without(*places)
    for instance, compute in places.items():
        if now.excludes(compute) is None:
            found.append(instance)
            now = now.with_members({instance: compute})
    return found


def to_json(group: Group) -> str:
    """The value of the group's key."""
    value = {'version': VERSION, 'policy': group.policy, 'strict': group.strict, 'members': dict(group.members)}
    return dump(value, separators=(',', ':'))


def from_json(name: str, value: bytes) -> Group:
    """The group that a key holds. ValueError if it is none, or of a newer version."""
    data = load_object(value)
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'a group of version {version!r:.40}: this ecomp reads up to {VERSION}')
    members = data.get('members')
    if not isinstance(members, dict) or not all(_is_place(*each) for each in members.items()):
        raise ValueError('not a group: members is no object of instances and computes')
    return Group(check_group_name(name), *_rule(data), dict(members))


def membership_from(data: Any) -> Membership | None:
    """What a request's "group" says: {"name", "policy", "strict"}. ValueError if it is no such thing."""
    if data is None:
        return None
    if not isinstance(data, dict) or not isinstance(data.get('name'), str):
        raise ValueError('group: expected an object with a name')
    return Membership(check_group_name(data['name']), *_rule(data))


def _rule(data: Mapping[str, Any]) -> tuple[str, bool]:
    policy, strict = data.get('policy'), data.get('strict')
    if policy not in POLICIES or not isinstance(strict, bool):
        raise ValueError(f'not a group: policy is {str(policy)[:40]!r}, strict {str(strict)[:40]!r}')
    return str(policy), strict


def _is_place(instance: str, compute: object) -> bool:
    return keys.is_uuid(instance) and isinstance(compute, str) and (not compute or keys.is_uuid(compute))
