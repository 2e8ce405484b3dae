"""The arithmetic of one synchronous round on a graph, of parameters or of the learner's gradient.

D-PSGD (Lian 2017, arXiv 1705.09056, algorithm 1): x_i ← Σ_j W_ij x_j = x_i + Σ_j W_ij (x_j − x_i), with W
symmetric and doubly stochastic. Written by edges, each may be left out by itself: W stays symmetric and
doubly stochastic as long as both ends leave it out, so the members' mean is kept.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Content, DsgdConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.clipping_radius import ClippingRadius
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.gossip.pair_average import Bounds, WireName
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import LearnerRequest, StrategyContext
from p2pdrl.tensors import mix, wire
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.tensors.wire import WALK, spans

__all__ = [
    "Edge",
    "GradientContribution",
    "NeighbourContribution",
    "ParameterContribution",
    "measure",
    "round_delta",
]

F = TypeVar("F", np.float32, np.float64)


class Edge(NamedTuple):
    """How one edge counts in a round.

    Args:
        weight: W_ij, after clipping.
        distance: ‖x_j − x_i‖.
        strike: why the neighbour is struck; empty where it isn't.
    """

    weight: float
    distance: float
    strike: str = ""


def round_delta(
    mine: npt.NDArray[F],
    others: Sequence[tuple[npt.NDArray[F], float]],
    *,
    out: npt.NDArray[F],
) -> None:
    """Write Σ_j w_j (x_j − mine) into ``out``.

    Each edge's term is the exact opposite of what its other end computes, bit for bit.

    Args:
        mine: our vector as the others see it.
        others: each neighbour's vector and weight.
        out: none of the others.
    """
    part = np.empty(min(WALK, mine.size), mine.dtype)
    for span in spans(mine.size, WALK):
        piece = part[: span.stop - span.start]
        out[span] = 0
        for theirs, weight in others:
            np.subtract(theirs[span], mine[span], out=piece)
            np.multiply(piece, mine.dtype.type(weight), out=piece)
            np.add(out[span], piece, out=out[span])


def measure(
    mine: Float32Array, my_length: float, theirs: Float32Array, weight: float, bounds: Bounds, *, peer: str
) -> Edge:
    """Check a neighbour's vector, and say how its edge counts.

    Where there is a radius each end shortens the difference by its own (`clipping_radius`); the pair's sum is
    kept where neither does.

    Args:
        mine: our vector as the neighbour sees it.
        my_length: ‖mine‖.
        weight: W_ij.

    Raises:
        PoisonedVectorError: it holds NaN, infinity, a huge entry, or its norm is out of proportion.
    """
    mix.check_finite(theirs, bounds.max_abs)
    their_length = mix.norm(theirs)
    longest = bounds.max_distance * (1.0 + my_length)
    if their_length > longest:
        raise PoisonedVectorError(f"norm {their_length:.3g} is beyond the bound {longest:.3g}")
    distance = mix.distance(mine, theirs)
    if bounds.radius is None:
        return Edge(weight, distance)
    clip = bounds.radius.clip(peer, mine, theirs, mix.PairFigures(my_length, their_length, distance))
    return Edge(weight * clip.factor, distance, clip.strike)


Others = Sequence[tuple[Float32Array, float]]


class NeighbourContribution(Protocol):
    """Our part in a round: parameters, or a gradient. `load`, `read` and `apply` are work for a thread."""

    content: Content
    wire: WireName
    mine: Float32Array
    my_length: float
    radius: ClippingRadius | None

    @property
    def max_nbytes(self) -> int:
        """The most bytes that a message takes, ours or a neighbour's."""

    @property
    def message(self) -> memoryview:
        """What neighbours get, once loaded."""

    def load(self) -> None:
        """Take what is ours.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's message.

        Raises:
            WireError: it is malformed.
        """

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Mix with the others; the norm of the change, or None when ours was replaced meanwhile."""


def _delta(config: DsgdConfig, mine: Float32Array, others: Others, out: Float32Array) -> float:
    """Write what is added to ours into ``out``; return its norm."""
    if config.mixing == "trimmed":
        vectors = [mine, *(theirs for theirs, _ in others)]
        combine(vectors, [1.0] * len(vectors), mixing="trimmed", trim=config.trim, out=out)
        np.subtract(out, mine, out=out)
    else:
        round_delta(mine, others, out=out)
    return mix.norm(out)


def _radius(config: DsgdConfig, context: StrategyContext, content: Content) -> ClippingRadius | None:
    if config.rule(bounded=context.bounded) != "clipped":
        return None
    return ClippingRadius(config.clip_distance, context.clock, gradients=content == "gradients")


class ParameterContribution:
    """The vector on the board."""

    content: Content = "parameters"

    def __init__(self, config: DsgdConfig, context: StrategyContext, delta_D: Float32Array) -> None:
        self.radius = _radius(config, context, self.content)
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
        if self.radius is not None:
            self.radius.read(self.mine, self._sets)

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's vector."""
        wire.decode(message, self._wire, out)

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Post the difference to the board."""
        changed = _delta(self._config, self.mine, others, self._delta_D)
        posted = self._board.post_delta(self._delta_D, policy_version, sets=self._sets)
        if posted and self.radius is not None:
            self.radius.added(self._delta_D)
        return changed if posted else None


class GradientContribution:
    """The gradient of the learner's request.

    All neighbours get the same message, so that each edge's two ends subtract the same numbers; what
    compression left out is added to the next one once anybody got it.
    """

    content: Content = "gradients"

    def __init__(self, config: DsgdConfig, context: StrategyContext, delta_D: Float32Array) -> None:
        self.radius = _radius(config, context, self.content)
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
        self.request: LearnerRequest | None = None

    @property
    def message(self) -> memoryview:
        """What neighbours get."""
        return self._encoder.message

    def load(self) -> None:
        """Compress the gradient, and read it as neighbours will."""
        if self.request is None or self.request.vector is None:
            raise PoisonedVectorError("there is no gradient to send")
        self._encoder.encode(self.request.vector)
        self.my_length = mix.norm(self.mine)

    def read(self, message: memoryview, out: Float32Array) -> None:
        """Read a neighbour's gradient."""
        self._encoder.decode(message, out)

    def apply(self, others: Others, policy_version: int) -> float | None:
        """Add the difference to the gradient in the learner's slot."""
        del policy_version
        if self.request is None or self.request.vector is None:
            return None
        changed = _delta(self._config, self.mine, others, self._delta_D)
        np.add(self.request.vector, self._delta_D, out=self.request.vector)
        self._encoder.delivered()
        return changed
