"""docker.sh with its servers, and the access of guests to them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.lab import make_lab_name
from tests.kit.servers import wait_until
from tests.scenario.docker_engine import BASE, POSTGRES, Engine
from tests.scenario.docker_runs import SCRIPT, TOP, Run, expect_success

# docker.sh is run for real: up, used, down, and its refusals.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'

# Access as from a malicious web page, and as from a guest that this machine routes for.
ACCESS_CHECK = """\
set -e
ask() { # WHAT CURL-WORDS...
    printf '%s %s\\n' "$(curl -s -o /dev/null -m 4 -w '%{http_code}' "${@:2}" || :)" "$1"
}
ask 'etcd as a page' -H 'Origin: http://evil.example' -d '{"key":"a2V5"}' http://localhost:2379/v3/kv/range
ask 'etcd by another name' -H 'Host: evil.example' http://localhost:2379/version
ask 'etcd by its own' http://localhost:2379/version
ask 'placement by another name' -H 'Host: evil.example' http://localhost:8080/
ask 'placement by its own' http://localhost:8080/
unshare --net sleep 60 &
guest=$!
trap "kill $guest" EXIT
sleep 1
ip link add guest0 type veth peer name eth0 netns "$guest"
ip address add 10.99.0.1/24 dev guest0
ip link set guest0 up
inside() { nsenter --net --target "$guest" "$@"; }
inside ip address add 10.99.0.2/24 dev eth0
inside ip link set eth0 up
inside ip route add default via 10.99.0.1
curl() { inside curl "$@"; }
address() { docker inspect -f '{{.NetworkSettings.Networks.ecomp.IPAddress}}' "$1"; }
ask 'etcd from a guest' "http://$(address ecomp-etcd):2379/version"
ask 'placement from a guest' "http://$(address ecomp-placement):8080/"
"""


@contextmanager
def run_ecompute(engine: Engine, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a fake ecompute in the containers' network: without compute.yaml it uses localhost."""
    log = directory / 'ecompute.log'
    command = [sys.executable, '-m', 'ecomp.compute', '--fake', 'VCPU:4,DISK_GB:10,MEMORY_MB:512']
    environment = os.environ | {'PYTHONPATH': f'{TOP}:{TOP / "md_server"}'}
    with log.open('w') as out:
        process = subprocess.Popen(
            engine.wrap_command(command), cwd=directory, env=environment, stdout=out, stderr=out, text=True
        )
        try:

            def is_ready() -> bool:
                assert process.poll() is None, log.read_text()
                return '/computes/' in list_etcd_keys(engine)

            wait_until(is_ready, 60, 'ecompute has registered')
            yield process
        finally:
            process.terminate()
            process.wait(30)


def list_etcd_keys(engine: Engine) -> str:
    return engine.run_docker('exec', 'ecomp-etcd', 'etcdctl', 'get', '--prefix', '/', '--keys-only')


def read_start_times(engine: Engine) -> dict[str, str]:
    names = engine.run_docker('ps', '--all', '--format', '{{.Names}}').split()
    return {name: engine.run_docker('inspect', '--format', '{{.State.StartedAt}}', name) for name in names}


