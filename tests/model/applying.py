"""`eschedule apply` and `destroy --file` in a cloud, with the file as an object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from ecomp.cli import apply, change
from ecomp.cli.command import Context, Invocation
from ecomp.cli.options import JSON, Options
from ecomp.cli.stack_file import StackFile
from ecomp.cli.tables import Listing
from ecomp.cli.terminal import Terminal
from ecomp.errors import Conflict, EcompError, NoCapacity, StillGoing, UnknownOutcome
from ecomp.model import keys
from ecomp.model.apply import CREATE, KEEP, REPLACE, Desired
from ecomp.model.host import NO_COMPUTES, Computes
from ecomp.model.order import Order
from ecomp.model.stack import Stack
from ecomp.model.stored import decode
from ecomp.scheduler.placing.claim import DeliveryOutcome
from ecomp.store.client import Delete, Put
from tests.model.acting import Actor
from tests.model.cloud import IMAGE, QUERY, Cloud
from tests.model.etcd import ModelStore

STACK = 's'
OTHER_IMAGE = 'http://x/other'
# The error that stands for each exit code of an apply, by which truth.py and rest.py tell outcomes apart.
ERRORS: Mapping[int, type[EcompError]] = {1: EcompError, 3: NoCapacity, 5: Conflict, 6: StillGoing, 7: UnknownOutcome}


def make_file(*entries: str, **fields: Any) -> StackFile:
    defaults = {'query': QUERY, 'image': IMAGE, 'user_id': 'u', 'project_id': 'p', **fields}
    orders = {entry: Order('', name=f'{STACK}-{entry.replace("/", "-")}', **defaults) for entry in entries}
    return StackFile(STACK, {entry: Desired(order, 'spread') for entry, order in orders.items()})


class ApplyContext(Context):
    def __init__(
        self,
        cloud: Cloud,
        file: StackFile,
        options: Mapping[str, object],
        name: str = 'apply',
        words: Sequence[str] = ('the file',),
    ) -> None:
        self.said: list[str] = []
        self.shown: Sequence[Mapping[str, Any]] = ()
        out = Terminal(lambda _: None, lambda _: None, self.said.append)
        etcd = SimpleNamespace(timeout=1.0, memory=cloud.etcd)
        config = cast(Any, SimpleNamespace(placement=cloud.placement, etcd=etcd))
        given = Options(format=JSON, yes=True)._replace(**options)  # type: ignore[arg-type]
        super().__init__(out, config, Invocation(name, words, given))
        self.file = file
        self.store = ModelStore(cloud.etcd)
        self.store.claims = self.read_claims
        self.placement = cloud.placement

    def show(self, listing: Listing, errors: Sequence[EcompError] = (), is_single: bool = False) -> int:
        document = cast(dict[str, Any], listing.document)
        self.shown = document['instances']
        return len(errors) and is_single

    def name_computes(self) -> Computes:
        # Reading them would be one more step.
        return NO_COMPUTES


def run_apply(cloud: Cloud, file: StackFile, **options: object) -> dict[str, DeliveryOutcome]:
    return _run(ApplyContext(cloud, file, options), apply.COMMANDS[0].run)


def _run(ctx: ApplyContext, command: Callable[[Context], int]) -> dict[str, DeliveryOutcome]:
    code = command(ctx)
    text = '\n'.join(ctx.said)
    if code and text.startswith('interrupted'):
        raise KeyboardInterrupt
    if code:
        raise ERRORS[code](text)
    return {
        row['instance']: DeliveryOutcome(row['compute'])
        for row in ctx.shown
        if row['action'] in (CREATE, KEEP, REPLACE)
    }


def add_apply(
    cloud: Cloud, name: str, file: StackFile, may_fail: tuple[type[EcompError], ...] = (), **options: object
) -> Actor:
    """Add an `eschedule apply`. If it is killed or its outcome is unknown, it is repeated.

    The repetition has to succeed, unless its error is one of `may_fail`.
    """

    def repeat() -> None:
        try:
            placements = run_apply(cloud, file, **options)
        except may_fail:
            return
        except EcompError as error:
            cloud.world.unexpected_errors.append(f'{name} is repeated, and fails: {error}')
            return
        entries = cloud.etcd.entries
        requested = [keys.request(delivery.compute, instance) for instance, delivery in placements.items()]
        if len(requested) != len(file.instances) or not entries.keys() >= set(requested):
            cloud.world.unexpected_errors.append(f'{name} is repeated, and {len(requested)} instances exist')

    work = partial(run_apply, cloud, file, **options)
    actor = cloud.add_actor(name, work, retry=repeat, command='apply')
    _note_instances(cloud, actor, file)
    return actor


def add_destroy_file(cloud: Cloud, name: str, file: StackFile) -> Actor:
    def work() -> None:
        _run(ApplyContext(cloud, file, {'file': 'the file'}, 'destroy', ()), change.COMMANDS[0].run)

    return cloud.add_actor(name, work, retry=work)


def _note_instances(cloud: Cloud, actor: Actor, file: StackFile) -> None:
    """Make the instances of its attempts the actor's `subjects`, and name them in the story."""

    def note(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if isinstance(operation, Delete):
                continue
            if operation.key.startswith(keys.ATTEMPTS) and cloud.world.current is actor:
                actor.subjects = (*actor.subjects, *json.loads(operation.value)['instances'])
            elif operation.key == keys.stack(file.name):
                stack = decode(Stack, operation.value.encode(), name=file.name)
                for entry in {*file.instances, *stack.entries}:
                    place = stack.make_place(entry)
                    cloud.world.names[place.instance] = f'{place.entry_name}#{place.incarnation}'

    cloud.etcd.listeners.append(note)
