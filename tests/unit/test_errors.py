"""Clauses that are added to the text of an error."""

from __future__ import annotations

import pytest

from ecomp.errors import put_before_fix


@pytest.mark.parametrize(
    ('message', 'clause', 'expected'),
    [
        ('etcd is away', '; nothing is written', 'etcd is away; nothing is written'),
        ('etcd is full. Fix: compact it', '; nothing is written', 'etcd is full; nothing is written. Fix: compact it'),
        ('a: b. c. Try: d. Fix: e', ' (f)', 'a: b. c (f). Try: d. Fix: e'),
        ('etcd is away', '; x is unknown. Try: again', 'etcd is away; x is unknown. Try: again'),
        ('etcd is full. Fix: compact it', '; x is unknown. Try: again', 'etcd is full; x is unknown. Fix: compact it'),
        ('etcd is full. Fix: compact it', '. Try: again', 'etcd is full. Fix: compact it'),
        ('Fix: is a word', '', 'Fix: is a word'),
    ],
)
def test_clause_is_put_before_the_first_fix(message: str, clause: str, expected: str) -> None:
    assert put_before_fix(message, clause) == expected
