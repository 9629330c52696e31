"""The commands of those who run the computes: hosts and the audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ecomp.cli.command import DOCUMENT, LISTED, Command, Context, Outcomes, until
from ecomp.cli.options import TABLE, compute, computes, nothing
from ecomp.cli.tables import STATE, UUID, Column, Listing, Row, rendered
from ecomp.cli.terminal import Live, now
from ecomp.errors import NotFound, Unreachable
from ecomp.model.allocation import NEEDED, Room
from ecomp.model.host import DISABLED, NOBODY, Computes, Host

if TYPE_CHECKING:
    from ecomp.model.audit import Finding
    from ecomp.scheduler.changing.wait import Deadline
    from ecomp.scheduler.operating.audit import Report
    from ecomp.scheduler.placing.place import RankedCompute

COMPUTE = Column('COMPUTE', rank=2, kind=UUID)


def _hosts(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import all_hosts

    hosts, unreadable = all_hosts(do.store, do.placement)
    return do.show(as_hosts(hosts), unreadable)


def _host_show(do: Context) -> int:
    from ecomp.cli.inspect import as_list
    from ecomp.scheduler.looking.find import all_records
    from ecomp.scheduler.looking.hosts import all_hosts

    meant, code = do.find_each(do.compute)
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
    from ecomp.scheduler.operating.decommission import disable, drained, enable, inhabitants

    outcomes = Outcomes(do, do.words, compute=None)

    def change(word: str) -> bool:
        there = do.compute(word)
        outcomes.tell(word, compute=there)
        if do.name == 'host enable':
            outcomes.tell(word, enable(do.store, do.placement, there, word))
        else:
            outcomes.tell(word, disable(do.placement, there, word))
        for line in inhabitants(do.store, do.placement, there, word) if do.name == 'host drain' else ():
            outcomes.tell(word, line)
        return True

    def wait(word: str, deadline: Deadline) -> None:
        there = outcomes.found[word]['compute']
        with Live() as tell:
            drained(do.store, do.placement, there, word, deadline, tell)
        outcomes.tell(word, f'{word}: nothing lives there any more')

    return outcomes.run(change, wait, f'{do.name} --wait')


def _host_forget(do: Context) -> int:
    from ecomp.scheduler.operating.decommission import forget

    outcomes = Outcomes(do, do.words, compute=None)

    def forget_one(word: str) -> None:
        there = do.compute(word)
        outcomes.tell(word, compute=there)
        try:
            told, fenced = partial(outcomes.tell, word), do.options.fenced
            forget(do.store, do.placement, there, word, now, told, fenced)
        except Unreachable as error:
            left = 'nothing was removed but what is said above, and the same command again goes on'
            raise type(error)(f'{error}; {left}', error.backend) from error

    return outcomes.run(forget_one)


def _audit(do: Context) -> int:
    from ecomp.model.audit import FOUND
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
        names = read_names_by_instance(do.store) if report.findings else {}
        do.show(as_findings(report.findings, report.world.known, names))
    for line in _summarize(report):
        do.out.say(line)
    return FOUND if report.findings else 0


# What users read of computes and findings


def as_hosts(hosts: Sequence[Host]) -> Listing:
    """All computes, a line each."""
    # What every guest needs, and then what only some computes have.
    classes = [*NEEDED, *sorted({name for each in hosts for name in each.resources} - set(NEEDED))]
    columns = [COMPUTE, Column('HOST', least=8), Column('STATE', kind=STATE), Column('INSTANCES', 1)]
    rows = []
    for each in hosts:
        shares = [_share(each.resources.get(name)) for name in classes]
        known = [each.compute, each.hostname or None, _state(each), each.instances]
        rows.append(Row([*known, *shares, each.said.version, each.said.kind], _host(each)))
    return Listing([*columns, *_shares(classes), Column('VERSION', 4), Column('KIND', 3)], rows)


def as_plan(ranked: Sequence[RankedCompute]) -> Listing:
    """The computes that would be tried, in order, a line each."""
    classes = [*NEEDED, *sorted({name for each in ranked for name in each.asked} - set(NEEDED))]
    columns = [COMPUTE, Column('HOST', least=8), Column('WEIGHT', 1)]
    rows = []
    for each in ranked:
        shares = [_share(each.rooms.get(name)) for name in classes]
        weight = None if each.weight is None else f'{each.weight:.2f}'
        rows.append(Row([each.compute, each.hostname or None, weight, *shares, each.instances], _ranked(each)))
    return Listing([*columns, *_shares(classes), Column('INSTANCES')], rows)


def _shares(classes: Sequence[str]) -> list[Column]:
    return [Column(f'{name} USED/CAPACITY', rank=1 if name in NEEDED else 3, short=name) for name in classes]


def as_findings(findings: Sequence[Finding], known: Computes = NOBODY, names: Mapping[str, str] = {}) -> Listing:
    """What an audit found, a line each. `names` are those of instances, by uuid."""
    columns = [Column('CODE'), Column('SUBJECT', rank=1, kind=UUID), Column('NAME', rank=2, least=24)]
    columns.append(Column('FINDING', least=40, folds=True))
    rows = []
    for each in findings:
        name = names.get(each.subject)
        cells = [each.code, known.translated(each.subject), name, known.translated(each.sentence)]
        rows.append(Row(cells, {**each.to_dict(), 'host': known.host(each.compute), 'name': name}))
    return Listing(columns, rows)


def _summarize(report: Report) -> list[str]:
    """What is said beside an audit's findings: who was silent, what mends them, and how much was compared."""
    called, silent = report.world.known.called, report.world.away()
    away = [f'compute {called(each)} is {how}: what it has was not compared' for each, how in silent.items()]
    cures = (
        f'{each.code}: ' + (f'--fix {each.fix}' if each.fix else f'by hand: {each.how}') for each in report.findings
    )
    count = len(report.findings)
    unserved = filter(None, [report.world.unserved()])
    return [*away, *unserved, *dict.fromkeys(cures), f'{report.compared}: {count or "no"} finding' + 's' * (count != 1)]


