"""What GALA pushes and averages, of one kind: parameters or gradients.

``x ← (x + Σ x_in) / (1 + n)`` over the n in-peers whose vectors wait (Assran 2019, arXiv 1906.04585,
algorithm 1), or the same clipped around our own, or trimmed. `check`, `keep` and `merge` are work for a
thread, one at a time.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from p2pdrl.config.strategy import Content, GalaConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.pairwise.pair import WireName
from p2pdrl.strategies.protocol import Context, Merged, RoundReport
from p2pdrl.strategies.push.arrivals import Arrivals
from p2pdrl.strategies.push.gala_inbox import Inbox, Letter
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine

__all__ = ["GalaSide"]

ARRIVING = 4
"""Pushes of one kind that are read at once; more are refused."""


class GalaSide:
    """Buffers and arithmetic of one kind.

    Args:
        content: the kind.
        config: the strategy's options.
        context: what the node gives.
    """

    def __init__(self, content: Content, config: GalaConfig, context: Context) -> None:
        kind = config.compression
        if content == "parameters" and kind != "none":
            kind = "bf16"
        self.content = content
        self.wire: WireName = "float32" if kind == "none" else kind
        self.encoder = FeedbackEncoder(
            kind, context.size, keep=config.keep, threshold=config.threshold, max_abs=context.max_abs
        )
        self.inbox = Inbox(context.size)
        self.arrivals = Arrivals(self.encoder.max_nbytes, ARRIVING)
        self._config = config
        self._me = context.swarm.node_id
        self._max_abs = context.max_abs
        self._delta_D: Float32Array = np.zeros(context.size, np.float32)
        self._own_norm: float | None = None

    def check(self, mine_D: Float32Array) -> None:
        """Check our own vector, whose norm is the measure of others'.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        mix.check_finite(mine_D, self._max_abs)
        self._own_norm = mix.norm(mine_D)

    def keep(self, letter: Letter, message: memoryview) -> None:
        """Read what came into ``letter``.

        Raises:
            WireError: it is malformed.
            PoisonedVectorError: it holds NaN, infinity, a huge entry, or is out of proportion to ours.
        """
        self.encoder.decode(message, letter.vector)
        mix.check_finite(letter.vector, self._max_abs)
        if self._own_norm is None:
            return
        length, bound = mix.norm(letter.vector), self._config.max_distance * (1.0 + self._own_norm)
        if length > bound:
            raise PoisonedVectorError(f"norm {length:.3g} is beyond the bound {bound:.3g}")

    def merge(
        self, mine_D: Float32Array, policy_version: int, write: Callable[[Float32Array, int], bool]
    ) -> RoundReport:
        """Average our vector with what waits.

        Args:
            mine_D: ours, checked.
            policy_version: of it.
            write: takes what is to be added, and the newest version in it; False when ours is gone.
        """
        letters, late = self.inbox.take(policy_version, self._config.max_lag)
        if not letters:
            return RoundReport("stale", missing=late, error="all that came is too old")
        self._average(mine_D, letters)
        changed = mix.norm(self._delta_D)
        squares = [mix.distance(mine_D, letter.vector) ** 2 for letter in letters]
        distance = math.sqrt(sum(squares) / len(squares))
        if not write(self._delta_D, max(policy_version, *(letter.policy_version for letter in letters))):
            return RoundReport("failed", missing=late, error="our vector was replaced meanwhile")
        good, weight = changed > 0 or distance == 0, 1.0 / (1 + len(letters))
        parts = [Merged(letter.peer, weight, policy_version - letter.policy_version) for letter in letters]
        return RoundReport(
            "ok" if good else "unchanged",
            merged=(Merged(self._me, weight), *parts),
            missing=late,
            bytes_in=sum(letter.nbytes for letter in letters),
            changed=changed,
            distance=distance,
            error="" if good else "they differ, but the step rounds or clips to nothing",
        )

    def _average(self, mine_D: Float32Array, letters: list[Letter]) -> None:
        """Put what our vector is to move into the scratch."""
        config = self._config
        combine(
            [mine_D, *(letter.vector for letter in letters)],
            [1.0] * (1 + len(letters)),
            mixing=config.mixing,
            clip_distance=config.clip_distance,
            trim=config.trim,
            reference=mine_D,
            out=self._delta_D,
        )
        np.subtract(self._delta_D, mine_D, out=self._delta_D)
