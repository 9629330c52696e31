"""The entry point of elab, which prints results to stdout, and its progress to stderr."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ecomp import log, systemd
from ecomp.arguments import Parser
from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.lab import control, fakes, guest, machine, state
from ecomp.lab.fakes import FakeHost
from ecomp.lab.hosts import Host, LabHost, write_once
from ecomp.lab.network import CONTROL, ETCD_PORT, MAX_HOSTS, PLACEMENT_PORT, bracket_address, require_lab_name
from ecomp.lab.state import AnyLab, FakeLab, Lab
from ecomp.version import read_version

# The startup file of bash: the user's own, which sets PS1, and then the lab's name.
RCFILE = """\
[ -r ~/.bashrc ] && . ~/.bashrc
PS1="({name}) ${{PS1-}}"
"""
GUEST_IMAGE = Path('images/guest.qcow2')
LAB_DAEMONS = ('libvirtd', 'ecompute')


def enter_shell(directory: Path, name: str, words: Sequence[str]) -> int:
    """Run a command, or bash without `words`, with the lab's ECOMP_CONFIG."""
    config = directory / 'schedule.yaml'
    if not os.access(config, os.R_OK):
        raise EcompError(f'{config} cannot be read. Try: elab up --name {name}')
    own = str(Path(sys.executable).parent)
    paths = [own, *(path for path in os.environ.get('PATH', os.defpath).split(os.pathsep) if path != own)]
    env = {**os.environ, 'ECOMP_CONFIG': str(directory), 'PATH': os.pathsep.join(paths)}
    # Not a file: none is left behind, and users without write access to the lab's directory have it too.
    command = list(words) or ['bash', '-c', 'exec bash --rcfile <(echo "$0") -i', RCFILE.format(name=name)]
    try:
        return wait_for_exit(subprocess.Popen(command, env=env))
    except OSError as error:
        raise EcompError(f'{command[0]}: {error.strerror}') from error


def wait_for_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait for a command's end, and return its exit code, or 128 + N if signal N ended it."""
    while True:
        # Ctrl-C reaches the command too, which decides how to react.
        with contextlib.suppress(KeyboardInterrupt):
            code = child.wait()
            return code if code >= 0 else 128 - code


def start_control(lab: AnyLab) -> None:
    """Make and start what the control plane lacks, and wait until its servers are ready."""
    (lab.directory / CONTROL).mkdir(exist_ok=True)
    if isinstance(lab, Lab):
        (lab.directory / 'images').mkdir(exist_ok=True)
        lab.certs.mkdir(mode=0o711, exist_ok=True)  # the operator's directory is below it; the rest is root's
        machine.ensure_control(lab.layout)
    _ensure_certificates(lab)
    servers, prefix = lab.servers, lab.make_command_prefix(CONTROL)
    for server in servers:
        if not lab.find_running(server.name):
            server.start(prefix, lab.record_process)
    for server in servers:
        server.wait(lab.processes[server.name])
    write_once(lab.directory / 'schedule.yaml', lab.render_schedule_yaml())


def _ensure_certificates(lab: AnyLab) -> None:
    """Make what is missing, and give the operator's files to the caller of sudo."""
    from ecomp.lab import certs

    servers = tuple(dict.fromkeys((lab.address, control.LOCALHOST, 'localhost')))
    cluster = certs.Cluster(servers, tuple(lab.hosts), (), (state.OPERATOR,), lab.etcd_port, lab.placement_port)
    server_certificate = lab.certs / 'placement/server.crt'
    old_content = server_certificate.read_bytes() if server_certificate.exists() else b''
    certs.make_certificates(lab.certs, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)
    # etcd reads its certificate for each connection, stunnel on SIGHUP.
    if (stunnel := lab.find_running('stunnel')) is not None and server_certificate.read_bytes() != old_content:
        os.kill(stunnel.pid, signal.SIGHUP)
    if isinstance(lab, Lab):
        # The operator's directory belongs to the caller of sudo, or keeps its owner if root calls directly.
        owner = int(os.environ.get('SUDO_UID', lab.operator.stat().st_uid))
        for path in (lab.operator, *lab.operator.iterdir()):
            os.chown(path, owner, -1, follow_symlinks=False)


