"""compute.yaml and schedule.yaml: what they may say, and that everything else is named at once, with its line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecomp.compute_conf import ComputeConfig, load_compute
from ecomp.conf import (
    DEFAULT_IMAGE,
    DEFAULT_PROJECT_ID,
    DEFAULT_USER_ID,
    EtcdConfig,
    PlacementConfig,
    ScheduleConfig,
    load_schedule,
)
from ecomp.endpoints import in_clear
from ecomp.errors import UsageError
from ecomp.model.image import check_image, pinned
from ecomp.model.network import Attachment

TOP = Path(__file__).resolve().parents[2]
UUID = 'b8756be5-a30d-4311-920c-0ad996367a8e'
WHERE = 'must be the name of a host, or a network like 10.1.0.0/16'


@pytest.fixture
def compute(tmp_path: Path) -> Callable[[str | bytes], ComputeConfig]:
    """Load a text as compute.yaml."""

    def load(content: str | bytes) -> ComputeConfig:
        path = tmp_path / 'compute.yaml'
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_compute(path)

    return load


@pytest.fixture
def mistakes(compute: Callable[[str | bytes], ComputeConfig]) -> Callable[[str | bytes], list[str]]:
    """What is wrong with a text as compute.yaml: the lines of the message, without the file's directory."""

    def load(content: str | bytes) -> list[str]:
        with pytest.raises(UsageError) as caught:
            compute(content)
        return [re.sub(r'^\S*/compute.yaml', 'compute.yaml', line) for line in str(caught.value).split('\n')]

    return load


# Defaults


def test_without_a_file_everything_points_at_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_compute(None) == ComputeConfig(
        uuid=None,
        etcd=EtcdConfig(('localhost:2379',), None, None, None, 5.0, ()),
        placement=PlacementConfig('http://localhost:8080'),
        resize=True,
        networks=(Attachment('network', 'default'),),
        metadata='network',
        state=Path('/var/lib/ecompute'),
        workers=None,
        inventory=None,
        virt_type='auto',
        images=None,
        directory=tmp_path,
    )
    assert load_schedule(None) == ScheduleConfig(
        EtcdConfig(), PlacementConfig('http://localhost:8080'), DEFAULT_IMAGE, DEFAULT_USER_ID, DEFAULT_PROJECT_ID
    )


def test_the_file_in_the_current_directory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('compute.yaml').write_text('resize: False\n')
    Path('schedule.yaml').write_text('image: http://ds1/small.img\n')
    assert not load_compute(None).resize
    assert load_schedule(None).image == 'http://ds1/small.img'


@pytest.mark.parametrize(
    'content', ['', '\n', '# only a comment\n', '---\n', '--- {}\n', 'etcd:\nplacement:\nuuid:\n', b'\xef\xbb\xbf']
)
def test_an_empty_file_and_keys_without_values_are_the_defaults(
    compute: Callable[[str | bytes], ComputeConfig], tmp_path: Path, content: str | bytes
) -> None:
    assert compute(content) == ComputeConfig(directory=tmp_path)


@pytest.mark.parametrize(('name', 'load'), [('compute.yaml', load_compute), ('schedule.yaml', load_schedule)])
@pytest.mark.parametrize('uncommented', [False, True])
def test_the_examples_are_valid_and_name_every_key(
    tmp_path: Path, name: str, load: Callable[[Path | None], Any], uncommented: bool
) -> None:
    text = (TOP / name).read_text()
    default = load(TOP / name)
    assert (
        dataclasses.replace(default, **({'directory': Path('.')} if name == 'compute.yaml' else {})) == type(default)()
    )
    if not uncommented:
        return
    for word in ('ca.crt', 'client.crt', 'client.key'):
        (tmp_path / word).touch()
    text = re.sub(r'^#(?=\S|  )', '', text, flags=re.MULTILINE).replace('/etc/ecomp/', '')
    text = re.sub(r'^  (host|port): .*\n', '', text, flags=re.MULTILINE)  # endpoints stand in their place
    (tmp_path / name).write_text(text)
    said = load(tmp_path / name)
    assert set(yaml.safe_load(text)) == {f.name for f in dataclasses.fields(said)} - {'directory', 'path'}
    assert set(yaml.safe_load(text)['etcd']) == {*EtcdConfig._fields, 'insecure'}
    assert len(said.etcd.endpoints) == 3
    # What can be shown as a default is the default.
    for key in ('resize', 'networks', 'metadata', 'state', 'virt_type', 'placement', 'image', 'user_id', 'project_id'):
        assert getattr(said, key, None) == getattr(default, key, None)


