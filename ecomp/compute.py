"""ecompute's front door: configuration, wiring, signals, exit codes.

Imports of etcd3, requests and libvirt are inside the functions that need them, for every spawned worker imports this
module anew.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ecomp import __version__
from ecomp import log as logs
from ecomp.agent.arguments import parser
from ecomp.conf import ComputeConfig, load_compute, parse_inventory
from ecomp.endpoints import in_clear
from ecomp.errors import Conflict, EcompError, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.cluster import Known
from ecomp.model.record import timestamp
from ecomp.model.text import printable_lines

if TYPE_CHECKING:
    from ecomp.agent.daemon import Daemon
    from ecomp.agent.inventory import Inventory
    from ecomp.agent.pool import Runner
    from ecomp.agent.provider import Provider
    from ecomp.agent.several import Ears
    from ecomp.agent.state import State
    from ecomp.placement.client import Placement
    from ecomp.store.client import Entry, Store
    from ecomp.store.guard import Guard
    from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)
ready = logging.getLogger('ecomp.ready')

MOST_WORKERS = 8
FOLLOWING = 'following etcd'

Seed = Callable[[str], Mapping[str, bytes]] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run ecompute until a signal ends it; the exit code."""
    logs.hold_descriptors()
    logs.configure()
    # Until the daemon takes the signals over, either of them unwinds what has been started so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = parser().parse_args(argv)
        config = load_compute(Path(options.config) if options.config else None)
        with ExitStack() as at_exit:
            if options.fake is not None:
                config = _pretended(config, parse_inventory(options.fake), options.count, at_exit)
            elif options.count is not None:
                raise UsageError('--count goes with --fake: a machine is one compute')
            _run(config, options.fake is not None, options.count, options.accept_new_etcd, at_exit)
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


def _pretended(
    config: ComputeConfig, totals: Mapping[str, int], count: int | None, at_exit: ExitStack
) -> ComputeConfig:
    """The configuration of a fake: its own inventory, and a throw-away state unless `state:` says otherwise."""
    if config.uuid is not None and (count or 1) > 1:
        raise UsageError(f'--count {count}: `uuid:` in the configuration names one compute: leave it out')
    if config.state == ComputeConfig().state:
        temporary = at_exit.enter_context(tempfile.TemporaryDirectory(prefix='ecompute-fake-'))
        # A throw-away state with a lasting uuid would be the same compute ten times over.
        config = replace(config, state=Path(temporary), uuid=None)
    return replace(config, inventory=totals, networks=ComputeConfig.networks)


class _Common(NamedTuple):
    """What the computes of one process share; `ears` only where there are several."""

    fake: bool
    accept: bool
    guard: Guard
    familiar: bool
    placement: Placement
    remember: Callable[[], None]
    ears: Ears | None = None


def _run(config: ComputeConfig, fake: bool, count: int | None, accept: bool, at_exit: ExitStack) -> None:
    from ecomp.agent import limits, several
    from ecomp.agent.known_etcd import KnownEtcd, is_familiar
    from ecomp.agent.state import State
    from ecomp.placement.client import Placement
    from ecomp.store.client import Store
    from ecomp.store.guard import Guard

    limits.check(count or 1)
    state = State(config.state)
    at_exit.callback(state.close)
    known = KnownEtcd(config.state)
    guard = Guard(Known() if accept else known.load(), known.note)
    store = Store(config.etcd, guard)
    at_exit.callback(store.close)
    placement = Placement(config.placement)
    at_exit.callback(placement.close)

    def remember() -> None:
        known.start()
        at_exit.callback(known.stop)

    common = _Common(fake, accept, guard, is_familiar(guard, store, _now()), placement, remember)
    if not fake:
        _warn_of_holes(config, store)
    begin = None
    if count is None:
        daemon, begin = _wire(config, state, store, common, at_exit)
        daemons = [daemon]
    else:
        for each in (log, logging.getLogger('ecomp.agent.provider')):
            each.setLevel(logging.WARNING)  # of each of a thousand it would say the same
        ears = several.listen(config.etcd, guard, config.queues, at_exit)
        common = common._replace(ears=ears, remember=lambda: None)
        daemons = several.begin(count, partial(_one_of_many, config, common), at_exit)
        remember()

    def stop(*_: object) -> None:
        for each in daemons:
            each.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    daemons[0].wake_on_signals()
    if begin is not None:
        begin()
    daemons[0].run()
    log.info('stopping; the guests go on')


