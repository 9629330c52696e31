"""Fixtures that several modules of the unit tests use."""

from tests.unit.audit_world import world
from tests.unit.conf_text import compute
from tests.unit.lab_root import as_root, root

__all__ = ['as_root', 'compute', 'root', 'world']
