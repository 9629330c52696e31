"""eschedule's arguments: the form, its words, its options. What is refused: scenario/test_bad_input.py."""

from __future__ import annotations

import pytest

from ecomp.errors import UsageError
from ecomp.scheduler.arguments import Command, Options, parse, parser
from ecomp.scheduler.commands import RUNS
from ecomp.scheduler.forms import CREATE, FORMS

A, B = '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b01', '1f0e4c9a-3a52-4b0f-8d87-0d8f1f2a6b02'
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
IMAGE = 'http://images.invalid/a.img'


@pytest.mark.parametrize(
    ('argv', 'command'),
    [
        ([QUERY], Command('create', (QUERY,), Options())),
        ([QUERY, IMAGE], Command('create', (QUERY, IMAGE), Options())),
        (['--wait', QUERY, IMAGE], Command('create', (QUERY, IMAGE), Options(wait=''))),
        (
            [QUERY, '--wait=started', '--timeout', '5', '--uuid', A.upper()],
            Command('create', (QUERY,), Options(uuid=A, wait='started', timeout=5.0)),
        ),
        ([A], Command('query', (A,), Options())),
        ([A.replace('-', '').upper()], Command('query', (A,), Options())),
        (['destroy', A, '--wait', B], Command('destroy', (A, B), Options(wait=''))),
        (['wait', A, B, '--for', 'disk'], Command('wait', (A, B), Options(stage='disk'))),
        (['stop', A, B], Command('stop', (A, B), Options())),
        (['reboot', '--wait', A, '--timeout', '5'], Command('reboot', (A,), Options(wait='', timeout=5.0))),
        (['wait', '--timeout', '5', A], Command('wait', (A,), Options(timeout=5.0))),
        (['-f', 'json', 'list', '--all'], Command('list', (), Options(format='json', all=True))),
        (['hosts', '-f', 'json'], Command('hosts', (), Options(format='json'))),
        (['host', 'forget', A.upper()], Command('host forget', (A,), Options())),
        (['web1'], Command('query', ('web1',), Options())),
        (['1F0E4C9A'], Command('query', ('1F0E4C9A',), Options())),
        (['show', 'web1', '1f0e', A.upper()], Command('show', ('web1', '1f0e', A), Options())),
        (
            [QUERY, '--name', 'web1', '--ssh-key', 'a.pub', '--user-data', '-', '--ssh-key', 'b.pub'],
            Command('create', (QUERY,), Options(name='web1', ssh_key=['a.pub', 'b.pub'], user_data='-')),
        ),
        (['--queue', '--flavor', 'x', IMAGE], Command('create', ('', IMAGE), Options(flavor='x', queue=True))),
        (['show', A, '--config', 'x.yaml'], Command('show', (A,), Options(config='x.yaml'))),
    ],
)
def test_each_form(argv: list[str], command: Command) -> None:
    assert parse(argv) == command


def test_an_empty_uuid_is_not_a_new_one() -> None:
    # "--uuid $X" of a variable nobody set: it must not be placed under a uuid nobody knows.
    with pytest.raises(UsageError):
        parse([QUERY, '--uuid', ''])


@pytest.mark.parametrize(
    ('argv', 'said'),
    [
        (['wait'], 'which instance'),
        (['wait', A, '--for', 'paradise'], '--for=paradise: there is no such stage; say requested, '),
        (['wait', A, '--wait'], '--wait does not go with this form'),
        (['show', A, '--for', 'disk'], '--for does not go with this form'),
        ([QUERY, '--wait=paradise'], '--wait=paradise: there is no such stage'),
        (['start', A, '--wait=started'], 'start waits for one thing'),
        (['stop'], 'which instance'),
        (['--queue', QUERY], 'give a --flavor'),
        (['--queue', '--flavor', 'x', QUERY], 'no query on top'),
        (['--queue', '--flavor', 'x', '--on', 'hv1'], '--on does not go with --queue'),
        (['--queue', '--flavor', 'x', '--weigh', 'pack'], '--weigh does not go with --queue'),
        (['--queue', '--flavor', 'x', '--count', '2'], '--count does not go with --queue'),
        (['plan', '--queue', '--flavor', 'x'], '--queue does not go with this form'),
        ([QUERY, '--timeout', '5'], '--timeout goes with --wait'),
    ],
)
def test_what_does_not_go_together(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(argv)


def test_every_form_is_run_and_explained() -> None:
    assert set(RUNS) == set(FORMS) - {CREATE}
    helped = parser().format_help()
    for form in FORMS.values():
        assert f'{form.usage} ' in helped
        assert form.help in helped
