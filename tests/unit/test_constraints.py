"""constraints.txt names one version of everything that setup.py asks for, with its hashes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOP = Path(__file__).resolve().parents[2]
PINNED = re.compile(r'^([\w.-]+)==(\S+)(?: ; .*)? \\$')
HASH = re.compile(r'^    --hash=sha256:[0-9a-f]{64}( \\)?$')


def asked_for() -> list[str]:
    """What setup.py asks for where ecomp runs; what only the tests need is not in it."""
    tree = ast.parse((TOP / 'setup.py').read_text())
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    return [*lists['REQUIRES'], *lists['HYPERVISOR'], *lists['ETCD3'], *lists['LAB']]


def pins() -> dict[str, str]:
    """{name: version}; each with a hash."""
    found: dict[str, str] = {}
    hashed: set[str] = set()
    name = ''
    for line in (TOP / 'constraints.txt').read_text().splitlines():
        if line.startswith('#'):
            continue
        if match := PINNED.match(line):
            name = canonicalize_name(match[1])
            assert name not in found, line
            found[name] = match[2]
        else:
            assert HASH.match(line), line
            hashed.add(name)
    assert hashed == found.keys()
    return found


@pytest.mark.parametrize('words', asked_for())
def test_what_is_asked_for_has_one_version(words: str) -> None:
    wanted = Requirement(words)
    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])
