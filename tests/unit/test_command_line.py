"""The command lines of eschedule and ecompute: accepted forms and refusals."""

from __future__ import annotations

import gzip
import re
import shlex
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.command import MIN_ETCD_TIMEOUT_SECONDS, SCRIPT_SLOW_SECONDS, SLOW_SECONDS, Context, Invocation
from ecomp.cli.commands import COMMANDS, format_help, parse
from ecomp.cli.create import read_user_data
from ecomp.cli.options import FLAGS, OPTIONS, Option, Options, parse_command_line
from ecomp.cli.terminal import Terminal
from ecomp.compute import MAX_FAKE_COMPUTES, make_parser
from ecomp.conf import ScheduleConfig
from ecomp.errors import UsageError
from ecomp.model.guest import MAX_UNPACKED_BYTES
from tests.kit.servers import make_environment

# eschedule's command line: command, arguments, options. Refused ones are also in scenario/test_bad_input.py.


A, B = '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b01', '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b02'
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
IMAGE = 'http://images.invalid/a.img'


@pytest.mark.parametrize(
    ('argv', 'command'),
    [
        ([QUERY], Invocation('create', (QUERY,), Options())),
        ([QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options())),
        (['create', QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options())),
        (['create', QUERY, '--wait', 'ready'], Invocation('create', (QUERY,), Options(wait='ready'))),
        ([QUERY, '--wait', 'ready'], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['--wait', 'ready', QUERY], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['--wait=ready', QUERY], Invocation('create', (QUERY,), Options(wait='ready'))),
        (['stop', '--wait', 'ready'], Invocation('stop', ('ready',), Options(wait=''))),  # an instance may be called so
        (['create', '--flavor', 'x'], Invocation('create', ('',), Options(flavor='x'))),
        (['--flavor', 'x', 'create', IMAGE], Invocation('create', ('', IMAGE), Options(flavor='x'))),
        (['--wait', QUERY, IMAGE], Invocation('create', (QUERY, IMAGE), Options(wait=''))),
        (
            [QUERY, '--wait=started', '--timeout', '5', '--uuid', A.upper()],
            Invocation('create', (QUERY,), Options(uuid=A, wait='started', timeout=5.0)),
        ),
        ([A], Invocation('query', (A,), Options())),
        ([A.replace('-', '').upper()], Invocation('query', (A,), Options())),
        (['destroy', A, '--wait', B], Invocation('destroy', (A, B), Options(wait=''))),
        (['wait', A, B, '--for', 'disk'], Invocation('wait', (A, B), Options(stage='disk'))),
        (['stop', A, B], Invocation('stop', (A, B), Options())),
        (['reboot', '--wait', A, '--timeout', '5'], Invocation('reboot', (A,), Options(wait='', timeout=5.0))),
        (['wait', '--timeout', '5', A], Invocation('wait', (A,), Options(timeout=5.0))),
        (['-f', 'json', 'list', '--all'], Invocation('list', (), Options(format='json', all=True))),
        (['hosts', '-f', 'json'], Invocation('hosts', (), Options(format='json'))),
        (['host', 'forget', A.upper()], Invocation('host forget', (A,), Options())),
        (['web1'], Invocation('query', ('web1',), Options())),
        (['1F0E4C9A'], Invocation('query', ('1F0E4C9A',), Options())),
        (['show', 'web1', '1f0e', A.upper()], Invocation('show', ('web1', '1f0e', A), Options())),
        (
            [QUERY, '--name', 'web1', '--ssh-key', 'a.pub', '--user-data', '-', '--ssh-key', 'b.pub'],
            Invocation('create', (QUERY,), Options(name='web1', ssh_key=['a.pub', 'b.pub'], user_data='-')),
        ),
        (['--queue', '--flavor', 'x', IMAGE], Invocation('create', ('', IMAGE), Options(flavor='x', queue=True))),
        (['show', A, '--config', 'x.yaml'], Invocation('show', (A,), Options(config='x.yaml'))),
        # Help on the command that is typed beside --help.
        (['--help'], Invocation('help', (), Options())),
        (['--help', '--nonsense'], Invocation('help', (), Options())),
        ([A, '--help'], Invocation('help', (), Options())),
        (['-h', 'wait', A], Invocation('help', ('wait',), Options())),
        (['--timeout', '5', 'host', 'drain', 'hv1', '--help'], Invocation('help', ('host', 'drain'), Options())),
        ([QUERY, '--help'], Invocation('help', ('create',), Options())),
        (['create', '--help'], Invocation('help', ('create',), Options())),
        (['host', '--help'], Invocation('help', ('host',), Options())),
    ],
)
def test_parse_accepts_each_form(argv: list[str], command: Invocation) -> None:
    assert parse(argv) == command


