"""Requests that change an instance that is there, and waiting for what becomes of it."""
