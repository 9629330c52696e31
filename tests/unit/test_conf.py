"""compute.yaml and schedule.yaml: valid contents, defaults and mistakes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecomp import conf, yaml_graph
from ecomp.compute_conf import ComputeConfig, load_compute, parse_inventory
from ecomp.conf import DEFAULT_IMAGE, DEFAULT_USER_ID, EtcdConfig, PlacementConfig, ScheduleConfig, load_schedule
from ecomp.errors import UsageError
from ecomp.model.guest import Attachment
from ecomp.model.image import check_image, split_pin
from ecomp.yaml_graph import parse_any
from ecomp.yaml_plain import Node, parse_plain
from tests.unit.conf_text import UUID

TOP = Path(__file__).resolve().parents[2]


def test_defaults_without_a_file_point_at_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_compute(None) == ComputeConfig(
        uuid=None, etcd=EtcdConfig(('localhost:2379',), None, None, None, 5.0),
        placement=PlacementConfig('http://localhost:8080'), resize=True, networks=(Attachment('network', 'default'),),
        metadata='network', state=Path('/var/lib/ecompute'), workers=None, inventory=None, virt_type='auto',
        images=None, directory=tmp_path,
    )  # fmt: skip
    assert load_schedule(None) == ScheduleConfig(
        EtcdConfig(), PlacementConfig('http://localhost:8080'), DEFAULT_IMAGE, DEFAULT_USER_ID, conf.DEFAULT_PROJECT_ID
    )


def test_file_in_the_current_directory_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('compute.yaml').write_text('resize: False\n')
    Path('schedule.yaml').write_text('image: http://ds1/small.img\n')
    assert not load_compute(None).resize
    assert load_schedule(None).image == 'http://ds1/small.img'


@pytest.mark.parametrize(
    'content', ['', '\n', '# only a comment\n', '---\n', '--- {}\n', 'etcd:\nplacement:\nuuid:\n', b'\xef\xbb\xbf']
)
def test_empty_file_and_empty_keys_yield_the_defaults(
    compute_config: Callable[[str | bytes], ComputeConfig], tmp_path: Path, content: str | bytes
) -> None:
    assert compute_config(content) == ComputeConfig(directory=tmp_path)


@pytest.mark.parametrize(('name', 'load'), [('compute.yaml', load_compute), ('schedule.yaml', load_schedule)])
@pytest.mark.parametrize('uncommented', [False, True])
def test_examples_are_valid_and_have_every_key(
    tmp_path: Path, name: str, load: Callable[[Path | None], Any], uncommented: bool
) -> None:
    text = (TOP / name).read_text()
    default = load(TOP / name)
    assert (
        dataclasses.replace(default, **({'directory': Path('.')} if name == 'compute.yaml' else {})) == type(default)()
    )
    if not uncommented:
        return
    for file_name in ('ca.crt', 'client.crt', 'client.key'):
        (tmp_path / file_name).touch()
    text = re.sub(r'^#(?=\S|  )', '', text, flags=re.MULTILINE).replace('/etc/ecomp/', '')
    text = text.replace('/var/lib/prometheus/node-exporter', str(tmp_path))  # it must exist
    text = re.sub(r'^  (host|port): .*\n', '', text, flags=re.MULTILINE)  # endpoints replaces them
    (tmp_path / name).write_text(text)
    config = load(tmp_path / name)
    keys = {f.name for f in dataclasses.fields(config) if f.metadata}
    assert set(yaml.safe_load(text)) == keys
    assert set(yaml.safe_load(text)['etcd']) == {*EtcdConfig._fields, 'insecure'}
    assert len(config.etcd.endpoints) == 3
    # Each example has the key's default value, unless the comment above it names the default.
    for block in (TOP / name).read_text().split('\n\n'):
        for key in keys & set(re.findall(r'(?m)^#(\w+):', block)):
            assert re.search(r'Default:\s', block) or getattr(config, key) == getattr(default, key), key
    assert config.placement == default.placement


def test_default_image_is_pinned_and_uses_https() -> None:
    bare, digest = split_pin(check_image(DEFAULT_IMAGE))
    assert bare.startswith('https://')
    assert digest is not None


# Values


def test_compute_yaml_with_all_keys_is_loaded(
    compute_config: Callable[[str | bytes], ComputeConfig], tmp_path: Path
) -> None:
    for name in ('ca', 'cert', 'key'):
        (tmp_path / name).touch()
    config = compute_config(
        f"""