def _one_of_many(config: ComputeConfig, common: _Common, number: int, at_exit: ExitStack) -> Daemon:
    """A pretended compute with a state directory of its own below the one that is configured."""
    from ecomp.agent.state import State
    from ecomp.store.client import Store

    own = replace(config, state=config.state / str(number))
    state = State(own.state)
    at_exit.callback(state.close)
    # Its own, for what it may write is fenced by its own presence (rule 9).
    store = Store(config.etcd, common.guard)
    at_exit.callback(store.close)
    daemon, begin = _wire(own, state, store, common, at_exit)
    begin()
    return daemon


def _wire(
    config: ComputeConfig, state: State, store: Store, common: _Common, at_exit: ExitStack
) -> tuple[Daemon, Callable[[], None]]:
    """A compute, registered; and what makes it take requests. Any thread's work."""
    from ecomp.agent.claims import ClaimKeeper
    from ecomp.agent.complaints import Complaints
    from ecomp.agent.daemon import Daemon
    from ecomp.agent.digest import Answerer
    from ecomp.agent.ends import note_ends
    from ecomp.agent.instances import Instances, Shape
    from ecomp.agent.memory import Memory, boot_id
    from ecomp.agent.metadata import GuestData
    from ecomp.agent.provider import Provider
    from ecomp.agent.queues import Queues, Reader
    from ecomp.agent.republish import republish
    from ecomp.agent.reserved import reserve_again
    from ecomp.agent.several import Ears
    from ecomp.store.presence import Presence, hashed
    from ecomp.store.shared_follower import following

    fake, guard, familiar, placement = common.fake, common.guard, common.familiar, common.placement
    ears = common.ears or Ears(Reader())
    compute = state.compute_uuid(config.uuid)
    log.info('compute %s, state in %s, ecomp %s', compute, config.state, __version__)
    who = {'version': __version__, 'hostname': socket.gethostname(), 'since': _now(), 'token': state.token()}
    who |= {'boot': boot_id(), 'pid': str(os.getpid())}  # what two with the same token differ in
    presence = Presence(store, keys.compute(compute), who, lambda reason: daemon.become_read_only(reason))
    if familiar:
        presence.check()

    hypervisor, runner, watch_over, seed = _hypervisor(config, fake, at_exit)
    if familiar:
        _refuse_others(hypervisor, store, compute)
    virt_type = hypervisor.virt_type(config.virt_type)
    shape = Shape(virt_type, config.resize, config.networks, socket.gethostname(), seed)
    inventory = _inventory(config, fake, list(hypervisor.guests()))
    traits = (_traits(hypervisor, virt_type), config.traits, config.aggregates)
    provider = Provider(placement, compute, inventory, *traits, config.state)
    memory = Memory(config.state, compute, _now)
    if familiar:
        provider.register()
        if common.accept:
            republish(compute, store, placement, memory, set(hypervisor.guests()), _now())
            failpoint('republished')
        note_ends(compute, store, memory, set(hypervisor.guests()))
        reserve_again(hypervisor, memory)
        # Not before: killed until now, the next start is to find the same strange etcd.
        common.remember()

    guest_data = GuestData(config.state / 'metadata')
    instances = Instances(compute, store, placement, runner, hypervisor, guest_data, shape, memory, _now)
    claims, complaints, threads = ClaimKeeper(compute, store, placement), Complaints(), 2 * _workers(config) + 2
    closing = threading.Event()

    def keep() -> None:
        provider.keep(lambda: closing.is_set() or daemon.read_only)

    daemon = Daemon(compute, instances, hypervisor, runner, claims, memory, complaints, watch_over, keep, threads)
    if not fake:  # a pretended guest has no cloud-init, and fakes are many
        at_exit.callback(guest_data.on_ready(daemon.nudge))

    def on_back() -> None:
        presence.look()
        if complaints.settle(FOLLOWING):
            daemon.works_again()

    def may_remove(instance: str) -> bool:
        store.recognise()  # raises where nothing is to be believed
        return not daemon.read_only and instance not in memory.all()

    def begin() -> None:
        guard.when_strange(daemon.become_read_only)
        on_lost, prefix = partial(complaints.complain, FOLLOWING), keys.host_prefix(compute)
        follow = partial(following, config.etcd, guard)
        queues = None
        if config.queues and familiar:
            speaks = (store, placement, presence, complaints, partial(follow, ears.queues), ears.reader.read)
            queues = Queues(compute, *speaks, lambda: not (closing.is_set() or daemon.read_only), _now)

        def on_state(state: Mapping[str, Entry]) -> None:
            daemon.on_state(state)
            if queues is not None:
                queues.on_hosts(state)

        follower = follow(ears.hosts, prefix, on_state, on_lost, on_back)
        told = (config.etcd, hypervisor, config.state, may_remove, ears.audits)
        answerer = Answerer(compute, hashed(state.token()), *told)
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
        at_exit.callback(_close, provider, daemon)
        at_exit.callback(closing.set)
        if queues is not None:
            at_exit.callback(queues.stop)
            queues.start()
        daemon.begin()
        if familiar:
            what = f'{shape.virt_type if not fake else "pretended"} guests with {_words(inventory)}'
            ready.info('ready: %s', what if common.ears is None else f'compute {compute}, {what}')

    return daemon, begin


