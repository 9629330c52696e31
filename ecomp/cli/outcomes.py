"""What comes of each word of a command: said as it comes, and told programs in one document at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecomp.cli.command import Context
from ecomp.cli.options import TABLE
from ecomp.errors import EcompError, StillGoing
from ecomp.model.text import some

if TYPE_CHECKING:
    from ecomp.model.record import Record

REACHED: Mapping[str, object] = dict.fromkeys(('instance', 'name', 'state', 'address'))
"""What is known of an instance that is waited for, before it is looked at."""

QUOTED = 5
"""How many words a sentence names at most."""


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

    def each(self, words: Iterable[str], work: Callable[[str], None]) -> None:
        """Do it for every word; an EcompError is said, and is that word's alone.

        EcompError for Ctrl-C: what was just asked for may be done all the same, and of the words behind it nothing is.
        """
        left = list(words)
        try:
            self._in_turn(left, work)
        except KeyboardInterrupt:
            kind = self._do.name.partition(' ')[0]
            show = f'{kind} show' if kind in ('host', 'flavor', 'quota') else 'show'
            rest = f', and of {len(left) - 1} more nothing was asked' if len(left) > 1 else ''
            may = f'{left[0]}: it may have been accepted: {self._do.typed} {show} {left[0]} says{rest}'
            raise EcompError(f'interrupted; {may}') from None

    def _in_turn(self, left: list[str], work: Callable[[str], None]) -> None:
        """Do it for each word that is left, and take it out of those."""
        while left:
            try:
                work(left[0])
            except EcompError as error:
                self._do.out.say(self._do.out.words(error))
                self._fail(left[0], error)
            del left[0]

    def wait(self, words: Sequence[str], work: Callable[[str], None], again: Callable[[str], str]) -> None:
        """As each(), for what waits: Ctrl-C ends it for all of them, and is exit 6, for what was begun goes on.

        `again` says how to wait for words that it is given, with spaces between them.
        """
        left = list(words)
        try:
            self._in_turn(left, work)
        except KeyboardInterrupt:
            interrupted = StillGoing(f'interrupted, and it goes on: {again(some(left, QUOTED, between=" "))}')
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
        if self._do.form != TABLE:
            self._do.show_document(list(self.found.values()), several=self._several)
        return self.code

    def _fail(self, word: str, error: EcompError) -> None:
        self.found[word]['error'] = {'code': error.exit_code, 'said': self._do.calling(str(error))}
        self.code = self.code or error.exit_code


def known_of(record: Record) -> Mapping[str, object]:
    """What a record tells of it, however the wait ends."""
    return {field: getattr(record, field) for field in REACHED}
