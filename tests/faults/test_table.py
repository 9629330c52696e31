"""The fault matrix matches the tests, and every row has a test or a reason."""

from __future__ import annotations

import re
from pathlib import Path

from docs import writing
from tests.faults import table


def test_readme_is_up_to_date() -> None:
    instruction = 'make it anew: python -m tests.faults.table > tests/faults/README.md'
    assert (table.HERE / 'README.md').read_text() == table.render_page(), instruction


def test_every_row_has_a_test_or_a_reason() -> None:
    tested = {case.row for case in table.find_cases()}
    assert sorted(set(table.ROWS) - tested - set(table.UNTESTED_ROWS)) == []
    assert tested <= set(table.ROWS)


def test_tests_of_the_rules_exist() -> None:
    page = (table.HERE / table.PROTOCOL_PAGE).read_text()
    assert list(map(writing.make_anchor, re.findall(r'(?m)^## (.*)', page))) == list(table.PROTOCOL_RULES)
    for rule, names in table.PROTOCOL_RULES.items():
        assert names, rule
        for name in names:
            path, _, function = name.partition('::')
            assert f'def {function}(' in (table.HERE.parent / path).read_text(), name


def test_every_row_docstring_is_well_formed() -> None:
    assert table.find_unmarked() == []


def test_planted_tests_are_found_or_reported(tmp_path: Path) -> None:
    (tmp_path / 'test_x.py').write_text(
        'def test_a():\n    """F7: etcd killed. (fake)"""\n'
        'def test_b():\n    """F8 etcd frozen"""\n'
        '@pytest.mark.slow\ndef test_c():\n    """F9, F10: a member\n    lost (libvirt)\n\n    And why."""\n'
    )
    assert [(case.row, case.summary, case.backend, case.slow) for case in table.find_cases(tmp_path)] == [
        (7, 'etcd killed', 'fake', False),
        (9, 'a member lost', 'libvirt', True),
        (10, 'a member lost', 'libvirt', True),
    ]
    assert table.find_unmarked(tmp_path) == ['test_x.py::test_b']
