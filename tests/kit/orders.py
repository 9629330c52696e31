"""A small guest that runs scripts sent to it: the actions of a compromised guest."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

from ecomp.model.guest import mac_address
from tests.kit.lab import BOOT, Lab
from tests.kit.servers import until

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192'
SECRET = 'secret-of-'
# Its web server runs the body of a request as a script, and answers with the output.
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
        request = urllib.request.Request(f'http://{self.address}/cgi-bin/run', script.encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            output: bytes = answer.read()
        return output.decode()


def place(lab: Lab, name: str) -> Guest:
    script = lab.directory / f'{name}.sh'
    script.write_text(ORDERS.format(secret=SECRET + name))
    _, instance = lab.place(QUERY, lab.url('guest.qcow2'), '--name', name, '--user-data', str(script))
    address = lab.addressed(instance)
    until(lambda: boots(lab, instance), BOOT, f'{name} takes orders')
    return Guest(name, instance, address)


def boots(lab: Lab, instance: str) -> int:
    """Count how often the guest has started to accept scripts."""
    return len(re.findall('^ecomp-guest: takes orders', lab.console('hv1', instance), re.MULTILINE))
