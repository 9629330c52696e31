"""The types of a command: its row, its context at run time, and the outcome for each word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ecomp.cli.options import OPTIONS, TABLE, Option, Options
from ecomp.cli.terminal import Terminal, broken, look, width
from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable
from ecomp.model.text import renamed, some

if TYPE_CHECKING:
    from ecomp.cli.tables import Listing, Look
    from ecomp.conf import EtcdConfig, ScheduleConfig
    from ecomp.model.host import Computes, Naming
    from ecomp.model.record import Record
    from ecomp.placement.client import Placement, Slow
    from ecomp.scheduler.changing.wait import Deadline
    from ecomp.store.client import Store
    from ecomp.store.sharing import Index

Found = TypeVar('Found')

# The two forms of 2019 have no command name on the command line: a placement query, and an instance.
CREATE = 'create'
QUERY = 'query'

EXITS = {
    0: 'done',
    1: 'failed',
    2: 'the command or the configuration is wrong',
    3: 'no capacity, or no quota',
    4: 'not found',
    5: 'exists already, or in conflict with what somebody else did',
    6: 'the time is up, or Ctrl-C ended the wait; what was begun goes on',
    7: 'etcd or placement cannot be reached',
    8: 'the audit, or the doctor, found something',
}

# Seconds that etcd has for an answer at least, even if --timeout is shorter.
SHORTEST = 0.5

# Seconds without an answer of placement after which a message is printed, if stderr is a terminal.
SLOW_SECONDS = 3.0
# The same elsewhere, so that a script on a busy machine does not fill its log.
SLOW_SECONDS_IN_A_SCRIPT = 10.0

# The fields of an instance that a wait reports, before its record is read.
REACHED: Mapping[str, object] = dict.fromkeys(('instance', 'name', 'state', 'address'))

QUOTED = 5


class Context:
    """One running command: its arguments, its output, and connections made on first use.

    Connections take most of a command's time, and many commands need only one. Messages (not data) replace each uuid in
    `display_names` by the word that the user typed for the instance, or by the compute's host name.
    """

    def __init__(self, out: Terminal, config: ScheduleConfig, invocation: Invocation) -> None:
        self.called: dict[str, str] = {}
        self.is_wait_reported = False
        self.out = out._replace(say=lambda text: out.say(self.calling(text)))
        self.config = config
        self.name, self.words, self.options = invocation
        self.form = self.options.format or TABLE

    @cached_property
    def look(self) -> Look:
        return look(self.options)

    def show(self, listing: Listing, unreadable: Sequence[EcompError] = (), one: bool = False) -> int:
        """Print a listing, as JSON an array or if `is_single` the row; then print `errors`.

        Returns the exit code, 1 if there are errors. Raises UsageError for an unknown column.
        """
        from ecomp.cli.tables import rendered

        if one:
            listing = listing._replace(document=listing.rows[0].value)
        self.draw(rendered(listing, self.look))
        for error in unreadable:
            self.out.say(str(error))
        return EcompError.exit_code if unreadable else 0

    def show_document(self, values: Sequence[object], text: str = '', several: bool = False) -> None:
        """Print `text` or, with -f json/yaml, the first value, or all as an array; no-op for none."""
        from ecomp.cli.tables import document

        if values and self.form == TABLE:
            if text:
                self.put_lines(text.split('\n'))
        elif values:
            self.draw(document(list(values) if several else values[0], self.form))

    def put_lines(self, lines: Sequence[str]) -> None:
        self.out.put(broken('\n'.join(lines), width()))

    def draw(self, text: str) -> None:
        """Print rendered text; no-op for ''."""
        if text:
            self.out.draw(text)

    @cached_property
    def typed(self) -> str:
        """The start of another command line: `eschedule`, with --config quoted if it was given."""
        if self.options.config is None:
            return 'eschedule'
        import shlex  # imported here: seldom needed

        return f'eschedule --config {shlex.quote(self.options.config)}'

    @property
    def etcd(self) -> EtcdConfig:
        """The configuration of etcd; `wait --timeout` also limits each request to etcd."""
        etcd = self.config.etcd
        if self.name != 'wait' or self.options.timeout is None:
            return etcd
        return etcd._replace(timeout=min(etcd.timeout, max(self.options.timeout, SHORTEST)))

    @cached_property
    def store(self) -> Store:
        from ecomp.store.client import Store

        store = Store(self.etcd)
        store.claims = self.claims
        return store

    def claims(self, compute: str) -> Mapping[str, object]:
        """Return a compute's claims by consumer, {} for an unknown one; errors of placement pass."""
        from ecomp.placement.allocations import of_provider

        try:
            return of_provider(self.placement, compute)
        except NotFound:
            return {}

    def claimed_on(self, instance: str) -> str:
        """Return the compute with the instance's claim, '' for none; errors of placement pass."""
        from ecomp.model.allocation import compute_of
        from ecomp.placement.allocations import consumer

        return compute_of(consumer(self.placement, instance).allocations)

    def connect(self) -> None:
        """Start the connection to etcd, which is then established while other modules load."""
        self.store  # noqa: B018

    @cached_property
    def placement(self) -> Placement:
        from ecomp.placement.client import Placement

        return Placement(self.config.placement, slow=self.slow)

    @property
    def slow(self) -> Slow:
        """The seconds after which placement counts as slow, and the callback that reports it once."""
        import sys

        def tell(backend: str, seconds: float) -> None:
            if not self.is_wait_reported:
                self.is_wait_reported = True
                self.out.say(f'waiting for {backend}, which has not answered for {seconds:g} s')

        return SLOW_SECONDS if sys.stderr.isatty() else SLOW_SECONDS_IN_A_SCRIPT, tell

    def calling(self, text: str) -> str:
        return renamed(text, self.called)

    def instance(self, word: str, among: Index | None = None) -> str:
        """Return the uuid of the instance that a word means; messages use this word from now on.

        Raises NotFound, UsageError if several uuids begin with the word, Conflict if the instance has another name.
        """
        from ecomp.scheduler.looking.find import resolve

        instance = resolve(self.store, word, among)
        self.called.setdefault(instance, word)
        return instance

    def compute(self, word: str) -> str:
        """Return the uuid of the compute that a word means; a whole uuid is not checked.

        Raises NotFound, Conflict if several computes have the host name, UsageError if several uuids begin with the
        word.
        """
        from ecomp.scheduler.looking.hosts import compute_of

        return compute_of(self.store, lambda: self.placement, word)

    @cached_property
    def among(self) -> Index | None:
        """Where all instances are, read once; None for a single word, or if etcd is unreachable."""
        if len(self.words) < 2:
            return None
        from ecomp.store.sharing import index

        try:
            return index(self.store)
        except Unreachable:
            return None  # the look-up of the first word reports this

    @cached_property
    def computes(self) -> Computes:
        """The computes in etcd, read once; messages use their host names from now on."""
        from ecomp.scheduler.looking.hosts import computes

        known_computes = computes(self.store)
        self.called |= known_computes.names
        return known_computes

    def name_computes(self) -> Naming:
        """Return the names of computes, or only uuids if etcd is unreadable: never an EcompError."""
        from ecomp.model.host import NOBODY

        try:
            return self.computes
        except EcompError:
            return NOBODY

    def find_each(self, find: Callable[[str], Found], words: Sequence[str] | None = None) -> tuple[list[Found], int]:
        """Call `find` for each word, print EcompErrors, return the results and the first exit code."""
        words, results = self.words if words is None else words, list[Found]()
        outcomes = Outcomes(self, words)
        outcomes.in_turn(list(words), lambda word: results.append(find(word)))
        return results, outcomes.code

    def close(self) -> None:
        """Close the connection to etcd, if any; placement's ends with the process."""
        if 'store' in vars(self):
            vars(self).pop('store').close()


