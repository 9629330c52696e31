"""The documentation: generated pages are current, links resolve, the wheel is complete."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from docs import dashboard, generate, parts, writing
from ecomp.model.host import CLOSED, DISABLED, ORPHANED, SILENT, UP
from ecomp.model.states import ACTIVE, ERROR, GONE, SHOWN_STATES
from ecomp.virt.xml import RESERVED_ONLY_OPTION
from tests.kit.servers import TOP
from tests.kit.tree import copy_tree
from tests.kit.wheels import build_wheel

PAGES = sorted([*TOP.glob('*.md'), *TOP.glob('docs/**/*.md'), TOP / 'bench/README.md', TOP / 'tests/faults/README.md'])
UUID = '[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}'
# In the dashboard.
GREEN, RED = '#3d7f4f', '#c8442f'


def test_reference_and_man_pages_are_current() -> None:
    new = generate.generate_files()
    old = {path: path.read_text() for folder in (generate.REFERENCE, generate.MAN) for path in folder.iterdir()}
    old |= {path: path.read_text() for path in (generate.COMMAND_NAMES, generate.FULL_HELP)}
    assert sorted(old) == sorted(new), 'make them anew: python -m docs.generate'
    assert [path.name for path in new if new[path] != old[path]] == [], 'make them anew: python -m docs.generate'


def test_picture_of_the_parts_is_current() -> None:
    assert (TOP / 'docs/parts.svg').read_text() == parts.draw(), 'draw it: python docs/parts.py > docs/parts.svg'


def test_picture_of_the_dashboard_has_its_panels_and_expressions() -> None:
    picture = (TOP / 'docs/howto/dashboard.svg').read_text()
    cure = 'draw it: ECOMP_DASHBOARD=write pytest tests/scenario/test_monitoring.py'
    assert f'<desc>{dashboard.describe_panels(dashboard.load_panels())}</desc>' in picture, cure


@pytest.mark.parametrize(
    ('title', 'states', 'good', 'bad'),
    [
        ('Hosts by state', {UP, DISABLED, CLOSED, SILENT, ORPHANED}, UP, SILENT),
        ('Instances by state', SHOWN_STATES - {GONE}, ACTIVE, ERROR),
    ],
)
def test_dashboard_draws_good_states_green_and_bad_ones_red(
    title: str, states: frozenset[str], good: str, bad: str
) -> None:
    [panel] = [each for each in dashboard.load_panels() if each['title'] == title]
    colours = dashboard.read_colours(panel)
    assert colours.keys() == states
    assert len(set(colours.values())) == len(states)
    assert (colours[good], colours[bad]) == (GREEN, RED)
    picture = (TOP / 'docs/howto/dashboard.svg').read_text().partition(f'>{title}</text>')[2].partition('</g>')[0]
    assert {state: colours[state] for state in (good, bad)}.items() <= read_legend(picture).items()
    series = [dashboard.Series(state, {0.0: 1.0}) for state in sorted(states)[::-1]]
    drawn = dashboard.draw([dashboard.Panel(title, 'short', panel['gridPos'], True, {'x': series}, colours)], 60.0)
    assert read_legend(drawn) == colours


def read_legend(picture: str) -> dict[str, str]:
    entries = re.findall(r'height="3" fill="(#\w+)"/>\s*<text[^>]*>([^<]*)', picture)
    return {text: colour for colour, text in entries}


def test_readme_is_at_most_7_kb_and_starts_with_the_quickstart() -> None:
    page = (TOP / 'README.md').read_bytes()
    assert len(page) <= 7_000
    assert page.partition(b'```console\n')[2].startswith(b'$ ./quickstart.sh\n')


def test_contributing_says_what_a_run_of_the_tests_needs() -> None:
    section = (TOP / 'CONTRIBUTING.md').read_text().partition('## Run the tests\n')[2].partition('\n## ')[0]
    for part in ('tests/run ', 'minutes', 'Debian packages', 'root', '`.venv`'):
        assert part in section


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_every_link_resolves(page: Path) -> None:
    broken = []
    for target in re.findall(r'\]\(([^)\s]+)\)', _strip_code(page.read_text())):
        if not re.match('https?:', target):
            name, _, section = target.partition('#')
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (section and section not in read_anchors(path)):
                broken.append(target)
    assert broken == []


def read_anchors(page: Path) -> set[str]:
    return {writing.make_anchor(title) for title in re.findall(r'(?m)^#+ (.*)', _strip_code(page.read_text()))}


def test_anchors_of_sections_are_computed() -> None:
    assert writing.make_anchor('Networks and addresses: `x`, now') == 'networks-and-addresses-x-now'
    assert 'what-a-guest-may-send' in read_anchors(TOP / 'docs/howto/networks.md')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_an_instance_has_one_address_on_a_page(page: Path) -> None:
    """What a page shows is the output of one run."""
    addresses: dict[str, set[str]] = {}
    for line in page.read_text().splitlines():
        uuids, found = re.findall(UUID, line), re.findall(r'\b10(?:\.\d+){3}\b', line)
        if len(uuids) == len(found) == 1:
            addresses.setdefault(uuids[0], set()).add(found[0])
    assert {uuid: several for uuid, several in addresses.items() if len(several) > 1} == {}


def test_every_page_is_linked_from_the_readme() -> None:
    visited, pending = set(), {TOP / 'README.md'}
    while pending:
        page = pending.pop()
        visited.add(page)
        links = re.findall(r'\]\(([^)\s#]+)', page.read_text())
        pending |= {path for link in links if (path := (page.parent / link).resolve()).suffix == '.md'} - visited
    assert [page for page in PAGES if page not in visited and 'docs/README' not in str(page)] == []


@pytest.mark.parametrize(
    ('text', 'errors'),
    [
        ('# nothing is released (rule: read-back)', []),
        ('(rules: read-back,\n    # claim-stays)', []),
        ('(rule: [read-back](protocol.md#read-back))', []),
        ('(rule: read-forth)', ['read-forth']),
        ('(rule read-back)', ['(rule read-back)']),
        ('(rules: read-back; claim-stays)', ['(rules: read-back; claim-stays)']),
        ('closed by rule 7, and Rules 10 and 13', ['rule 7', 'Rules 10']),
        ('(RELIABILITY.md 1.7)', ['RELIABILITY.md']),
    ],
)
def test_wrong_citation_of_a_rule_is_found(text: str, errors: list[str]) -> None:
    assert find_wrong_citations(text) == errors


def test_rules_of_the_protocol_are_cited_by_their_names() -> None:
    """docs/explanation/protocol.md has a section for each rule, which code and tests cite."""
    folders = ('ecomp', 'md_server', 'tests', 'bench', 'docs')
    sources = [path for folder in folders for path in (TOP / folder).rglob('*.py') if path != Path(__file__)]
    wrong = {path: errors for path in (*sources, *PAGES) if (errors := find_wrong_citations(path.read_text()))}
    assert wrong == {}
    cited = {rule for path in sources for rule in read_citations(path.read_text())[0]}
    assert read_rules() - cited == set(), 'rules that neither the code nor a test cites'


def read_rules() -> set[str]:
    titles = re.findall(r'(?m)^## (.*)', (TOP / 'docs/explanation/protocol.md').read_text())
    return {writing.make_anchor(title) for title in titles}


def find_wrong_citations(text: str) -> list[str]:
    names, malformed = read_citations(text)
    numbered = re.findall(r'\b[Rr]ules? \d+|RELIABILITY\.md', text)
    return [*(name for name in names if name not in read_rules()), *malformed, *numbered]


def read_citations(text: str) -> tuple[list[str], list[str]]:
    """Return the rules that a text cites, also in wrapped lines, and its malformed citations."""
    unwrapped = re.sub(r'\s*\n\s*(?:# )?', ' ', re.sub(r'\[([a-z-]+)\]\([^)]*protocol\.md[^)]*\)', r'\1', text))
    names, malformed = [], []
    for citation in re.findall(r'\(rules?\b:? [a-z]+-[^)]*\)', unwrapped):
        if match := re.fullmatch(r'\(rules?: ([a-z-]+(?:, [a-z-]+)*)\)', citation):
            names += match[1].split(', ')
        else:
            malformed.append(citation)
    return names, malformed


def test_roff_escapes_control_characters() -> None:
    page = writing.ManPage('x', 1, 'a-b', [writing.Section('S', ['.no `co-de` [here](there)'])], [])
    assert '.SH "S"\n\\&.no \\fBco\\-de\\fR here\n' in writing.render_man_page(page)


@pytest.mark.long
def test_wheel_contains_the_man_pages_and_units(tmp_path: Path) -> None:
    copy_tree(tmp_path / 'ecomp')
    names = list_wheel(tmp_path / 'ecomp', tmp_path)
    man_pages = {name.partition('share/man/')[2] for name in names} - {''}
    assert man_pages == {f'man{path.suffix[1:]}/{path.name}' for path in generate.MAN.iterdir()}
    units = {'ecomp/units/ecompute.service', 'ecomp/units/ecomp-control.service', 'mdserver/mdserver.service'}
    assert {name for name in names if name.endswith('.service')} == units
    assert {'ecomp/cli/help.txt', 'ecomp/ui/page.html'} <= set(names)


@pytest.mark.long
def test_wheel_build_leaves_no_files_and_reuses_none(tmp_path: Path) -> None:
    """Files left by `sudo pip install .` would make another user's install fail."""
    clone = tmp_path / 'ecomp'
    copy_tree(clone)
    (clone / 'ecomp/removed.py').touch()
    before = {path for path in clone.rglob('*') if path.suffix != '.pyc'}
    assert 'ecomp/removed.py' in list_wheel(clone, tmp_path)
    assert {path for path in clone.rglob('*') if path.suffix != '.pyc'} == before
    (clone / 'ecomp/removed.py').unlink()
    assert 'ecomp/removed.py' not in list_wheel(clone, tmp_path)
    assert list((tmp_path / 'temporary').iterdir()) == []


