"""elab's front door: a whole cluster on one machine, up, looked at, entered and removed.

Progress goes to stderr, step by step with its seconds; what was asked for goes to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ecomp import log, read_version, systemd
from ecomp.arguments import Parser
from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.lab import control, guest, machine, state
from ecomp.lab.hosts import LabHost
from ecomp.lab.network import CONTROL, ETCD_PORT, MOST_HOSTS, PLACEMENT_PORT, backends_yaml, bracketed, check_name
from ecomp.lab.state import Lab

RCFILE = """\
[ -r ~/.bashrc ] && . ~/.bashrc
PS1="({name}) ${{PS1-}}"
"""
"""What bash reads first: the user's own, which sets PS1, and then which lab this is."""


def enter(lab: Lab, words: Sequence[str]) -> int:
    """Run a command, or bash where `words` is empty, with ECOMP_CONFIG at the lab's schedule.yaml; its exit code.

    The directory of the Python that runs this comes first in PATH, for eschedule is beside it. EcompError.
    """
    config = lab.directory / 'schedule.yaml'
    if not os.access(config, os.R_OK):
        raise EcompError(f'{config} cannot be read: elab up --name {lab.layout.name} writes it')
    beside = str(Path(sys.executable).parent)
    paths = [beside, *(each for each in os.environ.get('PATH', os.defpath).split(os.pathsep) if each != beside)]
    env = {**os.environ, 'ECOMP_CONFIG': str(lab.directory), 'PATH': os.pathsep.join(paths)}
    # A file that is nowhere: nothing is left of it, and whoever may not write to the lab's directory has one, too.
    with open(os.memfd_create('bashrc', 0), 'w', encoding='utf-8') as rcfile:
        rcfile.write(RCFILE.format(name=lab.layout.name))
        rcfile.flush()
        command = list(words) or ['bash', '--rcfile', f'/dev/fd/{rcfile.fileno()}', '-i']
        os.lseek(rcfile.fileno(), 0, os.SEEK_SET)
        try:
            child = subprocess.Popen(command, env=env, pass_fds=() if words else (rcfile.fileno(),))
        except OSError as error:
            raise EcompError(f'{command[0]}: {error.strerror}') from error
        return waited(child)


