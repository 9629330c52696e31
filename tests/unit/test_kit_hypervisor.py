"""What a host's log says of tracebacks: those of workers whose ecompute was killed are none of its own."""

from __future__ import annotations

import pytest

from tests.kit.hypervisor import without_stillborn

STILLBORN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main
{between}    exitcode = _main(fd, parent_sentinel)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError: Ran out of input
"""
LINE = '2026-11-24T17:15:38.644+00:00 INFO 23140 compute ec74ac85, state in /x, ecomp 1.0.0\n'
REAL = """\
2026-11-24T17:15:38.556+00:00 ERROR 23140 unexpected error while planning; trying again
Traceback (most recent call last):
  File "planner.py", line 1, in step
KeyError: 'x'
"""


HALF = STILLBORN.format(between=LINE).removesuffix('EOFError: Ran out of input\n')


@pytest.mark.parametrize(
    ('log', 'left'),
    [
        (LINE + STILLBORN.format(between='') + LINE, LINE + LINE),
        (LINE + STILLBORN.format(between=LINE), LINE + LINE),  # the next ecompute logs between its lines
        (REAL, REAL),
        (REAL + STILLBORN.format(between=LINE), REAL + STILLBORN.format(between=LINE)),  # all of it stays
        (HALF, HALF),  # until it is whole
    ],
)
def test_a_workers_whose_ecompute_was_killed_as_it_started_it_is_left_out_and_no_other(log: str, left: str) -> None:
    assert without_stillborn(log) == left
