"""eschedule's front door: arguments in, one use case, words and an exit code out.

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
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ecomp import log
from ecomp.conf import ScheduleConfig, load_schedule
from ecomp.errors import EcompError, NoCapacity, StillGoing, UnknownOutcome, Unreachable, UsageError
from ecomp.model import keys
from ecomp.model.image import check_image
from ecomp.model.power import ACTIONS, Power
from ecomp.model.record import ERROR, STAGES, Record, parse_address, timestamp
from ecomp.model.text import printable_lines
from ecomp.scheduler.arguments import CREATE, QUERY, Command, Options, parse, parser
from ecomp.scheduler.live import Live

if TYPE_CHECKING:
    from ecomp.model.allocation import Allocations
    from ecomp.placement.client import Placement
    from ecomp.scheduler.find import Found
    from ecomp.scheduler.wait import Deadline
    from ecomp.store.client import Store

ADDRESSED = 'addressed'
"""The stage that is waited for if none is named."""


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
        return RUNS[command.name](config, store, command)
    finally:
        store.close()


def _create(config: ScheduleConfig, command: Command) -> int:
    query, options = command.words[0], command.options
    image = command.words[1] if len(command.words) > 1 else config.image
    try:
        check_image(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    ssh_keys, user_data = _given(config, options)
    instance = options.uuid or str(uuid.uuid4())
    requested = _now()
    backend = _ask_placement(config, query)

    from ecomp.scheduler.create import Wanted, create
    from ecomp.store.client import Store

    who_for = config.user_id, config.project_id
    wanted = Wanted(instance, query, image, *who_for, requested, options.name, ssh_keys, user_data)
    who = {'host': socket.gethostname(), 'pid': os.getpid(), 'since': requested}
    store = Store(config.etcd)
    try:
        delivered = create(store, backend, wanted, who, options.uuid is not None, random.Random(), _now)
    except NoCapacity as error:
        print('NO ALLOCATIONS LEFT')
        _say(str(error))
        return NoCapacity.exit_code
    except KeyboardInterrupt:
        _say(f'interrupted; instance {instance}: eschedule {instance} says whether it was placed all the same')
        return EcompError.exit_code
    except UnknownOutcome as error:
        _say(f'{error}; the same command with --uuid {instance} goes on, or says what became of it')
        return UnknownOutcome.exit_code
    finally:
        store.close()
    try:
        print(f'NOTIFIED TARGET, {delivered.compute}, OF INSTANCE {instance}', flush=True)
    except OSError as error:
        reason = f'but stdout cannot be written: {error.strerror}'
        raise EcompError(f'instance {instance} was placed on {delivered.compute}, {reason}') from error
    if delivered.again:
        _say(f'{instance} was requested before: nothing is changed')
    if options.wait is not None:
        from ecomp.scheduler.wait import Deadline

        _reach(config, instance, options.wait or ADDRESSED, Deadline(_timeout(options)))
    return 0


def _given(config: ScheduleConfig, options: Options) -> tuple[tuple[str, ...] | None, bytes | None]:
    """The ssh keys and the user-data for a new guest: the command line's, or else schedule.yaml's; None for none."""
    key_files = config.ssh_keys if options.ssh_key is None else options.ssh_key
    data_file = config.user_data if options.user_data is None else options.user_data
    if not key_files and data_file is None:
        return None, None
    from ecomp.scheduler import given

    ssh_keys = given.ssh_keys(key_files) if key_files else None
    return ssh_keys, None if data_file is None else given.user_data(data_file, _say)


def _ask_placement(config: ScheduleConfig, query: str) -> Future[tuple[Placement, list[Allocations]]]:
    """Candidates, asked for in a thread: importing requests and waiting go on while etcd is being spoken to."""
    future: Future[tuple[Placement, list[Allocations]]] = Future()

    def ask() -> None:
        try:
            from ecomp.placement.allocations import candidates
            from ecomp.placement.client import Placement

            placement = Placement(config.placement)
            future.set_result((placement, candidates(placement, query)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name='candidates', daemon=True).start()
    return future


def _query(_: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import living, resolve
    from ecomp.scheduler.show import no_address

    instance = resolve(store, command.words[0])
    booted = store.get(keys.booted(instance))
    if booted is not None:
        try:
            print(parse_address(booted.value))
        except ValueError as error:
            raise EcompError(f'{booted.key}: {error}') from error
        return 0
    record = living(store, instance).record
    _say(no_address(record))
    return EcompError.exit_code if record.state == ERROR else StillGoing.exit_code


def _destroy(config: ScheduleConfig, store: Store, command: Command) -> int:
    return _each(command.words, lambda instance: _destroy_one(config, store, command.options, instance))


def _destroy_one(config: ScheduleConfig, store: Store, options: Options, word: str) -> None:
    from ecomp.scheduler.destroy import destroy
    from ecomp.scheduler.find import find, resolve
    from ecomp.scheduler.wait import Deadline, wait_until_gone

    instance = resolve(store, word)
    done = destroy(store, instance)
    _say(done)
    if options.wait is not None and find(store, instance) is not None:
        with Live() as tell:
            wait_until_gone(config.etcd, instance, Deadline(_timeout(options)), tell)
        _say(f'{instance}: gone')


def _power(config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import resolve
    from ecomp.scheduler.power import Accepted, power
    from ecomp.scheduler.wait import Deadline, wait_for_power

    accepted: dict[str, Accepted] = {}

    def ask(word: str) -> None:
        instance = resolve(store, word)
        if instance in accepted:
            return  # named twice, by its name and its uuid
        answer = power(store, instance, Power(command.name, str(uuid.uuid4())))
        _say(answer.said)
        if answer.power is not None:
            accepted[instance] = answer

    code = _each(list(dict.fromkeys(command.words)), ask)
    if command.options.wait is None:
        return code
    deadline = Deadline(_timeout(command.options))

    def wait(instance: str) -> None:
        with Live() as tell:
            record = wait_for_power(config.etcd, instance, accepted[instance], deadline, tell)
        _say(f'{instance}: {record.state}')

    waited = _each(list(accepted), wait)
    return code or waited


def _wait(config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.errors import NotFound
    from ecomp.scheduler.find import living, resolve
    from ecomp.scheduler.wait import Deadline

    stage, deadline = command.options.stage or ADDRESSED, Deadline(_timeout(command.options))

    def wait_for_one(word: str) -> None:
        instance = resolve(store, word)
        if living(store, instance).is_destroying:
            raise NotFound(f'{instance}: is being destroyed')
        _reach(config, instance, stage, deadline)

    return _each(command.words, wait_for_one)


def _list(_: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import all_records
    from ecomp.scheduler.show import as_list

    records, unreadable = all_records(store, command.options.all)
    return _shown(as_list(records, command.options.format or 'table'), unreadable)


def _show(_: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.show import as_detail

    form = command.options.format or 'table'
    return _each(command.words, lambda word: print(as_detail(_found(store, word).record, form)))


def _timeline(_: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.timeline import as_timeline

    records: list[Record] = []
    code = _each(command.words, lambda word: records.append(_found(store, word).record))
    if records:
        print(as_timeline(records, command.options.format or 'table'))
    return code


def _found(store: Store, word: str) -> Found:
    from ecomp.errors import NotFound
    from ecomp.scheduler.find import find, resolve

    instance = resolve(store, word)
    found = find(store, instance)
    if found is None:
        raise NotFound(f'{instance}: no such instance')
    return found


def _hosts(config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.hosts import all_hosts
    from ecomp.scheduler.show import as_hosts

    hosts, unreadable = all_hosts(store, Placement(config.placement))
    return _shown(as_hosts(hosts, command.options.format or 'table'), unreadable)


def _shown(table: str, unreadable: Sequence[EcompError]) -> int:
    print(table)
    for error in unreadable:
        _say(str(error))
    return EcompError.exit_code if unreadable else 0


def _host_forget(config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.forget import forget

    try:
        forget(store, Placement(config.placement), command.words[0], _now, _say)
    except Unreachable as error:
        _say(f'{error}; nothing was removed but what is said above, and the same command again goes on')
        return error.exit_code
    return 0


def _audit(config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.audit import FOUND, audit
    from ecomp.scheduler.show import as_findings, cures

    options, placement = command.options, Placement(config.placement)
    if options.fix:
        from ecomp.scheduler.repair import fix

        report = fix(store, placement, _say)
    else:
        report = audit(store, placement)
    shown = as_findings(report.findings, options.format or 'table')
    if shown:
        print(shown, flush=True)
    for compute in report.silent:
        _say(f'compute {compute} is silent: what it has was not compared')
    for cure in cures(report.findings):
        _say(cure)
    _say(f'{report.compared}: {len(report.findings) or "no"} finding' + ('' if len(report.findings) == 1 else 's'))
    return FOUND if report.findings else 0


RUNS: dict[str, Callable[[ScheduleConfig, Store, Command], int]] = {
    QUERY: _query,
    'destroy': _destroy,
    **dict.fromkeys(ACTIONS, _power),
    'wait': _wait,
    'list': _list,
    'show': _show,
    'timeline': _timeline,
    'hosts': _hosts,
    'host forget': _host_forget,
    'audit': _audit,
}
"""What each command does, by its name in arguments.FORMS; create is apart, for it opens etcd as late as it can."""


def _each(words: Sequence[str], do: Callable[[str], None]) -> int:
    """Do it for every word, whatever became of the others; the first failure's exit code."""
    code = 0
    for word in words:
        try:
            do(word)
        except EcompError as error:
            _say(str(error))
            code = code or error.exit_code
    return code


def _reach(config: ScheduleConfig, instance: str, stage: str, deadline: Deadline) -> None:
    """Wait for the stage; once there has to be an address, it is printed."""
    from ecomp.scheduler.wait import wait_for_stage

    with Live() as tell:
        record = wait_for_stage(config.etcd, instance, stage, deadline, tell)
    if record.address and STAGES.index(stage) >= STAGES.index(ADDRESSED):
        print(record.address, flush=True)


def _timeout(options: Options) -> float:
    return 300.0 if options.timeout is None else options.timeout


def _now() -> str:
    return timestamp(datetime.now(UTC))


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal changes nothing of what was done
        print(f'eschedule: {printable_lines(log.redact(text))}', file=sys.stderr, flush=True)


if __name__ == '__main__':
    run()
