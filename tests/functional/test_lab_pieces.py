"""What an `elab up` that was killed has made, and what an earlier elab or somebody's mount left: said, and removed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ecomp.lab import state
from tests.functional.elab_run import NAME, ROOT, command, elab, facts, missing, traces
from tests.kit.servers import environment, until

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing())]


def test_a_lab_that_another_elab_made_can_be_removed() -> None:
    name = f'{NAME}old'
    (ROOT / name).mkdir(parents=True)
    (ROOT / name / 'lab.json').write_text('{"version": 1}')
    try:
        said = elab('up', '--name', name, code=1).stderr
        assert f'is of version 1, and this elab knows 2: elab down --name {name}, then elab up\n' in said
    finally:
        elab('down', '--name', name)
    assert not (ROOT / name).exists()


def test_one_that_was_killed_as_it_began_has_a_status() -> None:
    """Nothing but lab.json is there: what is down is said, and nothing is made."""
    name = f'{NAME}new'
    try:
        with state.locked(ROOT / name):
            state.load_or_create(name, 1)
        rows = elab('status', '--name', name, code=1).stdout.splitlines()
        assert [row.split()[2] for row in rows[1:]] == ['down'] * 5 + ['down:']
        assert [path.name for path in (ROOT / name).iterdir()] == ['lab.json']
    finally:
        elab('down', '--name', name)


DAEMONS = 'libvirtd', 'ecompute'


@pytest.mark.parametrize(
    'moment',
    ['nothing', 'control', 'etcd', *(pytest.param(f'hv1 {each}', marks=pytest.mark.slow) for each in DAEMONS)],
)
def test_what_a_killed_up_has_made_is_found_and_removed(moment: str) -> None:
    name = f'{NAME}k'

    def reached() -> bool:
        if moment == 'nothing':
            return (ROOT / name).exists()
        if moment == 'control':
            return Path(f'/run/netns/elab-{name}-control').exists()
        return moment in facts(name).get('processes', {})

    process = subprocess.Popen(command('up', '--name', name, '--hosts', '1'), env=environment(), stderr=subprocess.PIPE)
    try:
        until(reached, 60, f'{moment} is there')
        process.kill()
        process.wait()
        link = facts(name).get('link', 'none')
    finally:
        process.kill()
        process.communicate()
        elab('down', '--name', name)

    assert traces(name, link) == []
    elab('down', '--name', name)  # nothing there is no error


def test_what_is_mounted_in_a_lab_is_named_by_a_down_and_stays_as_it_is() -> None:
    name = f'{NAME}m'
    mounted = ROOT / name / 'hv1/images'
    mounted.mkdir(parents=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none', mounted], check=True)
    (mounted / 'mine').touch()
    try:
        said = elab('down', '--name', name, code=1).stderr.splitlines()[-1]
        why = f'{ROOT / name} cannot be removed whole ({mounted} is a mount)'
        assert said == f'elab: {why}: unmount what is mounted there, and say elab down again'
        assert (mounted / 'mine').exists()
    finally:
        subprocess.run(['umount', mounted], check=True)
        elab('down', '--name', name)
    assert not (ROOT / name).exists()