def test_the_default_image_is_fetched_as_it_was_published() -> None:
    bare, digest = pinned(check_image(DEFAULT_IMAGE))
    assert bare.startswith('https://')
    assert digest is not None


# Values


def test_all_values(compute: Callable[[str | bytes], ComputeConfig], tmp_path: Path) -> None:
    for name in ('ca', 'cert', 'key'):
        (tmp_path / name).touch()
    config = compute(
        f"""
uuid: {UUID.upper()}
etcd:
  host: ds1
  port: 2380
  ca_cert: ca
  cert_cert: {tmp_path}/cert
  cert_key: ./key
  timeout: 2.5
  grpc_options: {{grpc.enable_http_proxy: 0, grpc.primary_user_agent: ecomp, grpc.optimize: yes}}
placement: {{endpoint: 'https://ds1:8081/placement/'}}
resize: no
bridge: br0
metadata: iso
state: state/here
workers: 64
inventory: {{VCPU: 4, CUSTOM_GPU_2: 1}}
traits: [HW_CPU_X86_AVX2, CUSTOM_RACK_7]
aggregates:
- {UUID.upper()}
allocation_ratios: {{VCPU: 16, MEMORY_MB: 1.5}}
virt_type: qemu
images: ../images
image_sources: [Images.Example.org, 10.1.0.0/16, 127.0.0.1, 'fd12::/64']
image_proxy: http://proxy:3128/
"""
    )
    assert config == ComputeConfig(
        uuid=UUID,
        etcd=EtcdConfig(
            endpoints=('ds1:2380',),
            ca_cert=tmp_path / 'ca',
            cert_key=tmp_path / 'key',
            cert_cert=tmp_path / 'cert',
            timeout=2.5,
            grpc_options=(
                ('grpc.enable_http_proxy', 0),
                ('grpc.primary_user_agent', 'ecomp'),
                ('grpc.optimize', 1),
            ),
        ),
        placement=PlacementConfig('https://ds1:8081/placement'),
        resize=False,
        networks=(Attachment('network', 'default'), Attachment('bridge', 'br0')),
        metadata='iso',
        state=tmp_path / 'state/here',
        workers=64,
        inventory={'VCPU': 4, 'CUSTOM_GPU_2': 1},
        traits=('HW_CPU_X86_AVX2', 'CUSTOM_RACK_7'),
        aggregates=(UUID,),
        allocation_ratios={'VCPU': 16.0, 'MEMORY_MB': 1.5},
        virt_type='qemu',
        images=tmp_path.parent / 'images',
        image_sources=('images.example.org', '10.1.0.0/16', '127.0.0.1/32', 'fd12::/64'),
        image_proxy='http://proxy:3128',
        directory=tmp_path,
    )


