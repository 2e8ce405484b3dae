"""What is asked for and can't be had in a view."""

from __future__ import annotations

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.strategies.pipeline.layout import PipelineMembers, limits
from p2pdrl.strategies.pipeline.messages import PipelineNote

PAIR = PipelineMembers(0, ("a", "b"))


def told(config: PipelineConfig, blocks: int, place: PipelineMembers | None = PAIR) -> dict[str, str]:
    notes = {"a": PipelineNote(blocks), "b": PipelineNote(blocks)}
    return {problem.key: problem.message for problem in limits(config, notes, place)}


def test_too_few_blocks_for_what_each_peer_should_hold():
    few = told(PipelineConfig(schedule="interleaved", chunks=2), 3)
    assert list(few) == ["task.strategy.chunks"]
    assert "needs 4 blocks, and this model has 3; lower chunks" in few["task.strategy.chunks"]
    assert list(told(PipelineConfig(stages=4), 3, None)) == ["task.strategy.stages"], (
        "who stands by is told too"
    )
    assert told(PipelineConfig(stages=3), 3) == {}
    assert told(PipelineConfig(stages=3), 0) == {}, "nobody knows"


def test_cuts_go_unused_while_there_are_fewer_peers():
    config = PipelineConfig(stages=3, cuts=(1, 2))
    unused = told(config, 6)
    assert list(unused) == ["task.strategy.cuts"]
    assert "pipelines of 3 peers, and go unused while this one has 2" in unused["task.strategy.cuts"]
    assert told(config, 6, PipelineMembers(0, ("a", "b", "c"))) == {}
    assert told(config, 6, None) == {}
