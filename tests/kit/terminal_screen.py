"""What a user sees on a terminal: the lines that remain of the bytes that programs wrote to it."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r'\x1b\[([0-9;]*)([A-Za-z])|(.)', re.DOTALL)


def render_screen(output: str, columns: int, height: int = 24) -> list[str]:
    """Return the lines on a terminal and in its scrollback, without blanks at the end of each.

    It wraps as xterm does: a character in the last column leaves the cursor there, and the next one begins a line. The
    cursor cannot move up into the scrollback.
    """
    lines, row, column = [''], 0, 0
    for match in _SEQUENCE.finditer(output):
        argument, command, character = match.groups()
        top = max(len(lines) - height, 0)
        if command == 'A':
            row = max(row - int(argument or 1), top)
        elif command == 'H':
            row, column = top, 0
        elif command == 'J':
            row = top if argument == '2' else row
            lines[row:] = ['' if argument == '2' else lines[row][:column]]
            lines += [''] * (row - len(lines) + 1)
        elif command == 'K':
            lines[row] = lines[row][:column]
        elif command:
            assert command == 'm', f'unknown sequence {match[0]!r}'
        elif character == '\r':
            column = 0
        else:
            if character == '\n' or column == columns:
                row, column = row + 1, 0 if column == columns and character != '\n' else column
                lines += [''] * (row - len(lines) + 1)
            if character != '\n':
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in lines]
