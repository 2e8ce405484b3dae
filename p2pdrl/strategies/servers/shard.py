"""A slice of the parameters with its optimizer: what a server holds, steps, sends and hands on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Compression, ServerOptions
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.servers.shard_plan import Claim, ShardSpan
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.optimizers import ShardOptimizer, update_rule

__all__ = ["AnyArray", "Shard", "ShardVersion", "ShardVersions", "difference_codec", "optimizer_of"]


class ShardVersion:
    """One version of the parameters, kept while somebody holds it.

    Attributes:
        version: of the parameters.
        vector: the parameters: unchanged while it is held.
        delta: encoded difference to the version before, where there is one.
    """

    def __init__(self, size: int, delta_nbytes: int, free: Callable[[ShardVersion], None]) -> None:
        self.version = -1
        self.vector: Float32Array = np.empty(size, np.float32)
        self.room = memoryview(bytearray(delta_nbytes))
        self.delta: memoryview | None = None
        self._free = free
        self._held = 0

    def hold(self) -> ShardVersion:
        """Keep it until as many `release`s have come."""
        self._held += 1
        return self

    def release(self) -> None:
        """Hold it no more."""
        self._held -= 1
        if not self._held:
            self._free(self)


class ShardVersions:
    """The newest version buffer, and those before it that are still being sent.

    Args:
        size: entries of the shard.
        delta_nbytes: longest encoded difference; 0 when differences aren't sent.
    """

    def __init__(self, size: int, delta_nbytes: int = 0) -> None:
        self._size = size
        self._delta_nbytes = delta_nbytes
        self._idle: list[ShardVersion] = []
        self._newest: ShardVersion | None = None

    @property
    def newest(self) -> ShardVersion | None:
        """What goes out now; None before the first."""
        return self._newest

    def blank(self) -> ShardVersion:
        """Return a buffer to write the next version buffer into."""
        version_buffer = (
            self._idle.pop() if self._idle else ShardVersion(self._size, self._delta_nbytes, self._free)
        )
        version_buffer.delta = None
        return version_buffer

    def put(self, version_buffer: ShardVersion, version: int) -> None:
        """Make what was written the newest."""
        version_buffer.version = version
        before, self._newest = self._newest, version_buffer.hold()
        if before is not None:
            before.release()

    def _free(self, version_buffer: ShardVersion) -> None:
        if len(self._idle) < 2:
            self._idle.append(version_buffer)


AnyArray = npt.NDArray[np.generic]


def optimizer_of(config: ServerOptions, size: int) -> ShardOptimizer:
    """A fresh optimizer for ``size`` entries, as the strategy's options say."""
    rule = update_rule(config.optimizer, momentum=config.momentum, decay=config.decay, eps=config.eps)
    return ShardOptimizer(rule, size)


def difference_codec(kind: Compression, size: int) -> Codec | None:
    """How differences between versions are written; None where whole slices travel.

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
        differences: whether versions carry encoded differences.
    """

    def __init__(self, span: ShardSpan, config: ServerOptions, version: int, *, differences: bool) -> None:
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
        self._versions = ShardVersions(span.size, 0 if self._codec is None else self._codec.max_nbytes)
        self._scratch: Float32Array = np.empty(span.size, np.float32)

    @property
    def claim(self) -> Claim:
        """What a note says of it; a step under way counts as done, for whoever needs it waits for it."""
        return Claim(self.span.start, self.span.stop, self.version + self.stepping, live=True)

    @property
    def version_buffer(self) -> ShardVersion | None:
        """What goes out to workers now; None before the first."""
        return self._versions.newest

    def apply(self, gradient: Float32Array, learning_rate: float) -> None:
        """Let the optimizer make one step; whoever calls it counts the version."""
        self.optimizer.step(self.parameters, gradient, learning_rate)

    def write_version(self) -> ShardVersion:
        """Write the parameters as they are into a buffer for workers; `publish` puts it out."""
        version_buffer, before = self._versions.blank(), self._versions.newest
        if self._codec is None or before is None:
            np.copyto(version_buffer.vector, self.parameters)
            return version_buffer
        np.subtract(self.parameters, before.vector, out=self._scratch)
        nbytes = self._codec.encode(self._scratch, version_buffer.room)
        version_buffer.delta = version_buffer.room[:nbytes]
        self._codec.decode(version_buffer.delta, self._scratch)
        np.add(before.vector, self._scratch, out=version_buffer.vector)
        return version_buffer

    async def edit(self) -> ShardVersion:
        """`write_version`, in a thread where that is due; the caller holds ``lock``."""
        return await heavy(8 * self.span.size, self.write_version)

    def publish(self, version_buffer: ShardVersion, version: int) -> None:
        """Publish a buffer as ``version``; in the event loop, like all that reads `version_buffer`."""
        self.version = version
        self._versions.put(version_buffer, version)

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
