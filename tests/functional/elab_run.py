"""elab as it is typed, on this machine, and all that the machine shows of a lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ecomp.errors import UsageError
from ecomp.lab import guest, machine
from tests.kit.servers import environment

ROOT = Path('/var/lib/elab')
NAME = f'f{os.getpid()}'


def missing() -> str:
    """What keeps a lab from being made here, in words; '' if nothing does."""
    try:
        machine.require_root('a lab')
        programs = {**machine.CONTROL_PROGRAMS, **machine.SECURE_PROGRAMS, **machine.HOST_PROGRAMS, **guest.PROGRAMS}
        machine.require(programs, ['placement', 'waitress', 'libvirt'])
    except UsageError as error:
        return str(error)
    return ''


def command(*words: str) -> list[str]:
    return [sys.executable, '-m', 'ecomp.lab.elab', *words]


def elab(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run elab, which has to end with `code`."""
    done = subprocess.run(
        command(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == code, f'elab {words}: {done.returncode}\n{done.stdout}{done.stderr}'
    return done


def facts(name: str) -> dict[str, Any]:
    """lab.json; {} if there is none."""
    path = ROOT / name / 'lab.json'
    return dict(json.loads(path.read_text())) if path.exists() else {}


def traces(name: str, link: str) -> list[str]:
    """All that this machine shows of a lab: files, namespaces, interfaces, routes, mounts and processes."""
    found = [str(path) for path in (ROOT / name,) if path.exists()]
    if link in {facts(path.parent.name).get('link') for path in ROOT.glob('*/lab.json') if path.parent.name != name}:
        link = 'none'  # another lab beside this one has been given its number since
    commands = (['ip', 'netns', 'list'], ['ip', '-o', 'link', 'show'], ['ip', 'route', 'show', 'table', 'all'])
    for each in commands:
        lines = subprocess.run(each, capture_output=True, text=True, check=True).stdout.splitlines()
        found += [line for line in lines if f'elab-{name}-' in line or link in line.replace('@', ' ').split()]
    found += [line for line in Path('/proc/self/mountinfo').read_text().splitlines() if f'elab-{name}-' in line]
    for process in Path('/proc').glob('[0-9]*'):
        try:
            words = (process / 'cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace')
        except OSError:
            continue
        if f'{ROOT}/{name}/' in words:
            found.append(f'{process.name}: {words}')
    return found
