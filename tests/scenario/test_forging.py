"""Story 4 on real guests: who takes another one's address, MAC or both is told nothing of it, and reaches nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from tests.kit.lab import BOOT, Lab, answers, lab_name
from tests.kit.orders import SECRET, Guest, boots, place
from tests.kit.servers import until

# Become somebody else, ask, and be oneself again.
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
    """One host."""
    made = Lab(lab_name('forging'), 1)
    try:
        (made.directory / 'images/guest.qcow2').write_bytes(guest_image.read_bytes())
        yield made
    finally:
        made.close()


def forge(guest: Guest, mac: str, address: str) -> dict[str, str]:
    """What a guest is told under another MAC and address, and before and after that under its own."""
    gateway = str(IPv4Network(f'{guest.address}/24', strict=False)[1])
    own = {'own_mac': guest.mac, 'own_address': guest.address}
    said = guest.run(FORGE.format(mac=mac, address=address, gateway=gateway, **own))
    assert SECRET not in said, said
    lines = re.findall('^(before|forged root|forged data|after) (.*)$', said, re.MULTILINE)
    assert len(lines) == 4, said
    return dict(lines)


def refused(guest: Guest) -> dict[str, str]:
    """What one hears whose frames are dropped when they are not its own."""
    return {'before': guest.instance, 'forged root': 'nothing', 'forged data': 'nothing', 'after': guest.instance}


def unfilter(lab: Lab, guest: Guest) -> None:
    """Take the filter off a running guest."""
    interface = lab.domain('hv1', guest.instance).find('devices/interface')
    assert interface is not None
    reference = interface.find('filterref')
    assert reference is not None
    interface.remove(reference)
    file = lab.directory / 'interface.xml'
    file.write_text(ET.tostring(interface, encoding='unicode'))
    lab.virsh('hv1', 'update-device', guest.instance, str(file), '--live')


def filters(lab: Lab) -> list[str]:
    """The filter of each interface there is."""
    return [line.split()[1] for line in lab.virsh('hv1', 'nwfilter-binding-list').splitlines() if line.strip()]


def expires(lab: Lab, guest: Guest) -> int:
    """When a guest's lease ends."""
    leases = json.loads((lab.directory / 'hv1/lib/dnsmasq/virbr0.status').read_text())
    return next(int(each['expiry-time']) for each in leases if each['mac-address'] == guest.mac)


def test_each_guest_sees_its_own_whatever_it_calls_itself(lab: Lab) -> None:
    a, b = place(lab, 'one'), place(lab, 'two')
    assert filters(lab) == ['ecompute-guest-address-3'] * 2
    for guest, other in ((a, b), (b, a)):
        for mac, address in ((guest.mac, other.address), (other.mac, guest.address), (other.mac, other.address)):
            assert forge(guest, mac, address) == refused(guest), (mac, address)
    outsider(lab, a)

    # Its lease is renewed, and it can ask anew.
    before = expires(lab, a)
    a.run('kill -USR1 $(cat /run/eth0.pid)')
    until(lambda: expires(lab, a) > before, 30, 'the lease is renewed')
    assert a.run('udhcpc -f -q -n -i eth0 -s /bin/true >/dev/null 2>&1; echo got $?') == 'got 0\n'

    # It stays on, whatever begins anew.
    reboot(lab, b)
    os.kill(pid(lab, 'hv1 libvirtd'), signal.SIGKILL)
    lab.stop_ecompute('hv1', signal.SIGKILL)
    lab.elab('up')
    assert filters(lab) == ['ecompute-guest-address-3'] * 2
    for guest, other in ((a, b), (b, a)):
        assert forge(guest, other.mac, other.address) == refused(guest)

    # It is the filter that keeps it from the server; of the server it would be told nothing but what everybody is.
    unfilter(lab, a)
    assert forge(a, a.mac, b.address) == {**refused(a), 'forged root': '2009-04-04'}
    lab.destroy(a.instance, b.instance)
    assert filters(lab) == []
    lab.check()


def reboot(lab: Lab, guest: Guest) -> None:
    """Off and on again; it takes orders at the same address."""
    assert lab.eschedule('reboot', '--wait', guest.instance).code == 0
    until(lambda: boots(lab, guest.instance) == 2, BOOT, 'it takes orders again')
    until(lambda: answers(guest.address), 30, 'its address is the same')


def pid(lab: Lab, what: str) -> int:
    """The process of that name, as elab wrote it down."""
    return int(json.loads((lab.directory / 'lab.json').read_text())['processes'][what]['pid'])


def outsider(lab: Lab, guest: Guest) -> None:
    """A machine on the same bridge that is nobody's guest, so that no filter is before it, takes a guest's address."""
    name, host = f'forger{os.getpid()}', f'elab-{lab.name}-hv1'

    def ip(*words: str) -> None:
        subprocess.run(['ip', *words], check=True, timeout=60)

    def ask(path: str) -> str:
        asked = ['ip', 'netns', 'exec', name, 'curl', '-s', '-m', '10', '-w', ' %{http_code}']
        return subprocess.run([*asked, f'http://169.254.169.254{path}'], capture_output=True, text=True).stdout

    ip('netns', 'add', name)
    try:
        ip('-n', host, 'link', 'add', 'forger', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
        ip('-n', host, 'link', 'set', 'forger', 'master', 'virbr0', 'up')
        ip('-n', name, 'link', 'set', 'eth0', 'up')
        # It is answered if it shouts loud enough: the host is to believe it, and not the guest.
        ip('-n', name, 'addr', 'add', f'{guest.address}/24', 'dev', 'eth0')
        ip('-n', name, 'route', 'add', '169.254.169.254', 'dev', 'eth0')
        mac = json.loads(subprocess.check_output(['ip', '-n', name, '-j', 'link', 'show', 'eth0']))[0]['address']
        ip('-n', host, 'neigh', 'replace', guest.address, 'lladdr', mac, 'dev', 'virbr0', 'nud', 'reachable')
        assert ask('/').endswith(' 200')
        refused = f'404 Not Found: {guest.address} is leased to another machine\n 404'
        assert ask('/latest/user-data') == ask(f'/seed/{guest.instance}/user-data') == refused
    finally:
        ip('netns', 'del', name)
        ip('-n', host, 'neigh', 'flush', 'dev', 'virbr0')
