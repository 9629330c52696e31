"""Metrics: what is counted, the text format, ecompute's file, and the tables of `top`."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecomp import metrics
from ecomp.agent import process
from ecomp.agent.images.cache import measure_cache
from ecomp.agent.instance.records import observe_stages
from ecomp.agent.jobs import FailureLog, Loop
from ecomp.agent.process import METRICS, MetricsWriter
from ecomp.cli.terminal import Drawing, redraw
from ecomp.cli.top import make_guest_listing, make_host_listing
from ecomp.compute_conf import ComputeConfig, explain_unsafe_metrics
from ecomp.errors import EcompError, NotFound, UnknownOutcome, Unreachable
from ecomp.metrics import TALLY, Tally, make_text
from ecomp.model.audit import HostReport
from ecomp.model.finding import Finding
from ecomp.model.guest import BaseImage, GuestSpec, Usage
from ecomp.model.host import Computes
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE, BUILDING, STOPPED
from ecomp.model.usage import HOST, Measurement, add_rates, parse_answer
from ecomp.scheduler.operations.usage import Use
from ecomp.virt import domains
from ecomp.virt.domains import _read_usage, parse_usage
from ecomp.virt.fake import FakeHypervisor

VM = '1a5c0de0-0000-4000-8000-000000000001'
OTHER = '2a5c0de0-0000-4000-8000-000000000002'


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    fresh = Tally()
    for name in ('ecomp.agent.process', 'ecomp.agent.instance.records', 'ecomp.virt.domains'):
        monkeypatch.setattr(f'{name}.TALLY', fresh)
    return fresh


def test_text_has_types_and_labels_but_no_timestamps_and_no_created() -> None:
    families = {
        'ecomp_a': ('gauge', 'An amount.', 'host class'),
        'ecomp_b': ('counter', 'Some events.', 'stage'),
        'ecomp_c_seconds': ('histogram', 'A time.', 'stage'),
    }
    tally = Tally()
    tally.add('ecomp_b_total', 'a "quoted"\n\\stage é \ud800')
    tally.observe('ecomp_c_seconds', 'disk', 0.02)
    tally.observe('ecomp_c_seconds', 'disk', 1000.0)
    samples = {**tally.copy_samples(), 'ecomp_a': {('hv1', 'VCPU'): 4}, 'ecomp_stray': {(): 1}}
    assert make_text(families, samples).splitlines() == [
        '# HELP ecomp_a An amount.',
        '# TYPE ecomp_a gauge',
        'ecomp_a{class="VCPU",host="hv1"} 4.0',
        '# HELP ecomp_b_total Some events.',
        '# TYPE ecomp_b_total counter',
        'ecomp_b_total{stage="a \\"quoted\\"\\\\n\\\\stage é \\\\ud800"} 1.0',
        '# HELP ecomp_c_seconds A time.',
        '# TYPE ecomp_c_seconds histogram',
        *(
            f'ecomp_c_seconds_bucket{{le="{limit}",stage="disk"}} {count}'
            for limit, count in [(0.005, 0.0), *((limit, 1.0) for limit in metrics.BUCKETS_SECONDS[1:]), ('+Inf', 2.0)]
        ),
        'ecomp_c_seconds_count{stage="disk"} 2.0',
        'ecomp_c_seconds_sum{stage="disk"} 1000.02',
    ]


def test_names_that_look_alike_are_one_sample() -> None:
    """node_exporter refuses a file with two samples of the same labels."""
    text = make_text({'ecomp_a': ('gauge', 'A.', 'project')}, {'ecomp_a': {('a\n',): 1, ('a\\n',): 2}})
    assert text.splitlines()[2:] == ['ecomp_a{project="a\\\\n"} 2.0']


def test_counter_without_labels_begins_at_zero_and_others_are_absent() -> None:
    families = {'ecomp_a': ('counter', 'A.', ''), 'ecomp_b': ('counter', 'B.', 'stage'), 'ecomp_c': ('gauge', 'C.', '')}
    lines = make_text(families, {}).splitlines()
    assert [line for line in lines if not line.startswith('#')] == ['ecomp_a_total 0.0']


def test_negative_duration_counts_as_zero() -> None:
    tally = Tally()
    tally.observe('ecomp_c', 'disk', -5.0)
    samples = tally.copy_samples()
    assert samples['ecomp_c_bucket']['disk', '0.005'] == 1
    assert samples['ecomp_c_sum'] == {('disk',): 0.0}


@pytest.mark.parametrize(
    ('error', 'is_up'),
    [(None, True), (NotFound('no'), True), (Unreachable('no'), False), (UnknownOutcome('no'), False)],
)
def test_backend_is_down_only_if_the_last_call_was_not_answered(error: Exception | None, is_up: bool) -> None:
    tally = Tally()
    for last in (Unreachable('before'), error):
        try:
            with tally.measure('etcd'):
                if last is not None:
                    raise last
        except (NotFound, Unreachable):
            pass
    samples = tally.copy_samples()
    assert samples['ecomp_backend_up'] == {('etcd',): is_up}
    assert samples['ecomp_backend_call_duration_seconds_count'] == {('etcd',): 2}


# The configuration


PRIVATE_DIRECTORY = (
    'no metrics are written: HERE is not a directory to which only root can write. '
    'Fix: create it as root, writable by root only, or correct `metrics:` in compute.yaml'
)


@pytest.mark.parametrize(
    ('mode', 'owner', 'is_safe'),
    [(0o755, None, True), (0o700, None, True), (0o775, None, False), (0o1777, None, False), (0o755, 12345, False)],
)
def test_metrics_are_written_only_where_only_root_can_write(
    compute_config: Callable[[str | bytes], ComputeConfig], tmp_path: Path, mode: int, owner: int | None, is_safe: bool
) -> None:
    if owner is not None and os.geteuid() != 0:
        pytest.skip('only root can give a directory to another user')
    directory = tmp_path / 'node'
    directory.mkdir()
    directory.chmod(mode)
    if owner is not None:
        os.chown(directory, owner, owner)
    path = compute_config('metrics: node/ecompute.prom\n').metrics
    assert path == directory / 'ecompute.prom'
    problem = '' if is_safe else PRIVATE_DIRECTORY.replace('HERE', str(directory))
    assert str(explain_unsafe_metrics(path) or '') == problem


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can give a directory to another user')
def test_metrics_are_not_written_where_another_user_may_exchange_a_directory(tmp_path: Path) -> None:
    """Debian gives the parent of node_exporter's directory to the user prometheus."""
    stranger, parent, target = 12345, tmp_path / 'prometheus', tmp_path / 'of-root'
    (directory := parent / 'node-exporter').mkdir(parents=True)
    assert explain_unsafe_metrics(directory / 'ecompute.prom') is None
    for mode, owner, is_safe in ((0o755, stranger, False), (0o757, 0, False), (0o1777, 0, True), (0o755, 0, True)):
        parent.chmod(mode)
        os.chown(parent, owner, owner)
        problem = '' if is_safe else PRIVATE_DIRECTORY.replace('HERE', str(parent))
        assert str(explain_unsafe_metrics(directory / 'ecompute.prom') or '') == problem
    # A link of the other user leads to a directory of root.
    target.mkdir()
    directory.rmdir()
    directory.symlink_to(target)
    for owner in (stranger, 0):
        os.chown(directory, owner, owner, follow_symlinks=False)
        problem = PRIVATE_DIRECTORY.replace('HERE', str(directory))
        assert str(explain_unsafe_metrics(directory / 'ecompute.prom') or '') == problem


