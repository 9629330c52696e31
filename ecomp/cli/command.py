"""The types of a command: its row, its context at run time, and the outcome for each word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp.cli.options import OPTIONS, TABLE, Option, Options
from ecomp.cli.terminal import Terminal, find_width, make_style, wrap_lines
from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable
from ecomp.model.text import join_some, replace_uuids

if TYPE_CHECKING:
    from ecomp.cli.tables import Listing, OutputStyle
    from ecomp.conf import EtcdConfig, ScheduleConfig
    from ecomp.model.host import ComputeNames, Computes
    from ecomp.model.listing import Absences
    from ecomp.model.record import Record
    from ecomp.placement.client import Placement, SlowAnswerReport
    from ecomp.scheduler.changes.wait import Deadline
    from ecomp.shared.places import KeyIndex
    from ecomp.store.client import Store

Result = TypeVar('Result')
# The two forms of 2019 have no command name on the command line: a placement query, and an instance.
CREATE = 'create'
QUERY = 'query'

EXIT_CODES = {
    0: 'done',
    1: 'failed',
    2: 'invalid command line or configuration',
    3: 'no capacity or quota',
    4: 'not found',
    5: 'already exists, or conflicts with a concurrent change',
    6: 'not finished yet, timed out or interrupted; the operation continues',
    7: 'etcd or placement cannot be reached',
    8: 'check reports a finding that is no warning, or a dry run finds changes',
}

# Seconds that etcd has for an answer at least, even if --timeout is shorter.
MIN_ETCD_TIMEOUT_SECONDS = 0.5
# Seconds without an answer of placement after which a message is printed, if stderr is a terminal.
SLOW_SECONDS = 3.0
# The same elsewhere, so that a script on a busy machine does not fill its log.
SCRIPT_SLOW_SECONDS = 10.0
# The fields of an instance that a wait reports, before its record is read.
EMPTY_STATUS: Mapping[str, object] = dict.fromkeys(('instance', 'name', 'state', 'address'))
MAX_QUOTED_WORDS = 5


class Context:
    """One running command: its arguments, its output, and connections made on first use.

    Messages, but not data, replace each uuid in `display_names` by the typed word or the host name.
    """

    def __init__(self, out: Terminal, config: ScheduleConfig, invocation: Invocation) -> None:
        self.display_names: dict[str, str] = {}
        self.is_slowness_reported = False
        self.out = out._replace(say=lambda text: out.say(self.replace_uuids(text)))
        self.config = config
        self.name, self.words, self.options = invocation
        self.form = self.options.format or TABLE

    @cached_property
    def style(self) -> OutputStyle:
        return make_style(self.options)

    def show(self, listing: Listing, errors: Sequence[EcompError] = (), is_single: bool = False) -> int:
        """Print a listing, print errors on stderr, and return the exit code.

        With `is_single`, JSON and YAML have only the first row.
        """
        from ecomp.cli.tables import render_listing

        if is_single:
            listing = listing._replace(document=listing.rows[0].value)
        self.draw(render_listing(listing, self.style))
        for error in errors:
            self.out.say(str(error))
        return EcompError.exit_code if errors else 0

    def show_document(self, values: Sequence[object], text: str = '', is_array: bool = False) -> None:
        """If there are `values`, print the first, all if `is_array`, or in the table form `text`."""
        if values and self.form == TABLE:
            if text:
                self.put_lines(text.split('\n'))
        elif values:
            from ecomp.cli.tables import format_document  # imported here: most creates print a line

            self.draw(format_document(list(values) if is_array else values[0], self.form))

    def put_lines(self, lines: Sequence[str]) -> None:
        self.out.put(wrap_lines('\n'.join(lines), find_width()))

    def draw(self, text: str) -> None:
        if text:
            self.out.draw(text)

    @cached_property
    def command_prefix(self) -> str:
        """The start of another command line: `eschedule`, with --config quoted if it was given."""
        if self.options.config is None:
            return 'eschedule'
        import shlex  # imported here: seldom needed

        return f'eschedule --config {shlex.quote(self.options.config)}'

    @property
    def etcd_config(self) -> EtcdConfig:
        """The configuration of etcd, with a timeout that `wait --timeout` may shorten."""
        etcd = self.config.etcd
        if self.name != 'wait' or self.options.timeout is None:
            return etcd
        return etcd._replace(timeout=min(etcd.timeout, max(self.options.timeout, MIN_ETCD_TIMEOUT_SECONDS)))

    @cached_property
    def store(self) -> Store:
        """The etcd client, which asks placement which request of an instance has the claim."""
        from ecomp.store.client import Store

        store = Store(self.etcd_config)
        store.claims = self.read_claims
        return store

    def read_claims(self, compute: str) -> Mapping[str, object]:
        """Read a compute's claims by consumer, {} for an unknown compute."""
        from ecomp.placement.allocations import read_provider_allocations

        try:
            return read_provider_allocations(self.placement, compute)
        except NotFound:
            return {}

    def find_claiming_compute(self, instance: str) -> str:
        """Ask placement which compute has the instance's claim, '' for none."""
        from ecomp.model.allocation import find_compute
        from ecomp.placement.allocations import read_consumer

        return find_compute(read_consumer(self.placement, instance).allocations)

    def connect(self) -> None:
        """Start the connection to etcd, which is then established while other modules load."""
        self.store  # noqa: B018

    @cached_property
    def placement(self) -> Placement:
        """The client of placement, whose slow answers are reported on stderr."""
        from ecomp.placement.client import Placement

        return Placement(self.config.placement, slow=self.slow_notice)

    @property
    def slow_notice(self) -> SlowAnswerReport:
        """The seconds after which an answer is slow, and a callback that prints the first one."""
        import sys

        def report_slowness(backend: str, seconds: float) -> None:
            if not self.is_slowness_reported:
                self.is_slowness_reported = True
                self.out.say(f'waiting for {backend}, which has not answered for {seconds:g} s')

        return SLOW_SECONDS if sys.stderr.isatty() else SCRIPT_SLOW_SECONDS, report_slowness

    def replace_uuids(self, text: str) -> str:
        return replace_uuids(text, self.display_names)

    def resolve_instance(self, word: str, instance_index: KeyIndex | None = None) -> str:
        """Return the uuid of an instance, by its name, its uuid or the beginning of the uuid.

        A whole uuid is returned without a look-up. From then on messages call the instance by `word`.
        """
        from ecomp.scheduler.queries.find import resolve

        instance = resolve(self.store, word, instance_index)
        self.display_names.setdefault(instance, word)
        return instance

    def resolve_compute(self, word: str) -> str:
        """Return the uuid of a compute by its name or first digits. A whole uuid is not checked."""
        from ecomp.scheduler.queries.computes import resolve_compute

        return resolve_compute(self.store, lambda: self.placement, word)

    @cached_property
    def instance_index(self) -> KeyIndex | None:
        """All instances' keys, read once, empty if only one word was given, None if etcd is away."""
        from ecomp.shared.places import KeyIndex, read_index

        if len(self.words) < 2:
            return KeyIndex({})
        try:
            return read_index(self.store)
        except Unreachable:
            return None  # the look-up of the first word reports this

    @cached_property
    def computes(self) -> Computes:
        """The computes in etcd, read once, whose host names messages use from then on."""
        from ecomp.scheduler.queries.computes import read_computes

        computes = read_computes(self.store)
        self.display_names |= computes.display_names
        return computes

    def name_computes(self) -> ComputeNames:
        """Read `computes`, after which messages use host names, or return NO_COMPUTES on an error."""
        from ecomp.model.host import NO_COMPUTES

        try:
            return self.computes
        except EcompError:
            return NO_COMPUTES

    def report_age(self, record: Record, remark: str | None = None) -> tuple[Absences, str | None]:
        """Print a remark and why the record is stale, and return the absences and the line.

        Without a remark, nothing is printed for a record that is not stale: the line is None.
        """
        from ecomp.model.listing import NO_ABSENCES, is_on_host
        from ecomp.scheduler.queries.computes import read_absences
        from ecomp.shared.attempts import is_alive

        absences, doubts, reason = NO_ABSENCES, list[str](), None
        # Usually the host is alive, and its own key is enough.
        if is_on_host(record) and ('computes' in vars(self) or not is_alive(self.store, record.compute)):
            absences = read_absences(self.store, lambda: self.placement, self.computes, [record], doubts.append)
            reason = absences.explain_state(record, self.computes.format_name(record.compute))
        if reason is None and remark is None:
            return absences, None
        age = f'{record.name or record.instance}: {absences.get_state(record)}: {reason}'
        line = '; '.join(filter(None, [*((remark, reason) if remark else (age,)), *doubts]))
        self.out.say(line)
        return absences, line

    def find_each(self, find: Callable[[str], Result], words: Sequence[str] | None = None) -> tuple[list[Result], int]:
        """Call `find` for each word, print its errors, and return results and first exit code."""
        words, results = self.words if words is None else words, list[Result]()
        outcomes = Outcomes(self, words)
        outcomes.process_each(list(words), lambda word: results.append(find(word)))
        return results, outcomes.exit_code

    def close(self) -> None:
        """Close the connection to etcd, which the next use of `store` opens again."""
        if 'store' in vars(self):
            vars(self).pop('store').close()