def list_wheel(clone: Path, directory: Path) -> list[str]:
    with zipfile.ZipFile(build_wheel(clone, directory)) as wheel:
        return wheel.namelist()


def test_setup_of_a_hypervisor_is_undone_by_keep_running() -> None:
    page, keep = ((TOP / f'docs/howto/{name}.md').read_text() for name in ('real-machines', 'keep-running'))
    commands = '\n'.join(re.findall(r'(?ms)^<!-- typed on: (?:hypervisor|metadata) -->\n```sh\n(.*?)^```', page))
    changes = {
        *re.findall(r'tee (\S+)', commands),
        *re.findall(r'python3 -m venv .*?(/\S+)', commands),
        *(RESERVED_ONLY_OPTION for _ in re.findall('ecompute .*--close-dhcp', commands)),
        *(f'systemctl disable --now {unit}' for unit in re.findall(r'systemctl enable --now (\S+)', commands)),
    }
    assert {'/opt/ecomp', RESERVED_ONLY_OPTION, 'systemctl disable --now mdserver'} <= changes
    removal = keep.partition('## Take it away')[2].partition('\n## ')[0]
    assert {change for change in changes if change not in removal} == set()


def test_no_command_triggers_bash_history_expansion() -> None:
    """In a terminal, unlike in a script, `!word` in double quotes is `event not found`."""
    errors = {}
    for page in PAGES:
        for block in re.findall(r'(?ms)^```sh\n(.*?)^```', page.read_text()):
            # -n: parse the commands only. HISTFILE=: write no history.
            bash = ['env', 'HISTFILE=', 'bash', '-n', '-H', '-o', 'history']
            process = subprocess.run(bash, input=block, capture_output=True, text=True, check=False)
            errors[block] = process.stderr
    assert len(errors) > 10
    assert {block: error for block, error in errors.items() if error} == {}


def _strip_code(text: str) -> str:
    return re.sub(r'(?ms)^```.*?^```|`[^`\n]*`', '', text)
