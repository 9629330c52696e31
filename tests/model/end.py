"""The state at the end of a schedule, and which commands may have changed it, for truth.py."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ecomp.errors import EcompError, Unreachable
from ecomp.model import keys
from ecomp.store.client import Put
from tests.model.acting import LATE, REQUEST, Actor
from tests.model.cloud import Cloud

Json = dict[str, Any]
PLACEMENT_COMMANDS = ('create', 'queue', 'apply', 'evacuate')
TERMINAL_STATES = ('gone', 'error')
ETCD_COMMIT = ('etcd', 'commit')


class Sentence(NamedTuple):
    actor: Actor
    outcome: object
    text: str

    @property
    def subject(self) -> str:
        """The single uuid, or the project, that the command is about."""
        (subject,) = self.actor.subjects
        return subject


def list_prior_instances(cloud: Cloud) -> frozenset[str]:
    instances = {keys.get_last_part(key) for key in cloud.etcd.entries if key.startswith((keys.HOSTS, keys.QUEUES))}
    return frozenset(instances | cloud.model.held.keys())


class FinalState:
    def __init__(self, cloud: Cloud, before: frozenset[str]) -> None:
        self.cloud, self.before = cloud, before
        self.entries = cloud.etcd.entries
        self.commands = [actor for actor in cloud.world.actors if actor.command]
        # Instances whose keys are changed manually, and computes that come back on their own.
        self.touched = {instance for actor in cloud.world.actors if not actor.command for instance in actor.subjects}

    def replace_uuids(self, text: str) -> str:
        for uuid, name in self.cloud.world.names.items():
            text = text.replace(uuid, name)
        return text

    def read_request(self, instance: str, compute: str = '') -> Json | None:
        """Return an instance's request on one or any compute, {} if malformed, or None."""
        for key, entry in self.entries.items():
            if (
                key.startswith(keys.request_prefix(compute) if compute else keys.HOSTS)
                and keys.get_last_part(key) == instance
            ):
                return _parse(entry.value)
        return None

    def is_requested(self, instance: str) -> bool:
        return bool((self.read_request(instance) or {}).get('allocations'))

    def is_queued(self, instance: str) -> bool:
        return any(key.startswith(keys.QUEUES) and keys.get_last_part(key) == instance for key in self.entries)

    def has_entry(self, instance: str) -> bool:
        families = (keys.HOSTS, keys.QUEUES, keys.INSTANCES)
        return any(key.startswith(families) and keys.get_last_part(key) == instance for key in self.entries)

    def has_ended(self, instance: str) -> bool:
        """True if a record has a terminal state, or the instance's keys may have been removed."""
        if self.has_command('clear') or instance in self.touched:
            return True
        records = (_parse(entry.value) for key, entry in self.entries.items() if key.startswith(keys.INSTANCES))
        return any(record.get('instance') == instance and record.get('state') in TERMINAL_STATES for record in records)

    def is_domain(self, instance: str) -> bool:
        guests = (machine.hypervisor.list_guests().get(instance) for machine in self.cloud.machines)
        return any(guest is not None and guest.defined for guest in guests)

    def find_related_commands(self, actor: Actor, *commands: str) -> list[Actor]:
        return [
            command
            for command in self.commands
            if command is not actor
            and command.command in commands
            and not set(command.subjects).isdisjoint(actor.subjects)
        ]

    def has_command(self, *commands: str) -> bool:
        return any(command.command in commands for command in self.commands)

    def may_be_placed_by_another(self, actor: Actor, instance: str) -> bool:
        others = [each for each in self.find_related_commands(actor, *PLACEMENT_COMMANDS) if instance in each.subjects]
        return instance in self.before or any(
            not (command.done and isinstance(command.outcome, EcompError)) or isinstance(command.outcome, Unreachable)
            for command in others
        )

    def has_trait(self, compute: str, trait: str) -> bool:
        provider = self.cloud.model.providers.get(compute)
        return provider is not None and trait in provider.traits

    def is_claimed_by_another(self, actor: Actor, instance: str) -> bool:
        calls = (step.call for step in self.cloud.world.steps if step.actor != actor.name)
        writes = (call for call in calls if call is not None and call.service == 'placement' and call.writes)
        return any(instance in str(call.operation) for call in writes)

    def list_delivered_by(self, actor: Actor) -> set[str]:
        calls = (step.call for step in self.cloud.world.steps if step.actor == actor.name and step.answer is not None)
        commits = (call.operation[2] for call in calls if call and (call.service, call.operation[0]) == ETCD_COMMIT)
        puts = (operation for operations in commits for operation in operations if isinstance(operation, Put))
        return {
            keys.get_last_part(put.key)
            for put in puts
            if put.key.startswith(keys.HOSTS) and _parse(put.value.encode()).get('allocations')
        }

    def may_have_been_silenced(self, compute: str) -> bool:
        """True if the compute's lease expired during the schedule, or it was forgotten."""
        expired = f'the lease of compute {self.cloud.world.names[compute]} ends'
        return self.has_command('forget') or any(step.fate == expired for step in self.cloud.world.steps)

    def has_lost_write(self, actor: Actor) -> bool:
        # Another actor may have done what this actor reports.
        return any(step.actor == actor.name and step.fate in (REQUEST, LATE) for step in self.cloud.world.steps)

    def was_harmed(self, actor: Actor) -> bool:
        return any(step.actor == actor.name and step.fate for step in self.cloud.world.steps)


def _parse(value: bytes) -> Json:
    try:
        parsed = json.loads(value)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
