"""Generate tests/faults/README.md: the matrix with its tests, and the failpoints.

    python -m tests.faults.table > tests/faults/README.md

The docstring of a test begins with its rows: "F8: etcd frozen for 20 s … (fake)".

tests/faults/test_table.py compares the file with the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ecomp.failpoints import FAILPOINT_STATES

HERE = Path(__file__).parent
PROTOCOL_PAGE = '../../docs/explanation/protocol.md'

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
    33: 'random faults: the soak of bench/soak',
    34: 'records of the version before and after',
    35: 'certificates',
    36: 'asked to stop while building',
    37: 'no stdout or stderr',
    38: 'stop, start and reboot: killed at each step, guests that do not listen',
    39: 'groups and quotas: killed and frozen at each step',
    40: 'a compute killed or frozen while it takes from a queue',
}

KILL_TESTS = 'faults/test_kills.py::'
RESTORE_TESTS = 'faults/test_restored.py::'
# {rule of docs/explanation/protocol.md: the tests that replay the race that it closes}
PROTOCOL_RULES: dict[str, tuple[str, ...]] = {
    'read-back': (
        'functional/test_scheduler_names.py::test_lost_delivery_keeps_name_and_claim_consistent',
        'model/scenarios_losses.py::create_with_losses',
        'model/scenarios_losses.py::resume_with_losses',
    ),
    'confirmed-claim': (
        'functional/test_ends_in_error.py::test_request_whose_claim_is_elsewhere_or_differs_is_not_built',
        'functional/test_ends_in_error.py::test_build_waits_until_placement_confirms_its_claim',
        'model/scenarios_claims.py::unconfirmed',
    ),
    'release-by-generation': (
        *(
            f'model/scenarios_claims.py::{name}'
            for name in ('release_beside_resume', 'orphan_consumer', 'late_releases')
        ),
        'model/scenarios_claims.py::one_uuid_twice',
    ),
    'orphaned-claim': (
        'functional/test_claims.py::test_orphan_is_released_after_two_spaced_checks',
        'functional/test_claims.py::test_claims_with_an_owner_are_kept',
        KILL_TESTS + 'test_nothing_is_left_of_a_killed_command',
        KILL_TESTS + 'test_claim_of_a_killed_eschedule_is_released',
    ),
    'compared-revision': ('faults/test_rules.py::test_late_write_changes_nothing',),
    'tombstone-only': (
        'unit/test_plan.py::test_plan_table',
        'unit/test_plan.py::test_vanished_instance_ends_and_missed_one_does_not',
        'functional/test_rebuild.py::test_older_etcd_repeats_no_rebuild',
        'faults/test_intent.py::test_deleted_request_keeps_guest_and_claim',
        'faults/test_guests.py::test_domains_and_disks_removed_outside_ecomp',
    ),
    'change-with-delivery': (
        'model/scenarios_shared.py::strict_anti_affinity',
        'model/scenarios_shared.py::quota_of_one',
        KILL_TESTS + 'test_killed_command_is_completed_by_a_repeat',
        KILL_TESTS + 'test_frozen_command_is_no_finding_and_repeats_nothing',
        'functional/test_scheduler_names.py::test_name_of_an_ended_instance_is_free',
    ),
    'whole-set': (
        'model/scenarios_claims.py::set_against_single',
        KILL_TESTS + 'test_killed_command_is_completed_by_a_repeat',
        KILL_TESTS + 'test_nothing_is_left_of_a_killed_command',
    ),
    'single-owner': (
        'faults/test_ecompute.py::test_two_ecomputes_started_together',
        'functional/test_presence.py::test_second_compute_with_the_same_token_fences_the_first',
        'faults/test_ecompute.py::test_frozen_while_another_compute_takes_its_uuid',
    ),
    'familiar-etcd': (
        'faults/test_new_etcd.py::test_wiped_etcd_changes_nothing_until_accepted',
        'faults/test_new_etcd.py::test_restored_etcd_is_repaired_after_acceptance',
        'functional/test_watch.py::test_list_of_another_etcd_is_strange',
        RESTORE_TESTS + 'test_acceptance_by_one_compute_counts_for_one_that_was_off',
        'faults/test_reboot.py::test_reboot_restores_every_guest_state',
        'faults/test_reboot.py::test_crash_without_reboot_leaves_guests_stopped',
    ),
    'order-of-reading': (
        'model/scenarios_claims.py::claim_keeper',
        'model/scenarios_operators.py::forget_and_create',
        'model/scenarios_operators.py::keeper_and_create',
    ),
    'limited-trust': (
        'faults/test_hostile.py::test_junk_in_other_keys_disturbs_nothing',
        'security/test_records.py::test_forged_record_of_a_guest_is_not_trusted',
    ),
    'claim-stays': (
        RESTORE_TESTS + 'test_compute_without_history_takes_no_running_instance',
        RESTORE_TESTS + 'test_repeated_command_places_no_running_instance',
        'model/scenarios_restored.py::queued_after_a_restore',
        'model/scenarios_restored.py::new_compute_beside_a_restored_key',
    ),
    'shown-not-acted-on': (
        'security/test_records.py::test_forged_record_under_its_own_key_is_not_trusted',
        'scenario/test_evacuate.py::test_first_apply_is_refused_while_a_silent_host_has_an_unknown_claim',
        'model/scenarios_once.py::replaced_on_a_silent_host',
        'scenario/test_evacuate.py::test_guest_stays_while_its_replacement_is_claimed_on_a_silent_host',
        'unit/test_audit.py::test_nothing_is_destroyed_because_an_instance_says_that_it_replaces_another',
    ),
}


# {story: the failpoints that it reaches}. A failpoint of two stories is reached in two situations.
STORY_FAILPOINTS = {
    'create': ('announced', 'claimed', 'delivered'),
    'create too late': ('undone',),
    'create a set': ('claimed-some', 'claimed', 'delivered'),
    'destroy': ('tombstoned',),
    'queue': ('queued',),
    'cancel': ('unqueued',),
    'stop': ('power-asked',),
    'rename': ('changed',),
    'resize': ('resize-announced', 'resize-claimed'),
    'disable': ('host-disabled',),
    'enable': ('host-enabled',),
    'forget': ('host-released', 'host-emptied', 'host-unregistered'),
    'set a quota': ('quota-counted', 'quota-reckoned'),
    'apply': ('stack-begun', 'stack-announced', 'claimed-some', 'stack-claimed', 'stack-delivered'),
    'replace': ('stack-announced', 'stack-claimed', 'stack-delivered'),
    'prune': ('stack-removed',),
    'evacuate': ('evacuation-announced', 'claimed-some', 'evacuation-claimed', 'evacuated'),
    'adopt': (
        *('adoption-announced', 'adoption-disabled', 'adoption-claimed', 'adoption-delivered', 'adoption-enabled'),
    ),
    'release': ('tombstoned',),
    'mark': ('adopted',),
    'build': (
        *('remembered', 'reserved', 'seeded', 'confirmed', 'building', 'image-ready', 'disk-created', 'seed-written'),
        *('domain-started', 'built', 'active', 'addressed'),
    ),
    'fail': ('failing', 'unreserved', 'released', 'ended'),
    'remove': (
        *('destroying', 'domain-undefined', 'disk-deleted', 'removed', 'forgotten', 'unreserved', 'released', 'ended'),
    ),
    'reboot': ('powering', 'powered'),
    'rebuild': (
        *('rebuilding', 'reserved', 'seeded', 'confirmed', 'building', 'image-ready', 'disk-removed', 'disk-created'),
        *('seed-written', 'domain-started'),
    ),
    'new sizes': ('domain-resized', 'resized'),
    'take': ('marked', 'taken', 'moved'),
    'start': ('registered', 'described-here', 'described', 'published'),
    'end': ('closing', 'closed'),
}
# {failpoint: the module whose tests are its story}: they need an etcd to wipe, a libvirt or an image's server.
OTHER_STORIES = {
    'republished': 'test_new_etcd.py',
    'image-begun': 'test_images.py',
    'image-part': 'test_images.py',
    'image-kept': 'test_images.py',
    'image-evicted': 'test_images.py',
    'domain-defined': 'test_workers.py',
    'domain-destroyed': 'test_workers.py',
}
# Rows without a test here, and what replaces them.
UNTESTED_ROWS = {27: '`tests/model`: `destroyed_twice_beside_another`, `destroy_with_losses`, `destroy_unanswered`'}


class Case(NamedTuple):
    """One test of a row. A test of several rows is a case of each."""

    row: int
    name: str
    summary: str
    backend: str
    slow: bool


def find_cases(directory: Path = HERE) -> Iterator[Case]:
    for path in sorted(directory.glob('test_*.py')):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith('test_'):
                continue
            summary = ' '.join((ast.get_docstring(node) or '').split('\n\n')[0].split())
            match = re.fullmatch(r'(F\d+(?:, F\d+)*): (.+?)\.? \((fake|libvirt)\)\.?', summary)
            if match:
                slow = any(isinstance(mark, ast.Attribute) and mark.attr == 'slow' for mark in node.decorator_list)
                for row in match[1].split(', '):
                    yield Case(int(row[1:]), f'{path.name}::{node.name}', match[2], match[3], slow)


def find_unmarked(directory: Path = HERE) -> list[str]:
    """List the tests whose docstring names a row in a form that the table does not accept."""
    accepted = {case.name for case in find_cases(directory)}
    names = []
    for path in sorted(directory.glob('test_*.py')):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r'F\d', ast.get_docstring(node) or ''):
                name = f'{path.name}::{node.name}'
                names += [] if name in accepted else [name]
    return names


def render_page() -> str:
    rows: dict[int, list[Case]] = {number: [] for number in ROWS}
    for case in find_cases():
        rows[case.row].append(case)
    lines = [
        '# The fault matrix',
        '',
        'Made by `python -m tests.faults.table`. Each test injects its fault, waits with a deadline and ends with the',
        'checks of `eschedule check`. Its docstring says what is done. *slow*: only `tests/run --all` runs it.',
        '*libvirt*: on real libvirt and QEMU; the others are on `ecompute --fake`, where libvirt is not what fails.',
        '',
        '| row | fault | tests |',
        '|---|---|---|',
    ]
    for number, cases in rows.items():
        lines.append(f'| F{number} | {ROWS[number]} | {_format_cases(cases) or UNTESTED_ROWS[number]} |')
    lines += [
        '',
        '## The rules of the protocol',
        '',
        '| rule | tests that replay the race that it closes |',
        '|---|---|',
    ]
    for rule, names in PROTOCOL_RULES.items():
        lines.append(f'| [{rule}]({PROTOCOL_PAGE}#{rule}) | {", ".join(f"`{name}`" for name in names)} |')
    lines += [
        '',
        '## Failpoints',
        '',
        'Named in the code, armed by `ECOMP_FAILPOINT` (see `ecomp/failpoints.py`). Each',
    ]
    lines += ['has a story in `test_kills.py`, or tests in another module.', '']
    lines += ['| name | what is true there | story |', '|---|---|---|']
    lines += [f'| `{name}` | {says} | {_format_story(name)} |' for name, says in FAILPOINT_STATES.items()]
    return '\n'.join(lines) + '\n'


def _format_cases(cases: Sequence[Case]) -> str:
    modules: dict[str, list[str]] = {}
    for case in cases:
        module, _, test = case.name.partition('::')
        marks = [mark for mark, is_set in (('libvirt', case.backend == 'libvirt'), ('slow', case.slow)) if is_set]
        modules.setdefault(module, []).append(f'`{test}`' + (f' ({", ".join(marks)})' if marks else ''))
    return '; '.join(f'`{module}`: {", ".join(tests)}' for module, tests in modules.items())


def _format_story(failpoint: str) -> str:
    stories = [story for story, steps in STORY_FAILPOINTS.items() if failpoint in steps]
    return ', '.join(stories) or f'`{OTHER_STORIES[failpoint]}`'


def find_armed_failpoints(path: Path) -> set[str]:
    """Return every word in a module's constants named …FAILPOINTS: those that its tests arm."""
    words: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id.endswith('FAILPOINTS') for name in node.targets
        ):
            constants = (constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant))
            words |= {word for text in constants if isinstance(text, str) for word in re.findall(r'[a-z-]+', text)}
    return words


if __name__ == '__main__':
    sys.stdout.write(render_page())
