"""Fixtures that several modules of these tests use."""

from tests.security.image_servers import names, web
from tests.security.rights import running

__all__ = ['names', 'running', 'web']