def test_every_command_has_help() -> None:
    help_text = format_help('')
    for name, command in COMMANDS.items():
        assert f'{command.usage} ' in help_text
        assert command.summary in help_text
        assert f'usage: eschedule {command.usage} ' in format_help(name)
        # The query command has no name: an instance alone selects it.
        words = tuple(name.split()) if name != 'query' else ()
        assert parse([*name.split(), '--help']) == Invocation('help', words, Options())


@pytest.mark.parametrize('name', COMMANDS)
def test_help_of_a_command_lists_only_its_own_options(name: str) -> None:
    flags = [flag for option in COMMANDS[name].list_options() for flag in option.flags]
    help_text = format_help(name).partition('options:')[2].partition('exit codes')[0]
    listed = re.findall('^  (?:-[a-z](?: [A-Z]+)?, )?(--[a-z-]+)', help_text, re.MULTILINE)
    assert listed == [text for text in flags if len(text) > 2]
    fields = {*COMMANDS[name].options, 'config'}
    assert set(flags) == {flag for field in fields for option in OPTIONS[field] for flag in option.flags}


def test_every_option_belongs_to_a_command() -> None:
    used = {field for command in COMMANDS.values() for field in command.options}
    assert used | {'config'} == set(OPTIONS)


@pytest.mark.parametrize('name', ['list', *(name for name, each in COMMANDS.items() if '<host>' in each.usage)])
def test_command_that_takes_a_host_has_exit_code_conflict(name: str) -> None:
    """Two computes may have the same host name."""
    assert 5 in COMMANDS[name].exit_codes


def test_help_of_events_offers_only_its_formats() -> None:
    assert 'json or yaml' not in format_help('events')
    assert 'csv' not in format_help('events')


@pytest.mark.parametrize('name', COMMANDS)
def test_every_command_has_a_valid_example(name: str) -> None:
    program, *words = shlex.split(COMMANDS[name].example)
    assert program == 'eschedule'
    assert parse(words).name == name
    assert f'example: {COMMANDS[name].example}\n' in format_help(name)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['create', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['create', '--flavor', 'x', 'web1'], "create: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        (['plan', 'web1'], "plan: 'web1' is not a placement query. Try: 'resources=VCPU:1,"),
        # "--uuid $X" with X unset must not place the instance under a random uuid.
        ([QUERY, '--uuid', ''], "'' is not a valid uuid of an instance"),
        (
            [QUERY, '--wait=redy'],
            "--wait: 'redy' is not a valid stage (did you mean ready?). Fix: give one of requested, ",
        ),
        (
            ['list', '--state', 'actve'],
            "--state: 'actve' is not a valid state (did you mean active?). Fix: give one of active, ",
        ),
        (['wait', A, '--timeout', '1000000000'], '--timeout: must be 0 to 999999999 seconds'),
        (['wait', A, '--timeout', '-1'], '--timeout: must be 0 to 999999999 seconds'),
        ([QUERY, '--min', '2'], '--min needs --count'),
        (['query', 'web1'], "'query' is not a command: did you mean eschedule 'resources=…'?"),
        (['delete', 'web1'], "'delete' is not a command: did you mean eschedule destroy, which deletes the disk?"),
        (['ls', '-f', 'json', 'x'], "'ls' is not a command: did you mean eschedule list?"),
        (['images', 'x'], "'images' is not a command: did you mean eschedule image list?"),
        (['Lst'], "'Lst' is neither a command nor an instance: did you mean eschedule list?"),
        (['xyzzy', 'x'], "'xyzzy' is not a command. Try: --help"),
        (
            ['host', 'lsit'],
            "'host lsit' is not a command (did you mean eschedule host list?): the subcommands of host are list, ",
        ),
        (['host', 'forgte', 'hv1'], "'host forgte' is not a command: the subcommands of host are list, "),
        (['help', 'lst'], "help: 'lst' is not a command: did you mean eschedule list?"),
    ],
)
def test_refusal_suggests_a_correction(argv: list[str], message: str) -> None:
    """The other refusals are in tests/golden/commands/eschedule-refused.txt."""
    with pytest.raises(UsageError) as refused:
        parse(argv)
    assert message in str(refused.value)
    assert '\n' not in str(refused.value)


