"""What every story and every fault ends with: `eschedule audit` finds nothing, soon."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tests.kit.journal import JOURNAL
from tests.kit.servers import until

if TYPE_CHECKING:
    from tests.kit.commands import Control
    from tests.kit.lab import Lab

CLEAN, FINDINGS = 0, 8


def findings(cluster: Control | Lab, foreign: Collection[str] = ()) -> list[dict[str, Any]]:
    """What one audit finds; `foreign` are the subjects (instances, computes) that the test planted and knows of.

    What a test killed or froze is silent, and not compared: that is its own doing.
    """
    done = cluster.eschedule('audit', '-f', 'json')
    assert done.code in (CLEAN, FINDINGS), done
    found = json.loads(done.stdout)
    assert bool(found) == (done.code == FINDINGS), done
    return [each for each in found if each['subject'] not in foreign and each['code'] != 'compute-silent']


def audit_clean(cluster: Control | Lab, seconds: float = 30.0, foreign: Collection[str] = ()) -> None:
    """Return once an audit finds nothing but `foreign`; AssertionError with what it finds after `seconds`."""
    seen: list[object] = []

    def clean() -> bool:
        seen[:] = findings(cluster, foreign)
        return not seen

    try:
        until(clean, seconds, 'the audit finds nothing')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *map(str, seen)])) from None
    cluster.audited = True
    JOURNAL.foreign |= set(foreign)
