"""The commands of those who run the computes: hosts, and the audit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ecomp.cli.command import DOCUMENT, LISTED, Command, Context, Outcomes, until
from ecomp.cli.options import TABLE, compute, computes, nothing
from ecomp.cli.terminal import Live, each_of, now
from ecomp.errors import NotFound, Unreachable


def _hosts(do: Context) -> int:
    from ecomp.cli.show import as_hosts
    from ecomp.scheduler.looking.hosts import all_hosts

    hosts, unreadable = all_hosts(do.store, do.placement)
    return do.show(as_hosts(hosts), unreadable)


def _host_show(do: Context) -> int:
    from ecomp.cli.show import as_hosts, as_list
    from ecomp.scheduler.looking.find import all_records
    from ecomp.scheduler.looking.hosts import all_hosts, compute_of

    meant: list[str] = []
    code = each_of(do.out, do.words, lambda word: meant.append(compute_of(do.store, lambda: do.placement, word)))
    every, unreadable = all_hosts(do.store, do.placement)
    found = [each for each in every if each.compute in meant]
    for missing in dict.fromkeys(meant):
        if missing not in {each.compute for each in found}:
            do.out.say(f'{missing}: no such compute: {do.typed} hosts shows all')
            code = code or NotFound.exit_code
    if not found:
        return code
    shown = do.show(as_hosts(found), unreadable, one=len(do.words) == 1)
    if do.form == TABLE and not do.options.columns and not do.options.sort:
        there = [each for each in all_records(do.store, with_gone=False)[0] if each.compute in meant]
        do.out.put('' if there else '\nno instance lives there')
        if there:
            do.show(as_list(there, do.computes))
    return code or shown


def _host_status(do: Context) -> int:
    from ecomp.scheduler.changing.wait import Deadline
    from ecomp.scheduler.looking.hosts import compute_of
    from ecomp.scheduler.operating.decommission import disable, drained, enable, inhabitants

    outcomes = Outcomes(do, do.words, compute=None)
    deadline = Deadline(do.options.patience)

    def change(word: str) -> None:
        there = compute_of(do.store, lambda: do.placement, word)
        outcomes.tell(word, compute=there)
        if do.name == 'host enable':
            outcomes.tell(word, enable(do.store, do.placement, there, word))
        else:
            outcomes.tell(word, disable(do.placement, there, word))
        for line in inhabitants(do.store, do.placement, there, word) if do.name == 'host drain' else ():
            outcomes.tell(word, line)

    def wait(word: str) -> None:
        there = outcomes.found[word]['compute']
        with Live() as tell:
            drained(do.store, do.placement, there, word, deadline, tell)
        outcomes.tell(word, f'{word}: nothing lives there any more')

    outcomes.each(do.words, change)
    if do.options.wait is not None and not outcomes.code:
        outcomes.wait(do.words, wait, lambda words: f'{do.typed} {do.name} --wait {words}')
    return outcomes.end()


def _host_forget(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import compute_of
    from ecomp.scheduler.operating.decommission import forget

    outcomes = Outcomes(do, do.words, compute=None)

    def forget_one(word: str) -> None:
        there = compute_of(do.store, lambda: do.placement, word)
        outcomes.tell(word, compute=there)
        try:
            told, fenced = partial(outcomes.tell, word), do.options.fenced
            forget(do.store, do.placement, there, word, now, told, fenced)
        except Unreachable as error:
            left = 'nothing was removed but what is said above, and the same command again goes on'
            raise type(error)(f'{error}; {left}', error.backend) from error

    outcomes.each(outcomes.found, forget_one)
    return outcomes.end()


def _audit(do: Context) -> int:
    from ecomp.cli.show import as_findings, summary
    from ecomp.cli.tables import rendered
    from ecomp.model.findings import FOUND
    from ecomp.scheduler.looking.hosts import read_names_by_instance
    from ecomp.scheduler.operating.audit import audit

    # A column that there is not is refused now: not only where something is found, and not after it is mended.
    rendered(as_findings(()), do.look)
    if do.options.fix:
        from ecomp.scheduler.operating.audit import fix

        report = fix(do.store, do.placement, do.out.say)
    else:
        report = audit(do.store, do.placement)
    if report.findings or do.form != TABLE:
        do.show(as_findings(report.findings, report.known, read_names_by_instance(do.store) if report.findings else {}))
    for line in summary(report):
        do.out.say(line)
    return FOUND if report.findings else 0


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('hosts', 'hosts', 'all computes: state, instances, what is used',
            'Print all computes, a line each: uuid, host name, state, number of instances, and of each resource class '
            'how much is used, and how much there is in all (memory in MiB, disk in GiB); and of one that is up the '
            'version of its ecompute, and what its guests are (kvm, qemu, fake). `closed` is one whose ecompute was '
            'stopped, `disabled` one where nothing new is placed.',
            nothing, _hosts, LISTED,
            example='eschedule hosts'),
    Command('host list', 'host list', 'the same as hosts',
            'Print all computes, as `eschedule hosts` does.',
            nothing, _hosts, LISTED,
            example='eschedule host list'),
    Command('host show', 'host show <host>…', 'one compute, and what lives there',
            'Print of a compute, or of several, what `eschedule hosts` says of it, and then the instances there as '
            '`eschedule list` prints them. With -f json: what `eschedule hosts -f json` says of it.',
            computes, _host_show, LISTED, (4, 5),
            example='eschedule host show hv1'),
    Command('host disable', 'host disable <host>', 'place nothing new on a compute',
            'Have nothing new placed on a compute; what lives there goes on.',
            compute, _host_status, DOCUMENT, (4, 5),
            example='eschedule host disable hv1'),
    Command('host drain', 'host drain <host>', 'disable a compute, and say what lives there',
            'Have nothing new placed on a compute, and say what lives there. Nothing is destroyed or moved: whoever '
            'owns the instances does that.',
            compute, _host_status,
            {**until('nothing lives there any more, and nothing is on its way there'), **DOCUMENT}, (4, 5, 6),
            example='eschedule host drain hv1 --wait --timeout 3600'),
    Command('host enable', 'host enable <host>', 'place new instances on a compute again',
            'Have new instances placed on a compute again.',
            compute, _host_status, DOCUMENT, (4, 5),
            example='eschedule host enable hv1'),
    Command('host forget', 'host forget <host>…', 'remove a compute that is dead for good',
            'Remove a compute that will never come back: its resource provider in placement, claims that no request '
            "stands behind, the keys of instances whose destroy had been accepted, and its host's name. It is refused "
            'while the compute is alive or anything lives there: destroy those instances first; and without --fenced '
            'while it holds claims or a request waits in a queue, because their guests may be running there. Killed '
            'half-way, the same command again goes on.',
            computes, _host_forget, {'fenced': '', **DOCUMENT}, (4, 5),
            example='eschedule host forget hv3 --fenced'),
    Command('audit', 'audit', 'where etcd, placement and computes disagree',
            'Compare what etcd, placement and every compute say, and print where they disagree: a code, what it is '
            'about, and a sentence. It takes a few seconds, and looks twice where it finds something. stderr says how '
            'each finding is mended.',
            nothing, _audit, {'fix': '', **LISTED}, (8,),
            example='eschedule audit --fix'),
)
