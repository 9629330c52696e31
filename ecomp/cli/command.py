"""What a command is, a row beside its function; what the function is given; and what comes of each of its words."""

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

CREATE, QUERY = 'create', 'query'
"""The two forms of 2019, which are told by what is typed and not by a name: a placement query, and an instance."""

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
"""What each exit code means."""

SHORTEST = 0.5
"""Seconds that etcd is given for an answer at least, however short a --timeout is."""

SLOW_SECONDS = 3.0
"""Seconds without an answer of placement after which that is reported on a terminal."""
SLOW_SECONDS_IN_A_SCRIPT = 10.0
"""The same elsewhere: a script on a busy machine is not to fill its log."""

REACHED: Mapping[str, object] = dict.fromkeys(('instance', 'name', 'state', 'address'))
"""What is known of an instance that is waited for, before it is looked at."""

QUOTED = 5
"""How many words a sentence names at most."""


class Context:
    """One command at work: what was typed, where words go, and connections, each made when it is first asked for.

    Late on purpose: what etcd and placement need is most of a command's time, and many need one of them alone. What is
    said (data is not) calls instances as they were called, and computes by their hosts' names: `called`, by uuid.
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
        """How what is printed is to look."""
        return look(self.options)

    def show(self, listing: Listing, unreadable: Sequence[EcompError] = (), one: bool = False) -> int:
        """Print a listing in the form that was asked for, and say what could not be read for it; the exit code.

        With -f json it is an array; of `one` row that was asked for by name it is that row's object.
        """
        from ecomp.cli.tables import rendered

        if one:
            listing = listing._replace(document=listing.rows[0].value)
        self.draw(rendered(listing, self.look))
        for error in unreadable:
            self.out.say(str(error))
        return EcompError.exit_code if unreadable else 0

    def show_document(self, values: Sequence[object], text: str = '', several: bool = False) -> None:
        """Print what was found: a text or, with -f json, one document, which is an array for `several` words."""
        from ecomp.cli.tables import document

        if values and self.form == TABLE:
            if text:
                self.put_lines(text.split('\n'))
        elif values:
            self.draw(document(list(values) if several else values[0], self.form))

    def put_lines(self, lines: Sequence[str]) -> None:
        """Print lines as they are; on a terminal that is narrower than they are, broken at spaces."""
        self.out.put(broken('\n'.join(lines), width()))

    def draw(self, text: str) -> None:
        """Print what is rendered already; nothing at all for ''."""
        if text:
            self.out.draw(text)

    @cached_property
    def typed(self) -> str:
        """`eschedule` as the next command has to be typed: with --config FILE, quoted for a shell, if this one was."""
        if self.options.config is None:
            return 'eschedule'
        import shlex  # for those who have to type one

        return f'eschedule --config {shlex.quote(self.options.config)}'

    @property
    def etcd(self) -> EtcdConfig:
        """How etcd is asked. Who only waits, and not for long, does not wait longer for one answer."""
        etcd = self.config.etcd
        if self.name != 'wait' or self.options.timeout is None:
            return etcd
        return etcd._replace(timeout=min(etcd.timeout, max(self.options.timeout, SHORTEST)))

    @cached_property
    def store(self) -> Store:
        """The connection to etcd."""
        from ecomp.store.client import Store

        store = Store(self.etcd)
        store.claims = self.claims
        return store

    def claims(self, compute: str) -> Mapping[str, object]:
        """What has a claim on a compute: {consumer: …}."""
        from ecomp.placement.allocations import of_provider

        try:
            return of_provider(self.placement, compute)
        except NotFound:
            return {}

    def claimed_on(self, instance: str) -> str:
        """Ask placement which compute holds an instance's claim; '' for none."""
        from ecomp.model.allocation import compute_of
        from ecomp.placement.allocations import consumer

        return compute_of(consumer(self.placement, instance).allocations)

    def connect(self) -> None:
        """Begin the connection to etcd: it is made while what else a command needs is loaded."""
        self.store  # noqa: B018

    @cached_property
    def placement(self) -> Placement:
        """The connection to placement."""
        from ecomp.placement.client import Placement

        return Placement(self.config.placement, slow=self.slow)

    @property
    def slow(self) -> Slow:
        """Have it said once of placement that it has not answered for so long: sooner on a terminal."""
        import sys

        def tell(backend: str, seconds: float) -> None:
            if not self.is_wait_reported:
                self.is_wait_reported = True
                self.out.say(f'waiting for {backend}, which has not answered for {seconds:g} s')

        return SLOW_SECONDS if sys.stderr.isatty() else SLOW_SECONDS_IN_A_SCRIPT, tell

    def calling(self, text: str) -> str:
        """The text, with instances and computes as they are called so far."""
        return renamed(text, self.called)

    def instance(self, word: str, among: Index | None = None) -> str:
        """The uuid of the instance that a word means, which is called so from now on. See resolve()."""
        from ecomp.scheduler.looking.find import resolve

        instance = resolve(self.store, word, among)
        self.called.setdefault(instance, word)
        return instance

    def compute(self, word: str) -> str:
        """The uuid of the compute that a word means. See compute_of()."""
        from ecomp.scheduler.looking.hosts import compute_of

        return compute_of(self.store, lambda: self.placement, word)

    @cached_property
    def among(self) -> Index | None:
        """Where all instances are, for a command whose words are instances: read once, if there are several of them.

        None for one alone, and where etcd does not answer: then each is looked for.
        """
        if len(self.words) < 2:
            return None
        from ecomp.store.sharing import index

        try:
            return index(self.store)
        except Unreachable:
            return None  # whoever looks for the first of them says it, and what has come of that one

    @cached_property
    def computes(self) -> Computes:
        """What etcd tells of the computes now, which are called by their hosts' names from now on."""
        from ecomp.scheduler.looking.hosts import computes

        found = computes(self.store)
        self.called |= found.names
        return found

    def name_computes(self) -> Naming:
        """Names for computes in an answer already given; uuids if etcd cannot be read. Never raises an EcompError."""
        from ecomp.model.host import NOBODY

        try:
            return self.computes
        except EcompError:
            return NOBODY

    def find_each(self, find: Callable[[str], Found], words: Sequence[str] | None = None) -> tuple[list[Found], int]:
        """Find what each word means, of the command's if None; and the first failure's exit code, 0 if there is none.

        An EcompError is said, and is that word's alone.
        """
        words, found = self.words if words is None else words, list[Found]()
        outcomes = Outcomes(self, words)
        outcomes.in_turn(list(words), lambda word: found.append(find(word)))
        return found, outcomes.code

    def close(self) -> None:
        """Let go of etcd; what placement has ends with the process."""
        if 'store' in vars(self):
            vars(self).pop('store').close()


