"""The defects that an audit reports: one function plants each.

A function is named after the code of its finding, or `…_unleased`, and returns the subject of that finding.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from string import Template
from typing import Any

from ecomp.model.guest import REFUSED_METADATA, UNFILTERED
from ecomp.model.stack import Place
from tests.kit.story import SMALL_QUERY, read_record, wait_state
from tests.scenario.audited import GROUP, MAC, NAME, SIZE, Scene, get_guests_path

Plant = Callable[[Scene], str]


def make_uuid() -> str:
    return str(uuid.uuid4())


def make_key_plant(name: str, key: str, value: object, subject: str) -> Plant:
    def plant(scene: Scene) -> str:
        values = {'one': scene.first.uuid, 'instance': scene.instance, 'gone': scene.gone}
        values |= {'nobody': make_uuid(), 'other': make_uuid()}
        text = value if isinstance(value, str) else json.dumps(value)
        scene.put(Template(key).substitute(values), Template(text).substitute(values))
        return Template(subject).substitute(values)

    plant.__name__ = name
    return plant


NEWER_VALUE = {'version': 99}
request_malformed = make_key_plant('malformed', '/hosts/$other/$nobody', 'no request', '$nobody')
queued_malformed = make_key_plant('malformed', '/queues/small/$nobody', 'no request', '$nobody')
record_malformed = make_key_plant('malformed', '/instances/$one/$nobody', NEWER_VALUE, '$nobody')
group_malformed = make_key_plant('malformed', '/groups/newer', NEWER_VALUE, 'newer')
quota_malformed = make_key_plant('malformed', '/quotas/newer', NEWER_VALUE, 'newer')
stack_malformed = make_key_plant('malformed', '/stacks/newer', NEWER_VALUE, 'newer')
STACK = {'version': 1, 'epoch': '$nobody', 'entries': {'web/1': {'incarnation': 1, 'compute': '$one'}}}
stack_entry = make_key_plant('stack_entry', '/stacks/shop', STACK, 'shop')
booted_orphaned = make_key_plant('booted_orphaned', '/booted/$gone', '10.1.2.3', '$gone')
booted_differs = make_key_plant('booted_differs', '/booted/$instance', '10.1.2.3', '$instance')
name_orphaned = make_key_plant('name_orphaned', '/names/of-nobody', {'version': 1, 'instance': '$gone'}, 'of-nobody')
ATTEMPT = {'version': 1, 'instances': ['$nobody'], 'pid': 1}
attempt_unleased = make_key_plant('unleased', '/requests/$nobody', ATTEMPT, '$nobody')
hostname_orphaned = make_key_plant(
    'hostname_orphaned', '/hostnames/$nobody', {'version': 1, 'hostname': 'hv9'}, '$nobody'
)
QUOTA = {'version': 1, 'limits': {'VCPU': 9}, 'used': {'VCPU': 7}}
quota_differs = make_key_plant('quota_differs', '/quotas/project', QUOTA, 'project')


def make_guest_plant(name: str, of_nobody: bool = False, on_two: bool = False, **changed: Any) -> Plant:
    def plant(scene: Scene) -> str:
        instance = make_uuid() if of_nobody else scene.instance
        properties = {key: scene.first.uuid if value == '$one' else value for key, value in changed.items()}
        scene.change_guest(scene.second if on_two else scene.first, instance, **properties)
        return instance

    plant.__name__ = name
    return plant


DISK_ONLY: dict[str, Any] = {'compute': None, 'defined': False, 'running': False}
domain_missing = make_guest_plant('domain_missing', **DISK_ONLY)
domain_undefined = make_guest_plant('domain_undefined', defined=False)
domain_orphaned = make_guest_plant('domain_orphaned', of_nobody=True, on_two=True)
domain_misplaced = make_guest_plant('domain_misplaced', of_nobody=True, on_two=True, compute='$one')
ADOPTED: dict[str, Any] = {'compute': '$one', 'is_adopted': True}
adoption_misplaced = make_guest_plant('adoption_misplaced', of_nobody=True, on_two=True, **ADOPTED)
domain_doubled = make_guest_plant('domain_doubled', on_two=True)
domain_differs = make_guest_plant('domain_differs', size={'VCPU': 9})
filter_missing = make_guest_plant('filter_missing', troubles=[(UNFILTERED, ' (vnet0): RULE_DELETE failed')])
disk_missing = make_guest_plant('disk_missing', disk=False)
disk_orphaned = make_guest_plant('disk_orphaned', of_nobody=True, on_two=True, **DISK_ONLY)


def host_trouble(scene: Scene) -> str:
    scene.put(f'/troubles/{scene.second.uuid}', {'version': 1, 'reasons': ['network default is off']}, 600)
    return scene.second.uuid


def provider_missing(scene: Scene) -> str:
    scene.control.placement.call('DELETE', f'/resource_providers/{scene.second.uuid}')
    return scene.second.uuid


def inventory_missing(scene: Scene) -> str:
    scene.set_inventory(scene.second.uuid)
    return scene.second.uuid


def compute_silent(scene: Scene) -> str:
    silent = make_uuid()
    scene.control.placement.call('POST', '/resource_providers', {'uuid': silent, 'name': silent})
    scene.set_inventory(silent, VCPU=4, DISK_GB=4, MEMORY_MB=512)
    scene.set_allocation_on(make_uuid(), silent)
    return silent


def capacity_exceeded(scene: Scene) -> str:
    scene.set_inventory(scene.first.uuid, VCPU=64, DISK_GB=64, MEMORY_MB=64)
    return scene.first.uuid


def allocation_orphaned(scene: Scene) -> str:
    scene.set_allocation_on(nobody := make_uuid(), scene.second.uuid)
    return nobody


def allocation_missing(scene: Scene) -> str:
    scene.control.placement.call('DELETE', f'/allocations/{scene.instance}')
    return scene.instance


def allocation_differs(scene: Scene) -> str:
    scene.set_allocation_on(scene.instance, scene.first.uuid, VCPU=2)
    return scene.instance


def allocation_doubled(scene: Scene) -> str:
    scene.set_allocation_on(scene.instance, scene.first.uuid, scene.second.uuid)
    return scene.instance


def request_doubled(scene: Scene) -> str:
    value = scene.control.etcd.get(f'/hosts/{scene.first.uuid}/{scene.instance}')
    assert value is not None
    # A living compute would drop this request, so it belongs to an unknown compute.
    scene.put(f'/hosts/{(other := make_uuid())}/{scene.instance}', value.decode().replace(scene.first.uuid, other))
    return scene.instance


def request_misplaced(scene: Scene) -> str:
    request_doubled(scene)
    return request_missing(scene)


def request_missing(scene: Scene) -> str:
    scene.control.etcd.delete(f'/hosts/{scene.first.uuid}/{scene.instance}')
    return scene.instance


def request_ended(scene: Scene) -> str:
    other = make_uuid()
    request = {
        'version': 1, 'instance': scene.gone, 'image': 'http://images.invalid/i',
        'allocations': {other: {'resources': SIZE}},
    }  # fmt: skip
    gone_record = read_record(scene.control, scene.gone)
    assert gone_record is not None
    scene.control.etcd.delete(scene.control.etcd.find_record_key(scene.gone))
    scene.put(f'/instances/{other}/{scene.gone}', {**gone_record, 'compute': other}, 3600)
    scene.put(f'/hosts/{other}/{scene.gone}', request)
    return scene.gone


def queue_request(scene: Scene, instance: str, flavor: str) -> str:
    request = {
        'version': 1, 'instance': instance, 'flavor': flavor, 'query': SMALL_QUERY, 'image': 'http://images.invalid/i',
        'user_id': 'u', 'project_id': 'p', 'stages': {},
    }  # fmt: skip
    scene.put(f'/queues/{flavor}/{instance}', request)
    scene.put('/flavors/small', {'resources': SIZE})
    return instance


def queued_flavorless(scene: Scene) -> str:
    return queue_request(scene, make_uuid(), 'none')


def queued_doubled(scene: Scene) -> str:
    return queue_request(scene, scene.instance, 'small')


def taker_unleased(scene: Scene) -> str:
    nobody = queue_request(scene, make_uuid(), 'small')
    scene.put(f'/queues/small/{nobody}/taker', {'version': 1, 'compute': make_uuid()})
    return nobody


def replaced_lives(scene: Scene) -> str:
    """Request an instance from a silent compute, which the scene's instance replaces."""
    replaced, silent = make_uuid(), make_uuid()
    key = f'/hosts/{scene.first.uuid}/{scene.instance}'
    request = json.loads(scene.control.etcd.get(key) or b'')
    scene.put(key, {**request, 'replaces': replaced})
    allocations = {silent: {'resources': SIZE}}
    evacuated = {**request, 'instance': replaced, 'allocations': allocations, 'name': None, 'group': None}
    scene.put(f'/hosts/{silent}/{replaced}', evacuated)
    return replaced


