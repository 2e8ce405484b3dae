"""DQN with sharded servers, as in `config/gorila.toml` and `config/async_double_q.toml`.

One learner is plain DQN; a target that moves at each fetch is the worker's own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import TaskConfig
from p2pdrl.node.children.supervisor import LearnerRequestChannel
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import StepStats, Trainer
from p2pdrl.strategies.registry import build
from p2pdrl.strategies.servers.server_async import weight_of
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.optimizers import Adam
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.workers.learner_modes import ModeRequests
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.request_stepper import RequestStepper
from tests.unit.strategies.servers.swarms import Held, pulled

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
DOUBLE_Q = resolve(
    files=["async_double_q"],
    sets=["task.network.hidden=[16]", "task.algorithm.learning_starts=100", "task.strategy.servers=2"],
).config.task


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


def target_of(trainer: Trainer) -> np.ndarray:
    return trainer.sidecar()["target.q"].copy()


class Served:
    """A learner in this process, and two nodes, each of which serves half of its parameters.

    Attributes:
        trainer: the learner's.
        nodes: first the learner's own.
    """

    def __init__(self, task: TaskConfig) -> None:
        self.task, self.runner = task, asyncio.Runner()
        self.trainer = build_trainer(task, seed=5, device="cpu")
        layout = self.trainer.layout
        spec = BoardSpec(layout, self.trainer.sidecar_layout)
        self.region = SharedRegion.create(spec.nbytes, "test")
        self.handle = Handle(DaemonBoard(self.region, spec))
        self.replica = Replica(self.trainer, LearnerBoard(self.region, spec))
        self.replica.publish(always=True)
        strategy = replace(task.strategy, compression="none")
        mode = strategy.learner_mode
        work, (ring,) = self.handle.channel.arrange(mode, 1, layout.size)
        self.nodes = self.runner.run(self._begin(strategy))
        self.handle.requests = ModeRequests(
            work,
            first=1,
            say=self.handle.channel.posted,
            listen=lambda _: self.runner.run(asyncio.sleep(0.001)),
            report=self.handle.board.flush,
            paused=lambda: False,
        )
        slots = GradientRing(ring, mode.slots, layout.size)
        self.trainer.stepper = RequestStepper(mode, self.handle.requests, self.replica, slots)

    async def _begin(self, strategy: StrategyConfig) -> tuple[SimNode, SimNode]:
        sim = SimSwarm(MemoryNetwork(random.Random(1), delay_s=(0.0, 0.0)))
        worker, other = (sim.add(strategy, self.trainer.flat.copy()) for _ in range(2))
        worker.strategy = build(strategy, dataclasses.replace(worker.context(), learner=self.handle))
        sim.introduce()
        await worker.start(train=False)
        await other.start(train=False)
        async with asyncio.timeout(60):  # until the servers' parameters are on the board
            while other.strategy.facts.get("workers") != 2 or not self.handle.board.policy_version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.sim = sim
        return worker, other

    def take(self) -> None:
        """Load what is on the board."""
        self.replica.take()

    def step(self, learning_rate: float) -> StepStats:
        """Make an update, whose gradients the servers step with at that rate."""
        self.handle.learning_rate = self.nodes[1].learner.learning_rate = learning_rate
        stats = self.trainer.step()
        self.replica.moved(versions=0)
        self.replica.publish()
        return stats

    def pull(self, server: SimNode, asker: SimNode) -> Held:
        """Return all that a node's server holds."""
        return self.runner.run(pulled(server, asker))

    def close(self) -> None:
        self.runner.run(self.nodes[0].strategy.stop(1.0))
        self.runner.run(self.sim.close())
        self.runner.close()
        self.trainer.close()
        self.handle.channel.close()
        self.region.close()