def test_placement_behind_certificates(compute: Callable[[str | bytes], ComputeConfig], tmp_path: Path) -> None:
    for name in ('ca', 'cert', 'key', 'token'):
        (tmp_path / name).touch()
    files = f'ca_cert: ca, cert_cert: ./cert, cert_key: {tmp_path}/key, token_file: token'
    assert compute(f'placement: {{endpoint: "https://ds1", {files}}}').placement == PlacementConfig(
        'https://ds1', tmp_path / 'ca', tmp_path / 'key', tmp_path / 'cert', tmp_path / 'token'
    )
    for wrong, said in (
        (f'endpoint: "http://ds1", {files}', 'ca_cert: needs an endpoint with https://, not http://ds1'),
        ('cert_cert: cert, cert_key: key', 'cert_cert: needs an endpoint with https://, not http://localhost:8080'),
        ('endpoint: "https://ds1", cert_cert: cert', 'cert_cert: needs cert_key beside it'),
        ('endpoint: "https://ds1", cert_key: key', 'cert_key: needs cert_cert beside it'),
        ('token_file: nowhere', 'is not a file that can be read'),
        ('user: me', 'user: unknown key'),
    ):
        with pytest.raises(UsageError) as caught:
            compute(f'placement: {{{wrong}}}')
        assert said in str(caught.value), wrong


@pytest.mark.parametrize(
    ('section', 'host', 'key'),
    [
        ('etcd: {host: ds1}', 'ds1:2379', 'etcd.host'),
        ('etcd: {host: 10.0.0.5, insecure: no}', '10.0.0.5:2379', 'etcd.host'),
        ('etcd: {host: "fd12::1"}', '[fd12::1]:2379', 'etcd.host'),
        ('etcd: {endpoints: ["localhost:1", "localhost.evil:2"]}', 'localhost.evil:2', 'etcd.endpoints'),
        ('placement: {endpoint: "http://ds1:8080/"}', 'ds1:8080', 'placement.endpoint'),
        ('placement: {endpoint: "http://127.0.0.1.example"}', '127.0.0.1.example', 'placement.endpoint'),
        ('placement: {endpoint: "http://localhost@ds1"}', '', 'placement.endpoint'),
    ],
)
def test_nothing_is_said_in_plain_text_by_accident(
    compute: Callable[[str | bytes], ComputeConfig], section: str, host: str, key: str
) -> None:
    with pytest.raises(UsageError) as caught:
        compute(section)
    said = str(caught.value)
    assert f'{key}: ' in said
    if host:
        assert f'{key}: {host} is no address of this machine, and all would be said in plain text' in said
        allowed = compute(section.replace(', insecure: no', '').replace('}', ', insecure: yes}'))
        assert in_clear(allowed.etcd, allowed.placement) == [host]


@pytest.mark.parametrize('host', ['localhost', 'LocalHost', '127.0.0.1', '127.9.9.9', '::1', '[::1]'])
def test_this_machine_is_asked_in_plain_text(compute: Callable[[str | bytes], ComputeConfig], host: str) -> None:
    bracketed = f'[{host.strip("[]")}]' if ':' in host else host
    config = compute(f'etcd: {{host: "{host}"}}\nplacement: {{endpoint: "http://{bracketed}"}}')
    assert in_clear(config.etcd, config.placement) == []
    config = compute(f'etcd: {{endpoints: ["{bracketed}:1"]}}\nplacement: {{endpoint: "http://{bracketed}:8080/x"}}')
    assert in_clear(config.etcd, config.placement) == []


def test_a_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / 'mine.yaml'
    path.write_text(
        '{user_id: me, project_id: "12", image: "https://h/i", etcd: {host: ds1, insecure: yes}, '
        'placement: {endpoint: "http://ds1", insecure: yes}}'
    )
    assert load_schedule(path) == ScheduleConfig(
        EtcdConfig(('ds1:2379',)), PlacementConfig('http://ds1'), 'https://h/i', 'me', '12'
    )


