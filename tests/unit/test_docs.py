"""The pages: what is made from the code is as the code says, links lead somewhere, and the wheel has the man pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from docs import generate, parts, writing
from tests.kit.servers import TOP
from tests.kit.tree import copy_tree

PAGES = sorted([*TOP.glob('*.md'), *TOP.glob('docs/**/*.md'), TOP / 'bench/README.md', TOP / 'tests/faults/README.md'])


def test_the_reference_and_the_man_pages_are_as_the_code_says() -> None:
    made = generate.generated()
    found = {path: path.read_text() for where in (generate.REFERENCE, generate.MAN) for path in where.iterdir()}
    found[generate.COMMAND_NAMES] = generate.COMMAND_NAMES.read_text()
    assert sorted(found) == sorted(made), 'make them anew: python -m docs.generate'
    assert [path.name for path in made if made[path] != found[path]] == [], 'make them anew: python -m docs.generate'


def test_the_picture_is_as_drawn() -> None:
    assert (TOP / 'docs/parts.svg').read_text() == parts.draw(), 'draw it: python docs/parts.py > docs/parts.svg'


def test_the_readme_is_a_page() -> None:
    assert (TOP / 'README.md').stat().st_size <= 10_000


def test_the_readme_has_the_two_commands_of_a_newcomer() -> None:
    """The first runs the main job. The second passes the tests, and the text below it has its cost."""
    page = (TOP / 'README.md').read_text()
    blocks = re.findall(r'(?ms)^```\w+\n(.*?)^```\n(.*?)(?=^```|\Z)', page)
    commands = [re.sub(r'^\$ |\s+#.*', '', block.splitlines()[0]) for block, _ in blocks]
    assert commands[:2] == ['./quickstart.sh', 'tests/run']
    for part in ('minutes', 'Debian packages', 'root', '`.venv`'):
        assert part in blocks[1][1]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target in re.findall(r'\]\(([^)\s]+)\)', _without_code(page.read_text())):
        if not re.match('https?:', target):
            name, _, section = target.partition('#')
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (section and section not in sections(path)):
                lost.append(target)
    assert lost == []


def sections(page: Path) -> set[str]:
    """What a page's sections can be linked by."""
    return {writing.anchor(title) for title in re.findall(r'(?m)^#+ (.*)', _without_code(page.read_text()))}


def test_a_lost_link_is_found() -> None:
    assert writing.anchor('Networks and addresses: `x`, now') == 'networks-and-addresses-x-now'
    assert 'what-a-guest-may-send' in sections(TOP / 'docs/howto/networks.md')


def test_every_page_is_found_from_the_readme() -> None:
    seen, left = set(), {TOP / 'README.md'}
    while left:
        page = left.pop()
        seen.add(page)
        links = re.findall(r'\]\(([^)\s#]+)', page.read_text())
        left |= {path for each in links if (path := (page.parent / each).resolve()).suffix == '.md'} - seen
    assert [page for page in PAGES if page not in seen and 'docs/README' not in str(page)] == []


def test_what_roff_would_obey_is_text() -> None:
    page = writing.ManPage('x', 1, 'a-b', [writing.Section('S', ['.no `co-de` [here](there)'])], [])
    assert '.SH "S"\n\\&.no \\fBco\\-de\\fR here\n' in writing.roff(page)


def test_the_wheel_has_the_man_pages_and_the_units(tmp_path: Path) -> None:
    copy_tree(tmp_path / 'ecomp')
    names = in_the_wheel(tmp_path / 'ecomp', tmp_path)
    found = {name.partition('share/man/')[2] for name in names} - {''}
    assert found == {f'man{path.suffix[1:]}/{path.name}' for path in generate.MAN.iterdir()}
    units = {'ecomp/units/ecompute.service', 'ecomp/units/ecomp-control.service', 'mdserver/mdserver.service'}
    assert {name for name in names if name.endswith('.service')} == units


def test_a_wheel_leaves_nothing_in_the_clone_and_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    """By `sudo pip install .` what it left was root's, and nobody else could install from that clone."""
    clone = tmp_path / 'ecomp'
    copy_tree(clone)
    (clone / 'ecomp/removed.py').touch()
    before = {path for path in clone.rglob('*') if path.suffix != '.pyc'}
    assert 'ecomp/removed.py' in in_the_wheel(clone, tmp_path)
    assert {path for path in clone.rglob('*') if path.suffix != '.pyc'} == before
    (clone / 'ecomp/removed.py').unlink()
    assert 'ecomp/removed.py' not in in_the_wheel(clone, tmp_path)
    assert list((tmp_path / 'temporary').iterdir()) == []


def in_the_wheel(clone: Path, directory: Path) -> list[str]:
    """The files in the wheel that is made of this clone in this directory, with its `temporary` for temporary files."""
    (directory / 'temporary').mkdir(exist_ok=True)
    build = 'import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])'
    command = [sys.executable, '-c', build, str(directory)]
    told = {**os.environ, 'TMPDIR': str(directory / 'temporary')}
    done = subprocess.run(command, cwd=clone, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(directory.glob('*.whl'))) as wheel:
        return wheel.namelist()


def test_what_real_machines_has_typed_on_a_hypervisor_is_taken_away_again() -> None:
    page, keep = ((TOP / f'docs/howto/{name}.md').read_text() for name in ('real-machines', 'keep-running'))
    typed = '\n'.join(re.findall(r'(?ms)^<!-- typed on: (?:hypervisor|metadata) -->\n```sh\n(.*?)^```', page))
    made = {
        *re.findall(r'tee (\S+)', typed),
        *re.findall(r'python3 -m venv .*?(/\S+)', typed),
        *re.findall(r'dnsmasq:option value=.(.*?)[\'"]/>', typed),
        *(f'systemctl disable --now {unit}' for unit in re.findall(r'systemctl enable --now (\S+)', typed)),
    }
    assert {'/opt/ecomp', 'dhcp-ignore=tag:!known', 'systemctl disable --now mdserver'} <= made
    away = keep.partition('## Take it away')[2].partition('\n## ')[0]
    assert {each for each in made if each not in away} == set()


def test_no_command_is_taken_for_one_of_bash_s_history() -> None:
    """Typed in a terminal, `!word` within double quotes is `event not found`; in a script it is not."""
    found = {}
    for page in PAGES:
        for block in re.findall(r'(?ms)^```sh\n(.*?)^```', page.read_text()):
            # Read (-n), and not run; nor is anything kept.
            bash = ['env', 'HISTFILE=', 'bash', '-n', '-H', '-o', 'history']
            done = subprocess.run(bash, input=block, capture_output=True, text=True, check=False)
            found[block] = done.stderr
    assert len(found) > 10
    assert {block: said for block, said in found.items() if said} == {}


def _without_code(text: str) -> str:
    return re.sub(r'(?ms)^```.*?^```|`[^`\n]*`', '', text)
