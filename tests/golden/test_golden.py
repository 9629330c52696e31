"""What users, other hosts and scripts see, as files: whatever is moved in the product, they stay as they are.

`ECOMP_GOLDEN=write pytest tests/golden` writes anew what the product says now; the difference is to be read and meant.
commands/*.txt hold a command line after `$`, what it prints (`|`) and says (`!`), what it writes to etcd (`+`, `-`) and
to placement (`>`), and its exit code (`=`). Each is given to the cloud of scene.txt, and values.txt to its reader.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecomp import errors
from ecomp.cli import create
from ecomp.cli.command import Context
from ecomp.errors import Unreachable
from ecomp.model import cluster, flavor, group, guest, keys, order, planes, queue, quota, record
from ecomp.model.audit import CODES
from ecomp.store import sharing
from ecomp.store.client import Store
from tests.golden import scene
from tests.kit.in_process import InProcess, empty, start
from tests.kit.servers import environment

HERE = Path(__file__).parent
WRITES = os.environ.get('ECOMP_GOLDEN') == 'write'
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
OTHERS = {'ecompute': 'ecomp.compute', 'elab': 'ecomp.lab.elab', 'mdserver': 'mdserver.server'}

pytestmark = pytest.mark.fast


@pytest.fixture(scope='module')
def application() -> Iterator[InProcess]:
    """Placement in this process, which other tests of it share: nothing of the scene is left there."""
    yield start()
    empty(start())


def commands(path: Path) -> Iterator[tuple[list[str], str]]:
    """The lines before each command, and the command; last, what stands behind all of them."""
    before: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith('$ '):
            yield before, line
            before = []
        elif not line or line.startswith('#'):
            before.append(line)
    yield before, ''


def compare(path: Path, now: str) -> None:
    if WRITES:
        path.write_text(now)
    assert now == path.read_text(), f'{path.name}: see test_golden.py for what to do about it'


@pytest.mark.parametrize('name', sorted(path.name for path in (HERE / 'commands').glob('eschedule*.txt')))
def test_eschedule(name: str, application: InProcess, tmp_path: Path) -> None:
    def answer(words: list[str]) -> list[str]:
        there = scene.Scene()
        with pytest.MonkeyPatch.context() as change:
            scene.play(there, application, change)
            lines = scene.transcript(words, there, tmp_path)
        if any(each.startswith('> ') for each in lines):
            scene.furnish(application)
        return [each.replace(str(tmp_path), 'HERE') for each in lines]

    scene.furnish(application)
    path = HERE / 'commands' / name
    compare(path, transcript(path, answer))


Change = tuple[object, str, Any]
"""Whose attribute it is, its name and its value."""


def transcript_with(
    words: list[str], application: InProcess, path: Path, *changes: Change, at: scene.Scene | None = None
) -> list[str]:
    """The lines of a command in the scene, `at` or a new one, with these attributes changed while it runs."""
    scene.furnish(application)
    there = at or scene.Scene()
    with pytest.MonkeyPatch.context() as change:
        scene.play(there, application, change)
        for changed, name, value in changes:
            change.setattr(changed, name, value)
        return scene.transcript(words, there, path)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(('form', 'config'), [('json', ''), ('yaml', ' --config schedule.yaml')])
def test_what_is_placed_is_said_to_whoever_interrupts(
    form: str, config: str, application: InProcess, tmp_path: Path
) -> None:
    """Its uuid stands nowhere else: it was made for it. What is to be typed asks the cluster that this one asked."""

    words = [*config.split(), '-f', form, '--wait', SMALL]
    lines = transcript_with(words, application, tmp_path, (Context, 'name_computes', interrupted))
    instance = 'f0000000-0000-4000-8000-000000000001'
    assert any(line.startswith(f'+ /hosts/c0000000-0000-4000-8000-000000000001/{instance} ') for line in lines)
    assert any(line.startswith('|') and instance in line for line in lines)
    assert lines[-1] == '= 6'
    assert f'! eschedule: interrupted, and it goes on: eschedule{config} wait {instance}' in lines


@pytest.mark.parametrize('words', [SMALL, '--flavor small --queue'])
@pytest.mark.parametrize('form', ['table', 'json'])
def test_nor_does_one_end_it_before_the_wait_has_begun(
    words: str, form: str, application: InProcess, tmp_path: Path
) -> None:
    """It is said where it is by then: what was pressed a moment later said "interrupted", as if nothing were begun."""

    asked = [*words.split(), '-f', form, '--wait']
    lines = transcript_with(asked, application, tmp_path, (create, '_waited', interrupted))
    instance = 'f0000000-0000-4000-8000-000000000001'
    assert any(line.startswith('|') and instance in line for line in lines)
    said = [f'! eschedule: interrupted, and it goes on: eschedule wait {instance}', '= 6']
    assert [line for line in lines if line.startswith(('!', '='))][-2:] == said


def test_of_what_is_queued_as_etcd_goes_away_no_more_is_said(application: InProcess, tmp_path: Path) -> None:
    """That no compute takes from queues is not known then."""

    def away(*_: object, **__: object) -> None:
        raise Unreachable('etcd does not answer')

    words = ['--flavor', 'small', '--queue', 'http://images.invalid/x.img']
    lines = transcript_with(words, application, tmp_path, (Store, 'around', away), (Store, 'snapshot', away))
    said = [line for line in lines if line.startswith(('|', '!', '='))]
    assert said == ['| QUEUED INSTANCE f0000000-0000-4000-8000-000000000001', '= 0']


@pytest.mark.parametrize(
    ('word', 'hints'),
    [('hots', ['hots is not a command: did you mean eschedule hosts?']), ('web-1', [])],
)
def test_a_misspelt_command_is_named_when_etcd_is_away(
    word: str, hints: list[str], application: InProcess, tmp_path: Path
) -> None:
    """An instance may be called so, which etcd alone knows."""

    def away(*_: object) -> None:
        raise Unreachable('etcd does not answer')

    lines = transcript_with([word], application, tmp_path, (Store, 'get', away))
    said = '; '.join(['etcd does not answer', *hints])
    assert lines == [f'! eschedule: {said}', '= 7']


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        ('destroy web-1 web-2', 'eschedule show web-1 says, and of 1 more nothing was asked'),
        ('destroy web-1 --wait -f json', 'eschedule show web-1 says'),
        ('quota set web VCPU=4', 'eschedule quota show web says'),
    ],
)
def test_what_was_written_before_an_interrupt_may_be_done(
    words: str, says: str, application: InProcess, tmp_path: Path
) -> None:
    def commit(*written: Any) -> None:
        wrote(*written)
        raise KeyboardInterrupt

    there = scene.Scene()
    wrote = there.commit
    lines = transcript_with(words.split(), application, tmp_path, (there, 'commit', commit), at=there)
    assert len([line for line in lines if line.startswith('+ ')]) == 1
    word = 'web' if words.startswith('quota') else 'web-1'
    said = f'! eschedule: interrupted; {word}: it may have been accepted: {says}'
    assert [line for line in lines if line.startswith(('|', '!'))] == [said]
    assert lines[-1] == '= 1'


@pytest.mark.parametrize('command', OTHERS)
def test_the_other_commands(command: str, tmp_path: Path) -> None:
    def answer(words: list[str]) -> list[str]:
        run = [sys.executable, '-m', OTHERS[command], *words]
        done = subprocess.run(
            run, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stdout == ''
        # mdserver's argparse says its usage before.
        said = [line for line in done.stderr.splitlines() if not line.startswith(('usage:', ' '))]
        return [*(f'! {scene.alike(line)}' for line in said), f'= {done.returncode}']

    path = HERE / 'commands' / f'{command}.txt'
    compare(path, transcript(path, answer))


def transcript(path: Path, answer: Callable[[list[str]], list[str]]) -> str:
    lines: list[str] = []
    for before, command in commands(path):
        lines += [*before, *([command, *answer(shlex.split(command)[2:])] if command else [])]
    return '\n'.join(lines) + '\n'


def request(key: str, value: bytes) -> str:
    found = order.parse_request(key.split('/')[2], key, value)
    assert isinstance(found, order.Request), found
    return order.to_json(found)


def waiting(key: str, value: bytes) -> str:
    found = queue.parse_waiting(key, value)
    assert isinstance(found, queue.QueueEntry), found
    return queue.to_json(found)


def user_data(key: str, value: bytes) -> str:
    return guest.SharedUserData.of(guest.shared_user_data(value, keys.last(key))).text


AGAIN: dict[str, Callable[[str, bytes], str]] = {
    keys.HOSTS: request,
    keys.QUEUES: waiting,
    keys.TAKER: lambda _, value: queue.mark_to_json(queue.marked_by(value) or ''),
    keys.INSTANCES: lambda key, value: record.to_json(record.from_json(value, keys.last(key))),
    keys.NAMES: lambda _, value: order.name_to_json(order.named(value)),
    keys.GROUPS: lambda key, value: group.to_json(group.from_json(keys.last(key), value)),
    keys.QUOTAS: lambda key, value: quota.to_json(quota.from_json(keys.last(key), value)),
    keys.FLAVORS: lambda key, value: flavor.to_json(flavor.from_json(keys.last(key), value)),
    keys.USER_DATA: user_data,
    keys.RELEASED: lambda _, value: sharing.released_to_json(sharing.released_from_json(value)),
    keys.AUDIT: lambda _, value: planes.clearance_to_json(planes.clearance_from_json(value)),
    keys.DIGESTS: lambda _, value: planes.to_pages(planes.from_pages([value]))[0],
    keys.CLUSTER: lambda _, value: cluster.new(cluster.identity(value), '2021-03-04T05:06:00.000Z'),
    'the known etcd': lambda _, value: cluster.to_json(cluster.from_json(value)),
}
"""What is read of a key and written anew, by the beginning of the key; a taker's by its end."""


