"""To wait for instances until each has reached the stage that was asked for, and to say what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ecomp.cli.command import Context
from ecomp.cli.options import TABLE
from ecomp.cli.outcomes import Outcomes, known_of
from ecomp.cli.terminal import Live
from ecomp.model.record import STAGES
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.model.order import Power
    from ecomp.model.record import Record
    from ecomp.store.places import Index

ADDRESSED = 'addressed'
"""The stage that is waited for if none is named."""


def reach(
    do: Context,
    outcomes: Outcomes,
    words: Sequence[str],
    instance_of: Callable[[str], str],
    among: Index | None,
    asked: Mapping[str, Power | None] = MappingProxyType({}),
) -> None:
    """Wait for the stage of each that was asked for; once there has to be an address, it is printed.

    `among`: see find(). `asked` is what is asked of an instance's power, known by when `instance_of` has said which it
    is.
    """
    from ecomp.scheduler.changing.wait import Deadline

    stage = do.options.stage or do.options.wait or ADDRESSED
    deadline = Deadline(do.options.patience)

    def late(record: Record) -> None:
        from ecomp.cli.enter import last_lines

        for line in last_lines(do, record):
            do.out.say(f"{record.name or record.instance}'s console: {line}")

    def wait(word: str) -> None:
        from ecomp.scheduler.changing.wait import Wait, wait_for_stage

        def seen(record: Record) -> None:
            outcomes.tell(word, '', **known_of(record))

        instance = instance_of(word)
        with Live() as tell:
            waited = Wait(do.etcd, instance, deadline, tell, among, seen, late, do.claims)
            record = wait_for_stage(waited, stage, asked.get(instance))
        if do.form == TABLE and record.address and STAGES.index(stage) >= STAGES.index(ADDRESSED):
            do.out.put(printable(record.address))

    of = '' if stage == ADDRESSED else f' --for {stage}'
    outcomes.wait(words, wait, lambda left: f'{do.typed} wait {left}{of}')
