"""Metrics: what is counted, the text format, and the file that ecompute writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ecomp import metrics
from ecomp.errors import NotFound, UnknownOutcome, Unreachable
from ecomp.metrics import Tally, make_text
from ecomp.virt.domains import Domains, parse_usage

VM = '1a5c0de0-0000-4000-8000-000000000001'
OTHER = '2a5c0de0-0000-4000-8000-000000000002'


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """A tally in place of the process's, where the functions under test find it."""
    fresh = Tally()
    for name in ('ecomp.virt.domains',):
        monkeypatch.setattr(f'{name}.TALLY', fresh)
    return fresh


# The text


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


# What libvirt says

STATISTICS = {
    **{'vcpu.current': 2, 'vcpu.maximum': 2, 'vcpu.0.time': 1_500_000_000, 'vcpu.1.time': 500_000_000},
    **{'balloon.current': 262144, 'balloon.rss': 1000, 'block.count': 2, 'block.0.rd.bytes': 7},
    **{'block.0.wr.bytes': 8, 'block.1.rd.bytes': 100, 'block.1.wr.bytes': 0},
}


def test_usage_is_the_sum_over_vcpus_and_disks() -> None:
    assert parse_usage(STATISTICS) == (2.0, 1_024_000, 107, 8)
    without_times = {name: value for name, value in STATISTICS.items() if not name.endswith('.time')}
    assert parse_usage(without_times).vcpu_seconds_total == 0


def test_guest_that_libvirt_is_busy_with_is_left_out(tally: Tally) -> None:
    """Its counters would otherwise fall to 0, which Prometheus takes for a restart."""

    class Connection:
        def use(self, _: str) -> Any:
            return nullcontext(self)

        def getAllDomainStats(self, *_: int) -> list[tuple[Any, Mapping[str, int]]]:  # noqa: N802
            partial = {name: value for name, value in STATISTICS.items() if not name.startswith('block.1')}
            domain, busy = (SimpleNamespace(UUIDString=lambda name=name: name) for name in (VM, OTHER))
            return [(domain, STATISTICS), (busy, partial)]

    assert Domains(Connection()).read_usage() == {VM: parse_usage(STATISTICS)}  # type: ignore[arg-type]
    assert tally.copy_samples()['ecomp_backend_up'] == {('libvirt',): True}