class Command(NamedTuple):
    """One command: how it is written and what it does, in a line and at length; which words and options it takes.

    `options` are fields of Options, and what each of them does here ('': what its own row says). `exits` are the exit
    codes beside 0, 1, 2 and 7, which every command may have. `example` is a whole command line. Without `needs_config`
    no configuration is read for it, so that a wrong one is no hindrance. `check` is given the command's name, its words
    and options, and raises UsageError for what of them does not go together here.
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
        """The options it takes, as its help shows them. Where --wait does something of its own it has no value."""
        given = {**self.options, 'config': ''}
        return [
            each._replace(metavar='' if each.metavar.startswith('[') else each.metavar, help=here) if here else each
            for field, rows in OPTIONS.items()
            if (here := given.get(field)) is not None
            for each in rows
        ]


class Invocation(NamedTuple):
    """A command line that was understood: the command's name, its words and options. Whole uuids are canonical."""

    name: str
    words: tuple[str, ...]
    options: Options


def plain(fields: str) -> dict[str, str]:
    """Options that do for a command what they do for all: fields of Options, with spaces between them."""
    return dict.fromkeys(fields.split(), '')


DOCUMENT = plain('format')
"""The option of what says something, and prints what it says as one document with -f json."""

LISTED = plain('format columns no_header sort wide')
"""The options of what prints a listing or details."""


def until(done: str) -> dict[str, str]:
    """--wait without a stage, and --timeout. `done` is what is waited for, as the end of a sentence."""
    return {'wait': f'return once {done}. Without: as soon as it is accepted', 'timeout': ''}


class Outcomes:
    """What came of each word of a command, whatever became of the others.

    `found` has for each word {"word", what else is known, "said": [sentences], "error": {"code", "said"} or null}, and
    `code` is the first failure's exit code, 0 while there is none.
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
        """Ask for each word and, with --wait, wait for those for which `ask` returned something; the exit code.

        `again` is the command that waits for the same words once more. Ctrl-C while it asks is an EcompError: what was
        just asked for may be done all the same, and of the words behind it nothing is.
        """
        left, accepted = list(self.found), list[str]()
        try:
            self.in_turn(left, lambda word: accepted.extend([word] if ask(word) else []))
        except KeyboardInterrupt:
            kind, space, _ = self._do.name.partition(' ')
            show = f'{kind} show' if space else 'show'
            rest = f', and of {len(left) - 1} more nothing was asked' if len(left) > 1 else ''
            may = f'{left[0]}: it may have been accepted: {self._do.typed} {show} {left[0]} says{rest}'
            raise EcompError(f'interrupted; {may}') from None
        if wait is not None and self._do.options.wait is not None:
            self.wait(accepted, wait, again)
        return self.end()

    def in_turn(self, left: list[str], work: Callable[[str], object]) -> None:
        """Do it for each word that is `left`, and take it out. An EcompError is said, and is that word's alone."""
        while left:
            try:
                work(left[0])
            except EcompError as error:
                self._do.out.say(self._do.out.words(error))
                self._fail(left[0], error)
            del left[0]

    def wait(self, words: Sequence[str], work: Callable[[str, Deadline], None], again: str, more: str = '') -> None:
        """Do it for each word, for --timeout seconds in all; Ctrl-C ends it for all of them, and is exit 6.

        What was begun goes on: the command `again`, with the words and `more` behind it, waits for them once more.
        """
        from ecomp.scheduler.changing.wait import Deadline

        left, deadline = list(words), Deadline(self._do.options.patience)
        try:
            self.in_turn(left, lambda word: work(word, deadline))
        except KeyboardInterrupt:
            command = f'{self._do.typed} {again} {some(left, QUOTED, between=" ")}{more}'
            interrupted = StillGoing(f'interrupted, and it goes on: {command}')
            self._do.out.say(str(interrupted))
            for word in left:
                self._fail(word, interrupted)

    def tell(self, word: str, said: str = '', **known: object) -> None:
        """Say what came of a word, and what is known of it besides."""
        if said:
            self._do.out.say(said)
            self.found[word]['said'].append(self._do.calling(said))
        self.found[word].update(known)

    def end(self) -> int:
        """Print the document, if one was asked for; the exit code."""
        self._do.show_document(list(self.found.values()), several=self._several)
        return self.code

    def _fail(self, word: str, error: EcompError) -> None:
        self.found[word]['error'] = {'code': error.exit_code, 'said': self._do.calling(str(error))}
        self.code = self.code or error.exit_code


def known_of(record: Record) -> Mapping[str, object]:
    """What a record tells of it, however the wait ends."""
    return {field: getattr(record, field) for field in REACHED}
