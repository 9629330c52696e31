"""What more than one module of these tests asks for."""

from tests.scenario.queued import small

__all__ = ['small']
