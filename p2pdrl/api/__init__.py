"""The HTTP API of a node: status, health, metrics, events, and a few actions; and its page."""
