"""ecompute's front door: configuration, wiring, signals, exit codes.

Imports of etcd3, requests and libvirt are inside the functions that need them, for every spawned worker imports this
module anew.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ecomp import __version__
from ecomp import log as logs
from ecomp.conf import ComputeConfig, load_compute, parse_inventory
from ecomp.errors import Conflict, EcompError, StrangeEtcd, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import cluster, keys
from ecomp.model.cluster import Known
from ecomp.model.record import timestamp
from ecomp.model.text import printable_lines

if TYPE_CHECKING:
    from ecomp.agent.daemon import Daemon
    from ecomp.agent.pool import Runner
    from ecomp.placement.client import Placement
    from ecomp.store.client import Store
    from ecomp.store.guard import Guard
    from ecomp.virt import Hypervisor
    from ecomp.virt.libvirt_host import Libvirt

log = logging.getLogger(__name__)

MOST_WORKERS = 8
FOLLOWING = 'following etcd'

Inventory = dict[str, dict[str, int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ecompute until a signal ends it; the exit code."""
    logs.hold_descriptors()
    logs.configure()
    # Until the daemon takes the signals over, either of them unwinds what has been started so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = _parser().parse_args(argv)
        config = load_compute(Path(options.config) if options.config else None)
        with ExitStack() as at_exit:
            if options.fake is not None:
                config = _pretended(config, parse_inventory(options.fake), at_exit)
            _run(config, options.fake is not None, options.accept_new_etcd, at_exit)
    except EcompError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        _say(f'{error.filename or "failed"}: {error.strerror or error}')
        return 1
    except KeyboardInterrupt:
        _say('stopped while starting')
    return 0


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal changes nothing of how it ends
        print(f'ecompute: {printable_lines(logs.redact(text))}', file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f'{message}; --help shows all')


def _parser() -> argparse.ArgumentParser:
    parser = _Parser('ecompute', description='Take requests for this machine from etcd and make them VMs.')
    parser.add_argument('--config', metavar='FILE', help='instead of compute.yaml in the current directory')
    parser.add_argument('--fake', metavar='INVENTORY', help="pretend: 'VCPU:4,DISK_GB:10,MEMORY_MB:512', no libvirt")
    parser.add_argument(
        '--accept-new-etcd', action='store_true', help='etcd was wiped, restored or exchanged, and is to be used'
    )
    parser.add_argument('--version', action='version', version=f'ecompute {__version__}')
    return parser


def _pretended(config: ComputeConfig, totals: Mapping[str, int], at_exit: ExitStack) -> ComputeConfig:
    """The configuration of a fake: its own inventory, and a throw-away state unless `state:` says otherwise."""
    if config.state == ComputeConfig().state:
        temporary = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='ecompute-fake-'))
        # A throw-away state with a lasting uuid would be the same compute ten times over.
        config = replace(config, state=Path(temporary), uuid=None)
    return replace(config, inventory=totals, networks=ComputeConfig.networks)


