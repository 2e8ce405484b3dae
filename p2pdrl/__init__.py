"""Peer-to-peer daemon for decentralized deep reinforcement learning.

The package root holds nothing but the version: import from the subpackages, whose
layering is described in README.md and enforced by import-linter.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