class Command(NamedTuple):
    """The row of one command: its usage, its help, and the functions behind it.

    `parse_words` gets name and words and returns the words in canonical form; it and `check`, which gets the options
    too, raise UsageError. `options` are fields of Options, each with its help here or '' for the general one.
    `exit_codes` are those beside 0, 1, 2 and 7, which every command may have. Without `needs_config` no configuration
    is read, so an invalid one does not matter. `example` is a whole command line.
    """

    name: str
    usage: str
    summary: str
    description: str
    words: Callable[[str, Sequence[str]], tuple[str, ...]]
    run: Callable[[Context], int]
    options: Mapping[str, str] = {}
    exits: tuple[int, ...] = ()
    example: str = ''
    needs_config: bool = True
    check: Callable[[str, Sequence[str], Options], None] = lambda *_: None

    def takes(self) -> list[Option]:
        """List the options for the help; a --wait with its own help is shown without =STAGE."""
        help_by_field = {**self.options, 'config': ''}
        return [
            row._replace(metavar='' if row.metavar.startswith('[') else row.metavar, help=text) if text else row
            for field, rows in OPTIONS.items()
            if (text := help_by_field.get(field)) is not None
            for row in rows
        ]


class Invocation(NamedTuple):
    """A parsed command line; uuids among the words are canonical."""

    name: str
    words: tuple[str, ...]
    options: Options


