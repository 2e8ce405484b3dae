"""What `auto` chose and didn't work isn't chosen again; whether an update was made is seen by versions."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.pipeline.backend import LONGEST, BackendFallback
from p2pdrl.strategies.pipeline.forming import generation_of
from p2pdrl.strategies.pipeline.generation import Generation
from p2pdrl.testing.virtual_swarm import FakeSwarm

from .forms import make_form

FORM = make_form(backend="torch")


def ended(*said: StageNews, rank: int = 0, **changes: object) -> tuple[Generation, StageNews]:
    generation = generation_of(PipelineConfig(), msgspec.structs.replace(FORM, **changes), rank, "10.0.0.1")
    for news in said:
        generation.hear(news)
    return generation, said[-1]


def news(what, version: int = 0) -> StageNews:
    return StageNews(9, what, why="no NCCL here" if what == "broken" else "", policy_version=version)


READY = news("ready", 40)


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        ((READY, news("broken", 40)), True),
        ((READY, news("broken", 41)), False),
        ((READY, news("copied", 50), news("broken", 52)), False),
        ((READY, news("broken", 0)), True),  # its learner died, which tells no version
        ((READY, news("copied", 50), news("broken", 0)), False),
        ((news("broken", 40),), True),
        ((READY, news("over", 40)), False),
    ],
)
async def test_it_fails_by_breaking_before_the_first_update(said, fails: bool):
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=True)
    fallback.ended(*ended(*said))
    assert bool(fallback.failed) == fails
    assert [kind for kind, _ in swarm.told] == ["pipeline-backend"] * fails
    if fails:
        assert fallback.failed == "generation 9 broke over torch before its first update: no NCCL here"
        assert "run over stream" in swarm.told[0][1]


async def test_only_of_pipelines_over_torch_that_we_head():
    fallback = BackendFallback(FakeSwarm("a"), counts=True)
    fallback.ended(*ended(READY, news("broken", 40), backend="stream"))
    fallback.ended(*ended(READY, news("broken", 40), rank=1))
    assert not fallback.failed


async def test_ranks_that_dont_meet_fail_too_and_the_first_failure_is_told():
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=True)
    fallback.unmet(3, "x" * 1000)
    fallback.unmet(4, "later")
    assert fallback.failed == "the ranks of generation 3 couldn't meet over torch: " + "x" * LONGEST
    assert len(swarm.told) == 1


async def test_what_people_asked_for_is_tried_again_and_again():
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=False)
    fallback.unmet(3, "no NCCL")
    fallback.ended(*ended(READY, news("broken", 40)))
    assert (fallback.failed, swarm.told) == ("", [])