def _hypervisor(
    config: ComputeConfig, fake: bool, at_exit: ExitStack
) -> tuple[Hypervisor, Runner, Callable[[], None], Seed]:
    """The hypervisor, what carries out its jobs, what is to be looked after every minute, and see nocloud()."""
    from ecomp.agent.images.cache import GIB, Limits
    from ecomp.agent.images.connections import reach_of
    from ecomp.agent.images.scrub import Scrubber
    from ecomp.agent.inventory import look
    from ecomp.agent.pool import Inline, Pool, Pretended
    from ecomp.agent.served import keep_served, nocloud
    from ecomp.agent.worker import WorkerSettings

    if fake:
        from ecomp.virt.fake import FakeHypervisor

        pretended = FakeHypervisor(config.state)
        pretended.prepare()
        inline = Inline(pretended, Pretended())
        at_exit.callback(inline.stop)
        return pretended, inline, lambda: None, nocloud(config, lambda: False)
    from ecomp.virt.libvirt_host import Libvirt

    libvirt = Libvirt(config.state, config.networks, control=reach_of(config).control)
    at_exit.callback(libvirt.close)
    libvirt.prepare()
    watch_over = keep_served(libvirt, config.state, config.directory, config.metadata == 'network', at_exit)
    # No instance is given more than what there is in all, so no image above that is of use here.
    disk = (config.inventory or {}).get('DISK_GB', 0) * GIB or look(config.state, []).disk
    limits = Limits(_image_cache(config) * GIB, disk)
    settings = WorkerSettings(config.state, config.images, os.getpid(), limits, reach_of(config))
    pool = Pool(_workers(config), settings)
    at_exit.callback(pool.stop)
    scrubber = Scrubber(config.state / 'images')
    at_exit.callback(scrubber.stop)
    scrubber.start()
    return libvirt, pool, watch_over, nocloud(config, lambda: libvirt.bridge_name() is not None)


def _warn_of_holes(config: ComputeConfig, store: Store) -> None:
    from ecomp.store.versions import holes

    for host in in_clear(config.etcd, config.placement):
        log.warning('%s is asked in plain text: whoever is on the way there can do everything (insecure)', host)
    with suppress(EcompError):  # what it is about is said by whoever needs etcd
        if warning := holes(store.version()):
            log.warning('%s', warning)


def _refuse_others(hypervisor: Hypervisor, store: Store, compute: str) -> None:
    """Conflict if guests of another compute are here that nobody looks after (rule 9)."""
    for other in sorted({guest.compute for guest in hypervisor.guests().values() if guest.compute} - {compute}):
        if store.get(keys.compute(other)) is None:
            raise Conflict(
                f'guests of compute {other} are on this host, and this is compute {compute}: '
                f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'
            )


def _inventory(config: ComputeConfig, fake: bool, instances: Sequence[str]) -> Inventory:
    from ecomp.agent import inventory

    stated = inventory.given(config.inventory or {})
    # What `inventory:` does not name keeps the machine's own truth.
    own = {} if fake else inventory.inventory(inventory.look(config.state, instances), _image_cache(config))
    return inventory.with_ratios({**own, **stated}, config.allocation_ratios)


def _image_cache(config: ComputeConfig) -> int:
    from ecomp.agent.inventory import default_cache

    return config.image_cache or default_cache(config.state)


def _traits(hypervisor: Hypervisor, virt_type: str) -> frozenset[str]:
    """The traits of what this host's guests run on."""
    features = hypervisor.cpu_features(virt_type)
    if not features:
        return frozenset()
    from ecomp.model.traits import cpu_traits

    return cpu_traits(features)


def _close(provider: Provider, daemon: Daemon) -> None:
    if daemon.read_only:
        return  # it is somebody else's provider now
    failpoint('closing')
    try:
        provider.close()
        log.info('reserved all VCPU: nothing is scheduled here until the next start')
    except EcompError as error:
        log.warning('could not reserve VCPU, so requests may still be written for this compute: %s', error)


def _workers(config: ComputeConfig) -> int:
    return config.workers or min(os.cpu_count() or 1, MOST_WORKERS)


def _words(inventory: Mapping[str, Mapping[str, float]]) -> str:
    return ', '.join(f'{name} {each["total"]} ({each["reserved"]} reserved)' for name, each in inventory.items())


def _now() -> str:
    return timestamp(datetime.now(UTC))


if __name__ == '__main__':
    sys.exit(main())
