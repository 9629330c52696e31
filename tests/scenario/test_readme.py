"""The commands of the README, the tutorial and the how-tos, in a copy of the repository as a fresh clone has it.

On a machine of their own: a lab of the same name beside it is another one.
A block after `<!-- runs in: … -->` is typed into one shell, page after page, in the clone or in the lab. Of each
command, every line the page shows must be there, in that order. Uuids, addresses, times and sizes may be others; but
what a command of a page names is one and the same thing wherever it stands on that page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.machine import Machine, lacking, machine
from tests.kit.servers import TOP
from tests.kit.tree import copy_tree

BLOCK = re.compile(r'<!-- runs in: (\w+) -->\n```console\n(.*?)```', re.DOTALL)
END = '@@end-of-command@@'
PLACES = {'clone': 'true', 'lab': '. .venv/bin/activate; cd /var/lib/elab/lab'}
"""Where a block is typed, and how one gets there from the clone."""

# What may differ from run to run.
UUID = re.compile(r'[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}')
ADDRESS = re.compile(r'\b10\.\d+\.\d+\.\d+\b|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b')
TIME = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z')
# Where an instance is: spread puts it on any of them.
HOST = re.compile(
    r'\bhv\d(?=:?/| carries it out$| +\d{4}-)|(?<=is on )hv\d|(?<=[0-9a-f]{12} )hv\d$|(?<= on )hv\d$|'
    r'(?<=^host )hv\d$'
)
SHARE = re.compile(r'\b\d+/\d+\b')  # used/free: of a class of a host
WEIGHT = re.compile(r'\b[01]\.\d\d\b')
SHA256 = re.compile(r'\b[0-9a-f]{64}\b')
BAR = re.compile(r'\|[ =]+\|')
AMOUNT = re.compile(
    r'\d+(?:\.\d+)?(?= s\b| MiB\b| running\b| \(free\b| of \d)|(?<=free \d of )\d+|'
    r'\b\d+\.\d+\.\d+(?:-\d+)?-cloud-amd64\b|\bPython 3\.\d+\.\d+'
)


@dataclass
class Step:
    """A command and what the page shows of its output."""

    command: str
    shown: list[str]


@dataclass
class Names:
    """Which real uuid each one stands for that a page's commands name; any other may be any."""

    named: set[str]
    known: dict[str, str] = field(default_factory=dict)

    def into(self, text: str) -> str:
        """The text with every name of the page replaced by the real one."""
        for name, real in self.known.items():
            text = text.replace(name, real)
        return text

    def matches(self, shown: str, real: str) -> bool:
        """Whether a real line is the one shown; names seen for the first time are then known."""
        pattern, groups = '', []
        varying = '|'.join(each.pattern for each in (UUID, ADDRESS, TIME, HOST, SHARE, WEIGHT, SHA256, BAR, AMOUNT))
        for part in re.split(f'({varying})', _plain(shown)):
            if UUID.fullmatch(part) or ADDRESS.fullmatch(part):
                if part in self.known:
                    pattern += re.escape(self.known[part])
                elif part in self.named:
                    groups.append(part)
                    pattern += f'({UUID.pattern})'
                else:
                    pattern += (UUID if UUID.fullmatch(part) else ADDRESS).pattern.join(('(?:', ')'))
            elif TIME.fullmatch(part):
                pattern += TIME.pattern
            elif re.fullmatch(r'hv\d', part):
                pattern += r'hv\d'
            elif alike := [each for each in (SHARE, WEIGHT, SHA256, BAR) if each.fullmatch(part)]:
                pattern += alike[0].pattern
            elif part and AMOUNT.match(part + ' s'):
                pattern += r'[\w.]+(?:[\w.-]| (?=3\.))*'
            else:
                pattern += re.escape(part)
        found = re.fullmatch(pattern, _plain(real))
        if found:
            self.known.update(zip(groups, found.groups(), strict=True))
        return found is not None


