"""What more than one module of these tests asks for."""

from tests.security.image_servers import names, web
from tests.security.rights import running

__all__ = ['names', 'running', 'web']
