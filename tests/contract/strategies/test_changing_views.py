"""What every strategy with a group does while its views end at any moment: it goes on, and lets others run.

Members are doubted, views are asked for anew, also within the few steps in which a round ends; learners
pause, nodes freeze, messages are lost, members are forgotten, and modes end. Whatever was, all make rounds
again soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pdrl.group.rendezvous import ranked
from p2pdrl.strategies.registry import build
from p2pdrl.testing.virtual_swarm import SimNode

from .crowd import PERIOD_S, Crowd, Sent, moved, now
from .promises import ALL, Case

slow = pytest.mark.slow
pytestmark = [pytest.mark.looptime, pytest.mark.timeout(120)]

GROUPED = {name: case for name, case in ALL.items() if case.grouped}
SEEDS = [0, *(pytest.param(seed, marks=slow) for seed in range(1, 31))]
HOSTILE_S = 12.0
WITHIN_S = 60.0
"""Who was doubted often rests half a minute."""
DELAYS_S = [(0.0, 0.0), (0.001, 0.003), (0.0, 0.05)]
MOST_STEPS = 16


def renew(node: SimNode) -> None:
    group = node.group
    if group is not None and group.view is not None:
        group.renew(group.view.key, "for the test")


def after(steps: int, work: Callable[[], None]) -> None:
    """Do ``work`` when the loop has gone round so often, at this moment of its time."""
    if steps:
        asyncio.get_running_loop().call_soon(after, steps - 1, work)
    else:
        work()


class Foul:
    """Does something to somebody now and then; all random numbers come from ``seed``."""

    def __init__(self, crowd: Crowd, seed: int) -> None:
        self.crowd, self.rng = crowd, random.Random(seed)
        self.epoch = 1
        self.tasks: list[asyncio.Task[None]] = []
        for node in crowd.nodes:
            node.transport.on_call = self.as_it_is_sent

    def as_it_is_sent(self, sent: Sent) -> None:
        """A vector is under way, so that a round is about to end somewhere."""
        if sent.vector and self.rng.random() < 0.1:
            node = self.rng.choice(self.crowd.living)
            later = self.rng.choice([0.0, *self.crowd.network.delay_s])
            loop, steps = asyncio.get_running_loop(), self.rng.randrange(MOST_STEPS)
            loop.call_later(later, after, steps, lambda: renew(node))

    async def play(self) -> None:
        moves = [self.doubts, self.renews, self.pauses, self.freezes, self.loses, self.forgets, self.switches]
        until_s = now() + HOSTILE_S
        while now() < until_s:
            await asyncio.sleep(self.rng.expovariate(1 / 0.2))
            move = self.rng.choices(moves, [4, 4, 2, 1, 1, 1, 1])[0]
            self.tasks.append(asyncio.create_task(move(self.rng.choice(self.crowd.nodes)), name="foul"))
        await asyncio.gather(*self.tasks)

    async def doubts(self, node: SimNode) -> None:
        group, other = node.group, self.rng.choice(self.crowd.nodes)
        if group is not None and other is not node:
            group.doubt(other.id, "for the test")

    async def renews(self, node: SimNode) -> None:
        renew(node)

    async def pauses(self, node: SimNode) -> None:
        node.learner.period_s = self.rng.uniform(0.5, 6.0)
        await asyncio.sleep(node.learner.period_s)
        node.learner.period_s = PERIOD_S

    async def freezes(self, node: SimNode) -> None:
        self.crowd.network.freeze(node.id)
        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        self.crowd.network.thaw(node.id)

    async def loses(self, _node: SimNode) -> None:
        self.crowd.network.loss = 0.2
        await asyncio.sleep(self.rng.uniform(0.1, 2.0))
        self.crowd.network.loss = 0.0

    async def forgets(self, node: SimNode) -> None:
        for other in self.crowd.nodes:
            other.swarm.peers.pop(node.id, None)
        await asyncio.sleep(self.rng.uniform(0.1, 2.0))
        self.crowd.swarm.introduce()

    async def switches(self, _node: SimNode) -> None:
        """A mode ends, and the next one has the same strategy; all hear of it at about the same time."""
        self.epoch += 1
        epoch = self.epoch

        async def follow(node: SimNode) -> None:
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            async with self.turn(node):
                if node.epoch < epoch:
                    await node.switch(node.config, epoch)

        await asyncio.gather(*(follow(node) for node in self.crowd.nodes))

    def turn(self, node: SimNode) -> asyncio.Lock:
        if not hasattr(node, "turn"):
            node.turn = asyncio.Lock()
        return node.turn


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", GROUPED.values(), ids=list(GROUPED))
async def test_views_that_end_at_any_moment_keep_nobody_for_long(case: Case, seed: int):
    rng = random.Random(1000 + seed)
    fewest = 2 if case.route == "neighbour" else 1  # it counts no rounds without neighbours
    async with Crowd(case, nodes=max(fewest, 1 + seed % 4) if seed else 3, seed=seed) as crowd:
        crowd.network.delay_s = rng.choice(DELAYS_S)
        await crowd.start()
        await Foul(crowd, seed).play()
        crowd.swarm.introduce()
        for node in crowd.nodes:
            node.transport.on_call = lambda sent: None
            await assert_no_bug(node)
        await crowd.rounds(3, within_s=WITHIN_S)


@pytest.mark.parametrize("case", GROUPED.values(), ids=list(GROUPED))
async def test_a_proposer_that_has_had_rounds_enough_holds_up_nobody(case: Case):
    """It lives, so that nobody can do without it by doubting it."""
    async with Crowd(case, nodes=3, seed=4) as crowd:
        first = ranked("group 1", [node.id for node in crowd.nodes])[0]
        enough = next(node for node in crowd.nodes if node.id == first)
        enough.strategy = build(case.config, replace(enough.context(), max_exchanges=3))
        await crowd.start()
        await crowd.until(lambda: moved(enough, case) >= 3)
        others = [node for node in crowd.nodes if node is not enough]
        await crowd.rounds(3, others, within_s=4 * case.deadline_s)
        assert case.route == "stage" or enough.times[-1] > now() - 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", GROUPED.values(), ids=list(GROUPED))
async def test_who_has_had_rounds_enough_keeps_nobody_either(case: Case, seed: int):
    rng = random.Random(2000 + seed)
    async with Crowd(case, nodes=1 + seed % 3 if seed else 2, seed=seed) as crowd:
        crowd.network.delay_s = rng.choice(DELAYS_S)
        for node in crowd.nodes:
            node.strategy = build(node.config, replace(node.context(), max_exchanges=rng.randint(1, 20)))
        await crowd.start()
        foul = Foul(crowd, seed)
        foul.switches = foul.renews
        await foul.play()
        crowd.swarm.introduce()
        times = {node.id: now() for node in crowd.nodes}
        for node in crowd.nodes:
            await assert_no_bug(node)
        if case.route != "stage":  # its learners work by orders
            await crowd.until(lambda: all(node.times[-1] > times[node.id] for node in crowd.nodes), WITHIN_S)


async def assert_no_bug(node: SimNode) -> None:
    """What ended a strategy before it was stopped comes out of its watch."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(node.strategy.watch(), 0.01)
