"""What is on the NoCloud disk of a guest that gets its metadata so: mdserver's own words, asked of its program."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from ecomp.agent.host.metadata_server import configuration, mdserver
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed, UsageError

SECONDS = 60.0
"""How long mdserver may take to say it: beyond that the build fails."""


def nocloud(config: ComputeConfig, is_served: Callable[[], bool]) -> Callable[[str], Mapping[str, bytes]] | None:
    """What says what is on a guest's NoCloud disk; None where guests get none. `is_served`: metadata is served here."""
    if config.metadata == 'network':
        return None
    return lambda mac: seed(config.state / 'metadata', config.directory, mac, phones_home=is_served())


def seed(guests: Path, directory: Path, mac: str, phones_home: bool) -> Mapping[str, bytes]:
    """The files of the NoCloud disk of the guest with this MAC, by name. BuildFailed('scheduled', reason).

    `guests` is GuestData's directory, `directory` may have an mdserver.conf. With `phones_home` a metadata server is
    there to hear of it when its cloud-init is through.
    """
    try:
        options = [] if phones_home else ['--no-phone-home']
        with configuration(directory) as (words, opened):
            command = [*mdserver('seed', guests), *options, mac, *words]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, cwd='/', pass_fds=opened
            )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed('scheduled', f'its seed is not known within {SECONDS:g} s') from error
    except UsageError as error:
        raise BuildFailed('scheduled', str(error)) from error
    said = done.stderr.decode(errors='replace').strip().splitlines() or [f'mdserver.seed ended with {done.returncode}']
    if done.returncode:
        raise BuildFailed('scheduled', said[-1])
    return {name: text.encode(errors='surrogateescape') for name, text in json.loads(done.stdout).items()}
