"""A domain without a definition, as after `virsh undefine` of one that runs: once it ends it is gone, at any moment.

On libvirt's own test driver: what matters is between two calls of ours.
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
DOMAIN = f"""<domain type='test'><name>{{0}}</name><uuid>{{0}}</uuid><memory>65536</memory><os><type>hvm</type></os>
<metadata><ecomp:instance xmlns:ecomp='{MARK_NAMESPACE}' uuid='{{0}}' compute='{COMPUTE}'/></metadata></domain>"""


@pytest.fixture
def driver() -> Iterator[Any]:
    opened = libvirt.open('test:///default')
    yield opened
    opened.close()


@pytest.mark.parametrize(
    'ask',
    [
        partial(Domains.end, undefine=True),
        partial(Domains.end, undefine=False),
        lambda on, instance, _: on.is_running(instance),
    ],
)
def test_it_ends_between_two_questions(
    driver: Any, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Domains, str, str], object]
) -> None:
    instance, connection = str(uuid4()), Connection('test:///default')
    connection._open = driver  # that driver has no keepalive, which opening sets
    domain = driver.createXML(DOMAIN.format(instance))
    find = domains._named

    def found_and_gone(*asked: Any) -> list[Any]:
        there = find(*asked)
        if there:
            domain.destroy()
        return there

    monkeypatch.setattr(domains, '_named', found_and_gone)
    assert not ask(Domains(connection), instance, COMPUTE)
    assert find(driver, instance) == []
