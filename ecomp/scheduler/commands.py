"""eschedule's commands, each wired to its use case: words for the terminal and an exit code out.

What is imported late is imported late on purpose: each command loads what it needs and no more.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ecomp.conf import ScheduleConfig
from ecomp.errors import EcompError, NoCapacity, OverQuota, StillGoing, TooFew
from ecomp.model.choose import SPREAD
from ecomp.model.json_object import dump
from ecomp.model.power import ACTIONS, Power
from ecomp.model.record import ERROR, STAGES, Record
from ecomp.model.text import printable
from ecomp.scheduler import operators
from ecomp.scheduler.arguments import Command, Options
from ecomp.scheduler.ask import ask_placement
from ecomp.scheduler.forms import QUERY
from ecomp.scheduler.live import Live
from ecomp.scheduler.terminal import Terminal, each_of, shown

if TYPE_CHECKING:
    from ecomp.model.group import Membership
    from ecomp.scheduler.ask import Backend
    from ecomp.scheduler.find import Found
    from ecomp.scheduler.wait import Deadline
    from ecomp.scheduler.wanted import Delivered, Wanted
    from ecomp.store.client import Store

ADDRESSED = 'addressed'
"""The stage that is waited for if none is named."""


def reach_all(out: Terminal, config: ScheduleConfig, instances: Sequence[str], options: Options) -> int:
    """Wait for the stage of each that was asked for; the first failure's exit code."""
    from ecomp.scheduler.wait import Deadline

    stage, deadline = options.stage or options.wait or ADDRESSED, Deadline(options.patience)
    return each_of(out, instances, lambda instance: _reach(out, config, instance, stage, deadline))


def as_notified(wanted: Wanted, delivered: Mapping[str, Delivered], form: str) -> str:
    """What the user is told: a line for each as in 2019, or a JSON array."""
    if form != 'json':
        return '\n'.join(f'NOTIFIED TARGET, {each.compute}, OF INSTANCE {name}' for name, each in delivered.items())
    found = [
        {'instance': instance, 'compute': each.compute, 'name': wanted.instances[instance]}
        for instance, each in delivered.items()
    ]
    return dump(found, indent=2)


def remarks(wanted: Wanted, delivered: Mapping[str, Delivered]) -> list[str]:
    """What else there is to say of it, a line each."""
    said = [f'{name} was requested before: nothing is changed' for name, each in delivered.items() if each.again]
    if not said and len(delivered) < wanted.count:
        said.append(f'{len(delivered)} of {wanted.count} are placed: there is no room, or no quota, for more')
    return said


def asked(config: ScheduleConfig, query: str, options: Options) -> str:
    """The query, with a flavor below it and for one compute alone, if those are named."""
    if options.flavor is not None:
        from ecomp.scheduler.flavors import with_flavor

        query = with_flavor(config, options.flavor, query)
    if options.on is not None:
        from ecomp.scheduler.hosts import only_on

        query = only_on(config.etcd, query, options.on)
    return query


