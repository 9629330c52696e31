"""The route to a lab, in a network of the test's own: another one is not replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.servers import environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='only root makes a network namespace')

ROUTES = """\
set -e
ip link add tun0 type bridge
ip link set tun0 up
ip route add {route}
exec "$@"
"""
ENSURE = """\
from ipaddress import IPv4Network
from ecomp.errors import Conflict
from ecomp.lab import machine
from ecomp.lab.network import Layout

def ensured(*_):
    raise SystemExit('nothing is in the way')

machine._ensure_namespace = ensured
try:
    machine.ensure_control(Layout('one', IPv4Network('10.200.0.0/16')))
except Conflict as error:
    print(error)
"""
SAID = '10.200.0.0/16 is routed by {by}, and was free for the lab: take that route away, or elab down --name one, ' \
    'and elab up anew\n'


@pytest.mark.parametrize(
    ('route', 'by'),
    [
        ('10.200.0.0/16 dev tun0', 'tun0'), ('10.200.0.0/16 dev tun0 metric 50', 'tun0'),
        ('blackhole 10.200.0.0/16', 'blackhole'), ('10.0.0.0/8 dev tun0', None), ('10.201.0.0/16 dev tun0', None),
    ],
)  # fmt: skip
def test_a_route_that_came_since_is_said_and_stays(route: str, by: str | None, tmp_path: Path) -> None:
    command = ['unshare', '--net', 'sh', '-c', ROUTES.format(route=route), 'sh', sys.executable, '-c', ENSURE]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    expected = ('', 'nothing is in the way\n') if by is None else (SAID.format(by=by), '')
    assert (done.stdout, done.stderr) == expected
