"""`eschedule doctor`: what is wrong with etcd, placement, the computes and the way to them, and what mends it."""

from __future__ import annotations

from ecomp import __version__
from ecomp.cli.command import DOCUMENT, Command, Context
from ecomp.cli.words import nothing
from ecomp.model.text import printable


def _doctor(do: Context) -> int:
    from ecomp import backends
    from ecomp.model.health import Computes, exit_code, lines, of_backends, of_computes, summary

    there = backends.look(do.config.etcd, do.config.placement, do.config.path, 'schedule.yaml')
    found = of_backends(there)
    computes = Computes(ours=__version__)
    if not there.away:
        from ecomp.model.record import QUEUED
        from ecomp.scheduler.looking.find import all_records
        from ecomp.scheduler.looking.hosts import all_hosts

        hosts, _ = all_hosts(do.store, do.placement)
        runs = {each.compute: each.said.version for each in hosts if each.said.version is not None}
        waiting = [each.name or each.instance for each in all_records(do.store, False)[0] if each.state == QUEUED]
        computes = Computes(tuple(hosts), runs, __version__, do.computes.unserved(waiting))
        found += of_computes(computes)
    about = {
        'findings': [each._asdict() for each in found],
        'configuration': there.told,
        'etcd': {'name': there.etcd, 'version': there.etcd_version or None},
        'placement': {'name': there.placement, 'microversion': there.placement_version or None},
        'certificates': {each.path: each.until and each.until.isoformat() for each in there.certificates},
        'computes': dict(computes.versions),
    }
    do.show_document([about], '\n'.join(map(printable, lines(found))))
    do.out.say(summary(there, found))
    return exit_code(there, found)


# fmt: off
COMMANDS = (
    Command('doctor', 'doctor', 'what is wrong with the cluster, and what mends it',
            'Look at etcd, placement, the clocks, our certificates and the computes, and print what is wrong, a line '
            'each: the check that found it, a sentence, and what mends it. stderr says who was asked, which version '
            'each has, and which file told where they are. A hypervisor is looked at by `ecompute --check`, there. '
            'With -f json: one document, with the findings.',
            nothing, _doctor, DOCUMENT, (8,),
            example='eschedule doctor'),
)
