"""What users read: rows of named columns as a table that fits the terminal, JSON, YAML, CSV or bare values. Pure.

Every listing command hands a Listing to Context.show, and a command that tells all of a few things their Details. A
cell is text, a number, or None for what is not there. Each form is safe for a terminal: what is in a cell is one line
of what can be printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from ecomp.cli.fitting import (
    GAP,
    LEAST,
    Room,
    across,
    coloured,
    cut,
    fill,
    fitted,
    folded,
    natural,
    short_times,
    short_uuids,
)
from ecomp.cli.options import CSV, JSON, TABLE, VALUE, YAML
from ecomp.errors import UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import escaped, printable

TEXT, UUID, STATE, TIME = 'text', 'uuid', 'state', 'time'
"""Kinds of columns. On a terminal a uuid is its shortest unique beginning, a state has a colour, a time its minutes."""

Cell: TypeAlias = str | int | float | None


class Column(NamedTuple):
    """A column: its name, which is its heading, and what becomes of it where a terminal has no room for all.

    First `short` takes the place of its heading, and its cells are cut to `least` characters (0: they are not cut), or,
    where it `folds`, broken into lines of that width; then columns are left out, the one with the largest `rank` first,
    and of equals the last; rank 0 always stays. One that is `wide` is in a table with --wide or -c alone.
    """

    name: str
    rank: int = 0
    kind: str = TEXT
    short: str = ''
    least: int = 0
    folds: bool = False
    wide: bool = False


class Row(NamedTuple):
    """The cells, one for each column; what stands for them in JSON; the title of the table it is in, '' for none."""

    cells: Sequence[Cell]
    value: object = None
    title: str = ''


class Listing(NamedTuple):
    """Rows of named columns. As JSON it is an array of its rows' values, or `document` where that is given."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    document: object = None


class Details(NamedTuple):
    """One thing whole: its fields in their order, a line each, and what stands for it in JSON.

    `may_have` are the fields that a thing of its kind may have: these may be asked for, whichever of them this one has,
    and so may those of a word that is `numbered`, and any number.
    """

    fields: Sequence[tuple[str, Cell]]
    value: object
    may_have: Sequence[str] = ()
    numbered: Sequence[str] = ()

    def named(self, name: str) -> Column:
        """The field that is asked for by this name. UsageError."""
        word, _, number = name.casefold().strip().rpartition(' ')
        if word in self.numbered and number.isdecimal():
            return Column(f'{word} {number}')
        there = [field for field, _ in self.fields if field.rpartition(' ')[0] not in self.numbered]
        wanted = name.casefold().strip()
        has = [field for field, cell in self.fields if cell is not None and field in there]
        begin = [field for field in has if wanted and field.casefold().startswith(wanted)]
        # The beginning of a name is that of one that is there, if any of these begins so.
        known = begin if begin and wanted not in self.may_have else [*self.may_have, *there]
        return _named(name, [Column(field) for field in dict.fromkeys(known)], '-c')


class Look(NamedTuple):
    """How it is to look: the form, the columns asked for, and what the terminal is like.

    `columns` () are all that the form has; `sort` '' is the order as it is. `width` is that of the terminal in
    characters, None where there is none or all is to be seen: then nothing is shortened, cut or left out.
    """

    form: str = TABLE
    columns: Sequence[str] = ()
    header: bool = True
    sort: str = ''
    wide: bool = False
    width: int | None = None
    colour: bool = False


def rendered(listing: Listing, look: Look) -> str:
    """A listing in its form, without a line break at its end. UsageError for a column that it does not have."""
    rows = listing.rows
    if look.sort:
        at = listing.columns.index(_named(look.sort, listing.columns, '--sort'))
        rows = sorted(rows, key=lambda row: natural(row.cells[at]))
    if look.form in (JSON, YAML):
        return document([row.value for row in rows] if listing.document is None else listing.document, look.form)
    columns = [_named(name, listing.columns, '-c') for name in look.columns]
    columns = columns or [each for each in listing.columns if look.wide or look.form != TABLE or not each.wide]
    at_all = [listing.columns.index(each) for each in columns]
    parts: dict[str, list[list[Cell]]] = {} if rows else {'': []}
    for row in rows:
        title = row.title if look.form == TABLE and look.header else ''
        parts.setdefault(title, []).append([row.cells[at] for at in at_all])
    headings = {title: f'{printable(title)}\n' if title else '' for title in parts}
    return '\n\n'.join(headings[title] + _drawn(columns, cells, look) for title, cells in parts.items())


def rendered_details(found: Sequence[Details], look: Look, several: bool) -> str:
    """Things whole, one below the other: a line a field. As JSON one object, or, where there are `several`, an array.

    As CSV and bare values each is a line. The columns are all fields that a thing of its kind may have.
    """
    if look.form in (JSON, YAML):
        values = [each.value for each in found]
        return document(values if several else values[0], look.form)
    # In the order of the first that has it.
    all_of_them = found[0]._replace(fields=[field for each in found for field in each.fields])
    columns = [all_of_them.named(name) for name in look.columns]
    if look.form != TABLE:
        names = all_of_them.may_have or dict.fromkeys(name for name, _ in all_of_them.fields)
        columns = columns or [Column(name) for name in names]
        # Of a list a row without any value is left out; here there is one for each word.
        none = '-' if look.form == VALUE else None
        fields = [{name: cell for name, cell in reversed(each.fields) if cell is not None} for each in found]
        rows = [Row([each.get(one.name, none) for one in columns]) for each in fields]
        return rendered(Listing(columns, rows), look._replace(columns=()))
    return '\n\n'.join(_whole(each, [one.name for one in columns], look) for each in found)


