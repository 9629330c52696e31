"""Test domains without a definition, which vanish when they end, on libvirt's test driver.

`virsh undefine` of a running domain makes one. It may end between any two calls of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import domains  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.domains import Domains  # noqa: E402
from ecomp.virt.xml import MARK_NAMESPACE  # noqa: E402

COMPUTE = str(uuid4())
DOMAIN_XML = f"""<domain type='test'><name>{{0}}</name><uuid>{{0}}</uuid><memory>65536</memory><os><type>hvm</type></os>
<metadata><ecomp:instance xmlns:ecomp='{MARK_NAMESPACE}' uuid='{{0}}' compute='{COMPUTE}'/></metadata></domain>"""


@pytest.fixture
def driver() -> Iterator[Any]:
    opened = libvirt.open('test:///default')
    yield opened
    opened.close()


@pytest.mark.parametrize(
    'ask',
    [
        partial(Domains.force_off, undefine=True),
        partial(Domains.force_off, undefine=False),
        lambda on, instance, _: on.is_domain_running(instance),
    ],
)
def test_domain_that_ends_between_two_calls(
    driver: Any, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Domains, str, str], object]
) -> None:
    instance, connection = str(uuid4()), Connection('test:///default')
    connection._current = driver  # the usual opening sets a keepalive, which this driver does not support
    domain = driver.createXML(DOMAIN_XML.format(instance))
    find = domains._find_domains

    def find_and_destroy(*args: Any) -> list[Any]:
        domains_found = find(*args)
        if domains_found:
            domain.destroy()
        return domains_found

    monkeypatch.setattr(domains, '_find_domains', find_and_destroy)
    assert not ask(Domains(connection), instance, COMPUTE)
    assert find(driver, instance) == []
