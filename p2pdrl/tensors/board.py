"""The board: the one meeting point of a learner process and its daemon, in shared memory.

    learner                               daemon
    ───────                               ──────
    take()      ◄── slot ◄── flush() ◄──  post_delta(mixed - now), post_set(vector)
    publish()   ──► published ──────────► now(out) = published + what was posted and isn't in it

A slot's content has an id, and a publication says up to which id it contains; so each content is applied
exactly once, also when the learner is killed at any point and another takes its place. The slot is never
rewritten before a publication contains it. Neither side ever waits for the other.

The parts: `board_memory` (where things lie), `board_state` (what there is at one moment), `learner_board`,
`daemon_board`; this module is their front.

Example:
    >>> import numpy as np
    >>> from p2pdrl.tensors.layout import Layout, TensorEntry
    >>> from p2pdrl.tensors.shared_memory import SharedRegion
    >>> spec = BoardSpec(Layout((TensorEntry("w", (2,)),)))
    >>> region = SharedRegion.create(spec.nbytes, "board")
    >>> learner, daemon = LearnerBoard(region, spec), DaemonBoard(region, spec)
    >>> learner.publish(np.array([1, 2], np.float32), None, policy_version=1)
    >>> daemon.post_delta(np.array([0.5, 0], np.float32), policy_version=4)
    True
    >>> now = np.empty(2, np.float32)
    >>> daemon.now(now).policy_version, now.tolist()
    (4, [1.5, 2.0])
"""

from __future__ import annotations

from p2pdrl.tensors.board_memory import BoardSpec
from p2pdrl.tensors.daemon_board import DaemonBoard, Snapshot
from p2pdrl.tensors.learner_board import LearnerBoard, Restored, Taken

__all__ = ["BoardSpec", "DaemonBoard", "LearnerBoard", "Restored", "Snapshot", "Taken"]
