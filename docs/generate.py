"""Generate the reference and the man pages from the code and the example files.

    python -m docs.generate

It writes docs/reference/*.md, docs/man/*, ecomp/cli/help.txt and ecomp/model/command_names.py; tests/unit/test_docs.py
compares them with the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import mdserver.conf
import mdserver.server

from docs import shapes
from docs.writing import (
    Block,
    Code,
    ManPage,
    Section,
    Table,
    Terms,
    make_link,
    parse_docstring,
    read_docstring,
    render_man_page,
    render_markdown,
)
from ecomp import compute, compute_conf, conf, errors, yaml_file
from ecomp.cli import commands
from ecomp.cli.command import COMMON_OPTIONS, CREATE, EXIT_CODES, QUERY, Command
from ecomp.cli.commands import FAMILIES, FULL_HELP, PLACEHOLDER_MEANINGS, PLANNED_WORDS, load_rows
from ecomp.cli.options import OPTIONS
from ecomp.cli.suggestions import OLD_WORDS
from ecomp.lab import elab
from ecomp.model import audit as findings
from ecomp.model import boots, cluster, flavor, group, health, keys, order, queue, quota, record, roles
from ecomp.model.finding import COMPUTES, MACHINE, SERVERS, mark_warning
from ecomp.model.stored import CODECS
from ecomp.shared import notes
from tests.faults import table as faults

TOP = Path(__file__).resolve().parents[1]
REFERENCE, MAN = TOP / 'docs/reference', TOP / 'docs/man'
COMMAND_NAMES = TOP / 'ecomp/model/command_names.py'
MATRIX = '../../tests/faults/README.md'
# The number of commands with the same option, or the same field, from which it is described once.
MIN_SHARING = 4


def generate_files() -> dict[Path, str]:
    texts = {REFERENCE / name: text for name, text in generate_reference()}
    texts |= {MAN / f'{page.name}.{page.number}': render_man_page(page) for page in generate_man_pages()}
    return {**texts, COMMAND_NAMES: render_command_names(), FULL_HELP: render_full_help()}


# Pages


def generate_reference() -> Iterator[tuple[str, str]]:
    top = 'Look up the arguments, options and exit codes of each command; its `--help` prints the same text. '
    top += 'Commands print data to stdout, and everything else to stderr.'
    yield 'commands.md', render_markdown('Commands', [top], [*describe_eschedule(), *describe_other_commands()])
    for name, config in CONFIGURATIONS.items():
        yield f'{name}.md', render_markdown(name, *describe_configuration(name, config))
    yield 'etcd.md', render_markdown('Keys in etcd', *describe_etcd())
    yield 'records.md', render_markdown('Records and states', *describe_records())
    yield 'audit.md', render_markdown('Audit codes', *describe_audit())
    yield 'json.md', render_markdown('What -f json prints', *describe_shapes())
    yield 'exit-codes.md', render_markdown('Exit codes', *describe_exit_codes())
    yield 'faults.md', render_markdown('Faults', *describe_faults())


def generate_man_pages() -> Iterator[ManPage]:
    names = 'schedule.yaml', 'compute.yaml'
    places = [(f'./{name}, ~/.config/ecomp/{name}, /etc/ecomp/{name}', f'see {name}(5)') for name in names]
    files = Section('FILES', [Terms(('', ''), places)])
    means = 'The directory of the configuration file, which must have its usual name. Default: the first such file in '
    means += './, ~/.config/ecomp/ or /etc/ecomp/. --config overrides both.'
    environment = Section('ENVIRONMENT', [Terms(('', ''), [(yaml_file.CONFIG_VARIABLE, means)])])
    exits = Section('EXIT STATUS', [Terms(('', ''), [(str(code), text) for code, text in EXIT_CODES.items()])])
    commands = [item for family in load_families().values() for item in family]
    yield ManPage('eschedule', 1, 'place instances on hypervisors, inspect, change and destroy them', [
        Section('SYNOPSIS', [Code('\n'.join(f'eschedule {item.usage}' for item in commands))]),
        Section('COMMANDS', [
            *PLACEHOLDER_MEANINGS.values(),
            Terms(('', ''), [(item.usage, item.description) for item in commands]),
        ]),
        Section('OPTIONS', [Terms(('', ''), [describe_option(row) for rows in OPTIONS.values() for row in rows])]),
        exits, files, environment,
    ], ['ecompute(8)', 'elab(1)', 'schedule.yaml(5)'])  # fmt: skip
    yield ManPage('ecompute', 8, 'build and run the requested VMs on this machine', [
        *describe_parser(compute.make_parser()), exits, files, environment,
    ], ['eschedule(1)', 'mdserver(8)', 'compute.yaml(5)'])  # fmt: skip
    yield ManPage('mdserver', 8, 'the metadata server for the guests on a hypervisor', [
        *describe_parser(mdserver.server.make_parser()),
    ], ['ecompute(8)', 'mdserver.conf(5)'])  # fmt: skip
    yield ManPage('elab', 1, 'a whole cluster on one machine, and certificates for real clusters', [
        *describe_parser(elab.make_parser()), exits,
    ], ['eschedule(1)', 'ecompute(8)'])  # fmt: skip
    for name, config in CONFIGURATIONS.items():
        top, sections = describe_configuration(name, config)
        program = {'compute.yaml': 'ecompute(8)', 'schedule.yaml': 'eschedule(1)'}.get(name, 'mdserver(8)')
        about = f'the configuration of {program[:-3]}'
        yield ManPage(name, 5, about, [Section('DESCRIPTION', top), *sections], [program])


# Commands


def render_command_names() -> str:
    """Render the module of command names, which lets a command load only its own rows."""
    names = {module: [row.name for row in load_rows(module)] for modules in FAMILIES.values() for module in modules}
    lines = [f'    {module!r}: {tuple(row_names)!r},' for module, row_names in names.items()]
    words = textwrap.fill(', '.join(map(repr, list_reserved_words())), 116, break_on_hyphens=False)
    return '\n'.join([
        '"""The names of eschedule\'s commands, made from their rows by `python -m docs.generate`. Pure."""', '',
        'BY_MODULE = {', *lines, '}',
        '"""The names by the module of ecomp/cli that has their rows, in the order of the help."""', '',
        'RESERVED = frozenset({', textwrap.indent(f'{words},', '    '), '})',
        '"""The first arguments of commands, also of planned ones: no instance may have such a name."""', '',
    ])  # fmt: skip