def _plan(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.plan import plan
    from ecomp.scheduler.show import as_plan
    from ecomp.scheduler.wanted import Wanted

    options, query, count = command.options, asked(config, command.words[0], command.options), command.options.size or 1
    backend = ask_placement(config.placement, query)
    wanted = Wanted(
        *(str(uuid.uuid4()), query, '', config.user_id, options.project or config.project_id, ''),
        weigh=options.weigh or SPREAD,
        count=count,
        minimum=options.min or count,
        group=options.membership,
    )
    try:
        ranked = plan(store, backend, wanted, random.Random())
    except NoCapacity as error:
        return no_capacity(out, error, store, backend, query, options.membership)
    out.put(as_plan(ranked, options.format or 'table'))
    placed = sum(each.instances for each in ranked)
    if placed < count:
        out.say(f'{placed} of {count} would be placed: there is no room, or no quota, for more')
    return 0


def no_capacity(
    out: Terminal, error: NoCapacity, store: Store, backend: Backend, query: str, group: Membership | None
) -> int:
    """Say that there is none, and then why, and what each compute lacks; the exit code."""
    code = refused(out, error)
    if not isinstance(error, OverQuota):
        from ecomp.scheduler.explain import tell

        tell(store, backend, query, group, error.taken if isinstance(error, TooFew) else (), out.say)
    return code


def refused(out: Terminal, error: NoCapacity) -> int:
    """Say that there is none, and then why; the exit code."""
    with suppress(OSError):  # run() flushes once more, and makes it count
        out.put('NO ALLOCATIONS LEFT')
    out.say(str(error))
    return error.exit_code


def _query(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import living, resolve
    from ecomp.scheduler.show import no_address

    # Not of /booted: every compute may write there, of every instance.
    record = living(store, resolve(store, command.words[0])).record
    if record.address:
        out.put(printable(record.address))
        return 0
    out.say(no_address(record))
    return EcompError.exit_code if record.state == ERROR else StillGoing.exit_code


def _destroy(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    return each_of(out, command.words, lambda instance: _destroy_one(out, config, store, command.options, instance))


def _destroy_one(out: Terminal, config: ScheduleConfig, store: Store, options: Options, word: str) -> None:
    from ecomp.scheduler.destroy import destroy
    from ecomp.scheduler.find import is_known, resolve
    from ecomp.scheduler.wait import Deadline, wait_until_gone

    instance = resolve(store, word)
    done = destroy(store, instance)
    out.say(done)
    if options.wait is not None and is_known(store, instance):
        with Live() as tell:
            wait_until_gone(config.etcd, instance, Deadline(options.patience), tell)
        out.say(f'{instance}: gone')


def _power(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import resolve
    from ecomp.scheduler.power import Accepted, power
    from ecomp.scheduler.wait import Deadline, wait_for_power

    accepted: dict[str, Accepted] = {}

    def ask(word: str) -> None:
        instance = resolve(store, word)
        if instance in accepted:
            return  # named twice, by its name and its uuid
        answer = power(store, instance, Power(command.name, str(uuid.uuid4())))
        out.say(answer.said)
        if answer.power is not None:
            accepted[instance] = answer

    code = each_of(out, list(dict.fromkeys(command.words)), ask)
    if command.options.wait is None:
        return code
    deadline = Deadline(command.options.patience)

    def wait(instance: str) -> None:
        with Live() as tell:
            record = wait_for_power(config.etcd, instance, accepted[instance], deadline, tell)
        out.say(f'{instance}: {record.state}')

    waited = each_of(out, list(accepted), wait)
    return code or waited


def _wait(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.errors import NotFound
    from ecomp.scheduler.find import living, resolve
    from ecomp.scheduler.wait import Deadline

    stage, deadline = command.options.stage or ADDRESSED, Deadline(command.options.patience)

    def wait_for_one(word: str) -> None:
        instance = resolve(store, word)
        if living(store, instance).is_destroying:
            raise NotFound(f'{instance}: is being destroyed')
        _reach(out, config, instance, stage, deadline)

    return each_of(out, command.words, wait_for_one)


def _list(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.find import all_records
    from ecomp.scheduler.show import as_list

    records, unreadable = all_records(store, command.options.all)
    return shown(out, as_list(records, command.options.format or 'table'), unreadable)


def _show(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.show import as_detail

    form = command.options.format or 'table'
    return each_of(out, command.words, lambda word: out.put(as_detail(_found(store, word).record, form)))


def _why(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.why import as_why, why

    form = command.options.format or 'table'
    return each_of(out, command.words, lambda word: out.put(as_why(why(store, _found(store, word)), form)))


def _timeline(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.timeline import as_timeline

    records: list[Record] = []
    code = each_of(out, command.words, lambda word: records.append(_found(store, word).record))
    if records:
        out.put(as_timeline(records, command.options.format or 'table'))
    return code


def _found(store: Store, word: str) -> Found:
    from ecomp.errors import NotFound
    from ecomp.scheduler.find import find, resolve

    instance = resolve(store, word)
    found = find(store, instance)
    if found is None:
        raise NotFound(f'{instance}: no such instance')
    return found


RUNS: dict[str, Callable[[Terminal, ScheduleConfig, Store, Command], int]] = {
    QUERY: _query,
    'plan': _plan,
    'destroy': _destroy,
    **dict.fromkeys(ACTIONS, _power),
    'wait': _wait,
    'list': _list,
    'show': _show,
    'why': _why,
    'timeline': _timeline,
    **operators.RUNS,
}
"""What each command does, by its name in arguments.FORMS; create is apart, for it opens etcd as late as it can."""


def _reach(out: Terminal, config: ScheduleConfig, instance: str, stage: str, deadline: Deadline) -> None:
    """Wait for the stage; once there has to be an address, it is printed."""
    from ecomp.scheduler.wait import wait_for_stage

    with Live() as tell:
        record = wait_for_stage(config.etcd, instance, stage, deadline, tell)
    if record.address and STAGES.index(stage) >= STAGES.index(ADDRESSED):
        out.put(printable(record.address))
