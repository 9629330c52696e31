"""Rules that a machine can check: imports between layers, linters, pinned versions."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.rooms import (
    ALLOWED_IMPORTS,
    EXEC_MODULES,
    EXIT_CALLS,
    EXIT_MODULES,
    FRONT_DOORS,
    HIDDEN_IMPORTS,
    IMPURE_CALLS,
    IMPURE_IMPORTS,
    LIBRARY_PLACES,
    PURE_MODULES,
    SHELL_CALLS,
    WALL_CLOCK_MODULES,
)

TOP = Path(__file__).resolve().parents[2]


# The tests that parse all modules run in one process, which parses each once.
parses_modules = pytest.mark.xdist_group('parsed modules')
parse_source = functools.cache(ast.parse)


@functools.cache
def read_modules() -> dict[str, str]:
    """Return each product module's source by its full name, a package's by `name.__init__`."""
    sources = {}
    for root, name in ((TOP, 'ecomp'), (TOP / 'md_server', 'mdserver')):
        for path in sorted((root / name).rglob('*.py')):
            sources['.'.join(path.relative_to(root).with_suffix('').parts)] = path.read_text()
    return sources


def is_within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f'{layer}.')


def find_layer(module: str, layers: Mapping[str, object] = ALLOWED_IMPORTS) -> str:
    return max((room for room in layers if is_within(module, room)), key=len, default='')


def iterate_imports(module: str, tree: ast.Module, modules: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                base = '.'.join([*module.split('.')[: -node.level], *([base] if base else [])])
            for alias in node.names:
                deeper = f'{base}.{alias.name}'
                is_module = deeper in modules or f'{deeper}.__init__' in modules or deeper in ALLOWED_IMPORTS
                yield node.lineno, deeper if is_module else base


def format_dotted(node: ast.AST) -> str:
    """Return `a.b.c` as text, or the last two parts of a longer expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f'{format_dotted(node.value).rpartition(".")[2]}.{node.attr}'
    return ''


def find_wrong_imports(modules: Mapping[str, str]) -> list[str]:
    problems = []
    for name, source in modules.items():
        module, room = name.removesuffix('.__init__'), find_layer(name.removesuffix('.__init__'))
        for line, other in iterate_imports(name, parse_source(source), modules):
            top = other.partition('.')[0]
            if top in ('ecomp', 'mdserver'):
                other_layer = find_layer(other)
                if any(is_within(other, door) for door in FRONT_DOORS - {module}):
                    problems.append(f'{module}:{line}: imports the front door {other}')
                elif other_layer != room and other_layer not in ALLOWED_IMPORTS.get(room, set()):
                    problems.append(f'{module}:{line}: {room or "no room"} must not import {other}')
            elif top in LIBRARY_PLACES and not any(is_within(module, place) for place in LIBRARY_PLACES[top]):
                problems.append(
                    f'{module}:{line}: {top} is imported in {sorted(LIBRARY_PLACES[top]) or "no module"} only'
                )
            elif top in IMPURE_IMPORTS and any(is_within(module, place) for place in PURE_MODULES):
                problems.append(f'{module}:{line}: is pure, so without {top}')
            elif top not in sys.stdlib_module_names and top not in LIBRARY_PLACES:
                problems.append(f'{module}:{line}: {top} has no place in the house yet; give it one in PLACES')
    return problems


def find_wrong_calls(modules: Mapping[str, str]) -> list[str]:
    problems = []
    for name, source in modules.items():
        module = name.removesuffix('.__init__')
        pure = any(is_within(module, place) for place in PURE_MODULES)
        for node in ast.walk(parse_source(source)):
            line = getattr(node, 'lineno', 0)
            if isinstance(node, ast.Global):
                problems.append(f'{module}:{line}: no globals')
            if isinstance(node, ast.keyword) and node.arg == 'shell':
                problems.append(f'{module}:{line}: no shell=')
            if isinstance(node, ast.ImportFrom) and node.module == 'time' and {a.name for a in node.names} & {'time'}:
                problems.append(f'{module}:{line}: import time and say time.monotonic()')
            if not isinstance(node, ast.Attribute | ast.Name):
                continue
            symbol = format_dotted(node)
            if (
                symbol in EXIT_CALLS
                and module not in FRONT_DOORS
                and not (symbol == 'os._exit' and module in EXIT_MODULES)
            ):
                problems.append(f'{module}:{line}: {symbol} belongs in a front door')
            is_exec = symbol == 'os.execvp' and module in EXEC_MODULES
            if (symbol in SHELL_CALLS and not is_exec) or symbol in HIDDEN_IMPORTS:
                problems.append(f'{module}:{line}: no {symbol}')
            if symbol in ('time.time', 'time.time_ns') and module not in WALL_CLOCK_MODULES:
                problems.append(f'{module}:{line}: {symbol} jumps when the clock is set; a timer is time.monotonic')
            if pure and (symbol in IMPURE_CALLS or (symbol.startswith('random.') and symbol != 'random.Random')):
                problems.append(f'{module}:{line}: is pure, so {symbol} is an argument')
    return problems


