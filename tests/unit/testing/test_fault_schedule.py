"""What a campaign of faults does is decided by its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[3] / "scripts")


@pytest.fixture
def schedule(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from support import fault_schedule

    return fault_schedule


def test_a_seed_decides_and_every_kind_comes(schedule):
    scenes = schedule.draw(1, 6, 40)
    assert schedule.draw(1, 6, 40) == scenes
    assert schedule.draw(2, 6, 40) != scenes
    assert {scene.kind for scene in scenes[: len(schedule.KINDS)]} == set(schedule.KINDS)


def test_who_is_concerned(schedule):
    for scene in schedule.draw(3, 6, 80, clock=1, disk=2, actor=3):
        assert len(set(scene.nodes)) == len(scene.nodes) <= 3
        assert all(0 <= number < 6 for number in scene.nodes)
        match scene.kind:
            case "halves" | "halves, kill":
                assert len(scene.nodes) == 3
            case "clock":
                assert (scene.nodes, abs(scene.value)) == ((1,), 30.0)
            case "far clock":
                assert (scene.nodes, abs(scene.value)) == ((1,), 3600.0)
            case "disk" | "actor":
                assert scene.nodes == ({"disk": 2, "actor": 3}[scene.kind],)
            case "pause":
                assert scene.seconds <= 3.0, "less than the least suspicion"


def test_kinds_that_cant_be_done_are_left_out(schedule):
    kinds = {scene.kind for scene in schedule.draw(1, 4, 60, without=["loss", "halves"])}
    assert kinds == set(schedule.KINDS) - {"loss", "halves"}
    assert max(scene.seconds for scene in schedule.draw(1, 4, 60, shorter=0.2)) <= 12.0