@pytest.fixture
def serve() -> Iterator[Callable[[TaskConfig], Served]]:
    made: list[Served] = []

    def make(task: TaskConfig) -> Served:
        made.append(Served(task))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_learner_with_two_shards_is_plain_dqn(serve):
    assert (TASK.strategy.servers, TASK.strategy.fetch_every, TASK.strategy.ahead) == (2, 1, 0)
    alone, served = build_trainer(TASK, seed=5, device="cpu"), serve(TASK)
    steps = made = seed_version = 0
    for update in range(UPDATES):
        for trainer in (alone, served.trainer):
            trainer.set_progress(update / (2 * UPDATES), steps)
        served.take()
        seed_version = seed_version or served.trainer.policy_version
        alone.policy_version = seed_version + made  # as servers count: the steps behind the parameters
        assert served.trainer.policy_version == alone.policy_version
        rate = TASK.algorithm.learning_rate * (1.0 - update / (2 * UPDATES))
        ours, theirs = alone.step(), served.step(rate)
        steps += ours.env_steps
        made += ours.metrics["gradient_steps"]
        assert ours.metrics["gradient_steps"] == theirs.metrics["gradient_steps"]
        np.testing.assert_allclose(served.trainer.flat, alone.flat, rtol=0, atol=1e-6)
    assert made > 200
    assert TASK.algorithm.target_counts == "versions"
    assert made > 4 * TASK.algorithm.target_every
    assert served.nodes[0].strategy.outcomes == {"ok": made}
    alone.close()


class Watched:
    """A learner's stepper, after each of whose steps a test looks."""

    def __init__(self, stepper: RequestStepper, look: Callable[[], None]) -> None:
        self.stepper, self.look = stepper, look

    @property
    def ends_update(self) -> bool:
        return self.stepper.ends_update

    def step(self, optimizer, **options) -> float:
        norm = self.stepper.step(optimizer, **options)
        self.look()
        return norm


def test_a_workers_own_target_follows_each_fetch_and_no_server_knows_of_it(serve):
    algorithm = DOUBLE_Q.algorithm
    assert (algorithm.double, algorithm.target_moves, DOUBLE_Q.strategy.fetch_every) == (True, "fetch", 1)
    served, tau = serve(DOUBLE_Q), algorithm.target_tau
    trainer, (worker, other) = served.trainer, served.nodes
    half = -(-trainer.layout.size // 2)
    served.take()
    seen = [target_of(trainer)]
    fetched = [trainer.flat.copy()]

    def look() -> None:
        expected = tau * trainer.flat.astype(np.float64) + (1 - tau) * seen[-1]
        np.testing.assert_allclose(target_of(trainer), expected, rtol=0, atol=1e-7)
        seen.append(target_of(trainer))
        fetched.append(trainer.flat.copy())

    trainer.stepper = Watched(trainer.stepper, look)
    made = sum(served.step(1e-2).metrics["gradient_steps"] for _ in range(6))
    assert made >= 3 * algorithm.gradient_steps
    assert worker.strategy.outcomes == {"ok": made}
    assert len(seen) == made + 1
    for vectors in (seen, fetched):
        assert len({vector.tobytes() for vector in vectors}) == made + 1
    np.testing.assert_array_equal(target_of(trainer), seen[-1])  # nothing else moved it

    shards = sorted((served.pull(server, asker) for server, asker in ((worker, other), (other, worker))))
    assert [shard.span for shard in shards] == [(0, half - 1), (half, trainer.layout.size - 1)]
    np.testing.assert_array_equal(np.concatenate([shard.parameters for shard in shards]), trainer.flat)
    for shard in shards:  # parameters, and Adam's two means and count
        assert shard.vectors == 1 + len(Adam.slots)
        assert shard.scalars == {"steps": made}


def test_a_target_that_comes_with_a_state_is_taken_as_it_is(serve):
    served = serve(DOUBLE_Q)
    trainer = served.trainer
    served.take()
    state = {name: array.copy() for name, array in trainer.sidecar().items()}
    state["target.q"] += 1.0
    served.replica.publish()
    version = served.handle.board.policy_version + 1
    served.handle.board.post_set(trainer.flat + 3.0, state, version)
    served.take()
    assert trainer.policy_version == version
    np.testing.assert_array_equal(target_of(trainer), state["target.q"])


def test_a_gradient_that_is_too_old_is_refused():
    most = TASK.strategy.max_staleness
    assert [weight_of(age, TASK.strategy) for age in (0, most, most + 1)] == [1.0, 1.0, 0.0]
