"""Run elab as a command on this machine, and list the traces that a lab leaves there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ecomp.errors import UsageError
from ecomp.lab import guest, machine
from tests.kit.servers import make_environment

ROOT = Path('/var/lib/elab')
NAME = f'f{os.getpid()}'


def describe_missing() -> str:
    """Return why no lab can be made on this machine, or ''."""
    try:
        machine.require_root('a lab')
        programs = {**machine.CONTROL_PROGRAMS, **machine.SECURE_PROGRAMS, **machine.HOST_PROGRAMS, **guest.PROGRAMS}
        machine.require(programs, ['placement', 'waitress', 'libvirt'])
    except UsageError as error:
        return str(error)
    return ''


def make_command(*words: str) -> list[str]:
    return [sys.executable, '-m', 'ecomp.lab.elab', *words]


def run_elab(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run elab and assert its exit code."""
    result = subprocess.run(
        make_command(*words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=make_environment(),
        timeout=200,
    )
    assert result.returncode == code, f'elab {words}: {result.returncode}\n{result.stdout}{result.stderr}'
    return result


def read_lab_json(name: str) -> dict[str, Any]:
    """Read lab.json, or return {} if it does not exist."""
    path = ROOT / name / 'lab.json'
    return dict(json.loads(path.read_text())) if path.exists() else {}


def list_traces(name: str, link: str) -> list[str]:
    """List a lab's files, namespaces, interfaces, routes, mounts and processes on this machine."""
    lines = [str(path) for path in (ROOT / name,) if path.exists()]
    if link in {
        read_lab_json(path.parent.name).get('link') for path in ROOT.glob('*/lab.json') if path.parent.name != name
    }:
        link = 'none'  # the number of this link has been reused by another lab
    commands = (['ip', 'netns', 'list'], ['ip', '-o', 'link', 'show'], ['ip', 'route', 'show', 'table', 'all'])
    for listing in commands:
        output = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        lines += [line for line in output if f'elab-{name}-' in line or link in line.replace('@', ' ').split()]
    lines += [line for line in Path('/proc/self/mountinfo').read_text().splitlines() if f'elab-{name}-' in line]
    for process in Path('/proc').glob('[0-9]*'):
        try:
            command_line = (process / 'cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace')
        except OSError:
            continue
        if f'{ROOT}/{name}/' in command_line:
            lines.append(f'{process.name}: {command_line}')
    return lines
