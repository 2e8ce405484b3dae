"""What people are told, what counts as a round, and what nodes show."""

from __future__ import annotations

import random

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.config.checks import Problem
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.strategies.pipeline.events import PipelineEvents, PipelineStatus
from p2pdrl.strategies.pipeline.forming import generation_of
from p2pdrl.strategies.pipeline.layout import lay_out
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.testing.virtual_swarm import FakeSwarm

from .forms import make_form

pytestmark = pytest.mark.looptime

CONFIG = PipelineConfig(backend="stream")


def events() -> tuple[PipelineEvents, FakeSwarm]:
    swarm = FakeSwarm("a")
    swarm.name_of = {"a": "ann", "b": "bob", "c": "cid"}.__getitem__
    context = StrategyContext(swarm, None, None, LoopClock(), random.Random(0), 1, 4, 1e6)
    return PipelineEvents(context), swarm


def generation(rank: int = 0, **changes):
    form = make_form(cuts=(2,), step_s=0.2, bubble=0.25)
    made = generation_of(CONFIG, msgspec.structs.replace(form, **changes), rank)
    made.formed = True
    return made


async def test_who_holds_what_and_what_is_predicted():
    told, swarm = events()
    told.formed(generation())
    ((kind, text),) = swarm.told
    assert kind == "pipeline"
    assert "ann blocks 0-1, bob blocks 2-5; 1f1b, 4 microbatches, 0.20 s a step and bubbles of 25%" in text


async def test_why_it_runs_over_what_it_does_is_told_unless_nobody_runs_over_anything():
    told, swarm = events()
    told.formed(generation(), "it runs over torch, for that is quick")
    assert "it runs over torch, for that is quick (generation 9, from version 0)" in swarm.told[0][1]
    told.formed(generation(alone=True, cuts=()), "it runs over torch, for that is quick")
    assert "torch" not in swarm.told[1][1]


@pytest.mark.parametrize("rank", [0, 1])
async def test_all_ranks_say_why_each_computes_by_itself(rank):
    told, swarm = events()
    alone = generation(rank, alone=True, cuts=(), why="a pipeline would take 9 ms a step")
    told.formed(alone)
    twice = generation(rank, alone=True, cuts=(), why="no pipeline: a link is gone")
    told.formed(twice)
    assert swarm.told.pop()[1] == "no pipeline of ann, bob: each computes by itself. a link is gone"
    assert swarm.told == [
        ("pipeline-refused", f"no pipeline of ann, bob: each computes by itself. {alone.form.why}")
    ]
    layout = lay_out(("a", "b"), {}, 2)
    assert told.figures(layout, "ab"[rank], alone).why == "a pipeline would take 9 ms a step"


async def test_what_was_asked_for_in_vain_is_told_once_and_shown_in_every_place():
    told, swarm = events()
    few = Problem("task.strategy.stages", "4 stages need as many blocks")
    told.limited([few])
    told.limited([few])
    ((kind, text),) = swarm.told
    assert kind == "pipeline-refused"
    assert text.endswith("task.strategy.stages: 4 stages need as many blocks")
    layout = lay_out(("a", "b", "c"), {}, 2)
    standby, forming = (told.figures(layout, one, None) for one in "ca")
    at_work = told.figures(layout, "b", generation(1, why="it pays"))
    assert (
        standby.limit
        == forming.limit
        == at_work.limit
        == "task.strategy.stages: 4 stages need as many blocks"
    )
    assert (standby.why, at_work.why) == ("", "it pays")
    assert told.facts(standby)["limited"] == told.facts(at_work)["limited"] == standby.limit
    told.limited([])
    assert told.figures(layout, "c", None).limit == ""
    assert len(swarm.told) == 1


@pytest.mark.parametrize(
    ("copied", "behind", "lineage", "begins", "back"),
    [(36, 4, "aa", 37, 3), (36, 4, "aa", 40, 0), (30, 0, "aa", 37, 0), (36, 4, "bb", 37, None)],
)
async def test_with_which_version_it_begins_and_how_far_back_that_is(copied, behind, lineage, begins, back):
    told, swarm = events()
    before = generation(1, generation=8, lineage=lineage)
    told.ended(before, StageNews(8, "broken", "previous", "gone", policy_version=copied, behind=behind))
    again = generation(policy_version=begins)
    told.formed(again)
    kind, text = swarm.told[-1]
    assert kind == "pipeline"
    begun = {"generation": 9, "policy_version": begins}
    assert swarm.facts[-1] == begun | ({} if back is None else {"updates_back": back})
    assert text.endswith(f"(generation 9, from version {begins}{f', {back} updates back' if back else ''})")
    assert told.figures(lay_out(("a", "b"), {}, 2), "a", again).from_version == begins
    told.formed(generation(generation=10, policy_version=begins - 1))
    assert "updates_back" not in swarm.facts[-1], "nobody told how generation 9 ended"


async def test_a_state_copy_is_a_round_and_so_is_the_end():
    told, swarm = events()
    copied = generation()
    told.copied(copied)
    over = StageNews(9, "over")
    assert told.ended(copied, over)
    assert not told.ended(copied, over), "an end is told once"
    assert told.rounds.outcomes == {"ok": 2}
    assert [(one.peer, one.weight) for one in swarm.rounds[0].merged] == [("a", 0.5), ("b", 0.5)]
    told.copied(generation(alone=True, cuts=()))
    assert [one.peer for one in swarm.rounds[-1].merged] == ["a"]


@pytest.mark.parametrize(
    ("rank", "side", "missing"),
    [(0, "next", ("b",)), (1, "previous", ("a",)), (0, None, ()), (1, "next", ("a",))],
)
async def test_what_broke_is_a_failed_round_with_the_neighbour(rank, side, missing):
    told, swarm = events()
    told.ended(generation(rank), StageNews(9, "broken", side, "it was silent"))
    (report,) = swarm.rounds
    assert (report.outcome, report.missing, report.error) == ("broken", missing, "it was silent")
    assert swarm.told[0][0] == "pipeline-broken"


async def test_standing_by_is_told_once():
    told, swarm = events()
    layout = lay_out(("a", "b", "c"), {}, 2)
    told.standing_by(layout)
    told.standing_by(layout)
    assert swarm.told == [
        ("standby", "stands by: the pipeline of ann has all peers; it takes part once peers come or go")
    ]
    told.standing_by(lay_out(("a", "b", "c", "d", "e"), {}, 2))
    assert swarm.told[-1][1].startswith("stands by: the pipelines of ann, cid have all peers;")


async def test_figures_of_every_place():
    told, _ = events()
    assert told.figures(None, "a", None) == PipelineStatus()
    layout = lay_out(("a", "b", "c"), {}, 2)
    assert told.figures(layout, "c", None).role == "standby"
    forming = told.figures(layout, "b", None)
    assert (forming.role, forming.ranks) == ("forming", ("ann", "bob"))
    at_work = told.figures(layout, "b", generation(1))
    assert (at_work.role, at_work.blocks, at_work.stages) == ("pipeline 0 rank 1", (2, 3, 4, 5), (1,))
    facts = told.facts(at_work)
    assert (facts["blocks"], facts["ranks"], facts["generation"]) == ("2-5", "ann, bob", 9)
    assert told.facts(told.figures(layout, "c", None)) == {"role": "standby", "pipelines": 1}
    alone = told.figures(layout, "b", generation(1, alone=True, cuts=()))
    assert (alone.role, alone.backend, alone.blocks) == ("alone", "none", (0, 1, 2, 3, 4, 5))
    assert len(at_work.role) <= 64