def test_the_shell_of_this_test_can_fail() -> None:
    one, other, third = (f'{digit * 8}-2efb-47ba-be1d-7e277a42cde0' for digit in 'abc')
    names = Names({one})
    assert not names.matches(f'OF {one} at 10.1.2.3', f'OF {other}')
    assert names.matches(f'OF {one} at 10.1.2.3', f'OF {other} at 10.9.9.9')
    assert not names.matches(f'OF {one}', f'OF {third}')
    assert names.into(f'x {one}') == f'x {other}'
    assert names.matches(f'OF {third}', f'OF {one}')
    assert names.matches('done in 3.4 s', 'done in 12.0 s')
    assert names.matches('hv1  up  0  0/4  0/8035', 'hv1  up  0  0/16  0/512')
    assert not names.matches('hv1  up  0  0/4', 'hv1  up  0  -')
    assert not names.matches('hv1  up  0  0/4', 'hv1  up  1  0/4')
    assert not names.matches('NO ALLOCATIONS LEFT', 'NOTHING LEFT')
    assert names.matches('console  hv1:/lab/hv1/console', 'console  hv3:/lab/hv3/console')
    assert not names.matches('hv1: lacks X', 'hv2: lacks X')
    assert not names.matches('the nearest miss is hv1', 'the nearest miss is hv2')
    assert names.matches('web1 is on hv1 (there), it weighed 0.75', 'web1 is on hv3 (there), it weighed 1.00')
    assert names.matches('disk 0.023 s |  ===    |', 'disk 1.5 s |=      |')


@pytest.mark.long
def test_the_commands_of_the_pages(copy: Path, own_machine: Machine) -> None:
    shell = subprocess.Popen(
        own_machine.inside(['bash', '--norc'], copy),
        # Compiling what none of the pages imports is most of what installing takes.
        env={**{n: v for n, v in os.environ.items() if n not in ('PYTHONPATH', 'VIRTUAL_ENV')}, 'PIP_NO_COMPILE': '1'},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for page in pages(copy):
            blocks = BLOCK.findall(page.read_text())
            names = Names({name for _, text in blocks for step in steps(text) for name in UUID.findall(step.command)})
            for where, text in blocks:
                run(shell, f'cd {copy}; {PLACES[where]}')
                for step in steps(text):
                    type_it(shell, step, names)
    finally:
        run(shell, f'cd {copy}; ./quickstart.sh down')
        shell.stdin.close()  # type: ignore[union-attr]
        shell.wait(60)
    assert own_machine.run(['ls', '/var/lib/elab']).stdout == ''


def test_a_page_s_block_is_in_a_place_that_there_is() -> None:
    found = {page.name: [where for where, _ in BLOCK.findall(page.read_text())] for page in pages(TOP)}
    assert found['README.md'][0] == 'clone'
    assert {where for each in found.values() for where in each} == set(PLACES)
    assert sum(page.read_text().count('<!-- runs in') for page in pages(TOP)) == sum(map(len, found.values()))


def pages(top: Path) -> list[Path]:
    """The pages whose commands are typed, in that order: the README's make the lab."""
    return [top / 'README.md', top / 'docs/tutorial.md', *sorted((top / 'docs/howto').glob('*.md'))]


@pytest.fixture
def own_machine() -> Iterator[Machine]:
    assert not lacking(), lacking()
    with machine() as made:
        yield made


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """The repository as it stands, without what git ignores: no .venv above all."""
    directory = tmp_path / 'ecomp'
    copy_tree(directory)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def steps(text: str) -> list[Step]:
    """The commands of a console block with their output; `…` stands for lines left out."""
    found: list[Step] = []
    for line in text.splitlines():
        if line.startswith('$ '):
            found.append(Step(line[2:], []))
        elif line.startswith('> '):
            found[-1].command += '\n' + line[2:]
        elif line.strip() not in ('', '…'):
            found[-1].shown.append(line)
    return found


def type_it(shell: subprocess.Popen[str], step: Step, names: Names) -> None:
    """Run a step; every line that the page shows has to be in what it prints."""
    real = run(shell, names.into(step.command))
    lines = iter(real)
    for shown in step.shown:
        assert any(names.matches(shown, line) for line in lines), (
            f'$ {step.command}\nshows\n  {shown}\nbut prints\n  ' + '\n  '.join(real)
        )


def run(shell: subprocess.Popen[str], command: str) -> list[str]:
    """Type a command into the shell; the lines it prints."""
    assert shell.stdin
    assert shell.stdout
    # A command that reads its standard input must not eat the next one.
    shell.stdin.write(f'{{ {command}\n}} </dev/null; echo; echo {END}\n')
    shell.stdin.flush()
    lines: list[str] = []
    for line in shell.stdout:
        if line.strip() == END:
            return lines
        lines.append(line.rstrip('\n'))
    raise AssertionError(f'the shell ended in: {command}\n' + '\n'.join(lines))


def _plain(line: str) -> str:
    """Columns are as wide as their widest cell, which may differ."""
    return ' '.join(line.split())