def load_families() -> dict[str, list[Command]]:
    """Return the commands by heading of the help."""
    return {family: [row for module in modules for row in load_rows(module)] for family, modules in FAMILIES.items()}


def render_full_help() -> str:
    """Render the help of all commands, which is read from a file because to import all rows takes longer."""
    usages = {row.name: row.usage for rows in load_families().values() for row in rows}
    lines = [f'usage: eschedule {usages[CREATE]} [OPTION]…', f'       eschedule {usages[QUERY]}']
    lines += ['       eschedule COMMAND [ARGUMENT]… [OPTION]…', '']
    lines += commands.wrap(
        '`eschedule COMMAND --help` describes one command; `eschedule create --help` describes the first form, with '
        '--name, --uuid, --count, --group, --queue and more. Most commands wait with --wait, for at most --timeout '
        'seconds, and print JSON with -f json. Options may stand anywhere.'
    )
    for family, rows in load_families().items():
        lines += ['', f'{family}:', *map(commands.format_summary, rows)]
    rows = [row for field in COMMON_OPTIONS for row in OPTIONS[field]]
    lines += ['', 'Common options:', *commands.format_options(rows)]
    return '\n'.join([*lines, '', *PLACEHOLDER_MEANINGS.values(), *commands.format_exit_codes(EXIT_CODES)]) + '\n'


def list_reserved_words() -> list[str]:
    names = {row.name.partition(' ')[0] for rows in load_families().values() for row in rows}
    return sorted(names | PLANNED_WORDS | {name.partition(' ')[0] for name in OLD_WORDS})