def test_help_of_a_first_word_lists_its_commands() -> None:
    help_text = format_help('host')
    assert [line.split('<')[0].split('   ')[0].strip() for line in help_text.splitlines() if line.startswith('  ')] == [
        *('host list', 'host show', 'host disable', 'host drain', 'host enable', 'host forget'),
    ]


# The option parser of eschedule: every allowed form of a line, and refused ones.


ANY_WORDS = [
    *FLAGS, '', '-', '--', '-5', '--nam', '--coun=3', '-fjson', '-n5', '-x', '--=', 'list', 'log', 'web1', 'a=b'
]  # fmt: skip
OPTION_FIELDS = sorted(OPTIONS)


def is_argument(text: str) -> bool:
    return not text.startswith('-') or text == '-' or text[1:].isdecimal()


def find_shortest_prefix(flag: str) -> int:
    """Return the length of the shortest unambiguous prefix of a long flag."""
    others = [other for other in FLAGS if other != flag]
    lengths = range(3, len(flag))
    return next((n for n in lengths if not any(other.startswith(flag[:n]) for other in others)), len(flag))


def draw_values(option: Option) -> st.SearchStrategy[Any]:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.parse is str:
        return st.text(max_size=5) | st.sampled_from(['-', '-5', '-x', '--all', 'a=b'])
    if option.parse in (int, float):
        return st.integers() if option.parse is int else st.floats(-100, 100)
    return st.uuids(version=4).map(str)


@st.composite
def option_forms(draw: st.DrawFn, option: Option, value: Any) -> list[str]:
    """Draw one of the forms in which an option may be written."""
    flag = draw(st.sampled_from(option.flags))
    if flag.startswith('--'):
        flag = flag[: draw(st.integers(find_shortest_prefix(flag), len(flag)))]
    text = str(value)
    if not option.metavar or (option.metavar.startswith('[') and not text):
        return [flag]
    forms = [[f'{flag}={text}']]
    if not flag.startswith('--') and text and text[0] != '=':
        forms.append([f'{flag}{text}'])
    if is_argument(text) and not option.metavar.startswith('['):
        forms.append([flag, text])
    return draw(st.sampled_from(forms))


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], list[str], Options]:
    """Draw a command line with its arguments and its options."""
    parts, given_options = list[list[str]](), dict[str, Any]()
    for field in draw(st.lists(st.sampled_from(OPTION_FIELDS), unique=True, max_size=5)):
        option = draw(st.sampled_from(OPTIONS[field]))
        if option.repeats:
            option_values = draw(st.lists(draw_values(option), min_size=1, max_size=3))
            parts += [draw(option_forms(option, value)) for value in option_values]
            given_options[field] = option_values
            continue
        value = draw(draw_values(option)) if option.metavar else option.const
        parts += [draw(option_forms(option, value))]
        given_options[field] = value
    # After log, -f means --follow.
    texts = st.text(max_size=5).filter(lambda text: is_argument(text) and text != 'log')
    words = draw(st.lists(texts | st.just('list'), max_size=4))
    for text in reversed(words):
        parts.insert(draw(st.integers(0, len(parts))), [text])
    argv = [text for part in parts for text in part]
    words = [part[0] for part in parts if len(part) == 1 and is_argument(part[0])]
    rest = draw(st.lists(st.sampled_from(ANY_WORDS), max_size=3))
    return [*argv, *(['--', *rest] if rest else [])], [*words, *rest], Options(**given_options)


@given(command_lines())
def test_read_accepts_every_form_of_a_line(line: tuple[list[str], list[str], Options]) -> None:
    argv, words, options = line
    assert parse_command_line(argv) == (words, options)


