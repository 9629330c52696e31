"""`eschedule doctor`: find problems of the cluster and print their fixes."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.cli.command import DOCUMENT_OPTIONS, Command, Context
from ecomp.cli.options import parse_nothing
from ecomp.model.level import get_level
from ecomp.model.record import QUEUED
from ecomp.model.text import make_printable
from ecomp.version import read_version


def _diagnose(ctx: Context) -> int:
    """Check backends and computes, print the findings and return the exit code.

    It is 7 if a backend is unavailable (the rest is skipped), else 8 for errors, or 0.
    """
    from ecomp import backends
    from ecomp.model.health import (
        BACKEND_CHECKS,
        COMPUTE_CHECKS,
        ComputeFacts,
        format_lines,
        get_exit_code,
        run_checks,
        summarize,
    )

    backend_report = backends.probe_backends(ctx.config.etcd, ctx.config.placement, ctx.config.path, 'schedule.yaml')
    findings = run_checks(BACKEND_CHECKS, backend_report)
    computes = ComputeFacts(own_version=read_version())
    if not backend_report.is_unavailable:
        from ecomp.scheduler.queries.find import list_records
        from ecomp.scheduler.queries.hosts import read_hosts

        hosts, _ = read_hosts(ctx.store, ctx.placement)
        versions = {host.compute: host.facts.version for host in hosts if host.facts.version is not None}
        waiting = [item.name or item.instance for item in list_records(ctx.store, False)[0] if item.state == QUEUED]
        computes = ComputeFacts(tuple(hosts), versions, read_version(), ctx.computes.describe_unserved(waiting))
        findings += run_checks(COMPUTE_CHECKS, computes)
    findings = [finding for finding in findings if finding.check not in ctx.config.ignore_warnings]
    document = {
        'findings': [{**finding._asdict(), 'level': get_level(finding.check)} for finding in findings],
        'configuration': backend_report.config_path,
        'etcd': {'name': backend_report.etcd, 'version': backend_report.etcd_version or None},
        'placement': {'name': backend_report.placement, 'microversion': backend_report.placement_version or None},
        'certificates': {
            file.path: file.expires_at and file.expires_at.isoformat() for file in backend_report.certificates
        },
        'computes': dict(computes.versions),
    }
    ctx.show_document([document], '\n'.join(map(make_printable, format_lines(findings))))
    ctx.out.say(summarize(backend_report, findings))
    return get_exit_code(backend_report, findings)


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('doctor', 'doctor', 'find problems of the cluster and their fixes',
            'Check etcd, placement, the clocks, your certificates and the computes. Each problem is one line: the '
            'check that found it, a sentence, and the fix. stderr names the servers, their versions, and the '
            'configuration file with their addresses. A warning does not change the exit code. To check a host '
            'itself, run `ecompute --check` there. With -f json the output is one document with the findings.',
            parse_nothing, _diagnose, DOCUMENT_OPTIONS, (8,), example='eschedule doctor'),
)
