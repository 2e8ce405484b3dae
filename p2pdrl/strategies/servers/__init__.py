"""Synchronous and asynchronous parameter servers among the nodes."""
