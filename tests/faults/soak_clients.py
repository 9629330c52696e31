"""The clients of a soak: each runs its operations in turn as real eschedules, and writes down what was said."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.history import History
from tests.faults.soak_plan import Operation
from tests.kit.servers import environment

AT_ONCE = 6
"""eschedules that run at the same time: on two cores more of them only wait for each other."""
HUNG = 180.0
"""Seconds after which an eschedule is killed, and its answer is None."""
AGAIN = 12
"""How often a client asks again whose answer was lost."""
PAUSE = 1.5
NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')
SAYS_UUID = re.compile(r'--uuid ([0-9a-f-]{36}) ')


class Clients:
    """All clients; `computes` is {name: uuid}, `images` the URL images are under."""

    def __init__(
        self,
        operations: Sequence[Operation],
        schedules: Mapping[bool, Path],
        computes: Mapping[str, str],
        images: str,
        history: History,
        directory: Path,
    ) -> None:
        self._schedules, self._computes, self._images = schedules, computes, images
        self._history, self._directory = history, directory
        self._slots = threading.Semaphore(AT_ONCE)
        self._uuids: dict[int, str] = {}
        self._answered = {each.number: threading.Event() for each in operations}
        self._threads = []
        for client in sorted({each.client for each in operations}):
            own = [each for each in operations if each.client == client]
            self._threads.append(threading.Thread(target=self._work, args=(own,), name=f'client {client}', daemon=True))

    def start(self) -> None:
        """Begin; operations are due at their seconds from now."""
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def at_work(self) -> bool:
        """Whether any client has something to do still."""
        return any(thread.is_alive() for thread in self._threads)

    def _work(self, operations: Sequence[Operation]) -> None:
        for each in operations:
            time.sleep(max(each.at - (time.monotonic() - self._began), 0.0))
            try:
                self._do(each)
            finally:
                self._answered[each.number].set()

    def _do(self, operation: Operation) -> None:
        words = self._words(operation)
        if words is None:
            self._history.write('skip', operation=operation.number, why='the create it is about has no uuid')
            return
        trouble, follows = operation.trouble, None
        for _ in range(AGAIN):
            number, code, said = self._ask(operation, words, trouble, follows)
            placed, told = NOTIFIED.search(said[0]), SAYS_UUID.search(said[1])
            known = operation.uuid or (placed and placed[2]) or (told and told[1])
            if known and operation.kind == 'create':
                self._uuids[operation.number] = known
            if not operation.again or not known or code not in (7, -signal.SIGKILL, None):
                return
            # As the message says: the same command with --uuid goes on, or says what became of it.
            words, trouble, follows = self._words(operation, known), '', number
            if words is None:
                return
            time.sleep(PAUSE)

    def _words(self, operation: Operation, known: str | None = None) -> list[str] | None:
        if operation.kind == 'destroy':
            instance = operation.uuid
            if instance is None and operation.of is not None:
                self._answered[operation.of].wait(20.0)
                instance = self._uuids.get(operation.of)
            wait = ['--wait', '--timeout', '30'] if operation.wait else []
            return None if instance is None else ['destroy', *wait, instance]
        query = operation.query
        if operation.where is not None:
            query += f'&in_tree={self._computes[operation.where]}'
        image = {'idle': 'idle.raw', 'guest': 'guest.qcow2', 'missing': 'missing.qcow2'}[operation.image]
        instance = known or operation.uuid
        wait = [operation.wait, '--timeout', '30'] if operation.wait else []
        return [query, self._images + image, *(['--uuid', instance] if instance else []), *wait]

    def _ask(
        self, operation: Operation, words: Sequence[str], trouble: str, follows: int | None
    ) -> tuple[int, int | None, tuple[str, str]]:
        kind, *rest = trouble.split(':')
        with self._slots:
            number = self._history.next_id()
            instance = words[-1] if operation.kind == 'destroy' else _after(words, '--uuid')
            frozen = float(rest[1]) if kind in ('freeze', 'stop') else 0.0
            env = environment()
            if kind in ('at', 'stop'):
                fired = self._directory / f'fired-operation-{number}'
                env['ECOMP_FAILPOINT'] = f'{rest[0]}:{"kill" if kind == "at" else "stop"}'
                env['ECOMP_FAILPOINT_FIRED'] = str(fired)
            self._history.write(
                'ask', id=number, client=operation.client, kind=operation.kind, argv=list(words), instance=instance,
                image=operation.image, proxied=operation.proxied, trouble=trouble, frozen=frozen,
                operation=operation.number, follows=follows,
            )
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, '-m', 'ecomp.schedule', '--config', str(self._schedules[operation.proxied]), *words],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
                cwd=self._directory,
            )
            if kind == 'kill':
                _wait(process, float(rest[0]))
                process.kill()
            elif kind == 'freeze':
                _wait(process, float(rest[0]))
                process.send_signal(signal.SIGSTOP)
                time.sleep(frozen)
                process.send_signal(signal.SIGCONT)
            elif kind == 'stop':
                threading.Thread(target=_go_on, args=(process, frozen), daemon=True).start()
            said, hung = _hear(process)
            code = None if hung else process.returncode
            seconds = round(time.monotonic() - began, 3)
            self._history.write('answer', id=number, code=code, stdout=said[0], stderr=said[1], seconds=seconds)
        return number, code, said


def _hear(process: subprocess.Popen[str]) -> tuple[tuple[str, str], bool]:
    try:
        return process.communicate(timeout=HUNG), False
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate(), True


def _go_on(process: subprocess.Popen[str], frozen: float) -> None:
    """Let it go on so many seconds after it was frozen."""
    while process.poll() is None:
        if Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()[0] == 'T':
            time.sleep(frozen)
            process.send_signal(signal.SIGCONT)
            return
        time.sleep(0.02)


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _after(words: Sequence[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None

