"""What was probably meant: the nearest known word, or none."""

from __future__ import annotations

import pytest

from ecomp.model.text import did_you_mean, near

CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'VGPU', 'instances')
NAMES = ('hv12', 'hv3', 'web')


@pytest.mark.parametrize(
    ('word', 'known', 'meant'),
    [
        ('VCPUS', CLASSES, 'VCPU'),
        ('vcpu', CLASSES, 'VCPU'),
        ('INSTANCES', CLASSES, 'instances'),
        ('MEMORY', CLASSES, 'MEMORY_MB'),
        ('DISK', CLASSES, 'DISK_GB'),
        ('NOPE', CLASSES, None),
        ('', CLASSES, None),
        ('VCPU' + 'x' * 10_000, CLASSES, None),
        ('VCPU', (), None),
        # Two letters that changed places.
        *(('wbe', NAMES, 'web'), ('hv9', NAMES, None), ('hv21', NAMES, 'hv12'), ('hvv', NAMES, None)),
        # The opposite is never near; a beginning that was misspelt is none.
        *((word, (opposite,), None) for word, opposite in (
            ('undrain', 'drain'), ('unset', 'set'), ('inactive', 'active'), ('--no-wait', '--wait'),
            ('--dequeue', '--queue'), ('--header', '--no-header'), ('undisable', 'disable'),
        )),
        *((word, ('disable',), 'disable') for word in ('isable', 'desable', 'disabel', 'disables')),
    ],
)
def test_the_nearest_word(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert near(word, known) == meant
    assert did_you_mean(word, known) == (f' (did you mean {meant}?)' if meant else '')
