"""What a source of batches is: one seam between the trainer and whoever makes experience.

``trainer`` asks its source for a batch, hands that to the algorithm, and commits it once the update is done.
So an update that is interrupted (a pipeline's neighbour is gone, the process is killed) consumes nothing: a
source that can hands the same batch out again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.tensors.sidecar import SidecarItem

__all__ = ["NOTHING_ELSEWHERE", "Batch", "BatchT", "CountedElsewhere", "Source", "on_device"]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: itself if it is there, else a copy.

    To a GPU it goes through page-locked memory, and nobody waits for it: the processor can draw the next
    batch meanwhile. The tensor may be overwritten at once all the same; what was locked is freed afterwards.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """What one update learns from; each kind of source adds its own arrays.

    Attributes:
        env_steps: environment steps that are new in it; resets don't count.
        episodes: (return from raw rewards, length in steps) of those that ended, in order of time.
    """

    env_steps: int
    episodes: list[tuple[float, int]]


BatchT = TypeVar("BatchT", bound=Batch)


class CountedElsewhere(NamedTuple):
    """How much of a batch other nodes have made, which count it themselves."""

    env_steps: int
    episodes: int


NOTHING_ELSEWHERE = CountedElsewhere(0, 0)


class Source(ABC, Generic[BatchT]):
    """Makes or collects batches, one after the other.

    Attributes:
        preempted: asked between two steps of the environments: whether the batch is to end early, as far as
            the source can; None never ends one.
        elsewhere: of the last batch.
    """

    preempted: Callable[[], bool] | None = None
    elsewhere: CountedElsewhere = NOTHING_ELSEWHERE

    @abstractmethod
    def next(self) -> BatchT:
        """Return the next batch; call it when `ready`. Its arrays may be overwritten by the next call."""

    @property
    def fills(self) -> bool:
        """Whether it brings unrolls; else what others have kept of theirs."""
        return True

    @property
    def acts(self) -> bool:
        """Whether `next` takes the steps of environments itself."""
        return False

    @property
    def ready(self) -> bool:
        """Whether `next` has a batch without waiting for another process."""
        return True

    def commit(self) -> None:
        """Note that the update with the last batch is done: it won't be handed out again."""

    def share(self, rank: int, learners: int, part: float, cuts: int = 1) -> None:
        """Take the part of the data that is this learner's; no effect where data aren't divided.

        Args:
            rank: of this learner, from 0; the parts of all ranks below ``learners`` are the whole.
            part: how long our batches are to be, in parts of what they are for a single learner.
            cuts: into how many that part is cut further.
        """

    @property
    def batch_share(self) -> float:
        """How long batches are, in parts of what a single learner's are; may be more than was asked."""
        return 1.0

    def most_cuts(self, part: float) -> int:
        """Into how many batches such a part of one can be cut further, and still be useful."""
        del part
        return 1

    def publish(self, version: int) -> None:
        """Hand the current parameters, policy version ``version``, to the actors."""

    def lend(self, *, lent: bool) -> None:
        """Leave the actors of this node to its daemon, or take them back; no effect without actors.

        While they are lent nothing is `ready`, and the source touches neither unrolls nor policy.
        """

    @property
    def position(self) -> int:
        """Position in sequential data; 0 where batches have no order."""
        return 0

    @position.setter
    def position(self, position: int) -> None:
        """Continue from there; no effect where batches have no order."""

    def items(self) -> tuple[SidecarItem, ...]:
        """Return how its state is laid out in the sidecar."""
        return ()

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return its state, by the names of `items`."""
        return {}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a state.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """

    def metrics(self) -> dict[str, float]:
        """Return what the monitors plot about the source itself."""
        return {}

    def close(self) -> None:
        """Free what it holds."""
