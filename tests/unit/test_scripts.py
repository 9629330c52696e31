"""docker.sh, quickstart.sh and tests/run, the parts that need neither Docker nor a lab."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.servers import TOP, free_port

OFFLINE_DOCKER = """\
#!/bin/sh
echo "$*" >>"$0.log"
case "$1" in
    version) echo 28.0.0 ;;
    pull) echo 'Error response from daemon: no such host' >&2; exit 1 ;;
    *) exit 1 ;;
esac
"""


# A docker that has all images but placement's. It logs the file modes of its build context, and fails.
BUILDING_DOCKER = """\
#!/bin/sh
case "$*" in
    version*) echo 28.0.0 ;;
    'image inspect ecomp-placement:'*) exit 1 ;;
    'image inspect'*) echo sha256:base ;;
    build*) for each; do :; done; cd "$each" && stat -c '%a %n' * >"$0.log"; cp pins.txt "$0.pins"; exit 1 ;;
    *) exit 1 ;;
esac
"""


def run_docker_sh(
    directory: Path, docker: str = OFFLINE_DOCKER, umask: int = -1, **settings: str
) -> tuple[int, str, str]:
    (directory / 'docker').write_text(docker)
    (directory / 'docker').chmod(0o755)
    env = {**os.environ, **settings, 'PATH': f'{directory}:{os.environ["PATH"]}'}
    process = subprocess.run(
        [TOP / 'docker.sh'], cwd=directory, env=env, capture_output=True, text=True, timeout=60, umask=umask
    )
    return process.returncode, process.stderr, (directory / 'docker.log').read_text()


@pytest.mark.parametrize('address', ['foo', 'localhost', '10.0.0', '10.0.0.1:80', '::1', '[::1', ' '])
def test_invalid_address_is_refused_before_any_pull(tmp_path: Path, address: str) -> None:
    code, stderr, docker_log = run_docker_sh(tmp_path, BIND_ADDRESS=address)
    assert (code, stderr.count('\n')) == (2, 1)
    assert stderr.startswith(f"docker.sh: BIND_ADDRESS is '{address}', not an address")
    assert docker_log == 'version --format {{.Server.Version}}\n'


def test_alternatives_are_named_without_a_registry(tmp_path: Path) -> None:
    code, stderr, docker_log = run_docker_sh(tmp_path)
    assert (code, stderr.count('\n')) == (1, 1)
    assert 'cannot pull quay.io/coreos/etcd' in stderr
    assert 'no such host. Try: without a registry, `docker load` it' in stderr
    assert '`elab control`' in stderr
    assert 'pull' in docker_log


# A Docker older than 28 that has all images, and whose bridge is on another machine.
OUTDATED_DOCKER = """\
#!/bin/sh
echo "$*" >>"$0.log"
case "$1" in
    version) echo 20.10.24 ;;
    create | start) exit 1 ;;
