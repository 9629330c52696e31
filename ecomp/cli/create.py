"""Commands for new instances: `eschedule 'resources=…'`, its --queue, and `plan`."""

from __future__ import annotations

import os
import random
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.cli.command import CREATE, LISTED, REACHED, Command, Context, Outcomes, plain
from ecomp.cli.options import (
    JSON,
    LARGEST_NAMED_SET,
    LARGEST_SET,
    PATIENCE,
    TABLE,
    YAML,
    Options,
    planned,
    query_and_image,
    refuse_as_usage,
)
from ecomp.cli.terminal import now
from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NoCapacity, OverQuota, StillGoing, TooFew, UnknownOutcome, Unreachable, UsageError
from ecomp.model import keys
from ecomp.model.allocation import missing
from ecomp.model.choose import SPREAD
from ecomp.model.guest import KEYS_LIMIT, USER_DATA_LIMIT, check_user_data, looks_unknown, public_keys, unpacked
from ecomp.model.image import check_image
from ecomp.model.json_object import dump
from ecomp.model.keys import new_uuid
from ecomp.model.order import Order, SetOrder
from ecomp.model.text import check_name, printable

if TYPE_CHECKING:
    from ecomp.model.host import Naming
    from ecomp.scheduler.looking.find import Backend
    from ecomp.scheduler.placing.claim import DeliveryOutcome

# MiB below which no cloud image boots; an order of less gets a warning.
LEAST_MEMORY_MB = 64
# Printed for each placed instance; the text of 2019.
NOTIFIED = 'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}'
QUEUED = 'QUEUED INSTANCE {instance}'
STDIN = '-'
CLOUD_CONFIG = b'#cloud-config'
# Above this number of computes a create asks about a sample first. Below it sampling does not pay: placement answers
# about a hundred nearly as fast as about one, and hints of so few are soon stale: with eight requesters a create took
# 1.4 queries, and balanced worse.
LARGE = 256

Begun = dict[str, str | None]


def _create(do: Context) -> int:
    image = do.words[1] if len(do.words) > 1 else do.config.image
    with refuse_as_usage():
        check_image(image)
    ssh_keys, user_data = _read_guest_files(do)
    order = Order(
        do.options.uuid or new_uuid(os.urandom(16)),
        image=image,
        user_id=do.config.user_id,
        project_id=do.options.project or do.config.project_id,
        stages={'requested': now()},
        name=do.options.name,
        ssh_keys=ssh_keys,
        user_data=user_data,
        group=do.options.membership,
    )
    return (_enqueue if do.options.queue else _place)(do, order)


def _place(do: Context, order: Order) -> int:
    # Imported late, here and below: loading http.client and h2 takes most of a claim's time, so one is loaded and
    # placement queried while the other loads.
    from ecomp.scheduler.looking.find import ask_placement

    query, resume = _query(do), do.options.uuid is not None
    sample_above = LARGE if is_large(do.config.etcd) and not resume and not do.options.size else None
    backend = ask_placement(do.config.placement, query if sample_above is None else None, do.slow)
    do.connect()

    from ecomp.scheduler.placing.create import create

    remember_count = partial(remember, do.config.etcd)
    instance, set_order = order.instance, _wanted(do, order, query)
    advice = f'the same command with --uuid {instance} goes on, or says what became of it'
    try:
        outcomes = create(
            do.store, backend, set_order, who(order), resume, random.Random(), now, sample_above, remember_count
        )
    except NoCapacity as error:
        from ecomp.scheduler.placing.place import VAIN

        return _no_capacity(do, error, backend, query, spent=0 if sample_above is None else VAIN)
    except KeyboardInterrupt:
        hint = f'instance {instance}: {do.typed} {instance} says whether it was placed all the same'
        do.out.say(f'interrupted; {hint if set_order.count == 1 else advice}')
        return EcompError.exit_code
    except UnknownOutcome as error:
        do.out.say(f'{error}; {advice}')
        return UnknownOutcome.exit_code
    rows: list[Begun] = [
        {'instance': uuid, 'compute': outcome.compute, 'host': None, 'name': set_order.instances[uuid]}
        for uuid, outcome in outcomes.items()
    ]
    texts = [f'instance {uuid} was placed on {outcome.compute}' for uuid, outcome in outcomes.items()]
    summary = f'{len(texts)} instances were placed: --uuid {instance} says where'
    return _tell(do, rows, lambda: _remarks(do, set_order, outcomes), texts[0] if set_order.count == 1 else summary)


