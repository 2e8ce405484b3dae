"""Pictures, letter by letter where they are small."""

from __future__ import annotations

import re

import pytest

from p2pdrl.pipeline.schedule import make_schedule
from p2pdrl.pipeline.timeline import MicrobatchCosts, draw, predict


def drawn(name, stages, microbatches, width, ranks=None, forward_s=1.0, backward_s=2.0):
    costs = MicrobatchCosts((forward_s,) * stages, (backward_s,) * stages)
    return draw(predict(make_schedule(name, stages, microbatches, ranks=ranks), costs), width)


def test_gpipe():
    assert drawn("gpipe", 2, 3, 80) == [
        "rank 0  F1 F2 F3 .........B1--- B2--- B3--- ",
        "rank 1  ...F1 F2 F3 B1--- B2--- B3--- ......",
        "        0                               12 s",
    ]


def test_1f1b_has_a_space_less_where_it_is_tight():
    assert drawn("1f1b", 3, 4, 50) == [
        "rank 0  F1F2F3........B1- F4B2- ..B3- ..B4- ",
        "rank 1  ..F1F2....B1- F3B2- F4B3- ..B4- ....",
        "rank 2  ....F1B1- F2B2- F3B3- F4B4- ........",
        "        0                               18 s",
    ]


def test_interleaved_tells_the_stages_of_a_rank_apart():
    assert drawn("interleaved", 4, 2, 100, ranks=2, backward_s=1.0) == [
        "rank 0  F1a F2a F1b F2b ....B1b ....B2b B1a B2a ",
        "rank 1  ....F1a F2a F1b B1b F2b B2b B1a B2a ....",
        "        0                                   10 s",
    ]


@pytest.mark.parametrize("width", [30, 60, 100, 200])
@pytest.mark.parametrize(
    "case", [("gpipe", 3, 40), ("1f1b", 12, 40), ("interleaved", 12, 12, 3), ("1f1b", 1, 1)]
)
def test_it_fits_whatever_the_width(case, width):
    name, stages, microbatches, *ranks = case
    lines = drawn(name, stages, microbatches, width, ranks=ranks[0] if ranks else None)
    rows = lines[:-1]
    assert len(rows) == (ranks[0] if ranks else stages)
    assert len({len(row) for row in rows}) == 1
    assert max(map(len, lines)) <= width
    assert lines[-1].endswith(" s")
    for rank, row in enumerate(rows):
        assert re.fullmatch(rf"rank {rank} +[FBa-d0-9. -]+", row)


def test_the_dots_are_the_bubble():
    for row in drawn("gpipe", 4, 4, 200)[:-1]:
        cells = row[len("rank 0  ") :]
        assert cells.count(".") / len(cells) == pytest.approx(3 / 7)


def test_what_takes_no_time_isnt_drawn():
    assert drawn("gpipe", 1, 2, 80, backward_s=0.0) == ["rank 0  F1 F2 ", "        0  2 s"]


def test_a_stage_far_quicker_than_another_leaves_room_for_it():
    costs = MicrobatchCosts((1e-9, 1.0), (1e-9, 1.0))
    assert draw(predict(make_schedule("gpipe", 2, 2), costs), 48) == [
        "rank 0  ........................................",
        "rank 1  F1------- F2------- B1------- B2------- ",
        "        0                                    4 s",
    ]


def test_more_than_26_stages_on_one_rank():
    lines = drawn("interleaved", 28, 1, 2000, ranks=1)
    assert "F1z" in lines[0]
    assert "F1+" in lines[0]
