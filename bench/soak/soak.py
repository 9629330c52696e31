"""The soak: clients that create and destroy at random on a cluster in which something breaks every few seconds.

    python -m bench.soak --minutes 30 --seed N --fakes 50 --hosts 5 --clients 50 --operations 1000
    python -m bench.soak --replay HISTORY.jsonl

It needs root and the programs that elab needs. The same seed and sizes make the same plan (not the same races). The
first line of the output names the history file. At the end come a table, one line of JSON and the violations; the exit
status is 1 if there are any. In the table, *recovered* is the time from a part's start until it is ready, *served* from
the end of a control plane's fault to the next acknowledged request, *landed* from an acknowledgement to `active`,
`error` or `gone`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.soak import validator
from bench.soak.account import CONTROL_FAULTS, HistoryIndex
from bench.soak.clients import Clients
from bench.soak.cluster import Cluster
from bench.soak.faults import Faults
from bench.soak.history import History, Line, read_history
from bench.soak.plan import Fault, Plan, Size, make_plan
from bench.soak.planes import (
    ChangeWatcher,
    collect_control_planes,
    collect_planes,
    find_pending_work,
    record_processes,
)
from tests.kit.audit import run_audit

# Seconds until all work must be finished: a dead eschedule's key lives 60 s, and its claim is released after two checks
# a minute apart, each up to 66 s late.
MAX_QUIET_SECONDS = 420.0
# Seconds after which an audit must have no findings.
MAX_AUDIT_SECONDS = 150.0
# Kinds of violations that are counted separately.
COUNTED_KINDS = ('history', 'lost', 'doubled', 'leaked')
# Seconds that the clients may take after the last operation was due.
MAX_LATE_SECONDS = 300.0


def run_soak(plan: Plan, name: str, directory: Path, guest: Path | None = None) -> Path:
    """Run a plan in a lab of this name; return the path of the history."""
    path = directory / 'history.jsonl'
    history = History(path)
    print(f'soak: seed {plan.seed}, {len(plan.operations)} operations, {len(plan.faults)} faults; {path}', flush=True)
    cluster = Cluster(name, plan.size, directory, history)
    try:
        if guest is not None:
            shutil.copy(guest, cluster.lab.directory / 'images/guest.qcow2')
        history.write('plan', seed=plan.seed, size=asdict(plan.size), computes=cluster.get_computes())
        _run(plan, cluster, history)
    finally:
        cluster.close()
        history.close()
    return path


def _run(plan: Plan, cluster: Cluster, history: History) -> None:
    watcher = ChangeWatcher(cluster.direct[0], history)
    watcher.start()
    record_processes(cluster, 'start')
    computes = {str(entry['name']): uuid for uuid, entry in cluster.get_computes().items()}
    images = str(cluster.lab_driver.facts['images'])
    clients = Clients(plan.operations, cluster.schedules, computes, images, history, cluster.directory)
    faults = Faults(cluster, watcher)
    timeline = list(plan.faults)
    ends: list[tuple[float, Fault]] = []
    clients.start()
    began = time.monotonic()
    while timeline or ends or clients.is_busy():
        now = time.monotonic() - began
        assert now < plan.size.seconds + plan.size.longest + MAX_LATE_SECONDS, 'clients do not end'
        for entry in [entry for entry in ends if entry[0] <= now or faults.is_failpoint_reached(entry[1])]:
            ends.remove(entry)
            faults.end(entry[1])
        if timeline and timeline[0].at <= now:
            fault = timeline.pop(0)
            if faults.begin(fault):
                ends.append((now + fault.seconds, fault))
        cluster.restart_parts()
        time.sleep(0.05)
    cluster.restore_all()
    history.write('quiet', after=round(_wait_until_quiet(cluster), 1), left=_list_pending_work(cluster))
    watcher.stop()
    record_processes(cluster, 'end')
    history.write('final', planes=collect_planes(cluster), audit=_wait_for_clean_audit(cluster))


def _wait_until_quiet(cluster: Cluster) -> float:
    """Wait until no work is in progress or MAX_QUIET_SECONDS have passed; return the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < MAX_QUIET_SECONDS and _list_pending_work(cluster):
        cluster.restart_parts()
        time.sleep(0.5)
    return time.monotonic() - began


def _list_pending_work(cluster: Cluster) -> list[str]:
    with suppress(OSError):
        return find_pending_work(collect_control_planes(cluster))
    return ['no answer']


def _wait_for_clean_audit(cluster: Cluster) -> list[Any]:
    """Repeat `eschedule check` until it has no findings or time is up; return the last findings."""
    results: list[Any] = []
    began = time.monotonic()
    while time.monotonic() - began < MAX_AUDIT_SECONDS and (results := run_audit(cluster.lab_driver)):
        time.sleep(2)
    return results


# Results