esac
"""


def test_old_docker_without_a_firewall_rule_starts_nothing(tmp_path: Path) -> None:
    ports = {'ETCD_PORT': str(free_port()), 'PLACEMENT_PORT': str(free_port())}
    code, stderr, docker_log = run_docker_sh(tmp_path, OUTDATED_DOCKER, **ports)
    assert (code, stderr.count('\n')) == (1, 1)
    assert stderr.startswith('docker.sh: Docker 20.10.24 lets guests and neighbours reach these containers')
    assert 'Fix: ' in stderr
    assert 'create' not in docker_log.split()
    _, stderr, docker_log = run_docker_sh(tmp_path, OUTDATED_DOCKER, INSECURE='1', **ports)
    assert 'cannot create ecomp-etcd' in stderr
    assert 'create' in docker_log.split()


def test_image_files_are_readable_with_any_umask(tmp_path: Path) -> None:
    ports = {'ETCD_PORT': str(free_port()), 'PLACEMENT_PORT': str(free_port())}
    code, stderr, modes = run_docker_sh(tmp_path, BUILDING_DOCKER, 0o077, TMPDIR=str(tmp_path), **ports)
    assert (code, 'could not be built' in stderr) == (1, True)
    names = ('Dockerfile', 'gunicorn_tls.py', 'pins.txt', 'placement_server.py')
    assert modes.splitlines() == [f'644 {name}' for name in names]


def test_all_packages_of_the_image_are_pinned_by_hash(tmp_path: Path) -> None:
    ports = {'ETCD_PORT': str(free_port()), 'PLACEMENT_PORT': str(free_port())}
    run_docker_sh(tmp_path, BUILDING_DOCKER, TMPDIR=str(tmp_path), **ports)
    pins = re.split(r'\n(?=\S)', (tmp_path / 'docker.pins').read_text().strip())
    assert [pin for pin in pins if not re.match(r'[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}', pin, re.DOTALL)] == []
    script = (TOP / 'docker.sh').read_text()
    listed = script[script.index("NAMES='") + len("NAMES='") :]
    names = {'gunicorn', 'psycopg2-binary', *listed[: listed.index("'")].split()}
    assert {pin.partition('==')[0] for pin in pins} == names
    assert '--require-hashes -r /build/pins.txt' in script


def run_make_venv(directory: Path, script: str, kind: str = 'real', **settings: str) -> str:
    """Return the commands that make_venv() of a script would have run.

    `kind` is that of the hosts of quickstart.sh.
    """
    text = (TOP / script).read_text()
    text = text[text.index('make_venv() {') :]
    text = text[: text.index('\n}\n') + 3]
    stubs = 'say() { :; }; check_python() { :; }; step() { shift; quietly "$@"; }\n'
    stubs += 'quietly() { echo ${PIP_BUILD_CONSTRAINT-} "$@" >>asked; }'
    (directory / 'asked').write_text('')
    program = f'{stubs}\n{text}\nmake_venv {kind}'
    subprocess.run(['bash', '-euc', program], cwd=directory, env={**os.environ, **settings}, check=True)
    return (directory / 'asked').read_text()


def make_venv_without_pip(directory: Path) -> Path:
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', directory / '.venv'], check=True)
    (packages,) = (directory / '.venv/lib').glob('python*/site-packages')
    return packages


def put_pip(packages: Path) -> None:
    """Put what `pip --version` and the scripts look at, but no pip that installs anything."""
    (packages / 'pip.py').touch()
    (packages / 'pip-26.0.dist-info').mkdir()
    (packages / 'pip-26.0.dist-info/METADATA').write_text('Name: pip\nVersion: 26.0\n')


@pytest.mark.parametrize(('script', 'stamp'), [('quickstart.sh', 'installed-quickstart'), ('tests/run', 'installed')])
def test_interrupted_venv_is_recreated(script: str, stamp: str, tmp_path: Path) -> None:
    """An interrupted venv has its Python before it has pip."""
    for name in ('setup.py', 'constraints.txt'):
        (tmp_path / name).write_text('')

    def run() -> str:
        return run_make_venv(tmp_path, script, PYTHON=sys.executable)

    packages = make_venv_without_pip(tmp_path)
    recreation = f'{sys.executable} -m venv --clear --upgrade-deps .venv\n'
    assert recreation in run()
    (packages / 'pip.py').touch()
    assert recreation in run()
    put_pip(packages)
    assert (tmp_path / '.venv' / stamp).exists()
    assert run() == ''


def test_quickstart_reinstalls_when_the_constraints_change(tmp_path: Path) -> None:
    put_pip(make_venv_without_pip(tmp_path))
    (tmp_path / 'setup.py').write_text('')
    for constraints in ('one', 'another'):
        (tmp_path / 'constraints.txt').write_text(constraints)
        for kind, file in (('fake', '.venv/fake.txt'), ('real', 'constraints.txt')):
            first, second = run_make_venv(tmp_path, 'quickstart.sh', kind).splitlines()
            # So also setuptools, with which pip builds libvirt-python and ecomp, is pinned by hash.
            assert first.startswith('constraints.txt ')
            assert f'--require-hashes -r {file}' in first
            assert '--no-deps -e .' in second
            assert run_make_venv(tmp_path, 'quickstart.sh', kind) == ''
        assert run_make_venv(tmp_path, 'quickstart.sh', 'fake') == '', 'it has what fakes need'


@pytest.mark.parametrize(
    ('program', 'output', 'code', 'words', 'sentence'),
    [
        ('id', '1000', 0, [], 'needs root. Fix: sudo tests/run, or tests/run fast'),
        ('unshare', 'Operation not permitted', 1, [], 'makes no namespaces with mounts (Operation not permitted)'),
        ('awk', '1', 0, ['fast'], 'less than 2 GiB of memory are available. Fix: '),
        ('df', 'Avail\n2', 0, ['fast'], 'less than 3 GiB are free in '),
        ('dpkg-query', '', 1, ['fast'], "Debian's packages cannot be reached (E: "),
        ('sha256sum', 'another', 0, ['fast'], 'PyPI cannot be reached (ERROR: '),
    ],
)
def test_tests_give_up_in_words_where_the_machine_lacks_something(
    tmp_path: Path, program: str, output: str, code: int, words: list[str], sentence: str
) -> None:
    """A program is replaced by one that reports what another machine would.

    Nothing answers for the registries.
    """
    if program == 'unshare' and os.geteuid() != 0:
        pytest.skip('without root, root is missed first')
    stub = tmp_path / program
    stub.write_text(f"#!/bin/sh\nprintf '{output}\\n'\nexit {code}\n")
    stub.chmod(0o755)
    nowhere = dict.fromkeys(['http_proxy', 'https_proxy', 'HTTPS_PROXY', 'HTTP_PROXY'], 'http://127.0.0.1:9')
    environment = {**os.environ, **nowhere, 'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'no_proxy': '', 'NO_PROXY': ''}
    completed = subprocess.run(
        [TOP / 'tests/run', *words], capture_output=True, text=True, env=environment, check=False
    )
    assert completed.returncode == 1, completed
    assert sentence in completed.stderr
    assert 'installing' not in completed.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='the functional tests need root')
@pytest.mark.parametrize('seconds', [3, 30])
def test_tests_end_within_ten_seconds_of_a_signal_and_leave_nothing(seconds: int) -> None:
    run = subprocess.Popen([TOP / 'tests/run', 'functional'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    run.terminate()
    began = time.monotonic()
    errors = run.communicate(timeout=60)[1]
    assert (run.returncode, errors.splitlines()[-1]) == (1, 'tests/run: interrupted')
    assert time.monotonic() - began < 10
    names = [path.name for place in ('/run/netns', '/var/lib/elab') for path in Path(place).glob('*')]
    assert [name for name in names if f't{run.pid}-' in name] == []
    mark = f'ECOMP_TESTS={run.pid}'.encode()
    for environment in Path('/proc').glob('[0-9]*/environ'):
        with suppress(OSError):
            assert mark not in environment.read_bytes().split(b'\0'), environment