class Command(NamedTuple):
    """The row of one command: its usage, its help, and the functions behind it.

    `parse_words` gets name and words, and returns canonical words. It may raise UsageError, as `find_problems` may.
    `run` returns the exit code. An EcompError from it ends the command.
    `options` maps fields of Options to their help here, '' for the general one.
    `exit_codes` are those beside 0, 1, 2 and 7, which every command may have.
    """

    name: str
    usage: str
    summary: str
    description: str
    parse_words: Callable[[str, Sequence[str]], tuple[str, ...]]
    run: Callable[[Context], int]
    options: Mapping[str, str] = {}
    exit_codes: tuple[int, ...] = ()
    example: str = ''
    needs_config: bool = True
    find_problems: Callable[[str, Sequence[str], Options], Iterable[str]] = lambda *_: ()

    def list_options(self, are_common: bool | None = None) -> list[Option]:
        """List the options and --config: the common ones, the others, or all for None."""
        fields = {**self.options, 'config': ''}.items()
        texts = {field: text for field, text in fields if are_common in (None, field in COMMON_OPTIONS and not text)}
        # A --wait with its own help is shown without =STAGE.
        return [
            row._replace(metavar='' if row.metavar.startswith('[') else row.metavar, help=text) if text else row
            for field, rows in OPTIONS.items()
            if (text := texts.get(field)) is not None
            for row in rows
        ]


