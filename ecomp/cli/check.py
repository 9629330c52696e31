"""`eschedule check`: find problems of the cluster, and where its parts disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecomp.cli.command import LISTING_OPTIONS, Command, Context
from ecomp.cli.options import TABLE, parse_nothing
from ecomp.cli.tables import UUID, Column, Listing, Row, render_listing
from ecomp.errors import Problem
from ecomp.model.finding import COMPUTES, SERVERS, Finding, get_exit_code, mark_warning, run_checks
from ecomp.model.host import NO_COMPUTES, Computes
from ecomp.model.states import QUEUED
from ecomp.model.text import make_printable
from ecomp.scheduler.queries.computes import read_names_by_instance
from ecomp.version import read_version


def _check(ctx: Context) -> int:
    from ecomp import backends
    from ecomp.model.health import CHECKS

    # Refuse an unknown column first, also if nothing will be found, and before anything is repaired.
    render_listing(make_finding_listing(()), ctx.style)
    servers = backends.probe_backends(ctx.config.etcd, ctx.config.placement, ctx.config.path, 'schedule.yaml')
    findings, lines, computes = run_checks(CHECKS, SERVERS, servers), list[str](), NO_COMPUTES
    if not (servers.etcd_failure or servers.placement_failure):
        more, lines, computes = _audit_cluster(ctx)
        findings += more
    findings = [finding for finding in findings if finding.code not in ctx.config.ignore_warnings]
    if findings or ctx.form != TABLE:
        names = read_names_by_instance(ctx.store) if findings and lines else {}
        ctx.show(make_finding_listing(findings, computes, names))
    cures = ((row.code, f'eschedule check --fix, which {row.fix}' if row.fix else row.how) for row in findings)
    fixes = (str(Problem(*cure)) for cure in cures)
    for line in [*lines, *dict.fromkeys(fixes), servers.summarize(findings)]:
        ctx.out.say(make_printable(line))
    return get_exit_code(findings)


def _audit_cluster(ctx: Context) -> tuple[list[Finding], list[str], Computes]:
    """Audit, with --fix also repair, and return findings, lines for stderr, and computes."""
    from ecomp.model.health import CHECKS, ComputeFacts
    from ecomp.scheduler.operations.audit import audit, fix
    from ecomp.scheduler.queries.find import list_records
    from ecomp.scheduler.queries.hosts import read_hosts

    hosts, _ = read_hosts(ctx.store, ctx.placement)
    waiting = [item.name or item.instance for item in list_records(ctx.store, False)[0] if item.state == QUEUED]
    facts = ComputeFacts(tuple(hosts), read_version(), ctx.computes.describe_unserved(waiting))
    if ctx.options.fix:
        report = fix(ctx.store, ctx.placement, ctx.out.say)
    else:
        report = audit(ctx.store, ctx.placement, is_now=ctx.options.now)
    computes, silent = report.world.named_computes, report.world.absent_computes
    untold = 'its guests and disks were not compared'
    away = [f'compute {computes.format_name(uuid)} is {state}: {untold}' for uuid, state in silent.items()]
    # An audit says more of a silent host that has claims.
    silent_subjects = {finding.subject for finding in report.findings if finding.code == 'compute-silent'}
    findings = [item for item in run_checks(CHECKS, COMPUTES, facts) if item.subject not in silent_subjects]
    return [*findings, *report.findings], [*away, *report.notes, report.summary], computes


def make_finding_listing(
    findings: Sequence[Finding], computes: Computes = NO_COMPUTES, names: Mapping[str, str] = {}
) -> Listing:
    """List findings, with the host names of computes and the `names` of instances by uuid."""
    columns = [Column('CODE'), Column('SUBJECT', rank=1, kind=UUID), Column('NAME', rank=2, min_width=24)]
    # Where it was found: a host's word is shown as that.
    columns += [Column('HOST', rank=3), Column('FINDING', min_width=40, folds=True)]
    rows = []
    for item in findings:
        name, host = names.get(item.subject), computes.format_name(item.compute) or None
        subject, sentence = map(computes.replace_uuids, (item.subject, item.sentence))
        value = {**item.to_dict(), 'host': computes.find_hostname(item.compute), 'name': name}
        rows.append(Row([item.code, subject, name, host, mark_warning(item.code, sentence)], value))
    return Listing(columns, rows)


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('check', 'check', 'find problems of the cluster and their fixes',
            'Check etcd, placement, the clocks, your certificates and the computes, and print where etcd, placement '
            'and the hosts disagree: a code, the subject and a sentence. Each host compares its guests, disks and '
            'claims once a minute, and publishes what two looks agree on; the command compares the rest. With --now '
            'the hosts look at that moment, which takes some seconds. stderr prints the fix of each finding, and '
            'names the servers, their versions, and the configuration file with their addresses. A warning does not '
            'change the exit code. To check a host itself, run `ecompute --check` there.',
            parse_nothing, _check, {'now': '', 'fix': '', **LISTING_OPTIONS}, (8,), example='eschedule check --fix'),
)
