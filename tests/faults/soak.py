"""The soak: clients that create and destroy at random on a cluster in which something breaks every few seconds.

    python -m tests.faults.soak --minutes 30 --seed N --fakes 50 --hosts 5 --clients 50 --operations 1000
    python -m tests.faults.soak --replay HISTORY.jsonl

Needs root and what elab needs. The same seed and sizes make the same plan (not the same race). What happened is in
the history it names, and what was wrong on stdout, with a table and one line of JSON; exit 1 if anything was. In the
table, *recovered* is from a part's start to its being ready, *served* from the end of a control plane's fault to the
next request that was acknowledged, *landed* from an acknowledgement to `active`, `error` or `gone`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults import validator
from tests.faults.history import History, Line, read
from tests.faults.soak_account import CONTROL, Account
from tests.faults.soak_clients import Clients
from tests.faults.soak_cluster import Cluster
from tests.faults.soak_faults import Faults
from tests.faults.soak_plan import Fault, Plan, Size, make
from tests.faults.soak_planes import Watcher, collect, control_planes, in_work, processes
from tests.kit.audit import findings

QUIET = 420.0
"""Seconds until nothing may be in work any more: a dead eschedule's key lives 60 s, and its claim is released after two
looks a minute apart, each up to 66 s late."""
AUDIT = 150.0
"""Seconds after which an audit has to find nothing."""
KINDS = ('history', 'lost', 'doubled', 'leaked')
"""Violations of which each kind is a figure of its own."""
LATE = 300.0
"""Seconds the clients may take after the last operation was due."""


def soak(plan: Plan, name: str, directory: Path, guest: Path | None = None) -> Path:
    """Run a plan in a lab of this name; the path of the history."""
    path = directory / 'history.jsonl'
    history = History(path)
    print(f'soak: seed {plan.seed}, {len(plan.operations)} operations, {len(plan.faults)} faults; {path}', flush=True)
    cluster = Cluster(name, plan.size, directory, history)
    try:
        if guest is not None:
            shutil.copy(guest, cluster.lab.directory / 'images/guest.qcow2')
        history.write('plan', seed=plan.seed, size=asdict(plan.size), computes=cluster.computes())
        _run(plan, cluster, history)
    finally:
        cluster.close()
        history.close()
    return path


def _run(plan: Plan, cluster: Cluster, history: History) -> None:
    watcher = Watcher(cluster.direct[0], history)
    watcher.start()
    processes(cluster, 'start')
    computes = {str(each['name']): uuid for uuid, each in cluster.computes().items()}
    images = str(cluster.whole.facts['images'])
    clients = Clients(plan.operations, cluster.schedules, computes, images, history, cluster.directory)
    faults = Faults(cluster, watcher)
    timeline = list(plan.faults)
    ends: list[tuple[float, Fault]] = []
    clients.start()
    began = time.monotonic()
    while timeline or ends or clients.at_work():
        now = time.monotonic() - began
        assert now < plan.size.seconds + plan.size.longest + LATE, 'clients do not end'
        for each in [each for each in ends if each[0] <= now or faults.is_through(each[1])]:
            ends.remove(each)
            faults.end(each[1])
        if timeline and timeline[0].at <= now:
            fault = timeline.pop(0)
            if faults.begin(fault):
                ends.append((now + fault.seconds, fault))
        cluster.tend()
        time.sleep(0.05)
    cluster.whole_again()
    history.write('quiet', after=round(_wait_quiet(cluster), 1), left=_left(cluster))
    watcher.stop()
    processes(cluster, 'end')
    history.write('final', planes=collect(cluster), audit=_audit(cluster))


def _wait_quiet(cluster: Cluster) -> float:
    """The seconds until nothing is in work, or until that took too long."""
    began = time.monotonic()
    while time.monotonic() - began < QUIET and _left(cluster):
        cluster.tend()
        time.sleep(0.5)
    return time.monotonic() - began


def _left(cluster: Cluster) -> list[str]:
    with suppress(OSError):
        return in_work(control_planes(cluster))
    return ['no answer']


def _audit(cluster: Cluster) -> list[Any]:
    """What `eschedule audit` finds, at the last of some looks."""
    found: list[Any] = []
    began = time.monotonic()
    while time.monotonic() - began < AUDIT and (found := findings(cluster.whole)):
        time.sleep(2)
    return found


# What it comes to


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """The counts and times of a history."""
    account, found = Account(lines), Counter(each.kind for each in validator.violations(lines))
    codes = Counter(f'{each.kind} {each.code}' for each in account.asks)
    recovered: dict[str, list[float]] = {}
    kinds = {line['id']: line['kind'] for line in account.of('fault')}
    for line in account.of('recovered'):
        recovered.setdefault(kinds[line['id']], []).append(line['seconds'])
    faults = Counter(kinds.values()) + Counter(
        f'eschedule-{each.trouble.partition(":")[0]}' for each in account.asks if each.trouble
    )
    landed = _landed(account)
    quiet = next(account.of('quiet'), {'after': None})
    ends = [each.end for each in account.asks if each.code is not None]
    states = Counter(record['state'] for record in account.planes['records'].values()) if account.final else {}
    return {
        'seed': next(account.of('plan'), {}).get('seed'),
        'seconds': round(max(ends, default=0) - min((each.t for each in account.asks), default=0)),
        'requests': len(account.asks),
        'acknowledged': len(account.acknowledged) + codes['destroy 0'],
        **{kind: found[kind] for kind in KINDS},
        'other violations': sum(found.values()) - sum(found[kind] for kind in KINDS),
        'answers': dict(sorted(codes.items())),
        'states': dict(sorted(states.items())),
        'faults': sum(faults.values()),
        'by kind': dict(sorted(faults.items())),
        'failpoints fired': sum(line.get('fired', False) for line in account.of('over')),
        'recovered': {kind: _spread(each) for kind, each in sorted(recovered.items())},
        'served': {kind: _spread(each) for kind, each in sorted(_served(account).items())},
        'landed': _spread(landed),
        'quiet after': quiet['after'],
    }


def _served(account: Account) -> dict[str, list[float]]:
    """Seconds from the end of each fault of the control plane until a client was told that something is done."""
    over = {line['id']: line['t'] for line in account.of('over')}
    told = sorted(each.end for each in account.asks if each.code == 0)
    found: dict[str, list[float]] = {}
    for line in account.of('fault'):
        ended = over.get(line['id'], float('inf'))
        after = [end for end in told if end > ended]
        if line['kind'] in CONTROL and after:
            found.setdefault(line['kind'], []).append(after[0] - ended)
    return found


def _landed(account: Account) -> list[float]:
    """Seconds from each acknowledgement to the end it promises being seen: active, error or gone."""
    seen: dict[str, list[tuple[float, str]]] = {}
    for line in account.of('state'):
        seen.setdefault(line['instance'], []).append((line['t'], line['state']))
    found = []
    for instance, asks in account.acknowledged.items():
        times = [t for t, state in seen.get(instance, []) if state in ('active', 'stopped', 'error', 'gone')]
        found += [max(times[0] - asks[0].end, 0.0)] if times else []
    for ask in account.asks:
        times = [t for t, state in seen.get(ask.instance or '', []) if state == 'gone']
        if ask.kind == 'destroy' and ask.code == 0 and times:
            found.append(max(times[0] - ask.end, 0.0))
    return found


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {'n': len(seconds), 'median': round(statistics.median(seconds), 2), 'worst': round(max(seconds), 2)}


def table(counted: Mapping[str, Any]) -> str:
    """The figures for people."""
    rows = []
    for name, value in counted.items():
        text = ', '.join(f'{key} {each}' for key, each in value.items()) if isinstance(value, dict) else str(value)
        if name in ('recovered', 'served'):
            text = ''.join(
                f'\n    {kind:<20} {each["n"]:>4} times  median {each["median"]:>6} s  worst {each["worst"]:>6} s'
                for kind, each in value.items()
            )
        rows.append(f'{name:<18} {text}')
    return '\n'.join(rows)


def report(path: Path) -> list[validator.Violation]:
    """Print what a history comes to; its violations."""
    lines = read(path)
    found = validator.violations(lines)
    counted = figures(lines)
    print(table(counted))
    print(json.dumps(counted))
    for kind, text in found:
        print(f'VIOLATION {kind}: {text}')
    return found


def _replayed(history: Path) -> Plan:
    line = next(each for each in read(history) if each['what'] == 'plan')
    return make(line['seed'], Size(**line['size']))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; 1 if something was wrong."""
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
        options.minutes * 60, options.operations, options.clients, options.fakes, options.hosts,
        options.every, options.longest, guests=options.guest is not None, patient=options.patient,
    )
    directory = options.directory or Path(tempfile.mkdtemp(prefix='soak-'))
    if any(directory.glob('*')):
        parser.error(f'{directory} is not empty: another run has its state there')
    directory.mkdir(parents=True, exist_ok=True)
    plan = _replayed(options.replay) if options.replay else make(options.seed, size)
    path = soak(plan, f'soak{plan.seed}', directory, options.guest)
    found = report(path)
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