class Invocation(NamedTuple):
    """A parsed command line, in which whole uuids are canonical."""

    name: str
    words: tuple[str, ...]
    options: Options


def select_options(fields: str) -> dict[str, str]:
    """Map each field of Options in a space-separated list to '', which means its general help."""
    return dict.fromkeys(fields.split(), '')


DOCUMENT_OPTIONS = select_options('format')
LISTING_OPTIONS = select_options('format columns no_header sort wide')
# What the help of all commands describes once.
COMMON_OPTIONS = {**LISTING_OPTIONS, **select_options('config')}


def make_wait_options(condition: str) -> dict[str, str]:
    """Return the options --wait, whose help is "return once `condition`", and --timeout."""
    return {'wait': f'return once {condition}. Default: return once the request is accepted', 'timeout': ''}


class Outcomes:
    """The outcome for each word of a command.

    `results` maps each word to {"word", facts, "said": [sentences], "error": {"code", "said"} or None}.
    `exit_code` is that of the first failure, or 0.
    """

    def __init__(self, ctx: Context, words: Sequence[str], **facts: object) -> None:
        self._ctx = ctx
        self._is_array = len(words) > 1
        self.results = {word: dict[str, Any](word=word, **facts, said=[], error=None) for word in words}
        self.exit_code = 0

    def run(
        self, submit: Callable[[str], object], wait: Callable[[str, Deadline], None] | None = None, retry: str = ''
    ) -> int:
        """Submit each word, print the document, and return the exit code.

        With --wait, `wait` is called for each word for which `submit` returned true. A hint names `retry`.
        """
        pending = list(self.results)
        accepted = list[str]()
        try:
            self.process_each(pending, lambda word: accepted.extend([word] if submit(word) else []))
        except KeyboardInterrupt:
            kind, space, _ = self._ctx.name.partition(' ')
            show_command = 'show' if not space else 'hosts' if kind == 'host' else kind
            word, count = pending[0], len(pending) - 1
            rest = f'; {count} further request{" was" if count == 1 else "s were"} not sent' if count else ''
            hint = f'Try: {self._ctx.command_prefix} {show_command} {word}'
            raise EcompError(f'interrupted: the request for {word} may have been accepted{rest}. {hint}') from None
        if wait is not None and self._ctx.options.wait is not None:
            self.wait(accepted, wait, retry)
        return self.finish()

    def process_each(self, pending: list[str], work: Callable[[str], object]) -> None:
        """Call `work` for each pending word, and print and record its EcompError.

        Each word is removed from `pending` once it is processed, so that Ctrl-C leaves the unfinished ones.
        """
        while pending:
            try:
                work(pending[0])
            except EcompError as error:
                self._ctx.out.say(self._ctx.out.format_error(error))
                self._record_failure(pending[0], error)
            del pending[0]

    def wait(self, words: Sequence[str], work: Callable[[str, Deadline], None], retry: str, suffix: str = '') -> None:
        """Call `work` for each word, with one deadline of --timeout seconds for all.

        Ctrl-C ends the wait with exit code 6. The hint names `retry`, the unfinished words and `suffix`.
        """
        from ecomp.scheduler.changes.wait import Deadline

        pending, deadline = list(words), Deadline(self._ctx.options.wait_seconds)
        try:
            self.process_each(pending, lambda word: work(word, deadline))
        except KeyboardInterrupt:
            unfinished = join_some(pending, MAX_QUOTED_WORDS, separator=' ')
            command = f'{self._ctx.command_prefix} {retry} {unfinished}{suffix}'
            interrupted = StillGoing(f'interrupted; the operation continues. Try: {command}')
            self._ctx.out.say(str(interrupted))
            for word in pending:
                self._record_failure(word, interrupted)

    def report(self, word: str, sentence: str = '', **facts: object) -> None:
        """Print and store a sentence about a word, unless it is '', and store further facts."""
        if sentence:
            self._ctx.out.say(sentence)
            self.results[word]['said'].append(self._ctx.replace_uuids(sentence))
        self.results[word].update(facts)

    def finish(self) -> int:
        """Print the document, if -f asks for one, and return the exit code."""
        self._ctx.show_document(list(self.results.values()), is_array=self._is_array)
        return self.exit_code

    def _record_failure(self, word: str, error: EcompError) -> None:
        self.results[word]['error'] = {'code': error.exit_code, 'said': self._ctx.replace_uuids(str(error))}
        self.exit_code = self.exit_code or error.exit_code


def extract_status(record: Record) -> Mapping[str, object]:
    """Return what a wait reports of a record: instance, name, state and address."""
    return {field: getattr(record, field) for field in EMPTY_STATUS}