@pytest.mark.slow
def test_servers_keep_their_data_over_down_and_up(engine: Engine, run: Run, tmp_path: Path) -> None:
    up = expect_success(run(SCRIPT))
    assert 'etcd at localhost:2379, placement at http://localhost:8080/' in up
    containers = read_start_times(engine)
    assert set(containers) == {'ecomp-etcd', 'ecomp-postgres', 'ecomp-placement'}

    second_run = expect_success(run(SCRIPT))
    assert second_run.count('already running') == 3
    assert read_start_times(engine) == containers
    assert expect_success(run('bash', '-c', ACCESS_CHECK)).splitlines() == [
        *('404 etcd as a page', '421 etcd by another name', '200 etcd by its own'),
        *('421 placement by another name', '200 placement by its own'),
        *('000 etcd from a guest', '000 placement from a guest'),
    ]

    def eschedule(*words: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, '-m', 'ecomp.schedule', *words)

    def address(instance: str) -> str | None:
        done = eschedule(instance)
        assert done.returncode in (0, 6), done.stderr
        return done.stdout.strip() or None

    with run_ecompute(engine, tmp_path):
        notified = expect_success(eschedule(SMALL))
        match = re.fullmatch(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n', notified)
        assert match, notified
        instance = match[2]
        wait_until(lambda: address(instance), 60, 'the instance has an address')
        before = address(instance)
        assert re.fullmatch(r'\d+(\.\d+){3}', before or '')

        # Remove and restore the servers under a running ecompute: the data is in the volumes.
        assert 'docker volume rm ecomp-etcd ecomp-postgres' in expect_success(run(SCRIPT, 'down'))
        expect_success(run(SCRIPT))
        assert address(instance) == before
        wait_until(lambda: eschedule(SMALL).returncode == 0, 60, 'ecompute is back at work')

        expect_success(eschedule('destroy', instance, '--wait'))
        assert eschedule('destroy', instance).returncode == 4
        assert f'/hosts/{match[1]}/{instance}' not in list_etcd_keys(engine)

    expect_success(run(SCRIPT, 'down'))
    assert engine.run_docker('ps', '--all', '--quiet') == ''
    assert engine.run_docker('network', 'ls', '--format', '{{.Name}}').split() == ['bridge', 'host', 'none']
    assert engine.run_docker('volume', 'ls', '--quiet').split() == ['ecomp-etcd', 'ecomp-postgres']
    assert 'nothing was running' in expect_success(run(SCRIPT, 'down'))


@pytest.mark.slow
def test_several_workers_share_the_claims(engine: Engine, run: Run) -> None:
    """Three workers start concurrently on an empty database, and none answers with an error."""
    expect_success(run(SCRIPT, PLACEMENT_WORKERS='3'))
    # The brackets keep grep from finding itself.
    gunicorns = 'grep -lz no-control-socke[t] /proc/[0-9]*/cmdline'
    assert len(engine.run_docker('exec', 'ecomp-placement', 'sh', '-c', gunicorns).split()) == 4
    assert expect_success(run(sys.executable, '-c', CLAIMS)) == '60\n'


@pytest.mark.slow
def test_changed_settings_recreate_only_their_containers(engine: Engine, run: Run) -> None:
    def count_rules() -> int:
        return expect_success(run('iptables', '-t', 'raw', '-S', 'PREROUTING')).count('docker.sh')

    expected_rules = 2 * (engine.read_major_version() < 28)
    expect_success(run(SCRIPT))
    assert count_rules() == expected_rules
    before = read_start_times(engine)
    output = expect_success(run(SCRIPT, PLACEMENT_PORT='18080', BIND_ADDRESS='0.0.0.0', INSECURE='1'))
    assert 'placement at http://localhost:18080/' in output
    after = read_start_times(engine)
    assert {name for name in after if after[name] != before[name]} == {'ecomp-etcd', 'ecomp-placement'}
    assert '0.0.0.0:18080' in engine.run_docker('port', 'ecomp-placement')
    assert count_rules() == 0

    expect_success(run(SCRIPT, BIND_ADDRESS='127.0.0.2'))
    assert count_rules() == expected_rules
    status = ('curl', '-s', '-o', '/dev/null', '-w', '%{http_code} ')
    urls = ('http://127.0.0.2:8080/', 'http://127.0.0.2:2379/version')
    assert [expect_success(run(*status, url)).strip() for url in urls] == ['200', '200']
    expect_success(run(SCRIPT, 'down'))
    assert count_rules() == 0


@pytest.mark.slow
def test_servers_on_a_public_address_require_certificates(engine: Engine, run: Run, tmp_path: Path) -> None:
    """Without a certificate or with a wrong token the servers answer nothing."""
    address = '10.77.0.1'
    expect_success(run('ip', 'address', 'add', f'{address}/32', 'dev', 'lo'))
    done = run(SCRIPT, BIND_ADDRESS='0.0.0.0')
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert 'certs/etcd/ca.crt cannot be read. Fix: run `elab certs certs --control ADDRESS`' in done.stderr
    assert read_start_times(engine) == {}

    tools = make_elab_directory(tmp_path / 'bin')
    paths = {'PATH': f'{tools}:{os.environ["PATH"]}', 'BIND_ADDRESS': address}
    up = expect_success(run(SCRIPT, **paths))
    assert f'etcd at {address}:2379, placement at https://{address}:8080/' in up
    assert expect_success(run(SCRIPT, **paths)).count('already running') == 3

    expect_success(run(tools / 'elab', 'certs', 'certs', '--control', address, '--operator', 'ann'))
    operator_dir = tmp_path / 'certs/operator-ann'
    hosts = (sys.executable, '-m', 'ecomp.schedule', '--config')
    expect_success(run(*hosts, operator_dir / 'schedule.yaml', 'hosts'))
    curl = ('curl', '-s', '-o', '/dev/null', '-m', '120', '-w', '%{http_code}', '--cacert', operator_dir / 'ca.crt')
    url = f'https://{address}:8080/resource_providers'
    assert run(*curl, '-H', 'X-Auth-Token: admin', url).stdout == '000'
    assert run(*curl, f'https://{address}:2379/version').stdout == '000'
    client_certificate = ('--cert', operator_dir / 'client.crt', '--key', operator_dir / 'client.key')
    token_header = f'X-Auth-Token: {(operator_dir / "token").read_text().strip()}'
    assert run(*curl, *client_certificate, '-H', 'X-Auth-Token: admin', '-H', 'X-Roles: admin', url).stdout == '401'
    assert run(*curl, *client_certificate, '-H', token_header, url).stdout == '200'
    # More clients than the server has threads connect and stall after one byte.
    with_silent_connections = (sys.executable, '-c', RUN_WITH_SILENT_CONNECTIONS, address)
    assert expect_success(run(*with_silent_connections, *curl, *client_certificate, '-H', token_header, url)) == '200'

    print_serial = f'openssl s_client -connect {address}:8080 </dev/null 2>/dev/null | openssl x509 -noout -serial'
    before = expect_success(run('sh', '-c', print_serial))
    (tmp_path / 'certs/placement/server.crt').unlink()
    expect_success(run(tools / 'elab', 'certs', 'certs', '--control', address))
    wait_until(lambda: expect_success(run('sh', '-c', print_serial)) != before, 20, 'the new certificate is shown')
    expect_success(run(*hosts, operator_dir / 'schedule.yaml', 'hosts'))


def make_elab_directory(tools: Path) -> Path:
    tools.mkdir()
    (tools / 'elab').write_text(f'#!/bin/sh\nexec {sys.executable} -m ecomp.lab.elab "$@"\n')
    (tools / 'elab').chmod(0o755)
    return tools


@pytest.mark.slow
def test_own_database_replaces_the_postgres_container(engine: Engine, run: Run) -> None:
    gateway = engine.run_docker('network', 'inspect', '--format', '{{(index .IPAM.Config 0).Gateway}}', 'bridge')
    settings = ('POSTGRES_USER=me', 'POSTGRES_DB=mine', 'POSTGRES_PASSWORD=secret')
    environment = [word for setting in settings for word in ('--env', setting)]
    engine.run_docker('run', '--detach', '--name', 'own', '--publish', f'{gateway}:5432:5432', *environment, POSTGRES)
    try:
        wait_until(
            lambda: run('docker', 'exec', 'own', 'pg_isready', '-h', '127.0.0.1').returncode == 0, 60, 'PostgreSQL'
        )
        expect_success(run(SCRIPT, PLACEMENT_DATABASE='postgresql+psycopg2://me:secret@host.docker.internal/mine'))
        assert set(read_start_times(engine)) == {'ecomp-etcd', 'ecomp-placement', 'own'}
        tables = engine.run_docker('exec', 'own', 'psql', '-h', '/run/postgresql', '-U', 'me', '-c', r'\dt', 'mine')
        assert 'resource_providers' in tables
    finally:
        engine.run_docker('rm', '--force', '--volumes', 'own')


@pytest.mark.slow
def test_refusals_are_one_line_and_start_nothing(engine: Engine, run: Run) -> None:
    done = run(sys.executable, '-c', RUN_WITH_TAKEN_PORT, SCRIPT)
    assert done.returncode == 5
    assert re.search(r'^docker.sh: port \d+ on 127.0.0.1 is in use .* Fix: .* ETCD_PORT=…$', done.stderr)
    done = run(SCRIPT, ETCD_PORT='http')
    assert (done.returncode, done.stderr) == (2, "docker.sh: ETCD_PORT is 'http', not a port number\n")
    done = run(SCRIPT, PLACEMENT_DATABASE='mysql://localhost/placement')
    assert (done.returncode, 'postgresql+psycopg2://' in done.stderr) == (2, True)
    done = run(SCRIPT, PLACEMENT_BUILD_CA='/no/such/file')
    assert (done.returncode, '/no/such/file' in done.stderr) == (2, True)
    assert read_start_times(engine) == {}

    done = run(SCRIPT, PLACEMENT_DATABASE='postgresql+psycopg2://u:secret@nowhere/db')
    assert done.returncode == 1
    assert 'could not translate host name "nowhere"' in done.stderr
    assert 'secret' not in done.stderr


@pytest.mark.slow
def test_server_that_ends_is_reported_and_not_restarted(engine: Engine, run: Run, tmp_path: Path) -> None:
    entry = 'ENTRYPOINT ["sh", "-c", "echo these files are older; exit 3"]'
    (tmp_path / 'Dockerfile').write_text(f'FROM {BASE}\n{entry}\n')
    engine.run_docker('build', '--quiet', '--tag', 'ecomp-test/broken:1', str(tmp_path))
    done = run(SCRIPT, POSTGRES_IMAGE='ecomp-test/broken:1')
    assert done.returncode == 1
    assert 'these files are older\n' in done.stderr
    assert done.stderr.endswith('docker.sh: ecomp-postgres does not stay up (the end of its log is above)\n')
    # The container is kept for `docker logs` and not restarted; the next run, with a working image, succeeds.
    assert engine.run_docker('inspect', '--format', '{{.State.Status}}', 'ecomp-postgres') == 'exited'
    expect_success(run(SCRIPT))


def test_usage(tmp_path: Path) -> None:
    """Without a daemon: the help, wrong arguments, and a machine without Docker."""

    def run_script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ['bash', str(SCRIPT), *words]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ) | environment)

    assert 'PLACEMENT_DATABASE' in expect_success(run_script('--help'))
    for words in (['sideways'], ['down', 'now'], ['']):
        done = run_script(*words)
        assert (done.returncode, done.stdout) == (2, '')
        assert done.stderr == 'docker.sh: usage: ./docker.sh [up | down | --help]\n'

    tools = tmp_path / 'bin'
    tools.mkdir()
    for tool in ('bash', 'nproc'):
        (tools / tool).symlink_to(f'/usr/bin/{tool}')
    done = run_script(PATH=str(tools))
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert 'the docker command is missing' in done.stderr