def main(argv: Sequence[str] | None = None) -> int:
    log.hold_descriptors()
    options = argparse.Namespace(run=None)
    try:
        try:
            options = make_parser().parse_args(argv)
            return int(options.run(options))
        finally:
            log.flush_stdout()
    except EcompError as error:
        _print_message(f'elab: {error}')
        return error.exit_code
    except BrokenPipeError:
        return 1  # stdout's reader (head, less) has exited
    except OSError as error:
        _print_message(f'elab: {error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        hint = '. Try: `elab up` to complete the lab, or `elab down` to remove it'
        _print_message('elab: interrupted' + (hint if options.run in (_run_up, _run_down) else ''))
        return 1


def make_parser() -> argparse.ArgumentParser:
    top = Parser('elab', description='A whole cluster on one machine: etcd, placement and hypervisor hosts.')
    top.add_argument('--version', action='version', version=f'elab {read_version()}')
    commands = top.add_subparsers(required=True, metavar='COMMAND')

    def add_command(name: str, run: Callable[[argparse.Namespace], int], text: str, has_name: bool = True) -> Parser:
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(run=run)
        if has_name:
            lab_help = 'the lab. Default: the lab of this directory or of this `elab shell`, else `lab`, else `fake`'
            subparser.add_argument('--name', help=lab_help)
        return subparser

    _add_up_options(add_command('up', _run_up, 'create and start the lab, or the missing parts of an existing one'))
    add_command('status', _run_status, 'show for each server and host whether it answers')
    run = add_command('exec', _run_exec, 'run a command in a host (hv1, hv2 …) or in `control`')
    run.add_argument('host', metavar='HOST', help='the host, or control')
    run.add_argument('words', metavar='CMD', nargs=argparse.REMAINDER, help='the command and its arguments')
    shell = add_command('shell', _run_shell, "run a shell in which eschedule uses the lab's schedule.yaml")
    shell.add_argument('words', metavar='CMD', nargs=argparse.REMAINDER, help='the command to run. Default: a shell')
    killed = add_command('kill', _run_kill, 'kill a fake host, as a power cut would; `elab up` brings it back')
    killed.add_argument('host', metavar='HOST', help='the fake host')
    add_command('list', _run_list, 'list all labs of this machine, with state and directory', has_name=False)
    add_command('down', _run_down, 'remove the lab with its guests and everything that elab made for it')
    only = add_command('control', _run_control, 'run only etcd and placement, in the foreground', has_name=False)
    _add_control_options(only)
    certs_text = 'make certificates for etcd, placement and their clients'
    _add_certs_options(add_command('certs', _run_certs, certs_text, has_name=False))
    image = add_command('guest', _run_guest, 'make a small guest image from Debian packages', has_name=False)
    image.add_argument('output', type=Path, metavar='OUT.qcow2', help='the file to write')
    return top


def _add_up_options(parser: argparse.ArgumentParser) -> None:
    hosts_help = 'number of hosts; a lab can grow. Default: 3'
    parser.add_argument('--hosts', type=_parse_count, metavar='N', help=hosts_help)
    fake_help = (
        'make N fake hosts instead, fake1 and so on, with fake guests: that needs neither root nor libvirt. '
        f'Default of N: {fakes.DEFAULT_COUNT}; of the name: {fakes.DEFAULT_NAME}'
    )
    parser.add_argument('--fake', type=_parse_count, nargs='?', const=0, metavar='N', help=fake_help)
    size_help = f'with --fake: the inventory of each host. Default: {fakes.DEFAULT_SIZE}'
    parser.add_argument('--size', metavar='INVENTORY', help=size_help)
    fetch_help = "with --fake: unpack etcd and stunnel for this user, if they are missing, from Debian's packages"
    parser.add_argument('--fetch', action='store_true', help=fetch_help)


def _add_control_options(parser: argparse.ArgumentParser) -> None:
    bind_help = 'address to listen on. Default: 127.0.0.1'
    parser.add_argument('--bind', default=control.LOCALHOST, metavar='ADDRESS', help=bind_help)
    certs_help = (
        'directory of certificates as `elab certs` makes it, created if missing. Default: none if ADDRESS is a '
        'loopback address, else ./certs'
    )
    parser.add_argument('--certs', type=Path, metavar='DIR', help=certs_help)
    _add_ports(parser)
    data_help = 'directory of the data. Default: ./elab-control'
    parser.add_argument('--data', type=Path, default=Path('elab-control'), metavar='DIR', help=data_help)
    unit_help = 'print the systemd unit that runs this command in this directory, and exit'
    parser.add_argument('--unit', action='store_true', help=unit_help)


def _add_certs_options(parser: argparse.ArgumentParser) -> None:
    directory_help = 'directory of the certificates; without any NAME, replace those that expire within a month'
    parser.add_argument('directory', type=Path, metavar='DIR', help=directory_help)
    for option, text in (
        ('--control', 'names and addresses of the control host; clients use the first. Needed only in the first run'),
        ('--compute', 'hypervisor hosts; NAME=UUID for one that already has a uuid'),
        ('--scheduler', 'machines where eschedule runs'),
        ('--operator', 'people who may write all of etcd'),
    ):
        parser.add_argument(option, nargs='+', action='extend', default=[], metavar='NAME', help=text)
    _add_ports(parser)
    roles = parser.add_mutually_exclusive_group()
    text = 'restrict each certificate in DIR to its role in etcd, so that no compute may write the data of another'
    roles.add_argument('--enable', action='store_true', help=text)
    text = 'no longer enforce roles: every certificate may again write everything in etcd'
    roles.add_argument('--disable', action='store_true', help=text)


def _add_ports(parser: argparse.ArgumentParser) -> None:
    for name, port in (('etcd', ETCD_PORT), ('placement', PLACEMENT_PORT)):
        text = f'port of {name}. Default: {port}'
        parser.add_argument(f'--{name}-port', type=_parse_port, default=port, metavar='PORT', help=text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number from 1 to {MAX_HOSTS}')
    return int(text)


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'{text!r} is not a port, 1 to 65535')
    return int(text)


def _read_ports(options: argparse.Namespace) -> tuple[int, int]:
    if options.etcd_port == options.placement_port:
        raise UsageError(f'etcd and placement cannot both use port {options.etcd_port}. Fix: use two different ports')
    return options.etcd_port, options.placement_port


def _run_up(options: argparse.Namespace) -> int:
    name = find_name(options) if options.fake is None else require_lab_name(options.name or fakes.DEFAULT_NAME)
    is_fake = options.fake is not None or fakes.find(name) is not None
    lab = _bring_up_fakes(name, options) if is_fake else _bring_up_hosts(name, options)
    print(f'etcd {lab.address}:{lab.etcd_port}\nplacement {lab.placement}')
    if isinstance(lab, Lab):
        print(f'images {lab.layout.images}')
    print(f'schedule.yaml {lab.directory}/schedule.yaml')
    return 0


def _bring_up_hosts(name: str, options: argparse.Namespace) -> Lab:
    if options.size or options.fetch:
        raise UsageError('--size and --fetch need --fake')
    machine.require_root('elab up', '; or, without root: elab up --fake')
    # QEMU, dnsmasq and users of eschedule need to read these files; secret files have their own modes.
    os.umask(0o022)
    modules = ['placement', 'waitress', 'cryptography', 'libvirt', 'mdserver']
    machine.require({**machine.CONTROL_PROGRAMS, **machine.SECURE_PROGRAMS, **machine.HOST_PROGRAMS}, modules)
    is_new = not (state.ROOT / name).exists()
    with _lock_lab(name), _report_step(f'lab {name} is up'):
        # Another `elab up` may have made the lab before this one had the lock.
        is_new = is_new and not (state.ROOT / name / state.RECORD_NAME).exists()
        lab = state.load_or_create(name, options.hosts)
        if options.hosts and options.hosts < lab.host_count:
            hint = 'and keeps them until `elab down` removes the lab'
            _print_message(f'lab {name} already has {lab.host_count} hosts, {hint}')
        with machine.undo_on_error((lambda: _remove_lab(name, lab)) if is_new else None):
            _start_lab(lab)
        _copy_guest_image(lab)
    return lab


def _bring_up_fakes(name: str, options: argparse.Namespace) -> FakeLab:
    if options.hosts or (state.ROOT / name).exists():
        raise UsageError(f'{name}: a lab has either real or fake hosts. Fix: give another --name, without --hosts')
    if options.fetch:
        fakes.fetch_programs()
    with machine.hold_lock(fakes.find_root()), _report_step(f'cluster {name} is up'):
        lab, is_new = fakes.load_or_create(name, options.fake, options.size)
        with machine.undo_on_error((lambda: fakes.remove(lab)) if is_new else None):
            _start_lab(lab)
    return lab


def _list_hosts(lab: AnyLab) -> list[Host]:
    make_host = LabHost if isinstance(lab, Lab) else FakeHost
    return [make_host(lab, name) for name in lab.hosts]


def _start_lab(lab: AnyLab) -> None:
    from ecomp.lab import certs

    with _report_step('etcd and placement'):
        start_control(lab)
    hosts, names = _list_hosts(lab), ', '.join(lab.hosts)
    if lab_hosts := [host for host in hosts if isinstance(host, LabHost)]:
        _reduce_inventories(lab_hosts)
        with _report_step(f'namespaces and libvirtd of {names}'):
            # All are started before the first wait, because each libvirtd probes its own QEMU.
            for lab_host in lab_hosts:
                lab_host.prepare()
                lab_host.start_libvirt()
            for lab_host in lab_hosts:
                lab_host.wait_libvirt()
    with _report_step(f'ecompute of {names}'):
        for host in hosts:
            host.share_uuid()
        certs.enable_roles(lab.certs, datetime.now(UTC), lambda _: None)
        for host in hosts:
            host.start_ecompute()
        for host in hosts:
            host.wait_ecompute()


def _reduce_inventories(hosts: Sequence[LabHost]) -> None:
    """Reduce the inventories of the old hosts, if other hosts are new."""
    old_hosts = [host for host in hosts if (host.directory / 'compute.yaml').exists()]
    if not old_hosts or len(old_hosts) == len(hosts):
        return
    if reduced := [host.name for host in old_hosts if host.reduce_share()]:
        _print_message(f'{", ".join(reduced)}: inventory reduced, because {len(hosts)} hosts share the machine')


def _copy_guest_image(lab: Lab) -> None:
    own_image = lab.directory / GUEST_IMAGE
    images = [other.directory / GUEST_IMAGE for other in state.list_labs() if (other.directory / GUEST_IMAGE).is_file()]
    if own_image.exists():
        return
    if images:
        part = own_image.with_suffix('.part')
        shutil.copyfile(images[0], part)
        part.rename(own_image)
        _print_message(f'{own_image}: copied from {images[0]}')
    else:
        _print_message(f'the lab has no guest image. Fix: elab guest {own_image}')


def _load(options: argparse.Namespace, command: str) -> AnyLab:
    """Load the lab that the options mean, which needs root unless its hosts are fakes."""
    name = find_name(options)
    if fake := fakes.find(name):
        return fake
    machine.require_root(command)
    return state.load(name)


def _run_status(options: argparse.Namespace) -> int:
    lab = _load(options, 'elab status')
    rows = [(each.name, lab.address, each.describe_state(lab.find_running(each.name))) for each in lab.servers]
    etcd_answers = rows[0][2] == 'ready'
    rows += [(host.name, host.address, host.describe_state(etcd_answers)) for host in _list_hosts(lab)]
    return _print_states(rows, lab.name)


def _print_states(rows: Sequence[tuple[str, str, str]], name: str) -> int:
    for place, address, status in [('PLACE', 'ADDRESS', 'STATE'), *rows]:
        print(f'{place:<10} {address:<15} {status}')
    kinds = {kind: [row[0] for row in rows if row[2].startswith(kind)] for kind in ('down', 'no answer', 'unknown')}
    if kinds['down']:
        _print_message(f'down: {", ".join(kinds["down"])}. Fix: elab up --name {name}')
    if kinds['no answer']:
        fix = f'end the processes that hang, and run `elab up --name {name}`'
        _print_message(f'no answer: {", ".join(kinds["no answer"])}. Fix: {fix}')
    return 1 if any(kinds.values()) else 0


def _run_exec(options: argparse.Namespace) -> int:
    if not (words := _strip_dashes(options.words)):
        raise UsageError(f'exec {options.host}: missing argument: the command')
    lab = _load(options, 'elab exec')
    _require_place(options.host, lab)
    if isinstance(lab, Lab) and not machine.has_interface(lab.layout, options.host):
        raise EcompError(f'{options.host} is down. Fix: elab up --name {lab.name}')
    place = lab.directory / options.host if isinstance(lab, FakeLab) else None
    return wait_for_exit(subprocess.Popen([*lab.make_command_prefix(options.host), *words], cwd=place))


def _strip_dashes(words: list[str]) -> list[str]:
    # argparse passes a leading -- on to REMAINDER arguments.
    return words[1:] if words[:1] == ['--'] else words


def _require_place(place: str, lab: AnyLab) -> None:
    if place not in (places := (CONTROL, *lab.hosts)):
        raise NotFound(f'lab {lab.name} has no host {place!r}: it has {", ".join(places)}')


def _run_shell(options: argparse.Namespace) -> int:
    name = find_name(options)
    return enter_shell((fakes.find(name) or state.load(name)).directory, name, _strip_dashes(options.words))


def _run_kill(options: argparse.Namespace) -> int:
    if (lab := fakes.find(find_name(options))) is None:
        raise NotFound(f'there is no cluster of fakes {find_name(options)!r}. Try: elab list')
    _require_place(options.host, lab)
    if process := lab.find_running(f'{options.host} ecompute'):
        os.kill(process.pid, signal.SIGKILL)
    return 0


def _run_list(_: argparse.Namespace) -> int:
    found = [_make_row(lab, str(lab.layout.network), LAB_DAEMONS) for lab in state.list_labs()]
    found += [_make_row(lab, 'fake', ('ecompute',)) for lab in fakes.list_all()]
    if not found:
        _print_message('no lab exists. Try: elab up')
        return 0
    rows = [('LAB', 'STATE', 'HOSTS', 'NETWORK', 'DIRECTORY'), *found]
    width = max(len(name) for name, *_ in rows)
    for name, *cells in rows:
        print(f'{name:<{width}}', '{:<13} {:<5} {:<15} {}'.format(*cells))
    return 0


def _make_row(lab: AnyLab, network: str, daemons: Sequence[str]) -> tuple[str, ...]:
    servers = ('etcd', 'placement', *(f'{host} {name}' for host in lab.hosts for name in daemons))
    running = [name for name in servers if lab.find_running(name)]
    condition = 'up' if len(running) == len(servers) else 'partly up' if running else 'down'
    return lab.name, condition, str(lab.host_count), network, str(lab.directory)


def _run_down(options: argparse.Namespace) -> int:
    name = find_name(options)
    if fake := fakes.find(name):
        with machine.hold_lock(fakes.find_root()), _report_step(f'cluster {name} is removed'):
            fakes.remove(fake)
        return 0
    machine.require_root('elab down')
    directory = state.ROOT / name
    try:
        lab = state.load(name)
    except EcompError:
        # Killed before writing lab.json, or lab.json is lost or of another version: find namespaces by name.
        lab = None
        if not directory.exists() and not machine.list_namespaces(name):
            _print_message(f'lab {name} does not exist')
            return 0
    with _lock_lab(name), _report_step(f'lab {name} is removed'):
        with contextlib.suppress(EcompError):
            lab = state.load(name)  # an elab up may have finished before the lock
        _remove_lab(name, lab)
    return 0


def _remove_lab(name: str, lab: Lab | None) -> None:
    spaces = machine.list_namespaces(name)
    recorded = list(lab.processes.values()) if lab else []
    with _report_step('processes and guests ended'):
        # Hosts first, so that their ecomputes can sign off in etcd and placement.
        machine.end_processes([space for space in spaces if not space.endswith(f'-{CONTROL}')], [])
        machine.end_processes(spaces, recorded)
    with _report_step('namespaces and links removed'):
        machine.remove_namespaces(spaces, lab.layout if lab else None)
    for mount_point in state.unmount_all(state.ROOT / name):
        _print_message(f'{mount_point}: unmounted')
    state.remove_directory(state.ROOT / name)
    with contextlib.suppress(OSError):  # other labs remain
        state.ROOT.rmdir()


def _run_control(options: argparse.Namespace) -> int:
    host = 'localhost' if options.bind == control.LOCALHOST else bracket_address(options.bind)
    endpoints = control.Endpoints(*_read_ports(options), options.data, options.bind, options.certs)
    endpoints = control.add_default_certs(endpoints)
    scheme = 'http' if endpoints.certs is None else 'https'
    addresses = f'etcd {host}:{options.etcd_port}\nplacement {scheme}://{host}:{options.placement_port}'
    if options.unit:
        program = systemd.make_command(sys.argv[0], sys.executable, 'ecomp.lab.elab')
        arguments = control.make_arguments(endpoints)
        control.require_access(endpoints, Path(program[0]))
        log.switch_stdout_to_utf8()
        print(systemd.render_unit('ecomp-control.service', [*program, *arguments]), end='')
    else:
        service = systemd.Service.from_environment(os.environ)
        control.run_control(endpoints, service, _print_message, lambda: print(addresses, flush=True))
    return 0


def _run_certs(options: argparse.Namespace) -> int:
    machine.require({}, ['cryptography'])
    from ecomp.lab import certs

    has_names = options.control or options.compute or options.scheduler or options.operator
    if options.disable and has_names:
        raise UsageError('--disable makes no certificates, so it accepts no names. Fix: omit them')
    now = datetime.now(UTC).replace(microsecond=0)
    computes = [argument.partition('=') for argument in options.compute]
    names = tuple(name for name, _, _ in computes)
    uuids = {name: compute for name, equals, compute in computes if equals}
    cluster = certs.Cluster(
        tuple(options.control), names, tuple(options.scheduler), tuple(options.operator), *_read_ports(options), uuids
    )
    if not options.disable:
        certs.make_certificates(options.directory, cluster, now, _print_message, include_others=not has_names)
    if options.enable:
        certs.enable_roles(options.directory, now, _print_message)
    elif options.disable:
        certs.disable_roles(options.directory, _print_message)
    return 0


def _run_guest(options: argparse.Namespace) -> int:
    with _report_step(f'{options.output} is made'):
        guest.make_image(options.output, _print_message)
    return 0


def find_name(options: argparse.Namespace) -> str:
    if options.name is not None:
        return require_lab_name(options.name)
    is_only = not (state.ROOT / 'lab').exists() and fakes.find(fakes.DEFAULT_NAME)
    default = fakes.DEFAULT_NAME if is_only else 'lab'
    return require_lab_name(state.find_lab_name([state.ROOT, fakes.find_root()]) or default)


def _lock_lab(name: str) -> contextlib.AbstractContextManager[None]:
    text = f'lab {name}: waiting for another `elab` command to end'
    return machine.hold_lock(state.ROOT / name, lambda: _print_message(text))


@contextlib.contextmanager
def _report_step(description: str) -> Iterator[None]:
    start_time = time.monotonic()
    yield
    _print_message(f'{time.monotonic() - start_time:6.1f} s  {description}')


def _print_message(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed terminal does not stop the work
        print(text, file=sys.stderr, flush=True)


if __name__ == '__main__':
    sys.exit(main())
