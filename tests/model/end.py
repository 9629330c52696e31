"""The state at the end of a schedule, and which command may have changed what: what truth.py asks of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ecomp.errors import EcompError, Unreachable
from ecomp.model import keys
from tests.model.acting import Actor
from tests.model.cloud import Cloud

Json = dict[str, Any]
PLACING = ('create', 'queue')
ENDED = ('gone', 'error')


class Told(NamedTuple):
    """One sentence: the actor whose command told it, what the command returned or raised, and the sentence."""

    actor: Actor
    outcome: object
    text: str

    @property
    def subject(self) -> str:
        """The one uuid, or the project, that the command is about."""
        (subject,) = self.actor.about
        return subject


def prior(cloud: Cloud) -> frozenset[str]:
    """Return the instances that are requested, wait or hold a claim before the schedule begins."""
    there = {keys.last(key) for key in cloud.etcd.entries if key.startswith((keys.HOSTS, keys.QUEUES))}
    return frozenset(there | cloud.model.held.keys())


class End:
    """The state at the end of a schedule, and who may have changed what."""

    def __init__(self, cloud: Cloud, before: frozenset[str]) -> None:
        self.cloud, self.before = cloud, before
        self.entries = cloud.etcd.entries
        self.commands = [each for each in cloud.world.actors if each.command]
        self.touched = {instance for each in cloud.world.actors if not each.command for instance in each.about}
        """The instances whose keys somebody changes manually, and the computes that come back by themselves."""

    def called(self, text: str) -> str:
        """Replace uuids by the names that the story has for them."""
        for uuid, name in self.cloud.world.names.items():
            text = text.replace(uuid, name)
        return text

    def request(self, instance: str, compute: str = '') -> Json | None:
        """Return the request of an instance, on one compute or on any; None for none and for a malformed one."""
        for key, entry in self.entries.items():
            if key.startswith(keys.request_prefix(compute) if compute else keys.HOSTS) and keys.last(key) == instance:
                return _parse(entry.value)
        return None

    def is_requested(self, instance: str) -> bool:
        return bool((self.request(instance) or {}).get('allocations'))

    def waits(self, instance: str) -> bool:
        return any(key.startswith(keys.QUEUES) and keys.last(key) == instance for key in self.entries)

    def has_entry(self, instance: str) -> bool:
        """Whether etcd has anything of it: a request, a record or a queue entry."""
        families = (keys.HOSTS, keys.QUEUES, keys.INSTANCES)
        return any(key.startswith(families) and keys.last(key) == instance for key in self.entries)

    def has_ended(self, instance: str) -> bool:
        """Whether a record says that it is over, or its keys may have been removed since."""
        if self.were_given('clear') or instance in self.touched:
            return True
        records = (_parse(each.value) for key, each in self.entries.items() if key.startswith(keys.INSTANCES))
        return any(each.get('instance') == instance and each.get('state') in ENDED for each in records)

    def is_domain(self, instance: str) -> bool:
        guests = (each.hypervisor.guests().get(instance) for each in self.cloud.machines)
        return any(each is not None and each.defined for each in guests)

    def others(self, actor: Actor, *commands: str) -> list[Actor]:
        """Return the other commands of these kinds about one of the same instances."""
        return [
            each
            for each in self.commands
            if each is not actor and each.command in commands and not set(each.about).isdisjoint(actor.about)
        ]

    def were_given(self, *commands: str) -> bool:
        return any(each.command in commands for each in self.commands)

    def may_be_another_s(self, actor: Actor, instance: str) -> bool:
        """Whether the scene, or another command, may have placed the instance."""
        others = [each for each in self.others(actor, *PLACING) if instance in each.about]
        return instance in self.before or any(
            not (each.done and isinstance(each.outcome, EcompError)) or isinstance(each.outcome, Unreachable)
            for each in others
        )

    def has_trait(self, compute: str, trait: str) -> bool:
        provider = self.cloud.model.providers.get(compute)
        return provider is not None and trait in provider.traits

    def is_claimed_by_another(self, actor: Actor, instance: str) -> bool:
        """Whether anybody else wrote allocations of the instance during the schedule."""
        calls = (each.call for each in self.cloud.world.steps if each.actor != actor.name)
        writes = (each for each in calls if each is not None and each.where == 'placement' and each.writes)
        return any(instance in str(each.what) for each in writes)

    def was_harmed(self, actor: Actor) -> bool:
        """Whether any message of this actor was lost."""
        return any(each.actor == actor.name and each.fate for each in self.cloud.world.steps)


def _parse(value: bytes) -> Json:
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
