"""compute.yaml and schedule.yaml: valid contents and defaults.

Mistakes in them are in test_conf_mistakes.py.
"""

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
from ecomp.model.guest import Attachment
from ecomp.model.image import check_image, split_pin
from tests.unit.conf_text import UUID

TOP = Path(__file__).resolve().parents[2]


# Defaults


def test_defaults_without_a_file_point_at_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_compute(None) == ComputeConfig(
        uuid=None,
        etcd=EtcdConfig(('localhost:2379',), None, None, None, 5.0),
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
        uuid=UUID,
        etcd=EtcdConfig(('ds1:2380',), tmp_path / 'ca', tmp_path / 'key', tmp_path / 'cert', 2.5),
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
        ignore_warnings=('libvirt-version',),
        directory=tmp_path,
    )


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
