"""Commands for new instances: `eschedule 'resources=…'`, its --queue, and its --dry-run."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecomp import errors
from ecomp.cli import options as cli_options
from ecomp.cli.command import CREATE, LISTING_OPTIONS, Command, Context, select_options
from ecomp.cli.input import STDIN, describe_owner, read_ssh_keys, read_user_data, require_guest_classes, resolve_image
from ecomp.cli.terminal import make_timestamp
from ecomp.conf import EtcdConfig
from ecomp.model.choose import SPREAD
from ecomp.model.keys import make_uuid
from ecomp.model.order import USER_TEXTS, Order, SetOrder

if TYPE_CHECKING:
    from ecomp.model.host import ComputeNames
    from ecomp.scheduler.placing.claim import DeliveryOutcome
    from ecomp.scheduler.placing.offer import Backend

# MiB below which no cloud image boots; an order of less gets a warning.
MIN_MEMORY_MB = 64
# Printed for each placed instance; the text of 2019.
NOTIFIED_MESSAGE = 'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}'
QUEUED_MESSAGE = 'QUEUED INSTANCE {instance}'
# Above this number of computes a create asks about a sample first. Below it sampling does not pay: placement answers
# about 100 nearly as fast as about 1, and facts are soon stale (8 requesters: 1.4 queries a create, worse balance).
LARGE_CLUSTER_SIZE = 256
NewInstance = dict[str, Any]


def _create(ctx: Context) -> int:
    with cli_options.convert_to_usage_error():
        image = resolve_image(ctx.config, ctx.words[1] if len(ctx.words) > 1 else ctx.config.image)
    if ctx.options.dry_run:
        return _print_plan(ctx)
    ssh_keys, user_data = _read_guest_files(ctx)
    order = Order(
        ctx.options.uuid or make_uuid(os.urandom(16)),
        image=image,
        user_id=ctx.config.user_id,
        project_id=ctx.options.project or ctx.config.project_id,
        stages={'requested': make_timestamp()},
        ssh_keys=ssh_keys,
        user_data=user_data,
        group=ctx.options.membership,
        **{name: getattr(ctx.options, name) for name in USER_TEXTS},
    )
    try:
        return (_enqueue if ctx.options.queue else _place)(ctx, order)
    except errors.UnknownOutcome as error:
        advice = f'. Try: the same command with --uuid {order.instance}'
        raise type(error)(errors.put_before_fix(str(error), advice), error.backend) from error


def _place(ctx: Context, order: Order) -> int:
    # Imported late, here and below: http.client and h2 load slowly, so placement is queried while h2 loads.
    from ecomp.scheduler.placing.offer import ask_placement

    query, resume = _build_query(ctx), ctx.options.uuid is not None
    may_sample = not resume and not ctx.options.size and is_large_cluster(ctx.config.etcd)
    sample_above = LARGE_CLUSTER_SIZE if may_sample else None
    backend = ask_placement(ctx.config.placement, query if sample_above is None else None, ctx.slow_notice)
    ctx.connect()

    from ecomp.scheduler.placing.create import create
    from ecomp.scheduler.placing.session import Scheduler

    remember_count = partial(remember_cluster_size, ctx.config.etcd)
    instance, set_order = order.instance, _make_set_order(ctx, order, query)
    advice = f'Try: the same command with --uuid {instance}'
    owner = describe_owner(order.stages['requested'])
    scheduler = Scheduler(ctx.store, backend.result, owner, random.Random(), make_timestamp)
    try:
        outcomes = create(scheduler, set_order, resume, sample_above, remember_count)
    except errors.NoCapacity as error:
        return _report_no_capacity(ctx, error, backend, query)
    except KeyboardInterrupt:
        subject = f'instance {instance}' if set_order.count == 1 else 'the instances'
        hint = f'Try: {ctx.command_prefix} {instance}' if set_order.count == 1 else advice
        ctx.out.say(f'interrupted: {subject} may have been placed. {hint}')
        return errors.EcompError.exit_code
    rows: list[NewInstance] = [
        {'instance': uuid, 'compute': outcome.compute, 'host': None, 'name': set_order.instances[uuid]}
        for uuid, outcome in outcomes.items()
    ]
    texts = [f'instance {uuid} was placed on {outcome.compute}' for uuid, outcome in outcomes.items()]
    summary = f'{len(texts)} instances were placed (the same command with --uuid {instance} lists them)'
    remarks = partial(_make_remarks, ctx, set_order, outcomes)
    return _report_and_wait(ctx, rows, remarks, texts[0] if set_order.count == 1 else summary)


def _report_and_wait(
    ctx: Context, instances: Sequence[NewInstance], remarks: Callable[[], Iterable[str]], output_error_prefix: str = ''
) -> int:
    is_put = False
    placed = {row['instance']: row.get('compute', '') for row in instances}
    try:
        # For a table host names are read after the line is printed.
        for row in instances if ctx.form != cli_options.TABLE and any(placed.values()) else ():
            row['host'] = ctx.name_computes().find_hostname(row['compute'])
        if ctx.form == cli_options.TABLE or ctx.options.wait is None:
            is_put = True
            _print_instances(ctx, instances, output_error_prefix)
        for line in remarks():
            ctx.out.say(line)
        ctx.display_names |= {row['instance']: row['name'] for row in instances if row['name']}
        ctx.close()
        if ctx.options.wait is None:
            return 0
        from ecomp.cli.waiting import wait_for_new  # needed only with --wait

        outcomes = wait_for_new(ctx, placed)
        if ctx.form != cli_options.TABLE:
            ends = ({key: result[key] for key in ('state', 'address', 'error')} for result in outcomes.results.values())
            ctx.show_document([{**start, **end} for start, end in zip(instances, ends, strict=True)], is_array=True)
        return outcomes.exit_code
    except KeyboardInterrupt:
        if not is_put:
            _print_instances(ctx, instances, output_error_prefix)  # the reader learns the uuid from nothing else
        ctx.out.say(f'interrupted; the operation continues. Try: {" ".join([ctx.command_prefix, "wait", *placed])}')
        return errors.StillGoing.exit_code


def _print_instances(ctx: Context, instances: Sequence[NewInstance], output_error_prefix: str) -> None:
    lines = [(NOTIFIED_MESSAGE if row.get('compute') else QUEUED_MESSAGE).format(**row) for row in instances]
    try:
        ctx.show_document(instances, '\n'.join(lines), is_array=True)
    except OSError as error:
        if not output_error_prefix:
            raise
        raise errors.EcompError(f'{output_error_prefix}, but stdout cannot be written: {error.strerror}') from error


def _enqueue(ctx: Context, order: Order) -> int:
    from ecomp.model.allocation import list_missing_classes
    from ecomp.model.queue import QueueEntry
    from ecomp.model.user_data import SharedUserData
    from ecomp.scheduler.operations.sharing import load_flavor
    from ecomp.scheduler.placing.enqueue import enqueue, has_taker
    from ecomp.scheduler.queries.find import find

    instance, shared = order.instance, None if order.user_data is None else SharedUserData.from_bytes(order.user_data)
    hashed = {'user_data': None, 'user_data_sha256': shared.sha256 if shared else None}
    try:
        with cli_options.convert_to_usage_error():
            flavor, revision = load_flavor(ctx.store, ctx.options.flavor or '')
        if lacking := list_missing_classes(flavor.resources):
            raise errors.UsageError(f'flavor {flavor.name} lacks {", ".join(lacking)}, which every guest needs')
        entry = QueueEntry(flavor=flavor, **order.copy_fields(**hashed))
        owner = describe_owner(order.stages['requested'])
        is_new = enqueue(ctx.store, entry, revision, shared, owner, ctx.options.uuid is not None)
        no_taker = None
        if is_new:
            with suppress(errors.EcompError):  # the request is queued even if the computes are unknown
                no_taker = None if has_taker(ctx.store) else ctx.computes.no_taker_reason
        # A compute may have taken an instance that was requested before.
        found_entries = None if is_new else find(ctx.store, instance)
    except errors.NoCapacity as error:
        return report_refusal(ctx, error)
    except KeyboardInterrupt:
        ctx.out.say(f'interrupted: instance {instance} may have been queued. Try: {ctx.command_prefix} {instance}')
        return errors.EcompError.exit_code
    finally:
        ctx.close()
    compute = found_entries.record.compute if found_entries is not None else ''
    place = {'compute': compute, 'host': None} if compute else {'flavor': flavor.name}

    def make_remarks() -> Iterator[str]:
        if compute:
            ctx.name_computes()  # messages of the wait then use host names
        if not is_new:
            yield f'{instance} was requested before: this command changed nothing'
        elif no_taker is not None:
            yield f'{ctx.options.name or instance} waits in a queue, but {no_taker}'

    return _report_and_wait(ctx, [{'instance': instance, **place, 'name': ctx.options.name}], make_remarks)


def _print_plan(ctx: Context) -> int:
    from ecomp.cli.operators import make_plan_listing
    from ecomp.scheduler.placing.create import plan
    from ecomp.scheduler.placing.offer import ask_placement

    query = _build_query(ctx)
    backend = ask_placement(ctx.config.placement, query, ctx.slow_notice)
    project = ctx.options.project or ctx.config.project_id
    single = Order(make_uuid(os.urandom(16)), project_id=project, group=ctx.options.membership)
    order = _make_set_order(ctx, single, query)
    try:
        ranked = plan(ctx.store, backend, order, random.Random())
    except errors.NoCapacity as error:
        return _report_no_capacity(ctx, error, backend, query)
    ctx.show(make_plan_listing(ranked))
    placed = sum(compute.instance_count for compute in ranked)
    if placed < order.count:
        ctx.out.say(f'{placed} of {order.count} instances would be placed: there is no room or quota for more')
    return 0


def _make_set_order(ctx: Context, order: Order, query: str) -> SetOrder:
    count = ctx.options.size or 1
    options = {'weigh': ctx.options.weigh or SPREAD, 'minimum': ctx.options.min or count}
    return SetOrder(**order.copy_fields(query=query, count=count, **options))


def _build_query(ctx: Context) -> str:
    from ecomp.model.query import check_query, resolve_trees

    query, flavor, on = ctx.words[0], ctx.options.flavor, ctx.options.on
    with cli_options.convert_to_usage_error('the query'):
        check_query(query, needs_resources=flavor is None, has_on_option=on is not None)
    query = resolve_trees(query, ctx.resolve_compute)
    if flavor is not None:
        from ecomp.model.flavor import merge_query
        from ecomp.scheduler.operations.sharing import load_flavor

        with cli_options.convert_to_usage_error():
            query = merge_query(load_flavor(ctx.store, flavor)[0], query)
        require_guest_classes(flavor, query)
    if on is not None:
        from ecomp.model.query import restrict_to_compute

        query = restrict_to_compute(query, ctx.resolve_compute(on))
    return query


def _make_remarks(ctx: Context, set_order: SetOrder, outcomes: Mapping[str, DeliveryOutcome]) -> Iterator[str]:
    repeated = [instance for instance, outcome in outcomes.items() if outcome.is_repeated]
    yield from (f'{name} was requested before: this command changed nothing' for name in repeated)
    if not repeated and len(outcomes) < set_order.count:
        yield f'only {len(outcomes)} of {set_order.count} instances were placed: there is no room or quota for more'
    memory = re.search(r'\bMEMORY_MB:(\d+)', set_order.query or '')
    if memory and int(memory[1]) < MIN_MEMORY_MB:
        yield f'{memory[0]}: a cloud image needs at least {MIN_MEMORY_MB} MiB to boot'
    if sys.stderr.isatty() and ctx.form == cli_options.TABLE:  # for people; scripts use uuids
        yield from _describe_hosts(set_order, outcomes, ctx.name_computes())


def _describe_hosts(set_order: SetOrder, outcomes: Mapping[str, DeliveryOutcome], naming: ComputeNames) -> list[str]:
    names_by_host: dict[str, list[str]] = {}
    for instance, outcome in outcomes.items():
        if naming.find_hostname(outcome.compute) is not None:
            name = set_order.instances[instance] or instance
            names_by_host.setdefault(naming.format_name(outcome.compute), []).append(name)
    lines = []
    for host, names in names_by_host.items():
        subject = ', '.join(names) if set_order.name is not None or len(names) == 1 else f'{len(names)} instances'
        lines.append(f'{subject} {"is" if len(names) == 1 else "are"} on {host}')
    return lines


def _report_no_capacity(ctx: Context, error: errors.NoCapacity, backend: Backend, query: str) -> int:
    on = ctx.options.on
    if on is not None:
        from ecomp.scheduler.queries.computes import require_compute

        # Checked only here, so that a successful create does not wait for it.
        with suppress(errors.Unreachable):
            require_compute(ctx.computes, lambda: backend.result()[0], on)

    def report_reasons(say: Callable[[str], None]) -> None:
        from ecomp.scheduler.placing.explain import Refusal, report_reasons

        refusal = Refusal(query, places=error.candidates if isinstance(error, errors.TooFew) else (), on=on)
        report_reasons(ctx.store, backend, refusal, ctx.options.membership, say)

    return report_refusal(ctx, error, None if isinstance(error, errors.OverQuota) else report_reasons)


def report_refusal(
    ctx: Context, error: errors.NoCapacity, report_reasons: Callable[[Callable[[str], None]], None] | None = None
) -> int:
    """Print the refusal, then the reasons, and return the exit code."""
    with suppress(OSError):  # run() flushes again and reports the error
        if ctx.form == cli_options.TABLE:
            ctx.out.put('NO ALLOCATIONS LEFT')
    ctx.out.say(str(error))
    details: list[str] = []

    def report_detail(line: str) -> None:
        ctx.out.say(line)
        details.append(line)

    if report_reasons is not None:
        report_reasons(report_detail)
    if ctx.form in (cli_options.JSON, cli_options.YAML):
        ctx.show_document([{'refused': {'reason': str(error), 'details': details}}])
    return error.exit_code


# The files are named by the user, and no message quotes their content.
def _read_guest_files(ctx: Context) -> tuple[tuple[str, ...] | None, bytes | None]:
    typed_keys, typed_data = ctx.options.ssh_key, ctx.options.user_data
    key_files: Sequence[str | Path] = ctx.config.ssh_keys if typed_keys is None else typed_keys
    data_file = ctx.config.user_data if typed_data is None else typed_data
    if [*key_files, data_file].count(STDIN) > 1:
        problem = '--ssh-key, --user-data: standard input can be read only once'
        raise errors.UsageError(f'{problem}. Fix: give - for one of them')
    ssh_keys = read_ssh_keys(key_files) if key_files else None
    return ssh_keys, None if data_file is None else read_user_data(data_file, ctx.out.say)


# ~/.cache/ecomp/large-<etcd's endpoints> exists if the cluster was large when last seen: then a create asks about a
# sample of computes, else about all. A wrong memory costs only time, so errors are ignored. Asking etcd instead would
# delay the query to placement, which overlaps with loading h2 (10 computes: a claim of 164 ms took 17 to 23 ms more).


def is_large_cluster(etcd: EtcdConfig) -> bool:
    """Return whether this user's last create found more than LARGE_CLUSTER_SIZE computes."""
    with suppress(OSError, RuntimeError):
        return _find_marker_path(etcd).exists()
    return False


