"""A small guest that runs scripts sent to it: the actions of a compromised guest."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

from ecomp.model.guest import make_mac_address
from tests.kit.lab import BOOT_SECONDS, Lab
from tests.kit.servers import wait_until

GUEST_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192'
SECRET_PREFIX = 'secret-of-'
# Its web server runs the body of a request as a script, and answers with the output.
USER_DATA = """\
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
        return make_mac_address(self.instance, 0)

    def run(self, script: str) -> str:
        request = urllib.request.Request(f'http://{self.address}/cgi-bin/run', script.encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            output: bytes = answer.read()
        return output.decode()


def place_guest(lab: Lab, name: str) -> Guest:
    script = lab.directory / f'{name}.sh'
    script.write_text(USER_DATA.format(secret=SECRET_PREFIX + name))
    _, instance = lab.place(GUEST_QUERY, lab.make_url('guest.qcow2'), '--name', name, '--user-data', str(script))
    address = lab.wait_address(instance)
    wait_until(lambda: count_boots(lab, instance), BOOT_SECONDS, f'{name} takes orders')
    return Guest(name, instance, address)


def count_boots(lab: Lab, instance: str) -> int:
    return len(re.findall('^ecomp-guest: takes orders', lab.read_console('hv1', instance), re.MULTILINE))
