"""The cluster that the audit tests share."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import Report, audit
from ecomp.store.client import Store
from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import StoredValue, read_allocations, read_lasting_keys
from tests.kit.servers import b64, wait_until
from tests.kit.story import read_record

AUDIT_TIMEOUT_SECONDS = 30.0
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
MAC = '52:54:00:00:00:01'
NAME = 'audited'
GROUP = 'web'


@dataclass
class Scene:
    """Two computes, an active instance on the first, and one that is gone."""

    control: Control
    first: Ecompute
    second: Ecompute
    instance: str
    gone: str
    store: Store
    placement: Placement

    def audit(self, again: float = 0.3) -> Report:
        return audit(self.store, self.placement, again, is_now=True)

    def list_findings(self) -> list[tuple[str, str]]:
        return [(finding.code, finding.subject) for finding in self.audit().findings]

    def put(self, key: str, value: object, seconds: int = 0) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        body: dict[str, Any] = {'key': b64(key), 'value': b64(text)}
        if seconds:
            body['lease'] = self.control.etcd.call('lease/grant', {'TTL': seconds})['ID']
        self.control.etcd.call('kv/put', body)

    def set_allocation(self, consumer: str, amounts_by_provider: dict[str, dict[str, int]]) -> None:
        current = self.control.placement.call('GET', f'/allocations/{consumer}')
        body = {
            'allocations': {name: {'resources': amounts} for name, amounts in amounts_by_provider.items()},
            'user_id': 'u',
            'project_id': 'p',
            'consumer_generation': current.get('consumer_generation'),
            'consumer_type': 'INSTANCE',
        }
        self.control.placement.call('PUT', f'/allocations/{consumer}', body)

    def set_allocation_on(self, consumer: str, *computes: str, **changed: int) -> None:
        self.set_allocation(consumer, {compute: {**SIZE, **changed} for compute in computes})

    def set_inventory(self, compute: str, **totals: int) -> None:
        path = f'/resource_providers/{compute}'
        generation = self.control.placement.call('GET', path)['generation']
        inventories = {name: {'total': total} for name, total in totals.items()}
        body = {'resource_provider_generation': generation, 'inventories': inventories}
        self.control.placement.call('PUT', f'{path}/inventories', body)

    def change_guest(self, target: Ecompute, instance: str, **changed: Any) -> None:
        guests = {guest['instance']: guest for guest in json.loads(get_guests_path(target).read_text())}
        defaults = {'instance': instance, 'compute': target.uuid, 'defined': True, 'running': True, 'disk': True}
        guests[instance] = {**defaults, **guests.get(instance, {}), **changed}
        target.stop()
        get_guests_path(target).write_text(json.dumps(list(guests.values())))
        target.start()

    def rewrite_record(self, instance: str, seconds: int = 0, **changed: Any) -> None:
        old_record = read_record(self.control, instance)
        assert old_record is not None
        self.put(self.control.etcd.find_record_key(instance), {**old_record, **changed}, seconds)

    def rewrite_request(self, **changed: Any) -> None:
        key = f'/hosts/{self.first.uuid}/{self.instance}'
        self.put(key, {**json.loads(self.control.etcd.get(key) or b''), **changed})

    def join_group(self, members: dict[str, str]) -> None:
        rule = {'policy': 'affinity', 'strict': True}
        self.rewrite_request(group={'name': GROUP, **rule})
        self.put(f'/groups/{GROUP}', {'version': 1, **rule, 'members': members})

    def restore(self, before: Baseline) -> None:
        """Restore the state before the test and wait until an audit finds nothing."""
        presence_keys = {f'/computes/{compute.uuid}' for compute in (self.first, self.second)}
        for compute in (self.first, self.second):
            if compute.is_running:
                compute.resume()
        rewritten = [
            compute
            for compute in (self.first, self.second)
            if get_guests_path(compute).read_text() != before.guests[compute.uuid]
        ]
        for compute in rewritten:
            compute.stop()
            get_guests_path(compute).write_text(before.guests[compute.uuid])
        self.control.etcd.delete(f'/troubles/{self.second.uuid}')  # what a host publishes is not among the lasting keys
        current = read_lasting_keys(self.control)
        for key in (current.keys() | before.etcd.keys()) - presence_keys:
            if key not in before.etcd:
                self.control.etcd.delete(key)
            elif current.get(key) != before.etcd[key]:
                value, lease = before.etcd[key]
                self.control.etcd.call('kv/put', {'key': b64(key), 'value': b64(value), 'lease': lease})
        for consumer in read_allocations(self.control).keys() - before.allocations.keys():
            self.control.placement.call('DELETE', f'/allocations/{consumer}')
        for provider in self.control.placement.call('GET', '/resource_providers')['resource_providers']:
            if provider['uuid'] not in (self.first.uuid, self.second.uuid):
                self.control.placement.call('DELETE', f'/resource_providers/{provider["uuid"]}')
        for compute in (self.first, self.second):
            if not compute.is_running:
                compute.start()
        for compute in (self.first, self.second):
            if not self.control.placement.read_inventory(compute.uuid):
                with contextlib.suppress(urllib.error.HTTPError):  # the provider exists, without an inventory
                    body = {'uuid': compute.uuid, 'name': compute.uuid}
                    self.control.placement.call('POST', '/resource_providers', body)
            self.set_inventory(compute.uuid, VCPU=64, DISK_GB=64, MEMORY_MB=65536)
        for consumer, amounts in before.allocations.items():
            self.set_allocation(consumer, amounts)
        for path in (*self.first.directory.glob('state/images/*.part'), self.get_metadata_path()):
            path.unlink(missing_ok=True)
        wait_until(
            lambda: self.list_findings() == [], AUDIT_TIMEOUT_SECONDS, f'all is as it was; {self.list_findings()}'
        )

    def get_metadata_path(self) -> Path:
        return self.first.directory / 'state' / 'metadata' / f'{MAC}.json'


class Baseline(NamedTuple):
    etcd: dict[str, StoredValue]
    allocations: dict[str, dict[str, dict[str, int]]]
    guests: dict[str, str]


def get_guests_path(compute: Ecompute) -> Path:
    return compute.directory / 'state' / 'fake.json'