def remember_cluster_size(etcd: EtcdConfig, compute_count: int) -> None:
    """Create or remove the file that marks a large cluster, and ignore errors of it."""
    with suppress(OSError, RuntimeError):
        path = _find_marker_path(etcd)
        if compute_count > LARGE_CLUSTER_SIZE:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
        else:
            path.unlink(missing_ok=True)


def _find_marker_path(etcd: EtcdConfig) -> Path:
    name = 'large-' + ','.join(etcd.endpoints).replace('/', '_')
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'ecomp' / name


def _find_problems(name: str, words: Sequence[str], options: cli_options.Options) -> Iterator[str]:
    if not words[0] and options.flavor is None:
        yield f'{name}: missing argument: a quoted placement query, or --flavor. Try: eschedule {name} --help'
    count = 1 if options.size is None else options.size
    limit = cli_options.MAX_SET_SIZE if options.name is None else cli_options.MAX_NAMED_SET_SIZE
    if not 1 <= count <= limit:
        suffix = '' if options.name is None else ' with --name'
        yield f'--count: must be 1 to {limit}{suffix}, because one etcd transaction cannot create more'
    if options.min is not None and options.size is None:
        yield '--min needs --count'
    if options.min is not None and not 1 <= options.min <= count:
        yield f'--min: must be 1 to {count}, the value of --count'
    if not options.dry_run:
        yield from cli_options.find_table_problems(options, 'needs --dry-run')
    if options.queue:
        yield from _find_queue_problems(words, options)
    for field, check_text in USER_TEXTS.items():
        if (value := getattr(options, field)) is not None:
            with cli_options.convert_to_usage_error(f'--{field}'):
                check_text(value)
                check_text(f'{value}-{count}' if field == 'name' and count > 1 else value)


