"""The commands of README, tutorial and how-tos, typed in a copy of the repository.

They run on machines of their own, so that a lab of the same name on this one is not disturbed. A block after
`<!-- runs in: … -->` is typed into the page's shell, in the clone or in the lab. Every line that the page shows must
appear in the output, in order. Uuids, addresses, times and sizes may differ, but a uuid or address in a command of the
page must stand for the same real one everywhere on that page.

README's commands make the lab. With --all, they also make .venv and the guest's image, as for a newcomer. The other
pages find a lab. What two pages show of a guest needs one that boots. Other commands need only its address.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.capabilities import provide_capabilities
from tests.kit.machine import Machine, explain_missing, start_machine
from tests.kit.qemu_starts import note_qemu_starts
from tests.kit.servers import TOP, make_environment
from tests.kit.tree import copy_tree

BLOCK = re.compile(r'<!-- runs in: (\w+) -->\n```console\n(.*?)```', re.DOTALL)
END_MARKER = '@@end-of-command@@'
# The places where blocks are typed, and the commands that go there from the clone.
COMMAND_BY_PLACE = {
    'clone': 'true',
    'lab': '. .venv/bin/activate; cd /var/lib/elab/lab',
    'fakes': '. .venv/bin/activate; export ECOMP_CONFIG=~/.local/state/elab/fake',
}

# Patterns of what may differ from run to run.
UUID = re.compile(r'[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}')
ADDRESS = re.compile(r'\b10\.\d+\.\d+\.\d+\b|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b')
TIME = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z')
# The host of an instance: spread may choose any of them.
HOST = re.compile(
    r'\bhv\d(?=:?/| carries it out$| +\d{4}-| [0-9a-f]{8}-| - -$)|(?<=is on )hv\d|(?<=[0-9a-f]{12} )hv\d$|'
    r'(?<= on )hv\d$|(?<=[0-9a-f]{12} )hv\d(?= 10\.)|(?<=[0-9a-f]{12} hv2 )hv\d(?= -$)|(?<=evacuated to )(?:hv|fake)\d|'
    r'(?<=active )hv\d$|'
    r'(?<=^host )hv\d$'
)
COMMIT = re.compile(r'\+g[0-9a-f]{8}\b')
SINCE = re.compile(r'\b\d\d:\d\d:\d\d\b')
SHARE = re.compile(r'\b\d+/\d+\b')  # used and capacity of a resource class of a host
WEIGHT = re.compile(r'\b[01]\.\d\d\b')
SHA256 = re.compile(r'\b[0-9a-f]{64}\b')
BAR = re.compile(r'\|[ =]+\|')
AMOUNT = re.compile(
    r'\d+(?:\.\d+)?(?= s\b| MiB\b| running\b| \(free\b| of \d)|(?<=free \d of )\d+|'
    r'\b\d+\.\d+\.\d+(?:-\d+)?-cloud-amd64\b|\bPython 3\.\d+\.\d+'
)


@dataclass
class Step:
    """A command, the lines that the page shows, and whether it shows any output (or `…`)."""

    command: str
    shown: list[str]
    has_output: bool = False


@dataclass
class RealNames:
    """Real uuids of the names in a page's commands: any other uuid matches any uuid."""

    named: set[str]
    real_by_name: dict[str, str] = field(default_factory=dict)

    def replace_names(self, text: str) -> str:
        for name, real in self.real_by_name.items():
            text = text.replace(name, real)
        return text

    def matches(self, shown: str, real: str) -> bool:
        """Return whether a real line matches the shown one, and record new names."""
        pattern, groups = '', []
        varying = (UUID, ADDRESS, TIME, HOST, COMMIT, SINCE, SHARE, WEIGHT, SHA256, BAR, AMOUNT)
        varying_pattern = '|'.join(pattern_type.pattern for pattern_type in varying)
        for part in re.split(f'({varying_pattern})', _collapse_spaces(shown)):
            if UUID.fullmatch(part) or ADDRESS.fullmatch(part):
                if part in self.real_by_name:
                    pattern += re.escape(self.real_by_name[part])
                elif part in self.named:
                    groups.append(part)
                    pattern += f'({UUID.pattern})'
                else:
                    pattern += (UUID if UUID.fullmatch(part) else ADDRESS).pattern.join(('(?:', ')'))
            elif TIME.fullmatch(part):
                pattern += TIME.pattern
            elif found := re.fullmatch(r'(hv|fake)\d', part):
                pattern += rf'{found[1]}\d'
            elif matching := [
                pattern_type
                for pattern_type in (COMMIT, SINCE, SHARE, WEIGHT, SHA256, BAR)
                if pattern_type.fullmatch(part)
            ]:
                pattern += matching[0].pattern
            elif part and AMOUNT.match(part + ' s'):
                pattern += r'[\w.]+(?:[\w.-]| (?=3\.))*'
            else:
                pattern += re.escape(part)
        match = re.fullmatch(pattern, _collapse_spaces(real))
        if match:
            self.real_by_name.update(zip(groups, match.groups(), strict=True))
        return match is not None