def waited(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a command that has the terminal, as a shell has it."""
    while True:
        # Ctrl-C reaches the command too; what that means is the command's to decide.
        with contextlib.suppress(KeyboardInterrupt):
            code = child.wait()
            return code if code >= 0 else 128 - code


SCHEDULE_YAML = """\
# Written once by elab: eschedule, run in this directory or with --config, asks the lab {name}.
{backends}\
# What `elab guest {directory}/images/guest.qcow2` makes; from elsewhere nothing can be fetched.
image: {images}guest.qcow2
# Its hosts are no machines that ssh finds.
reach: {reach}
"""


def start_control(lab: Lab) -> None:
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


IMAGE = Path('images/guest.qcow2')


def main(argv: Sequence[str] | None = None) -> int:
    """Run elab; the exit code. Never a traceback for what a user or the machine can cause."""
    log.hold_descriptors()
    options = argparse.Namespace(run=None)
    try:
        try:
            options = parser().parse_args(argv)
            return int(options.run(options))
        finally:
            log.flush()
    except EcompError as error:
        _say(f'elab: {error}')
        return error.exit_code
    except BrokenPipeError:
        return 1  # whoever read us (head, less) has gone
    except OSError as error:
        _say(f'elab: {error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        goes_on = '; elab up goes on where it was, elab down removes what there is'
        _say('elab: interrupted' + (goes_on if options.run in (_up, _down) else ''))
        return 1


def parser() -> argparse.ArgumentParser:
    """What elab may be told."""
    made = Parser('elab', description='A whole cluster on one machine: etcd, placement and hypervisor hosts.')
    made.add_argument('--version', action='version', version=f'elab {read_version()}')
    commands = made.add_subparsers(required=True, metavar='COMMAND')

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    def of_a_lab(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = command(name, run, text)
        which = 'which lab (default: that of this directory or of this elab shell, else lab)'
        added.add_argument('--name', default=state.find_lab_here(), help=which)
        return added

    def ports(added: argparse.ArgumentParser) -> None:
        for name, port in (('etcd', ETCD_PORT), ('placement', PLACEMENT_PORT)):
            added.add_argument(f'--{name}-port', type=_port, default=port, metavar='PORT', help=f'default: {port}')

    up = of_a_lab('up', _up, 'make the lab, or of one that is there what is missing or has ended')
    up.add_argument('--hosts', type=_count, metavar='N', help='how many hypervisor hosts (3); a lab can grow')
    of_a_lab('status', _status, 'what is there, and whether it answers')
    run = of_a_lab('exec', _exec, 'run a command in a host (hv1, hv2 …) or in `control`')
    run.add_argument('host', metavar='HOST', help='the host, or control')
    run.add_argument('words', metavar='CMD', nargs=argparse.REMAINDER, help='the command and its words')
    inside = of_a_lab('shell', _shell, 'a shell in which eschedule asks the lab, by its schedule.yaml')
    inside.add_argument('words', metavar='CMD', nargs=argparse.REMAINDER, help='a command, in place of the shell')
    command('list', _list, 'all labs of this machine: whether each is up, and where it is')
    of_a_lab('down', _down, 'remove the lab, its guests and all it made')
    only = command('control', _control, 'only etcd and placement, in the foreground')
    only.add_argument('--bind', default=control.LOCALHOST, metavar='ADDRESS', help='where both listen (127.0.0.1)')
    where = 'as elab certs makes it, and made if need be; on an address that others reach ./certs is the default'
    only.add_argument('--certs', type=Path, metavar='DIR', help=where)
    ports(only)
    only.add_argument('--data', type=Path, default=Path('elab-control'), metavar='DIR', help='default: ./elab-control')
    unit = 'print the systemd unit that runs this command in this directory, and end'
    only.add_argument('--unit', action='store_true', help=unit)
    certs = command('certs', _certs, 'make certificates for etcd, placement and everybody who asks them')
    directory = 'where they are made; without a NAME those in it that end within a month are made anew'
    certs.add_argument('directory', type=Path, metavar='DIR', help=directory)
    for option, what in (
        ('--control', 'names and addresses of the control host, the first for clients; once is enough'),
        ('--compute', 'hypervisors; NAME=UUID for one that has a uuid already'),
        ('--scheduler', 'machines where eschedule runs'),
        ('--operator', 'people who may do everything'),
    ):
        certs.add_argument(option, nargs='+', action='extend', default=[], metavar='NAME', help=what)
    ports(certs)
    roles = certs.add_mutually_exclusive_group()
    hold = 'have etcd hold each certificate in DIR to its role, so that no compute writes what is of another'
    roles.add_argument('--enable', action='store_true', help=hold)
    roles.add_argument('--disable', action='store_true', help='have etcd let every certificate do everything again')
    image = command('guest', _guest, 'make a small guest image out of Debian packages')
    image.add_argument('output', type=Path, metavar='OUT.qcow2', help='the file it is to be')
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_HOSTS:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number from 1 to {MOST_HOSTS}')
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'{text!r} is not a port, 1 to 65535')
    return int(text)


def _ports(options: argparse.Namespace) -> tuple[int, int]:
    """etcd's and placement's. UsageError if they are one."""
    if options.etcd_port == options.placement_port:
        raise UsageError(f'etcd and placement cannot both have port {options.etcd_port}: say two')
    return options.etcd_port, options.placement_port


def _up(options: argparse.Namespace) -> int:
    name = check_name(options.name)
    machine.require_root('elab up')
    # QEMU, dnsmasq and whoever types eschedule are other users; what is secret has a mode of its own.
    os.umask(0o022)
    modules = ['placement', 'waitress', 'cryptography', 'libvirt', 'mdserver']
    machine.require({**machine.CONTROL_PROGRAMS, **machine.SECURE_PROGRAMS, **machine.HOST_PROGRAMS}, modules)
    from ecomp.lab import certs

    with _lock(name), _step(f'lab {name} is up'):
        lab = state.load_or_create(name, options.hosts)
        if options.hosts and options.hosts < lab.count:
            _say(f'lab {name} has {lab.count} hosts already; elab down removes them')
        with _step('control plane'):
            start_control(lab)
        hosts = [LabHost(lab, each) for each in lab.hosts]
        _divide(hosts)
        with _step('namespaces and libvirtd of ' + ', '.join(lab.hosts)):
            # Each waits for its own QEMU to be probed, so all are started before the first is waited for.
            for host in hosts:
                host.prepare()
                host.start_libvirt()
            for host in hosts:
                host.wait_libvirt()
        with _step('ecompute on ' + ', '.join(lab.hosts)):
            # A lab that an earlier elab began stays without roles.
            if all(host.takes_role() for host in hosts):
                certs.enable(lab.certs, datetime.now(UTC), lambda _: None)
            for host in hosts:
                host.start_ecompute()
            for host in hosts:
                host.wait_ecompute()
    _see_to_image(lab)
    print(f'etcd {lab.layout.etcd}\nplacement {lab.layout.placement}\nimages {lab.layout.images}')
    print(f'schedule.yaml {lab.directory}/schedule.yaml')
    return 0


def _divide(hosts: Sequence[LabHost]) -> None:
    """Where hosts join others, take from those what is the new ones' share of the machine; guests go on."""
    there = [host for host in hosts if (host.directory / 'compute.yaml').exists()]
    if not there or len(there) == len(hosts):
        return
    less = [host.name for host in there if host.share_with_more()]
    if less:
        _say(f'{", ".join(less)}: less now, for the machine is divided among {len(hosts)} hosts')


def _see_to_image(lab: Lab) -> None:
    """The guest image that schedule.yaml names: another lab's is taken, and else it is said how to make one."""
    mine = lab.directory / IMAGE
    theirs = [each.directory / IMAGE for each in state.all_labs() if (each.directory / IMAGE).is_file()]
    if mine.exists():
        return
    if theirs:
        part = mine.with_suffix('.part')
        shutil.copyfile(theirs[0], part)
        part.rename(mine)
        _say(f'{mine}: copied from {theirs[0]}')
    else:
        _say(f'there is no guest image yet: elab guest {mine}')


def _status(options: argparse.Namespace) -> int:
    machine.require_root('elab status')
    lab = state.load(check_name(options.name))
    layout = lab.layout
    rows = [('PLACE', 'ADDRESS', 'STATE')]
    for server in control.lab_servers(layout, lab.directory / CONTROL, lab.directory / 'images', lab.certs):
        process = lab.running(server.what)
        said = 'down' if process is None else 'ready' if server.ready(process) else f'no answer (pid {process.pid})'
        rows.append((server.what, str(layout.control), said))
    etcd_answers = ('etcd', str(layout.control), 'ready') in rows
    for name in lab.hosts:
        rows.append((name, str(layout.address(name)), LabHost(lab, name).state(etcd_answers)))
    for place, address, said in rows:
        print(f'{place:<10} {address:<15} {said}')
    kinds = {kind: [row[0] for row in rows[1:] if row[2].startswith(kind)] for kind in ('down', 'no answer', 'unknown')}
    if kinds['down']:
        _say(f'down: {", ".join(kinds["down"])}; elab up --name {layout.name} starts what is down')
    if kinds['no answer']:
        _say(f'no answer: {", ".join(kinds["no answer"])}; end what hangs, and elab up --name {layout.name} starts it')
    return 1 if any(kinds.values()) else 0


def _exec(options: argparse.Namespace) -> int:
    machine.require_root('elab exec')
    lab = state.load(check_name(options.name))
    if options.host not in lab.places:
        raise NotFound(f'lab {lab.layout.name} has no host {options.host!r}, but {", ".join(lab.places)}')
    if not options.words:
        raise UsageError(f'exec {options.host}: which command?')
    if not machine.exists(lab.layout, options.host):
        raise EcompError(f'{options.host} is down: elab up --name {lab.layout.name} starts it')
    return waited(subprocess.Popen([*machine.inside(lab.layout, lab.directory, options.host), *options.words]))


def _shell(options: argparse.Namespace) -> int:
    # argparse leaves a leading -- to a command that takes all the rest.
    words = options.words[1:] if options.words[:1] == ['--'] else options.words
    return enter(state.load(check_name(options.name)), words)


def _list(_: argparse.Namespace) -> int:
    found = state.all_labs()
    if not found:
        _say('there is no lab: elab up makes one')
        return 0
    rows = [('LAB', 'STATE', 'HOSTS', 'NETWORK', 'DIRECTORY'), *map(_as_row, found)]
    width = max(len(name) for name, *_ in rows)
    for name, *others in rows:
        print(f'{name:<{width}}', '{:<13} {:<5} {:<15} {}'.format(*others))
    return 0


def _as_row(lab: Lab) -> tuple[str, ...]:
    servers = ('etcd', 'placement', *(f'{host} {each}' for host in lab.hosts for each in ('libvirtd', 'ecompute')))
    running = [each for each in servers if lab.running(each)]
    said = 'up' if len(running) == len(servers) else 'partly up' if running else 'down'
    return lab.layout.name, said, str(lab.count), str(lab.layout.network), str(lab.directory)


def _down(options: argparse.Namespace) -> int:
    name = check_name(options.name)
    machine.require_root('elab down')
    directory = state.ROOT / name
    try:
        lab = state.load(name)
    except EcompError:
        # Killed before it was written down, removed by hand, or made by another elab: what bears its name is found.
        lab = None
        if not directory.exists() and not machine.of_lab(name):
            _say(f'there is no lab {name}')
            return 0
    with _lock(name), _step(f'lab {name} is gone'):
        state.check_removable(directory)
        with contextlib.suppress(EcompError):
            lab = state.load(name)  # an elab up may just have ended
        spaces = machine.of_lab(name)
        recorded = list(lab.processes.values()) if lab else []
        with _step('processes and guests ended'):
            # Hosts first: their ecomputes say good-bye to etcd and placement.
            machine.end_processes([space for space in spaces if not space.endswith(f'-{CONTROL}')], [])
            machine.end_processes(spaces, recorded)
        with _step('namespaces and links removed'):
            machine.remove(spaces, lab.layout if lab else None)
        state.remove(directory)
    with contextlib.suppress(OSError):  # other labs are in it
        state.ROOT.rmdir()
    return 0


def _control(options: argparse.Namespace) -> int:
    host = 'localhost' if options.bind == control.LOCALHOST else bracketed(options.bind)

    def ready(scheme: str) -> None:
        where = f'etcd {host}:{options.etcd_port}\nplacement {scheme}://{host}:{options.placement_port}'
        print(where, flush=True)

    asked = control.with_certs(control.Endpoints(*_ports(options), options.data, options.bind, options.certs))
    if options.unit:
        program = systemd.program(sys.argv[0], sys.executable, 'ecomp.lab.elab')
        told = control.words(asked)
        control.check_service(asked, Path(program[0]))
        log.print_utf_8()
        print(systemd.unit('ecomp-control.service', [*program, *told]), end='')
    else:
        control.run(asked, systemd.Service.of(os.environ), _say, ready)
    return 0


def _certs(options: argparse.Namespace) -> int:
    machine.require({}, ['cryptography', *(['etcd3'] if options.enable or options.disable else [])])
    from ecomp.lab import certs

    named = options.control or options.compute or options.scheduler or options.operator
    if options.disable and named:
        raise UsageError('--disable makes no certificates: say it alone')
    now = datetime.now(UTC).replace(microsecond=0)
    computes = [each.partition('=') for each in options.compute]
    etcd_port, placement_port = _ports(options)
    cluster = certs.Cluster(
        servers=tuple(options.control),
        computes=tuple(name for name, _, _ in computes),
        schedulers=tuple(options.scheduler),
        operators=tuple(options.operator),
        etcd_port=etcd_port,
        placement_port=placement_port,
        uuids={name: compute for name, says, compute in computes if says},
    )
    if not options.disable:
        certs.make(options.directory, cluster, now, _say, others=not named)
    if options.enable:
        certs.enable(options.directory, now, _say)
    elif options.disable:
        certs.disable(options.directory, _say)
    return 0


def _guest(options: argparse.Namespace) -> int:
    with _step(f'{options.output} is made'):
        guest.make(options.output, _say)
    return 0


def _lock(name: str) -> contextlib.AbstractContextManager[None]:
    return state.locked(state.ROOT / name, lambda: _say(f'another elab is at work on lab {name}: waiting for it'))


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Say `what` was done and how many seconds it took, once the block is through."""
    began = time.monotonic()
    yield
    _say(f'{time.monotonic() - began:6.1f} s  {what}')


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed terminal changes nothing of what is done
        print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
    sys.exit(main())
