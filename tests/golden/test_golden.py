"""The output of the programs and the formats of keys and values, compared with files.

`ECOMP_GOLDEN=write pytest tests/golden` writes the files; read the difference before you commit it. commands/*.txt hold
a command line after `$`, its stdout (`|`) and stderr (`!`), its writes to etcd (`+`, `-`) and placement (`>`), and its
exit code (`=`). Each command runs in the cloud of scene.txt; each value of values.txt is parsed and written again.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecomp import errors
from ecomp.cli import waiting
from ecomp.cli.command import Context
from ecomp.errors import Unreachable
from ecomp.model import cluster, flavor, group, keys, order, queue, quota, record, stack, states, user_data
from ecomp.model.audit import CHECKS, encode_report, parse_report
from ecomp.model.facts import parse_facts
from ecomp.model.order import NameOwner
from ecomp.model.queue import QueueTaker
from ecomp.model.stored import decode, decode_lenient, encode
from ecomp.model.warning_codes import COMPUTE_WARNINGS, SCHEDULE_WARNINGS
from ecomp.shared import notes
from ecomp.store.client import Store
from tests.golden import scene
from tests.kit.in_process import InMemoryPlacement, InProcessPlacement, remove_providers, start_placement
from tests.kit.servers import make_environment
from tests.kit.transcript import compare_with_file

HERE = Path(__file__).parent
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
OTHER_PROGRAMS = {'ecompute': 'ecomp.compute', 'elab': 'ecomp.lab.elab', 'mdserver': 'mdserver.server'}

pytestmark = pytest.mark.fast


@pytest.fixture(scope='module')
def application(pytestconfig: pytest.Config) -> Iterator[InProcessPlacement]:
    if not pytestconfig.getoption('real_servers'):
        yield InMemoryPlacement()
        return
    yield start_placement()
    remove_providers(start_placement())


def split_commands(path: Path) -> Iterator[tuple[list[str], str]]:
    """Yield (the comment and blank lines before it, the command) for each command of a file.

    The last pair has the lines after all commands and an empty command.
    """
    before: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith('$ '):
            yield before, line
            before = []
        elif not line or line.startswith('#'):
            before.append(line)
    yield before, ''


@pytest.mark.parametrize('name', sorted(path.name for path in (HERE / 'commands').glob('eschedule*.txt')))
def test_eschedule_commands(name: str, application: InProcessPlacement, tmp_path: Path) -> None:
    def answer(words: list[str]) -> list[str]:
        cloud = scene.Scene()
        with pytest.MonkeyPatch.context() as change:
            scene.patch_product(cloud, application, change)
            lines = scene.make_transcript(words, cloud, tmp_path)
        if any(line.startswith('> ') for line in lines):
            scene.fill_placement(application)
        return [line.replace(str(tmp_path), 'HERE') for line in lines]

    scene.fill_placement(application)
    path = HERE / 'commands' / name
    compare_with_file(path, rerun_commands(path, answer))


# An attribute to patch: (object, name, value).
Change = tuple[object, str, Any]


def run_patched(
    words: list[str],
    application: InProcessPlacement,
    path: Path,
    *changes: Change,
    initial_scene: scene.Scene | None = None,
) -> list[str]:
    scene.fill_placement(application)
    cloud = initial_scene or scene.Scene()
    with pytest.MonkeyPatch.context() as change:
        scene.patch_product(cloud, application, change)
        for changed, name, value in changes:
            change.setattr(changed, name, value)
        return scene.make_transcript(words, cloud, path)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(('form', 'config'), [('json', ''), ('yaml', ' --config schedule.yaml')])
def test_interrupt_after_delivery_prints_the_instance(
    form: str, config: str, application: InProcessPlacement, tmp_path: Path
) -> None:
    """Only the output has the new uuid. The suggested command must name the same cluster."""
    words = [*config.split(), '-f', form, '--wait', SMALL]
    lines = run_patched(words, application, tmp_path, (Context, 'name_computes', interrupt))
    instance = 'f0000000-0000-4000-8000-000000000001'
    assert any(line.startswith(f'+ /hosts/c0000000-0000-4000-8000-000000000001/{instance} ') for line in lines)
    assert any(line.startswith('|') and instance in line for line in lines)
    assert lines[-1] == '= 6'
    assert f'! eschedule: interrupted; the operation continues. Try: eschedule{config} wait {instance}' in lines


@pytest.mark.parametrize('words', [SMALL, '--flavor small --queue'])
@pytest.mark.parametrize('form', ['table', 'json'])
def test_interrupt_before_the_wait_prints_the_instance(
    words: str, form: str, application: InProcessPlacement, tmp_path: Path
) -> None:
    """A plain "interrupted" would look as if nothing had been requested."""
    arguments = [*words.split(), '-f', form, '--wait']
    lines = run_patched(arguments, application, tmp_path, (waiting, 'wait_for_new', interrupt))
    instance = 'f0000000-0000-4000-8000-000000000001'
    assert any(line.startswith('|') and instance in line for line in lines)
    expected = [f'! eschedule: interrupted; the operation continues. Try: eschedule wait {instance}', '= 6']
    assert [line for line in lines if line.startswith(('!', '='))][-2:] == expected


def test_queued_request_is_printed_if_etcd_fails_afterwards(application: InProcessPlacement, tmp_path: Path) -> None:
    """Without etcd it is not known whether any compute takes from queues."""

    def fail(*_: object, **__: object) -> None:
        raise Unreachable('etcd does not answer')

    words = ['--flavor', 'small', '--queue', 'http://images.invalid/x.img']
    lines = run_patched(words, application, tmp_path, (Store, 'sample', fail), (Store, 'snapshot', fail))
    printed = [line for line in lines if line.startswith(('|', '!', '='))]
    assert printed == ['| QUEUED INSTANCE f0000000-0000-4000-8000-000000000001', '= 0']


@pytest.mark.parametrize(
    ('word', 'hint'),
    [
        ('hots', 'hots is not a command (did you mean eschedule hosts?), and cannot be looked up as an instance: '),
        ('web-1', ''),
    ],
)
def test_misspelt_command_is_suggested_without_etcd(
    word: str, hint: str, application: InProcessPlacement, tmp_path: Path
) -> None:
    """The word may be the name of an instance, which only etcd knows."""

    def fail(*_: object) -> None:
        raise Unreachable('etcd does not answer')

    lines = run_patched([word], application, tmp_path, (Store, 'get', fail))
    assert lines == [f'! eschedule: {hint}etcd does not answer', '= 7']


@pytest.mark.parametrize(
    ('words', 'hint'),
    [
        ('destroy web-1 web-2', '; 1 further request was not sent. Try: eschedule show web-1'),
        ('destroy web-1 --wait -f json', '. Try: eschedule show web-1'),
        ('quota set web VCPU=4', '. Try: eschedule quota web'),
    ],
)
def test_interrupt_during_a_write_says_it_may_be_accepted(
    words: str, hint: str, application: InProcessPlacement, tmp_path: Path
) -> None:
    def commit_and_interrupt(*written: Any) -> None:
        real_commit(*written)
        raise KeyboardInterrupt

    cloud = scene.Scene()
    real_commit = cloud.commit
    lines = run_patched(
        words.split(), application, tmp_path, (cloud, 'commit', commit_and_interrupt), initial_scene=cloud
    )
    assert len([line for line in lines if line.startswith('+ ')]) == 1
    subject = 'web' if words.startswith('quota') else 'web-1'
    message = f'! eschedule: interrupted: the request for {subject} may have been accepted{hint}'
    assert [line for line in lines if line.startswith(('|', '!'))] == [message]
    assert lines[-1] == '= 1'


# Runs each command in a fork of one process, because a start takes half a second.
RUN_COMMANDS = """
import importlib, json, os, sys, tempfile
main, answers = importlib.import_module(sys.argv[1]).main, []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
        if not (pid := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.exit(main(words))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        answers.append((out.read(), err.read(), code))
json.dump(answers, sys.stdout)
"""


@pytest.mark.parametrize('command', OTHER_PROGRAMS)
def test_commands_of_the_other_programs(command: str, tmp_path: Path) -> None:
    path = HERE / 'commands' / f'{command}.txt'
    lines = [shlex.split(line)[2:] for _, line in split_commands(path) if line]
    process = subprocess.run(
        [sys.executable, '-c', RUN_COMMANDS, OTHER_PROGRAMS[command]], input=json.dumps(lines),
        cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    answers = iter(json.loads(process.stdout))

    def answer(_: list[str]) -> list[str]:
        output, errors_printed, code = next(answers)
        assert output == ''
        # mdserver's argparse prints its usage first.
        kept = [line for line in errors_printed.splitlines() if not line.startswith(('usage:', ' '))]
        return [*(f'! {scene.normalize_line(line)}' for line in kept), f'= {code}']

    compare_with_file(path, rerun_commands(path, answer))


def rerun_commands(path: Path, answer: Callable[[list[str]], list[str]]) -> str:
    lines: list[str] = []
    for before, command in split_commands(path):
        lines += [*before, *([command, *answer(shlex.split(command)[2:])] if command else [])]
    return '\n'.join(lines) + '\n'


def rewrite_request(key: str, value: bytes) -> str:
    parsed = order.parse_request(key.split('/')[2], key, value)
    assert isinstance(parsed, order.Request), parsed
    return encode(parsed)


def rewrite_queued(key: str, value: bytes) -> str:
    parsed = queue.parse_queue_entry(key, value)
    assert isinstance(parsed, queue.QueueEntry), parsed
    return encode(parsed)


def rewrite_user_data(key: str, value: bytes) -> str:
    return user_data.SharedUserData.from_bytes(user_data.parse_shared_user_data(value, keys.get_last_part(key))).text


# {prefix of a key, or suffix of a taker key: parses a value and writes it again}
REWRITERS: dict[str, Callable[[str, bytes], str]] = {
    keys.HOSTS: rewrite_request,
    keys.QUEUES: rewrite_queued,
    keys.TAKER: lambda _, value: encode(QueueTaker(decode_lenient(QueueTaker, value).compute or '')),
    keys.INSTANCES: lambda key, value: encode(record.from_json(value, keys.get_last_part(key))),
    keys.FACTS: lambda _, value: encode(parse_facts(value)),
    keys.NAMES: lambda _, value: encode(NameOwner(decode(NameOwner, value).instance)),
    keys.GROUPS: lambda key, value: encode(decode(group.Group, value, name=keys.get_last_part(key))),
    keys.QUOTAS: lambda key, value: encode(decode(quota.Quota, value, project=keys.get_last_part(key))),
    keys.STACKS: lambda key, value: encode(decode(stack.Stack, value, name=keys.get_last_part(key))),
    keys.FLAVORS: lambda key, value: encode(decode(flavor.Flavor, value, name=keys.get_last_part(key))),
    keys.USER_DATA: rewrite_user_data,
    keys.RELEASED: lambda _, value: notes.released_to_json(notes.released_from_json(value)),
    keys.FINDINGS: lambda key, value: encode_report(parse_report(keys.get_last_part(key), value)),
    keys.CLUSTER: lambda _, value: encode(decode(cluster.ClusterIdentity, value)),
    'the known etcd': lambda _, value: encode(decode(cluster.KnownCluster, value)),
}


@pytest.mark.parametrize('name', ['scene.txt', 'values.txt'])
def test_values_are_parsed_and_written_unchanged(name: str) -> None:
    lines = (HERE / name).read_text().splitlines()
    parsed_lines = {rewritten for line in lines if (rewritten := rewrite_line(line)) is not None}
    assert parsed_lines <= set(lines)
    assert len(parsed_lines) > len(lines) - 6  # no reader parses a presence, an attempt or an address completely


def rewrite_line(line: str) -> str | None:
    """Parse the value of a line and write it again, or return None without a parser."""
    key, _, value = line.partition(' ' if line.startswith('/') else ' {')
    value = value if line.startswith('/') else '{' + value
    kind = (
        keys.TAKER if key.endswith(keys.TAKER) else next((start for start in REWRITERS if key.startswith(start)), None)
    )
    return f'{key} {REWRITERS[kind](key, value.encode())}' if kind else None


def test_layout_of_keys() -> None:
    host, instance = scene.HV1, '1a5c0de0-0000-4000-8000-000000000001'
    examples = {
        'what one compute watches': keys.request_prefix(host), 'a request': keys.request(host, instance),
        'an attempt': keys.attempt(instance), 'an address': keys.address(instance),
        'a record': keys.record(host, instance), 'a record of no compute': keys.record('', instance),
        'a name': keys.name('web'), 'a group': keys.group('web'),
        'a quota': keys.quota('web'), 'a flavor': keys.flavor('small'),
        'what waits': keys.queue('small', instance), 'who takes it': keys.taker(keys.queue('small', instance)),
        'generations released': keys.released_claims(instance, 255), 'user-data': keys.user_data('0' * 64),
        'a compute': keys.compute(host), 'the cluster': keys.CLUSTER,
        'an audit': keys.audit(instance), 'a question to repair': f'{keys.audit(instance)}/{host}',
        'a question about usage': keys.audit(instance) + keys.USAGE_QUESTION, 'what a host found': keys.findings(host),
        'an answer about usage': keys.usage(host),
    }  # fmt: skip
    compare_with_file(HERE / 'keys.txt', ''.join(f'{name}: {key}\n' for name, key in examples.items()))


def test_codes_states_and_stages() -> None:
    exits = {name: error.exit_code for name, error in vars(errors).items() if hasattr(error, 'exit_code')}
    lines = [f'exit {code} {name}' for name, code in sorted(exits.items(), key=lambda each: (each[1], each[0]))]
    lines += [f'audit {code}{" --fix" if code_info.repair else ""}' for code, code_info in sorted(CHECKS.items())]
    lines += [f'warning {code}' for code in sorted({*SCHEDULE_WARNINGS, *COMPUTE_WARNINGS})]
    lines += [f'state {state_name}' for state_name in sorted({states.QUEUED, *states.STATES})]
    lines += [f'stage {stage}' for stage in states.STAGES]
    lines += [f'kept {state} {seconds} s' for state, seconds in sorted(states.RETENTION_SECONDS.items())]
    compare_with_file(HERE / 'codes.txt', '\n'.join(lines) + '\n')