def record_doubled(scene: Scene) -> str:
    old_record = read_record(scene.control, scene.instance)
    assert old_record is not None
    other = scene.second.uuid
    scene.put(f'/instances/{other}/{scene.instance}', {**old_record, 'compute': other})
    return scene.instance


def record_missing(scene: Scene) -> str:
    scene.control.etcd.delete(scene.control.etcd.find_record_key(scene.instance))
    return scene.instance


def record_unleased(scene: Scene) -> str:
    scene.rewrite_record(scene.gone)
    return scene.gone


def record_leased(scene: Scene) -> str:
    scene.rewrite_record(scene.instance, seconds=3600)
    return scene.instance


def name_missing(scene: Scene) -> str:
    scene.control.etcd.delete(f'/names/{NAME}')
    return scene.instance


def name_reserved(scene: Scene) -> str:
    scene.put('/names/rename', {'version': 1, 'instance': scene.instance})
    scene.rewrite_request(name='rename')
    scene.control.etcd.delete(f'/names/{NAME}')
    return scene.instance


def group_broken(scene: Scene) -> str:
    other = make_uuid()
    scene.put(f'/requests/{other}', {'version': 1, 'instances': [other], 'pid': 1}, seconds=600)  # no orphan
    scene.join_group({scene.instance: scene.first.uuid, other: scene.second.uuid})
    return GROUP