uuid: {UUID.upper()}
etcd:
  host: ds1
  port: 2380
  ca_cert: ca
  cert_cert: {tmp_path}/cert
  cert_key: ./key
  timeout: 2.5
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
ignore_warnings: [libvirt-version]
"""
    )
    assert config == ComputeConfig(
        uuid=UUID, etcd=EtcdConfig(('ds1:2380',), tmp_path / 'ca', tmp_path / 'key', tmp_path / 'cert', 2.5),
        placement=PlacementConfig('https://ds1:8081/placement'), resize=False,
        networks=(Attachment('network', 'default'), Attachment('bridge', 'br0')), metadata='iso',
        state=tmp_path / 'state/here', workers=64, inventory={'VCPU': 4, 'CUSTOM_GPU_2': 1},
        traits=('HW_CPU_X86_AVX2', 'CUSTOM_RACK_7'), aggregates=(UUID,),
        allocation_ratios={'VCPU': 16.0, 'MEMORY_MB': 1.5}, virt_type='qemu', images=tmp_path.parent / 'images',
        image_sources=('images.example.org', '10.1.0.0/16', '127.0.0.1/32', 'fd12::/64'),
        image_proxy='http://proxy:3128', ignore_warnings=('libvirt-version',), directory=tmp_path,
    )  # fmt: skip


def test_unreadable_certificate_of_another_user_is_one_line() -> None:
    """A user may run eschedule in the directory of a lab that root made."""
    # In /tmp, because every directory above must be open to the other user.
    with tempfile.TemporaryDirectory(dir='/tmp') as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / 'certs').mkdir(mode=0o700)
        (directory / 'certs/ca.pem').touch()
        files = 'ca_cert: certs/ca.pem, cert_cert: certs/ca.pem, cert_key: certs/ca.pem'
        (directory / 'schedule.yaml').write_text(f'etcd: {{{files}}}\n')
        command = [sys.executable, '-P', '-m', 'ecomp.schedule', 'list']
        command = ['setpriv', '--reuid', '65534', '--clear-groups', *command] if os.geteuid() == 0 else command
        if os.geteuid() != 0:
            (directory / 'certs').chmod(0)
        env = {**os.environ, 'PYTHONPATH': str(TOP), 'ECOMP_CONFIG': name}
        process = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=env, check=False)
    why = f'{name}/schedule.yaml names {name}/certs/ca.pem, but this user may not read it'
    fix = 'Fix: run this as the owner of that file, or with sudo'
    assert (process.returncode, process.stdout) == (2, '')
    assert process.stderr == f'eschedule: {why}. {fix}\n'


def test_placement_certificates_are_loaded_and_checked(
    compute_config: Callable[[str | bytes], ComputeConfig], tmp_path: Path
) -> None:
    for name in ('ca', 'cert', 'key', 'token'):
        (tmp_path / name).touch()
    files = f'ca_cert: ca, cert_cert: ./cert, cert_key: {tmp_path}/key, token_file: token'
    assert compute_config(f'placement: {{endpoint: "https://ds1", {files}}}').placement == PlacementConfig(
        'https://ds1', tmp_path / 'ca', tmp_path / 'key', tmp_path / 'cert', tmp_path / 'token'
    )


def test_schedule_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / 'mine.yaml'
    path.write_text(
        '{user_id: me, project_id: "12", image: "https://h/i", etcd: {host: ds1, insecure: yes}, '
        'placement: {endpoint: "http://ds1", insecure: yes}}'
    )
    assert load_schedule(path) == ScheduleConfig(
        EtcdConfig(('ds1:2379',)), PlacementConfig('http://ds1'), 'https://h/i', 'me', '12'
    )


def test_user_data_and_ssh_keys_are_paths_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / 'mine.yaml'
    path.write_text('user_data: given/user-data.yaml\nssh_keys: [id.pub, /etc/keys/ops.pub]\n')
    config = load_schedule(path)
    assert config.user_data == tmp_path / 'given/user-data.yaml'
    assert config.ssh_keys == (tmp_path / 'id.pub', Path('/etc/keys/ops.pub'))
    path.write_text('user_data:\nssh_keys: []\n')
    assert (load_schedule(path).user_data, load_schedule(path).ssh_keys) == (None, ())


@pytest.mark.parametrize(('name', 'load'), [('compute.yaml', load_compute), ('schedule.yaml', load_schedule)])
@pytest.mark.parametrize(('value', 'warnings'), [('{grpc.enable_http_proxy: 0}', 1), ('[x]', 1), ('', 0)])
def test_grpc_options_are_ignored_with_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    load: Callable[[Path | None], Any],
    value: str,
    warnings: int,
) -> None:
    path = tmp_path / name
    path.write_text(f'etcd:\n  grpc_options: {value}\n')
    assert load(path).etcd == EtcdConfig()
    reason = f'{path}: etcd.grpc_options is ignored: ecomp uses no gRPC library. '
    assert caplog.messages == [f'{reason}Fix: remove the key; ecomp 2.0 refuses it'] * warnings


def test_networks_keep_their_order(compute_config: Callable[[str | bytes], ComputeConfig]) -> None:
    networks = compute_config('networks:\n- bridge: br0\n- network: default\n- network: other net\n').networks
    assert networks == (
        Attachment('bridge', 'br0'), Attachment('network', 'default'), Attachment('network', 'other net')
    )  # fmt: skip


# Mistakes in compute.yaml, schedule.yaml and --fake: each is reported with its line.


@pytest.fixture
def mistakes(compute_config: Callable[[str | bytes], ComputeConfig]) -> Callable[[str | bytes], list[str]]:
    """A function that loads a text as compute.yaml and returns the lines of its error."""

    def load(content: str | bytes) -> list[str]:
        with pytest.raises(UsageError) as error:
            compute_config(content)
        return [re.sub(r'^\S*/compute.yaml', 'compute.yaml', line) for line in str(error.value).split('\n')]

    return load


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ('a: ' + '[' * 5000, 'compute.yaml:1:11: is nested too deeply'),
        ('\n'.join(' ' * level + 'a:' for level in range(300)), 'compute.yaml:9:9: is nested too deeply'),
        (b'ok: 1\nuuid: \xff', 'compute.yaml:2: is not UTF-8 text'),
        ('#' * 65537, 'compute.yaml: is larger than 64 KiB'),
    ],
)
def test_large_or_binary_file_is_refused(
    mistakes: Callable[[str | bytes], list[str]], content: str | bytes, reason: str
) -> None:
    """Other mistakes are in tests/golden/texts/files.txt."""
    (line,) = mistakes(content)
    assert line.startswith(reason)


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
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.text(max_size=20) | st.binary(max_size=4)
)
TREES = st.recursive(
    SCALARS | LIKELY_WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LIKELY_WORDS | SCALARS, inner, max_size=6),
    max_leaves=12,
)
ANY_CONTENT = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode('utf-8', 'replace')),
    TREES.map(lambda tree: yaml.dump(tree, allow_unicode=True).encode('utf-8', 'replace')),
    st.text(alphabet='abuid:-[]{}#&*!|>%@,?"\'\n \t~0189.<', max_size=60).map(str.encode),
)


@settings(max_examples=200)
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
@example(b'a: "\\UFFFFFFFF"')
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


# The fast reader of plain YAML: what it reads, it reads like PyYAML.


WORDS = st.sampled_from([
    *('etcd', 'a_b', 'yes', 'No', 'true', 'True', 'FALSE', 'null', 'Null', 'y', 'nan', '_', '_1', 'e3', 'inf', 'x:y'),
    *('/etc/x.crt', 'https://ds1:8080', 'http://ds1:8080/', 'ds1:2379', '127.0.0.1:2379', '10.0.0.1', '1.2', '1:30'),
    *('0', '7', '010', '0x1f', '1_000', '-1', '1e3', '12:30:45', '2026-11-24', '~', '""', "''", '"a b"', "'it''s'"),
    *('"a\\n"', "'# no comment'", '"a#b"', 'a#b', 'a b', 'a: b', 'a:', '-', '- x', '-x', '?', '? x', '!x', '&a', '*a'),
    *('[a, b]', '[]', '[ a ]', '[a,b]', '[a, b', '[[a]]', '[a: b]', '{a: b}', '{}', '[1, 2]', '["a", \'b\']', '|', '>'),
    *('%x', '@x', '`x', 'a,b', 'a]', 'a}', 'é', '...', '---', '[a, ]', '[,]', "[a'b]", 'a"b', '.5', '[true, ~]', '<<'),
    *('a#b', 'x.img#sha256=07e4', 'resources=VCPU:1,DISK_GB:5&required=!A', 'a,b: c', '[x.img#a, b]'),
])  # fmt: skip
YAML_KEYS = st.sampled_from(
    ['etcd', 'a_b', 'on', 'ca_cert', 'a-b', 'a.b', '1', 'null', 'a', 'b', '"q"', '?', '<<', 'x y']
)
ENDS = st.sampled_from(['', '', '', ' ', ' # why', '#x', ' #', '\t', '\r', '  # a: b'])
INDENTS = st.sampled_from(['', '', '  ', '  ', '    ', ' ', '\t'])
LINES = st.one_of(
    st.builds('{}{}: {}{}'.format, INDENTS, YAML_KEYS, WORDS, ENDS),
    st.builds('{}{}:{}'.format, INDENTS, YAML_KEYS, ENDS),
    st.builds('{}- {}{}'.format, INDENTS, WORDS, ENDS),
    st.builds('{}-{}'.format, INDENTS, ENDS),
    st.builds('{}{}'.format, INDENTS, ENDS),
    st.builds('{}{}{}'.format, INDENTS, WORDS, ENDS),
)
WELL_FORMED = st.one_of(
    st.builds('{}: {}'.format, st.sampled_from(['a', 'b', 'etcd']), WORDS),
    st.builds('etcd:\n  host: {}\n  port: {}'.format, WORDS, WORDS),
    st.builds('keys:\n- {}\n- {}'.format, WORDS, WORDS),
    st.builds('keys:\n  - {}\n\n  # why\n  - {}'.format, WORDS, WORDS),
)


def is_plain_like_pyyaml(text: str) -> bool:
    result = parse_plain(text)
    if result is not None:
        assert (None if result.kind == 'null' else result) == parse_any(text.encode(), 'x.yaml'), text
    return result is not None


NAMES = st.sampled_from(['etcd', 'etcd', 'a_b', 'ca_cert', 'a', 'b', '_1', 'on', 'a-b'])
GOOD = st.sampled_from([
    *('ds1:2379', '10.0.0.1', '/etc/x.crt', 'https://h:1', 'a', '# b', 'x.img#sha256=07e4', 'a=B:1,C:5&d=!E')
])  # fmt: skip
VALUES = st.one_of(GOOD, GOOD, GOOD, WORDS, st.booleans(), st.integers(-1, 70_000), st.lists(GOOD, max_size=3))
DUMPED_VALUES = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=3)
FILES = st.one_of(
    DUMPED_VALUES.map(yaml.safe_dump),
    DUMPED_VALUES.map(yaml.safe_dump),
    st.lists(LINES, max_size=6).map('\n'.join),
    st.lists(WELL_FORMED, max_size=4).map('\n'.join),
    st.text('ab:- #\n\'"[],{}1.0~', max_size=25),
)


@pytest.mark.parametrize('examples', [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_plain_files_are_read_like_pyyaml(examples: int) -> None:
    plain_texts: list[str] = []

    @settings(max_examples=examples)
    @given(FILES)
    def read(text: str) -> None:
        if is_plain_like_pyyaml(text):
            plain_texts.append(text)

    read()
    assert len(plain_texts) > examples / 20, 'too few are plain for this to say anything'


def read_outcome(text: str, loader: type) -> object:
    with patch.object(yaml_graph, 'FAST_LOADER', loader):
        try:
            root = parse_any(text.encode(), 'x.yaml', 100)
        except UsageError as error:
            return str(error)
    return root and remove_null_lines(root)


def remove_null_lines(node: Node) -> Node:
    """Remove the lines of null nodes: libyaml places a value that is not written elsewhere."""
    return Node(
        node.kind,
        0 if node.kind == 'null' else node.line,
        node.text,
        tuple(map(remove_null_lines, node.items)),
        tuple((remove_null_lines(key), remove_null_lines(value)) for key, value in node.pairs),
    )


@given(FILES)
def test_libyaml_and_pyyaml_read_the_same(text: str) -> None:
    assert read_outcome(text, yaml.CSafeLoader) == read_outcome(text, yaml.SafeLoader)


SECURED_CONFIGURATION = {
    'etcd': {'endpoints': ['ds1:2379', '10.0.0.1:2379'], 'ca_cert': '/etc/ecomp/ca.crt', 'timeout': 5},
    'placement': {'endpoint': 'https://ds1:8080', 'token_file': '/etc/ecomp/token', 'insecure': True},
    'project_id': 'web',
    'image': 'https://images.invalid/x.img#sha256=07e4',
    'images': {'small': 'https://images.invalid/y.img'},
    'ssh_keys': ['id_ed25519.pub'],
}


def test_example_is_plain() -> None:
    assert is_plain_like_pyyaml((TOP / 'schedule.yaml').read_text())


def test_output_of_pyyaml_is_plain() -> None:
    assert is_plain_like_pyyaml(yaml.safe_dump(SECURED_CONFIGURATION))


@pytest.mark.parametrize('text', ['a: é\n', 'a: |\n  b\n', ' a: b\n', 'a: b\n c: d\n', 'a: yes\n'])
def test_other_yaml_is_not_plain(text: str) -> None:
    assert parse_plain(text) is None