def test_what_guests_are_given_are_files_beside_it_that_need_not_be_there_yet(tmp_path: Path) -> None:
    path = tmp_path / 'mine.yaml'
    path.write_text('user_data: given/user-data.yaml\nssh_keys: [id.pub, /etc/keys/ops.pub]\n')
    config = load_schedule(path)
    assert config.user_data == tmp_path / 'given/user-data.yaml'
    assert config.ssh_keys == (tmp_path / 'id.pub', Path('/etc/keys/ops.pub'))
    path.write_text('user_data:\nssh_keys: []\n')
    assert (load_schedule(path).user_data, load_schedule(path).ssh_keys) == (None, ())
    path.write_text('user_data: [a]\nssh_keys: id.pub\n')
    with pytest.raises(UsageError) as caught:
        load_schedule(path)
    assert [line.partition(': ')[2] for line in str(caught.value).splitlines()] == [
        'user_data: must be text, not a list', 'ssh_keys: must be a list like [id_ed25519.pub], not id.pub'
    ]  # fmt: skip
    path.write_text('ssh_keys: [id.pub, ~/.ssh/id.pub, {a: b}]\n')
    with pytest.raises(UsageError, match='ssh_keys: write the directory out'):
        load_schedule(path)


@pytest.mark.parametrize(
    ('text', 'endpoints'),
    [
        ('host: 10.0.0.1', ('10.0.0.1:2379',)),
        ('host: "::1"', ('[::1]:2379',)),
        ('port: 1', ('localhost:1',)),
        ('endpoints: [a:1, "[fd00::1]:2379", c.example.org:65535]', ('a:1', '[fd00::1]:2379', 'c.example.org:65535')),
    ],
)
def test_endpoints(compute: Callable[[str | bytes], ComputeConfig], text: str, endpoints: tuple[str, ...]) -> None:
    assert compute(f'etcd: {{insecure: true, {text}}}').etcd.endpoints == endpoints


def test_a_config_is_frozen_and_can_go_to_a_worker(compute: Callable[[str | bytes], ComputeConfig]) -> None:
    import pickle

    config = compute('inventory: {VCPU: 1}')
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.resize = False  # type: ignore[misc]


def test_networks_are_taken_in_their_order(compute: Callable[[str | bytes], ComputeConfig]) -> None:
    said = compute('networks:\n- bridge: br0\n- network: default\n- network: other net\n').networks
    assert said == (Attachment('bridge', 'br0'), Attachment('network', 'default'), Attachment('network', 'other net'))


def test_networks_and_a_bridge_are_one_too_many(mistakes: Callable[[str | bytes], list[str]]) -> None:
    assert mistakes('networks:\n- network: default\nbridge: br0\n') == [
        'compute.yaml:3: bridge: say it in networks, where it stands beside them: - bridge: NAME'
    ]


# Mistakes

NOT_PLUGGED = 'networks: must be `network: NAME`, one of libvirt, or `bridge: NAME`, one of this host'


def test_every_mistake_is_named_with_its_line_and_in_order(mistakes: Callable[[str | bytes], list[str]]) -> None:
    assert mistakes('uuid: mine\netcd:\n  prot: 1\n  port: 0\nresise: True\nuuid: again\nplacement: {}\nzzz: 1\n') == [
        f'compute.yaml:1: uuid: must be a uuid like {DEFAULT_USER_ID}, not mine',
        'compute.yaml:3: etcd.prot: unknown key (did you mean port?)',
        'compute.yaml:4: etcd.port: must be 1 to 65535, not 0',
        'compute.yaml:5: resise: unknown key (did you mean resize?)',
        'compute.yaml:6: uuid: is there twice, first in line 1',
        'compute.yaml:8: zzz: unknown key',
    ]