def document(value: object, form: str) -> str:
    """A value as JSON, or as YAML."""
    if form == YAML:
        from ecomp.yaml_file import dump_yaml  # few ask for it

        return dump_yaml(value)
    return dump(value, indent=2)


# The forms


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    if look.form == CSV:
        headings = [[_value(each.name) for each in columns]] * look.header
        return _as_csv([*headings, *(list(map(_value, row)) for row in rows)])
    if look.form == VALUE:
        found = [[_value(cell) for cell in row] for row in rows]
        return '\n'.join('\t'.join(cell or '-' for cell in row) for row in found if any(row))
    return _table(columns, rows, look)


def _as_csv(rows: Iterable[Sequence[str]]) -> str:
    import csv  # few ask for it
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(rows)
    return text.getvalue().removesuffix('\n')


def _value(cell: Cell) -> str:
    """The cell as scripts read it, with all of it: nothing is cut here."""
    return '' if cell is None else escaped(str(cell))


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], look: Look) -> str:
    down = [['-' if cell is None else printable(str(cell)) for cell in cells] for cells in zip(*rows, strict=True)]
    down = down or [[] for _ in columns]
    if look.width is not None:
        for at, each in enumerate(columns):
            short = _SHORT[each.kind](down[at]) if each.kind in _SHORT else {}
            down[at] = [short.get(text, text) for text in down[at]]
    rooms = [_room(each, down[at], look) for at, each in enumerate(columns)]
    widths = {at: each.full for at, each in enumerate(rooms)} if look.width is None else fitted(rooms, look.width)
    drawn: list[list[list[str]]] = []
    for at, width in widths.items():
        each = columns[at]
        heading = each.short if each.short and across(each.name) > width else each.name
        cells = [folded(text, width) if each.folds else [cut(text, width)] for text in _column(heading, down[at], look)]
        padded = [[fill(text, width) for text in lines] for lines in cells]
        if look.colour and each.kind == STATE:
            padded = [*padded[: look.header], *([coloured(text) for text in lines] for lines in padded[look.header :])]
        drawn.append(padded)
    # A cell that is folded has several lines, and its row as many as the longest of its cells.
    blank = [' ' * width for width in widths.values()]
    tall = (zip_longest(*cells) for cells in zip(*drawn, strict=True))
    return '\n'.join(
        GAP.join(space if part is None else part for part, space in zip(line, blank, strict=True)).rstrip()
        for lines in tall
        for line in lines
    )


def _column(heading: str, cells: Sequence[str], look: Look) -> list[str]:
    return [*[printable(heading)] * look.header, *cells]  # placement's classes are headings, too


def _room(column: Column, cells: Sequence[str], look: Look) -> Room:
    full, short = (
        max(map(across, _column(heading, cells, look)), default=0)
        for heading in (column.name, column.short or column.name)
    )
    # What was asked for by -c is cut, and never left out.
    return Room(full, short, column.least or short, 0 if look.columns else column.rank)


def _whole(found: Details, chosen: Sequence[str], look: Look) -> str:
    fields = [(printable(name), '-' if cell is None else printable(str(cell))) for name, cell in _chosen(found, chosen)]
    left = max((across(name) + len(GAP) for name, _ in fields), default=0) if look.header else 0
    lines = []
    for name, text in fields:
        first, *more = folded(text, across(text) if look.width is None else max(look.width - left, LEAST))
        first = coloured(first) if look.colour and name == 'state' else first
        lines += [(fill(name, left) if look.header else '') + first, *(' ' * left + each for each in more)]
    return '\n'.join(lines)


def _chosen(found: Details, chosen: Sequence[str]) -> Iterable[tuple[str, Cell]]:
    """The fields that are chosen, in that order; all for (). One that a record has twice is the first of that name."""
    if not chosen:
        return found.fields
    first = dict(reversed(found.fields))
    return [(name, first.get(name)) for name in chosen]


def _named(name: str, columns: Sequence[Column], option: str) -> Column:
    """The column that is called so, in capitals or not, or the only one whose name begins so."""
    wanted = name.casefold().strip()
    exact = [each for each in columns if each.name.casefold() == wanted]
    found = exact or [each for each in columns if wanted and each.name.casefold().startswith(wanted)]
    if len(found) != 1:
        known = ', '.join(each.name for each in columns)
        wrong = f'{len(found)} columns begin so' if found else 'there is no such column'
        raise UsageError(f'{option} {printable(name, 80)}: {wrong}; there are {printable(known)}')
    return found[0]


_SHORT = {UUID: short_uuids, TIME: short_times}
