"""The inventory of --fake."""

from __future__ import annotations

import pytest

from ecomp.compute_conf import parse_inventory
from ecomp.errors import UsageError


def test_an_inventory_in_one_word() -> None:
    assert parse_inventory('VCPU:4,DISK_GB:10,MEMORY_MB:512') == {'VCPU': 4, 'DISK_GB': 10, 'MEMORY_MB': 512}
    assert parse_inventory(' VCPU:4, DISK_GB: 10 ') == {'VCPU': 4, 'DISK_GB': 10}


@pytest.mark.parametrize(
    'text',
    [
        '',
        ',',
        'VCPU',
        'VCPU:',
        'VCPU:0',
        'VCPU:-1',
        'VCPU:1.5',
        'VCPU:1,',
        'VCPU:1,VCPU:1',
        'vcpu:1',
        'VCPU:²',
        'VCPU:' + '9' * 5000,
        'VCPU=1',
        ':1',
        'VCPU:1:2',
    ],
)
def test_an_inventory_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match='inventory') as caught:
        parse_inventory(text)
    assert '\n' not in str(caught.value)
    assert len(str(caught.value)) < 400
