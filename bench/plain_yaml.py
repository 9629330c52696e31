"""plain-yaml: the command of claim-one with PyYAML, against ecomp/yaml_plain.py.

Both run in turn with 10 computes and certificates; each round has the wall time and processor time of the command. The
own reader is worth keeping if PyYAML's command takes more than 1.08 times as long; else PyYAML should read every file.

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
from bench.secured import measure_seconds, start_secured
from ecomp.yaml_plain import parse_plain

COMPUTES = 10
# Minimum ratio of PyYAML's command to ours for the own reader to be worth keeping.
MIN_RATIO = 1.08
COMMAND = 'from ecomp.schedule import run\nrun()\n'
# The command without that module: its Node remains, and no file is plain.
COMMAND_WITHOUT_PLAIN = f"""from __future__ import annotations
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
without.Node, without.parse_plain, without.MAX_DEPTH = Node, lambda text: None, 8
{COMMAND}"""


class CommandTime(NamedTuple):
    """Wall time and processor time of a command, in seconds."""

    wall: float
    processor: float


def main() -> None:
    options = asked(arguments(__doc__, 30))
    with start_secured(COMPUTES) as servers:
        assert parse_plain(servers.config.read_text()) is not None, 'no configuration that is plain: nothing to measure'

        def run(code: str) -> CommandTime:
            command: Sequence[str | Path] = [sys.executable, '-P', '-c', code, '--config', servers.config, QUERY]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall = measure_seconds(lambda: subprocess.run(command, check=True, capture_output=True))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return CommandTime(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

        run(COMMAND_WITHOUT_PLAIN), run(COMMAND)  # the first of each reads modules and pages from the disk
        rounds = [(run(COMMAND_WITHOUT_PLAIN), run(COMMAND)) for _ in range(options.rounds)]
    for number, kind in enumerate(('wall time', 'processor time')):
        without, ours = ([round_[number] for round_ in side] for side in zip(*rounds, strict=True))
        tell(
            paired('plain-yaml', f'{COMPUTES} computes, {kind}', without, ours, MIN_RATIO, at_least=True), options.json
        )


if __name__ == '__main__':
    main()
