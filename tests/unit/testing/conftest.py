"""A real node's transport, to be reached through the fault proxy."""

from ..transport.conftest import served

__all__ = ["served"]
