"""What more than one module of these tests asks for."""

from tests.unit.audit_world import world

__all__ = ['world']
