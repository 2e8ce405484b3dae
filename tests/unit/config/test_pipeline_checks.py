"""What a pipeline asks of its task and of nodes, before anything runs."""

from __future__ import annotations

import pytest

from p2pdrl.config.checks import idle_keys, pipeline_problems, too_few_blocks
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.strategy import AdpsgdConfig, PipelineConfig
from p2pdrl.config.task import NetworkConfig, RegressionConfig, TaskConfig

INTERLEAVED = PipelineConfig(schedule="interleaved", chunks=2)
MLP = NetworkConfig(kind="mlp")


def found(strategy: PipelineConfig, **task) -> dict[str, str]:
    problems = pipeline_problems(TaskConfig(strategy=strategy, **task))
    return {problem.key.rpartition(".")[2]: problem.message for problem in problems}


@pytest.mark.parametrize(
    ("strategy", "task", "key", "says"),
    [
        (PipelineConfig(stages=4), {"network": MLP}, "stages", "4 stages need as many blocks, and this"),
        (INTERLEAVED, {"network": MLP}, "chunks", "= 2 on stages = 2 peers needs 4 blocks"),
        (PipelineConfig(stages=6), {}, "stages", "has 5 at most"),
        (PipelineConfig(cuts=(40,)), {}, "cuts", "numbered 0 to 4 at most, so no stage begins at 40"),
        (PipelineConfig(cuts=(3,)), {"network": MLP}, "cuts", "numbered 0 to 2, so no stage begins at 3"),
        (PipelineConfig(), {"algorithm": RegressionConfig()}, "stages", "has 1;"),
        (PipelineConfig(microbatches=257), {"network": MLP}, "microbatches", "256 steps"),
    ],
)  # fmt: skip
def test_what_is_too_much_for_the_model_is_refused_with_its_key(strategy, task, key, says):
    problems = found(strategy, **task)
    assert list(problems) == [key]
    assert says in problems[key]


@pytest.mark.parametrize(
    ("strategy", "task"),
    [
        (PipelineConfig(stages=3, cuts=(1, 2)), {"network": MLP}),
        (INTERLEAVED, {"network": NetworkConfig(kind="mlp", hidden=(64, 64, 64))}),
        (INTERLEAVED, {}),  # pictures have blocks enough, and what is observed isn't known here
        (PipelineConfig(stages=1), {"algorithm": RegressionConfig()}),
        (PipelineConfig(), {"algorithm": RegressionConfig(kind="classifier", hidden=(16,))}),
    ],
)
def test_what_the_model_has_blocks_for_is_fine(strategy, task):
    assert found(strategy, **task) == {}


def test_what_is_too_much_is_told_of_the_number_that_is_found_too():
    assert too_few_blocks(INTERLEAVED, 4) is None
    problem = too_few_blocks(INTERLEAVED, 3)
    assert problem is not None
    assert "needs 4 blocks, and this model has 3; lower chunks or stages" in problem.message


def test_keys_without_effect_name_those_that_have_one():
    learner = LearnerConfig(microbatches="auto", checkpoint_activations=True, activation_limit_bytes=1)
    told = {problem.key: problem.message for problem in idle_keys(PipelineConfig(), learner)}
    assert set(told) == {
        "node.learner.microbatches",
        "node.learner.checkpoint_activations",
        "node.learner.activation_limit_bytes",
    }
    assert all("task.strategy." in message for message in told.values())
    assert not list(idle_keys(AdpsgdConfig(), learner))
    assert not list(idle_keys(PipelineConfig(), LearnerConfig()))
