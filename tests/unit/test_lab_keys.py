"""The ssh key that a lab's guests are given: the first that is one, whatever else lies beside it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from mdserver import conf

from ecomp.lab.hosts import mdserver_conf


def line(kind: str) -> str:
    """A line of a .pub of this kind."""
    blob = b''.join(len(each).to_bytes(4, 'big') + each for each in (kind.encode(), bytes(32)))
    return f'{kind} {base64.b64encode(blob).decode()}'


KEY = line('ssh-ed25519')
PUTTY = f'---- BEGIN SSH2 PUBLIC KEY ----\nComment: "me"\n{KEY.split()[1]}\n---- END SSH2 PUBLIC KEY ----\n'
ODD = {
    'certificate': line('ssh-ed25519-cert-v01@openssh.com').encode(), 'putty': PUTTY.encode(),
    'latin-1': f'{KEY} J\xfcrgen'.encode('latin-1'), 'empty': b'', 'words': b'two words\n', 'cut': KEY[:-8].encode(),
}  # fmt: skip


@pytest.mark.parametrize('odd', [*ODD, 'dangling', 'directory'])
def test_what_is_no_key_for_a_guest_is_passed_over(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('SUDO_USER', raising=False)
    first = tmp_path / '.ssh/a.pub'
    first.parent.mkdir()
    (tmp_path / 'user-data').write_text('#!/bin/sh\n')
    if odd == 'dangling':
        first.symlink_to('none')
    elif odd == 'directory':
        first.mkdir()
    else:
        first.write_bytes(ODD[odd])

    def given() -> tuple[tuple[str, str], ...]:
        path = tmp_path / 'mdserver.conf'
        path.write_text(mdserver_conf())
        return conf.load(path).public_keys

    assert given() == ()
    (tmp_path / '.ssh/b.pub').write_text(f'{KEY} me@here 100%\nand more\n')
    assert given() == (('default', f'{KEY} me@here 100%'),)