HOST_DIED = 'docs/howto/a-host-died.md'


def list_pages() -> list[str]:
    """Return the pages with commands.

    README is the first. The last is typed after the page that leads to it.
    """
    last = ('docs/howto/hosts.md', HOST_DIED)
    paths = [TOP / 'README.md', TOP / 'docs/tutorial.md', *sorted((TOP / 'docs/howto').glob('*.md'))]
    pages = [str(path.relative_to(TOP)) for path in paths if BLOCK.search(path.read_text())]
    return [*(page for page in pages if page not in last), *last]


README, *GUIDES = list_pages()
TUTORIAL = 'docs/tutorial.md'
# Pages whose guest must boot and report; the others need only its address.
BOOTING = (TUTORIAL, 'docs/howto/guests.md')
FAKES = 'docs/howto/fakes.md'
# The pages of the usual run: README and tutorial start enough guests there, and the other one starts none.
USUAL = (TUTORIAL, 'docs/howto/hosts.md')
LAB = '/var/lib/elab/lab'
LAB_IMAGE = f'{LAB}/images/guest.qcow2'


@pytest.mark.long
@pytest.mark.xdist_group('README')
@pytest.mark.parametrize('is_new', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['again', 'new'])
def test_commands_of_the_readme_print_what_is_shown(copy: Path, dhcp_image: Path, is_new: bool) -> None:
    with start_page_machine(is_new) as machine:
        if not is_new:
            provide_venv(copy)
            image = get_path(machine, LAB_IMAGE)
            image.parent.mkdir(parents=True)
            shutil.copy(dhcp_image, image)
        # Compiling modules that no page imports would be most of the installation time.
        type_page(README, machine, copy, dhcp_image, {'PIP_NO_COMPILE': '1'})
        note_qemu_starts(get_path(machine, LAB))
        machine.run(['./quickstart.sh', 'down'], copy)
        assert machine.run(['ls', '/var/lib/elab']).stdout == ''


@pytest.mark.long
@pytest.mark.parametrize(
    'page', [pytest.param(page, marks=[pytest.mark.slow] * (page not in USUAL)) for page in GUIDES]
)
def test_commands_of_a_page_print_what_is_shown(
    machine_with_lab: Machine, page: str, guest_image: Path, dhcp_image: Path, tmp_path: Path
) -> None:
    environment = {'PYTHONPATH': make_environment()['PYTHONPATH']}
    if page == FAKES:  # below the home directory
        environment['HOME'] = str(tmp_path)
    if page == HOST_DIED:  # when a host was seen last is known only if its ecompute ran for a minute
        pid = f'$(cat {LAB}/hv2/state/lock)'
        with open_shell(machine_with_lab, TOP, environment) as shell:
            run_command(shell, f'until [ $(ps -o etimes= -p {pid}) -gt 75 ]; do sleep 1; done')
    try:
        type_page(page, machine_with_lab, TOP, guest_image if page in BOOTING else dhcp_image, environment)
    finally:
        # What a page leaves must not fail the next one.
        with open_shell(machine_with_lab, TOP, environment) as shell:
            run_command(shell, f'{COMMAND_BY_PLACE["lab"]}; eschedule destroy --every --yes --wait')


def test_every_block_runs_in_a_known_place() -> None:
    places = {page: [place for place, _ in BLOCK.findall((TOP / page).read_text())] for page in (README, *GUIDES)}
    assert places[README][0] == 'clone'
    assert {place for each in places.values() for place in each} == set(COMMAND_BY_PLACE)
    texts = [path.read_text() for path in (TOP / README, *(TOP / 'docs').rglob('*.md'))]
    assert sum(text.count('<!-- runs in') for text in texts) == sum(map(len, places.values()))


@contextmanager
def start_page_machine(is_new: bool = False) -> Iterator[Machine]:
    """Start a machine, whose lab need not ask QEMU for its capabilities unless it is new."""
    assert not explain_missing(), explain_missing()
    with start_machine() as machine:
        for host in () if is_new else ('hv1', 'hv2', 'hv3'):
            provide_capabilities(get_path(machine, f'{LAB}/{host}/cache'), 'lab')
        yield machine


