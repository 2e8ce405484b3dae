"""A live swarm changes from every strategy to others (slow: to every other one), and back, on the same nodes.

While nobody learns, the mean of all vectors is what the swarm has learnt: a change of mode may not touch it.
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from p2pdrl.testing.virtual_swarm import SimNode

from .crowd import SIZE, Crowd, moved
from .promises import ALL, Case

pytestmark = pytest.mark.looptime

PHASE_S = 0.9
TOLERANCE = 1e-5


def scatter(crowd: Crowd) -> None:
    """Let every learner be somewhere else: as after long training alone."""
    for node in crowd.nodes:
        learner = node.learner
        learner.absorb()
        learner.x = (learner.x + crowd.rng.standard_normal(SIZE)).astype(np.float32)
        learner.publish()


def drift(before: np.ndarray, after: np.ndarray) -> float:
    """How far a mean moved, relative to itself."""
    return float(np.abs(after - before).max() / np.abs(before).max())


async def change(node: SimNode, case: Case, epoch: int, after_s: float) -> None:
    """Change one node, a moment after the others."""
    await asyncio.sleep(after_s)
    await node.switch(case.config, epoch)


async def walk(crowd: Crowd, names: list[str]) -> dict[str, float]:
    """Change from mode to mode; return how far the mean moved on the way to, and within, each."""
    drifts: dict[str, float] = {}
    for epoch, (old, name) in enumerate(itertools.pairwise(names), start=2):
        case = ALL[name]
        before = crowd.mean()
        await asyncio.gather(
            *(change(node, case, epoch, 0.03 * number) for number, node in enumerate(crowd.nodes))
        )
        if not (ALL[old].keeps_mean and case.keeps_mean):
            before = crowd.mean()
        await asyncio.sleep(PHASE_S)
        for node in crowd.nodes:
            assert np.isfinite(node.learner.now()).all()
            assert node.swarm.strikes == node.swarm.heals == []
            if case.route and not case.still_rate:
                assert moved(node, case) >= 1, (old, name, crowd.outcomes())
        if case.keeps_mean:
            drifts[f"{old} -> {name}"] = drift(before, crowd.mean())
        await asyncio.gather(*(node.strategy.stop(1.0) for node in crowd.nodes))
        if case.keeps_mean:
            drifts[f"{old} -> {name}, ended"] = drift(before, crowd.mean())
        scatter(crowd)
    return drifts


NAMES = list(ALL)


def others_of(name: str) -> list[str]:
    """Two others for each, so that everyone is gone to from four, and to each of them."""
    at = NAMES.index(name)
    return [NAMES[(at + hop) % len(NAMES)] for hop in (1, 6)]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *(pytest.param(name, others_of(name), id=name) for name in NAMES),
        *(
            pytest.param(name, NAMES[at + 1 :], id=f"{name}, all", marks=pytest.mark.slow)
            for at, name in enumerate(NAMES[:-1])
        ),
    ],
)
async def test_to_other_modes_and_back(name: str, others: list[str]):
    path = [name] + [step for other in others for step in (other, name)]
    async with Crowd(ALL[name], learning_rate=0.0, seed=8) as crowd:
        for node in crowd.nodes:
            node.learner.learning_rate = 0.0
        await crowd.start()
        await asyncio.sleep(PHASE_S)
        drifts = await walk(crowd, path)
        assert {pair: by for pair, by in drifts.items() if by > TOLERANCE} == {}