def test_every_mistake_in_a_list_or_a_mapping_is_named_with_its_line(
    mistakes: Callable[[str | bytes], list[str]], tmp_path: Path
) -> None:
    total = 'the total must be a whole number from 1 to 2147483647, not'
    assert mistakes(
        'inventory:\n  VCPU: 0\n  disk: 1\n  MEMORY_MB: none\ntraits: [CUSTOM_A,\n  7,\n  8]\nnetworks:\n- vlan: 3\n'
        '- bridge: a b\n- bridge: br0\netcd:\n  endpoints:\n  - a:0\n  - b:1\n  - c\n  insecure: yes\n'
    ) == [
        f'compute.yaml:2: inventory: VCPU: {total} 0',
        'compute.yaml:3: inventory: disk: must be a resource class: capitals, digits and _',
        f'compute.yaml:4: inventory: MEMORY_MB: {total} the text "none"',
        'compute.yaml:6: traits: must be text; put 7 in quotes',
        'compute.yaml:7: traits: must be text; put 8 in quotes',
        'compute.yaml:9: networks: must be `network: NAME`, one of libvirt, or `bridge: NAME`, one of this host',
        'compute.yaml:10: networks: must be the name of a network interface (at most 15 characters), not a b',
        'compute.yaml:14: etcd.endpoints: a:0 must be host:port, the port 1 to 65535',
        'compute.yaml:16: etcd.endpoints: c must be host:port, the port 1 to 65535',
    ]
    path = tmp_path / 'schedule.yaml'
    flavors = '  small: 7\n  medium: resources=VCPU:1\n  large: resources=VCPU:none\n'
    path.write_text(f'flavors:\n{flavors}ssh_keys: [~/a, 5]\n')
    with pytest.raises(UsageError) as caught:
        load_schedule(path)
    small, large, *keys = str(caught.value).split('\n')
    assert small.endswith(':2: flavors: small: must be text; put 7 in quotes')
    assert ':4: flavors: large: ' in large
    assert len(keys) == 2


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('just words', 'the file: must be keys with values, not just words'),
        ('[a]', 'the file: must be keys with values, not a list'),
        ('? [a]\n: b', '…: a key must be a word'),
        ('<<: {resize: no}', '<<: unknown key'),
        ('uuid: 12', 'uuid: must be text; put 12 in quotes'),
        ('uuid: [a]', 'uuid: must be text, not a list'),
        ('uuid: ""', 'uuid: must be one line of printable text'),
        ('networks: default', 'networks: must be a list of `- network: NAME` and `- bridge: NAME`, not default'),
        ('networks: []', 'networks: must be a list of `- network: NAME` and `- bridge: NAME`, not an empty list'),
        ('networks: [default]', NOT_PLUGGED),
        ('networks: [{network: a, bridge: b}]', NOT_PLUGGED),
        ('networks: [{vlan: a}]', NOT_PLUGGED),
        ('networks: [[a]]', NOT_PLUGGED),
        ('networks: [{[a]: b}]', NOT_PLUGGED),
        ('networks: [{network: a/b}]', 'networks: must be the name of a network of libvirt, not a/b'),
        ('networks: [{network: 7}]', 'networks: must be text; put 7 in quotes'),
        (
            'networks: [{bridge: a b}]',
            'networks: must be the name of a network interface (at most 15 characters), not a b',
        ),
        ('networks: [{network: a}, {network: a}]', 'networks: network a is there twice'),
        ('networks: [' + ', '.join(f'{{bridge: b{n}}}' for n in range(9)) + ']', 'networks: must be at most 8, are 9'),
        ('bridge: "a\\nb"', 'bridge: must be one line of printable text'),
        ('bridge: a/b', 'bridge: must be the name of a network interface (at most 15 characters), not a/b'),
        ('bridge: ..', 'bridge: must be the name of a network interface (at most 15 characters), not ..'),
        (
            'bridge: sixteen-letters-',
            'bridge: must be the name of a network interface (at most 15 characters), not sixteen-letters-',
        ),
        ('resize: 1', 'resize: must be True or False, not 1'),
        ('resize: "no"', 'resize: must be True or False, not the text "no"'),
        ('workers: 0', 'workers: must be 1 to 64, not 0'),
        ('workers: 65', 'workers: must be 1 to 64, not 65'),
        ('workers: 1.5', 'workers: must be a whole number, not 1.5'),
        ('workers: 010', 'workers: must be a whole number, not 010'),
        ('workers: 1:30', 'workers: must be a whole number, not 1:30'),
        ('workers: true', 'workers: must be a whole number, not true'),
        ('workers: {}', 'workers: must be a whole number, not a mapping'),
        ('virt_type: xen', 'virt_type: must be auto, kvm or qemu, not xen'),
        ('metadata: cdrom', 'metadata: must be network or iso, not cdrom'),
        ('metadata: [iso]', 'metadata: must be text, not a list'),
        ('state: ~/ecompute', 'state: write the directory out: whose home ~ is depends on who starts the program'),
        ('state: "a\\0b"', 'state: must be one line of printable text'),
        ('state: "\\ud800"', 'state: must be one line of printable text'),
        ('traits: CUSTOM_X', 'traits: must be a list, not CUSTOM_X'),
        ('image_sources: h', 'image_sources: must be a list, not h'),
        *(
            (f'image_sources: [{text}]', f'image_sources: {WHERE}')
            for text in ('10.1.0.1/16', '"10.1"', 'http://h/', '"*.example.org"', '"h:80"', 'user@h', '/x')
        ),
        ('image_sources: [h, H.]', 'image_sources: H. is there twice'),
        ('image_proxy: proxy:3128', 'image_proxy: must be a URL like http://ds1:8080'),
        ('image_proxy: http://me:secret@h', 'image_proxy: must not carry a user or password: it would be in logs and '
         'process lists'),
        (
            'traits: [HW_CPU_X86_AVX2, HW_CPU_X86_AVX3]',
            'traits: HW_CPU_X86_AVX3 is none of os-traits, and one of your own begins with CUSTOM_',
        ),
        (
            'traits: [CUSTOM_x]',
            'traits: CUSTOM_x must be CUSTOM_ and then capitals, digits and _, 255 in all at most',
        ),
        ('traits: [CUSTOM_X, CUSTOM_X]', 'traits: CUSTOM_X is there twice'),
        ('traits: [7]', 'traits: must be text; put 7 in quotes'),
        *(
            (
                f'traits: [{name}]',
                f'traits: {name} is not for configurations: '
                'eschedule host disable sets it, and host enable takes it off',
            )
            for name in ('COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED')
        ),
        ('aggregates: [x]', f'aggregates: must be a uuid like {DEFAULT_USER_ID}, not x'),
        (f'aggregates: [{UUID}, {UUID}]', f'aggregates: {UUID} is there twice'),
        ('allocation_ratios: {}', 'allocation_ratios: must be resource classes with ratios, not a mapping'),
        (
            'allocation_ratios: {vcpu: 1}',
            'allocation_ratios: vcpu: must be a resource class: capitals, digits and _',
        ),
        *(
            (
                f'allocation_ratios: {{VCPU: {ratio}}}',
                f'allocation_ratios: VCPU: the ratio must be a number like 0.5, above 0 and at most 1000, not {said}',
            )
            for ratio, said in (
                *((each, each) for each in ('0', '0.0', '-1', '1001', '.inf', '.5')),
                ('four', 'the text "four"'), ('"2"', 'the text "2"'), ('1e3', 'the text "1e3"')
            )
        ),
        ('inventory: {}', 'inventory: must be resource classes with totals, not a mapping'),
        ('inventory: VCPU', 'inventory: must be resource classes with totals, not VCPU'),
        ('inventory: {vcpu: 1}', 'inventory: vcpu: must be a resource class: capitals, digits and _'),
        (
            'inventory: {VCPU: 0}',
            'inventory: VCPU: the total must be a whole number from 1 to 2147483647, not 0',
        ),
        (
            'inventory: {VCPU: 1.5}',
            'inventory: VCPU: the total must be a whole number from 1 to 2147483647, not 1.5',
        ),
        (
            'inventory: {VCPU: 2147483648}',
            'inventory: VCPU: the total must be a whole number from 1 to 2147483647, not 2147483648',
        ),
        (
            'inventory: {VCPU: "4"}',
            'inventory: VCPU: the total must be a whole number from 1 to 2147483647, not the text "4"',
        ),
        ('inventory: {VCPU: 1, VCPU: 2}', 'inventory: VCPU: is there twice'),
        (
            'inventory: {VCPU: }',
            'inventory: VCPU: the total must be a whole number from 1 to 2147483647, not nothing',
        ),
        ('etcd: ds1', 'etcd: must be keys with values, not ds1'),
        (
            'etcd: {user: me}',
            'etcd.user: logging in with a password cannot be done safely; use certificates (cert_cert, cert_key)',
        ),
        (
            'etcd: {password: }',
            'etcd.password: logging in with a password cannot be done safely; use certificates (cert_cert, cert_key)',
        ),
        ('etcd: {host: http://ds1}', 'etcd.host: must be a host name or address, not http://ds1'),
        ('etcd: {host: "a b"}', 'etcd.host: must be a host name or address, not a b'),
        ('etcd: {port: 65536}', 'etcd.port: must be 1 to 65535, not 65536'),
        ('etcd: {port: "2379"}', 'etcd.port: must be a whole number, not the text "2379"'),
        ('etcd: {host: a, endpoints: [b:1]}', 'etcd.host: say either endpoints, or host and port'),
        ('etcd: {endpoints: [b:1], port: 2}', 'etcd.port: say either endpoints, or host and port'),
        ('etcd: {endpoints: a:1}', 'etcd.endpoints: must be a list like [ds1:2379, ds2:2379], not a:1'),
        ('etcd: {endpoints: []}', 'etcd.endpoints: must be a list like [ds1:2379, ds2:2379], not an empty list'),
        ('etcd: {endpoints: [a]}', 'etcd.endpoints: a must be host:port, the port 1 to 65535'),
        ('etcd: {endpoints: [a:0]}', 'etcd.endpoints: a:0 must be host:port, the port 1 to 65535'),
        ('etcd: {endpoints: ["http://a:1"]}', 'etcd.endpoints: must be a host name or address, not http://a'),
        ('etcd: {timeout: 0}', 'etcd.timeout: must be more than 0 and at most 3600 seconds, not 0'),
        ('etcd: {timeout: .inf}', 'etcd.timeout: must be a number of seconds, not .inf'),
        ('etcd: {timeout: soon}', 'etcd.timeout: must be a number of seconds, not the text "soon"'),
        ('etcd: {cert_key: .}', 'etcd.cert_key: needs cert_cert beside it'),
        ('etcd: {cert_cert: .}', 'etcd.cert_cert: needs cert_key beside it'),
        ('etcd: {ca_cert: /no/such}', 'etcd.ca_cert: /no/such is not a file that can be read'),
        ('etcd: {grpc_options: [a]}', 'etcd.grpc_options: must be names with values, not a list'),
        ('etcd: {grpc_options: {a: [b]}}', 'etcd.grpc_options: a: must be text, not a list'),
        (
            'etcd: {grpc_options: {a: 9999999999}}',
            'etcd.grpc_options: a: must be -2147483648 to 2147483647, not 9999999999',
        ),
        ('etcd: {grpc_options: {a: 1, a: 2}}', 'etcd.grpc_options: a: is there twice'),
        ('placement: http://ds1', 'placement: must be keys with values, not http://ds1'),
        ('placement: {endpoint: ds1:8080}', 'placement.endpoint: must be a URL like http://ds1:8080'),
        ('placement: {endpoint: "ftp://ds1"}', 'placement.endpoint: must be a URL like http://ds1:8080, not ftp://ds1'),
        ('placement: {endpoint: "http://ds1:99999"}', 'placement.endpoint: must be a URL like http://ds1:8080'),
        ('placement: {endpoint: "http://ds1:0"}', 'placement.endpoint: the port must be 1 to 65535'),
        ('placement: {endpoint: "http://[::1"}', 'placement.endpoint: must be a URL like http://ds1:8080'),
        (
            'placement: {endpoint: "http://ds1/?x=1"}',
            'placement.endpoint: must be a URL like http://ds1:8080, not http://ds1/?x=1',
        ),
        ('placement: {url: "http://ds1"}', 'placement.url: unknown key'),
    ],
)
def test_a_mistake_is_one_clear_line(mistakes: Callable[[str | bytes], list[str]], text: str, reason: str) -> None:
    assert f'compute.yaml:1: {reason}' in mistakes(text)


