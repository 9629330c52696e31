"""What more than one module of these tests asks for."""

from tests.scenario.docker_runs import engine, run
from tests.scenario.queued import small

__all__ = ['engine', 'run', 'small']