@given(st.lists(
    st.one_of(
        st.sampled_from(ANY_WORDS),
        st.builds('{}={}'.format, st.sampled_from(ANY_WORDS), st.sampled_from(ANY_WORDS)),
        st.text(max_size=5),
    ),
    max_size=6,
))  # fmt: skip
def test_any_line_is_read_or_refused_with_one_line(argv: list[str]) -> None:
    message = ''
    try:
        parse(argv)
    except UsageError as error:
        message = str(error)
    assert message == '' or message.isprintable()


@pytest.mark.parametrize(
    ('line', 'follows', 'form'),
    [('log web1 -f', True, None), ('log -f web1', True, None), ('log web1 -fjson', False, 'json'),
     ('list -f json', False, 'json'), ('-f json log', False, 'json')],
)  # fmt: skip
def test_f_after_log_means_follow(line: str, follows: bool, form: str | None) -> None:
    _, options = parse_command_line(line.split())
    assert (options.follow, options.format) == (follows, form)


@pytest.mark.parametrize(
    ('line', 'refusal'),
    [
        ('--frobnicate', '--frobnicate is not a valid option. Try: --help'),
        ('--formt=json', '--formt is not a valid option (did you mean --format?). Try: --help'),
        ('-x5', '-x5 is not a valid option. Try: --help'),
        ('--=5', '-- is not a valid option. Try: --help'),
        ('--co 5', '--co is ambiguous: it may be --count, --column or --config. Fix: write the whole option'),
        ('--name', '--name needs a value. Fix: write --name NAME'),
        ('--name --all', '--name needs a value. Fix: write --name NAME'),
        ('--name -- a', '--name needs a value. Fix: write --name NAME'),
        ('-f', '-f needs a value. Fix: write -f FORM'),
        ('--all=yes', '--all takes no value. Fix: leave out =yes'),
        ('-fxml', "-f: 'xml' is not a valid FORM. Fix: give one of table, json, yaml, csv, value"),
        ('--policy afinity', "--policy: 'afinity' is not a valid POLICY (did you mean affinity?). Fix: give one of "
                             'affinity, anti-affinity'),
        ('--count x', "--count: 'x' is not a whole number"),
        ('--lines=1.5', "-n: '1.5' is not a whole number"),
        ('--timeout 5m', "--timeout: '5m' is not a number of seconds"),
        ('--strict --soft', '--soft cannot be combined with --strict. Fix: give one of them'),
        ('--name a --name b', '--name is given more than once'),
        ('--wait --wait=ready', '--wait is given more than once'),
    ],
)  # fmt: skip
def test_wrong_option_is_refused_with_a_fix(line: str, refusal: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_command_line(line.split())
    assert str(refused.value) == refusal


# ecompute's arguments.


@pytest.mark.parametrize('line', ['list -n 0', 'list --timeout 0', 'hosts --count 0', 'doctor --count 0'])
def test_option_with_value_zero_is_refused_like_any_other(line: str) -> None:
    with pytest.raises(UsageError, match='is not accepted by this command|options other than -f need --canary'):
        parse(line.split())


def test_count_of_fake_computes_is_parsed() -> None:
    assert make_parser().parse_args([]).count is None
    assert make_parser().parse_args(['--fake', 'VCPU:1', '--count', '5']).count == 5
    assert make_parser().parse_args(['--fake', 'VCPU:1', f'--count={MAX_FAKE_COMPUTES}']).count == MAX_FAKE_COMPUTES


@pytest.mark.parametrize('text', ['0', '-1', '+1', '1.5', '', 'x', '²', '٣', str(MAX_FAKE_COMPUTES + 1), '9' * 5000])
def test_invalid_count_of_fake_computes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match='--count') as caught:
        make_parser().parse_args(['--fake', 'VCPU:1', f'--count={text}'])
    assert '\n' not in str(caught.value)


# Warnings about user-data that cloud-init would ignore silently.


WARNING_START = 'begins with #cloud-config, but '
UNKNOWN = 'does not begin with #cloud-config, #! or a MIME header, so cloud-init ignores it'
BROKEN = 'is damaged gzip, so cloud-init ignores it'


