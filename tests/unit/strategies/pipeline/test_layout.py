"""Who is in which pipeline, from the view and its notes alone; and which options can't be had there."""

from __future__ import annotations

import random

import pytest

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.strategies.pipeline.layout import PipelineMembers, lay_out, limits, width
from p2pdrl.strategies.pipeline.messages import PipelineNote


def members(count: int) -> tuple[str, ...]:
    return tuple(f"{number:032x}" for number in range(count))


def short(places) -> list[str]:
    return ["".join(member[-1] for member in place.members) for place in places]


def in_pipeline(generation: int, *ranks: str, alone: bool = False) -> dict[str, PipelineNote]:
    return {
        peer: PipelineNote(6, generation, ranks[0], rank, len(ranks), alone)
        for rank, peer in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("count", "most", "pipelines", "standby"),
    [
        (1, 3, ["0"], ""),
        (2, 3, ["01"], ""),
        (3, 3, ["012"], ""),
        (5, 3, ["012"], "34"),
        (7, 2, ["01", "23", "45"], "6"),
        (3, 1, ["0", "1", "2"], ""),
    ],
)
def test_the_views_order_makes_pipelines(count, most, pipelines, standby):
    layout = lay_out(members(count), {}, most)
    assert short(layout.pipelines) == pipelines
    assert "".join(member[-1] for member in layout.standby) == standby
    assert all(place.generation == 0 for place in layout.pipelines)
    assert [place.number for place in layout.pipelines] == list(range(len(pipelines)))


def test_a_whole_pipeline_is_kept_in_its_own_order():
    a, b, c, d = members(4)
    layout = lay_out((a, b, c, d), in_pipeline(7, c, b), 2)
    assert short(layout.pipelines) == ["03", "21"]
    assert [place.generation for place in layout.pipelines] == [0, 7]
    assert layout.rank0s == (a, c)


def test_one_that_lost_a_rank_or_grows_is_formed_anew():
    a, b, c, _ = members(4)
    assert lay_out((a, c), in_pipeline(7, a, b), 2).pipelines[0].generation == 0
    assert lay_out((a, b, c), in_pipeline(7, a, b), 3).pipelines[0].generation == 0
    broken = in_pipeline(7, a, b) | {b: PipelineNote(6)}
    assert lay_out((a, b), broken, 2).pipelines[0].generation == 0


def test_those_who_compute_by_themselves_stay_so():
    a, b, c, d = members(4)
    layout = lay_out((a, b, c, d), in_pipeline(3, a, b, alone=True) | in_pipeline(3, c, d), 2)
    assert [place.alone for place in layout.pipelines] == [True, False]
    assert layout.rank0s == (a, b, c)


@pytest.mark.parametrize("seed", range(50))
def test_notes_of_any_kind_give_each_member_one_place(seed: int):
    rng = random.Random(seed)
    people = members(rng.randint(1, 9))
    notes = {
        member: PipelineNote(
            6,
            rng.choice([0, 1, 2]),
            rng.choice(people),
            rng.randrange(3),
            rng.randrange(4),
            rng.random() < 0.3,
        )
        for member in people
        if rng.random() < 0.8
    }
    most = rng.randint(1, 4)
    layout = lay_out(people, notes, most)
    placed = [member for place in layout.pipelines for member in place.members]
    assert sorted([*placed, *layout.standby]) == sorted(people)
    size = min(most, len(people))
    assert all(len(place.members) == size for place in layout.pipelines)
    assert len(layout.standby) < size


def test_no_more_ranks_than_there_are_blocks():
    notes = {"a": PipelineNote(5), "b": PipelineNote(5), "c": PipelineNote()}
    assert width(notes, 8, 1) == 5
    assert width(notes, 8, 2) == 2
    assert width(notes, 3, 1) == 3
    assert width({"a": PipelineNote(1)}, 3, 2) == 1
    assert width({}, 3, 2) == 3


def test_notes_are_short_and_what_cannot_be_read_says_nothing():
    longest = PipelineNote(2**52, 2**61, "f" * 64, 63, 64, True)
    assert len(longest.encode()) <= 256
    assert PipelineNote.read(longest.encode()) == longest
    assert PipelineNote.read(b"\xc1") == PipelineNote.read(None) == PipelineNote()


PAIR = PipelineMembers(0, ("a", "b"))


def problems(config: PipelineConfig, blocks: int, pipeline: PipelineMembers | None = PAIR) -> dict[str, str]:
    notes = {"a": PipelineNote(blocks), "b": PipelineNote(blocks)}
    return {problem.key: problem.message for problem in limits(config, notes, pipeline)}


def test_too_few_blocks_for_what_each_peer_should_hold():
    few = problems(PipelineConfig(schedule="interleaved", chunks=2), 3)
    assert list(few) == ["task.strategy.chunks"]
    assert "needs 4 blocks, and this model has 3; lower chunks" in few["task.strategy.chunks"]
    assert list(problems(PipelineConfig(stages=4), 3, None)) == ["task.strategy.stages"], (
        "who stands by is told too"
    )
    assert problems(PipelineConfig(stages=3), 3) == {}
    assert problems(PipelineConfig(stages=3), 0) == {}, "nobody knows"


def test_cuts_go_unused_while_there_are_fewer_peers():
    config = PipelineConfig(stages=3, cuts=(1, 2))
    unused = problems(config, 6)
    assert list(unused) == ["task.strategy.cuts"]
    assert "pipelines of 3 peers, and go unused while this one has 2" in unused["task.strategy.cuts"]
    assert problems(config, 6, PipelineMembers(0, ("a", "b", "c"))) == {}
    assert problems(config, 6, None) == {}