def _tell(do: Context, begun: Sequence[Begun], remarks: Callable[[], Iterable[str]], unwritten: str = '') -> int:
    """Print the placed or queued instances and the remarks, then wait if --wait asks for it.

    Returns the exit code: 6 at Ctrl-C, after the instances are printed. If stdout cannot be written, the EcompError
    begins with `output_error_prefix`; without that text the OSError passes.
    """
    is_put = False

    def put() -> None:
        nonlocal is_put
        is_put = True
        try:
            if do.form == TABLE:
                do.put_lines([(NOTIFIED if row.get('compute') else QUEUED).format(**row) for row in begun])
            else:
                do.out.put(_as_document(do, begun))
        except OSError as error:
            if not unwritten:
                raise
            raise EcompError(f'{unwritten}, but stdout cannot be written: {error.strerror}') from error

    try:
        placed = [row for row in begun if row.get('compute')]
        if do.form != TABLE and placed:  # for a table host names are read after the line is printed
            naming = do.name_computes()
            for row in placed:
                row['host'] = naming.host(row['compute'] or '')
        if do.form == TABLE or do.options.wait is None:
            put()
        for line in remarks():
            do.out.say(line)
        do.called |= {row['instance'] or '': row['name'] for row in begun if row['name']}
        do.close()
        return 0 if do.options.wait is None else _waited(do, begun)
    except KeyboardInterrupt:
        if not is_put:
            put()  # the reader learns the uuid from nothing else
        do.out.say(f'interrupted, and it goes on: {do.typed} wait {" ".join(row["instance"] or "" for row in begun)}')
        return StillGoing.exit_code


def _waited(do: Context, begun: Sequence[Begun]) -> int:
    """Wait for the stage, print the document of -f with the final state, return the exit code."""
    from ecomp.cli.change import reach  # needed only with --wait
    from ecomp.store.sharing import Index

    placed = [(row['instance'] or '', row.get('compute')) for row in begun]
    outcomes = Outcomes(do, [instance for instance, _ in placed], **REACHED)
    instance_index = Index({instance: [keys.request(compute, instance)] for instance, compute in placed if compute})
    reach(do, outcomes, lambda instance: instance, instance_index)
    if do.form != TABLE:
        ends = ({field: result[field] for field in ('state', 'address', 'error')} for result in outcomes.found.values())
        do.out.put(_as_document(do, [{**start, **end} for start, end in zip(begun, ends, strict=True)]))
    return outcomes.code


def _enqueue(do: Context, order: Order) -> int:
    """Queue the order for its flavor; placement is neither asked nor loaded."""
    from ecomp.model.guest import SharedUserData
    from ecomp.model.queue import QueueEntry
    from ecomp.scheduler.looking.find import find
    from ecomp.scheduler.placing.enqueue import enqueue, flavor_of_etcd, has_taker

    instance, shared = order.instance, None if order.user_data is None else SharedUserData.of(order.user_data)
    hashed = {'user_data': None, 'user_data_sha256': shared.sha256 if shared else None}
    try:
        flavor, revision = flavor_of_etcd(do.config, do.store, do.options.flavor or '')
        entry = QueueEntry(flavor=flavor, **order.parts(**hashed))
        is_new = enqueue(do.store, entry, revision, shared, who(order), do.options.uuid is not None)
        no_taker = None
        if is_new:
            with suppress(EcompError):  # the request is queued even if the computes are unknown
                no_taker = None if has_taker(do.store) else do.computes.no_taker
        # A compute may have taken an instance that was requested before.
        found_entries = None if is_new else find(do.store, instance)
    except NoCapacity as error:
        return _refused(do, error)
    except KeyboardInterrupt:
        do.out.say(f'interrupted; instance {instance}: {do.typed} {instance} says whether it is queued all the same')
        return EcompError.exit_code
    finally:
        do.close()
    compute = found_entries.record.compute if found_entries is not None else ''
    place = {'compute': compute, 'host': None} if compute else {'flavor': flavor.name}

    def remarks() -> Iterator[str]:
        if compute:
            do.name_computes()  # messages of the wait then use host names
        if not is_new:
            yield f'{instance} was requested before: nothing is changed'
        elif no_taker is not None:
            yield f'it waits: {no_taker}'

    return _tell(do, [{'instance': instance, **place, 'name': do.options.name}], remarks)


