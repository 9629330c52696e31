"""What a downloaded file is, found out by a process of its own: `python -m ecomp.agent.images.inspector …`.

Arguments: the file, the process that waits for the answer, and at most how many seconds of processor and bytes of
address space it takes. The answer is a JSON object on stdout: `format` and `virtual_size`, or the `reason` against it.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from ecomp.agent.parent import die_with
from ecomp.errors import BuildFailed
from ecomp.virt.image import inspect


def main(arguments: Sequence[str]) -> None:
    """Print what the file is, within the limits that the arguments name."""
    path, (parent, seconds, memory) = arguments[0], map(int, arguments[1:])
    die_with(parent)
    # The soft limit ends it with SIGXCPU, by which whoever waits knows the reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = inspect(Path(path))
        answer: dict[str, object] = {'format': found.format, 'virtual_size': found.virtual_size}
    except BuildFailed as error:
        answer = {'reason': error.reason}
    except MemoryError:
        answer = {'reason': f'the image takes more than {memory // 2**20} MiB of memory to be looked at'}
    print(json.dumps(answer))


if __name__ == '__main__':
    main(sys.argv[1:])
