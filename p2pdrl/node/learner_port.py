"""The learner as the strategy in force sees it: its board, its posts, the answers to them.

Implements `strategies.protocol.Learner` over the supervisor, whichever process runs at the moment.
"""

from __future__ import annotations

import asyncio

from p2pdrl.config.task import AlgorithmConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.supervisor import LearnerSupervisor
from p2pdrl.strategies.protocol import AnswerKind, Post
from p2pdrl.tensors.board import DaemonBoard

__all__ = ["LearnerPort"]


class LearnerPort:
    """One strategy's hold on the learner.

    Args:
        supervisor: keeps the learner process.
        algorithm: says the learning rate.
    """

    def __init__(self, supervisor: LearnerSupervisor, algorithm: AlgorithmConfig) -> None:
        self._supervisor = supervisor
        self._algorithm = algorithm

    @property
    def board(self) -> DaemonBoard:
        """The daemon's end of the board."""
        if self._supervisor.board is None:
            raise WorkerError("the learner isn't built yet")
        return self._supervisor.board

    @property
    def learning_rate(self) -> float:
        """The algorithm's learning rate now."""
        return self._algorithm.learning_rate

    async def next_post(self) -> Post:
        """Wait for the learner's next post."""
        await asyncio.Event().wait()
        raise AssertionError

    def answer(self, post: Post, kind: AnswerKind) -> None:
        """Let the learner go on."""