def plain(fields: str) -> dict[str, str]:
    """Return these options, space-separated fields of Options, with their general help."""
    return dict.fromkeys(fields.split(), '')


DOCUMENT = plain('format')

LISTED = plain('format columns no_header sort wide')


def until(done: str) -> dict[str, str]:
    """Return the options --wait, whose help is "return once `condition`", and --timeout."""
    return {'wait': f'return once {done}. Without: as soon as it is accepted', 'timeout': ''}


class Outcomes:
    """The outcome for each word of a command; a failure for one word does not stop the others.

    `results` has by word {"word", facts, "said": [sentences], "error": {"code", "said"} or None}; `exit_code` is that
    of the first failure, or 0.
    """

    def __init__(self, do: Context, words: Sequence[str], **known: object) -> None:
        self._do = do
        self._several = len(words) > 1
        self.found: dict[str, dict[str, Any]] = {
            word: {'word': word, **known, 'said': [], 'error': None} for word in words
        }
        self.code = 0

    def run(
        self, ask: Callable[[str], object], wait: Callable[[str, Deadline], None] | None = None, again: str = ''
    ) -> int:
        """Submit each word, with --wait wait where `submit` was truthy, and return the exit code.

        Prints the document of -f. If Ctrl-C stops a wait, the hint is `retry_command`. Ctrl-C while submitting raises
        EcompError: the current word may have been accepted, and later words were not sent.
        """
        pending = list(self.found)
        accepted = list[str]()
        try:
            self.in_turn(pending, lambda word: accepted.extend([word] if ask(word) else []))
        except KeyboardInterrupt:
            kind, space, _ = self._do.name.partition(' ')
            show_command = f'{kind} show' if space else 'show'
            rest = f', and of {len(pending) - 1} more nothing was asked' if len(pending) > 1 else ''
            hint = f'{pending[0]}: it may have been accepted: {self._do.typed} {show_command} {pending[0]} says{rest}'
            raise EcompError(f'interrupted; {hint}') from None
        if wait is not None and self._do.options.wait is not None:
            self.wait(accepted, wait, again)
        return self.end()

    def in_turn(self, left: list[str], work: Callable[[str], object]) -> None:
        """Call `work` for each word and remove it from `pending`; print and record an EcompError."""
        while left:
            try:
                work(left[0])
            except EcompError as error:
                self._do.out.say(self._do.out.words(error))
                self._fail(left[0], error)
            del left[0]

    def wait(self, words: Sequence[str], work: Callable[[str, Deadline], None], again: str, more: str = '') -> None:
        """Call `work` for each word, with one deadline of --timeout seconds for all.

        Ctrl-C stops waiting, not the operations: it prints a command that waits again, `retry_command` with the words
        and `suffix`, and records exit code 6 for the remaining words.
        """
        from ecomp.scheduler.changing.wait import Deadline

        pending, deadline = list(words), Deadline(self._do.options.patience)
        try:
            self.in_turn(pending, lambda word: work(word, deadline))
        except KeyboardInterrupt:
            command = f'{self._do.typed} {again} {some(pending, QUOTED, between=" ")}{more}'
            interrupted = StillGoing(f'interrupted, and it goes on: {command}')
            self._do.out.say(str(interrupted))
            for word in pending:
                self._fail(word, interrupted)

    def tell(self, word: str, said: str = '', **known: object) -> None:
        """Print and store a sentence about a word, and store further facts about it."""
        if said:
            self._do.out.say(said)
            self.found[word]['said'].append(self._do.calling(said))
        self.found[word].update(known)

    def end(self) -> int:
        """Print the document, if -f asks for one, and return the exit code."""
        self._do.show_document(list(self.found.values()), several=self._several)
        return self.code

    def _fail(self, word: str, error: EcompError) -> None:
        self.found[word]['error'] = {'code': error.exit_code, 'said': self._do.calling(str(error))}
        self.code = self.code or error.exit_code


def known_of(record: Record) -> Mapping[str, object]:
    """Return the fields that a wait reports of a record."""
    return {field: getattr(record, field) for field in REACHED}