def test_missing_docker_daemon_is_reported(tmp_path: Path) -> None:
    if shutil.which('docker') is None:
        pytest.skip('not installed: docker.io')
    environment = os.environ | {'DOCKER_HOST': f'unix://{tmp_path}/none.sock'}
    done = subprocess.run([SCRIPT], check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr.count('\n')) == (7, 1)
    assert 'no Docker daemon answers' in done.stderr


CLAIMS = """
import concurrent.futures, json, urllib.request, uuid

HEADERS = {'x-auth-token': 'admin', 'content-type': 'application/json', 'openstack-api-version': 'placement 1.39'}

def call(method, path, body):
    request = urllib.request.Request('http://localhost:8080' + path, json.dumps(body).encode(), HEADERS, method=method)
    return urllib.request.urlopen(request).status

provider = str(uuid.uuid4())
call('POST', '/resource_providers', {'name': provider, 'uuid': provider})
inventory = {'resource_provider_generation': 0, 'inventories': {'VCPU': {'total': 60}}}
call('PUT', f'/resource_providers/{provider}/inventories', inventory)
claim = {'allocations': {provider: {'resources': {'VCPU': 1}}}, 'project_id': 'p', 'user_id': 'u',
         'consumer_generation': None, 'consumer_type': 'INSTANCE'}
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(list(pool.map(lambda _: call('PUT', f'/allocations/{uuid.uuid4()}', claim), range(60))).count(204))
"""

