"""What more than one module of these tests asks for."""

from tests.unit.audit_world import world
from tests.unit.conf_text import compute

__all__ = ['compute', 'world']
