"""Commands that change instances: the compute of an instance carries out what they request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ecomp.cli.command import DOCUMENT, Command, Context, Outcomes, known_of, until
from ecomp.cli.options import TABLE, instances, nothing
from ecomp.cli.terminal import Live
from ecomp.errors import EcompError
from ecomp.model.keys import new_uuid
from ecomp.model.order import REBOOT, Power
from ecomp.model.record import GONE, STAGES, Record
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.scheduler.changing.change import Acceptance
    from ecomp.scheduler.changing.wait import Deadline
    from ecomp.store.sharing import Index

ADDRESSED = 'addressed'


def _destroy(do: Context) -> int:
    from ecomp.scheduler.changing.change import destroy
    from ecomp.scheduler.changing.wait import Wait, wait_until_gone
    from ecomp.scheduler.looking.find import is_known

    outcomes = Outcomes(do, do.words, instance=None, state=None)

    def ask(word: str) -> bool:
        instance = do.instance(word, do.among)
        outcomes.tell(word, instance=instance)
        sentence = destroy(do.store, instance, do.among, do.claimed_on)
        do.name_computes()
        outcomes.tell(word, sentence)
        return True

    def wait(word: str, deadline: Deadline) -> None:
        instance = outcomes.found[word]['instance']
        if not is_known(do.store, instance, do.among):
            return  # it was in error, so the destroy removed its record
        with Live() as show_status:
            wait_until_gone(Wait(do.config.etcd, instance, deadline, show_status, do.among, claims=do.claims))
        outcomes.tell(word, f'{instance}: gone', state=GONE)

    return outcomes.run(ask, wait, 'destroy --wait')


def _power(do: Context) -> int:
    from ecomp.scheduler.changing.change import power
    from ecomp.scheduler.changing.wait import Wait, wait_for_power

    outcomes = Outcomes(do, do.words, instance=None, state=None)
    acceptances: dict[str, Acceptance] = {}
    word_by_instance: dict[str, str] = {}

    def ask(word: str) -> bool:
        instance = do.instance(word, do.among)
        outcomes.tell(word, instance=instance)
        if word_by_instance.setdefault(instance, word) != word:
            return False  # the instance is given twice, by its name and by its uuid
        acceptance = power(do.store, instance, Power(do.name, new_uuid(os.urandom(16))), do.among)
        do.name_computes()
        outcomes.tell(word, acceptance.said)
        acceptances[word] = acceptance
        return acceptance.power is not None

    def wait(word: str, deadline: Deadline) -> None:
        instance = outcomes.found[word]['instance']
        with Live() as show_status:
            wait_state = Wait(do.config.etcd, instance, deadline, show_status, do.among, claims=do.claims)
            record = wait_for_power(wait_state, acceptances[word])
        outcomes.tell(word, f'{instance}: {record.state}', state=record.state)

    # A repeated reboot command could reboot the guest again, so the hint for it is `show`.
    return outcomes.run(ask, wait, 'show' if do.name == REBOOT else f'{do.name} --wait')


def _clear(do: Context) -> int:
    from ecomp.scheduler.changing.change import clear

    removed, errors = clear(do.store)
    gone_count = sum(state == GONE for state in removed.values())
    count_text = f'{len(removed) or "no"} record{"" if len(removed) == 1 else "s"}'
    do.out.say(f'{count_text} removed: {gone_count} gone, {len(removed) - gone_count} in error')
    for error in errors:
        do.out.say(str(error))
    do.show_document([{'removed': [{'instance': instance, 'state': state} for instance, state in removed.items()]}])
    return EcompError.exit_code if errors else 0


def reach(
    do: Context,
    outcomes: Outcomes,
    instance_of: Callable[[str], str],
    among: Index | None,
    asked: Mapping[str, Power | None] = MappingProxyType({}),
) -> None:
    """Wait until each word's instance reaches the stage of --for or --wait, else addressed.

    Prints the address once a stage implies one; an EcompError is printed and recorded for its word. `instance_index`
    says where instances were a moment ago. `power_by_instance` has pending power changes; `resolve_instance` may add
    one.
    """
    from ecomp.scheduler.changing.wait import Wait, wait_for_stage

    stage = do.options.stage or do.options.wait or ADDRESSED

    def late(record: Record) -> None:
        from ecomp.cli.enter import last_lines

        for line in last_lines(do, record):
            do.out.say(f"{record.name or record.instance}'s console: {line}")

    def wait(word: str, deadline: Deadline) -> None:
        def seen(record: Record) -> None:
            outcomes.tell(word, '', **known_of(record))

        instance = instance_of(word)
        with Live() as show_status:
            wait_state = Wait(do.etcd, instance, deadline, show_status, among, seen, late, do.claims)
            record = wait_for_stage(wait_state, stage, asked.get(instance))
        if do.form == TABLE and record.address and STAGES.index(stage) >= STAGES.index(ADDRESSED):
            do.out.put(printable(record.address))

    outcomes.wait(list(outcomes.found), wait, 'wait', '' if stage == ADDRESSED else f' --for {stage}')


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('destroy', 'destroy <id>…', 'remove an instance: domain, DISK and claim',
            'Remove an instance for good: its domain, its DISK with all that is on it, and what it holds in placement. '
            "(virsh's destroy only switches off: that is `eschedule stop` here.) It returns once the destroy is "
            'accepted, and the compute carries it out, when it is back if it is away now. Of an instance in error its '
            'record is removed.',
            instances, _destroy, {**until('each is gone'), **DOCUMENT}, (4, 5, 6),
            example='eschedule destroy web1 --wait'),
    Command('stop', 'stop <id>…', 'switch a guest off, gently; nothing is removed',
            'Ask the guest to turn itself off; where it has not done so within 60 seconds, it is switched off. Its '
            'disk, its address and its claim stay, and `eschedule start` starts it again.',
            instances, _power, {**until('each is off'), **DOCUMENT}, (4, 5, 6), example='eschedule stop web1 --wait'),
    Command('start', 'start <id>…', 'start a guest that is off',
            'Start the guest of an instance that is stopped.',
            instances, _power, {**until('each runs'), **DOCUMENT}, (4, 5, 6), example='eschedule start web1 --wait'),
    Command('reboot', 'reboot <id>…', 'stop a guest, then start it',
            'Stop the guest, as `eschedule stop` does, and start it again; one that is off is started.',
            instances, _power, {**until('each runs again'), **DOCUMENT}, (4, 5, 6), example='eschedule reboot web1'),
    Command('clear', 'clear', 'remove the records of all that is over',
            'Remove the record of every instance that is gone or in error, which would stay for a day and for a week; '
            'the name of one in error is free then. Nothing of these instances is left but their records. Whoever asks '
            'for one of them afterwards, with --uuid or by `eschedule <id>`, is not told any more what became of it.',
            nothing, _clear, DOCUMENT, example='eschedule clear'),
)