def _run(config: ComputeConfig, fake: bool, accept: bool, at_exit: ExitStack) -> None:
    from ecomp.agent import limits
    from ecomp.agent.claims import ClaimKeeper
    from ecomp.agent.complaints import Complaints
    from ecomp.agent.daemon import Daemon
    from ecomp.agent.digest import Answerer
    from ecomp.agent.instances import Instances, Shape
    from ecomp.agent.known_etcd import KnownEtcd
    from ecomp.agent.memory import Memory
    from ecomp.agent.metadata import GuestData
    from ecomp.agent.republish import republish
    from ecomp.agent.reserved import reserve_again
    from ecomp.agent.state import State
    from ecomp.placement.client import Placement
    from ecomp.store.client import Store
    from ecomp.store.guard import Guard
    from ecomp.store.presence import Presence
    from ecomp.store.watch import Follower

    limits.check()
    state = State(config.state)
    at_exit.callback(state.close)
    compute = state.compute_uuid(config.uuid)
    log.info('compute %s, state in %s, ecomp %s', compute, config.state, __version__)

    known = KnownEtcd(config.state)
    guard = Guard(Known() if accept else known.load(), known.note)
    store = Store(config.etcd, guard)
    at_exit.callback(store.close)
    familiar = _is_familiar(guard, store)
    who = {'version': __version__, 'hostname': socket.gethostname(), 'since': _now(), 'token': state.token()}
    presence = Presence(store, keys.compute(compute), who, lambda reason: daemon.become_read_only(reason))
    if familiar:
        presence.check()

    hypervisor, runner, watch_over = _hypervisor(config, fake, at_exit)
    if familiar:
        _refuse_others(hypervisor, store, compute)
    shape = Shape(hypervisor.virt_type(config.virt_type), config.resize, config.networks, socket.gethostname())
    placement = Placement(config.placement)
    at_exit.callback(placement.close)
    inventory = _inventory(config, fake, list(hypervisor.guests()))
    memory = Memory(config.state, compute, _now)
    if familiar:
        _register(placement, compute, inventory)
        if accept:
            republish(compute, store, placement, memory, set(hypervisor.guests()), _now())
            failpoint('republished')
        reserve_again(hypervisor, memory)
        # Not before: killed until now, the next start is to find the same strange etcd.
        known.start()
        at_exit.callback(known.stop)

    guest_data = GuestData(config.state / 'metadata')
    instances = Instances(compute, store, placement, runner, hypervisor, guest_data, shape, memory, _now)
    claims, complaints, threads = ClaimKeeper(compute, store, placement), Complaints(), 2 * _workers(config) + 2
    closing = threading.Event()

    def every_minute() -> None:
        watch_over()
        _keep_inventory(placement, compute, inventory, lambda: closing.is_set() or daemon.read_only)

    daemon = Daemon(compute, instances, hypervisor, runner, claims, memory, complaints, every_minute, threads)
    if not fake:  # a pretended guest has no cloud-init, and fakes are many
        at_exit.callback(guest_data.on_ready(daemon.nudge))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: daemon.stop())
    runner.wake_on_signals()
    guard.when_strange(daemon.become_read_only)

    def on_back() -> None:
        presence.look()
        if complaints.settle(FOLLOWING):
            daemon.works_again()

    on_lost, prefix = partial(complaints.complain, FOLLOWING), keys.host_prefix(compute)
    follower = Follower(config.etcd, prefix, daemon.on_state, guard=guard, on_lost=on_lost, on_back=on_back)

    def may_remove(instance: str) -> bool:
        store.recognise()  # raises where nothing is to be believed
        return not daemon.read_only and instance not in memory.all()

    answerer = Answerer(compute, state.token(), config.etcd, hypervisor, config.state, may_remove)
    answerer.start()
    at_exit.callback(answerer.stop)
    if familiar:
        presence.start()
        failpoint('published')
        at_exit.callback(presence.stop)
        follower.start()
    at_exit.callback(follower.stop)
    # Undone in reverse: first nothing more is scheduled here, then what is in work ends.
    at_exit.callback(daemon.drain)
    at_exit.callback(_close_inventory, placement, compute, inventory, daemon)
    at_exit.callback(closing.set)
    if familiar:
        log.info('ready: %s guests with %s', 'pretended' if fake else shape.virt_type, _words(inventory))
    daemon.run()
    log.info('stopping; the guests go on')


def _hypervisor(
    config: ComputeConfig, fake: bool, at_exit: ExitStack
) -> tuple[Hypervisor, Runner, Callable[[], None]]:
    """The hypervisor, what carries out its jobs, and what is to be looked after every minute."""
    from ecomp.agent.images.cache import GIB, Limits
    from ecomp.agent.inventory import look
    from ecomp.agent.pool import Inline, Pool, Pretended
    from ecomp.agent.worker import WorkerSettings

    if fake:
        from ecomp.virt.fake import FakeHypervisor

        pretended = FakeHypervisor(config.state)
        pretended.prepare()
        inline = Inline(pretended, Pretended())
        at_exit.callback(inline.stop)
        return pretended, inline, lambda: None
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks)
    at_exit.callback(libvirt.close)
    libvirt.prepare()
    watch_over = _metadata(config, libvirt, at_exit)
    # No instance is given more than what there is in all, so no image above that is of use here.
    disk = (config.inventory or {}).get('DISK_GB', 0) * GIB or look(config.state, []).disk
    limits = Limits(_image_cache(config) * GIB, disk)
    pool = Pool(_workers(config), WorkerSettings(config.state, config.images, os.getpid(), limits))
    at_exit.callback(pool.stop)
    return libvirt, pool, watch_over