@pytest.mark.parametrize('name', ['scene.txt', 'values.txt'])
def test_what_is_read_is_written_as_it_was(name: str) -> None:
    lines = (HERE / name).read_text().splitlines()
    read = {each for line in lines if (each := written_anew(line)) is not None}
    assert read <= set(lines)
    assert len(read) > len(lines) - 6  # a presence, an attempt, an address: one side writes and none reads it whole


def written_anew(line: str) -> str | None:
    """The line as it is once its value was read and written; None where one side alone has to do with it."""
    key, _, value = line.partition(' ' if line.startswith('/') else ' {')
    value = value if line.startswith('/') else '{' + value
    kind = keys.TAKER if key.endswith(keys.TAKER) else next((each for each in AGAIN if key.startswith(each)), None)
    return f'{key} {AGAIN[kind](key, value.encode())}' if kind else None


def test_a_digest_of_each_compute() -> None:
    lines = (HERE / 'digests.txt').read_text().splitlines()
    assert [planes.to_pages(planes.from_pages([line.encode()])) for line in lines] == [[line] for line in lines]


def test_the_keys() -> None:
    host, one = scene.HV1, '1a5c0de0-0000-4000-8000-000000000001'
    said = {
        'what one compute watches': keys.request_prefix(host),
        'a request': keys.request(host, one),
        'an attempt': keys.attempt(one),
        'an address': keys.booted(one),
        'a record': keys.record(host, one),
        'a record of no compute': keys.record('', one),
        'a record of 1.0': keys.old_record(one),
        'a name': keys.name('web'),
        'a group': keys.group('web'),
        'a quota': keys.quota('web'),
        'a flavor': keys.flavor('small'),
        'what waits': keys.queue('small', one),
        'who takes it': keys.taker(keys.queue('small', one)),
        'generations released': keys.released(one, 255),
        'user-data': keys.user_data('0' * 64),
        'a compute': keys.compute(host),
        'the cluster': keys.CLUSTER,
        'an audit': keys.audit(one),
        'a clearance': keys.clearance(one, host),
        'a page of a digest': keys.digest(one, host, 0),
        'what was cleared': keys.digest(one, host, 'cleared'),
    }
    compare(HERE / 'keys.txt', ''.join(f'{name}: {key}\n' for name, key in said.items()))


def test_codes_states_and_stages() -> None:
    exits = {name: each.exit_code for name, each in vars(errors).items() if hasattr(each, 'exit_code')}
    lines = [f'exit {code} {name}' for name, code in sorted(exits.items(), key=lambda each: (each[1], each[0]))]
    lines += [f'audit {code}{" --fix" if each.fix else ""}' for code, each in sorted(CODES.items())]
    lines += [f'state {each}' for each in sorted({record.QUEUED, *record.STATES})]
    lines += [f'stage {each}' for each in record.STAGES]
    lines += [f'kept {state} {seconds} s' for state, seconds in sorted(record.KEPT.items())]
    compare(HERE / 'codes.txt', '\n'.join(lines) + '\n')
