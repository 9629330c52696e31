"""Fixtures that several modules of these tests use."""

from tests.security.image_servers import dns_answers, web
from tests.security.rights import running_server

__all__ = ['dns_answers', 'running_server', 'web']
