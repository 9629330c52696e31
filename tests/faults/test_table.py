"""The fault matrix matches the tests, and every row has a test or a reason."""

from __future__ import annotations

from pathlib import Path

from ecomp.failpoints import PLACES
from tests.faults import table


def test_the_page_is_made_from_the_code() -> None:
    instruction = 'make it anew: python -m tests.faults.table > tests/faults/README.md'
    assert (table.HERE / 'README.md').read_text() == table.page(), instruction


def test_every_row_has_a_test_or_a_reason() -> None:
    tested = {case.row for case in table.cases()}
    assert sorted(set(table.ROWS) - tested - set(table.NOT_HERE)) == []
    assert tested <= set(table.ROWS)


def test_the_tests_of_the_rules_are_there() -> None:
    for number, (_, names) in table.RULES.items():
        assert names, number
        for name in names:
            path, _, function = name.partition('::')
            assert f'def {function}(' in (table.HERE.parent / path).read_text(), name


def test_no_test_of_a_row_is_missed_for_its_form() -> None:
    assert table.unmarked() == []


def test_every_failpoint_is_armed_by_a_test() -> None:
    lines = [line for line in table.page().splitlines() if line.startswith('| `') and line.endswith('| no |')]
    assert lines == []
    assert len(PLACES) >= 20


def test_a_planted_test_is_found_and_a_badly_marked_one_named(tmp_path: Path) -> None:
    (tmp_path / 'test_x.py').write_text(
        'def test_a():\n    """F7: etcd killed. (fake)"""\n'
        'def test_b():\n    """F8 etcd frozen"""\n'
        '@pytest.mark.slow\ndef test_c():\n    """F9: a member\n    lost (libvirt)\n\n    And why."""\n'
    )
    assert [(case.row, case.says, case.where, case.slow) for case in table.cases(tmp_path)] == [
        (7, 'etcd killed', 'fake', False),
        (9, 'a member lost', 'libvirt', True),
    ]
    assert table.unmarked(tmp_path) == ['test_x.py::test_b']
