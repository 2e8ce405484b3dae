"""A slice of the parameters with its optimizer: what a server holds, steps and hands on.

Parameters are kept in float32 and stepped in place. Workers get editions of them: the whole slice, or the
rounded difference to the edition before. Rounding is never lost: the next difference is taken from what
workers hold, so they follow the server exactly on average, and a learning rate of 0 changes nothing.

Methods are arithmetic alone: the caller sees to it that one runs at a time (``lock``), in a thread.

Shapes: every vector is flat, of the shard's length; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Compression
from p2pdrl.config.strategy_bases import Served
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.servers.editions import Edition, Editions
from p2pdrl.strategies.servers.serving import Claim, Span
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.optimizers import ShardOptimizer, make_optimizer

__all__ = ["AnyArray", "Shard", "difference_codec", "optimizer_of"]

AnyArray = npt.NDArray[np.generic]


def optimizer_of(config: Served, size: int) -> ShardOptimizer:
    """A fresh optimizer for ``size`` entries, as the strategy's options say."""
    return make_optimizer(
        config.optimizer, size, momentum=config.momentum, decay=config.decay, eps=config.eps
    )


def difference_codec(kind: Compression, size: int) -> Codec | None:
    """How differences between editions are written; None where whole slices travel.

    Sparse kinds would show workers a fraction of each step, so differences are at least of 16 bits there.
    """
    if kind == "none":
        return None
    return make_codec("int8" if kind == "int8" else "bf16", size, feedback=False)


class Shard:
    """One shard.

    Args:
        span: its place in the vector.
        config: optimizer and compression.
        version: count of steps that its contents have behind them.
        differences: whether editions carry encoded differences.
    """

    def __init__(self, span: Span, config: Served, version: int, *, differences: bool) -> None:
        self.span = span
        self.version = version
        self.progress = 0
        """Samples whose gradients are in it."""
        self.lock = asyncio.Lock()
        """Held by whoever steps, copies or replaces the contents."""
        self.stepping = False
        """Whether a step is under way that will raise the version."""
        self.parameters: Float32Array = np.zeros(span.size, np.float32)
        self.optimizer = optimizer_of(config, span.size)
        self._codec = difference_codec(config.compression, span.size) if differences else None
        self._editions = Editions(span.size, 0 if self._codec is None else self._codec.max_nbytes)
        self._scratch: Float32Array = np.empty(span.size, np.float32)

    @property
    def claim(self) -> Claim:
        """What a note says of it; a step under way counts as done, for whoever needs it waits for it."""
        return Claim(self.span.start, self.span.stop, self.version + self.stepping, live=True)

    @property
    def edition(self) -> Edition | None:
        """What goes out to workers now; None before the first."""
        return self._editions.newest

    def apply(self, gradient: Float32Array, learning_rate: float) -> None:
        """Let the optimizer make one step; whoever calls it counts the version."""
        self.optimizer.step(self.parameters, gradient, learning_rate)

    def write_edition(self) -> Edition:
        """Write the parameters as they are into a buffer for workers; `publish` puts it out."""
        edition, before = self._editions.blank(), self._editions.newest
        if self._codec is None or before is None:
            np.copyto(edition.vector, self.parameters)
            return edition
        np.subtract(self.parameters, before.vector, out=self._scratch)
        nbytes = self._codec.encode(self._scratch, edition.room)
        edition.delta = edition.room[:nbytes]
        self._codec.decode(edition.delta, self._scratch)
        np.add(before.vector, self._scratch, out=edition.vector)
        return edition

    async def edit(self) -> Edition:
        """`write_edition`, in a thread where that is due; the caller holds ``lock``."""
        return await heavy(8 * self.span.size, self.write_edition)

    def publish(self, edition: Edition, version: int) -> None:
        """Put an edition out as ``version``; in the event loop, like all that reads `edition`."""
        self.version = version
        self._editions.put(edition, version)

    def state(self) -> dict[str, AnyArray]:
        """The optimizer's state, its own arrays."""
        return dict(self.optimizer.state())

    def check(self, max_abs: float) -> None:
        """Check that what was restored is usable.

        Raises:
            PoisonedVectorError: NaN, infinity or an entry beyond ``max_abs``.
        """
        mix.check_finite(self.parameters, max_abs)

    def load(self, state: Mapping[str, AnyArray]) -> None:
        """Take an optimizer's state over.

        Raises:
            LayoutMismatchError: it isn't that of such an optimizer.
        """
        self.optimizer.load(dict(state))
