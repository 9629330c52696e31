"""A lab's control plane: its namespace, its certificates, its servers, and the schedule.yaml that asks them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from datetime import UTC, datetime

from ecomp.lab import control, machine, state
from ecomp.lab.network import CONTROL, ETCD_PORT, PLACEMENT_PORT, backends_yaml
from ecomp.lab.state import Lab

SCHEDULE_YAML = """\
# Written once by elab: eschedule, run in this directory or with --config, asks the lab {name}.
{backends}\
# What `elab guest {directory}/images/guest.qcow2` makes; from elsewhere nothing can be fetched.
image: {images}guest.qcow2
# Its hosts are no machines that ssh finds.
reach: {reach}
"""


def start(lab: Lab) -> None:
    """Make what is missing of it, start what has ended, and wait until all of it answers. EcompError."""
    layout, data, images = lab.layout, lab.directory / CONTROL, lab.directory / 'images'
    for directory in (data, images):
        directory.mkdir(exist_ok=True)
    machine.ensure_control(layout)
    _make_certificates(lab)
    servers = control.lab_servers(layout, data, images, lab.certs)
    prefix = machine.inside(layout, lab.directory, CONTROL)
    for server in servers:
        if not lab.running(server.what):
            server.start(prefix, lab.remember)
    for server in servers:
        server.wait(lab.processes[server.what])
    schedule = lab.directory / 'schedule.yaml'
    if not schedule.exists():
        backends = backends_yaml(str(layout.control), ETCD_PORT, layout.placement, f'{lab.operator}/')
        text = SCHEDULE_YAML.format(name=layout.name, backends=backends, directory=lab.directory, images=layout.images,
                                      reach=json.dumps(_reach(layout.name)))
        schedule.write_text(text, encoding='utf-8')


def _reach(name: str) -> str:
    """How eschedule enters a host: by this elab, which has to be root's, as its caller became it."""
    words = [*(['sudo'] if 'SUDO_UID' in os.environ else []), sys.executable, '-P', '-m', 'ecomp.lab.elab', 'exec']
    return f'{shlex.join([*words, "--name", name])} {{host}}'


def _make_certificates(lab: Lab) -> None:
    from ecomp.lab import certs

    lab.certs.mkdir(mode=0o711, exist_ok=True)  # the operator's own are below it; all else in it is root's
    own = str(lab.layout.control)
    servers = (own, control.LOCALHOST, 'localhost')
    cluster = certs.Cluster(servers, tuple(lab.hosts), (), (state.OPERATOR,), ETCD_PORT, PLACEMENT_PORT)
    shown = lab.certs / 'placement/server.crt'
    before = shown.read_bytes() if shown.exists() else b''
    certs.make(lab.certs, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)
    # etcd reads its certificate for each connection, stunnel when it is told.
    if (stunnel := lab.running('stunnel')) is not None and shown.read_bytes() != before:
        os.kill(stunnel.pid, signal.SIGHUP)
    # The directory is the caller's, and of whose it is where root calls by itself.
    owner = int(os.environ.get('SUDO_UID', lab.operator.stat().st_uid))
    for path in (lab.operator, *lab.operator.iterdir()):
        os.chown(path, owner, -1, follow_symlinks=False)
