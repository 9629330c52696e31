"""The fault matrix matches the tests, and every row has a test or a reason."""

from __future__ import annotations

import re

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