def compute_figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the counts and times of a history."""
    account, counts = HistoryIndex(lines), Counter(ask.kind for ask in validator.find_violations(lines))
    codes = Counter(f'{ask.kind} {ask.code}' for ask in account.commands)
    recovered: dict[str, list[float]] = {}
    kinds = {line['id']: line['kind'] for line in account.iter_lines('fault')}
    for line in account.iter_lines('recovered'):
        recovered.setdefault(kinds[line['id']], []).append(line['seconds'])
    faults = Counter(kinds.values()) + Counter(
        f'eschedule-{ask.trouble.partition(":")[0]}' for ask in account.commands if ask.trouble
    )
    landed = _measure_landed(account)
    quiet = next(account.iter_lines('quiet'), {'after': None})
    ends = [ask.end for ask in account.commands if ask.code is not None]
    states = Counter(record['state'] for record in account.planes['records'].values()) if account.final else {}
    return {
        'seed': next(account.iter_lines('plan'), {}).get('seed'),
        'seconds': round(max(ends, default=0) - min((ask.t for ask in account.commands), default=0)),
        'requests': len(account.commands),
        'acknowledged': len(account.acknowledged) + codes['destroy 0'],
        **{kind: counts[kind] for kind in COUNTED_KINDS},
        'other violations': sum(counts.values()) - sum(counts[kind] for kind in COUNTED_KINDS),
        'answers': dict(sorted(codes.items())),
        'states': dict(sorted(states.items())),
        'faults': sum(faults.values()),
        'by kind': dict(sorted(faults.items())),
        'failpoints fired': sum(line.get('fired', False) for line in account.iter_lines('over')),
        'recovered': {kind: _summarize(ask) for kind, ask in sorted(recovered.items())},
        'served': {kind: _summarize(ask) for kind, ask in sorted(_measure_served(account).items())},
        'landed': _summarize(landed),
        'quiet after': quiet['after'],
    }


def _measure_served(account: HistoryIndex) -> dict[str, list[float]]:
    """Return the seconds from the end of each control plane's fault to the next successful answer."""
    end_times = {line['id']: line['t'] for line in account.iter_lines('over')}
    answered = sorted(ask.end for ask in account.commands if ask.code == 0)
    by_kind: dict[str, list[float]] = {}
    for line in account.iter_lines('fault'):
        ended = end_times.get(line['id'], float('inf'))
        after = [end for end in answered if end > ended]
        if line['kind'] in CONTROL_FAULTS and after:
            by_kind.setdefault(line['kind'], []).append(after[0] - ended)
    return by_kind


def _measure_landed(account: HistoryIndex) -> list[float]:
    """Return the seconds from each acknowledgement until its final state was seen.

    For a create that is active, stopped, error or gone, for a destroy gone.
    """
    states_seen: dict[str, list[tuple[float, str]]] = {}
    for line in account.iter_lines('state'):
        states_seen.setdefault(line['instance'], []).append((line['t'], line['state']))
    durations = []
    for instance, asks in account.acknowledged.items():
        times = [t for t, state in states_seen.get(instance, []) if state in ('active', 'stopped', 'error', 'gone')]
        durations += [max(times[0] - asks[0].end, 0.0)] if times else []
    for ask in account.commands:
        times = [t for t, state in states_seen.get(ask.instance or '', []) if state == 'gone']
        if ask.kind == 'destroy' and ask.code == 0 and times:
            durations.append(max(times[0] - ask.end, 0.0))
    return durations


def _summarize(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {'n': len(seconds), 'median': round(statistics.median(seconds), 2), 'worst': round(max(seconds), 2)}


def format_table(results: Mapping[str, Any]) -> str:
    """Format the figures for people."""
    rows = []
    for name, value in results.items():
        text = ', '.join(f'{key} {entry}' for key, entry in value.items()) if isinstance(value, dict) else str(value)
        if name in ('recovered', 'served'):
            text = ''.join(
                f'\n    {kind:<20} {entry["n"]:>4} times  median {entry["median"]:>6} s  worst {entry["worst"]:>6} s'
                for kind, entry in value.items()
            )
        rows.append(f'{name:<18} {text}')
    return '\n'.join(rows)


def print_report(path: Path) -> list[validator.Violation]:
    """Print the figures and violations of a history; return the violations."""
    lines = read_history(path)
    violations = validator.find_violations(lines)
    results = compute_figures(lines)
    print(format_table(results))
    print(json.dumps(results))
    for kind, text in violations:
        print(f'VIOLATION {kind}: {text}')
    return violations


def _read_plan(history: Path) -> Plan:
    line = next(entry for entry in read_history(history) if entry['what'] == 'plan')
    return make_plan(line['seed'], Size(**line['size']))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; return 1 if there were violations."""
    parser = argparse.ArgumentParser('soak', description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('--minutes', type=float, default=30.0)
    parser.add_argument('--seed', type=int, default=random.SystemRandom().randrange(10**6))
    for name, default in (('fakes', 50), ('hosts', 5), ('clients', 50), ('operations', 1000)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--every', type=float, default=4.0, help='seconds between two faults')
    parser.add_argument('--longest', type=float, default=40.0, help='seconds of the longest fault')
    parser.add_argument('--guest', type=Path, help='a bootable image (elab guest): some real guests boot')
    parser.add_argument('--patient', action='store_true', help='every client asks again after a lost answer')
    parser.add_argument('--directory', type=Path, help='where the history and the logs stay (a new one)')
    parser.add_argument('--replay', type=Path, metavar='HISTORY', help='the plan of an earlier run')
    options = parser.parse_args(argv)
    size = Size(
        options.minutes * 60,
        options.operations,
        options.clients,
        options.fakes,
        options.hosts,
        options.every,
        options.longest,
        guests=options.guest is not None,
        patient=options.patient,
    )
    directory = options.directory or Path(tempfile.mkdtemp(prefix='soak-'))
    if any(directory.glob('*')):
        parser.error(f'{directory} is not empty: another run has its state there')
    directory.mkdir(parents=True, exist_ok=True)
    plan = _read_plan(options.replay) if options.replay else make_plan(options.seed, size)
    path = run_soak(plan, f'soak{plan.seed}', directory, options.guest)
    violations = print_report(path)
    return 1 if violations else 0