def test_directory_that_cannot_be_looked_at_is_a_problem_and_no_error(tmp_path: Path) -> None:
    directory = tmp_path / ('x' * 300)  # stat() fails as it does below a directory of another user
    assert str(explain_unsafe_metrics(directory / 'a.prom')) == PRIVATE_DIRECTORY.replace('HERE', str(directory))


# The stages


def make_record(**stages: str) -> Record:
    return Record(VM, compute=OTHER, state=BUILDING, stages=stages)


def test_each_new_stage_is_timed_from_the_one_before(tally: Tally) -> None:
    before = make_record(requested='2026-01-01T00:00:00.000Z', scheduled='2026-01-01T00:00:01.000Z')
    stages = {**before.stages, 'image': '2026-01-01T00:00:03.000Z', 'started': '2026-01-01T00:00:03.500Z'}
    observe_stages(before, make_record(**stages))
    observe_stages(make_record(**stages), make_record(**stages))
    assert tally.copy_samples()['ecomp_stage_duration_seconds_sum'] == {('image',): 2.0, ('started',): 0.5}


@pytest.mark.parametrize('time', ['yesterday', '2026-01-01T00:00:01.000', ''])
def test_malformed_time_of_a_stage_is_ignored(tally: Tally, time: str) -> None:
    """The first times are in the request, which anybody may have written."""
    observe_stages(make_record(scheduled=time), make_record(scheduled=time, image='2026-01-01T00:00:03.000Z'))
    observe_stages(None, make_record(scheduled='2026-01-01T00:00:01.000Z', image='2026-01-01T00:00:03.000Z'))
    assert tally.copy_samples() == {}


