"""Warnings of `eschedule audit`, `eschedule doctor` and `ecompute --check`, and `ignore_warnings`."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ecomp.agent import checking
from ecomp.cli.command import Context
from ecomp.cli.commands import COMMANDS, parse
from ecomp.cli.terminal import Terminal
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import ScheduleConfig
from ecomp.model.audit import audit
from ecomp.model.health import Backends, LibvirtFacts, MachineFacts, StateDirectory, get_exit_code
from ecomp.model.planes import AuditIndex
from ecomp.scheduler.operations.audit import Report
from tests.unit.audit_world import ONE, WorldBuilder

OLD_ETCD = Backends(
    etcd='etcd at ds1:2379', placement='placement at ds1', config_path=None, now=datetime(2026, 11, 23, tzinfo=UTC),
    etcd_version='3.4.23', placement_version='1.39',
)  # fmt: skip
OLD_LIBVIRT = MachineFacts(
    state=StateDirectory('/var/lib/ecompute', 0, 0, ONE, True, 50 * 1024**3),
    libvirt=LibvirtFacts(version=8_000_000, library_version=8_000_000),
)


class Answer:
    """What a command of eschedule prints and returns."""

    def __init__(self, config: ScheduleConfig, *words: str) -> None:
        data: list[str] = []
        self.messages: list[str] = []
        context = Context(Terminal(data.append, data.append, self.messages.append), config, parse(words))
        self.code = COMMANDS[context.name].run(context)
        self.data = '\n'.join(data)


@pytest.fixture
def opened(world: WorldBuilder, monkeypatch: pytest.MonkeyPatch) -> WorldBuilder:
    """A world with open DHCP, which audits read."""
    world.digests[ONE] = replace(world.digests[ONE], open_dhcp={'default': ''})

    def read_report(*_: object) -> Report:
        planes = world.build_planes()
        return Report(audit(planes), 'all were compared', AuditIndex(planes), ({}, {}), frozenset())

    monkeypatch.setattr('ecomp.scheduler.operations.audit.audit', read_report)
    monkeypatch.setattr('ecomp.scheduler.queries.hosts.read_names_by_instance', lambda _: {})
    return world


def test_audit_with_a_warning_alone_exits_with_0(opened: WorldBuilder) -> None:
    assert opened.digests[ONE].open_dhcp
    answer = Answer(ScheduleConfig(), 'audit')
    assert (answer.code, answer.messages[-1]) == (0, 'all were compared: no findings, 1 warning')
    assert 'dhcp-open' in answer.data
    assert 'warning: the DHCP of network default' in answer.data
    (finding,) = json.loads(Answer(ScheduleConfig(), 'audit', '-f', 'json').data)
    assert (finding['code'], finding['level']) == ('dhcp-open', 'warning')
    assert finding['sentence'].startswith('the DHCP of network default'), 'only people need the mark'


def test_audit_does_not_report_an_ignored_warning(opened: WorldBuilder) -> None:
    assert opened.digests[ONE].open_dhcp
    config = ScheduleConfig(ignore_warnings=('dhcp-open',))
    answer = Answer(config, 'audit')
    assert (answer.code, answer.data, answer.messages[-1]) == (0, '', 'all were compared: no findings')
    assert json.loads(Answer(config, 'audit', '-f', 'json').data) == []


def read_doctor(config: ScheduleConfig, facts: Backends, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """Return the findings of a doctor without placement, whose computes are not checked, and its summary."""
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: facts)
    answer = Answer(config, 'doctor', '-f', 'json')
    assert answer.code == 7
    return json.loads(answer.data)['findings'], answer.messages[-1]


def test_doctor_shows_levels_and_leaves_out_ignored_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(OLD_ETCD, placement_failure='it is away')
    findings, summary = read_doctor(ScheduleConfig(), facts, monkeypatch)
    assert [(finding['check'], finding['level']) for finding in findings] == [
        ('placement', 'error'),
        ('etcd-version', 'warning'),
    ]
    assert summary.startswith('1 finding, 1 warning; ')
    findings, summary = read_doctor(ScheduleConfig(ignore_warnings=('etcd-version',)), facts, monkeypatch)
    assert [finding['check'] for finding in findings] == ['placement']
    assert summary.startswith('1 finding; ')


@pytest.mark.parametrize(
    ('ignored', 'expected'),
    [
        ((), ['etcd-version', 'libvirt-version']),
        (('libvirt-version',), ['etcd-version']),
        (('etcd-version', 'libvirt-version'), []),
    ],
)
def test_check_leaves_out_ignored_warnings(
    ignored: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.backends.probe_backends', lambda *_: OLD_ETCD)
    monkeypatch.setattr(checking, '_read_machine', lambda *_: OLD_LIBVIRT)
    _, findings = checking.check_machine(ComputeConfig(ignore_warnings=ignored))
    assert [finding.check for finding in findings] == expected
    assert get_exit_code(OLD_ETCD, findings) == 0
