"""Which foreign modules a short command loads: its time is nearly all imports, so they are counted, and some banned.

Modules of ours are not counted: forty modules and one of the same content import in the same time.
"""

from __future__ import annotations

import json
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
from tests.kit.servers import Etcd, PlacementServer, environment

pytestmark = pytest.mark.fast

COUNTED = """
import json, os, sys

def leave(code):
    sys.stdout.flush()
    os.write(2, json.dumps([code, sorted(sys.modules)]).encode() + b'\\n')
    leave.really(1 if code not in (0, 6) else 0)

leave.really, os._exit = os._exit, leave
from ecomp.schedule import run
run()
"""
NEVER = {
    *('requests', 'urllib3', 'charset_normalizer', 'idna', 'certifi', 'etcd3', 'grpc', 'google', 'asyncio', 'tenacity'),
    *('yaml', 'argparse', 'gettext', 'shutil', 'uuid', 'platform', 'hashlib', 'subprocess', 'os_traits', 'stringprep'),
    *('multiprocessing', 'tempfile', 'concurrent.futures.thread', 'signal', 'encodings.ascii'),
    *('ecomp.store.roles', 'ecomp.store.watch', 'ecomp.compute_conf'),
}
THEIRS = {'h2', 'hpack', 'hyperframe'}
"""Other people's libraries that are loaded."""
OF_PLACEMENT = {'http.client', 'email.parser', 'concurrent.futures'}
"""What no command loads that asks etcd alone."""
MOST = {'create': 160, 'list': 135, 'show': 135, 'query': 135, 'names': 135}
"""Modules of Python's own, which differ from one Python to the next."""
PYTHON = {each.lstrip('_') for each in sys.stdlib_module_names}


@pytest.fixture
def cloud(placement: PlacementServer) -> Iterator[Cloud]:
    """One with an etcd in which nobody else has anything: what is read decides what is loaded."""
    with Etcd() as etcd, closing(Store(EtcdConfig((etcd.endpoint,)))) as store, closing(Placement(placement.url)) as at:
        yield Cloud(etcd, placement, store, at)


@pytest.fixture
def config(cloud: Cloud, tmp_path: Path) -> Path:
    return write_config(tmp_path / 'schedule.yaml', cloud.etcd.endpoint, cloud.placement.endpoint)


def loaded(config: Path, *words: str) -> tuple[str, set[str]]:
    """What a command printed, and the modules that it had at its end."""
    command = [sys.executable, '-c', COUNTED, '--config', str(config), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1])[1])


def check(what: str, modules: set[str]) -> None:
    """The budget of a command."""
    tops = {each.partition('.')[0] for each in modules}
    assert (modules | tops) & NEVER == set()
    ours = {each for each in modules if each.partition('.')[0] == 'ecomp'}
    python = {each for each in modules - ours if each.partition('.')[0].lstrip('_') in PYTHON}
    # The machine's own, not of Python: what Debian has it load at each start, and how this tree is installed here.
    installed = {'_distutils_hack', '__editable___ecomp_1_0_0_finder', '__main__', '__mp_main__', 'sitecustomize'}
    assert {each for each in tops - {'ecomp'} if each.lstrip('_') not in PYTHON} - installed == THEIRS
    assert len(python) <= MOST[what], sorted(python)


def test_no_command_loads_more_than_its_budget(cloud: Cloud, config: Path) -> None:
    compute = cloud.compute()
    said, modules = loaded(config, f'{RESOURCES}&in_tree={compute}')
    check('create', modules)
    instance = said.split()[-1]
    request = cloud.store.get(keys.request(compute, instance))
    assert request is not None
    said, modules = loaded(config, 'list')
    assert instance in said
    check('list', modules)
    assert modules & OF_PLACEMENT == set()
    for what, words, shown in (
        ('show', ('show', instance), instance),
        ('query', (instance,), ''),
        ('names', ('list', '-f', 'value', '-c', 'NAME'), ''),
    ):
        said, modules = loaded(config, *words)
        assert shown in said
        check(what, modules)
        assert modules & OF_PLACEMENT == set()
