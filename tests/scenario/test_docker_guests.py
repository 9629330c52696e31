"""Whether a guest on a network of libvirt reaches what docker.sh publishes for its own machine alone."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.servers import until
from tests.scenario.docker_engine import Engine
from tests.scenario.docker_runs import SCRIPT, Run, succeeded

LIBVIRTD = """
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
GUEST = """
ip link add guest0 type veth peer name eth0 netns "$1"
ip link set guest0 master virbr0 up
ip -n "$1" address add 192.168.122.50/24 dev eth0
ip -n "$1" link set eth0 up
ip -n "$1" route add default via 192.168.122.1
ip -n "$1" route add 127.0.0.1 via 192.168.122.1
ip netns exec "$1" sysctl -qw net.ipv4.conf.all.route_localnet=1
"""
"""A namespace on libvirt's bridge as root in a guest sets it up: its lo is down and 127.0.0.1 is behind its router."""

StartNetwork = Callable[[], None]
AsGuest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start_network(engine: Engine, run: Run) -> Iterator[StartNetwork]:
    """Start a network of a libvirtd that runs where the Docker Engine does."""
    # Not in tmp_path, where the path of a socket is longer than the 107 bytes that unix(7) allows.
    with tempfile.TemporaryDirectory(prefix='libvirt-') as name:
        directory = Path(name)
        (directory / 'network.xml').write_text(NETWORK)
        shell = ['unshare', '-m', 'sh', '-e', '-c', LIBVIRTD, 'libvirtd', str(directory)]
        virsh = ('virsh', '-q', '-c', f'qemu+unix:///system?socket={directory}/run/libvirt-sock')
        with (directory / 'libvirtd.log').open('w') as log:
            libvirtd = subprocess.Popen(engine.inside(shell), stdout=log, stderr=log)
        try:
            until((directory / 'run/libvirt-sock').exists, 60, 'the socket of libvirtd')
            yield lambda: succeeded(run(*virsh, 'net-create', directory / 'network.xml')) and None
        finally:
            run(*virsh, 'net-destroy', 'guests')
            libvirtd.terminate()
            libvirtd.wait()


@pytest.fixture
def as_guest(engine: Engine, run: Run) -> Iterator[AsGuest]:
    """Run a command as a guest on the network that start_network() started, once it reaches its router."""
    name = f'guest-{engine.pid}'
    subprocess.run(['ip', 'netns', 'add', name], check=True)

    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(['ip', 'netns', 'exec', name, *words], check=False, capture_output=True, text=True)

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        if run('ip', 'link', 'show', 'guest0').returncode:
            succeeded(run('sh', '-e', '-c', GUEST, 'guest', name))
            refused = 7
            until(lambda: inside('curl', '-m', '2', 'http://192.168.122.1:9').returncode == refused, 20, 'its router')
        return inside(*words)

    yield ask
    subprocess.run(['ip', 'netns', 'del', name], check=True)


@pytest.mark.slow
def test_guest_reaches_no_container_in_whichever_order_docker_and_libvirt_start(
    engine: Engine, run: Run, start_network: StartNetwork, as_guest: AsGuest
) -> None:
    def reached() -> list[str]:
        addresses = {'127.0.0.1': '127.0.0.1'}
        for name in ('ecomp-etcd', 'ecomp-placement'):
            addresses[name] = engine.docker('inspect', '-f', '{{.NetworkSettings.Networks.ecomp.IPAddress}}', name)
        ask = ('curl', '-s', '-o', '/dev/null', '-m', '4', '-H', 'Host: localhost')
        places = [(name, f'http://{address}:{port}/') for name, address in addresses.items() for port in (2379, 8080)]
        return [f'{name} {url[-5:-1]}' for name, url in places if as_guest(*ask, url).returncode == 0]

    old = engine.version() < 28
    succeeded(run(SCRIPT))
    start_network()  # libvirt's chains before Docker's
    assert reached() == []
    restarted = {'on-failure'} if old else {'unless-stopped'}
    assert policies(engine) == restarted

    succeeded(run(SCRIPT, 'down'))
    succeeded(run(SCRIPT))  # Docker's chains before libvirt's
    assert reached() == []

    # What this test asks is what a guest reaches where nothing keeps it out.
    succeeded(run('iptables', '-t', 'raw', '-F', 'PREROUTING'))
    if old:
        assert {'127.0.0.1 2379', 'ecomp-etcd 2379', '127.0.0.1 8080', 'ecomp-placement 8080'} <= set(reached())
    succeeded(run(SCRIPT))
    assert reached() == []


def policies(engine: Engine) -> set[str]:
    """What Docker does about each container when it ends, or when Docker starts."""
    names = engine.docker('ps', '--format', '{{.Names}}').split()
    return {engine.docker('inspect', '-f', '{{.HostConfig.RestartPolicy.Name}}', name) for name in names}
