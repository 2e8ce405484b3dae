"""Processor time of an agent step: each actor with a policy of its own, against one that acts for all.

In one process: actors are threads that ask through shared memory and doorbells, as processes do, and the
main thread answers (`p2pdrl.workers.inference`). Eight environments that cost next to nothing are divided
among the actors. Printed are medians of microseconds of processor time for each step of an environment, by
CartPole's MLP and by the Nature CNN on stacks of 84 x 84 pictures, and how many environments a batch had.
Unlike steps a second it tells something on a busy machine; what processes would do at the same time, it
doesn't say.

    python scripts/bench_inference.py --counts 1 2 4 8 --rounds 3
"""

from __future__ import annotations

import argparse
import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

import support.slow_env
from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.tensors.inference_slots import StepLanes
from p2pdrl.tensors.shared_memory import Doorbell, SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.workers.actor import StepAsker
from p2pdrl.workers.inference import ActorBatches, InferenceWorker, StepBatcher

ENVIRONMENTS = 8
TASKS = {
    "mlp": TaskConfig(env=EnvConfig(num_envs=ENVIRONMENTS), algorithm=PPOConfig(unroll_steps=32)),
    "nature_cnn": TaskConfig(
        env=EnvConfig(id=support.slow_env.PICTURES, num_envs=ENVIRONMENTS),
        algorithm=PPOConfig(unroll_steps=16),
    ),
}


class Actors:
    """So many actors, twice: with policies of their own, and with one that they ask."""

    def __init__(self, task: TaskConfig, count: int) -> None:
        share = ENVIRONMENTS // count
        self.steps = task.algorithm.unroll_steps * share * count  # type: ignore[union-attr]
        inference = PolicyInference(task, 1)
        shape = inference.obs_shape
        self._acting = ActingPolicy(1, 0.0, np.zeros(shape), np.ones(shape))
        self._alone = [RolloutWorker(task, number, share) for number in range(count)]
        region = SharedRegion.create(SharedPolicy.nbytes_of(inference.size, shape), "policy")
        SharedPolicy(region, inference.size, shape).write(self._alone[0].parameters_D, self._acting)
        spec = inference.step_spec((share,) * count)
        lanes = StepLanes(SharedRegion.create(spec.nbytes, "steps"), spec)
        self._asked, bells = Doorbell.create(), tuple(Doorbell.create() for _ in range(count))
        self._batches = ActorBatches(
            InferenceWorker(inference, region, inference.size),
            lanes,
            self._asked,
            bells,
            batcher=StepBatcher(spec.shares, ENVIRONMENTS, 0.002),
        )
        self._sockets = socket.socketpair()
        self._askers = [
            StepAsker(lane, self._asked, bell, self._sockets[0])
            for lane, bell in zip(lanes.lanes, bells, strict=True)
        ]
        self._asking = [
            RolloutWorker(task, number, share, asked=asker) for number, asker in enumerate(self._askers)
        ]

    def alone(self) -> None:
        """Let each make an unroll by itself."""
        for worker in self._alone:
            worker.collect(self._acting)

    def batched(self) -> None:
        """Let each make an unroll by asking."""

        def act(number: int) -> None:
            self._askers[number].begin()
            self._asking[number].collect()
            self._askers[number].end()

        threads = [threading.Thread(target=act, args=(number,)) for number in range(len(self._asking))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self._batches.serve() != 0.0:
                select.select([self._asked.waiter], [], [], 0.05)

    def environments(self) -> float:
        """Mean environments of a batch since the last call."""
        time.sleep(1.0)
        told = self._batches.news()
        return statistics.mean(told.environments) if told is not None else float("nan")


def cost_us(unroll: Callable[[], None], steps: int, unrolls: int) -> float:
    """Return microseconds of this process for a step."""
    began_s = time.process_time()
    for _ in range(unrolls):
        unroll()
    return 1e6 * (time.process_time() - began_s) / (unrolls * steps)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of actors")
    parser.add_argument("--networks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for network in options.networks:
        for count in options.counts:
            actors, unrolls = Actors(TASKS[network], count), 10 if network == "mlp" else 2
            actors.alone()
            actors.batched()
            rounds = [
                (cost_us(actors.alone, actors.steps, unrolls), cost_us(actors.batched, actors.steps, unrolls))
                for _ in range(options.rounds)
            ]
            local_us, batched_us = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(
                f"{network:10} {count} actors: local {local_us:6.0f} µs a step, "
                f"batched {batched_us:6.0f} µs, {local_us / batched_us:4.2f} ×; "
                f"{actors.environments():.1f} environments in a batch",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
