"""What more than one module of these tests asks for."""

from tests.security.image_servers import names, web

__all__ = ['names', 'web']