def group_orphaned(scene: Scene) -> str:
    scene.join_group({scene.instance: scene.first.uuid, make_uuid(): scene.first.uuid, make_uuid(): scene.first.uuid})
    return GROUP


def group_missing(scene: Scene) -> str:
    scene.join_group({scene.instance: scene.first.uuid})
    scene.control.etcd.delete(f'/groups/{GROUP}')
    return scene.instance


def stack_mismatch(scene: Scene) -> str:
    place, other = Place('shop', 'web', 1, make_uuid(), 1), make_uuid()
    request = {
        'version': 1, 'instance': place.instance, 'image': 'http://images.invalid/i',
        'allocations': {other: {'resources': SIZE}}, 'stack': place._asdict(),
    }  # fmt: skip
    # A living compute would build it, so it belongs to an unknown compute.
    scene.put(f'/hosts/{other}/{place.instance}', request)
    return place.name


def usage_differs(scene: Scene) -> str:
    storage, call = make_uuid(), scene.control.placement.call
    call('POST', '/resource_providers', {'uuid': storage, 'name': 'tapes'})
    inventories = {'resource_provider_generation': 0, 'inventories': {'DISK_GB': {'total': 9}}}
    call('PUT', f'/resource_providers/{storage}/inventories', inventories)
    body = {'allocations': {storage: {'resources': {'DISK_GB': 1}}}, 'project_id': 'tapes', 'user_id': 'x'}
    body |= {'consumer_generation': None, 'consumer_type': 'INSTANCE'}
    call('PUT', f'/allocations/{make_uuid()}', body)
    scene.put('/quotas/tapes', {'version': 1, 'limits': {'VCPU': 9}, 'used': {}})
    return 'tapes'


