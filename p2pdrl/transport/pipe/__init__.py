"""Pipes: a connection between two processes of two nodes, opened by their daemons."""