def _plan(do: Context) -> int:
    from ecomp.cli.operators import as_plan
    from ecomp.scheduler.looking.find import ask_placement
    from ecomp.scheduler.placing.place import plan

    query = _query(do)
    backend = ask_placement(do.config.placement, query, do.slow)
    project = do.options.project or do.config.project_id
    order = _wanted(do, Order(new_uuid(os.urandom(16)), project_id=project, group=do.options.membership), query)
    try:
        ranked = plan(do.store, backend, order, random.Random())
    except NoCapacity as error:
        return _no_capacity(do, error, backend, query)
    do.show(as_plan(ranked))
    placed = sum(compute.instances for compute in ranked)
    if placed < order.count:
        do.out.say(f'{placed} of {order.count} would be placed: there is no room, or no quota, for more')
    return 0


def _wanted(do: Context, order: Order, query: str) -> SetOrder:
    count = do.options.size or 1
    options = {'weigh': do.options.weigh or SPREAD, 'minimum': do.options.min or count}
    return SetOrder(**order.parts(query=query, count=count, **options))


def _query(do: Context) -> str:
    """Combine the query, --flavor and --on; raise UsageError, NotFound or Conflict if invalid."""
    from ecomp.model.query import check_query

    query, flavor, on = do.words[0], do.options.flavor, do.options.on
    with refuse_as_usage('the query'):
        check_query(query, needs_resources=flavor is None, on=on is not None)
    if flavor is not None:
        from ecomp.scheduler.operating.sharing import with_flavor

        query = with_flavor(do.config, lambda: do.store, flavor, query)
        _check_whole(flavor, query)
    if on is not None:
        from ecomp.model.query import on_one

        query = on_one(query, do.compute(on))
    return query


def _check_whole(flavor: str, query: str) -> None:
    """Raise UsageError, not "no capacity", if flavor and query lack what every guest needs."""
    from ecomp.model.query import Amount, Unexplained, parse

    try:
        amounts = {part.name: part.amount for part in parse(query) if isinstance(part, Amount)}
    except Unexplained:
        return  # placement's own answer is checked later
    lacking = missing(amounts)
    if lacking:
        advice = f"add 'resources={','.join(f'{name}:…' for name in lacking)}'"
        raise UsageError(f'flavor {flavor} asks for no {", ".join(lacking)}, which a guest needs: {advice}')


def who(order: Order) -> dict[str, object]:
    """Return the owner of an attempt, as etcd stores it: host, pid and the time of the request."""
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'since': order.stages['requested']}


def _as_document(do: Context, value: object) -> str:
    from ecomp.cli.tables import document

    return document(value, do.form)


def _remarks(do: Context, wanted: SetOrder, delivered: Mapping[str, DeliveryOutcome]) -> Iterator[str]:
    repeated = [instance for instance, outcome in delivered.items() if outcome.again]
    yield from (f'{name} was requested before: nothing is changed' for name in repeated)
    if not repeated and len(delivered) < wanted.count:
        yield f'{len(delivered)} of {wanted.count} are placed: there is no room, or no quota, for more'
    memory = re.search(r'\bMEMORY_MB:(\d+)', wanted.query or '')
    if memory and int(memory[1]) < LEAST_MEMORY_MB:
        yield f'{memory[0]}: a cloud image does not boot in less than {LEAST_MEMORY_MB} MiB'
    if sys.stderr.isatty() and do.form == TABLE:  # for people; scripts use uuids
        yield from _hosts_of(wanted, delivered, do.name_computes())


def _hosts_of(wanted: SetOrder, delivered: Mapping[str, DeliveryOutcome], known: Naming) -> list[str]:
    names_by_host: dict[str, list[str]] = {}
    for instance, outcome in delivered.items():
        if known.host(outcome.compute) is not None:
            names_by_host.setdefault(known.called(outcome.compute), []).append(wanted.instances[instance] or instance)
    lines = []
    for host, names in names_by_host.items():
        subject = ', '.join(names) if wanted.name is not None or len(names) == 1 else f'{len(names)} of them'
        lines.append(f'{subject} {"is" if len(names) == 1 else "are"} on {host}')
    return lines


