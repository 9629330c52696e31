"""Names of instances, and commands that use them."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants
from tests.kit.journal import JOURNAL
from tests.kit.servers import make_environment
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_record,
    wait_address,
)

# Names, keys and user-data, from eschedule's options to the data that a compute gives its metadata server.


KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me@here'
OTHER_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB you@there'
CANARY = 'canary-of-the-user-data'
SCRIPT = f'#!/bin/sh\necho "{CANARY}" {{{{ x }}}}\n'


def read_guest_data(compute: Ecompute) -> dict[str, dict[str, Any]]:
    data_by_instance = {}
    for path in (compute.directory / 'state' / 'metadata').glob('*.json'):
        assert path.stat().st_mode & 0o777 == 0o600
        data = json.loads(path.read_text())
        data_by_instance[data['instance']] = data
    return data_by_instance


def write_files(directory: Path, **files: str | bytes) -> dict[str, str]:
    for name, content in files.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return {name: str(directory / name) for name in files}


def test_two_instances_on_one_host_get_their_own_metadata(cluster: Control) -> None:
    compute = cluster.ecompute()
    packed = gzip.compress(b'#cloud-config\n', mtime=0)
    file = write_files(cluster.directory, one=f'# mine\n{KEY}\n', two=OTHER_KEY, script=SCRIPT, packed=packed)
    first = place(cluster, SMALL_QUERY, '--name', 'web1', '--ssh-key', file['one'], '--user-data', file['script'])[1]
    keys = ['--ssh-key', file['two'], '--ssh-key', file['one'], '--ssh-key', file['two']]
    second_instance = place(cluster, SMALL_QUERY, '--name', 'web2', *keys, '--user-data', file['packed'])[1]
    third = place(cluster)[1]
    for instance in (first, second_instance, third):
        wait_address(cluster, instance)
    data = read_guest_data(compute)
    assert [data[first][field] for field in ('hostname', 'public_keys', 'user_data')] == ['web1', [KEY], SCRIPT]
    assert [data[second_instance][field] for field in ('hostname', 'public_keys')] == ['web2', [OTHER_KEY, KEY]]
    assert data[second_instance]['user_data'].encode(errors='surrogateescape') == packed
    assert [data[third][field] for field in ('hostname', 'public_keys', 'user_data')] == [f'vm-{third[:8]}', None, None]
    # The data survives a kill of ecompute and is in no record and no log.
    compute.kill()
    compute.start()
    assert read_guest_data(compute) == data
    assert (read_record(cluster, first) or {})['name'] == 'web1'
    for text in (CANARY, KEY.split()[1]):
        assert text not in json.dumps([read_record(cluster, name_holder) for name_holder in (first, second_instance)])
        assert find_log_lines(compute, text) == []
    check_invariants(cluster, compute)
    assert cluster.eschedule('destroy', '--wait', 'web1', 'web2', third[:13]).code == 0
    assert read_guest_data(compute) == {}
    assert cluster.etcd.list_keys('/names/') == []
    for path in (compute.directory / 'state').rglob('*'):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


def test_largest_keys_and_user_data_are_delivered(cluster: Control, compute: Ecompute) -> None:
    """Incompressible user-data of 256 KiB and 30 KiB of keys fit into etcd and the files."""
    keys = ''.join(f'ssh-rsa {base64.b64encode(_rsa(number)).decode()} é\n' for number in range(55))
    data = gzip.compress(os.urandom(262144 - 400), 0)
    file = write_files(cluster.directory, keys=keys, data=data)
    instance = boot(cluster, SMALL_QUERY, '--ssh-key', file['keys'], '--user-data', file['data'])
    metadata = read_guest_data(compute)[instance]
    assert metadata['user_data'].encode(errors='surrogateescape') == data
    assert len(metadata['public_keys']) == 55
    assert len(json.dumps(read_record(cluster, instance))) < 3000


def _rsa(number: int) -> bytes:
    parts = (b'ssh-rsa', b'\1\0\1', number.to_bytes(2, 'big') + bytes(400))
    return b''.join(len(part).to_bytes(4, 'big') + part for part in parts)


def test_schedule_yaml_gives_default_keys_and_user_data(cluster: Control, compute: Ecompute) -> None:
    (cluster.directory / 'files').mkdir()
    file = write_files(cluster.directory / 'files', key=KEY, script=SCRIPT)
    other = write_files(cluster.directory, other=OTHER_KEY, empty='')
    config = yaml.safe_load(cluster.schedule_yaml.read_text())
    config |= {'ssh_keys': ['files/key'], 'user_data': 'files/script'}
    cluster.schedule_yaml.write_text(yaml.safe_dump(config))
    first, second = place(cluster)[1], place(cluster, SMALL_QUERY, '--ssh-key', other['other'])[1]
    for instance, keys in ((first, [KEY]), (second, [OTHER_KEY])):
        wait_address(cluster, instance)
        metadata = read_guest_data(compute)[instance]
        assert (metadata['public_keys'], metadata['user_data']) == (keys, SCRIPT)
    # The files are read only when an instance is created.
    Path(file['key']).unlink()
    assert cluster.eschedule('list').code == 0
    assert_one_line(cluster.eschedule(SMALL_QUERY), 2, f'ssh keys {file["key"]}: cannot be read: No such file')
    assert_one_line(cluster.eschedule(SMALL_QUERY, '--ssh-key', other['empty']), 2, 'contains no key')


def test_user_data_from_standard_input(cluster: Control, compute: Ecompute) -> None:
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(cluster.schedule_yaml), SMALL_QUERY]
    for words, data in ((['--user-data', '-'], SCRIPT), ([], None)):
        started_at = time.monotonic()
        done = subprocess.run(
            [*command, *words],
            input=SCRIPT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=make_environment(),
        )
        JOURNAL.add_run([SMALL_QUERY, *words], done.returncode, (done.stdout, done.stderr), started_at, 0)
        instance = done.stdout.split()[-1]
        wait_address(cluster, instance)
        assert read_guest_data(compute)[instance]['user_data'] == data
    assert find_log_lines(compute, CANARY) == []
