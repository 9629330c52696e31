"""Fixtures that several modules of the unit tests use."""

from tests.unit.audit_world import world
from tests.unit.conf_text import compute_config
from tests.unit.lab_root import fake_root, root

__all__ = ['fake_root', 'compute_config', 'root', 'world']
