"""What a round with neighbours mixes: this node's parameters, or its learner's gradient.

Both do the same: `load`, which leaves ``message`` and what neighbours read in it, ``mine``; `read` what
neighbours sent; `apply`, which mixes them. All three are work for a thread.

Gradients have one stream for all neighbours: each gets the same message, so that each edge's two ends
subtract the same numbers; what compression left out is added to the next one once anybody got it.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from p2pdrl.config.strategy import Content, DsgdConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.neighbours.mixing import round_delta
from p2pdrl.strategies.pairwise.pair import WireName
from p2pdrl.strategies.protocol import Context, Post
from p2pdrl.strategies.reading import read_now
from p2pdrl.tensors import mix, wire
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine

__all__ = ["GradientOffer", "Offer", "ParameterOffer"]

Others = Sequence[tuple[Float32Array, float]]


class Offer(Protocol):
    """Our part in a round."""

    content: Content
    wire: WireName
    mine: Float32Array
    my_length: float

    @property
    def max_nbytes(self) -> int:
        """The most bytes that a message takes, ours or a neighbour's."""
        ...

    @property
    def message(self) -> memoryview:
        """What neighbours get, once loaded."""
        ...

    def load(self) -> None:
        """Take what is ours.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        ...

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's message.

        Raises:
            WireError: it is malformed.
        """
        ...

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Mix with the others; the norm of the change, or None when ours was replaced meanwhile."""
        ...


def _delta(config: DsgdConfig, mine: Float32Array, others: Others, out: Float32Array) -> float:
    """Write what is added to ours into ``out``; return its norm."""
    if config.mixing == "trimmed":
        vectors = [mine, *(theirs for theirs, _ in others)]
        combine(vectors, [1.0] * len(vectors), mixing="trimmed", trim=config.trim, out=out)
        np.subtract(out, mine, out=out)
    else:
        round_delta(mine, others, out=out)
    return mix.norm(out)


class ParameterOffer:
    """The vector on the board.

    Args:
        config: the strategy's options.
        context: what the node gives.
        delta_D: scratch.
    """

    content: Content = "parameters"

    def __init__(self, config: DsgdConfig, context: Context, delta_D: Float32Array) -> None:
        self._config, self._board, self._max_abs = config, context.learner.board, context.max_abs
        self._wire: wire.WireDtype = "float32" if config.compression == "none" else "bf16"
        self.wire: WireName = self._wire
        self.max_nbytes = wire.encoded_nbytes(context.size, self._wire)
        self.mine: Float32Array = np.zeros(context.size, np.float32)
        self.my_length = 0.0
        self.message = memoryview(bytearray(self.max_nbytes))
        self._delta_D = delta_D
        self._sets = 0

    def load(self) -> None:
        """Read the board, rounded as the wire rounds it."""
        self._sets = read_now(self._board, self.mine, self._max_abs, self._wire, self.message).sets
        self.my_length = mix.norm(self.mine)

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's vector."""
        wire.decode(message, self._wire, out)

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Post the difference to the board."""
        changed = _delta(self._config, self.mine, others, self._delta_D)
        posted = self._board.post_delta(self._delta_D, policy_version, sets=self._sets)
        return changed if posted else None


class GradientOffer:
    """The gradient of the learner's post.

    Args:
        config: the strategy's options.
        context: what the node gives.
        delta_D: scratch.
    """

    content: Content = "gradients"

    def __init__(self, config: DsgdConfig, context: Context, delta_D: Float32Array) -> None:
        self._config = config
        self.wire: WireName = "float32" if config.compression == "none" else config.compression
        self._encoder = FeedbackEncoder(
            config.compression,
            context.size,
            keep=config.keep,
            threshold=config.threshold,
            max_abs=context.max_abs,
        )
        self.max_nbytes = self._encoder.max_nbytes
        self.mine = self._encoder.sent_D
        self.my_length = 0.0
        self._delta_D = delta_D
        self.post: Post | None = None

    @property
    def message(self) -> memoryview:
        """What neighbours get."""
        return self._encoder.message

    def load(self) -> None:
        """Compress the gradient, and read it as neighbours will."""
        if self.post is None or self.post.vector is None:
            raise PoisonedVectorError("there is no gradient to send")
        self._encoder.encode(self.post.vector)
        self.my_length = mix.norm(self.mine)

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's gradient."""
        self._encoder.decode(message, out)

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Add the difference to the gradient in the learner's slot."""
        del policy_version
        if self.post is None or self.post.vector is None:
            return None
        changed = _delta(self._config, self.mine, others, self._delta_D)
        np.add(self.post.vector, self._delta_D, out=self.post.vector)
        self._encoder.delivered()
        return changed
