"""One process of `bench_pipeline.py`; started by it, told what to do in lines of JSON.

Usage: python -m pipeline_bench.worker CONTENDER RANK, where `scripts` is on Python's path
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from p2pdrl.config.fields import Precision
from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.schedule import ScheduleName
from p2pdrl.rl.sequential import measure_blocks
from pipeline_bench.alone import Alone
from pipeline_bench.gloo import Gloo
from pipeline_bench.memory import Kept, Memory
from pipeline_bench.model import Model, make_model, plan_of
from pipeline_bench.over_torch import OverTorch
from pipeline_bench.staged import WatchedShare
from pipeline_bench.stream import Stream
from pipeline_bench.talk import Contender, Stopwatch, Trial, hear, say

REPEATS = 8
"""Of the measurement of blocks; the quickest counts, so that what else the machine does moves no cut."""


PIPELINES: dict[str, Callable[[Model, WatchedShare], Contender]] = {
    "stream": Stream,
    "torch": OverTorch,
    "gloo": Gloo,
}


class Worker:
    """This process.

    Args:
        contender: ``alone``, or one of the pipelines.
        rank: of the pipeline.
    """

    def __init__(self, contender: str, rank: int) -> None:
        self._kind = contender
        self._rank = rank
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._contender: Contender | None = None

    def make(self, network: str, parameters: int, rows: int, threads: int = 1) -> dict[str, Any]:
        """Make the model, for so many threads."""
        torch.set_num_threads(threads)
        _warm(self._device)
        self._memory = Memory(self._device)
        precision: Precision = "bf16" if self._device.type == "cuda" else "float32"
        self._model: Model = make_model(network, parameters, rows, self._device, precision)
        self._parameters = [self._model.flat.parameters_D]
        if self._kind == "alone":
            self._contender = Alone(self._model)
        return {
            "parameters": self._model.flat.layout.size,
            "blocks": len(self._model.parts.blocks),
            "outputs": [spec.nbytes(rows) for spec in self._model.parts.outputs],
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
        }

    def costs(self, rows: int) -> dict[str, Any]:
        """Measure the blocks."""
        blocks, inputs = self._model.parts.blocks, self._model.batch.inputs[:rows]
        precision = self._model.parts.precision
        every = [measure_blocks(blocks, inputs, precision=precision, repeats=1) for _ in range(REPEATS)]
        quickest = [
            one[0]._replace(
                forward_s=min(layer.forward_s for layer in one),
                backward_s=min(layer.backward_s for layer in one),
            )
            for one in zip(*every, strict=True)
        ]
        return {"layers": quickest}

    def hold(self, cuts: list[int], schedule: ScheduleName, most: int) -> dict[str, Any]:
        """Take this rank's share.

        As memory of ours counts what a learner keeps beside it: the policy to act with. Plain torch keeps no
        more than its stage.
        """
        parts = self._model.parts
        if self._kind == "gloo":
            self._memory = Memory(self._device)
        else:
            self._model.flat.drop_gradients()
            parts.optimizer.offload()
            parts.optimizer.offload_to(
                {
                    item.name: np.broadcast_to(np.zeros((), item.dtype), item.shape)
                    for item in parts.optimizer.items()
                }
            )
        try:
            plan = plan_of(len(parts.blocks), cuts, schedule, most)
            share = WatchedShare(parts, plan, self._rank, self._device)
        except ConfigError as error:
            return {"error": str(error)}
        self._parameters = [share.parameters_P]
        self._contender = PIPELINES[self._kind](self._model, share)
        return {"parameters": share.parameters_P.numel()}

    def meet(self, **options: Any) -> dict[str, Any]:
        """Connect with the others."""
        self._own.meet(**options)
        return {}

    def prepare(self, **trial: Any) -> dict[str, Any]:
        """Find out whether there can be such a trial."""
        try:
            self._own.prepare(Trial(**trial))
        except (ConfigError, ValueError) as error:
            return {"error": str(error)}
        return {}

    def run(self, *, look: bool, **trial: Any) -> dict[str, Any]:
        """Step; ``look`` at memory instead of the clock."""
        say(ready=True)
        if self._rank == 0:
            hear()
        if not look:
            watch = Stopwatch(self._device)
            return self._own.run(Trial(**trial), watch) | watch.read()
        self._memory.begin()
        watch = Stopwatch(self._device, self._memory.peak_bytes)
        with Kept(self._parameters) as kept:
            figures = self._own.run(Trial(**trial), watch) | watch.read()
        return figures | {"peak_bytes": watch.most_bytes, "kept_bytes": kept.peak_bytes}

    def close(self) -> None:
        """End."""
        if self._contender is not None:
            self._contender.close()

    @property
    def _own(self) -> Contender:
        if self._contender is None:
            raise RuntimeError("there is no model yet")
        return self._contender


def _warm(device: torch.device) -> None:
    """Have the libraries take the memory that they need anyway."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward((x @ x).sum())


def main() -> None:
    """Do what standard input says until it ends."""
    torch.set_num_threads(1)
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    try:
        while True:
            words = hear()
            say(**getattr(worker, words.pop("do"))(**words))
    except EOFError:
        worker.close()


if __name__ == "__main__":
    main()
