"""Groups of instances on one compute (affinity), or on different ones (anti-affinity). Pure.

The first member sets the policy. The group, /groups/<name>, is deleted with its last member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from ecomp.errors import Conflict, UsageError
from ecomp.model import keys
from ecomp.model.parsers import FLAG, UUID, check, dict_of, one_of, text
from ecomp.model.stored import COMPACT, in_key, stored
from ecomp.model.text import check_plain_name

AFFINITY = 'affinity'
ANTI_AFFINITY = 'anti-affinity'
POLICIES = (AFFINITY, ANTI_AFFINITY)
# More members are refused: each new one rewrites the group's key, in a transaction that may hold a set of up to 1.4 MB.
MAX_MEMBERS = 1000

check_group_name = partial(check_plain_name, kind='group')

_RULE = {'policy': one_of(POLICIES), 'strict': FLAG}
_PLACE = check("a uuid or ''", lambda compute: compute == '' or keys.is_uuid(compute))


@stored(name=text(check_group_name), **_RULE)
class Membership(NamedTuple):
    """The group in a request, which is taken as it is where `policy` or `strict` is None."""

    name: str
    policy: str | None = None
    strict: bool | None = None


@stored(1, 'group', COMPACT, name=in_key(check_group_name), **_RULE, members=dict_of(_PLACE, UUID))
@dataclass(frozen=True)
class Group:
    """A group, whose `members` are {instance: its compute, or '' while it waits in a queue}."""

    name: str
    policy: str
    strict: bool = True
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def membership(self) -> Membership:
        return Membership(self.name, self.policy, self.strict)

    @property
    def rule(self) -> str:
        return f'{"strict" if self.strict else "soft"} {self.policy}'

    @property
    def is_undecided(self) -> bool:
        """True if all members have to be on one compute, and none is on any yet."""
        return self.strict and self.policy == AFFINITY and not self.member_counts

    @cached_property
    def member_counts(self) -> Counter[str]:
        """The number of members on each compute, without those in a queue."""
        return Counter(compute for compute in self.members.values() if compute)

    def with_members(self, members: Mapping[str, str]) -> Group:
        return replace(self, members={**self.members, **members})

    def without_members(self, *instances: str) -> Group:
        return replace(self, members={name: place for name, place in self.members.items() if name not in instances})

    def can_admit(self, compute: str, member_counts: Mapping[str, int]) -> bool:
        """Return whether one more member may be on the compute, always if soft or if it is ''."""
        if not self.strict or not compute or not any(member_counts.values()):
            return True
        return bool(member_counts.get(compute)) == (self.policy == AFFINITY)

    def explain_exclusion(self, compute: str, name_compute: Callable[[str], str] = str) -> str | None:
        """Return why no member may be added on a compute, or None if one may."""
        counts = self.member_counts
        if self.can_admit(compute, counts):
            return None
        if self.policy == ANTI_AFFINITY:
            return f'group {self.name} has a member there ({self.rule})'
        return f'the members of group {self.name} are on {", ".join(sorted(map(name_compute, counts)))} ({self.rule})'

    @property
    def preference_sign(self) -> int:
        return 1 if self.policy == AFFINITY else -1

    def get_preference(self, compute: str) -> int:
        return self.preference_sign * self.member_counts[compute]

    def list_breaches(self) -> list[str]:
        """List the breaches of a strict rule, none for a soft group."""
        counts = self.member_counts
        if not self.strict:
            return []
        if self.policy == AFFINITY:
            breach = f'its members are on {len(counts)} computes: {", ".join(sorted(counts))}'
            return [breach] if len(counts) > 1 else []
        crowded = sorted(compute for compute, count in counts.items() if count > 1)
        return [f'{counts[compute]} of its members are on compute {compute}' for compute in crowded]


def resolve_group(group: Group | None, membership: Membership) -> Group:
    """Return `group`, or a new one without members if it is None, strict by default.

    Raises:
        UsageError: a new group has no policy.
        Conflict: the membership has another policy or strictness than the group.
    """
    name = membership.name
    if group is None:
        if membership.policy is None:
            raise UsageError(f'group {name} does not exist. Fix: give its policy (--policy), {" or ".join(POLICIES)}')
        return Group(name, membership.policy, membership.strict is not False)
    if membership.policy not in (None, group.policy) or membership.strict not in (None, group.strict):
        problem = f'group {name} has the policy {group.rule}, which cannot change while the group has members'
        cure = 'give no policy and no strictness (--policy, --strict, --soft), or another group'
        raise Conflict(f'{problem}. Fix: {cure}')
    return group


def filter_admitted(group: Group, places: Mapping[str, str]) -> list[str]:
    """Return the instances that the group admits one after the other, each on its compute."""
    admitted: list[str] = []
    joined = group.without_members(*places)
    for instance, compute in places.items():
        if joined.explain_exclusion(compute) is None:
            admitted.append(instance)
            joined = joined.with_members({instance: compute})
    return admitted