def _no_capacity(do: Context, error: NoCapacity, backend: Backend, query: str, spent: int = 0) -> int:
    """Report that there is no capacity and what each compute lacks, and return the exit code.

    `used_calls` is how many calls to placement a sample may have cost. Raises NotFound if --on is a uuid of no compute:
    that is checked only here, so that a successful create does not wait for it.
    """
    on = do.options.on
    if on is not None:
        from ecomp.scheduler.looking.hosts import check_there

        with suppress(Unreachable):
            check_there(do.computes, lambda: backend.result()[0], on)

    def reasons(say: Callable[[str], None]) -> None:
        from ecomp.scheduler.placing.explain import CALLS, tell

        candidates = error.taken if isinstance(error, TooFew) else ()
        tell(do.store, backend, query, do.options.membership, candidates, on, say, CALLS - spent)

    return _refused(do, error, None if isinstance(error, OverQuota) else reasons)


def _refused(do: Context, error: NoCapacity, reasons: Callable[[Callable[[str], None]], None] | None = None) -> int:
    """Print the refusal, then the reasons, which may take a while; return the exit code."""
    with suppress(OSError):  # run() flushes again and reports the error
        if do.form == TABLE:
            do.out.put('NO ALLOCATIONS LEFT')
    do.out.say(str(error))
    details: list[str] = []

    def say(line: str) -> None:
        do.out.say(line)
        details.append(line)

    if reasons is not None:
        reasons(say)
    if do.form in (JSON, YAML):
        do.out.put(_as_document(do, {'refused': {'reason': str(error), 'details': details}}))
    return error.exit_code


# Files for a new guest, named by the user; no message quotes their content


def _read_guest_files(do: Context) -> tuple[tuple[str, ...] | None, bytes | None]:
    """Read ssh keys and user-data, None for mdserver.conf's; UsageError for an invalid file."""
    typed_keys, typed_data = do.options.ssh_key, do.options.user_data
    key_files: Sequence[str | Path] = do.config.ssh_keys if typed_keys is None else typed_keys
    data_file = do.config.user_data if typed_data is None else typed_data
    if [*key_files, data_file].count(STDIN) > 1:
        raise UsageError('--ssh-key, --user-data: standard input can be read once: name - for one of them alone')
    ssh_keys = read_ssh_keys(key_files) if key_files else None
    return ssh_keys, None if data_file is None else read_user_data(data_file, do.out.say)


def read_user_data(path: str | Path, tell: Callable[[str], None]) -> bytes:
    """Read user-data from a file, or from standard input for `-`; UsageError names the file.

    `warn` gets a line if cloud-init would ignore the data, which other programs in guests may use.
    """
    label = f'user-data {printable(str(path), 200)}'
    data = _read_file(label, path, USER_DATA_LIMIT, 'have the guest fetch the rest, or compress it with gzip')
    with refuse_as_usage(label):
        check_user_data(data)
    unpacked_data = unpacked(data)
    if unpacked_data is None:
        tell(f'{label}: is gzip, and broken, so cloud-init passes over it')
    elif looks_unknown(unpacked_data):
        tell(f'{label}: does not begin with #cloud-config, #! or a MIME header, so cloud-init passes over it')
    elif unpacked_data.lstrip().split(b'\n', 1)[0].rstrip().lower() == CLOUD_CONFIG:
        from ecomp.yaml_file import why_no_mapping  # needed only with cloud-config

        if problem := why_no_mapping(unpacked_data.decode(errors='replace')):
            tell(f'{label}: begins with #cloud-config, but {problem}, so cloud-init passes over it')
    return data


