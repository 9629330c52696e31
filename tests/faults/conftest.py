"""Fixtures of the fault rows: those of the stories with pretended guests, and real hosts."""

from tests.faults.lab_fixtures import host, hypervisors, slow_images, small_host
from tests.scenario.conftest import backends, cluster

__all__ = ['backends', 'cluster', 'host', 'hypervisors', 'slow_images', 'small_host']
