"""The guest agent: it reports the address on a bridge, and a silent one delays nothing."""

from __future__ import annotations

import json

import pytest

from tests.kit.lab import BOOT_SECONDS, Lab
from tests.kit.servers import wait_until

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192'
# The part of qemu-guest-agent that libvirt uses: https://qemu.readthedocs.io/en/latest/interop/qemu-ga-ref.html
AGENT = """\
#!/bin/sh
for each in /sys/class/virtio-ports/*; do
    [ "$(cat $each/name)" = org.qemu.guest_agent.0 ] && port=/dev/${each##*/}
done
mac=$(cat /sys/class/net/eth1/address)
interface() {
    address=$(ip -4 -o addr show eth1 | sed 's/.*inet \\([0-9.]*\\).*/\\1/')
    echo '{"name": "eth1", "hardware-address": "'$mac'", "ip-addresses": [{"ip-address-type": "ipv4",' \\
        '"ip-address": "'$address'", "prefix": 24}]}'
}
agent() {
    exec 3<>$port
    while :; do
        while IFS= read -r line <&3; do
            case $line in
            *guest-sync*) echo '{"return": '$(echo "$line" | sed 's/.*"id": *\\([0-9]*\\).*/\\1/')'}' >&3 ;;
            *guest-network-get-interfaces*) echo '{"return": ['$(interface)']}' >&3; echo 'ecomp-guest: agent asked' ;;
            esac
        done
        sleep 1
    done
}
agent &
"""
SILENT_AGENT = AGENT.replace('agent() {', 'agent() {\n    exec 3<>$port; echo "ecomp-guest: silent agent"; sleep 3600')


def place_guest(lab: Lab, in_tree: str, name: str, script: str) -> str:
    file = lab.directory / f'{name}.sh'
    file.write_text(script)
    _, instance = lab.place(f'{QUERY}&{in_tree}', lab.make_url('guest.qcow2'), '--name', name, '--user-data', str(file))
    lab.wait_address(instance)
    return instance


def read_bridged_interface(lab: Lab, instance: str) -> dict[str, str | None]:
    """Return the record of the guest's interface on the bridge."""
    record = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
    interface: dict[str, str | None] = record['addresses'][1]
    return interface


@pytest.mark.slow
def test_guest_agent_reports_address_on_a_bridge(lab: Lab) -> None:
    with lab.change_config('hv1', bridge='br0') as in_tree:
        silent = place_guest(lab, in_tree, 'silent', SILENT_AGENT)
        wait_until(
            lambda: 'ecomp-guest: silent agent' in lab.read_console('hv1', silent),
            BOOT_SECONDS,
            'it opened its channel',
        )
        talking = place_guest(lab, in_tree, 'talking', AGENT)
        reported = dict(line.split() for line in lab.wait_guest_facts('hv1', talking)['address'])
        wait_until(lambda: read_bridged_interface(lab, talking)['address'], 60, 'its address is known')
        interface = read_bridged_interface(lab, talking)
        assert (interface['address'], interface['source']) == (reported['eth1'], 'agent')
        assert f'({interface["mac"]} on br0, by agent)' in lab.eschedule('show', talking).stdout
        assert 'ecomp-guest: agent asked' in lab.read_console('hv1', talking)
        assert read_bridged_interface(lab, silent)['address'] is None

        # Stopping, which may ask the agent first, does not wait for a silent one.
        assert lab.eschedule('stop', '--wait', silent).code == 0
        assert lab.virsh('hv1', 'domstate', '--reason', silent).strip() == 'shut off (shutdown)'
        lab.destroy(silent, talking)
        lab.check()
