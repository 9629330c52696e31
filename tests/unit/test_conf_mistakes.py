"""Mistakes in compute.yaml, schedule.yaml and --fake: each is reported with its line."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.conf import DEFAULT_USER_ID, EtcdConfig, ScheduleConfig, load_schedule
from ecomp.errors import UsageError
from tests.unit.conf_text import UUID

IMAGE_SOURCE_FORM = 'must be a host name, or a network like 10.1.0.0/16'
NETWORKS_FORM = 'networks: must be `network: NAME` (a libvirt network) or `bridge: NAME` (a bridge of this host)'
INTERFACE_FORM = 'must be the name of a network interface (at most 15 characters), not'
PASSWORD_REFUSED = 'logging in with a password is not safe. Fix: use certificates (cert_cert, cert_key)'
URL_FORM = 'must be a URL like http://ds1:8080'
TOTAL_FORM = 'the total must be a whole number from 1 to 2147483647, not'
NIL_UUID = '00000000-0000-0000-0000-000000000000'


@pytest.fixture
def mistakes(compute_config: Callable[[str | bytes], ComputeConfig]) -> Callable[[str | bytes], list[str]]:
    """A function that loads a text as compute.yaml and returns the lines of its error.

    The directory of the file is removed from the lines.
    """

    def load(content: str | bytes) -> list[str]:
        with pytest.raises(UsageError) as error:
            compute_config(content)
        return [re.sub(r'^\S*/compute.yaml', 'compute.yaml', line) for line in str(error.value).split('\n')]

    return load


def test_every_mistake_is_reported_with_its_line_in_order(mistakes: Callable[[str | bytes], list[str]]) -> None:
    assert mistakes('uuid: mine\netcd:\n  prot: 1\n  port: 0\nresise: True\nuuid: again\nplacement: {}\nzzz: 1\n') == [
        f'compute.yaml:1: uuid: must be a uuid like {DEFAULT_USER_ID}, not mine',
        'compute.yaml:3: etcd.prot: unknown key (did you mean port?)',
        'compute.yaml:4: etcd.port: must be 1 to 65535, not 0',
        'compute.yaml:5: resise: unknown key (did you mean resize?)',
        'compute.yaml:6: uuid: is given more than once, first in line 1',
        'compute.yaml:8: zzz: unknown key',
    ]


def test_mistakes_in_lists_and_mappings_have_their_line(mistakes: Callable[[str | bytes], list[str]]) -> None:
    assert mistakes(
        'inventory:\n  VCPU: 0\n  disk: 1\n  MEMORY_MB: none\ntraits: [CUSTOM_A,\n  7,\n  8]\nnetworks:\n- vlan: 3\n'
        '- bridge: a b\n- bridge: br0\netcd:\n  endpoints:\n  - a:0\n  - b:1\n  - c\n  insecure: yes\n'
    ) == [
        f'compute.yaml:2: inventory: VCPU: {TOTAL_FORM} 0',
        'compute.yaml:3: inventory: disk: must be a resource class: capitals, digits and _',
        f'compute.yaml:4: inventory: MEMORY_MB: {TOTAL_FORM} the text "none"',
        'compute.yaml:6: traits: must be text. Fix: put 7 in quotes',
        'compute.yaml:7: traits: must be text. Fix: put 8 in quotes',
        f'compute.yaml:9: {NETWORKS_FORM}',
        f'compute.yaml:10: networks: {INTERFACE_FORM} a b',
        'compute.yaml:14: etcd.endpoints: a:0 must be host:port, with a port from 1 to 65535',
        'compute.yaml:16: etcd.endpoints: c must be host:port, with a port from 1 to 65535',
    ]


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('just words', 'the file: must be a mapping of keys to values, not just words'),
        ('[a]', 'the file: must be a mapping of keys to values, not a list'),
        ('? [a]\n: b', '…: a key must be text'),
        ('<<: {resize: no}', '<<: unknown key'),
        ('uuid: 12', 'uuid: must be text. Fix: put 12 in quotes'),
        ('uuid: [a]', 'uuid: must be text, not a list'),
        ('uuid: ""', 'uuid: must be one line of printable text'),
        *(
            (f'{key}: {value}', f'{key}: must be a uuid like {DEFAULT_USER_ID}, not {NIL_UUID}')
            for key, value in (
                ('uuid', NIL_UUID),
                ('aggregates', f'[{NIL_UUID}]'),
            )
        ),
        (
            '{networks: [{network: default}], bridge: br0}',
            'bridge: is not accepted together with networks. Fix: move it to networks, as `- bridge: NAME`',
        ),
        ('networks: default', 'networks: must be a list of `- network: NAME` and `- bridge: NAME`, not default'),
        ('networks: []', 'networks: must be a list of `- network: NAME` and `- bridge: NAME`, not an empty list'),
        ('networks: [default]', NETWORKS_FORM),
        ('networks: [{network: a, bridge: b}]', NETWORKS_FORM),
        ('networks: [{vlan: a}]', NETWORKS_FORM),
        ('networks: [[a]]', NETWORKS_FORM),
        ('networks: [{[a]: b}]', NETWORKS_FORM),
        ('networks: [{network: a/b}]', 'networks: must be the name of a libvirt network, not a/b'),
        ('networks: [{network: 7}]', 'networks: must be text. Fix: put 7 in quotes'),
        ('networks: [{bridge: a b}]', f'networks: {INTERFACE_FORM} a b'),
        ('networks: [{network: a}, {network: a}]', 'networks: network a is given more than once'),
        (
            'networks: [' + ', '.join(f'{{bridge: b{n}}}' for n in range(9)) + ']',
            'networks: must have at most 8 entries, not 9',
        ),
        ('bridge: "a\\nb"', 'bridge: must be one line of printable text'),
        *((f'bridge: {name}', f'bridge: {INTERFACE_FORM} {name}') for name in ('a/b', '..', 'sixteen-letters-')),
        ('resize: 1', 'resize: must be True or False, not 1'),
        ('resize: "no"', 'resize: must be True or False, not the text "no"'),
        ('workers: 0', 'workers: must be 1 to 64, not 0'),
        ('workers: 65', 'workers: must be 1 to 64, not 65'),
        ('workers: 1.5', 'workers: must be a whole number, not 1.5'),
        ('workers: 010', 'workers: must be a whole number, not 010'),
        ('workers: 1:30', 'workers: must be a whole number, not 1:30'),
        ('workers: true', 'workers: must be a whole number, not true'),
        ('workers: {}', 'workers: must be a whole number, not an empty mapping'),
        ('virt_type: xen', 'virt_type: must be auto, kvm or qemu, not xen'),
        ('metadata: cdrom', 'metadata: must be network or iso, not cdrom'),
        ('metadata: [iso]', 'metadata: must be text, not a list'),
        (
            'state: ~/ecompute',
            'state: ~ is not accepted: it depends on the user who starts the program. Fix: write the directory in full',
        ),
        ('state: "a\\0b"', 'state: must be one line of printable text'),
        ('state: "\\ud800"', 'state: must be one line of printable text'),
        ('traits: CUSTOM_X', 'traits: must be a list, not CUSTOM_X'),
        ('image_sources: h', 'image_sources: must be a list, not h'),
        *(
            (f'image_sources: [{text}]', f'image_sources: {IMAGE_SOURCE_FORM}')
            for text in ('10.1.0.1/16', '"10.1"', 'http://h/', '"*.example.org"', '"h:80"', 'user@h', '/x')
        ),
        ('image_sources: [h, H.]', 'image_sources: H. is given more than once'),
        ('image_proxy: proxy:3128', 'image_proxy: must be a URL like http://ds1:8080'),
        (
            'image_proxy: http://me:secret@h',
            'image_proxy: must not contain a user or password: they would appear in logs and process lists',
        ),
        (
            'traits: [HW_CPU_X86_AVX2, HW_CPU_X86_AVX3]',
            'traits: HW_CPU_X86_AVX3 is not in os-traits, and a trait of your own must begin with CUSTOM_',
        ),
        (
            'traits: [CUSTOM_x]',
            'traits: CUSTOM_x must be CUSTOM_ followed by capitals, digits and _, at most 255 characters in total',
        ),
        ('traits: [CUSTOM_X, CUSTOM_X]', 'traits: CUSTOM_X is given more than once'),
        ('traits: [7]', 'traits: must be text. Fix: put 7 in quotes'),
        *(
            (
                f'traits: [{name}]',
                f'traits: {name} is not allowed here. Fix: use `eschedule host disable`, which sets it',
            )
            for name in ('COMPUTE_STATUS_DISABLED', 'CUSTOM_ECOMP_DISABLED')
        ),
        (
            'ignore_warnings: [no-such]',
            'ignore_warnings: must be etcd-version or libvirt-version, not no-such',
        ),
        # An error of the same command cannot be ignored, nor a warning of another command.
        ('ignore_warnings: [clock]', 'ignore_warnings: must be etcd-version or libvirt-version, not clock'),
        ('ignore_warnings: [dhcp-open]', 'ignore_warnings: must be etcd-version or libvirt-version, not dhcp-open'),
        ('ignore_warnings: etcd-version', 'ignore_warnings: must be a list, not etcd-version'),
        ('aggregates: [x]', f'aggregates: must be a uuid like {DEFAULT_USER_ID}, not x'),
        (f'aggregates: [{UUID}, {UUID}]', f'aggregates: {UUID} is given more than once'),
        (
            'allocation_ratios: {}',
            'allocation_ratios: must be a mapping of resource classes to ratios, not an empty mapping',
        ),
        ('allocation_ratios: {vcpu: 1}', 'allocation_ratios: vcpu: must be a resource class: capitals, digits and _'),
        *(
            (
                f'allocation_ratios: {{VCPU: {ratio}}}',
                f'allocation_ratios: VCPU: the ratio must be a number like 0.5, above 0 and at most 1000, not {said}',
            )
            for ratio, said in (
                *((each, each) for each in ('0', '0.0', '-1', '1001', '.inf', '.5')),
                ('four', 'the text "four"'),
                ('"2"', 'the text "2"'),
                ('1e3', 'the text "1e3"'),
            )
        ),
        ('inventory: {}', 'inventory: must be a mapping of resource classes to totals, not an empty mapping'),
        ('inventory: VCPU', 'inventory: must be a mapping of resource classes to totals, not VCPU'),
        ('inventory: {vcpu: 1}', 'inventory: vcpu: must be a resource class: capitals, digits and _'),
        *(
            (f'inventory: {{VCPU: {total}}}', f'inventory: VCPU: {TOTAL_FORM} {said}')
            for total, said in (
                ('0', '0'),
                ('1.5', '1.5'),
                ('2147483648', '2147483648'),
                ('"4"', 'the text "4"'),
                ('', 'nothing'),
            )
        ),
        ('inventory: {VCPU: 1, VCPU: 2}', 'inventory: VCPU: is given more than once'),
        ('etcd: ds1', 'etcd: must be a mapping of keys to values, not ds1'),
        ('etcd: {user: me}', f'etcd.user: {PASSWORD_REFUSED}'),
        ('etcd: {password: }', f'etcd.password: {PASSWORD_REFUSED}'),
        ('etcd: {host: http://ds1}', 'etcd.host: must be a host name or address, not http://ds1'),
        ('etcd: {host: "a b"}', 'etcd.host: must be a host name or address, not a b'),
        ('etcd: {port: 65536}', 'etcd.port: must be 1 to 65535, not 65536'),
        ('etcd: {port: "2379"}', 'etcd.port: must be a whole number, not the text "2379"'),
        ('etcd: {host: a, endpoints: [b:1]}', 'etcd.host: set either endpoints, or host and port'),
        ('etcd: {endpoints: [b:1], port: 2}', 'etcd.port: set either endpoints, or host and port'),
        ('etcd: {endpoints: a:1}', 'etcd.endpoints: must be a list like [ds1:2379, ds2:2379], not a:1'),
        ('etcd: {endpoints: []}', 'etcd.endpoints: must be a list like [ds1:2379, ds2:2379], not an empty list'),
        ('etcd: {endpoints: [a]}', 'etcd.endpoints: a must be host:port, with a port from 1 to 65535'),
        ('etcd: {endpoints: [a:0]}', 'etcd.endpoints: a:0 must be host:port, with a port from 1 to 65535'),
        ('etcd: {endpoints: ["http://a:1"]}', 'etcd.endpoints: must be a host name or address, not http://a'),
        ('etcd: {timeout: 0}', 'etcd.timeout: must be more than 0 and at most 3600 seconds, not 0'),
        ('etcd: {timeout: .inf}', 'etcd.timeout: must be a number of seconds, not .inf'),
        ('etcd: {timeout: soon}', 'etcd.timeout: must be a number of seconds, not the text "soon"'),
        ('etcd: {cert_key: .}', 'etcd.cert_key: needs cert_cert, too'),
        ('etcd: {cert_cert: .}', 'etcd.cert_cert: needs cert_key, too'),
        ('etcd: {ca_cert: /no/such}', 'etcd.ca_cert: /no/such is not a readable file'),
        ('placement: http://ds1', 'placement: must be a mapping of keys to values, not http://ds1'),
        ('placement: {endpoint: ds1:8080}', f'placement.endpoint: {URL_FORM}'),
        ('placement: {endpoint: "ftp://ds1"}', f'placement.endpoint: {URL_FORM}, not ftp://ds1'),
        ('placement: {endpoint: "http://ds1:99999"}', f'placement.endpoint: {URL_FORM}'),
        ('placement: {endpoint: "http://ds1:0"}', 'placement.endpoint: the port must be 1 to 65535'),
        ('placement: {endpoint: "http://[::1"}', f'placement.endpoint: {URL_FORM}'),
        ('placement: {endpoint: "http://ds1/?x=1"}', f'placement.endpoint: {URL_FORM}, not http://ds1/?x=1'),
        ('placement: {url: "http://ds1"}', 'placement.url: unknown key'),
    ],
)
def test_mistake_is_reported_in_one_line(mistakes: Callable[[str | bytes], list[str]], text: str, reason: str) -> None:
    messages = mistakes(text)
    assert f'compute.yaml:1: {reason}' in messages
    assert len(messages) == 1 or 'etcd: {' in text, 'other hosts and missing files are named as well'


def test_password_is_not_shown(mistakes: Callable[[str | bytes], list[str]]) -> None:
    for url in ('http://me:secret@ds1', 'http://me:sec/ret@ds1', 'http://secret@ds1:x'):
        assert 'sec' not in ''.join(mistakes(f'placement: {{endpoint: "{url}"}}'))


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ('resize: no\n\tuuid: x', 'compute.yaml:2:1: not YAML: found character'),
        ('resize: [no', 'compute.yaml:1:12: not YAML: expected'),
        (
            'resize: no\n--- \nresize: no',
            'compute.yaml:2:1: not YAML: expected a single document in the stream but found another document',
        ),
        ('a: &a [x]\nb: *a', 'compute.yaml:1:4: anchors and aliases'),
        ('b: *a', 'compute.yaml:1:4: anchors and aliases'),
        ('uuid: !!python/object:os.system {}', 'compute.yaml:1:7: tags (!) are not accepted'),
        ('uuid: !!str 5', 'compute.yaml:1:7: tags (!) are not accepted'),
        ('a: ' + '[' * 5000, 'compute.yaml:1:11: is nested too deeply'),
        ('a: "\\UFFFFFFFF"', 'compute.yaml: not YAML'),
        (b'ok: 1\nuuid: \xff', 'compute.yaml:2: is not UTF-8 text'),
        ('a: 1\nb: \0', 'compute.yaml:2: not YAML: it contains a character that is not printable'),
        ('#' * 65537, 'compute.yaml: is larger than 64 KiB'),
    ],
)
def test_invalid_or_unsupported_yaml_is_reported_in_one_line(
    mistakes: Callable[[str | bytes], list[str]], content: str | bytes, reason: str
) -> None:
    (line,) = mistakes(content)
    assert line.startswith(reason)


@pytest.mark.parametrize(
    ('text', 'reasons'),
    [
        ('flavors:\n  a: resources=VCPU:1\n  a: resources=VCPU:2\n', ['3: flavors: a: is given more than once']),
        ('flavors:\n  [a, b]: resources=VCPU:1\n', ['2: flavors: a name must be text']),
        (
            'flavors:\n  small: 7\n  medium: resources=VCPU:1\n  large: resources=VCPU:none\nssh_keys: [~/a, 5]\n',
            [
                '2: flavors: small: must be text. Fix: put 7 in quotes',
                '4: flavors: large: .*',
                '5: ssh_keys: .*',
                '5: ssh_keys: .*',
            ],
        ),
        (
            f'image: ftp://ds1/x\nuser_id: {"u" * 256}\nproject_id: 7\nuuid: {UUID}\n',
            [
                '1: image: the image ftp://ds1/x must be a URL.*',
                '2: user_id: must have at most 255 characters, not 256',
                '3: project_id: must be text. Fix: put 7 in quotes',
                '4: uuid: unknown key.*',
            ],
        ),
    ],
)
def test_mistakes_in_schedule_yaml_have_their_line(tmp_path: Path, text: str, reasons: list[str]) -> None:
    path = tmp_path / 'schedule.yaml'
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_schedule(path)
    assert re.fullmatch('\n'.join(f'{path}:{reason}' for reason in reasons), str(caught.value))


# Unreadable files


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='none.yaml: cannot be read: No such file or directory'):
        load_compute(tmp_path / 'none.yaml')
    with pytest.raises(UsageError, match='cannot be read: Is a directory'):
        load_schedule(tmp_path)


def test_unreadable_default_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('compute.yaml').symlink_to('gone')
    Path('schedule.yaml').mkdir()
    with pytest.raises(UsageError, match='^compute.yaml: cannot be read'):
        load_compute(None)
    with pytest.raises(UsageError, match='^schedule.yaml: cannot be read'):
        load_schedule(None)


def test_message_with_odd_file_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_compute(tmp_path / 'a\nb')
    assert '\n' not in str(caught.value)


def test_deleted_current_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / 'gone'
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match='compute.yaml: cannot be read'):
        load_compute(None)
    os.chdir(tmp_path)


# The inventory of --fake


def test_parse_inventory_reads_totals() -> None:
    assert parse_inventory('VCPU:4,DISK_GB:10,MEMORY_MB:512') == {'VCPU': 4, 'DISK_GB': 10, 'MEMORY_MB': 512}
    assert parse_inventory(' VCPU:4, DISK_GB: 10 ') == {'VCPU': 4, 'DISK_GB': 10}


@pytest.mark.parametrize(
    'text',
    [
        *('', ',', 'VCPU', 'VCPU:', 'VCPU:0', 'VCPU:-1', 'VCPU:1.5', 'VCPU:1,', 'VCPU:1,VCPU:1', 'vcpu:1', 'VCPU:²'),
        *('VCPU:' + '9' * 5000, 'VCPU=1', ':1', 'VCPU:1:2'),
    ],
)
def test_invalid_inventory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match='inventory') as caught:
        parse_inventory(text)
    assert '\n' not in str(caught.value)
    assert len(str(caught.value)) < 400


@settings(max_examples=300)
@given(st.text(max_size=40) | st.text(alphabet='VCPU:4, 019', max_size=20))
def test_any_inventory_is_parsed_or_a_usage_error(text: str) -> None:
    totals, message = {}, ''
    try:
        totals = parse_inventory(text)
    except UsageError as error:
        message = str(error)
    assert message.isprintable()
    assert bool(totals) != bool(message)
    assert all(total > 0 for total in totals.values())


# Arbitrary input


KEYS = [f.name for kind in (ComputeConfig, ScheduleConfig) for f in dataclasses.fields(kind)]
KEYS += EtcdConfig._fields
LIKELY_WORDS = st.sampled_from(
    [*KEYS, 'host', 'port', 'endpoint', 'user', 'VCPU', 'http://ds1', 'ds1:2379', UUID, '.', '<<']
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | LIKELY_WORDS
    | st.dates()
    | st.binary(max_size=4)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LIKELY_WORDS | SCALARS, inner, max_size=6),
    max_leaves=12,
)
ANY_CONTENT = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode('utf-8', 'replace')),
    TREES.map(lambda tree: yaml.dump(tree, allow_unicode=True).encode('utf-8', 'replace')),
    st.text(alphabet='abuid:-[]{}#&*!|>%@,?"\'\n \t~0189.<', max_size=60).map(str.encode),
)


@settings(max_examples=900)
@given(ANY_CONTENT)
@example(b'a: "\\ud800"')
@example(b'2001-13-45: 2001-13-45')
@example(b'? {a: b}\n: c')
@example(b'%YAML 9.9\n---\na: b')
@example(b'%TAG ! x\n')
@example(b'{' * 65000)
@example(b'[' * 65000)
@example(b'- ' * 32000)
@example(b'"\\xZZ"')
@example(b'? ' * 32000)
def test_any_bytes_are_loaded_or_a_usage_error(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix='.yaml') as file:
        file.write(content)
        file.flush()
        for load in (load_compute, load_schedule):
            try:
                load(Path(file.name))
            except UsageError as error:
                for line in str(error).split('\n'):
                    assert line.isprintable()
                    assert line.startswith(file.name)
                    assert len(line) < 500
