"""Commands for operators of computes: hosts and the audit."""

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

    requested, code = do.find_each(do.compute)
    hosts, unreadable = all_hosts(do.store, do.placement)
    selected = [host for host in hosts if host.compute in requested]
    for missing in dict.fromkeys(requested):
        if missing not in {host.compute for host in selected}:
            do.out.say(f'{missing}: no such compute: {do.typed} hosts shows all')
            code = code or NotFound.exit_code
    if not selected:
        return code
    listing_code = do.show(as_hosts(selected), unreadable, one=len(do.words) == 1)
    if do.form == TABLE and not do.options.columns and not do.options.sort:
        records = [record for record in all_records(do.store, with_gone=False)[0] if record.compute in requested]
        do.out.put('' if records else '\nno instance lives there')
        if records:
            do.show(as_list(records, do.computes))
    return code or listing_code


def _host_status(do: Context) -> int:
    from ecomp.scheduler.operating.decommission import disable, drained, enable, inhabitants

    outcomes = Outcomes(do, do.words, compute=None)

    def change(word: str) -> bool:
        target = do.compute(word)
        outcomes.tell(word, compute=target)
        if do.name == 'host enable':
            outcomes.tell(word, enable(do.store, do.placement, target, word))
        else:
            outcomes.tell(word, disable(do.placement, target, word))
        for line in inhabitants(do.store, do.placement, target, word) if do.name == 'host drain' else ():
            outcomes.tell(word, line)
        return True

    def wait(word: str, deadline: Deadline) -> None:
        target = outcomes.found[word]['compute']
        with Live() as show_status:
            drained(do.store, do.placement, target, word, deadline, show_status)
        outcomes.tell(word, f'{word}: nothing lives there any more')

    return outcomes.run(change, wait, f'{do.name} --wait')


def _host_forget(do: Context) -> int:
    from ecomp.scheduler.operating.decommission import forget

    outcomes = Outcomes(do, do.words, compute=None)

    def forget_one(word: str) -> None:
        target = do.compute(word)
        outcomes.tell(word, compute=target)
        try:
            report, fenced = partial(outcomes.tell, word), do.options.fenced
            forget(do.store, do.placement, target, word, now, report, fenced)
        except Unreachable as error:
            advice = 'nothing was removed but what is said above, and the same command again goes on'
            raise type(error)(f'{error}; {advice}', error.backend) from error

    return outcomes.run(forget_one)


def _audit(do: Context) -> int:
    from ecomp.model.audit import FOUND
    from ecomp.scheduler.looking.hosts import read_names_by_instance
    from ecomp.scheduler.operating.audit import audit

    # Refuse an unknown column first, also if nothing will be found, and before anything is repaired.
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


# Listings of computes and findings


def as_hosts(hosts: Sequence[Host]) -> Listing:
    # Classes that every guest needs come before those that only some computes have.
    classes = [*NEEDED, *sorted({name for host in hosts for name in host.resources} - set(NEEDED))]
    columns = [COMPUTE, Column('HOST', least=8), Column('STATE', kind=STATE), Column('INSTANCES', 1)]
    rows = []
    for host in hosts:
        shares = [_share(host.resources.get(name)) for name in classes]
        cells = [host.compute, host.hostname or None, _state(host), host.instances]
        rows.append(Row([*cells, *shares, host.said.version, host.said.kind], _host(host)))
    return Listing([*columns, *_shares(classes), Column('VERSION', 4), Column('KIND', 3)], rows)


def as_plan(ranked: Sequence[RankedCompute]) -> Listing:
    """List the computes that would be tried, in that order."""
    classes = [*NEEDED, *sorted({name for item in ranked for name in item.asked} - set(NEEDED))]
    columns = [COMPUTE, Column('HOST', least=8), Column('WEIGHT', 1)]
    rows = []
    for item in ranked:
        shares = [_share(item.rooms.get(name)) for name in classes]
        weight = None if item.weight is None else f'{item.weight:.2f}'
        rows.append(Row([item.compute, item.hostname or None, weight, *shares, item.instances], _ranked(item)))
    return Listing([*columns, *_shares(classes), Column('INSTANCES')], rows)


def _shares(classes: Sequence[str]) -> list[Column]:
    return [Column(f'{name} USED/CAPACITY', rank=1 if name in NEEDED else 3, short=name) for name in classes]


def as_findings(findings: Sequence[Finding], known: Computes = NOBODY, names: Mapping[str, str] = {}) -> Listing:
    """List an audit's findings; `names` are of instances, by uuid."""
    columns = [Column('CODE'), Column('SUBJECT', rank=1, kind=UUID), Column('NAME', rank=2, least=24)]
    columns.append(Column('FINDING', least=40, folds=True))
    rows = []
    for finding in findings:
        name = names.get(finding.subject)
        cells = [finding.code, known.translated(finding.subject), name, known.translated(finding.sentence)]
        rows.append(Row(cells, {**finding.to_dict(), 'host': known.host(finding.compute), 'name': name}))
    return Listing(columns, rows)


def _summarize(report: Report) -> list[str]:
    """Return lines on silent computes, the fix of each finding, and the number of findings."""
    called, silent = report.world.known.called, report.world.away()
    away = [f'compute {called(uuid)} is {state}: what it has was not compared' for uuid, state in silent.items()]
    cures = (
        f'{item.code}: ' + (f'--fix {item.fix}' if item.fix else f'by hand: {item.how}') for item in report.findings
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
    fields = {'asked': dict(sorted(each.asked.items())), 'resources': rooms, 'instances': each.instances}
    return {'compute': each.compute, 'host': each.hostname, 'hostname': each.hostname, 'weight': each.weight, **fields}


def _state(host: Host) -> str:
    return f'{host.state}, disabled' if host.disabled and host.state != DISABLED else host.state


def _host(host: Host) -> dict[str, object]:
    shares = {
        name: {field: getattr(room, field) for field in ('used', 'free', 'capacity', 'over')}
        for name, room in sorted(host.resources.items())
    }
    fields = {field: getattr(host, field) for field in ('compute', 'hostname', 'state', 'disabled', 'instances')}
    reported_fields = {field: getattr(host.said, field) for field in ('version', 'kind', 'queues')}
    return {**fields, 'host': host.hostname, **reported_fields, 'resources': shares}


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
