"""eschedule's front door: arguments in, one command, words and an exit code out.

What it imports of ours it imports in its functions: Ctrl-C while modules load, which is most of a short command's time,
ends it in a line, too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ecomp.cli.terminal import Terminal


GARBAGE = 200_000
"""Objects, less those that went, before the first look for garbage: a claim makes some 33,000."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eschedule; the exit code. Never a traceback for what a user or a backend can cause."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _interrupted()


def run() -> NoReturn:
    """The console script: main() without what a command of a quarter of a second need not do.

    Collecting garbage while modules load, and taking Python down in good order at the end, would be part of a claim's
    time, and the process is over anyway. One that waits for long makes more objects than that, and has to.
    """
    gc.set_threshold(GARBAGE)
    try:
        from ecomp import log

        log.hold_descriptors()
        code = main()
    except KeyboardInterrupt:
        code = _interrupted()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 1  # whoever read us has gone
    os._exit(code)


def _run(argv: list[str]) -> int:
    from ecomp import log
    from ecomp.errors import EcompError

    log.configure_plain()
    try:
        return _command(argv)
    except EcompError as error:
        _say(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Whoever read us (head, less) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # What goes on for ever has ended well once nobody reads it.
        return 0 if {'--watch', '--follow', 'log'} & {*argv} else 1
    except OSError as error:
        _say(f'failed: {error.strerror or error}' + (f': {error.filename}' if error.filename else ''))
        return 1


def _command(argv: list[str]) -> int:
    from ecomp import read_version
    from ecomp.cli.command import Context
    from ecomp.cli.commands import COMMANDS, help_of, parse
    from ecomp.cli.options import VERSION
    from ecomp.conf import ScheduleConfig, load_schedule
    from ecomp.errors import EcompError
    from ecomp.yaml_file import path_of_option, told_by

    if not argv:
        print(help_of(''), end='', flush=True)
        return 2
    command = parse(argv)
    if command.name == VERSION:
        print(f'eschedule {read_version()}', flush=True)
        return 0
    row = COMMANDS[command.name]
    config_file = path_of_option(command.options.config)
    config = load_schedule(config_file) if row.needs_config else ScheduleConfig()
    out = terminal()._replace(told=told_by('schedule.yaml', config.path))
    context = Context(out, config, command)
    try:
        return row.run(context)
    except EcompError as error:
        context.out.say(out.words(error))
        return error.exit_code
    finally:
        context.close()


def terminal() -> Terminal:
    """This process's stdout and stderr."""
    from ecomp.cli.terminal import Terminal
    from ecomp.model.text import printable_whole

    return Terminal(lambda text: _draw(printable_whole(text)), _draw, _say)


def _draw(text: str) -> None:
    print(text, flush=True)


def _say(text: str) -> None:
    from ecomp import log
    from ecomp.cli.terminal import broken, width
    from ecomp.model.text import printable_lines

    said = f'eschedule: {printable_lines(log.redact(text))}'
    with suppress(OSError):  # a full disk or a closed terminal changes nothing of what was done
        print(broken(said, width(sys.stderr)), file=sys.stderr, flush=True)


def _interrupted() -> int:
    with suppress(OSError):
        print('eschedule: interrupted', file=sys.stderr, flush=True)
    return 1


if __name__ == '__main__':
    run()
