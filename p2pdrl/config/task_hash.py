"""The hash that two nodes compare before they train together.

It covers what must be equal for parameters to be averaged: environment, network, algorithm, the
precision of gradients, and the seed of the initial weights. Strategy and stop conditions travel as
swarm records and may change on a live swarm, so they are left out. Called by the node when it
founds or joins.
"""

from __future__ import annotations

import hashlib

import msgspec

from p2pdrl.config.task import TaskConfig

__all__ = ["HASHED", "task_hash"]

HASHED = ("seed", "env", "network", "algorithm", "gradients")
"""The fields of the task that are fixed at founding."""


def task_hash(task: TaskConfig) -> str:
    """Return 32 hex digits: SHA-256 of the canonical JSON (sorted keys) of the fixed fields.

    Defaults are written out, so a value given and the same value by default hash alike.
    """
    fixed = {name: getattr(task, name) for name in HASHED}
    canonical = msgspec.json.encode(fixed, order="sorted")
    return hashlib.sha256(b"p2pdrl task\0" + canonical).hexdigest()[:32]