def _find_queue_problems(words: Sequence[str], options: cli_options.Options) -> Iterator[str]:
    if options.flavor is None:
        yield '--queue needs --flavor: each flavor has its own queue'
    if options.dry_run:
        yield '--dry-run is not accepted with --queue: the computes decide which compute takes the request'
    if words[0]:
        yield 'a query is not accepted with --queue, because the flavor is the whole query'
    for option, value in (('on', options.on), ('weigh', options.weigh), ('count', options.size), ('min', options.min)):
        if value is not None:
            why = '--queue queues a single request, and the computes decide which compute takes it'
            yield f'--{option} is not accepted with --queue: {why}'


_TIMEOUT_HELP = (
    'wait at most this long after the instance was placed or queued, then exit with 6; the operation continues. '
    f'Default: {cli_options.DEFAULT_WAIT_SECONDS:.0f}'
)

# fmt: off
COMMANDS: Sequence[Command] = (
    Command(CREATE, "['resources=…'] [IMAGE_URL]", 'place a new instance, or several with --count',
            'Place a new instance on a compute that has room for it. The command name `create` is optional. The '
            'query, in quotes, is passed to placement unchanged: resources=VCPU:1,DISK_GB:1,MEMORY_MB:256 (disk in '
            'GiB, memory in MiB), optionally with &required=TRAIT and other parameters of placement. Without a query, '
            '--flavor is required. IMAGE_URL is the http:// or https:// URL of the disk image, or a name from '
            '`eschedule image`; if the URL ends with #sha256=DIGITS, an image with another digest is refused. '
            'Default: the image of schedule.yaml. Once etcd has the request for the chosen compute, the command '
            'prints `NOTIFIED TARGET, <compute>, OF INSTANCE <instance>`, with both uuids. If no compute has room, '
            'the command prints NO ALLOCATIONS LEFT, and stderr lists what each compute lacks. With --dry-run it '
            'prints which computes would be tried, in which order and why, and how many instances each would get.',
            cli_options.parse_query_and_image, _create,
            {**select_options(f'{" ".join(USER_TEXTS)} uuid ssh_key user_data flavor queue size min on weigh group '
                              'policy strictness project wait'), 'timeout': _TIMEOUT_HELP, **LISTING_OPTIONS,
             'dry_run': f'print what the command would do; change nothing. --{", --".join(USER_TEXTS)}, --uuid, '
             '--ssh-key, --user-data and --wait have no effect'}, (3, 4, 5, 6), find_problems=_find_problems,
            example="eschedule 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256' --name web1 --wait"),
)