def presence_unleased(scene: Scene) -> str:
    other = scene.control.placement.make_provider(VCPU=1)
    scene.put(f'/computes/{other}', {'token': 'x'})
    return other


def compute_mute(scene: Scene) -> str:
    scene.second.pause()
    return scene.second.uuid


def domain_off(scene: Scene) -> str:
    if any(guest['running'] for guest in json.loads(get_guests_path(scene.first).read_text())):
        scene.change_guest(scene.first, scene.instance, running=False)
    wait_state(scene.control, scene.instance, 'stopped')
    scene.rewrite_record(scene.instance, state='active')
    return scene.instance


def domain_running(scene: Scene) -> str:
    scene.rewrite_record(scene.instance, state='stopped')
    return scene.instance


def seed_orphaned(scene: Scene) -> str:
    data = {'version': 1, 'instance': (nobody := make_uuid()), 'mac': MAC}
    scene.get_metadata_path().write_text(json.dumps(data))
    return nobody


metadata_refused = make_guest_plant('metadata_refused', troubles=[(REFUSED_METADATA, ': no current DHCP lease')])


def part_orphaned(scene: Scene) -> str:
    (scene.first.directory / 'state' / 'images').mkdir(exist_ok=True)
    (scene.first.directory / 'state' / 'images' / 'base-0123.part').write_bytes(b'half')
    return scene.first.uuid


PLANTS: list[Plant] = [
    *(provider_missing, inventory_missing, compute_silent, capacity_exceeded),
    *(allocation_orphaned, allocation_missing, allocation_differs, allocation_doubled),
    *(request_doubled, request_misplaced, request_missing, request_ended, request_malformed),
    replaced_lives,
    *(record_doubled, record_missing, record_malformed, record_unleased, record_leased),
    *(booted_orphaned, booted_differs),
    *(group_malformed, group_broken, group_orphaned, group_missing, quota_malformed, quota_differs, usage_differs),
    *(stack_malformed, stack_entry, stack_mismatch),
    *(name_orphaned, name_missing, name_reserved, hostname_orphaned),
    *(attempt_unleased, presence_unleased, compute_mute, host_trouble),
    *(queued_malformed, queued_flavorless, queued_doubled, taker_unleased),
    *(domain_missing, domain_off, domain_running, domain_differs, domain_undefined),
    *(domain_orphaned, domain_misplaced, adoption_misplaced, domain_doubled),
    *(disk_missing, disk_orphaned, seed_orphaned, metadata_refused, filter_missing, part_orphaned),
]
# Defects that do not affect each other are planted together, which takes one restored scene for all of them.
BATCHES: list[list[Plant]] = [
    [
        *(queued_malformed, record_malformed, group_malformed, quota_malformed),
        *(stack_malformed, stack_entry, booted_orphaned, name_orphaned, attempt_unleased, hostname_orphaned),
        *(quota_differs, queued_flavorless),
    ],
    [
        *(allocation_orphaned, compute_silent, seed_orphaned, part_orphaned),
        *(disk_orphaned, domain_orphaned, domain_misplaced, adoption_misplaced),
    ],
    [booted_differs, name_missing, allocation_differs, record_leased, record_unleased],
]
BATCHES += [[plant] for plant in PLANTS if not any(plant in batch for batch in BATCHES)]
SELF_REPAIRED = [domain_off, domain_running, record_missing, provider_missing, inventory_missing, capacity_exceeded]
# Codes that tests/faults/test_audit_lab.py plants and repairs.
HYPERVISOR_CODES = {
    *('base-missing', 'iso-orphaned', 'reservation-orphaned', 'reservation-missing', 'reservation-differs'),
    *('base-differs', 'dhcp-open'),
}


def get_code(plant: Plant) -> str:
    name = plant.__name__.replace('_', '-')
    return 'unleased' if name.endswith('-unleased') else name
