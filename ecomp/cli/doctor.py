"""`eschedule doctor`: find problems of the cluster and print their fixes."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.cli.command import DOCUMENT_OPTIONS, Command, Context, select_options
from ecomp.cli.options import DEFAULT_WAIT_SECONDS, Options, find_given_fields, parse_optional_query_and_image
from ecomp.errors import EcompError, UsageError
from ecomp.model.canary import DEFAULT_QUERY, Canary, diagnose_canaries
from ecomp.model.level import get_level
from ecomp.model.record import QUEUED, STAGES
from ecomp.model.text import MIN_PREFIX_DIGITS, make_printable
from ecomp.version import read_version


def _check_options(name: str, words: Sequence[str], options: Options) -> None:
    """Without --canary, raise UsageError for any words, and for options other than -f and --config."""
    if not options.canary and (any(words) or find_given_fields(options) - {'format'}):
        raise UsageError(f'{name}: a query, an image and options other than -f need --canary')


def _diagnose(ctx: Context) -> int:
    """Check backends and computes, with --canary run canaries; print the findings and return the exit code.

    It is 7 if a backend is unavailable (the rest is skipped), else 8 for errors, 1 for interrupted canaries, or 0.
    """
    from ecomp import backends
    from ecomp.model.health import ComputeFacts, check_backends, check_computes, format_lines, get_exit_code, summarize

    canary_run = None
    if ctx.options.canary:
        from ecomp.cli.canary import Canaries, parse_plan  # imports most of eschedule, so only for --canary

        canary_run = Canaries(ctx, parse_plan(ctx))
    backend_report = backends.probe_backends(ctx.config.etcd, ctx.config.placement, ctx.config.path, 'schedule.yaml')
    findings = check_backends(backend_report)
    computes, canaries = ComputeFacts(own_version=read_version()), list[Canary]()
    if not backend_report.is_unavailable:
        from ecomp.scheduler.queries.find import list_records
        from ecomp.scheduler.queries.hosts import read_hosts

        hosts, _ = read_hosts(ctx.store, ctx.placement)
        versions = {host.compute: host.facts.version for host in hosts if host.facts.version is not None}
        waiting = [item.name or item.instance for item in list_records(ctx.store, False)[0] if item.state == QUEUED]
        computes = ComputeFacts(tuple(hosts), versions, read_version(), ctx.computes.describe_unserved(waiting))
        findings += check_computes(computes)
        if canary_run is not None:
            canaries = canary_run.run(hosts)
            findings += diagnose_canaries(canaries, canary_run.is_interrupted)
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
    if canary_run is not None:
        document['canaries'] = [canary.to_dict() for canary in canaries]
    ctx.show_document([document], '\n'.join(map(make_printable, format_lines(findings))))
    ctx.out.say(summarize(backend_report, findings))
    code = get_exit_code(backend_report, findings)
    return EcompError.exit_code if canary_run is not None and canary_run.is_interrupted and not code else code


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('doctor', "doctor ['resources=…'] [URL]", 'find problems of the cluster and their fixes',
            'Check etcd, placement, the clocks, your certificates and the computes. Each problem is one line: the '
            'check that found it, a sentence, and the fix. stderr names the servers, their versions, and the '
            'configuration file with their addresses. A warning does not change the exit code. To check a host '
            'itself, run `ecompute --check` there. With -f '
            'json the output is one document with the findings. With --canary a small guest is booted, logged in to '
            'and destroyed on every compute that is up, on all of them concurrently. The query of the guest is the '
            f'argument, or that of --flavor; default: {DEFAULT_QUERY}. Its image is URL; default: the image of '
            'schedule.yaml. With an ssh key the guest must report that it is ready, and the login trusts only the '
            'host keys that the guest reported. Without an ssh key, the guest only has to get an address. stderr '
            'reports the last stage of each guest, and why the guest did not reach the next stage. stderr also lists '
            'computes that are not up or have no room; these are not findings. Every guest is destroyed at the end, '
            'also after Ctrl-C. If a guest cannot be destroyed, a finding names the guest and the command that '
            'destroys it.',
            parse_optional_query_and_image, _diagnose,
            {**DOCUMENT_OPTIONS, **select_options('canary flavor identity'),
             'on': 'with --canary: test only this compute: its host name, uuid, or the first digits of its uuid, '
                   f'{MIN_PREFIX_DIGITS} or more',
             'ssh_key': 'with --canary: file of OpenSSH public keys that may log in; repeatable. '
                        'Default: ssh_keys of schedule.yaml',
             'stage': f'with --canary: stage that a guest must reach: {", ".join(STAGES)}. Default: ready with '
                      'an ssh key, else addressed',
             'timeout': 'with --canary: time for a guest to reach the stage of --for and, separately, to be destroyed. '
                        f'Default: {DEFAULT_WAIT_SECONDS:.0f}'},
            (4, 5, 8), check=_check_options, example='eschedule doctor --canary --ssh-key ~/.ssh/id_ed25519.pub'),
)
