"""Commands that change instances: the compute of an instance carries out what they request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from ecomp.cli.command import DOCUMENT_OPTIONS, Command, Context, Outcomes, make_wait_options
from ecomp.cli.options import convert_to_usage_error, parse_any_instances, parse_rebuild, parse_rename, parse_resize
from ecomp.cli.selection import SELECTORS, confirm_destroy, find_conflicts, select_instances
from ecomp.cli.terminal import LiveLine, is_terminal, make_timestamp
from ecomp.errors import EcompError, UsageError
from ecomp.model import keys
from ecomp.model.keys import make_uuid
from ecomp.model.order import REBOOT, PowerAction
from ecomp.model.states import ACTIVE, ERROR, GONE
from ecomp.model.text import check_name, parse_uuid_prefix
from ecomp.scheduler.changes.change import Acceptance, change_power, destroy, remove_finished
from ecomp.scheduler.changes.wait import Deadline, Wait, wait_for_power, wait_for_rebuild, wait_until_gone
from ecomp.scheduler.queries.find import is_known


def _destroy(ctx: Context) -> int:
    selected = select_instances(ctx)
    finished = {record.instance: record.state for record in selected if record.state in (GONE, ERROR)}
    if selected:
        confirm_destroy(ctx, [record.name or record.instance for record in selected if record.state != GONE])
    elif ctx.words and is_terminal(sys.stdin):
        ctx.out.say('destroy deletes the disk of an instance with all data on it')
        confirm_destroy(ctx, _resolve_prefixes(ctx, ctx.words))
    outcomes = Outcomes(ctx, ctx.words, instance=None, state=None)

    def submit(word: str) -> bool:
        instance = ctx.resolve_instance(word, ctx.instance_index)
        outcomes.report(word, instance=instance)
        if instance in finished:
            outcomes.report(word, remove_finished(ctx.store, instance, ctx.instance_index), state=finished[instance])
            return False
        sentence = destroy(ctx.store, instance, ctx.instance_index, ctx.find_claiming_compute)
        ctx.name_computes()
        outcomes.report(word, sentence)
        return True

    def wait(word: str, deadline: Deadline) -> None:
        instance = outcomes.results[word]['instance']
        if not is_known(ctx.store, instance, ctx.instance_index):
            return  # it was in error, so the destroy removed its record
        with LiveLine() as show:
            wait_until_gone(Wait(ctx.config.etcd, instance, deadline, show, ctx.instance_index, claims=ctx.read_claims))
        outcomes.report(word, f'{instance}: gone', state=GONE)

    return outcomes.run(submit, wait, 'destroy --wait')


def _resolve_prefixes(ctx: Context, words: Sequence[str]) -> list[str]:
    """Return the uuids that words abbreviate, and omit names, whole uuids and unknown ones."""
    instances = []
    for word in words:
        if not keys.is_uuid(word) and (prefix := parse_uuid_prefix(word)) is not None:
            with suppress(EcompError):  # reported later
                instance = ctx.resolve_instance(word)
                instances += [instance] if instance.startswith(prefix) else []
    return instances


def _change_power(ctx: Context) -> int:
    select_instances(ctx)
    outcomes = Outcomes(ctx, ctx.words, instance=None, state=None)
    acceptances: dict[str, Acceptance] = {}
    word_by_instance: dict[str, str] = {}

    def submit(word: str) -> bool:
        instance = ctx.resolve_instance(word, ctx.instance_index)
        outcomes.report(word, instance=instance)
        if word_by_instance.setdefault(instance, word) != word:
            return False  # the instance is given twice, by its name and by its uuid
        power = PowerAction(ctx.name, make_uuid(os.urandom(16)))
        acceptance = change_power(ctx.store, instance, power, ctx.instance_index)
        ctx.name_computes()
        outcomes.report(word, acceptance.message)
        acceptances[word] = acceptance
        return acceptance.power is not None

    wait = partial(_wait_for_power, ctx, outcomes, acceptances)
    # A repeated reboot command could reboot the guest again, so the hint for it is `show`.
    return outcomes.run(submit, wait, 'show' if ctx.name == REBOOT else f'{ctx.name} --wait')


def _wait_for_power(
    ctx: Context, outcomes: Outcomes, acceptances: Mapping[str, Acceptance], word: str, deadline: Deadline
) -> None:
    instance = outcomes.results[word]['instance']
    with LiveLine() as show_status:
        wait_state = Wait(ctx.config.etcd, instance, deadline, show_status, ctx.instance_index, claims=ctx.read_claims)
        record = wait_for_power(wait_state, acceptances[word])
    outcomes.report(word, f'{instance}: {record.state}', state=record.state)


def _change_protection(ctx: Context) -> int:
    from ecomp.scheduler.placing.modify import protect

    select_instances(ctx)
    outcomes = Outcomes(ctx, ctx.words, instance=None)

    def submit(word: str) -> None:
        instance = ctx.resolve_instance(word, ctx.instance_index)
        sentence = protect(ctx.store, instance, ctx.name == 'protect', ctx.instance_index)
        outcomes.report(word, sentence, instance=instance)

    return outcomes.run(submit)


def _rename(ctx: Context) -> int:
    from ecomp.scheduler.placing.modify import rename

    outcomes = Outcomes(ctx, ctx.words[:1], instance=None)
    with convert_to_usage_error():
        check_name(ctx.words[1])

    def submit(word: str) -> None:
        instance = ctx.resolve_instance(word)
        outcomes.report(word, rename(ctx.store, instance, ctx.words[1]), instance=instance)

    return outcomes.run(submit)


def _resize(ctx: Context) -> int:
    from ecomp.cli.input import describe_owner  # its modules are not needed by a stop
    from ecomp.model.query import parse_plain_amounts
    from ecomp.scheduler.placing.modify import resize

    outcomes = Outcomes(ctx, ctx.words[:1], instance=None, state=None)
    if not (amounts := parse_plain_amounts(ctx.words[1])) or min(amounts.values()) < 1:
        raise UsageError(f'{ctx.words[1]!r:.80} is not a list of amounts. Try: resources=VCPU:2,MEMORY_MB:1024')
    acceptances: dict[str, Acceptance] = {}

    def submit(word: str) -> bool:
        instance = ctx.resolve_instance(word)
        outcomes.report(word, instance=instance)
        power = PowerAction(REBOOT, make_uuid(os.urandom(16))) if ctx.options.restart else None
        ctx.name_computes()  # also for a refusal
        accepted = resize(ctx.store, ctx.placement, instance, amounts, describe_owner(make_timestamp()), power)
        outcomes.report(word, accepted.message)
        acceptances[word] = accepted
        return accepted.power is not None

    return outcomes.run(submit, partial(_wait_for_power, ctx, outcomes, acceptances), 'show')


def _rebuild(ctx: Context) -> int:
    from ecomp.cli.input import resolve_image
    from ecomp.scheduler.placing.modify import rebuild

    word, *images = ctx.words
    with convert_to_usage_error():
        image = resolve_image(ctx.config, images[0]) if images else None
    if is_terminal(sys.stdin):
        ctx.out.say('rebuild deletes the disk of an instance with all data on it')
        confirm_destroy(ctx, _resolve_prefixes(ctx, [word]), 'Rebuild')
    outcomes, numbers = Outcomes(ctx, [word], instance=None, state=None), dict[str, int]()

    def submit(word: str) -> bool:
        instance = ctx.resolve_instance(word)
        sentence, numbers[word] = rebuild(ctx.store, instance, image)
        ctx.name_computes()
        outcomes.report(word, sentence, instance=instance)
        return True

    def wait(word: str, deadline: Deadline) -> None:
        instance = outcomes.results[word]['instance']
        with LiveLine() as show:
            wait_for_rebuild(Wait(ctx.config.etcd, instance, deadline, show, claims=ctx.read_claims), numbers[word])
        outcomes.report(word, f'{instance}: {ACTIVE}', state=ACTIVE)

    return outcomes.run(submit, wait, 'show')


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('destroy', 'destroy [<id>…]', 'delete an instance, its DISK included',
            'Remove an instance permanently: its domain, its DISK with all data on it, and its claim in placement. '
            '(`virsh destroy` only switches a guest off; the command for that is `eschedule stop`.) The command '
            'returns once the destroy is accepted. The compute carries out the destroy immediately or, if the compute '
            'is down, once it is up again. If an instance is in error, only its record is left; the command removes '
            'the record, and its name is free. --state gone,error removes the records of all such instances, which '
            'otherwise are kept for a day (gone) or a week (error): afterwards nothing reports what became of them.',
            parse_any_instances, _destroy,
            {**make_wait_options('every instance is gone'), **DOCUMENT_OPTIONS, **SELECTORS, 'file': '', 'yes': ''},
            (4, 5, 6), find_problems=find_conflicts, example='eschedule destroy web1 --wait'),
    Command('stop', 'stop [<id>…]', 'shut a guest down; nothing is removed',
            'Ask the guest to shut down, and switch it off if it still runs after 60 seconds. Its disk, its address '
            'and its claim are kept, and `eschedule start` starts it again.',
            parse_any_instances, _change_power,
            {**make_wait_options('every guest is off'), **DOCUMENT_OPTIONS, **SELECTORS}, (4, 5, 6),
            find_problems=find_conflicts, example='eschedule stop web1 --wait'),
    Command('start', 'start [<id>…]', 'start a guest that is off',
            'Start the guest of a stopped instance.',
            parse_any_instances, _change_power,
            {**make_wait_options('every guest runs'), **DOCUMENT_OPTIONS, **SELECTORS}, (4, 5, 6),
            find_problems=find_conflicts, example='eschedule start web1 --wait'),
    Command('reboot', 'reboot [<id>…]', 'stop a guest, then start it',
            'Stop the guest, as `eschedule stop` does, and start it again. A guest that is off is started.',
            parse_any_instances, _change_power,
            {**make_wait_options('every guest runs again'), **DOCUMENT_OPTIONS, **SELECTORS}, (4, 5, 6),
            find_problems=find_conflicts, example='eschedule reboot web1'),
    Command('protect', 'protect [<id>…]', 'keep an instance from being removed',
            '`destroy` refuses a protected instance, and `apply` does not replace or remove it. `evacuate` leaves it '
            'where it is, unless you give --include-protected. A guest may be stopped and started.',
            parse_any_instances, _change_protection, {**DOCUMENT_OPTIONS, **SELECTORS}, (4, 5),
            find_problems=find_conflicts, example='eschedule protect db1'),
    Command('unprotect', 'unprotect [<id>…]', 'end the protection of an instance',
            'End what `eschedule protect` began. Nothing else changes.',
            parse_any_instances, _change_protection, {**DOCUMENT_OPTIONS, **SELECTORS}, (4, 5),
            find_problems=find_conflicts, example='eschedule unprotect db1'),
    Command('resize', "resize <id> 'resources=…'", 'give a guest other amounts',
            'Change how many processors, how much memory and how much disk an instance has. Amounts that you leave out '
            'stay. Its compute must have room. A disk only grows, and it grows at once. The rest takes effect when the '
            'guest starts: until then the instance claims the larger of old and new, and its project is charged for '
            'that. A disk that grew has free space at its end, which most cloud images use at their next boot.',
            parse_resize, _resize,
            {'restart': '', **make_wait_options('the guest runs again, with --restart'), **DOCUMENT_OPTIONS},
            (3, 4, 5, 6), example="eschedule resize db1 'resources=VCPU:2,MEMORY_MB:1024' --restart --wait"),
    Command('rename', 'rename <id> NAME', 'give an instance another name',
            'Give an instance another name, which no other existing instance can have; its old one is free at once. '
            'The guest keeps the host name that it has.',
            parse_rename, _rename, DOCUMENT_OPTIONS, (4, 5), example='eschedule rename web1 web-old'),
    Command('rebuild', 'rebuild <id> [IMAGE_URL]', 'give an instance a new disk; the DISK is deleted',
            'Delete the DISK of an instance with all data on it, and start the guest with a new one, made from '
            'IMAGE_URL or the image that was requested last. uuid, name, claim and address stay; the ssh host keys are '
            'new. If the image cannot be had, nothing is removed. After a later failure the instance is stopped.',
            parse_rebuild, _rebuild, {**make_wait_options('the new guest runs'), **DOCUMENT_OPTIONS, 'yes': ''},
            (4, 5, 6), example='eschedule rebuild web1 --wait'),
)
