"""`eschedule doctor`: find problems of the cluster and print their fixes."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.cli.command import DOCUMENT_OPTIONS, Command, Context
from ecomp.cli.options import parse_nothing
from ecomp.model.finding import COMPUTES, SERVERS, get_exit_code, run_checks
from ecomp.model.host import Host
from ecomp.model.record import QUEUED
from ecomp.model.text import make_printable
from ecomp.version import read_version


def _diagnose(ctx: Context) -> int:
    from ecomp import backends
    from ecomp.model.health import CHECKS, ComputeFacts

    report = backends.probe_backends(ctx.config.etcd, ctx.config.placement, ctx.config.path, 'schedule.yaml')
    findings, hosts = run_checks(CHECKS, SERVERS, report), list[Host]()
    if not (report.etcd_failure or report.placement_failure):
        from ecomp.scheduler.queries.find import list_records
        from ecomp.scheduler.queries.hosts import read_hosts

        hosts, _ = read_hosts(ctx.store, ctx.placement)
        waiting = [item.name or item.instance for item in list_records(ctx.store, False)[0] if item.state == QUEUED]
        facts = ComputeFacts(tuple(hosts), read_version(), ctx.computes.describe_unserved(waiting))
        findings += run_checks(CHECKS, COMPUTES, facts)
    findings = [finding for finding in findings if finding.code not in ctx.config.ignore_warnings]
    document = {
        'findings': [
            {'check': each.code, 'what': each.sentence, 'cure': each.how, 'level': each.level} for each in findings
        ],
        'configuration': ctx.config.path and str(ctx.config.path),
        'etcd': {'name': report.etcd, 'version': report.etcd_version or None},
        'placement': {'name': report.placement, 'microversion': report.placement_version or None},
        'certificates': {path: end and end.isoformat() for path, end in report.certificates.items()},
        'computes': {host.compute: host.facts.version for host in hosts if host.facts.version is not None},
    }
    ctx.show_document([document], '\n'.join(make_printable(str(finding)) for finding in findings))
    ctx.out.say(report.summarize(findings))
    return get_exit_code(findings)


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('doctor', 'doctor', 'find problems of the cluster and their fixes',
            'Check etcd, placement, the clocks, your certificates and the computes. Each problem is one line: the '
            'check that found it, a sentence, and the fix. stderr names the servers, their versions, and the '
            'configuration file with their addresses. A warning does not change the exit code. To check a host '
            'itself, run `ecompute --check` there. With -f json the output is one document with the findings.',
            parse_nothing, _diagnose, DOCUMENT_OPTIONS, (8,), example='eschedule doctor'),
)