@pytest.mark.parametrize(
    ('data', 'warning'),
    [
        (b'#cloud-config\npackages: [nginx]\n', ''),
        (b'#cloud-config\n', ''),
        (b'#cloud-config\n# nothing\n', ''),
        (b'#cloud-config\na: &a [1]\nb: *a\n', ''),
        (b'#cloud-config-archive\n- content: x\n', ''),
        (b'#!/bin/sh\n[', ''),
        (b' #!', ''),
        (b'x #!', UNKNOWN),
        (b'Content-Type: multipart/mixed; boundary="x"\nMIME-Version: 1.0\n\n--x--\n', ''),
        (b'## template: jinja\n#cloud-config\n', ''),
        (b'#include\nhttp://h/x\n', ''),
        (b'#cloud-config\npackages: [nginx\n', f'{WARNING_START}line 3 is not YAML'),
        (b'#cloud-config\nruncmd:\n\t- x\n', f'{WARNING_START}line 3 is not YAML'),
        (b'#cloud-config\n- a\n', f'{WARNING_START}it is not a mapping of keys to values'),
        (b'#cloud-config\nhello\n', f'{WARNING_START}it is not a mapping of keys to values'),
        (b'#cloud-config\na: "\\UFFFFFFFF"\n', f'{WARNING_START}'),
        (b'#cloud-config\n---\na: 1\n', ''),
        (b'#cloud-config\na: 1\n---\nb: 2\n', f'{WARNING_START}line 3 begins a second document'),
        (b'#cloud-confg\na: 1\n', UNKNOWN),
        (b'#cloud\n', UNKNOWN),
        (b'## template: mako\n', UNKNOWN),
        (b'#cloud-boothook\n', ''),
        (b'\n#cloud-config\na: 1\n', ''),
        (b'\r\n  #Cloud-Config\r\na: 1\n', ''),
        (b'#CLOUD-CONFIG\n- a\n', f'{WARNING_START}it is not a mapping of keys to values'),
        (b'\xc2\xa0\n#!/bin/sh\n', ''),  # a no-break space is white space to Python, so to cloud-init
        (b'\n## Template: Jinja\n#cloud-config\n', ''),
        (b'\n#Include\nhttp://a/b\n', ''),
        (b'\xef\xbb\xbf#cloud-config\na: 1\n', UNKNOWN),
        (b'# cloud-config\na: 1\n', UNKNOWN),
        (b'packages: []\n', UNKNOWN),
        (b'{"ignition": {}}', UNKNOWN),
        (b'#cloud_config\na: 1\n', UNKNOWN),
        (b'a: 1\n#cloud-config\n', UNKNOWN),
        (gzip.compress(b'#!/bin/sh\n\xff\n', mtime=0), UNKNOWN),  # not UTF-8, so cloud-init finds no type
        (gzip.compress(b'#cloud-config\na: 1\n', mtime=0), ''),
        (gzip.compress(b'#cloud-config\n- a\n', mtime=0), f'{WARNING_START}it is not a mapping of keys to values'),
        (gzip.compress(b'hello\n', mtime=0), UNKNOWN),
        (gzip.compress(b'#!/bin/sh\n', mtime=0)[:-3], BROKEN),
        (gzip.compress(b'#!/bin/sh\n', mtime=0) + b'more', BROKEN),
        (b'\x1f\x8b', BROKEN),
        (b'\x1f\x8bhello', BROKEN),
        pytest.param(gzip.compress(bytes(MAX_UNPACKED_BYTES + 1), mtime=0), '', id='too large'),
    ],
)
def test_read_user_data_warns_of_data_that_cloud_init_ignores(tmp_path: Path, data: bytes, warning: str) -> None:
    (tmp_path / 'data').write_bytes(data)
    warnings: list[str] = []
    assert read_user_data(tmp_path / 'data', warnings.append) == data
    assert len(warnings) == bool(warning)
    assert warning in ''.join(warnings)
    assert 'nginx' not in ''.join(warnings)


def test_yaml_with_many_aliases_is_read_without_warning(tmp_path: Path) -> None:
    lines = ['#cloud-config', 'a0: &a0 [x]', *(f'a{n}: &a{n} [{", ".join([f"*a{n - 1}"] * 9)}]' for n in range(1, 40))]
    (tmp_path / 'data').write_text('\n'.join(lines))
    warnings: list[str] = []
    read_user_data(tmp_path / 'data', warnings.append)
    assert warnings == []


# What a command derives from its options: the timeout of etcd, and the command to type next.


