"""What `auto` chose and didn't work isn't chosen again; whether an update was made is seen by versions."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.pipeline.orders import term_of
from p2pdrl.strategies.pipeline.term import Term
from p2pdrl.strategies.pipeline.trial import LONGEST, Trial
from p2pdrl.strategies.testing.swarm import FakeSwarm

from .forms import make_form

FORM = make_form(backend="torch")


def ended(*said: StageNews, rank: int = 0, **changes: object) -> tuple[Term, StageNews]:
    term = term_of(PipelineConfig(), msgspec.structs.replace(FORM, **changes), rank, "10.0.0.1")
    for news in said:
        term.hear(news)
    return term, said[-1]


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
    trial = Trial(swarm, counts=True)
    trial.ended(*ended(*said))
    assert bool(trial.failed) == fails
    assert [kind for kind, _ in swarm.told] == ["pipeline-backend"] * fails
    if fails:
        assert trial.failed == "generation 9 broke over torch before its first update: no NCCL here"
        assert "run over stream" in swarm.told[0][1]


async def test_only_of_pipelines_over_torch_that_we_head():
    trial = Trial(FakeSwarm("a"), counts=True)
    trial.ended(*ended(READY, news("broken", 40), backend="stream"))
    trial.ended(*ended(READY, news("broken", 40), rank=1))
    assert not trial.failed


async def test_ranks_that_dont_meet_fail_too_and_the_first_failure_is_told():
    swarm = FakeSwarm("a")
    trial = Trial(swarm, counts=True)
    trial.unmet(3, "x" * 1000)
    trial.unmet(4, "later")
    assert trial.failed == "the ranks of generation 3 couldn't meet over torch: " + "x" * LONGEST
    assert len(swarm.told) == 1


async def test_what_people_asked_for_is_tried_again_and_again():
    swarm = FakeSwarm("a")
    trial = Trial(swarm, counts=False)
    trial.unmet(3, "no NCCL")
    trial.ended(*ended(READY, news("broken", 40)))
    assert (trial.failed, swarm.told) == ("", [])