def describe_shapes() -> tuple[list[Block], list[Section]]:
    by_object: dict[str, list[str]] = {}
    for name, shape in shapes.SHAPES.items():
        by_object.setdefault(repr(_split_shape(shape)[1]), []).append(name)
    sections = [
        Section(
            ', '.join(f'eschedule {name}' for name in names),
            [_describe_forms(names), *_describe_object(_split_shape(shapes.SHAPES[names[0]])[1])],
        )
        for names in by_object.values()
    ]
    shared = 'Several commands print these fields. Each command below names those that it prints:'
    first = Section('Common fields', [shared, _make_table(_find_shared_fields())])
    refusal = 'If no compute has room, or a quota would be exceeded, `create` prints this and exits with 3:'
    last = Section('A refusal', [refusal, *_describe_object(shapes.REFUSED)])
    return parse_docstring(shapes), [first, *sections, last]


def _split_shape(shape: shapes.Schema) -> tuple[str, shapes.Schema]:
    """Return how often a shape's object is printed, in words, and the shape of the object."""
    if 'anyOf' in shape:
        return 'an object for one argument, an array of such objects for several', shape['anyOf'][0]
    if shape['type'] == 'array':
        return 'an array of objects', shape['items']
    return shape['description'] or 'an object', shape


def _describe_forms(names: Iterable[str]) -> str:
    by_form: dict[str, list[str]] = {}
    for name in names:
        by_form.setdefault(_split_shape(shapes.SHAPES[name])[0], []).append(name)
    if len(by_form) == 1:
        [form] = by_form
        return f'{_capitalize(form)}:'
    lists = {form: ', '.join(f'`{name}`' for name in each) for form, each in by_form.items()}
    return ' '.join(f'{_capitalize(form)}: {names}.' for form, names in lists.items())


def _describe_object(shape: shapes.Schema) -> Iterator[Block]:
    fields, shared = list(_flatten(shape, '')), _find_shared_fields()
    names = ', '.join(f'`{field.name}`' for field in fields if field in shared)
    yield _make_table(field for field in fields if field not in shared)
    if names:
        yield f'[Common fields](#common-fields): {names}.'


@functools.cache
def _find_shared_fields() -> list[Field]:
    objects = {repr(each): each for each in (_split_shape(shape)[1] for shape in shapes.SHAPES.values())}
    counts = Counter(field for each in objects.values() for field in _flatten(each, ''))
    return [field for field, count in counts.items() if count >= MIN_SHARING]


def _make_table(fields: Iterable[Field]) -> Table:
    rows = [[f'`{each.name}`', each.kind, each.description or '-'] for each in fields]
    return Table(['field', 'type', 'what it is'], rows)


class Field(NamedTuple):
    name: str
    kind: str
    description: str


def _flatten(shape: shapes.Schema, path: str) -> Iterator[Field]:
    for name, field in shape.get('properties', {}).items():
        yield from _flatten_field(field, f'{path}{name}')
    if isinstance(shape.get('additionalProperties'), dict):
        yield from _flatten_field(shape['additionalProperties'], f'{path}<name>')


def _flatten_field(field: shapes.Schema, path: str) -> Iterator[Field]:
    kinds = field['type'] if isinstance(field['type'], list) else [field['type']]
    yield Field(path, ' or '.join(kinds), field['description'] + _describe_choice(field))
    if 'items' in field:
        inner = list(_flatten(field['items'], f'{path}[].'))
        yield from inner or [Field(f'{path}[]', field['items']['type'], field['items']['description'])]
    yield from _flatten(field, f'{path}.')


def _describe_choice(field: shapes.Schema) -> str:
    return (': ' if field['description'] else '') + ', '.join(filter(None, field['enum'])) if 'enum' in field else ''


