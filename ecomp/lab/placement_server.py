"""Placement over SQLite, for a lab or a single machine: `python -m ecomp.lab.placement_server ADDRESS PORT`.

The settings come in the environment (`ecomp.lab.control.placement_environment`). Exactly one thread: with more, SQLite
answers "database is locked", and half of all concurrent claims get a 500.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

CONNECTIONS = 2000


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    address, port = argv
    # A directory to be looked in has to have the file, and ours says nothing: all is in the environment.
    Path(os.environ['OS_PLACEMENT_CONFIG_DIR'], 'placement.conf').touch()
    # Imported here: placement reads its environment and makes its tables when this is imported.
    import waitress
    from placement.wsgi import api

    # Each ecompute keeps as many connections as it builds instances; above the limit nobody new is heard. Only poll()
    # takes descriptors from 1024 on.
    limits = {'connection_limit': CONNECTIONS, 'asyncore_use_poll': True}
    waitress.serve(api.application, host=address, port=int(port), threads=1, ident='placement', **limits)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
