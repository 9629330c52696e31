"""A check and what it finds, for `eschedule check` and `ecompute --check`. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ecomp.errors import Problem, Unreachable
from ecomp.model.parsers import FLAG, check, text
from ecomp.model.stored import sparse, stored
from ecomp.model.text import make_printable
from ecomp.model.warning_codes import COMPUTE_WARNINGS, SCHEDULE_WARNINGS

# An operator must act on an error. A warning is about what the system's packages bring and no newer one repairs, or
# about a host that others stand in for. It does not change the exit code, and `ignore_warnings:` silences it.
ERROR = 'error'
WARNING = 'warning'
# The exit code of a command that finds an error.
EXIT_FINDINGS = 8

# Who looks for a code: a host at itself, eschedule at the cluster, or both; at etcd and placement, at the computes that
# eschedule lists, or at the machine of an ecompute.
HOST, CLUSTER = frozenset({'host'}), frozenset({'cluster'})
SERVERS, COMPUTES, MACHINE = frozenset({'servers'}), frozenset({'computes'}), frozenset({'machine'})

MAX_SENTENCE_CHARACTERS = 1000
MAX_SUBJECT_CHARACTERS = 255


class Repair(Enum):
    """What `check --fix` does, in words, by eschedule or, on a host, by its ecompute."""

    RELEASE = 'releases the claim'
    CLAIM = 'claims the resources of the request again'
    DELETE = 'deletes the key'
    DELETE_REQUEST = 'deletes the request'
    UNQUEUE = 'removes the request from the queue'
    PUT_ON_LEASE = 'puts the record on a lease'
    RESTORE_NAME = 'restores the name'
    JOIN_GROUP = 'adds the instance and its compute to the group'
    LEAVE_GROUP = 'removes these members from the group'
    RECOUNT = 'counts the usage again'
    END_ENTRIES = 'marks these entries as ended'
    RESTORE_STACK = 'restores the stack from the requests'
    CLEAR = 'has the host remove what the finding names'


class Leftover(NamedTuple):
    kind: str  # `disk`, `iso` or `reservations` of an instance, `seed` (metadata of a MAC) or `part`
    name: str
    mark: str = ''  # the instance of metadata, or the mark of a part: a host keeps what has another one by then


class Check(NamedTuple):
    """A row of the table: who looks for a code, which function finds it, and what it means."""

    scope: frozenset[str]
    find: Callable[[Any], Iterable[Finding]]
    meaning: str
    manual_repair: str = ''  # with `<key>` for the finding's key, or for all of its keys if one of them is wrong
    repair: Repair | None = None


# The table, by code. ecomp.model.audit and ecomp.model.health add their rows, which stay beside their finders.
# Codes are stable, because scripts depend on them.
_TABLE: dict[str, Check] = {}


def add_checks(rows: Mapping[str, Check]) -> Mapping[str, Check]:
    _TABLE.update(rows)
    return rows


def run_checks(checks: Mapping[str, Check], scope: frozenset[str], facts: object) -> list[Finding]:
    """Return the findings of all checks of this scope, whose functions each run once."""
    finders = dict.fromkeys(check.find for check in checks.values() if check.scope >= scope)
    return [finding for find in finders for finding in find(facts)]


@stored(
    code=check(
        'a code of a host', lambda code: isinstance(code, str) and code in _TABLE and _TABLE[code].scope >= HOST
    ),
    subject=text(lambda subject: make_printable(subject, MAX_SUBJECT_CHARACTERS)),
    sentence=text(lambda sentence: make_printable(sentence, MAX_SENTENCE_CHARACTERS)),
    is_repairable=sparse(FLAG),
)
class Finding(NamedTuple):
    """One problem of an instance, compute, name, group, project, stack, server, file or network."""

    code: str
    subject: str
    sentence: str
    compute: str = ''  # where it was found, or ''
    leftover: Leftover | None = None  # what that host can remove
    is_repairable: bool = True  # False: --fix leaves it alone, although its code has a repair
    keys: tuple[str, ...] = ()  # --fix changes etcd only if all are unchanged; a repair of a key applies to the first
    cure: str = ''  # the manual repair, '' for that of the row

    @property
    def level(self) -> str:
        return get_level(self.code)

    @property
    def repair(self) -> Repair | None:
        return _TABLE[self.code].repair if self.is_repairable else None

    @property
    def fix(self) -> str:
        """What `check --fix` does, in words, or ''."""
        return self.repair.value if self.repair else ''

    @property
    def how(self) -> str:
        """The manual repair, quoted for the shell, or '' if `check --fix` repairs it."""
        text = '' if self.fix else self.cure or _TABLE[self.code].manual_repair
        return text.replace('<key>', ' or '.join(map(shlex.quote, self.keys))) if self.keys else text

    def to_dict(self) -> dict[str, Any]:
        names = ('code', 'subject', 'compute', 'sentence', 'fix', 'how', 'level')
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return str(Problem(f'{self.code}: {mark_warning(self.code, self.sentence)}', self.how))


def get_level(code: str) -> str:
    return WARNING if code in (*SCHEDULE_WARNINGS, *COMPUTE_WARNINGS) else ERROR


def mark_warning(code: str, sentence: str) -> str:
    """Return the sentence, after `warning: ` if the code is that of a warning."""
    return f'{WARNING}: {sentence}' if get_level(code) == WARNING else sentence


def get_exit_code(findings: Sequence[Finding]) -> int:
    """Return 7 if etcd or placement does not answer, EXIT_FINDINGS for an error, else 0."""
    if any(finding.code in ('etcd', 'placement') for finding in findings):
        return Unreachable.exit_code
    return EXIT_FINDINGS if any(finding.level == ERROR for finding in findings) else 0


def count_findings(findings: Sequence[Finding]) -> str:
    """Return 'no findings', '1 finding' or, with warnings, '2 findings, 1 warning'."""
    warnings = sum(finding.level == WARNING for finding in findings)
    errors = len(findings) - warnings
    text = f'{errors or "no"} finding{"" if errors == 1 else "s"}'
    return f'{text}, {warnings} warning{"" if warnings == 1 else "s"}' if warnings else text
