"""Peer-to-peer daemon for decentralized deep reinforcement learning.

What is named here is p2pdrl as a Python library (docs/api.md). Each name is imported when it is first used,
so that importing the package, which the command line does, stays quick; a stub beside this file tells type
checkers where they are. All else is imported from the subpackages, whose layering import-linter enforces.
"""

import importlib

__all__ = [
    "Client",
    "Run",
    "TrainedPolicy",
    "__version__",
    "load",
    "register_env",
    "register_network",
    "train",
]

__version__ = "0.1.0"

_HOMES = {
    "Client": "p2pdrl.library.client",
    "Run": "p2pdrl.library.run",
    "TrainedPolicy": "p2pdrl.library.policy",
    "load": "p2pdrl.library.policy",
    "register_env": "p2pdrl.library.names",
    "register_network": "p2pdrl.library.names",
    "train": "p2pdrl.library.run",
}
"""Where each name of the library is."""


def __getattr__(name: str) -> object:
    """Import a name of the library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Name what is here and what can be imported."""
    return sorted({*globals(), *_HOMES})
