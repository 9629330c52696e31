"""The clients of a soak: each runs its operations as real eschedules and records the answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.soak.history import History
from bench.soak.plan import Operation
from tests.kit.servers import make_environment

# eschedules that run concurrently: on two cores a larger number only wait for each other.
MAX_CONCURRENT = 6
# Seconds after which an eschedule is killed; its exit code in the history is then None.
MAX_SECONDS = 180.0
# Maximum number of times that a client sends a command whose answer is lost.
MAX_TRIES = 12
RETRY_SECONDS = 1.5
NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')
UUID_OPTION = re.compile(r'--uuid ([0-9a-f-]{36}) ')


class Clients:
    """All clients; `computes` is {name: uuid}, `images` the URL of the images' directory."""

    def __init__(
        self,
        operations: Sequence[Operation],
        schedules: Mapping[bool, Path],
        computes: Mapping[str, str],
        images: str,
        history: History,
        directory: Path,
    ) -> None:
        self._schedules = schedules
        self._computes = computes
        self._images = images
        self._history = history
        self._directory = directory
        self._slots = threading.Semaphore(MAX_CONCURRENT)
        self._uuids: dict[int, str] = {}
        self._answered = {operation.number: threading.Event() for operation in operations}
        self._threads = []
        for client in sorted({operation.client for operation in operations}):
            assigned = [operation for operation in operations if operation.client == client]
            self._threads.append(
                threading.Thread(target=self._run_operations, args=(assigned,), name=f'client {client}', daemon=True)
            )

    def start(self) -> None:
        """Start all clients; operations are due at their seconds from this moment."""
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def is_busy(self) -> bool:
        """Return True while any client has operations to run."""
        return any(thread.is_alive() for thread in self._threads)

    def _run_operations(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            time.sleep(max(operation.at - (time.monotonic() - self._began), 0.0))
            try:
                self._run_operation(operation)
            finally:
                self._answered[operation.number].set()

    def _run_operation(self, operation: Operation) -> None:
        words = self._build_arguments(operation)
        if words is None:
            self._history.write('skip', operation=operation.number, why='the create it is about has no uuid')
            return
        trouble, previous_number = operation.trouble, None
        for _ in range(MAX_TRIES):
            number, code, output = self._run_eschedule(operation, words, trouble, previous_number)
            placed_match, uuid_match = NOTIFIED.search(output[0]), UUID_OPTION.search(output[1])
            instance = operation.uuid or (placed_match and placed_match[2]) or (uuid_match and uuid_match[1])
            if instance and operation.kind == 'create':
                self._uuids[operation.number] = instance
            if not operation.again or not instance or code not in (7, -signal.SIGKILL, None):
                return
            # As the error message advises: the same command with --uuid continues, or reports the outcome.
            words, trouble, previous_number = self._build_arguments(operation, instance), '', number
            if words is None:
                return
            time.sleep(RETRY_SECONDS)

    def _build_arguments(self, operation: Operation, known_instance: str | None = None) -> list[str] | None:
        if operation.kind == 'destroy':
            instance = operation.uuid
            if instance is None and operation.of is not None:
                self._answered[operation.of].wait(20.0)
                instance = self._uuids.get(operation.of)
            wait = ['--wait', '--timeout', '30'] if operation.wait else []
            return None if instance is None else ['destroy', *wait, instance]
        query = operation.query
        if operation.compute is not None:
            query += f'&in_tree={self._computes[operation.compute]}'
        image = {'idle': 'idle.raw', 'guest': 'guest.qcow2', 'missing': 'missing.qcow2'}[operation.image]
        instance = known_instance or operation.uuid
        wait = [operation.wait, '--timeout', '30'] if operation.wait else []
        return [query, self._images + image, *(['--uuid', instance] if instance else []), *wait]

    def _run_eschedule(
        self, operation: Operation, words: Sequence[str], trouble: str, previous_number: int | None
    ) -> tuple[int, int | None, tuple[str, str]]:
        kind, *arguments = trouble.split(':')
        with self._slots:
            number = self._history.next_id()
            instance = words[-1] if operation.kind == 'destroy' else _find_option_value(words, '--uuid')
            frozen = float(arguments[1]) if kind in ('freeze', 'stop') else 0.0
            env = make_environment()
            if kind in ('at', 'stop'):
                fired = self._directory / f'fired-operation-{number}'
                env['ECOMP_FAILPOINT'] = f'{arguments[0]}:{"kill" if kind == "at" else "stop"}'
                env['ECOMP_FAILPOINT_FIRED'] = str(fired)
            self._history.write(
                'ask',
                id=number,
                client=operation.client,
                kind=operation.kind,
                argv=list(words),
                instance=instance,
                image=operation.image,
                proxied=operation.proxied,
                trouble=trouble,
                frozen=frozen,
                operation=operation.number,
                follows=previous_number,
            )
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, '-m', 'ecomp.schedule', '--config', str(self._schedules[operation.proxied]), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
                cwd=self._directory,
            )
            if kind == 'kill':
                _wait_at_most(process, float(arguments[0]))
                process.kill()
            elif kind == 'freeze':
                _wait_at_most(process, float(arguments[0]))
                process.send_signal(signal.SIGSTOP)
                time.sleep(frozen)
                process.send_signal(signal.SIGCONT)
            elif kind == 'stop':
                threading.Thread(target=_continue_when_stopped, args=(process, frozen), daemon=True).start()
            output, hung = _read_output(process)
            code = None if hung else process.returncode
            seconds = round(time.monotonic() - began, 3)
            self._history.write('answer', id=number, code=code, stdout=output[0], stderr=output[1], seconds=seconds)
        return number, code, output


def _read_output(process: subprocess.Popen[str]) -> tuple[tuple[str, str], bool]:
    try:
        return process.communicate(timeout=MAX_SECONDS), False
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate(), True


def _continue_when_stopped(process: subprocess.Popen[str], frozen: float) -> None:
    """Continue a process this many seconds after it was stopped."""
    while process.poll() is None:
        if Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()[0] == 'T':
            time.sleep(frozen)
            process.send_signal(signal.SIGCONT)
            return
        time.sleep(0.02)


def _wait_at_most(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _find_option_value(words: Sequence[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None