def test_a_password_is_not_shown(mistakes: Callable[[str | bytes], list[str]]) -> None:
    for url in ('http://me:secret@ds1', 'http://me:sec/ret@ds1', 'http://secret@ds1:x'):
        assert 'sec' not in ''.join(mistakes(f'placement: {{endpoint: "{url}"}}'))


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ('resize: no\n\tuuid: x', 'compute.yaml:2:1: not YAML: found character'),
        ('resize: [no', 'compute.yaml:1:12: not YAML: expected'),
        ('resize: no\n--- \nresize: no', 'compute.yaml:2:1: not YAML: but found another document'),
        ('a: &a [x]\nb: *a', 'compute.yaml:1:4: anchors and aliases'),
        ('b: *a', 'compute.yaml:1:4: anchors and aliases'),
        ('uuid: !!python/object:os.system {}', 'compute.yaml:1:7: tags (!) are not taken'),
        ('uuid: !!str 5', 'compute.yaml:1:7: tags (!) are not taken'),
        ('a: ' + '[' * 5000, 'compute.yaml:1:11: is nested too deeply'),
        ('a: "\\UFFFFFFFF"', 'compute.yaml: not YAML'),
        (b'ok: 1\nuuid: \xff', 'compute.yaml:2: is not UTF-8 text'),
        ('a: 1\nb: \0', 'compute.yaml:2: not YAML: a character that cannot be printed'),
        ('#' * 65537, 'compute.yaml: is larger than 64 KiB'),
    ],
)
def test_what_is_not_yaml_or_more_than_we_take_is_one_line(
    mistakes: Callable[[str | bytes], list[str]], content: str | bytes, reason: str
) -> None:
    (line,) = mistakes(content)
    assert line.startswith(reason)


