"""eschedule's front door: arguments in, one command, words and an exit code out.

What is imported late is imported late on purpose: requests and etcd3 are most of a claim's time, so one is loaded,
and placement asked, while the other is on its way.
"""

from __future__ import annotations

import gc
import io
import os
import random
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from ecomp import log
from ecomp.conf import ScheduleConfig, load_schedule
from ecomp.errors import EcompError, NoCapacity, UnknownOutcome, UsageError
from ecomp.model.choose import SPREAD
from ecomp.model.image import check_image
from ecomp.model.json_object import dump
from ecomp.model.text import printable_lines, printable_whole
from ecomp.scheduler.arguments import Command, Options, parse, parser
from ecomp.scheduler.ask import ask_placement
from ecomp.scheduler.commands import RUNS, as_notified, asked, no_capacity, reach_all, refused, remarks
from ecomp.scheduler.forms import CREATE
from ecomp.scheduler.terminal import Terminal, now


def main(argv: Sequence[str] | None = None) -> int:
    """Run eschedule; the exit code. Never a traceback for what a user or a backend can cause."""
    log.configure_plain('eschedule')
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except EcompError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say('interrupted')
        return 1
    except BrokenPipeError:
        # Whoever read us (head, less) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _say(f'failed: {error.strerror or error}' + (f': {error.filename}' if error.filename else ''))
        return 1


def run() -> NoReturn:
    """The console script: main() without what a command of a quarter of a second need not do.

    Collecting garbage while modules load and taking gRPC down in good order at the end are a quarter of a claim's
    time, and the process is over anyway.
    """
    gc.disable()
    log.hold_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')  # a terminal that has no ... sign is no reason to fail
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 1  # whoever read us has gone
    os._exit(code)


def _run(argv: list[str]) -> int:
    if not argv:
        parser().print_help()
        return 2
    command = parse(argv)
    config = load_schedule(Path(command.options.config) if command.options.config else None)
    if command.name == CREATE:
        return _create(config, command)
    from ecomp.store.client import Store

    store = Store(config.etcd)
    try:
        return RUNS[command.name](TERMINAL, config, store, command)
    finally:
        store.close()


def _create(config: ScheduleConfig, command: Command) -> int:
    query, options = command.words[0], command.options
    image = command.words[1] if len(command.words) > 1 else config.image
    try:
        check_image(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    from ecomp.scheduler.given import given

    told = given(config, options.ssh_key, options.user_data, _say)
    instance = options.uuid or str(uuid.uuid4())
    requested = now()
    if options.queue:
        return _enqueue(config, options, New(instance, image, requested, *told))
    query = asked(config, query, options)
    backend = ask_placement(config.placement, query)

    from ecomp.scheduler.create import create
    from ecomp.scheduler.wanted import Wanted
    from ecomp.store.client import Store

    who_for, weigh = (config.user_id, options.project or config.project_id), options.weigh or SPREAD
    count = options.size or 1
    wanted = Wanted(
        *(instance, query, image, *who_for, requested, options.name, *told, weigh),
        count=count,
        minimum=options.min or count,
        group=options.membership,
    )
    who = _who(requested)
    again = f'the same command with --uuid {instance} goes on, or says what became of it'
    store = Store(config.etcd)
    try:
        delivered = create(store, backend, wanted, who, options.uuid is not None, random.Random(), now)
    except NoCapacity as error:
        return no_capacity(TERMINAL, error, store, backend, query, options.membership)
    except KeyboardInterrupt:
        says = f'instance {instance}: eschedule {instance} says whether it was placed all the same'
        _say(f'interrupted; {says if count == 1 else again}')
        return EcompError.exit_code
    except UnknownOutcome as error:
        _say(f'{error}; {again}')
        return UnknownOutcome.exit_code
    finally:
        store.close()
    try:
        _put(as_notified(wanted, delivered, options.format or 'table'))
    except OSError as error:
        reason = f'but stdout cannot be written: {error.strerror}'
        places = [f'instance {name} was placed on {each.compute}' for name, each in delivered.items()]
        where = places[0] if count == 1 else f'{len(places)} instances were placed: --uuid {instance} says where'
        raise EcompError(f'{where}, {reason}') from error
    for line in remarks(wanted, delivered):
        _say(line)
    return 0 if options.wait is None else reach_all(TERMINAL, config, list(delivered), options)


class New(NamedTuple):
    """A new instance, as far as the command line says it."""

    instance: str
    image: str
    requested: str
    ssh_keys: tuple[str, ...] | None
    user_data: bytes | None


def _enqueue(config: ScheduleConfig, options: Options, new: New) -> int:
    """Put it into its flavor's queue: placement is neither asked nor loaded."""
    from ecomp.model.guest_data import SharedUserData
    from ecomp.model.queue import Waiting
    from ecomp.scheduler.enqueue import enqueue, flavor_of_etcd
    from ecomp.store.client import Store

    instance, shared = new.instance, None if new.user_data is None else SharedUserData.of(new.user_data)
    store = Store(config.etcd)
    try:
        flavor, revision = flavor_of_etcd(config, store, options.flavor or '')
        waiting = Waiting(
            *(instance, flavor, new.image, config.user_id, options.project or config.project_id),
            *({'requested': new.requested}, options.name, new.ssh_keys, shared.sha256 if shared else None),
            options.membership,
        )
        is_new = enqueue(store, waiting, revision, shared, _who(new.requested), options.uuid is not None)
    except NoCapacity as error:
        return refused(TERMINAL, error)
    except KeyboardInterrupt:
        _say(f'interrupted; instance {instance}: eschedule {instance} says whether it is queued all the same')
        return EcompError.exit_code
    finally:
        store.close()
    if options.format == 'json':
        _put(dump([{'instance': instance, 'flavor': flavor.name, 'name': waiting.name}], indent=2))
    else:
        _put(f'QUEUED INSTANCE {instance}')
    if not is_new:
        _say(f'{instance} was requested before: nothing is changed')
    return 0 if options.wait is None else reach_all(TERMINAL, config, [instance], options)


def _who(requested: str) -> dict[str, object]:
    """What etcd is told of who is at a request."""
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'since': requested}


def _put(text: str) -> None:
    print(printable_whole(text), flush=True)


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal changes nothing of what was done
        print(f'eschedule: {printable_lines(log.redact(text))}', file=sys.stderr, flush=True)


TERMINAL = Terminal(_put, _say)


if __name__ == '__main__':
    run()
