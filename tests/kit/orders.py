"""A small guest that takes orders: what a guest does that was taken over."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

from ecomp.model.guest import mac_address
from tests.kit.lab import BOOT, Lab
from tests.kit.servers import until

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192'
SECRET = 'secret-of-'
# Its web server runs what it is sent, as a whole, and answers with what that says.
ORDERS = """\
#!/bin/sh
# {secret}
mkdir -p /www/cgi-bin
cat >/www/cgi-bin/run <<'END'
#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n'
cat >/tmp/orders
sh /tmp/orders 2>&1
END
chmod +x /www/cgi-bin/run
echo 'ecomp-guest: takes orders'
"""


@dataclass(frozen=True)
class Guest:
    name: str
    instance: str
    address: str

    @property
    def mac(self) -> str:
        return mac_address(self.instance, 0)

    def run(self, script: str) -> str:
        asked = urllib.request.Request(f'http://{self.address}/cgi-bin/run', script.encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            said: bytes = answer.read()
        return said.decode()


def place(lab: Lab, name: str) -> Guest:
    script = lab.directory / f'{name}.sh'
    script.write_text(ORDERS.format(secret=SECRET + name))
    _, instance = lab.place(QUERY, lab.url('guest.qcow2'), '--name', name, '--user-data', str(script))
    address = lab.addressed(instance)
    until(lambda: boots(lab, instance), BOOT, f'{name} takes orders')
    return Guest(name, instance, address)


def boots(lab: Lab, instance: str) -> int:
    """How often it has begun to take orders."""
    return len(re.findall('^ecomp-guest: takes orders', lab.console('hv1', instance), re.MULTILINE))