def describe_eschedule() -> Iterator[Section]:
    names = {
        family: ', '.join(make_link(f'eschedule {each.name}') for each in rows)
        for family, rows in load_families().items()
    }
    yield Section(
        'eschedule', [*PLACEHOLDER_MEANINGS.values(), *(f'{family}: {links}.' for family, links in names.items())]
    )
    described = [row for rows in load_families().values() for row in rows]
    common = [describe_option(row) for field in COMMON_OPTIONS for row in OPTIONS[field]]
    counts = Counter(describe_option(row) for each in described for row in each.list_options(are_common=False))
    common += [option for option, count in counts.items() if count >= MIN_SHARING]
    yield Section('Common options', ['Many commands have some of these options:', Terms(('option', ''), common)])
    for each in described:
        exits = ', '.join(map(str, sorted({0, 1, 2, 7, *each.exit_codes})))
        blocks: list[Block] = [Code(f'eschedule {each.usage}'), each.description]
        rows = [*each.list_options(are_common=False), *each.list_options(are_common=True)]
        if options := [option for option in map(describe_option, rows) if option not in common]:
            blocks.append(Terms(('option', ''), options))
        flags = ', '.join(f'`{row.flags[-1]}`' for row in rows if describe_option(row) in common)
        blocks.append(f'[Common options](#common-options): {flags}.')
        blocks += [f'Example: `{each.example}`', f'[Exit codes](exit-codes.md): {exits}.']
        yield Section(f'eschedule {each.name}', blocks)
    reserved = ', '.join(f'`{word}`' for word in list_reserved_words())
    says = 'An instance cannot have the name of a command, or of one that may be added later'
    yield Section('Reserved names', [f'{says}: {reserved}.'])


def describe_other_commands() -> Iterator[Section]:
    for name, parser in (
        ('ecompute', compute.make_parser()),
        ('mdserver', mdserver.server.make_parser()),
        ('elab', elab.make_parser()),
    ):
        for section in describe_parser(parser):
            yield section._replace(title=name if section.title in ('SYNOPSIS', name) else f'{name}: {section.title}')
    for script in ('docker.sh', 'quickstart.sh'):
        header = re.match(r'#!.*\n((?:#.*\n)+)', (TOP / script).read_text())
        assert header, script
        yield Section(script, [Code(re.sub('(?m)^# ?', '', header[1]).strip())])


def describe_option(row: object) -> tuple[str, str]:
    flags, metavar, help_text = row.flags, row.metavar, row.help  # type: ignore[attr-defined]
    value = metavar if not metavar or metavar.startswith('[') else f' {metavar}'
    return ', '.join(f'{flag}{value}' for flag in flags), help_text


def describe_parser(parser: argparse.ArgumentParser) -> Iterator[Section]:
    """Describe a command by its argparse parser: its usage and options, and each subcommand."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield Section(
        'SYNOPSIS', [_render_usage(parser), parser.description or '', *([] if inner else _describe_options(parser))]
    )
    for each in inner:
        for name, sub in each.choices.items():
            yield Section(name, [_render_usage(sub), _make_sentence(sub.description or name), *_describe_options(sub)])


def _make_sentence(text: str) -> str:
    return f'{_capitalize(text)}.'


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _render_usage(parser: argparse.ArgumentParser) -> Code:
    # In one line: where argparse breaks it depends on the terminal and the Python version.
    parser.formatter_class = functools.partial(argparse.HelpFormatter, width=10_000)  # type: ignore[assignment]
    usage = parser.format_usage().removeprefix('usage: ').strip()
    lines = textwrap.wrap(usage, 100, subsequent_indent='    ', break_long_words=False, break_on_hyphens=False)
    return Code('\n'.join(lines))


def _describe_options(parser: argparse.ArgumentParser) -> list[Block]:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction):
            continue
        value = '' if action.nargs == 0 else f' {action.metavar or action.dest.upper()}'
        written = ', '.join(f'{flag}{value}' for flag in action.option_strings) or str(action.metavar or action.dest)
        assert action.help, f'{parser.prog}: {written} has no help'
        rows.append((written, action.help.replace('%%', '%')))
    return [Terms(('argument', ''), rows)] if rows else []


# Configuration


CONFIGURATIONS = {
    'compute.yaml': compute_conf.ComputeConfig,
    'schedule.yaml': conf.ScheduleConfig,
    'mdserver.conf': mdserver.conf.Config,
}


def describe_configuration(name: str, config: type) -> tuple[list[Block], list[Section]]:
    """Describe a configuration file: its header, and each key's comment, default and lines."""
    header, *blocks = re.split(r'\n{2,}', (TOP / name).read_text().strip())
    sections, inside = [], ''
    for block in blocks:
        comments, lines = _split_comments(block.split('\n'))
        if lines and (heading := re.fullmatch(r'\[.*\]', lines[0])):
            inside, lines = f'{heading[0]} ', lines[1:]
        names = re.findall(r'(?m)^([\w-]+)(?::| =)', '\n'.join(lines))
        about: list[Block] = [' '.join(comments), *_describe_defaults(config, names)]
        if lines:
            about.append(Code('\n'.join(lines), '' if inside else 'yaml'))
        if any(about):
            sections.append(Section((inside + ', '.join(names)).strip(), about))
    _check_complete(name, config, sections)
    return parse_docstring(re.sub('(?m)^# ?', '', header)), sections


