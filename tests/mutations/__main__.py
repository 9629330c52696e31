"""`python -m tests.mutations`: make each mistake in a copy of the tree, and test it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.kit.tree import copy_tree
from tests.mutations.rows import ROWS
from tests.mutations.trial import make_mistake, run_tests


def main(arguments: Sequence[str]) -> int:
    """Try the rows, one after the other. Return 1 if tests of one do not find it, else 0."""
    parser = argparse.ArgumentParser(prog='tests.mutations', description='Try whether the tests find each mistake.')
    parser.add_argument('--only', metavar='TEXT', default='', help='only rows whose description or file has this text')
    parser.add_argument('--unchanged', action='store_true', help='run the tests without the mistakes: all must pass')
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.only in row.description or options.only in row.file]
    wrong, untested, total_seconds = 0, 0, 0.0
    with tempfile.TemporaryDirectory(prefix='ecomp-mutations-') as directory:
        tree = Path(directory)
        tree.chmod(0o755)  # as a clone is: some processes give up root's rights
        copy_tree(tree)
        for row in rows:
            if not row.tests:
                untested += 1
                print(f'NO TEST              {row.description}: {row.note}', flush=True)
                continue
            with nullcontext() if options.unchanged else make_mistake(row, tree):
                trial = run_tests(row, tree)
            total_seconds += trial.seconds
            wrong += trial.has_failed == options.unchanged
            verdict = 'found' if trial.has_failed else 'passed' if options.unchanged else 'NOT FOUND'
            print(f'{verdict:9} {trial.seconds:7.1f} s  {row.description}  {trial.failure}', flush=True)
    tested = len(rows) - untested
    result = 'fail without a mistake' if options.unchanged else 'not found by their tests'
    print(f'{tested} mistakes in {total_seconds:.0f} s: {wrong} {result}; {untested} more without tests')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
