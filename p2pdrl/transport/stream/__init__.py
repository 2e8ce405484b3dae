"""Streams: many calls over one connection, taken over from HTTP."""
