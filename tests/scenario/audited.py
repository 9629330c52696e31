"""What an audit is asked about: two computes, an active instance and one that is gone, and hands to plant with."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ecomp.placement.client import Placement
from ecomp.scheduler.operating.audit import Report, audit
from ecomp.store.client import Store
from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import Kept, allocations, everything
from tests.kit.servers import b64, until
from tests.kit.story import record

SOON = 30.0
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
MAC = '52:54:00:00:00:01'
NAME = 'audited'
GROUP = 'web'


@dataclass
class Scene:
    """Two computes, an active instance on the first, and one that is gone; and hands to plant with."""

    control: Control
    one: Ecompute
    two: Ecompute
    instance: str
    gone: str
    store: Store
    placement: Placement

    def audit(self, again: float = 0.3) -> Report:
        """One audit, in this process."""
        return audit(self.store, self.placement, again)

    def found(self) -> list[tuple[str, str]]:
        """The code and subject of each finding."""
        return [(each.code, each.subject) for each in self.audit().findings]

    def put(self, key: str, value: object, seconds: int = 0) -> None:
        """Write a key, JSON unless it is text, on a lease if `seconds` say so."""
        text = value if isinstance(value, str) else json.dumps(value)
        body: dict[str, Any] = {'key': b64(key), 'value': b64(text)}
        if seconds:
            body['lease'] = self.control.etcd.call('lease/grant', {'TTL': seconds})['ID']
        self.control.etcd.call('kv/put', body)

    def hold(self, consumer: str, held: dict[str, dict[str, int]]) -> None:
        """Make a consumer hold exactly this of each provider."""
        now = self.control.placement.call('GET', f'/allocations/{consumer}')
        body = {
            'allocations': {name: {'resources': each} for name, each in held.items()},
            'user_id': 'u',
            'project_id': 'p',
            'consumer_generation': now.get('consumer_generation'),
            'consumer_type': 'INSTANCE',
        }
        self.control.placement.call('PUT', f'/allocations/{consumer}', body)

    def hold_on(self, consumer: str, *computes: str, **changed: int) -> None:
        """Make it hold a small guest's size, changed so, on each of the computes."""
        self.hold(consumer, {each: {**SIZE, **changed} for each in computes})

    def inventory(self, compute: str, **totals: int) -> None:
        """Set a compute's inventory."""
        path = f'/resource_providers/{compute}'
        generation = self.control.placement.call('GET', path)['generation']
        inventories = {name: {'total': total} for name, total in totals.items()}
        body = {'resource_provider_generation': generation, 'inventories': inventories}
        self.control.placement.call('PUT', f'{path}/inventories', body)

    def guest(self, on: Ecompute, instance: str, **changed: Any) -> None:
        """Change what a compute has of an instance, while its ecompute is down."""
        guests = {each['instance']: each for each in json.loads(guests_file(on).read_text())}
        whole = {'instance': instance, 'compute': on.uuid, 'defined': True, 'running': True, 'disk': True}
        guests[instance] = {**whole, **guests.get(instance, {}), **changed}
        on.stop()
        guests_file(on).write_text(json.dumps(list(guests.values())))
        on.start()

    def rewrite(self, instance: str, seconds: int = 0, **changed: Any) -> None:
        """Change a record behind its ecompute's back."""
        found = record(self.control, instance)
        assert found is not None
        self.put(self.control.etcd.record_key(instance), {**found, **changed}, seconds)


    def join(self, members: dict[str, str]) -> None:
        """Make the instance one of a group, of these members."""
        rule = {'policy': 'affinity', 'strict': True}
        key = f'/hosts/{self.one.uuid}/{self.instance}'
        request = json.loads(self.control.etcd.get(key) or b'')
        self.put(key, {**request, 'group': {'name': GROUP, **rule}})
        self.put(f'/groups/{GROUP}', {'version': 1, **rule, 'members': members})

    def restore(self, before: Before) -> None:
        """Everything is as it was, and the audit says so."""
        mine = {f'/computes/{each.uuid}' for each in (self.one, self.two)}
        for each in (self.one, self.two):
            if each.is_running:
                each.resume()
        changed = [each for each in (self.one, self.two) if guests_file(each).read_text() != before.guests[each.uuid]]
        for each in changed:
            each.stop()
            guests_file(each).write_text(before.guests[each.uuid])
        now = everything(self.control)
        for key in (now.keys() | before.etcd.keys()) - mine:
            if key not in before.etcd:
                self.control.etcd.delete(key)
            elif now.get(key) != before.etcd[key]:
                value, lease = before.etcd[key]
                self.control.etcd.call('kv/put', {'key': b64(key), 'value': b64(value), 'lease': lease})
        for consumer in allocations(self.control).keys() - before.held.keys():
            self.control.placement.call('DELETE', f'/allocations/{consumer}')
        for provider in self.control.placement.call('GET', '/resource_providers')['resource_providers']:
            if provider['uuid'] not in (self.one.uuid, self.two.uuid):
                self.control.placement.call('DELETE', f'/resource_providers/{provider["uuid"]}')
        for each in (self.one, self.two):
            if not each.is_running:
                each.start()
        for each in (self.one, self.two):
            if not self.control.placement.inventory(each.uuid):
                with contextlib.suppress(urllib.error.HTTPError):  # it is there, without an inventory
                    body = {'uuid': each.uuid, 'name': each.uuid}
                    self.control.placement.call('POST', '/resource_providers', body)
            self.inventory(each.uuid, VCPU=64, DISK_GB=64, MEMORY_MB=65536)
        for consumer, held in before.held.items():
            self.hold(consumer, held)
        for path in (*self.one.directory.glob('state/images/*.part'), self.seed()):
            path.unlink(missing_ok=True)
        until(lambda: self.found() == [], SOON, f'all is as it was; {self.found()}')

    def seed(self) -> Path:
        """Where the first compute keeps metadata of MAC."""
        return self.one.directory / 'state' / 'metadata' / f'{MAC}.json'


class Before(NamedTuple):
    """What a test found."""

    etcd: dict[str, Kept]
    held: dict[str, dict[str, dict[str, int]]]
    guests: dict[str, str]


def guests_file(compute: Ecompute) -> Path:
    """Where a pretended compute keeps its guests."""
    return compute.directory / 'state' / 'fake.json'
