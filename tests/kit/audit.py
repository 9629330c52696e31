"""The end of every scenario and fault test: the audit finds nothing within a time limit."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tests.kit.journal import JOURNAL
from tests.kit.servers import wait_until

if TYPE_CHECKING:
    from tests.kit.commands import Control
    from tests.kit.lab import Lab

EXIT_CLEAN = 0
EXIT_FINDINGS = 8
# What is found of a compute because it is older.
AGE_CODES = ('compute-mute', 'version')


def run_audit(cluster: Control | Lab, foreign: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the findings of one audit, except those about `foreign` subjects.

    Silent and closed computes are left out, because the test itself killed, froze or stopped them.
    Warnings are left out, because they depend on the machine.
    """
    result = cluster.eschedule('check', '--now', '-f', 'json')
    assert result.code in (EXIT_CLEAN, EXIT_FINDINGS), result
    entries = json.loads(result.stdout)
    entries = [finding for finding in entries if finding['level'] == 'error']
    assert bool(entries) == (result.code == EXIT_FINDINGS), result
    # A test of certificates may have made its own expire.
    ignored = 'compute', 'compute-silent', 'certificate'
    return [finding for finding in entries if finding['subject'] not in foreign and finding['code'] not in ignored]


def wait_audit_clean(
    cluster: Control | Lab, seconds: float = 30.0, foreign: Collection[str] = (), older: Collection[str] = ()
) -> None:
    """Wait until an audit finds only `foreign`. `older` computes do not publish findings."""
    remaining: list[object] = []

    def clean() -> bool:
        findings = run_audit(cluster, foreign)
        remaining[:] = [each for each in findings if each['subject'] not in older or each['code'] not in AGE_CODES]
        return not remaining

    try:
        wait_until(clean, seconds, 'the audit finds nothing')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *map(str, remaining)])) from None
    cluster.is_audited = True
    JOURNAL.foreign |= set(foreign)
