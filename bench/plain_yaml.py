"""plain-yaml: the command of claim-one with PyYAML as its reader of YAML, against the same with ecomp/yaml_plain.py.

Both sides run in turn, at 10 computes, behind certificates. Each round has its wall time and the processor time of the
command's process. A reader of our own is worth having above 1.08 of the command; else PyYAML reads every file.

    python bench/plain_yaml.py [ROUNDS] [--quick] [--json]       30 rounds
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.claim_one import QUERY
from bench.result import arguments, asked, paired, tell
from bench.secured import secured, timed
from ecomp.yaml_plain import plain

COMPUTES = 10
WORTH = 1.08
"""Times the command that PyYAML's has to take for a reader of our own to be worth having."""
AS_IT_IS = 'from ecomp.schedule import run\nrun()\n'
WITHOUT = f"""from __future__ import annotations
import sys
from types import ModuleType
from typing import NamedTuple
class Node(NamedTuple):
    kind: str
    line: int
    text: str = ''
    items: tuple[Node, ...] = ()
    pairs: tuple[tuple[Node, Node], ...] = ()
sys.modules['ecomp.yaml_plain'] = without = ModuleType('ecomp.yaml_plain')
without.Node, without.plain = Node, lambda text: None
{AS_IT_IS}"""
"""What the same command is if the module goes: its node remains, and nothing is plain."""


class Taken(NamedTuple):
    """Seconds of one command: by the clock, and of the processor."""

    wall: float
    processor: float


def main() -> None:
    """See the module."""
    options = asked(arguments(__doc__, 30))
    with secured(COMPUTES) as there:
        assert plain(there.config.read_text()) is not None, 'no configuration that is plain: nothing to measure'

        def run(code: str) -> Taken:
            command: Sequence[str | Path] = [sys.executable, '-P', '-c', code, '--config', there.config, QUERY]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall = timed(lambda: subprocess.run(command, check=True, capture_output=True))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

        run(WITHOUT), run(AS_IT_IS)  # the first of each reads modules and pages from the disk
        rounds = [(run(WITHOUT), run(AS_IT_IS)) for _ in range(options.rounds)]
    for number, what in enumerate(('wall time', 'processor time')):
        without, ours = ([each[number] for each in side] for side in zip(*rounds, strict=True))
        tell(paired('plain-yaml', f'{COMPUTES} computes, {what}', without, ours, WORTH, at_least=True), options.json)


if __name__ == '__main__':
    main()
