"""Limit the modules that a short command loads, because its time is nearly all imports.

Modules of ecomp are not counted: forty modules and one with the same content import in the same time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from tests.functional.cloud import RESOURCES, Cloud
from tests.kit.commands import write_config
from tests.kit.servers import Etcd, PlacementServer, make_environment

COUNT_SCRIPT = """
import json, os, sys

def leave(code):
    sys.stdout.flush()
    os.write(2, json.dumps([code, sorted(sys.modules)]).encode() + b'\\n')
    leave.really(1 if code not in (0, 6) else 0)

leave.really, os._exit = os._exit, leave
from ecomp.schedule import run
run()
"""
FORBIDDEN_MODULES = {
    *('requests', 'urllib3', 'charset_normalizer', 'idna', 'certifi', 'etcd3', 'grpc', 'google', 'asyncio', 'tenacity'),
    *('yaml', 'argparse', 'gettext', 'shutil', 'uuid', 'platform', 'hashlib', 'subprocess', 'os_traits', 'stringprep'),
    *('multiprocessing', 'tempfile', 'concurrent.futures.thread', 'signal', 'encodings.ascii'),
    *('ecomp.store.roles', 'ecomp.store.watch', 'ecomp.compute_conf'),
}
# Third-party libraries that a command loads.
THIRD_PARTY_MODULES = {'h2', 'hpack', 'hyperframe'}
# Modules that no command loads if it queries etcd alone.
PLACEMENT_MODULES = {'http.client', 'email.parser', 'concurrent.futures'}
# Modules of Python's standard library, which differ between versions of Python.
MAX_STANDARD_MODULES = {'create': 160, 'list': 135, 'show': 135, 'query': 135, 'names': 135}
STANDARD_MODULES = {each.lstrip('_') for each in sys.stdlib_module_names}


@pytest.fixture
def cloud(placement: PlacementServer) -> Iterator[Cloud]:
    """A cloud with an empty etcd: a command's modules depend on the keys that it reads."""
    with Etcd() as etcd, closing(Store(EtcdConfig((etcd.endpoint,)))) as store, closing(Placement(placement.url)) as at:
        yield Cloud(etcd, placement, store, at)


@pytest.fixture
def config(cloud: Cloud, tmp_path: Path) -> Path:
    return write_config(tmp_path / 'schedule.yaml', cloud.etcd.endpoint, cloud.placement.endpoint)


def run_command(config: Path, *words: str) -> tuple[str, set[str]]:
    command = [sys.executable, '-c', COUNT_SCRIPT, '--config', str(config), *words]
    result = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout, set(json.loads(result.stderr.splitlines()[-1])[1])


def assert_within_budget(command: str, modules: set[str]) -> None:
    tops = {module.partition('.')[0] for module in modules}
    assert (modules | tops) & FORBIDDEN_MODULES == set()
    ours = {module for module in modules if module.partition('.')[0] == 'ecomp'}
    python = {module for module in modules - ours if module.partition('.')[0].lstrip('_') in STANDARD_MODULES}
    # Modules of this machine: those that Debian loads at each start, and the finder of the editable installation.
    installed = {'_distutils_hack', '__main__', '__mp_main__', 'sitecustomize'}
    installed |= {module for module in tops if re.fullmatch('__editable___etcd_compute_[0-9a-z_]+_finder', module)}
    assert {
        module for module in tops - {'ecomp'} if module.lstrip('_') not in STANDARD_MODULES
    } - installed == THIRD_PARTY_MODULES
    assert len(python) <= MAX_STANDARD_MODULES[command], sorted(python)


def test_commands_load_no_more_modules_than_their_budget(cloud: Cloud, config: Path) -> None:
    compute = cloud.make_compute()
    output, modules = run_command(config, f'{RESOURCES}&in_tree={compute}')
    assert_within_budget('create', modules)
    assert 'ecomp.cli.tables' not in modules
    instance = output.split()[-1]
    request = cloud.store.get(keys.request(compute, instance))
    assert request is not None
    output, modules = run_command(config, 'list')
    assert instance in output
    assert_within_budget('list', modules)
    assert modules & PLACEMENT_MODULES == set()
    for command, arguments, expected in (
        ('show', ('show', instance), instance),
        ('query', (instance,), ''),
        ('names', ('list', '-f', 'value', '-c', 'NAME'), ''),
    ):
        output, modules = run_command(config, *arguments)
        assert expected in output
        assert_within_budget(command, modules)
        assert modules & PLACEMENT_MODULES == set()