# What libvirt says

STATISTICS = {
    **{'vcpu.current': 2, 'vcpu.maximum': 2, 'vcpu.0.time': 1_500_000_000, 'vcpu.1.time': 500_000_000},
    **{'balloon.current': 262144, 'balloon.rss': 1000, 'block.count': 2, 'block.0.rd.bytes': 7},
    **{'block.0.wr.bytes': 8, 'block.1.rd.bytes': 100, 'block.1.wr.bytes': 0, 'cpu.time': 2_500_000_000},
}


def test_usage_is_the_sum_over_vcpus_and_disks() -> None:
    assert parse_usage(STATISTICS) == (2.0, 1_024_000, 107, 8)


def test_usage_of_an_emulated_guest_has_the_time_of_its_qemu() -> None:
    without_times = {name: value for name, value in STATISTICS.items() if not name.startswith(('vcpu.0.', 'vcpu.1.'))}
    assert parse_usage(without_times).vcpu_seconds_total == 2.5
    del without_times['cpu.time']
    assert parse_usage(without_times).vcpu_seconds_total is None


def test_frozen_qemu_delays_each_reader_once_and_blocks_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    thawed, calls = threading.Event(), list[int]()

    def read(_: object) -> dict[str, Usage]:
        calls.append(1)
        assert thawed.wait(20)
        return {}

    monkeypatch.setattr(domains, '_read_usage', read)
    monkeypatch.setattr(domains, 'Connection', lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(domains, 'QEMU_TIMEOUT_SECONDS', 0.05)
    frozen = domains.Domains(SimpleNamespace(uri='test:///default'))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(EcompError, match='may be frozen'):
            frozen.read_usage()
    assert len(calls) == 1
    thawed.set()
    monkeypatch.setattr(domains, 'QEMU_TIMEOUT_SECONDS', 20.0)
    assert frozen.read_usage() == frozen.read_usage() == {}
    assert len(calls) >= 2


def test_guest_that_libvirt_is_busy_with_is_left_out(tally: Tally) -> None:
    """Its counters would otherwise fall to 0, which Prometheus takes for a restart."""

    class Connection:
        def use(self, _: str) -> Any:
            return nullcontext(self)

        def getAllDomainStats(self, *_: int) -> list[tuple[Any, Mapping[str, int]]]:  # noqa: N802
            partial = {name: value for name, value in STATISTICS.items() if not name.startswith('block.1')}
            domain, busy = (SimpleNamespace(UUIDString=lambda name=name: name) for name in (VM, OTHER))
            return [(domain, STATISTICS), (busy, partial)]

    assert _read_usage(Connection()) == {VM: parse_usage(STATISTICS)}  # type: ignore[arg-type]
    assert tally.copy_samples()['ecomp_backend_up'] == {('libvirt',): True}


def test_image_cache_is_measured_with_downloads(tmp_path: Path) -> None:
    for name, size in (('base-1.qcow2', 10), ('base-2.raw', 20), ('base-3.part', 5), ('disk.qcow2', 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / '.bad-1').touch()
    assert measure_cache(tmp_path) == {'images': 2, 'bad_images': 1, 'bytes': 35}


# The file


class HypervisorWithImages(FakeHypervisor):
    images: Path | None = None

    def get_image_directory(self) -> Path | None:
        return self.images


@dataclass
class StubCompute:
    """What the writer reads of a compute."""

    records: dict[str, Record | None] = field(default_factory=dict)
    hypervisor: HypervisorWithImages = field(default_factory=HypervisorWithImages)
    failures: FailureLog = field(default_factory=FailureLog)
    retries: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failures.on_recovery = lambda: self.retries.append('now')

    @property
    def host(self) -> Any:
        return SimpleNamespace(hypervisor=self.hypervisor)

    @property
    def upkeep(self) -> Any:
        return SimpleNamespace(report=HostReport((Finding('disk-orphaned', VM, 'its disk'),)))

    @property
    def daemon(self) -> Any:
        return SimpleNamespace(read_only=False, planner=SimpleNamespace(failures=self.failures))

    @property
    def troubles(self) -> Any:
        return SimpleNamespace(reasons=())

    def list_records(self) -> Mapping[str, Record | None]:
        return self.records


@pytest.fixture
def compute() -> StubCompute:
    return StubCompute()


@pytest.fixture
def writer(tally: Tally, compute: StubCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetricsWriter:
    del tally
    monkeypatch.setattr(Loop, 'schedule', lambda *_: None)
    return MetricsWriter(tmp_path / 'ecompute.prom', compute)  # type: ignore[arg-type]


def read_samples(path: Path) -> dict[str, float]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith('#')]
    return {name: float(number) for name, _, number in (line.rpartition(' ') for line in lines)}


def make_active(name: str | None = None) -> Record:
    return Record(VM, compute=OTHER, state=ACTIVE, name=name)


def start_guest(hypervisor: FakeHypervisor, instance: str) -> None:
    spec = GuestSpec(instance, OTHER, 1, 256, None, BaseImage('', '', 0), 'qemu', ())
    hypervisor.create_disk(spec)
    hypervisor.start(spec)


def test_file_has_instances_guests_and_images_and_is_readable_by_all(
    writer: MetricsWriter, compute: StubCompute, tmp_path: Path
) -> None:
    compute.records = {VM: make_active('web1'), OTHER: None}
    compute.hypervisor.images = tmp_path / 'images'
    (tmp_path / 'images').mkdir()
    (tmp_path / 'images/base-1.raw').write_bytes(bytes(7))
    for instance in (VM, '3a5c0de0-0000-4000-8000-000000000003'):  # the second one is not of this compute
        start_guest(compute.hypervisor, instance)
    assert writer._run() > time.monotonic() + 10
    path = tmp_path / 'ecompute.prom'
    samples = read_samples(path)
    assert samples['ecomp_instances{state="active"}'] == samples['ecomp_instances{state="scheduled"}'] == 1
    assert samples['ecomp_instances{state="stopped"}'] == samples['ecomp_read_only'] == 0
    assert samples[f'ecomp_vm_info{{name="web1",vm="{VM}"}}'] == 1
    assert samples[f'ecomp_vm_resident_memory_bytes{{vm="{VM}"}}'] == 256 * 2**20
    assert samples['ecomp_build_failures_total{stage="image"}'] == samples['ecomp_worker_deaths_total'] == 0
    assert samples['ecomp_image_cache_bytes'] == 7
    assert samples['ecomp_findings{code="disk-orphaned"}'] == 1
    assert sum(name.startswith('ecomp_vm_disk_read_bytes_total') for name in samples) == 1
    assert path.stat().st_mode & 0o777 == 0o644
    assert not any(math.isnan(number) for number in samples.values())
    assert {each.name for each in tmp_path.iterdir()} == {'ecompute.prom', 'images'}


def test_unknown_use_of_a_guest_is_left_out(
    writer: MetricsWriter, compute: StubCompute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compute.records = {VM: make_active()}
    monkeypatch.setattr(compute.hypervisor, 'read_usage', lambda: {VM: Usage(None, 7)})
    writer._run()
    samples = read_samples(tmp_path / 'ecompute.prom')
    assert samples[f'ecomp_vm_resident_memory_bytes{{vm="{VM}"}}'] == 7
    assert not any(name.startswith('ecomp_vm_vcpu') for name in samples)


def test_file_in_place_of_the_directory_is_not_written_to(
    writer: MetricsWriter, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The directory is looked at each time, because it may be created after the start."""
    directory = tmp_path / 'node'
    writer._path = directory / 'a.prom'
    directory.touch()
    writer._run()
    assert PRIVATE_DIRECTORY.replace('HERE', str(directory)).split('. Fix')[0] in caplog.text
    directory.unlink()
    directory.mkdir(mode=0o755)
    writer._run()
    assert writer._path.exists()


def test_full_disk_is_logged_once_and_so_is_its_end(
    writer: MetricsWriter,
    compute: StubCompute,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(path: Path, *_: object) -> None:
        raise OSError(28, 'No space left on device', str(path))

    caplog.set_level(logging.INFO)
    write = process.write_durably
    monkeypatch.setattr(process, 'write_durably', fail)
    for _ in range(3):
        writer._run()
    monkeypatch.setattr(process, 'write_durably', write)
    for _ in range(2):
        writer._run()
    problem = f'metrics cannot be written to {tmp_path}/ecompute.prom: No space left on device'
    cure = '. Fix: make room there, or correct `metrics:` in compute.yaml'
    assert [line.getMessage() for line in caplog.records] == [
        f'{problem}; trying again until it works{cure}',
        f'this failure has ended: {problem}{cure}',
    ]
    assert compute.retries == []  # tasks of instances are not repeated sooner because of it


def test_silent_libvirt_leaves_the_other_metrics(
    writer: MetricsWriter,
    compute: StubCompute,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail() -> None:
        raise Unreachable('libvirt qemu:///system: the connection broke', 'libvirt qemu:///system')

    compute.records = {VM: make_active()}
    monkeypatch.setattr(compute.hypervisor, 'read_usage', fail)
    for _ in range(2):
        writer._run()
    samples = read_samples(tmp_path / 'ecompute.prom')
    assert samples['ecomp_instances{state="active"}'] == 1
    assert not any(name.startswith('ecomp_vm_vcpu') for name in samples)
    assert len(caplog.records) == 1
    monkeypatch.undo()
    writer._run()
    assert compute.retries == ['now']  # as if a plan had found libvirt to be back


def test_stop_removes_the_file_and_a_late_write_does_not_restore_it(writer: MetricsWriter, tmp_path: Path) -> None:
    writer._run()
    writer.stop()
    writer._run()
    writer.stop()
    assert list(tmp_path.iterdir()) == []


def test_stop_during_a_write_removes_the_file(
    writer: MetricsWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, may_end, write = threading.Event(), threading.Event(), process.write_durably

    def write_slowly(*arguments: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        write(*arguments)

    monkeypatch.setattr(process, 'write_durably', write_slowly)
    threads = [threading.Thread(target=work) for work in (writer._run, writer.stop)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_every_sample_has_a_family(writer: MetricsWriter, compute: StubCompute) -> None:
    """A sample without a row in METRICS would be left out silently."""
    compute.hypervisor.images = Path('/nonexistent')
    samples = {*writer.collect(), *TALLY.copy_samples()}
    suffixes = {kind: tuple(names) for kind, names in metrics.SAMPLES.items()}
    known = {name + suffix for name, (kind, _, _) in METRICS.items() for suffix in suffixes[kind]}
    assert samples - known == set()


# What hosts and guests use: rates from two measurements, and the tables of `eschedule top`.


HV1, HV2 = (f'c0000000-0000-4000-8000-00000000000{number}' for number in (1, 2))
WEB, DB, NEW = (f'{number}a5c0de0-0000-4000-8000-00000000000{number}' for number in (1, 2, 3))
COMPUTES = Computes(stored_hostnames={HV1: 'hv1', HV2: 'hv2'})


def make_measurement(seconds: float, cpu: float, **guests: Mapping[str, float]) -> Measurement:
    return {HOST: {'seconds': seconds, 'cpu_seconds_total': cpu}, **guests}


def test_rate_is_the_increase_of_a_counter_by_the_time_in_between() -> None:
    before = make_measurement(100, 50, web={'vcpu_seconds_total': 1, 'disk_read_bytes_total': 4096})
    used = {'vcpu_seconds_total': 2.5, 'disk_read_bytes_total': 4096, 'resident_memory_bytes': 7}
    after = add_rates(before, make_measurement(102, 53, web=used))
    assert after[HOST]['cpu_seconds_per_second'] == 1.5
    assert after['web'] | used == after['web']
    assert after['web']['vcpu_seconds_per_second'] == 0.75
    assert after['web']['disk_read_bytes_per_second'] == 0


INCOMPARABLE_MEASUREMENTS = {
    'first': {},
    'new guest': make_measurement(100, 50),
    'unknown': make_measurement(100, 50, web={}),
    'guest restarted': make_measurement(100, 50, web={'vcpu_seconds_total': 2.6}),
    'same time': make_measurement(102, 50, web={'vcpu_seconds_total': 1}),
    'host rebooted': make_measurement(9000, 50, web={'vcpu_seconds_total': 1}),
    'nearly the same time': make_measurement(102 - 1e-9, 50, web={'vcpu_seconds_total': 1}),
    'no time': {HOST: {}, 'web': {'vcpu_seconds_total': 1}},
}


@pytest.mark.parametrize('before', INCOMPARABLE_MEASUREMENTS.values(), ids=INCOMPARABLE_MEASUREMENTS)
def test_rate_without_two_comparable_values_is_unknown(before: Measurement) -> None:
    used = add_rates(before, make_measurement(102, 53, web={'vcpu_seconds_total': 2.5, 'resident_memory_bytes': 7}))
    assert 'vcpu_seconds_per_second' not in used['web']
    assert used['web']['resident_memory_bytes'] == 7


def test_use_of_a_silent_compute_is_empty() -> None:
    assert add_rates(make_measurement(100, 50), {}) == {}


def test_answer_is_parsed_without_malformed_amounts() -> None:
    amounts = {'a': 1, 'b': 2.5, 'c': None, 'd': True, 'e': -1, 'f': 2**64, 'g': '7', 'h': [1]}
    value = json.dumps({'version': 1, 'used': {HOST: amounts, WEB: 'x', DB: {}}}).encode()
    assert parse_answer(value) == {HOST: {'a': 1, 'b': 2.5}, WEB: {}, DB: {}}


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        ('{"error": "libvirt is\\u001b away"}', r'libvirt is\x1b away'),
        ('{}', 'its answer is malformed'),
        ('{"used": []}', 'its answer is malformed'),
        ('[]', 'expected a JSON object, not list'),
        (json.dumps({'error': 'x' * 9999}), 'x' * 500),
    ],
)
def test_malformed_answer_or_error_is_refused_with_a_reason(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f'^{re.escape(reason)}$'):
        parse_answer(value.encode())


def make_use(**used: Measurement) -> Use:
    return Use(COMPUTES, {HV1: used.get('hv1', {}), HV2: used.get('hv2', {})}, {})


def list_cells(listing: Any) -> list[list[Any]]:
    return [list(row.cells) for row in listing.rows]


RECORDS = [
    Record(WEB, compute=HV1, state=ACTIVE, name='web', resources={'MEMORY_MB': 512}),
    Record(DB, compute=HV1, state=ACTIVE, name='db', resources={'MEMORY_MB': 1024}),
    Record(NEW, compute=HV2, state=BUILDING, name='new', resources={'MEMORY_MB': 256}),
]
GUEST = {'resident_memory_bytes': 300 * 2**20, 'disk_read_bytes_per_second': 2048, 'disk_written_bytes_per_second': 0}


def test_host_that_does_not_answer_is_last_and_unknown() -> None:
    listing = make_host_listing(make_use(hv2={HOST: {'cpus': 4}}), RECORDS)
    assert list_cells(listing)[0] == ['hv1', None, None, None, None, None, None]
    listing = make_host_listing(make_use(hv2={HOST: {'cpu_seconds_per_second': 0}}), RECORDS)
    assert list_cells(listing)[1] == ['hv1', None, None, None, None, None, None]
    row: Any = listing.rows[1].value
    assert {name: value for name, value in row.items() if value is not None} == {'compute': HV1, 'host': 'hv1'}


def test_active_guest_is_listed_without_an_answer_and_others_only_while_they_run() -> None:
    assert list_cells(make_guest_listing(make_use(), RECORDS)) == [
        ['db', None, None, None, None, 'hv1', DB],
        ['web', None, None, None, None, 'hv1', WEB],
    ]
    running = make_guest_listing(make_use(hv2={HOST: {}, NEW: GUEST}), RECORDS[2:])
    assert list_cells(running) == [['new', None, '300/256', 2, 0, 'hv2', NEW]]
    assert make_guest_listing(make_use(), [Record(WEB, compute=HV1, state=STOPPED)]).rows == []
    elsewhere = Record(WEB, compute=DB, state=ACTIVE)
    assert make_guest_listing(make_use(), [elsewhere]).rows == []


def test_amounts_of_a_guest_count_only_if_its_own_compute_reports_them() -> None:
    use = make_use(hv2={HOST: {}, WEB: GUEST})
    assert list_cells(make_guest_listing(use, RECORDS[:1])) == [['web', None, None, None, None, 'hv1', WEB]]


def test_table_stays_while_etcd_does_not_answer_and_is_drawn_again_afterwards() -> None:
    results: list[Any] = [Drawing('first'), Unreachable('etcd is away'), Drawing('second'), KeyboardInterrupt()]
    drawn: list[str] = []

    def make_drawing() -> Drawing:
        result = results.pop(0)
        if isinstance(result, Drawing):
            return result
        raise result

    redraw(make_drawing, drawn.append)
    assert [text.splitlines()[0] for text in drawn] == ['first', 'first', 'second']
    assert ['etcd is away' in text for text in drawn] == [False, True, False]