@pytest.mark.parametrize(
    ('flavors', 'reason'),
    [
        ('  a: resources=VCPU:1\n  a: resources=VCPU:2', '3: flavors: a: is there twice'),
        ('  [a, b]: resources=VCPU:1', '2: flavors: a name must be a word'),
    ],
)
def test_a_flavor_is_one_word_and_there_once(tmp_path: Path, flavors: str, reason: str) -> None:
    path = tmp_path / 'schedule.yaml'
    path.write_text(f'flavors:\n{flavors}\n')
    with pytest.raises(UsageError, match=f'yaml:{reason}$'):
        load_schedule(path)


def test_an_image_that_is_no_url_and_ids_that_are_too_long(tmp_path: Path) -> None:
    path = tmp_path / 'schedule.yaml'
    path.write_text(f'image: ftp://ds1/x\nuser_id: {"u" * 256}\nproject_id: 7\nuuid: {UUID}\n')
    with pytest.raises(UsageError) as caught:
        load_schedule(path)
    image, user, project, uuid = str(caught.value).split('\n')
    assert ':1: image: the image ftp://ds1/x must be a URL' in image
    assert user.endswith(':2: user_id: must be at most 255 characters, has 256')
    assert project.endswith(':3: project_id: must be text; put 7 in quotes')
    assert ':4: uuid: unknown key' in uuid
