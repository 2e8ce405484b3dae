from __future__ import annotations

import msgspec

from p2pdrl.node.accounting.metrics_gossip import GossipBudget


def test_everything_goes_when_there_is_room():
    assert GossipBudget().take(["a"], ["b", "c"], 100) == ["a", "b", "c"]
    assert GossipBudget().take([], [], 0) == []


def test_the_first_go_each_time_and_the_others_take_turns():
    ration = GossipBudget()
    rows = [f"{number}" for number in range(5)]  # two bytes each
    taken = [ration.take(["me"], rows, 8) for _ in range(5)]
    assert {tuple(one[:1]) for one in taken} == {("me",)}
    assert [one[1:] for one in taken[:3]] == [["0", "1"], ["2", "3"], ["4", "0"]]


def test_the_first_leave_room_for_the_others():
    taken = GossipBudget().take([f"f{number}" for number in range(50)], ["rest"], 30)
    assert "rest" in taken
    assert taken[0] == "f0"
    assert sum(len(msgspec.msgpack.encode(row)) for row in taken) <= 30


def test_a_row_that_never_fits_holds_nothing_up():
    ration = GossipBudget()
    rows = ["long" * 50, "medium " * 2, "a", "b"]
    taken = {row for _ in range(8) for row in ration.take(["first one"], rows, 20)}
    assert taken >= {"first one", "a", "b"}
    assert rows[0] not in taken
