"""One rank of one generation of a pipeline, put together from an order. Imports torch.

`stage_runner` decides when a learner takes a rank and when it leaves it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.plan import PipelinePlan, StageNews, StageOrder, StageSide
from p2pdrl.rl.pipeline.links import FramedLinks, Links
from p2pdrl.rl.pipeline.parts import ModelParts
from p2pdrl.rl.pipeline.rank import Pipelined, RankOptions, StageServer
from p2pdrl.rl.pipeline.runner import Recorder, Running
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.transport.pipe.ticket import PipeTicket
from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier
from p2pdrl.workers.protocol import ToLearner

if TYPE_CHECKING:
    from p2pdrl.rl.trainer import Pipelineable
    from p2pdrl.workers.pipeline.torch_stages import TorchStages

__all__ = ["DaemonCallbacks", "Pipes", "WorkerRank", "make_rank"]

_KEPT_ACTIVATIONS = 4
"""Each pipe keeps memory for so many of a whole batch: in microbatches, more than wait to be read at once."""

_MEASURED = ("microbatches", "bubble", "step_s", "activation_bytes")
"""Figures of a rank that its gradient engine or server measures."""

Pipes = Mapping[StageSide, tuple[int, PipeTicket]]
"""Descriptors, and what goes with them."""


class DaemonCallbacks(NamedTuple):
    """How a rank hears its daemon, and tells it something, while it waits.

    Attributes:
        listen: hears, without waiting.
        interrupted: whether what was heard ends the wait.
        tell: sends news.
        ahead: what the daemon has said and wasn't heard yet; from any thread.
    """

    listen: Callable[[], None]
    interrupted: Callable[[], bool]
    tell: Callable[[StageNews], None]
    ahead: Callable[[], Sequence[ToLearner]] = list


class WorkerRank:
    """A rank of a pipeline; `make_rank` makes it.

    Attributes:
        carrier: on its pipes, of which a rank that is alone has none.
        head: gradient engine and stepper, of the first rank.
        server: of any other.
    """

    def __init__(
        self,
        order: StageOrder,
        share: StageParameters[Any],
        carrier: PipeCarrier,
        *,
        links: Links | None,
        runner: Running | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.order = order
        self.carrier = carrier
        self._leave = leave
        self.recorder = Recorder()
        self.head: Pipelined[Any] | None = None
        self.server: StageServer[Any] | None = None
        options: RankOptions = {
            "generation": order.generation,
            "timeout_s": order.timeout_s,
            "runner": runner,
            "recorder": self.recorder,
        }
        if order.rank == 0:
            self.head = Pipelined(
                share,
                links,
                state_every=order.state_every,
                spread=True,
                hold=True,
                tune=order.tune,
                say=lambda text: print(f"learner: {text}", file=sys.stderr),
                **options,
            )
        else:
            assert links is not None  # noqa: S101 - `make_rank` checked
            self.server = StageServer(
                share,
                links,
                idle_timeout_s=order.idle_timeout_s,
                within_s=order.timeout_s,
                **options,
            )

    @property
    def behind(self) -> int:
        """Updates that it took part in and that the trainer's own state doesn't have: none at the head."""
        return 0 if self.server is None else self.server.behind

    def figures(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return what the daemon is told of this rank."""
        order = self.order
        figures = {
            "generation": float(order.generation),
            "rank": float(order.rank),
            "ranks": float(order.ranks),
            "stages": float(order.plan.stages),
            "microbatches": float(order.microbatches),
        }
        figures |= {name: measured[name] for name in _MEASURED if name in measured}
        return {f"pipeline_{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Leave the pipeline; neighbours notice. Calling it again does nothing."""
        work = self.head or self.server
        if work is not None:
            work.close()
        self.carrier.close()
        self._leave()


def make_rank(
    order: StageOrder, pipes: Pipes, trainer: Pipelineable, callbacks: DaemonCallbacks
) -> WorkerRank:
    """Build what an order asks for, from the trainer's model as it is now; the pipes are owned from now on.

    Raises:
        ConfigError: the order doesn't fit the model, or the pipes don't fit the order.
        TransportError: a neighbour isn't there.
        OSError: what came isn't a connection.
    """
    torch_stages = None
    try:
        parts = trainer.parts()
        plan = _plan(order, parts, pipes)
        device = parts.device
        share = StageParameters(
            parts, plan, order.rank, device, checkpoint_activations=order.checkpoint_activations
        )
        if order.backend == "torch":
            torch_stages, pipes = _meet(order, device, callbacks)
    except BaseException:
        for fd, _ in pipes.values():
            os.close(fd)
        raise
    try:
        carrier = PipeCarrier(
            pipes,
            parts.longest_nbytes,
            kept_nbytes=_KEPT_ACTIVATIONS * parts.activation_nbytes,
            listen=callbacks.listen,
            interrupted=callbacks.interrupted,
            allocate=_pinned if device.type == "cuda" else _plain,
        )
    except BaseException:
        if torch_stages is not None:
            torch_stages.close()
        raise
    links = FramedLinks(carrier) if pipes else None
    if torch_stages is None or links is None:
        return WorkerRank(order, share, carrier, links=links)
    runner = torch_stages.runner(share, links, carrier)
    return WorkerRank(order, share, carrier, links=links, runner=runner, leave=torch_stages.close)


def _meet(order: StageOrder, device: torch.device, callbacks: DaemonCallbacks) -> tuple[TorchStages, Pipes]:
    """Join the other ranks' torch.distributed group; return it, and connections to the neighbours."""
    # Not above: torch.distributed is slow to import, and most pipelines have no need of it.
    from p2pdrl.workers.pipeline.torch_stages import TorchStages

    stages = TorchStages(
        order,
        device,
        lambda port: callbacks.tell(StageNews(order.generation, "meeting", port=port)),
        ahead=callbacks.ahead,
    )
    return stages, stages.pipes


def _plan(order: StageOrder, parts: ModelParts[Any], pipes: Pipes) -> PipelinePlan:
    """Return the order's plan, once it is sure that it fits."""
    plan = order.plan
    if plan.blocks != len(parts.blocks):
        raise ConfigError(f"the policy has {len(parts.blocks)} blocks here, not {plan.blocks}")
    if not 0 <= order.rank < plan.ranks:
        raise ConfigError(f"there is no rank {order.rank} among {plan.ranks}")
    circle = plan.stages > plan.ranks > 1
    wanted: set[StageSide] = set()
    if circle or order.rank < plan.ranks - 1:
        wanted.add("next")
    if circle or order.rank > 0:
        wanted.add("previous")
    if order.backend == "torch":
        wanted = set()  # it makes its own
    if wanted != set(pipes):
        raise ConfigError(f"rank {order.rank} wants pipes {sorted(wanted)}, not {sorted(pipes)}")
    return plan


def _plain(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(nbytes, np.uint8)


def _pinned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory: np.ndarray[Any, np.dtype[np.uint8]] = torch.empty(
        nbytes, dtype=torch.uint8, pin_memory=True
    ).numpy()
    return memory