def find_telegrams(modules: Mapping[str, str]) -> list[str]:
    """Return the docstrings of functions whose first line is too long or joins sentences."""
    functions = (each for each in iterate_nodes(modules) if isinstance(each[1], ast.FunctionDef))
    first_lines = ((name, node, (ast.get_docstring(node) or '').partition('\n')[0]) for name, node in functions)
    return [f'{name}:{node.lineno}: {line}' for name, node, line in first_lines if len(line) > 90 or ';' in line]


def iterate_nodes(modules: Mapping[str, str]) -> Iterator[tuple[str, ast.AST]]:
    return ((name, node) for name, source in modules.items() for node in ast.walk(parse_source(source)))


def find_circles(modules: Mapping[str, str]) -> list[str]:
    """Return the first circle of imports between a package's modules, also inside functions."""
    graph = {
        name: {
            other
            for _, other in iterate_imports(name, parse_source(source), modules)
            if other in modules and other != name and other.rpartition('.')[0] == name.rpartition('.')[0]
        }
        for name, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [' imports '.join(error.args[1])]
    return []


Rule = Callable[[Mapping[str, str]], list[str]]
RULES: list[Rule] = [find_wrong_imports, find_wrong_calls, find_telegrams, find_circles]


@parses_modules
@pytest.mark.parametrize('rule', RULES)
def test_product_follows_the_rule(rule: Rule) -> None:
    assert rule(read_modules()) == []


def test_every_module_has_a_layer_and_every_layer_exists() -> None:
    modules = [name.removesuffix('.__init__') for name in read_modules()]
    assert [name for name in modules if name != 'ecomp' and find_layer(name) in ('', 'ecomp')] == []
    rooms = {*ALLOWED_IMPORTS, *PURE_MODULES, *FRONT_DOORS, *WALL_CLOCK_MODULES, *EXIT_MODULES, *EXEC_MODULES}
    assert [room for room in rooms if room not in modules] == []


# Each issue that shrinks the product lowers this number. Only an issue with a budget raises it, by that budget.
MAX_PRODUCT_LINES = 41_244


def test_product_keeps_to_its_budget_of_lines() -> None:
    lines = sum(len(source.splitlines()) for source in read_modules().values())
    assert lines <= MAX_PRODUCT_LINES, 'remove as many lines as you add, or ask for a budget'


@parses_modules
def test_pure_modules_are_exactly_those_documented_as_pure() -> None:
    docs = {
        name.removesuffix('.__init__'): ast.get_docstring(parse_source(text)) for name, text in read_modules().items()
    }
    pure = {module for module, doc in docs.items() if re.search(r'\bpure\b(?!-)', doc or '', re.IGNORECASE)}
    assert [module for module in sorted(pure) if not any(is_within(module, room) for room in PURE_MODULES)] == []
    assert sorted(PURE_MODULES - pure) == []


def test_pure_modules_load_no_client_library() -> None:
    modules = sorted(
        name.removesuffix('.__init__') for name in read_modules() if any(is_within(name, p) for p in PURE_MODULES)
    )
    code = f'import sys, {", ".join(modules)}; print(*sys.modules)'
    process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=TOP)
    forbidden = {'ecomp.store.client', 'ecomp.placement.client', 'ecomp.virt.connection', 'requests', 'h2', 'libvirt'}
    assert set(process.stdout.split()) & forbidden == set()