def _share(share: Room | None) -> str | None:
    if share is None:
        return None
    return f'{share.used}/{share.capacity}' + (f' ({share.over} too many)' if share.over else '')


def _ranked(each: RankedCompute) -> dict[str, object]:
    rooms = {name: {'used': room.used, 'capacity': room.capacity} for name, room in sorted(each.rooms.items())}
    there = {'asked': dict(sorted(each.asked.items())), 'resources': rooms, 'instances': each.instances}
    return {'compute': each.compute, 'host': each.hostname, 'hostname': each.hostname, 'weight': each.weight, **there}


def _state(host: Host) -> str:
    return f'{host.state}, disabled' if host.disabled and host.state != DISABLED else host.state


def _host(host: Host) -> dict[str, object]:
    shares = {
        name: {field: getattr(each, field) for field in ('used', 'free', 'capacity', 'over')}
        for name, each in sorted(host.resources.items())
    }
    said = {field: getattr(host, field) for field in ('compute', 'hostname', 'state', 'disabled', 'instances')}
    of_itself = {field: getattr(host.said, field) for field in ('version', 'kind', 'queues')}
    return {**said, 'host': host.hostname, **of_itself, 'resources': shares}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('hosts', 'hosts', 'all computes: state, instances, what is used',
            'Print all computes, a line each: uuid, host name, state, number of instances, and of each resource class '
            'how much is used, and how much there is in all (memory in MiB, disk in GiB); and of one that is up the '
            'version of its ecompute, and what its guests are (kvm, qemu, fake). `closed` is one whose ecompute was '
            'stopped, `disabled` one where nothing new is placed.',
            nothing, _hosts, LISTED, example='eschedule hosts'),
    Command('host list', 'host list', 'the same as hosts',
            'Print all computes, as `eschedule hosts` does.',
            nothing, _hosts, LISTED, example='eschedule host list'),
    Command('host show', 'host show <host>…', 'one compute, and what lives there',
            'Print of a compute, or of several, what `eschedule hosts` says of it, and then the instances there as '
            '`eschedule list` prints them. With -f json: what `eschedule hosts -f json` says of it.',
            computes, _host_show, LISTED, (4, 5), example='eschedule host show hv1'),
    Command('host disable', 'host disable <host>', 'place nothing new on a compute',
            'Have nothing new placed on a compute; what lives there goes on.',
            compute, _host_status, DOCUMENT, (4, 5), example='eschedule host disable hv1'),
    Command('host drain', 'host drain <host>', 'disable a compute, and say what lives there',
            'Have nothing new placed on a compute, and say what lives there. Nothing is destroyed or moved: whoever '
            'owns the instances does that.',
            compute, _host_status,
            {**until('nothing lives there any more, and nothing is on its way there'), **DOCUMENT}, (4, 5, 6),
            example='eschedule host drain hv1 --wait --timeout 3600'),
    Command('host enable', 'host enable <host>', 'place new instances on a compute again',
            'Have new instances placed on a compute again.',
            compute, _host_status, DOCUMENT, (4, 5), example='eschedule host enable hv1'),
    Command('host forget', 'host forget <host>…', 'remove a compute that is dead for good',
            'Remove a compute that will never come back: its resource provider in placement, claims that no request '
            "stands behind, the keys of instances whose destroy had been accepted, and its host's name. It is refused "
            'while the compute is alive or anything lives there: destroy those instances first; and without --fenced '
            'while it holds claims or a request waits in a queue, because their guests may be running there. Killed '
            'half-way, the same command again goes on.',
            computes, _host_forget, {'fenced': '', **DOCUMENT}, (4, 5), example='eschedule host forget hv3 --fenced'),
    Command('audit', 'audit', 'where etcd, placement and computes disagree',
            'Compare what etcd, placement and every compute say, and print where they disagree: a code, what it is '
            'about, and a sentence. It takes a few seconds, and looks twice where it finds something. stderr says how '
            'each finding is mended.',
            nothing, _audit, {'fix': '', **LISTED}, (8,), example='eschedule audit --fix'),
)
