"""Synchronous and asynchronous parameter servers among the nodes: `server_sync`, `server_async`, their parts."""
