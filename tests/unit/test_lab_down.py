"""`elab down` removes what a lab has made, and nothing of anybody else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ecomp.lab import machine, state
from ecomp.lab.elab import main
from tests.unit.lab_root import make_lab


@pytest.mark.usefixtures('as_root')
def test_a_lab_behind_a_link_is_removed_with_the_link(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, somebodys = root.parent / 'there', root.parent / 'somebodys'
    for place, link in ((there, root / 'one'), (somebodys, root / 'two')):
        place.mkdir()
        link.symlink_to(place)
    make_lab(root)
    for place in (there, somebodys):
        (place / 'images').mkdir()
        (place / 'images/file').write_text('')
    (there / 'link').symlink_to(somebodys)
    for name in ('one', 'two'):
        assert main(['down', '--name', name]) == 0
        assert f'lab {name} is gone' in capsys.readouterr().err
    assert not root.exists()
    assert not there.exists()
    assert (somebodys / 'images/file').exists()


@pytest.mark.usefixtures('as_root')
@pytest.mark.parametrize('linked', [False, True])
def test_what_is_mounted_in_a_lab_is_said_before_anything_ends(
    linked: bool, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`down` emptied somebody's file system, and said then that it cannot be removed."""
    there = root.parent / 'my disk' if linked else root / 'one'
    if linked:
        there.mkdir()
        (root / 'one').symlink_to(there)
    make_lab(root)
    (there / 'images').mkdir()
    (there / 'images/mine').write_text('')
    monkeypatch.setattr(machine, 'end_processes', lambda *_: pytest.fail('something was ended'))
    monkeypatch.setattr(state, 'MOUNTINFO', root.parent / 'mountinfo')
    line = '25 1 0:22 / {} rw,relatime shared:1 - ext4 /dev/sdb1 rw\n'
    around = [root.parent, Path('/'), there, there.with_name(f'{there.name}2') / 'x']
    mounts = [line.format(str(each).replace(' ', '\\040')) for each in (*around, there / 'images')]
    state.MOUNTINFO.write_text(''.join(mounts))
    assert main(['down', '--name', 'one']) == 1
    why = f'{root}/one cannot be removed whole ({there}/images is a mount)'
    said = f'elab: {why}: unmount what is mounted there, and say elab down again\n'
    assert capsys.readouterr() == ('', said)
    assert (there / 'images/mine').exists()
    monkeypatch.setattr(machine, 'end_processes', lambda *_: None)
    state.MOUNTINFO.write_text(''.join(mounts[:-1]))
    assert main(['down', '--name', 'one']) == 0
    assert not there.exists()


@pytest.mark.usefixtures('as_root')
def test_a_down_that_was_killed_is_gone_on_with_behind_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lab.json the next one would take what is left for somebody's."""
    there = root.parent / 'there'
    there.mkdir()
    (root / 'one').symlink_to(there)
    make_lab(root)
    for name in ('control', 'images', 'zoo'):
        (there / name).mkdir()
    remove = shutil.rmtree

    def killed(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(shutil, 'rmtree', killed)
        assert main(['down', '--name', 'one']) == 1
        assert (there / 'lab.json').exists()
    monkeypatch.setattr(shutil, 'rmtree', remove)
    assert main(['down', '--name', 'one']) == 0
    assert not there.exists()
