"""Fixtures that several modules of these tests use."""

from tests.scenario.docker_runs import engine, run
from tests.scenario.queued import small_cluster

__all__ = ['engine', 'run', 'small_cluster']
