"""DQN whose gradients go through sharded servers, as in `config/gorila.toml`: one learner is plain DQN."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.node.children.supervisor import LearnerRequestChannel
from p2pdrl.rl.registry import build_trainer
from p2pdrl.strategies.registry import build
from p2pdrl.strategies.servers.server_async import weight_of
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm
from p2pdrl.workers.learner_modes import ModeRequests
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.request_stepper import RequestStepper

UPDATES = 40
TASK = resolve(
    files=["gorila"],
    sets=[
        "task.network.hidden=[16]",
        "task.algorithm.learning_starts=100",
        "task.algorithm.target_every=50",
    ],
).config.task
"""The preset's, with a small network, a memory that is soon filled, and a target that moves several times."""


class Handle:
    """The daemon's side of one learner in this process; implements `strategies.protocol.LearnerHandle`."""

    def __init__(self, board: DaemonBoard) -> None:
        self.board = board
        self.channel = LearnerRequestChannel()
        self.learning_rate = 0.0
        self.requests: ModeRequests | None = None

    async def next_request(self):
        return await self.channel.next_request()

    def answer(self, request, kind, learning_rate=None, *, end_update=False):
        content = self.board.content_id if kind == "set" else 0
        message = self.channel.answered(request, kind, content, learning_rate, end_update=end_update)
        if message is not None:
            self.requests.hear(message)

    def preempt(self):
        raise AssertionError("nobody waits for this learner")


def test_one_learner_with_two_shards_is_plain_dqn():
    assert (TASK.strategy.servers, TASK.strategy.fetch_every, TASK.strategy.ahead) == (2, 1, 0)
    alone, served = (build_trainer(TASK, seed=5, device="cpu") for _ in range(2))
    spec = BoardSpec(served.layout, served.sidecar_layout)
    region = SharedRegion.create(spec.nbytes, "test")
    handle, replica = Handle(DaemonBoard(region, spec)), Replica(served, LearnerBoard(region, spec))
    replica.publish(always=True)
    strategy = replace(TASK.strategy, compression="none")
    work, (ring,) = handle.channel.arrange(strategy.learner_mode, 1, served.layout.size)

    with asyncio.Runner() as runner:
        sim = SimSwarm(MemoryNetwork(random.Random(1), delay_s=(0.0, 0.0)))

        async def begin():
            worker, other = (sim.add(strategy, served.flat.copy()) for _ in range(2))
            worker.strategy = build(strategy, dataclasses.replace(worker.context(), learner=handle))
            sim.introduce()
            await worker.start(train=False)
            await other.start(train=False)
            async with asyncio.timeout(60):  # until the servers' parameters are on the board
                while other.strategy.facts.get("workers") != 2 or not handle.board.policy_version:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return worker, other

        worker, other = runner.run(begin())
        handle.requests = ModeRequests(
            work,
            first=1,
            say=handle.channel.posted,
            listen=lambda _: runner.run(asyncio.sleep(0.001)),
            report=handle.board.flush,
            paused=lambda: False,
        )
        slots = GradientRing(ring, strategy.learner_mode.slots, served.layout.size)
        served.stepper = RequestStepper(strategy.learner_mode, handle.requests, replica, slots)
        steps = made = seed_version = 0
        for update in range(UPDATES):
            for trainer in (alone, served):
                trainer.set_progress(update / (2 * UPDATES), steps)
            rate = TASK.algorithm.learning_rate * (1.0 - update / (2 * UPDATES))
            handle.learning_rate = other.learner.learning_rate = rate
            replica.take()
            seed_version = seed_version or served.policy_version
            alone.policy_version = seed_version + made  # as servers count: the steps behind the parameters
            assert served.policy_version == alone.policy_version
            ours, theirs = alone.step(), served.step()
            replica.moved(versions=0)
            replica.publish()
            steps += ours.env_steps
            made += ours.metrics["gradient_steps"]
            assert ours.metrics["gradient_steps"] == theirs.metrics["gradient_steps"]
            np.testing.assert_allclose(served.flat, alone.flat, rtol=0, atol=1e-6)
        assert made > 200
        assert TASK.algorithm.target_counts == "versions"
        assert made > 4 * TASK.algorithm.target_every
        assert worker.strategy.outcomes == {"ok": made}
        runner.run(worker.strategy.stop(1.0))
        runner.run(sim.close())
    for trainer in (alone, served):
        trainer.close()
    handle.channel.close()
    region.close()


def test_a_gradient_that_is_too_old_is_refused():
    most = TASK.strategy.max_staleness
    assert [weight_of(age, TASK.strategy) for age in (0, most, most + 1)] == [1.0, 1.0, 0.0]