def _split_comments(lines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split lines into comments and settings, also `#key: value` and `# key = value`."""
    comments, settings = [], []
    for line in lines:
        if re.match(r'# (?! |[\w-]+ = )', line):
            comments.append(line[2:])
        else:
            settings.append(re.sub(r'^#( (?! ))?', '', line))
    return comments, settings


def _describe_defaults(config: type, names: Iterable[str]) -> list[Block]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = [(name, defaults.get(name.replace('-', '_'))) for name in names]
    short = [(name, value) for name, value in values if isinstance(value, str | int | Path) and len(str(value)) < 50]
    has_several = len(short) > 1
    return [f'Default{f" of {name}" if has_several else ""}: `{value}`.' for name, value in short]


def _check_complete(name: str, config: type, sections: Iterable[Section]) -> None:
    described = {word for section in sections for word in re.findall(r'[\w-]+', section.title)}
    keys_ = {field.metadata.get('name') or field.name for field in dataclasses.fields(config) if field.metadata}
    assert keys_ <= described, f'{name} does not describe {sorted(keys_ - described)}'


# etcd, records, audit, exit codes, faults


VALUES: dict[str, object] = {
    'The request: /hosts/': order.Request,
    'Its order': order,
    'Power': order.PowerAction,
    'What waits: /queues/': queue.QueueEntry,
    'Groups': group,
    'Quotas': quota,
    'Flavors': flavor,
    'Released claims': notes.released_to_json,
    'Which etcd: /cluster': cluster,
    'What a host found: /findings/': findings.HostReport,
}
VALUE_CLASSES: dict[str, type] = {
    'The request: /hosts/': order.Request,
    'Power': order.PowerAction,
    'What waits: /queues/': queue.QueueEntry,
    'Groups': group.Group,
    'Quotas': quota.Quota,
    'Flavors': flavor.Flavor,
    'Which etcd: /cluster': cluster.ClusterIdentity,
    'What a host found: /findings/': findings.HostReport,
    'addresses': record.Interface,
    'boots': boots.Boot,
    'error': record.Failure,
    'progress': record.Progress,
}


def describe_etcd() -> tuple[list[Block], list[Section]]:
    _, key_list, *rest = read_docstring(keys).split('\n\n')
    introduction = 'Look up what each key in etcd contains, and whose certificates may write it.'
    rows = []
    for line in key_list.split('\n'):
        key, meaning = re.split(r' {2,}', line.strip(), maxsplit=1)
        rows.append([f'`{key}`', ', '.join(_list_writers(key)), meaning])
    writers = Table(['key', 'may be written by', 'what it is'], rows)
    top = [introduction, writers, *(part.replace('\n', ' ') for part in rest), *parse_docstring(roles)]
    return top, [
        Section(title, [*parse_docstring(module), *_describe_fields(VALUE_CLASSES.get(title))])
        for title, module in VALUES.items()
    ]


def _describe_fields(kind: type | None) -> list[str]:
    if kind is None:
        return []
    codec = CODECS[kind]
    names = ['version'] if codec.version else []
    names += [field.name for field in codec.fields.values() if field.write is not None and not field.is_sparse]
    sparse = [field.name for field in codec.fields.values() if field.is_sparse]
    more = f' If they have a value: {", ".join(f"`{name}`" for name in sparse)}.' if sparse else ''
    return [f'Fields of the JSON: {", ".join(f"`{name}`" for name in names)}.{more}']


def _list_writers(pattern: str) -> list[str]:
    key = re.sub('<.*?>|…', 'x', pattern)
    kinds = {'compute': roles.list_compute_permissions('x'), 'scheduler': roles.list_scheduler_permissions()}
    return [kind for kind, grants in kinds.items() if any(_covers(grant, key) for grant in grants)] + ['operator']


def _covers(grant: roles.Permission, key: str) -> bool:
    inside = grant.key <= key < grant.range_end if grant.range_end else grant.key == key
    return inside and grant.kind != roles.READ


def describe_records() -> tuple[list[Block], list[Section]]:
    retention = ', '.join(f'`{state}` {seconds // 3600} hours' for state, seconds in record.RETENTION_SECONDS.items())
    introduction = 'Look up the states and stages of an instance, and how etcd stores its record. Its fields are those '
    introduction += 'of [`eschedule show -f json`](json.md#eschedule-list-eschedule-show).'
    return [introduction, *parse_docstring(record), *_describe_fields(record.Record)], [
        Section('Stages', [f'In this order: {", ".join(f"`{stage}`" for stage in record.STAGES)}.']),
        Section('How long a record of a finished instance is kept', [f'{retention}.']),
        *(Section(title, [*parse_docstring(source), *_describe_fields(VALUE_CLASSES.get(title))]) for title, source in (
            ('addresses', record.Interface), ('boots', boots), ('error', record.Failure),
            ('progress', record.Progress), ('power', order.PowerAction),
        )),
    ]  # fmt: skip


def describe_audit() -> tuple[list[Block], list[Section]]:
    rows = [
        [f'`{code}`', mark_warning(code, row.meaning), row.repair and row.repair.value or '-', row.manual_repair or '-']
        for code, row in findings.CHECKS.items()
    ]
    head = ['code', 'what it means', 'what `check --fix` does', 'the manual fix']
    top = 'Look up what a code of `eschedule check` means, and how to repair what it found. Codes do not change, so '
    top += (
        'scripts can depend on them. A `warning` does not change the exit code. etcdctl needs [the certificate of an '
    )
    top += 'operator](../howto/certificates.md#etcdctl-by-hand).'
    places = {SERVERS: 'both', COMPUTES: 'eschedule', MACHINE: 'ecompute'}
    checks = [[f'`{code}`', places[row.scope], mark_warning(code, row.meaning)] for code, row in health.CHECKS.items()]
    return [top, Table(head, rows)], [
        Section('Servers, computes and machines', [
            '`eschedule check` and `ecompute --check` find these problems, too, and print the fix of each.',
            Table(['check', 'who looks for it', 'what it means'], checks),
        ]),
    ]  # fmt: skip


def describe_exit_codes() -> tuple[list[Block], list[Section]]:
    codes = Terms(('code', ''), [(str(code), says) for code, says in EXIT_CODES.items()])
    return ['Look up why a command failed, by its exit code.', codes], [Section('Errors', parse_docstring(errors))]


def describe_faults() -> tuple[list[Block], list[Section]]:
    count = Counter(case.row for case in faults.find_cases())
    rows = [
        [f'F{number}', says, str(count[number] or faults.UNTESTED_ROWS[number])] for number, says in faults.ROWS.items()
    ]
    matrix = f'[The matrix]({MATRIX}) has each test, the rules of the protocol, and the failpoints.'
    says = 'Look up which faults are tested: tests kill, freeze, cut off, fill or wipe every part of a cluster.'
    return [f'{says} {matrix}', Table(['row', 'fault', 'tests'], rows)], []


def main(texts: Mapping[Path, str]) -> None:
    """Write the files, and remove those that are no longer generated."""
    for directory in (REFERENCE, MAN):
        directory.mkdir(parents=True, exist_ok=True)
        for path in set(directory.iterdir()) - texts.keys():
            path.unlink()
    for path, text in texts.items():
        path.write_text(text)


if __name__ == '__main__':
    main(generate_files())
