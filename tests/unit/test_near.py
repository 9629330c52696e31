"""What was probably meant: the nearest known word, or none."""

from __future__ import annotations

import pytest

from ecomp.model.text import did_you_mean, near

CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'VGPU', 'instances')


@pytest.mark.parametrize(
    ('word', 'meant'),
    [
        ('VCPUS', 'VCPU'),
        ('vcpu', 'VCPU'),
        ('INSTANCES', 'instances'),
        ('MEMORY', 'MEMORY_MB'),
        ('DISK', 'DISK_GB'),
        ('NOPE', None),
        ('', None),
        ('VCPU' + 'x' * 10_000, None),
    ],
)
def test_the_nearest_word(word: str, meant: str | None) -> None:
    assert near(word, CLASSES) == meant
    assert did_you_mean(word, CLASSES) == (f' (did you mean {meant}?)' if meant else '')


@pytest.mark.parametrize(('word', 'meant'), [('wbe', 'web'), ('hv9', None), ('hv21', 'hv12'), ('hvv', None)])
def test_two_letters_that_changed_places(word: str, meant: str | None) -> None:
    assert near(word, ['hv12', 'hv3', 'web']) == meant


def test_nothing_is_near_to_nothing() -> None:
    assert near('VCPU', []) is None


@pytest.mark.parametrize(('word', 'opposite'), [('undrain', 'drain'), ('unset', 'set'), ('inactive', 'active'),
                                                ('--no-wait', '--wait'), ('--dequeue', '--queue'),
                                                ('--header', '--no-header'), ('undisable', 'disable')])  # fmt: skip
def test_the_opposite_is_never_near(word: str, opposite: str) -> None:
    assert near(word, [opposite]) is None


@pytest.mark.parametrize('word', ['isable', 'desable', 'disabel', 'disables'])
def test_a_beginning_that_was_misspelt_is_no_opposite(word: str) -> None:
    assert near(word, ['disable']) == 'disable'