def test_no_module_has_a_meaningless_name() -> None:
    names = {name.rpartition('.')[2] for name in read_modules()}
    assert names & {'utils', 'util', 'manager', 'helpers', 'helper', 'misc', 'common', 'base'} == set()


# Modules that violate a rule: a rule that cannot fail checks nothing.
VIOLATIONS = [
    ('ecomp.model.x', 'import ecomp.placement.client'),
    ('ecomp.model.x', 'import os'),
    ('ecomp.model.x', 'from datetime import datetime\nnow = datetime.now()'),
    ('ecomp.model.x', 'import random\ndef pick(of): return random.choice(of)'),
    ('ecomp.placement.x', 'from ecomp.store.client import Store'),
    ('ecomp.virt.__init__', 'from ..agent import plan'),
    ('ecomp.virt.x', 'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ecomp.agent.compute import Daemon'),
    ('ecomp.scheduler.x', 'import psutil'),
    ('ecomp.agent.x', 'from etcd3 import etcdrpc'),
    ('ecomp.agent.x', 'from ecomp.compute import main'),
    ('ecomp.agent.x', 'import somebody_elses'),
    ('ecomp.agent.x', 'import importlib\nimportlib.import_module("libvirt")'),
    ('mdserver.x', 'import ecomp.errors'),
    ('ecomp.agent.x', 'import sys\ndef stop(): sys.exit(1)'),
    ('ecomp.agent.x', 'print("hello")'),
    ('ecomp.agent.x', 'import os\nos.system("ls")'),
    ('ecomp.lab.x', 'import subprocess\nsubprocess.run("ls", shell=True)'),
    ('ecomp.agent.x', 'import time\nlate = time.time() + 5'),
    ('ecomp.agent.x', 'from time import time'),
    ('ecomp.agent.x', 'count = 0\ndef more():\n    global count\n    count += 1'),
    ('ecomp.agent.x', 'def wait(): "Wait; return whether it is there."'),
    ('ecomp.agent.x', f'def wait(): "{"Wait " * 18} ."'),
]


@pytest.mark.parametrize(('module', 'source'), VIOLATIONS)
def test_violation_is_found(module: str, source: str) -> None:
    assert [line for rule in RULES for line in rule({module: source})]


def test_circle_in_a_package_is_found() -> None:
    sources = {'ecomp.cli.a': 'def run():\n    from ecomp.cli.b import run', 'ecomp.cli.b': 'import ecomp.cli.a'}
    assert find_circles({**sources, 'ecomp.cli.c': 'import ecomp.cli.b'}) != []
    assert find_circles({**sources, 'ecomp.cli.b': ''}) == []


# Failpoints


def list_failpoints(modules: Mapping[str, str]) -> list[str]:
    return [
        node.args[0].value
        for _, node in iterate_nodes(modules)
        if isinstance(node, ast.Call)
        and format_dotted(node.func) == 'failpoint'
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


@parses_modules
def test_every_failpoint_is_used_once_and_described() -> None:
    from ecomp.failpoints import FAILPOINT_STATES

    assert sorted(list_failpoints(read_modules())) == sorted(FAILPOINT_STATES)


# Imports between tests: shared helpers are in tests/kit, and no module imports a test module.


def read_test_modules() -> dict[str, str]:
    paths = [path for folder in ('tests', 'bench') for path in sorted((TOP / folder).rglob('*.py'))]
    return {'.'.join(path.relative_to(TOP).with_suffix('').parts): path.read_text() for path in paths}


# To parse all tests for their imports takes seconds.
TEST_IMPORT = re.compile(r'^[ \t]*(from tests[\w.]* import (?:\([^)]*\)|[^\n]+)|import tests[^\n]*)', re.MULTILINE)


def iterate_test_imports(source: str) -> Iterator[str]:
    for statement in TEST_IMPORT.findall(source):
        (node,) = ast.parse(statement).body
        if isinstance(node, ast.ImportFrom):
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def find_wrong_test_imports(modules: Mapping[str, str]) -> list[str]:
    """A module may import itself: code that a test passes to a child process does that."""
    problems = []
    for name, source in modules.items():
        folder = name.rpartition('.')[0]
        for other in iterate_test_imports(source):
            top, _, rest = other.partition('.')
            if top != 'tests' or other.startswith(f'{name}.') or other == name:
                continue
            other_folder = '.'.join(['tests', rest.split('.')[0]])
            of_a_test = any(part.startswith('test_') for part in other.split('.')[:3])
            if of_a_test or other_folder not in ('tests.kit', folder):
                problems.append(f'{name} imports {other}')
    return problems


def test_no_module_imports_tests_or_helpers_of_another_folder() -> None:
    assert find_wrong_test_imports(read_test_modules()) == []


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('tests.faults.test_x', 'from tests.faults.test_y import claim'),
        ('tests.faults.test_x', 'from tests.scenario.story import place'),
        ('bench.x', 'def late():\n    from tests.faults.islands import Island'),
    ],
)
def test_forbidden_import_among_tests_is_found(module: str, source: str) -> None:
    assert find_wrong_test_imports({module: source})


