"""Real guests that forge another guest's MAC or address get no metadata with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from tests.kit.lab import BOOT_SECONDS, Lab, is_serving, make_lab_name
from tests.kit.orders import SECRET_PREFIX, Guest, count_boots, place_guest
from tests.kit.servers import wait_until

# Take another guest's MAC and address, request metadata, and return to the guest's own.
FORGE = """\
become() {{
    ip link set eth0 down
    ip addr flush dev eth0
    ip link set eth0 address $1
    ip link set eth0 up
    ip addr add $2/24 dev eth0
    ip route add default via {gateway} dev eth0
}}
ask() {{ timeout 4 wget -q -O - http://169.254.169.254$1 </dev/null || echo nothing; }}
echo "before $(ask /latest/meta-data/instance-id)"
become {mac} {address}
echo "forged root $(ask /)"
echo "forged data $(ask /latest/user-data)"
become {own_mac} {own_address}
echo "after $(ask /latest/meta-data/instance-id)"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root'),
]


@pytest.fixture
def lab(guest_image: Path) -> Iterator[Lab]:
    with closing(Lab(make_lab_name('forging'), 1)) as started:
        (started.directory / 'images/guest.qcow2').write_bytes(guest_image.read_bytes())
        yield started


def request_as_other(guest: Guest, mac: str, address: str) -> dict[str, str]:
    gateway = str(IPv4Network(f'{guest.address}/24', strict=False)[1])
    own_fields = {'own_mac': guest.mac, 'own_address': guest.address}
    output = guest.run(FORGE.format(mac=mac, address=address, gateway=gateway, **own_fields))
    assert SECRET_PREFIX not in output, output
    lines = re.findall('^(before|forged root|forged data|after) (.*)$', output, re.MULTILINE)
    assert len(lines) == 4, output
    return dict(lines)


def make_refused_answers(guest: Guest) -> dict[str, str]:
    return {'before': guest.instance, 'forged root': 'nothing', 'forged data': 'nothing', 'after': guest.instance}


def remove_filter(lab: Lab, guest: Guest) -> None:
    interface = lab.read_domain('hv1', guest.instance).find('devices/interface')
    assert interface is not None
    reference = interface.find('filterref')
    assert reference is not None
    interface.remove(reference)
    file = lab.directory / 'interface.xml'
    file.write_text(ET.tostring(interface, encoding='unicode'))
    lab.virsh('hv1', 'update-device', guest.instance, str(file), '--live')


def list_filters(lab: Lab) -> list[str]:
    return [line.split()[1] for line in lab.virsh('hv1', 'nwfilter-binding-list').splitlines() if line.strip()]


def read_lease_expiry(lab: Lab, guest: Guest) -> int:
    leases = json.loads((lab.directory / 'hv1/lib/dnsmasq/virbr0.status').read_text())
    return next(int(lease['expiry-time']) for lease in leases if lease['mac-address'] == guest.mac)


def test_forged_mac_and_address_get_no_metadata(lab: Lab) -> None:
    a, b = place_guest(lab, 'one'), place_guest(lab, 'two')
    assert list_filters(lab) == ['ecompute-guest-address-3'] * 2
    for guest, other in ((a, b), (b, a)):
        for mac, address in ((guest.mac, other.address), (other.mac, guest.address), (other.mac, other.address)):
            assert request_as_other(guest, mac, address) == make_refused_answers(guest), (mac, address)
    check_outsider(lab, a)

    # The guest can renew its lease and request a new one.
    before = read_lease_expiry(lab, a)
    a.run('kill -USR1 $(cat /run/eth0.pid)')
    wait_until(lambda: read_lease_expiry(lab, a) > before, 30, 'the lease is renewed')
    assert a.run('udhcpc -f -q -n -i eth0 -s /bin/true >/dev/null 2>&1; echo got $?') == 'got 0\n'

    # The filter survives a reboot of the guest and restarts of libvirtd and ecompute.
    reboot(lab, b)
    os.kill(read_pid(lab, 'hv1 libvirtd'), signal.SIGKILL)
    lab.stop_ecompute('hv1', signal.SIGKILL)
    lab.run_elab('up')
    assert list_filters(lab) == ['ecompute-guest-address-3'] * 2
    for guest, other in ((a, b), (b, a)):
        assert request_as_other(guest, other.mac, other.address) == make_refused_answers(guest)

    # The filter is what stops the frames: without it the metadata server answers, but only with what every guest may
    # read.
    remove_filter(lab, a)
    assert request_as_other(a, a.mac, b.address) == {**make_refused_answers(a), 'forged root': '2009-04-04'}
    lab.destroy(a.instance, b.instance)
    assert list_filters(lab) == []
    lab.check()


def reboot(lab: Lab, guest: Guest) -> None:
    assert lab.eschedule('reboot', '--wait', guest.instance).code == 0
    wait_until(lambda: count_boots(lab, guest.instance) == 2, BOOT_SECONDS, 'it takes orders again')
    wait_until(lambda: is_serving(guest.address), 30, 'its address is the same')


def read_pid(lab: Lab, name: str) -> int:
    return int(json.loads((lab.directory / 'lab.json').read_text())['processes'][name]['pid'])


def check_outsider(lab: Lab, guest: Guest) -> None:
    """Check that a machine on the bridge, which no filter stops, gets no guest's metadata."""
    name, host = make_lab_name('forger'), f'elab-{lab.name}-hv1'

    def ip(*words: str) -> None:
        subprocess.run(['ip', *words], check=True, timeout=60)

    def ask(path: str) -> str:
        command = ['ip', 'netns', 'exec', name, 'curl', '-s', '-m', '10', '-w', ' %{http_code}']
        return subprocess.run([*command, f'http://169.254.169.254{path}'], capture_output=True, text=True).stdout

    ip('netns', 'add', name)
    try:
        ip('-n', host, 'link', 'add', 'forger', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
        ip('-n', host, 'link', 'set', 'forger', 'master', 'virbr0', 'up')
        ip('-n', name, 'link', 'set', 'eth0', 'up')
        # Simulate a successful ARP attack: the host resolves the guest's address to this machine.
        ip('-n', name, 'addr', 'add', f'{guest.address}/24', 'dev', 'eth0')
        ip('-n', name, 'route', 'add', '169.254.169.254', 'dev', 'eth0')
        mac = json.loads(subprocess.check_output(['ip', '-n', name, '-j', 'link', 'show', 'eth0']))[0]['address']
        ip('-n', host, 'neigh', 'replace', guest.address, 'lladdr', mac, 'dev', 'virbr0', 'nud', 'reachable')
        assert ask('/').endswith(' 200')
        refusal = f'404 Not Found: {guest.address} is leased to another machine\n 404'
        assert ask('/latest/user-data') == ask(f'/seed/{guest.instance}/user-data') == refusal
    finally:
        ip('netns', 'del', name)
        ip('-n', host, 'neigh', 'flush', 'dev', 'virbr0')
