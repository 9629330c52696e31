"""ecompute's arguments."""

from __future__ import annotations

import pytest

from ecomp.compute import MOST, parser
from ecomp.errors import UsageError


def test_how_many_are_pretended() -> None:
    assert parser().parse_args([]).count is None
    assert parser().parse_args(['--fake', 'VCPU:1', '--count', '5']).count == 5
    assert parser().parse_args(['--fake', 'VCPU:1', f'--count={MOST}']).count == MOST


@pytest.mark.parametrize('text', ['0', '-1', '+1', '1.5', '', 'x', '²', '٣', str(MOST + 1), '9' * 5000])
def test_what_is_no_number_of_them(text: str) -> None:
    with pytest.raises(UsageError, match='--count') as caught:
        parser().parse_args(['--fake', 'VCPU:1', f'--count={text}'])
    assert '\n' not in str(caught.value)
