"""The threads of a running ecompute are those that the map of ecomp.agent names, and each of these can be met."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ecomp.agent
from tests.kit.commands import Control
from tests.kit.hypervisor import Hypervisor
from tests.kit.many import Many
from tests.kit.servers import TOP, until
from tests.kit.story import SMALL, addressed, notified, reached
from tests.kit.tuned import patched

ALWAYS = frozenset({
    *('turns', 'planner_N', 'build_N', 'task_N', 'minute_N', 'presence', 'audits_N', 'follow /hosts/'),
    *('follow /audit/', 'known etcd', 'etcd'),
})
"""Those that every ecompute has that carries something out."""
WITH_LIBVIRT = frozenset({'libvirt-events', 'libvirt-open', 'libvirt-reopen', 'to a worker', 'scrub', 'Thread-N'})


STARTS = ('Thread', 'ThreadPoolExecutor')
STARTERS = {'turns.py': ('Thread', 'TurnThreads')}
"""What starts threads, by the module's name where it is more."""


def named() -> set[str]:
    """The names of the map."""
    return set(re.findall(r'^    (\S.*?)  +\S', ecomp.agent.__doc__ or '', re.MULTILINE))


def met(trace: Path) -> set[str]:
    """The names in a trace, as the map has them."""
    names = (re.sub('[0-9a-f]{8}-[0-9a-f-]{27}/', '', line) for line in trace.read_text().splitlines())
    return {re.sub(r'^Thread-\d+.*', 'Thread-N', re.sub(r'_\d+$', '_N', each)) for each in names}


class Traced(Many):
    """Pretended computes, which note the name of each thread that they start."""

    @property
    def trace(self) -> Path:
        """The file."""
        return self.directory / 'threads'

    def command(self) -> list[str]:
        """The same from inside of Python."""
        python, _, _, *words = super().command()
        return [python, '-c', patched({}, self.trace), *words]


def test_pretended_computes_that_take_from_queues(cluster: Control) -> None:
    many = Traced(cluster, 2, queues=True)
    many.start()
    _, instance = notified(cluster.eschedule(SMALL))
    addressed(cluster, instance)
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    reached(cluster, cluster.eschedule('--queue', '--flavor', 'small').stdout.split()[-1], 'active')
    until(lambda: met(many.trace) >= ALWAYS, 90, 'each of them was started')
    assert many.stop() == 0
    assert met(many.trace) == {*ALWAYS, 'confirm', 'queues_N', 'start_N', 'end_N'}
    assert met(many.trace) <= named()


def test_a_machine_s(host: Hypervisor, tmp_path: Path) -> None:
    trace = tmp_path / 'threads'
    host.kill()
    host.launch(trace=trace)
    host.wait_ready()
    host.ask_destroy(host.running())
    until(lambda: met(trace) >= ALWAYS | WITH_LIBVIRT, 90, 'each of them was started')
    assert met(trace) <= named()


def test_every_thread_that_the_product_starts_is_in_the_map() -> None:
    names = set()
    for room in ('agent', 'store', 'virt'):
        for path in (TOP / 'ecomp' / room).rglob('*.py'):
            if path.name == 'history.py':
                continue  # what eschedule alone does: `events`
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(STARTERS.get(path.name, STARTS)):
                    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                    name = given.get('name') or given.get('thread_name_prefix')
                    if path.name == 'turns.py' and ast.unparse(node.func) == 'TurnThreads':
                        name = ast.unparse(node.args[0])
                    elif path.name == 'turns.py' and name != "'turns'":
                        continue  # one of TurnThreads, by whose name it is known
                    assert name, f'{path}:{node.lineno}: a thread without a name'
                    names.add(name.lstrip('f').strip("'").partition('{')[0])
    there = {re.sub('_N$', '', each) for each in named()}
    assert {name for name in names if not any(each.startswith(name) for each in there)} == set()
    known = {each for each in there if any(each.startswith(name) for name in names)}
    assert there - known == {'main', 'Thread-N'}