def provide_venv(clone: Path) -> None:
    """Make .venv of the one that runs the tests, marked so that quickstart.sh adds nothing."""
    (clone / '.venv').mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != 'installed':
            (clone / '.venv' / part.name).symlink_to(part)
    wanted = subprocess.run(['sha256sum'], input=(clone / 'setup.py').read_bytes(), capture_output=True, check=True)
    (clone / '.venv/installed').write_bytes(wanted.stdout)


def get_path(machine: Machine, path: str) -> Path:
    return Path(f'/proc/{machine.pid}/root{path}')


@pytest.fixture(scope='module')
def machine_with_lab() -> Iterator[Machine]:
    with start_page_machine() as machine:
        result = machine.run(
            ['env', f'PYTHONPATH={make_environment()["PYTHONPATH"]}', sys.executable, '-m', 'ecomp.lab.elab', 'up'], TOP
        )
        assert result.returncode == 0, result
        yield machine
        note_qemu_starts(get_path(machine, LAB))


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """Provide a copy of the repository with one commit, without files that git ignores."""
    directory = tmp_path / 'ecomp'
    copy_tree(directory)
    git = ['git', '-C', str(directory), '-c', 'user.name=x', '-c', 'user.email=x@example.org']
    for words in (['init', '-q'], ['add', '.'], ['commit', '-q', '-m', 'x']):
        subprocess.run([*git, *words], check=True)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def type_page(page: str, machine: Machine, clone: Path, image: Path, environment: Mapping[str, str]) -> None:
    """Type a page's commands and check their output."""
    blocks = BLOCK.findall((TOP / page).read_text())
    names = RealNames({name for _, text in blocks for step in parse_steps(text) for name in UUID.findall(step.command)})
    with open_shell(machine, clone, environment) as shell:
        for place, text in blocks:
            if place == 'lab':
                run_command(shell, f'cmp -s {image} {LAB_IMAGE} || cp {image} {LAB_IMAGE}')
            run_command(shell, f'cd {clone}; {COMMAND_BY_PLACE[place]}')
            for step in parse_steps(text):
                run_step(shell, step, names)


@contextmanager
def open_shell(machine: Machine, directory: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'VIRTUAL_ENV')}
    shell = subprocess.Popen(
        machine.wrap_command(['bash', '--norc'], directory),
        env={**inherited, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert shell.stdin
    try:
        yield shell
    finally:
        shell.stdin.close()
        shell.wait(60)


def parse_steps(text: str) -> list[Step]:
    """Return the commands of a console block with their output, where `…` is omitted lines."""
    parsed: list[Step] = []
    for line in text.splitlines():
        if line.startswith('$ '):
            parsed.append(Step(line[2:], []))
        elif line.startswith('> '):
            parsed[-1].command += '\n' + line[2:]
        elif line.strip():
            parsed[-1].has_output = True
            parsed[-1].shown += [line] if line.strip() != '…' else []
    return parsed


def run_step(shell: subprocess.Popen[str], step: Step, names: RealNames) -> None:
    """Check that a step prints each shown line, and succeeds if it shows no output."""
    otherwise = '' if step.has_output else '|| { echo "its exit code is $?"; exit 1; }'
    real = run_command(shell, names.replace_names(step.command), otherwise)
    lines = iter(real)
    for shown in step.shown:
        assert any(names.matches(shown, line) for line in lines), (
            f'$ {step.command}\nshows\n  {shown}\nbut prints\n  ' + '\n  '.join(real)
        )


def run_command(shell: subprocess.Popen[str], command: str, otherwise: str = '') -> list[str]:
    """Type a command into the shell, then `otherwise`, and return the lines that it prints."""
    assert shell.stdin
    assert shell.stdout
    # A command that reads its standard input must not consume the next one.
    shell.stdin.write(f'{{ {command}\n}} </dev/null {otherwise}; echo; echo {END_MARKER}\n')
    shell.stdin.flush()
    lines: list[str] = []
    for line in shell.stdout:
        if line.strip() == END_MARKER:
            return lines
        lines.append(line.rstrip('\n'))
    raise AssertionError(f'the shell ended in: {command}\n' + '\n'.join(lines))


def _collapse_spaces(line: str) -> str:
    return ' '.join(line.split())  # a column is as wide as its widest cell, which may differ