def _is_familiar(guard: Guard, store: Store) -> bool:
    """Whether etcd is the one we knew; with nothing remembered, it is from now on (rule 10)."""
    try:
        if guard.known.identity:
            guard.recognise(store)
        else:
            guard.adopt(store, cluster.new(str(uuid.uuid4()), _now()))
    except StrangeEtcd:
        return False  # not an end: started again and again, it would be away as often, and its guests' metadata with it
    return True


def _refuse_others(hypervisor: Hypervisor, store: Store, compute: str) -> None:
    """Conflict if guests of another compute are here that nobody looks after (rule 9)."""
    for other in sorted({guest.compute for guest in hypervisor.guests().values() if guest.compute} - {compute}):
        if store.get(keys.compute(other)) is None:
            raise Conflict(
                f'guests of compute {other} are on this host, and this is compute {compute}: '
                f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'
            )


def _metadata(config: ComputeConfig, libvirt: Libvirt, at_exit: ExitStack) -> Callable[[], None]:
    """See that a metadata server answers; what keeps it so."""
    from ecomp.agent.metadata import ADDRESS, MetadataServer

    if libvirt.bridge_name() is None:
        log.warning('networks: none of them is a network whose bridge libvirt made: no metadata is served')
        return lambda: None
    server = MetadataServer(config.state / 'metadata', config.directory)
    # One that was killed left the address where it was: with this file it is ours to take off.
    mark = config.state / 'metadata-address'
    ours = mark.exists()

    def ensure() -> None:
        nonlocal ours
        if not libvirt.metadata_address_present():
            ours = True
            with suppress(OSError):  # a full disk
                mark.touch()
            libvirt.ensure_metadata_address()
            log.info("put %s on the guests' bridge", ADDRESS)
        server.ensure()

    def take_off() -> None:
        if ours:
            libvirt.remove_metadata_address()
            mark.unlink(missing_ok=True)

    at_exit.callback(take_off)
    at_exit.callback(server.stop)
    ensure()
    return ensure


def _inventory(config: ComputeConfig, fake: bool, instances: Sequence[str]) -> Inventory:
    from ecomp.agent import inventory

    stated = inventory.given(config.inventory or {})
    if fake:
        return stated
    # What `inventory:` does not name keeps the machine's own truth.
    return {**inventory.inventory(inventory.look(config.state, instances), _image_cache(config)), **stated}


def _image_cache(config: ComputeConfig) -> int:
    from ecomp.agent.inventory import default_cache

    return config.image_cache or default_cache(config.state)


def _register(placement: Placement, compute: str, inventory: Inventory) -> None:
    from ecomp.placement import providers

    if providers.ensure(placement, compute):
        log.info('made resource provider %s', compute)
    else:
        used = providers.usages(placement, compute)
        log.info('resource provider %s is there, with usages %s', compute, used or 'none')
        for name, amount in used.items():
            free = inventory.get(name, {'total': 0})['total']
            if amount > free:
                log.warning('%s of %s is used, and there is only %s of it now', amount, name, free)
    failpoint('registered')
    providers.set_inventory(placement, compute, inventory)


def _keep_inventory(placement: Placement, compute: str, inventory: Inventory, is_closing: Callable[[], bool]) -> None:
    """Register again if placement has it otherwise: its database may have been restored, or somebody was at it."""
    from ecomp.placement import providers

    # Asked afterwards: what is found closed is closed by us, and then this says so by now.
    if not providers.is_as(placement, compute, inventory) and not is_closing():
        log.warning('placement does not know this compute as it is (was it restored from a copy?): registering again')
        _register(placement, compute, inventory)


def _close_inventory(placement: Placement, compute: str, inventory: Inventory, daemon: Daemon) -> None:
    if daemon.read_only:
        return  # it is somebody else's inventory now
    from ecomp.agent.inventory import closed
    from ecomp.placement import providers

    failpoint('closing')
    try:
        providers.set_inventory(placement, compute, closed(inventory))
        log.info('reserved all VCPU: nothing is scheduled here until the next start')
    except EcompError as error:
        log.warning('could not reserve VCPU, so requests may still be written for this compute: %s', error)


def _workers(config: ComputeConfig) -> int:
    return config.workers or min(os.cpu_count() or 1, MOST_WORKERS)


def _words(inventory: Mapping[str, Mapping[str, int]]) -> str:
    return ', '.join(f'{name} {each["total"]} ({each["reserved"]} reserved)' for name, each in inventory.items())


def _now() -> str:
    return timestamp(datetime.now(UTC))


if __name__ == '__main__':
    sys.exit(main())