# Linters: ruff, bandit's rules for the product, mypy, and bash -n for each script.


def run_linter(*command: str) -> None:
    process = subprocess.run([sys.executable, '-m', *command], cwd=TOP, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.fail(f'{" ".join(command)}\n{process.stdout}{process.stderr}', pytrace=False)


def test_ruff() -> None:
    trees = [name for name in ('ecomp', 'md_server', 'tests', 'bench', 'docs', 'setup.py') if (TOP / name).exists()]
    run_linter('ruff', 'check', '--config=pyproject.toml', *trees)


# bandit's rules in ruff that are ignored for the product, with the reason.
IGNORED_BANDIT_RULES = {
    'S101': 'an assert tells mypy what holds; what comes from outside is checked by its reader',
    'S103': 'the mode of /dev/kvm in a host of a lab, which its QEMU has to open',
    'S104': 'compared with, and written into filters; nothing binds to it',
    'S310': 'the URLs are of a lab, and made by it',
    'S311': 'what is left to chance is who waits how long; tokens and uuids come from the system',
    'S314': "the XML is libvirt's, which a guest does not write",
    'S603': 'lists of words, never a shell (see SHELLS in rooms.py)',
    'S606': 'the same',
}


def test_bandit() -> None:
    skip = f'--ignore={",".join(IGNORED_BANDIT_RULES)}'
    run_linter(
        'ruff', 'check', '--isolated', '--target-version=py311', '--select=S', skip, 'ecomp', 'md_server', 'setup.py'
    )  # fmt: skip


def test_modules_have_docstrings() -> None:
    run_linter('ruff', 'check', '--isolated', '--select=D100,D104', 'ecomp', 'md_server')


def test_mypy() -> None:
    run_linter('mypy', '--config-file=pyproject.toml', 'ecomp', 'md_server/mdserver')


def test_shell_scripts_parse() -> None:
    scripts = [*(TOP / name for name in ('tests/run', '.ci/run', 'bench/run', 'packaging/build')), *TOP.glob('*.sh')]
    for script in scripts:
        process = subprocess.run(['bash', '-n', str(script)], capture_output=True, text=True, check=False)
        assert (process.returncode, process.stderr) == (0, ''), script
        assert os.access(script, os.X_OK), f'{script} is not executable'


# constraints.txt pins one version of each requirement of setup.py, with hashes.


PINNED = re.compile(r'^([\w.-]+)==(\S+)(?: ; .*)? \\$')
HASH = re.compile(r'^    --hash=sha256:[0-9a-f]{64}( \\)?$')


def list_requirements() -> list[str]:
    tree = ast.parse((TOP / 'setup.py').read_text())
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    return [*lists['REQUIRES'], *lists['HYPERVISOR'], *lists['ETCD3'], *lists['LAB']]


def read_pins() -> dict[str, str]:
    """Return {name: pinned version}, and check that each has a hash."""
    versions: dict[str, str] = {}
    hashed: set[str] = set()
    name = ''
    for line in (TOP / 'constraints.txt').read_text().splitlines():
        if line.startswith('#'):
            continue
        if match := PINNED.match(line):
            name = canonicalize_name(match[1])
            assert name not in versions, line
            versions[name] = match[2]
        else:
            assert HASH.match(line), line
            hashed.add(name)
    assert hashed == versions.keys()
    return versions


def test_each_requirement_is_pinned_to_a_matching_version() -> None:
    pins = read_pins()
    for requirement in map(Requirement, list_requirements()):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