@pytest.mark.parametrize(
    ('words', 'seconds'),
    [
        (['wait', 'web1'], 5.0),
        (['wait', 'web1', '--timeout', '3'], 3.0),
        (['wait', 'web1', '--timeout', '300'], 5.0),
        (['wait', 'web1', '--timeout', '0'], MIN_ETCD_TIMEOUT_SECONDS),
        (['destroy', 'web1', '--wait', '--timeout', '1'], 5.0),  # a write gets the full timeout
    ],
)
def test_etcd_timeout_is_at_most_the_timeout_of_wait(words: list[str], seconds: float) -> None:
    assert Context(Terminal(print, print, print), ScheduleConfig(), parse(words)).etcd_config.timeout == seconds


@pytest.mark.parametrize(('is_terminal', 'seconds'), [(True, SLOW_SECONDS), (False, SCRIPT_SLOW_SECONDS)])
def test_frozen_placement_is_reported_once(is_terminal: bool, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'stderr', TextIOWrapper(BytesIO()))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal)
    messages: list[str] = []
    ctx = Context(Terminal(print, print, messages.append), ScheduleConfig(), parse(['hosts']))
    for _ in range(3):  # one call to placement each
        after, tell = ctx.slow_notice
        assert after == seconds
        tell('placement at p1', after)
    assert messages == [f'waiting for placement at p1, which has not answered for {seconds:g} s']


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (['list'], 'eschedule'),
        (['list', '--config', 'far.yaml'], 'eschedule --config far.yaml'),
        (['--config=my far.yaml', 'list'], "eschedule --config 'my far.yaml'"),
    ],
)
def test_suggested_command_names_the_same_config(words: list[str], expected: str) -> None:
    assert Context(Terminal(print, print, print), ScheduleConfig(), parse(words)).command_prefix == expected


# An interrupt while eschedule loads its modules, or ecompute --check runs, ends in one line.


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
{run}
"""
RUN_SCHEDULE = 'from ecomp.schedule import run; run()'
RUN_CHECK = 'from ecomp.compute import main; sys.exit(main())'
LOADED_MODULES = ('ecomp.log', 'ecomp.errors', 'ecomp.cli.options', 'ecomp.cli.commands', 'ecomp.model.record')
LOADED_MODULES = (*LOADED_MODULES, 'ecomp.conf', 'yaml')


def run_interrupted(directory: Path, **words: object) -> tuple[int, str, str]:
    """Run a program that is interrupted as it loads a module.

    Returns:
        The exit code, stdout and stderr.
    """
    command = [sys.executable, '-c', INTERRUPTED.format(**words)]
    process = subprocess.run(
        command, cwd=directory, env=make_environment(), capture_output=True, text=True, check=False, timeout=60
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize('name', [*LOADED_MODULES, 'ecomp.scheduler.queries.find', 'h2', 'ssl'])
def test_interrupt_while_modules_load_prints_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / 'schedule.yaml').write_text('etcd: {endpoints: ["127.0.0.1:1"]}\n')
    outcome = run_interrupted(tmp_path, name=name, words=['list'], number='SIGINT', run=RUN_SCHEDULE)
    assert outcome == (1, '', 'eschedule: interrupted\n')


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
def test_interrupted_check_does_not_report_success(number: str, tmp_path: Path) -> None:
    outcome = run_interrupted(tmp_path, name='ecomp.agent.checking', words=['--check'], number=number, run=RUN_CHECK)
    assert outcome == (1, '', 'ecompute: interrupted: the check is incomplete\n')


def test_interrupted_change_does_not_report_success(tmp_path: Path) -> None:
    words = ['--close-dhcp']
    outcome = run_interrupted(tmp_path, name='ecomp.agent.checking', words=words, number='SIGINT', run=RUN_CHECK)
    assert outcome == (1, '', 'ecompute: interrupted: the change is incomplete\n')


@pytest.mark.parametrize('other', [['--check'], ['--fake', 'VCPU:1'], ['--accept-new-etcd'], ['--unit']])
def test_close_dhcp_accepts_only_config(other: list[str], tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, '-m', 'ecomp.compute', '--close-dhcp', *other],
        cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    option = other[0] if other[0] in ('--check', '--unit') else '--close-dhcp'
    assert (process.returncode, process.stderr) == (2, f'ecompute: {option} accepts only --config\n')
