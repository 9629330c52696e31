"""The entry point of eschedule."""

# Functions import ecomp's modules, so that Ctrl-C while they load prints one line, too.
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ecomp.cli.terminal import Terminal


# Net new objects before the first garbage collection; a claim makes some 33,000.
GC_THRESHOLD_OBJECTS = 200_000


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _report_interrupt()


def run() -> NoReturn:
    """Run main() as the console script, and exit without Python's shutdown."""
    gc.set_threshold(GC_THRESHOLD_OBJECTS)  # collect garbage only in a long wait
    try:
        from ecomp import log

        log.hold_descriptors()
        code = main()
    except KeyboardInterrupt:
        code = _report_interrupt()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 1  # stdout's reader has exited
    os._exit(code)


def _run(argv: list[str]) -> int:
    from ecomp import log
    from ecomp.errors import EcompError

    log.configure_for_person()
    try:
        return _run_command(argv)
    except EcompError as error:
        _print_message(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Stdout's reader (head, less) has exited. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if {'--watch', '--follow', 'log'} & {*argv} else 1
    except OSError as error:
        _print_message(f'failed: {error.strerror or error}' + (f': {error.filename}' if error.filename else ''))
        return 1


def _run_command(argv: list[str]) -> int:
    from ecomp.cli.command import Context
    from ecomp.cli.commands import COMMANDS, format_help, parse
    from ecomp.cli.options import VERSION
    from ecomp.conf import ScheduleConfig, load_schedule
    from ecomp.errors import EcompError
    from ecomp.yaml_file import describe_source, parse_config_option

    if not argv:
        print(format_help(''), end='', flush=True)
        return 2
    if argv[0] == '__complete':
        from ecomp.cli.completion import print_candidates

        return print_candidates(_print_text, COMMANDS, *argv[1:])
    if (command := parse(argv)).name == VERSION:
        from ecomp.version import read_version  # loads subprocess

        print(f'eschedule {read_version()}', flush=True)
        return 0
    command_row = COMMANDS[command.name]
    config_file = parse_config_option(command.options.config)
    config = load_schedule(config_file) if command_row.needs_config else ScheduleConfig()
    out = make_terminal()._replace(config_source=describe_source('schedule.yaml', config.path))
    context = Context(out, config, command)
    try:
        return command_row.run(context)
    except EcompError as error:
        context.out.say(out.format_error(error))
        return error.exit_code
    finally:
        context.close()


def make_terminal() -> Terminal:
    from ecomp.cli.terminal import Terminal
    from ecomp.model.text import escape_lines

    return Terminal(lambda text: _print_text(escape_lines(text)), _print_text, _print_message)


def _print_text(text: str) -> None:
    from ecomp.cli.terminal import LiveLine

    with LiveLine.hide():
        print(text, flush=True)


def _print_message(text: str) -> None:
    from ecomp import log
    from ecomp.cli.terminal import LiveLine, find_width, wrap_lines
    from ecomp.model.text import make_lines_printable

    message = f'eschedule: {make_lines_printable(log.redact(text))}'
    with suppress(OSError), LiveLine.hide():  # a full disk or a closed terminal does not undo the command
        print(wrap_lines(message, find_width(sys.stderr)), file=sys.stderr, flush=True)


def _report_interrupt() -> int:
    """Print `interrupted` on stderr, and return exit code 1."""
    with suppress(OSError):
        print('eschedule: interrupted', file=sys.stderr, flush=True)
    return 1


if __name__ == '__main__':
    run()
