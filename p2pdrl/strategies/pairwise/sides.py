"""What an exchange averages: this node's parameters, or the gradient that its learner offers.

Both do the same steps: `begin`, `load` into ``outgoing``, `mix` with what came into `room`, `commit`, `end`.
`load`, `mix` and `commit` are work for a thread; the others are for the loop. One exchange at a time.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from p2pdrl.config.strategy import AdpsgdConfig, Content
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.pairwise.offers import Offers
from p2pdrl.strategies.pairwise.pair import Bounds, PairScratch, Step, WireName, pair_step
from p2pdrl.strategies.protocol import Learner, Post
from p2pdrl.tensors.board import DaemonBoard

__all__ = ["GradientSide", "PairSide", "ParameterSide"]


class PairSide(Protocol):
    """One side of an exchange."""

    content: Content
    wire: WireName

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer, once loaded."""
        ...

    @property
    def step(self) -> Step:
        """What our side does, once mixed."""
        ...

    def begin(self) -> bool:
        """Take part with what there is; False when there is nothing."""
        ...

    def load(self) -> None:
        """Write what is ours into ``outgoing``.

        Raises:
            PoisonedVectorError: ours is unusable.
        """
        ...

    def room(self, nbytes: int) -> memoryview | None:
        """Where the peer's ``nbytes`` go; None when they can't be right."""
        ...

    def mix(self, weight: float) -> None:
        """Compute what we add.

        Raises:
            PoisonedVectorError: the peer's is unusable.
            WireError: it can't be read.
        """
        ...

    def commit(self, policy_version: int) -> bool:
        """Add it; False when what it belongs to is gone."""
        ...

    def end(self, *, done: bool) -> None:
        """The exchange is over; ``done`` when our side was committed."""
        ...


class ParameterSide:
    """The vector on the board.

    Args:
        scratch: buffers and arithmetic.
        board: where the learner's vector is.
        wire: number format.
    """

    content: Content = "parameters"

    def __init__(self, scratch: PairScratch, board: DaemonBoard, wire: WireName) -> None:
        self._scratch = scratch
        self._board = board
        self.wire = wire

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer."""
        return self._scratch.outgoing

    @property
    def step(self) -> Step:
        """What our side does."""
        return self._scratch.step

    def begin(self) -> bool:
        """There always is a vector."""
        return True

    def load(self) -> None:
        """Read the board."""
        self._scratch.load(self._board)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's vector is as long as ours."""
        return self._scratch.incoming if nbytes == self._scratch.nbytes else None

    def mix(self, weight: float) -> None:
        """Compute our delta."""
        self._delta_D = self._scratch.mix(weight)

    def commit(self, policy_version: int) -> bool:
        """Post it."""
        return self._scratch.commit(self._board, self._delta_D, policy_version)

    def end(self, *, done: bool) -> None:
        """Nothing is held."""


class GradientSide:
    """The gradient that the learner offers; both sides answer ``add`` with ``weight · (theirs − mine)``.

    Compressed gradients are subtracted as the other side decoded them, so what one side's step gains the
    other's loses; what the compression left out is kept for our next exchange (`feedback`).

    Args:
        config: the strategy's options.
        learner: whose gradients.
        size: D, float32 parameters.
        max_abs: largest entry accepted.
    """

    content: Content = "gradients"

    def __init__(self, config: AdpsgdConfig, learner: Learner, size: int, max_abs: float) -> None:
        self.offers = Offers(learner)
        self.wire: WireName = "float32" if config.compression == "none" else config.compression
        clip = config.clip_distance if config.mixing == "clipped" else None
        self._bounds = Bounds(max_abs, config.max_distance, clip)
        self._learner = learner
        self._encoder = FeedbackEncoder(
            config.compression, size, keep=config.keep, threshold=config.threshold, max_abs=max_abs
        )
        self._theirs_D = np.zeros(size, np.float32)
        self._incoming = memoryview(bytearray(self._encoder.max_nbytes))
        self._in = 0
        self._post: Post | None = None
        self.step = Step(0.0, 0.0, 0.0)

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer."""
        return self._encoder.message

    def begin(self) -> bool:
        """Take the gradient on offer."""
        self._post = self.offers.take()
        return self._post is not None

    def load(self) -> None:
        """Compress the gradient, and read it as the peer will.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        post = self._post
        if post is None or post.vector is None:
            raise PoisonedVectorError("there is no gradient to send")
        self._encoder.encode(post.vector)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's may be shorter or longer than ours, but not than the codec's longest."""
        if not 0 < nbytes <= len(self._incoming):
            return None
        self._in = nbytes
        return self._incoming[:nbytes]

    def mix(self, weight: float) -> None:
        """Compute what is to be added to our next gradient."""
        self._encoder.decode(self._incoming[: self._in], self._theirs_D)
        self.step = pair_step(self._encoder.sent_D, self._theirs_D, weight, self._bounds)

    def commit(self, policy_version: int) -> bool:
        """Put it into the learner's slot."""
        del policy_version
        if self._post is None or self._post.vector is None:
            return False
        np.copyto(self._post.vector, self._theirs_D)
        return True

    def end(self, *, done: bool) -> None:
        """Let the learner have it, or offer its gradient again."""
        post, self._post = self._post, None
        if post is None:
            return
        if done:
            self._encoder.delivered()
            self._learner.answer(post, "add")
        else:
            self.offers.back(post)
