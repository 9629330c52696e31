"""Generate tests/faults/README.md from the code: the matrix with its tests, and the failpoints.

    python -m tests.faults.table > tests/faults/README.md

The docstring of a row's test begins with its row: "F8: etcd frozen for 20 s … (fake)". tests/faults/test_table.py
compares the file with the code, so neither can be forgotten.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ecomp.failpoints import PLACES

HERE = Path(__file__).parent

# The rows; their numbers are stable.
ROWS = {
    1: 'kill -9 of eschedule after each step',
    2: 'kill -9 of ecompute at each step',
    3: 'kill -9 of a worker',
    4: 'kill -9 of ecompute while a worker runs',
    5: 'ecompute frozen, then continued',
    6: 'storms of signals, a second ecompute',
    7: 'etcd killed and restarted',
    8: 'etcd frozen',
    9: 'one of three etcd members lost',
    10: 'etcd without a quorum',
    11: 'etcd compacted while ecompute is away',
    12: 'etcd out of space',
    13: 'etcd wiped, or an older snapshot restored',
    14: 'partitions, loss and delay',
    15: 'eschedule claims, then loses etcd',
    16: 'placement down, slow, failing, in conflict, its answer lost',
    17: "placement's database restored from an older copy",
    18: 'libvirtd killed, frozen, restarted in each step',
    19: 'QEMU killed, guest powered off, QEMU that does not start',
    20: 'host rebooted',
    21: 'disk full in each place',
    22: 'hostile images',
    23: 'an image that changes, two builds of one image',
    24: 'hostile records and requests',
    25: 'duplicate uuids',
    26: 'destroy while building, at each step',
    27: 'destroys that race',
    28: 'a key removed by hand',
    29: 'a domain or disk removed by hand',
    30: 'clocks that jump (libfaketime)',
    31: 'limits on descriptors and memory',
    32: 'malformed command lines and configurations',
    33: 'a burst, and the soak',
    34: 'records of the version before and after',
    35: 'certificates',
    36: 'asked to stop while building',
    37: 'no stdout or stderr',
    38: 'stop, start and reboot: killed at each step, raced, guests that do not listen',
    39: 'groups and quotas: killed at each step, frozen, raced',
    40: 'a compute killed or frozen while it takes from a queue',
}

LOST = 'functional/test_scheduler_lost.py::'
CREATE = 'functional/test_scheduler_create.py::'
BY_HAND = 'scenario/test_by_hand.py::'
RESTART = 'scenario/test_restart.py::'
MOVED = 'functional/test_claims.py::'
# The rules of the protocol, each with the tests that replay the interleaving it prevents.
RULES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        'an unknown outcome is read back; if that fails, nothing is released',
        (
            'functional/test_scheduler_names.py::test_a_delivery_that_is_lost_or_whose_answer_is',
            LOST + 'test_when_it_stays_unknown_nothing_is_released_and_the_same_uuid_goes_on',
            LOST + 'test_when_a_claim_stays_unknown_nothing_is_released_and_the_same_uuid_goes_on',
        ),
    ),
    2: (
        'only what placement confirms is built, and placement is waited for',
        (
            BY_HAND + 'test_a_request_without_an_allocation_is_not_built',
            BY_HAND + 'test_a_request_that_is_held_elsewhere_is_not_built',
            RESTART + 'test_placement_killed_and_back',
        ),
    ),
    3: (
        'a claim is released as it was read, and moved by its generation: never released and claimed anew, for then '
        'placement counts from 1 again and a late release meets its own number',
        (
            MOVED + 'test_a_late_release_of_the_first_one_meets_another_generation',
            MOVED + 'test_a_uuid_whose_consumer_was_left_empty_is_placed_all_the_same',
            MOVED + 'test_a_lost_claim_beside_an_equal_one_moves_it',
            CREATE + 'test_a_second_one_takes_over_and_the_first_one_s_late_release_releases_nothing',
            CREATE + 'test_the_first_one_wakes_up_before_its_claim_and_takes_nothing_back',
        ),
    ),
    4: (
        'a claim nobody stands behind, seen twice, is released',
        (
            'functional/test_claims.py::test_an_orphan_is_released_after_two_looks_apart',
            'functional/test_claims.py::test_who_stands_behind_a_claim',
            'faults/test_eschedule.py::test_killed_with_its_claim_and_left_alone',
        ),
    ),
    5: ("a write compares the request's revision", ('faults/test_rules.py::test_rule_5_a_late_write_is_none',)),
    6: (
        'nothing is destroyed for missing information',
        (
            'unit/test_plan.py::test_only_a_tombstone_destroys',
            'unit/test_plan.py::test_what_vanished_ends_and_what_was_merely_missed_does_not',
            'faults/test_intent.py::test_a_request_removed_by_hand',
            'faults/test_guests.py::test_changed_by_hand',
        ),
    ),
    7: (
        'groups, quotas and names change in the delivering transaction',
        (
            'scenario/test_sharing.py::test_never_two_on_a_compute_however_many_ask_at_once',
            'scenario/test_sharing.py::test_however_many_ask_at_once_it_is_just_so_many',
            'faults/test_sharing.py::test_eschedule_killed',
            'faults/test_sharing.py::test_quota_set_while_one_is_delivered',
            'scenario/test_names.py::test_one_of_two_gets_it_and_the_next_one_when_it_is_free_again',
        ),
    ),
    8: (
        'a set is one request',
        (
            'scenario/test_sharing.py::test_sets_that_race_are_whole_or_not_at_all',
            'faults/test_eschedule.py::test_killed_with_a_part_of_the_set_claimed',
            'faults/test_eschedule.py::test_killed_with_the_whole_set_claimed_or_delivered',
        ),
    ),
    9: (
        'one state directory, one uuid, one compute',
        (
            RESTART + 'test_the_same_state_directory_twice',
            RESTART + 'test_the_same_uuid_in_another_state_directory',
            RESTART + 'test_who_loses_its_uuid_to_another_only_watches',
        ),
    ),
    10: (
        'a strange etcd is not obeyed; a reboot is known',
        (
            'faults/test_new_etcd.py::test_wiped',
            'faults/test_new_etcd.py::test_restored',
            'faults/test_new_etcd.py::test_restored_and_overtaken',
            'faults/test_reboot.py::test_rebooted',
            'faults/test_reboot.py::test_crashed_in_the_same_boot',
        ),
    ),
    11: (
        "before anything is given away: its generation, then who is at it, then its request's own key, then the "
        'release; requests move that way, and read in another order one that moves is nowhere',
        (
            MOVED + 'test_the_claim_keeper_leaves_what_was_taken_over_while_it_looked',
            MOVED + 'test_forget_leaves_what_is_delivered_while_it_looks',
            MOVED + 'test_a_repair_leaves_what_is_delivered_while_it_looks',
        ),
    ),
}

# Rows, or parts of them, that cannot run on the machines of the tests: the reason, and what replaces them.
NOT_HERE: dict[int, str] = {}


class Case(NamedTuple):
    """One test of a row.

    `slow`: only `tests/run --all` runs it.
    """

    row: int
    name: str
    says: str
    where: str
    slow: bool


def cases(directory: Path = HERE) -> Iterator[Case]:
    """Yield every test whose docstring begins with a row."""
    for path in sorted(directory.glob('test_*.py')):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith('test_'):
                continue
            summary = ' '.join((ast.get_docstring(node) or '').split('\n\n')[0].split())
            match = re.fullmatch(r'F(\d+): (.+?)\.? \((fake|libvirt)\)\.?', summary)
            if match:
                slow = any(isinstance(mark, ast.Attribute) and mark.attr == 'slow' for mark in node.decorator_list)
                yield Case(int(match[1]), f'{path.name}::{node.name}', match[2], match[3], slow)


def unmarked(directory: Path = HERE) -> list[str]:
    """List the tests whose docstring names a row in a form that the table does not accept."""
    accepted = {case.name for case in cases(directory)}
    names = []
    for path in sorted(directory.glob('test_*.py')):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r'F\d', ast.get_docstring(node) or ''):
                name = f'{path.name}::{node.name}'
                names += [] if name in accepted else [name]
    return names


def page() -> str:
    """Render the whole of README.md."""
    rows: dict[int, list[Case]] = {number: [] for number in ROWS}
    for case in cases():
        rows[case.row].append(case)
    tested = {name for path in HERE.glob('test_*.py') for name in _failpoints(path)}
    lines = [
        '# The fault matrix',
        '',
        'Made by `python -m tests.faults.table`. Each test injects its fault, waits with a deadline and ends with the',
        'checks of `eschedule audit`. *fake*: on `ecompute --fake`, where libvirt is not what fails; *libvirt*: on',
        'real libvirt and QEMU. Tests marked *slow* are run by `tests/run --all`.',
        '',
        '| row | fault | test | on | what is done |',
        '|---|---|---|---|---|',
    ]
    for number, cells in rows.items():
        for case in cells:
            on = case.where + (', slow' if case.slow else '')
            lines.append(f'| F{number} | {ROWS[number]} | `{case.name}` | {on} | {case.says.replace("|", "/")} |')
        if number in NOT_HERE:
            lines.append(f'| F{number} | {ROWS[number]} | not here | | {NOT_HERE[number]} |')
    lines += ['', '## The rules of the protocol', '', '| rule | tests that replay what it closes |', '|---|---|']
    for number, (says, names) in RULES.items():
        lines.append(f'| {number}: {says} | {", ".join(f"`{name}`" for name in names)} |')
    lines += ['', '## Failpoints', '', 'Named in the code, armed by `ECOMP_FAILPOINT` (see `ecomp/failpoints.py`).', '']
    lines += ['| name | what is true there | armed by a test |', '|---|---|---|']
    lines += [f'| `{name}` | {says} | {"yes" if name in tested else "no"} |' for name, says in PLACES.items()]
    return '\n'.join(lines) + '\n'


def _failpoints(path: Path) -> set[str]:
    """Return every word in a module's constants named …FAILPOINTS.

    Its tests arm these failpoints and assert that they fired.
    """
    words: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id.endswith('FAILPOINTS') for name in node.targets
        ):
            constants = (constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant))
            words |= {word for text in constants if isinstance(text, str) for word in re.findall(r'[a-z-]+', text)}
    return words


if __name__ == '__main__':
    sys.stdout.write(page())
