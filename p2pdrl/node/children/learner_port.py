"""The learner as the strategy in force sees it: its board, its posts, the answers to them.

Implements `strategies.protocol.Learner` over the supervisor, whichever process runs at the moment.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdrl.config.task import AlgorithmConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.children.supervisor import LearnerSupervisor
from p2pdrl.strategies.protocol import AnswerKind, Post
from p2pdrl.tensors.board import DaemonBoard

__all__ = ["LearnerPort"]


class LearnerPort:
    """One strategy's hold on the learner.

    Args:
        supervisor: keeps the learner process.
        algorithm: says the learning rate.
        progress: how far the swarm is towards its last environment step, 0 to 1, as the learner knows it.
    """

    def __init__(
        self, supervisor: LearnerSupervisor, algorithm: AlgorithmConfig, progress: Callable[[], float]
    ) -> None:
        self._supervisor = supervisor
        self._algorithm = algorithm
        self._progress = progress

    @property
    def board(self) -> DaemonBoard:
        """The daemon's end of the board."""
        if self._supervisor.board is None:
            raise WorkerError("the learner isn't built yet")
        return self._supervisor.board

    @property
    def learning_rate(self) -> float:
        """The algorithm's learning rate now, annealing included."""
        algorithm = self._algorithm
        if algorithm.anneal == "linear":
            return algorithm.learning_rate * (1.0 - min(max(self._progress(), 0.0), 1.0))
        return algorithm.learning_rate

    async def next_post(self) -> Post:
        """Wait for the learner's next post; cancelling loses none."""
        return await self._supervisor.workplace.next_post()

    def answer(
        self, post: Post, kind: AnswerKind, learning_rate: float | None = None, *, end_update: bool = False
    ) -> None:
        """Let the learner go on. A post of an earlier regime, or of a learner that died, is passed over.

        Annealing only lowers the algorithm's learning rate, which is the same on all nodes: what peers make
        of it never goes beyond.
        """
        if learning_rate is not None:
            learning_rate = max(0.0, min(self._algorithm.learning_rate, learning_rate))
        self._supervisor.answer(post, kind, learning_rate, end_update=end_update)