# docker.sh with an ETCD_PORT on which this program listens.
RUN_WITH_TAKEN_PORT = """
import os, socket, subprocess, sys
with socket.create_server(('127.0.0.1', 0)) as taken:
    environment = os.environ | {'ETCD_PORT': str(taken.getsockname()[1])}
    sys.exit(subprocess.run([sys.argv[1]], env=environment).returncode)
"""

# Run a command beside 200 connections to placement, each of which has sent one byte.
RUN_WITH_SILENT_CONNECTIONS = """
import socket, subprocess, sys
held = [socket.create_connection((sys.argv[1], 8080)) for _ in range(200)]
for each in held:
    each.sendall(b'\\x16')
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


# Guests on a libvirt network must not reach the ports that docker.sh publishes for its own machine.


LIBVIRTD_SCRIPT = """
mount --make-rprivate /
mkdir -p "$1/run" "$1/lib/dnsmasq" "$1/cache" "$1/log"
cp -a /etc/libvirt "$1/etc"
rm -rf "$1/etc/qemu/networks"
for name in run lib cache log; do mount --bind "$1/$name" "/var/$name/libvirt"; done
mount --bind "$1/etc" /etc/libvirt
exec setpriv --pdeathsig KILL libvirtd
"""
NETWORK = """<network><name>guests</name><forward mode='nat'/><bridge name='virbr0' stp='off'/>
<ip address='192.168.122.1' netmask='255.255.255.0'/></network>"""
# A namespace on libvirt's bridge, set up as root in a guest could do it: its lo is down, and it routes 127.0.0.1 to its
# router.
GUEST_SCRIPT = """
ip link add guest0 type veth peer name eth0 netns "$1"
ip link set guest0 master virbr0 up
ip -n "$1" address add 192.168.122.50/24 dev eth0
ip -n "$1" link set eth0 up
ip -n "$1" route add default via 192.168.122.1
ip -n "$1" route add 127.0.0.1 via 192.168.122.1
ip netns exec "$1" sysctl -qw net.ipv4.conf.all.route_localnet=1
"""

StartNetwork = Callable[[], None]
RunAsGuest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start_network(engine: Engine, run: Run) -> Iterator[StartNetwork]:
    """Provide a function that starts a network of a libvirtd beside the Docker Engine."""
    # The path of a socket in tmp_path would exceed the 107 bytes that unix(7) allows.
    with tempfile.TemporaryDirectory(prefix='libvirt-') as name:
        directory = Path(name)
        (directory / 'network.xml').write_text(NETWORK)
        shell = ['unshare', '-m', 'sh', '-e', '-c', LIBVIRTD_SCRIPT, 'libvirtd', str(directory)]
        virsh = ('virsh', '-q', '-c', f'qemu+unix:///system?socket={directory}/run/libvirt-sock')
        with (directory / 'libvirtd.log').open('w') as log:
            libvirtd = subprocess.Popen(engine.wrap_command(shell), stdout=log, stderr=log)
        try:
            wait_until((directory / 'run/libvirt-sock').exists, 60, 'the socket of libvirtd')
            yield lambda: expect_success(run(*virsh, 'net-create', directory / 'network.xml')) and None
        finally:
            run(*virsh, 'net-destroy', 'guests')
            libvirtd.terminate()
            libvirtd.wait()


@pytest.fixture
def run_as_guest(engine: Engine, run: Run) -> Iterator[RunAsGuest]:
    """Provide a function that runs a command as a guest, once that reaches its router."""
    name = make_lab_name(f'guest{engine.pid}-')
    subprocess.run(['ip', 'netns', 'add', name], check=True)

    def run_in_namespace(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(['ip', 'netns', 'exec', name, *words], check=False, capture_output=True, text=True)

    def run_when_connected(*words: str) -> subprocess.CompletedProcess[str]:
        if run('ip', 'link', 'show', 'guest0').returncode:
            expect_success(run('sh', '-e', '-c', GUEST_SCRIPT, 'guest', name))
            refused = 7
            wait_until(
                lambda: run_in_namespace('curl', '-m', '2', 'http://192.168.122.1:9').returncode == refused,
                20,
                'its router',
            )
        return run_in_namespace(*words)

    yield run_when_connected
    subprocess.run(['ip', 'netns', 'del', name], check=True)


@pytest.mark.slow
def test_guest_reaches_no_container_in_either_start_order(
    engine: Engine, run: Run, start_network: StartNetwork, run_as_guest: RunAsGuest
) -> None:
    def list_reachable() -> list[str]:
        addresses = {'127.0.0.1': '127.0.0.1'}
        for name in ('ecomp-etcd', 'ecomp-placement'):
            addresses[name] = engine.run_docker('inspect', '-f', '{{.NetworkSettings.Networks.ecomp.IPAddress}}', name)
        ask = ('curl', '-s', '-o', '/dev/null', '-m', '4', '-H', 'Host: localhost')
        targets = [(name, f'http://{address}:{port}/') for name, address in addresses.items() for port in (2379, 8080)]
        return [f'{name} {url[-5:-1]}' for name, url in targets if run_as_guest(*ask, url).returncode == 0]

    old = engine.read_major_version() < 28
    expect_success(run(SCRIPT))
    start_network()  # libvirt's chains before Docker's
    assert list_reachable() == []
    expect_success(run(SCRIPT, 'down'))
    expect_success(run(SCRIPT))  # Docker's chains before libvirt's
    assert list_reachable() == []

    # Without the rules the guest does reach the servers: the check itself works.
    expect_success(run('iptables', '-t', 'raw', '-F', 'PREROUTING'))
    if old:
        assert {'127.0.0.1 2379', 'ecomp-etcd 2379', '127.0.0.1 8080', 'ecomp-placement 8080'} <= set(list_reachable())
    expect_success(run(SCRIPT))
    assert list_reachable() == []


@pytest.mark.slow
def test_no_container_runs_without_its_rules_after_a_power_cut(engine: Engine, run: Run) -> None:
    """Docker starts the containers itself only if guests cannot reach them without the rules."""
    old = engine.read_major_version() < 28

    def restart_machine() -> int:
        engine.cut_power()
        engine.boot()
        # Docker starts the containers before it answers.
        return len(engine.run_docker('ps', '--quiet').split())

    expect_success(run(SCRIPT))
    assert restart_machine() == (0 if old else 3)
    expect_success(run(SCRIPT))
    assert expect_success(run(SCRIPT)).count('already running') == 3
    expect_success(run(SCRIPT, INSECURE='1'))
    assert restart_machine() == 3
