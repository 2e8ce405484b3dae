"""Who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import make_schedule


def test_stages_are_dealt_out_in_turn():
    plan = PipelinePlan(blocks=9, cuts=(1, 3, 4, 6, 8), schedule="interleaved", microbatches=3, ranks=3)
    assert plan.stages == 6
    assert [list(plan.stages_of(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [list(plan.blocks_of(stage)) for stage in range(6)] == [[0], [1, 2], [3], [4, 5], [6, 7], [8]]
    assert [plan.numbers(rank) for rank in range(3)] == [(0, 4, 5), (1, 2, 6, 7), (3, 8)]


@given(st.data())
def test_every_block_has_one_rank(data):
    blocks = data.draw(st.integers(1, 12))
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, blocks - 1)) if blocks > 1 else st.just(set()))))
    ranks = len(cuts) + 1
    schedule = "1f1b"
    if ranks % 2 == 0:
        schedule, ranks = "interleaved", ranks // 2
    plan = PipelinePlan(blocks, cuts, schedule, 1, ranks)
    numbers = [number for rank in range(ranks) for number in plan.numbers(rank)]
    assert sorted(numbers) == list(range(blocks))


def test_actions_are_the_schedules():
    plan = PipelinePlan(blocks=4, cuts=(2,), schedule="1f1b", microbatches=4, ranks=2)
    assert plan.actions(1, 3) == make_schedule("1f1b", 2, 3)[1]


@pytest.mark.parametrize(
    ("rows", "parts"), [(0, 1), (1, 1), (3, 3), (4, 4), (5, 4), (7, 6), (8, 8), (100, 8)]
)
def test_a_batch_is_cut_as_far_as_its_rows_and_the_schedule_allow(rows, parts):
    """Interleaved on two ranks takes 1, 2, 3, and from there on even numbers."""
    plan = PipelinePlan(blocks=4, cuts=(1, 2, 3), schedule="interleaved", microbatches=8, ranks=2)
    assert plan.parts(rows) == parts
    plan.actions(0, parts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cuts": (2, 2)}, "cuts must rise"),
        ({"cuts": (0,)}, "cuts must rise"),
        ({"cuts": (4,)}, "at most 3, the last block's number"),
        ({"microbatches": 0}, "1 to 65536 parts"),
        ({"microbatches": 1 << 17}, "1 to 65536 parts"),
        ({"ranks": 3}, "one stage per rank"),
        ({"schedule": "dualpipe"}, "there is no schedule"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change, words):
    good = {"blocks": 4, "cuts": (2,), "schedule": "1f1b", "microbatches": 4, "ranks": 2}
    PipelinePlan(**good)
    with pytest.raises(ConfigError, match=words):
        PipelinePlan(**good | change)