def read_ssh_keys(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Read the public keys of all files without duplicates; UsageError names file and line."""
    unique_keys: dict[str, None] = {}
    for path in paths:
        label = f'ssh keys {printable(str(path), 200)}'
        data = _read_file(label, path, KEYS_LIMIT, 'name files of a few public keys')
        with refuse_as_usage(label):
            unique_keys.update(dict.fromkeys(public_keys(data)))
    size = len(dump(list(unique_keys)))
    if size > KEYS_LIMIT:
        raise UsageError(f'ssh keys: have {size} bytes together, and {KEYS_LIMIT} is the limit: name fewer')
    return tuple(unique_keys)


def _read_file(what: str, path: str | Path, limit: int, cure: str) -> bytes:
    try:
        with open(0 if path == STDIN else path, 'rb', closefd=path != STDIN) as file:
            data = file.read(limit + 1)
            status = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f'{what}: cannot be read: {reason}') from error
    if len(data) > limit:
        size = status.st_size if stat.S_ISREG(status.st_mode) else f'more than {limit}'
        raise UsageError(f'{what}: has {size} bytes, and {limit} ({limit // 1024} KiB) is the limit: {cure}')
    return data


# ~/.cache/ecomp/large-<etcd's endpoints> exists if the cluster was large when it was last seen: then a create asks
# about a sample of computes, else about all. Both give correct results: a wrong memory costs time once, and a failure
# to read or write it is ignored. Asking etcd instead would delay the query to placement, which would no longer overlap
# with loading h2: with 10 computes a claim of 164 ms took 17 to 23 ms longer.


def is_large(etcd: EtcdConfig) -> bool:
    """Return True if the cluster had more than LARGE_CLUSTER_SIZE computes when last seen."""
    with suppress(OSError, RuntimeError):
        return _path(etcd).exists()
    return False


def remember(etcd: EtcdConfig, computes: int) -> None:
    with suppress(OSError, RuntimeError):
        path, large = _path(etcd), computes > LARGE
        if path.exists() == large:
            return
        if large:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
        else:
            path.unlink()


def _path(etcd: EtcdConfig) -> Path:
    name = 'large-' + ','.join(etcd.endpoints).replace('/', '_')
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp' / name


def _check(name: str, words: Sequence[str], options: Options) -> None:
    if not words[0] and options.flavor is None:
        raise UsageError(f'{name}: give a placement query, in quotes, or a --flavor; --help shows all')
    count = 1 if options.size is None else options.size
    limit = LARGEST_SET if options.name is None else LARGEST_NAMED_SET
    if not 1 <= count <= limit:
        suffix = '' if options.name is None else ' with names'
        raise UsageError(f'--count: 1 to {limit}{suffix}, which one transaction of etcd takes')
    if options.min is not None and options.size is None:
        raise UsageError('--min goes with --count, of which it is the least')
    if options.min is not None and not 1 <= options.min <= count:
        raise UsageError(f'--min: 1 to {count}, the --count')
    if options.queue:
        _check_queue(words, options)
    if options.name is not None:
        with refuse_as_usage('--name'):
            check_name(options.name)
            check_name(f'{options.name}-{count}' if count > 1 else options.name)


def _check_queue(words: Sequence[str], options: Options) -> None:
    if options.flavor is None:
        raise UsageError('--queue: give a --flavor: each flavor has a queue of its own')
    if words[0]:
        raise UsageError('--queue: a flavor asks for what it says, and takes no query on top')
    for option, value in (('on', options.on), ('weigh', options.weigh), ('count', options.size), ('min', options.min)):
        if value is not None:
            raise UsageError(f'--{option} does not go with --queue: who takes it is not for eschedule to say')


_TIMEOUT = (
    'how long to wait in all once it is placed, or queued; then the exit code is 6, and what was begun goes on. '
    f'Without: {PATIENCE:.0f}'
)
# Options of create that `plan` accepts and ignores, so that the same command line works.
_IDLE = {
    **dict.fromkeys(('name', 'uuid', 'ssh_key', 'user_data', 'timeout'), 'decides nothing here'),
    'wait': 'with =STAGE or without: decides nothing here',
}

# fmt: off
COMMANDS: Sequence[Command] = (
    Command(CREATE, "'resources=…' [IMAGE_URL]", 'place a new instance, or several with --count',
            'Place a new instance on a compute that has room for it. The word `create` may stand before the query. '
            'The query is for placement, in quotes, and is handed on to it as it is: '
            'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256 (disk in GiB, memory in MiB), and perhaps &required=TRAIT '
            'and what else placement takes. IMAGE_URL is the disk image, http:// or '
            "https://; #sha256=DIGITS behind it takes no other bytes; without it, schedule.yaml's. It prints NOTIFIED "
            "TARGET, the compute's uuid, OF INSTANCE and the instance's, once the compute is asked for it; or NO "
            'ALLOCATIONS LEFT, and says on stderr what each compute lacks.',
            query_and_image, _create,
            {**plain('name uuid ssh_key user_data flavor queue size min on weigh group policy strictness project wait '
                     'format'), 'timeout': _TIMEOUT}, (3, 4, 5, 6), check=_check,
            example="eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256' --name web1 --wait"),
    Command('plan', "plan 'resources=…'", 'which computes would be tried; nothing is claimed',
            'Say what the same command without `plan` would do now: which computes would be tried, in which order and '
            'why, and how many instances each would get. Nothing is claimed, and nothing is written.',
            planned, _plan,
            {**plain('size min flavor weigh on project group policy strictness'), **_IDLE, **LISTED},
            (3, 4, 5), check=_check, example="eschedule plan 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256' --count 3"),
)
