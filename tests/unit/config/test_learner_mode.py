"""How learners work under a strategy."""

from __future__ import annotations

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.config.strategy import GradAverageConfig, LocalConfig, PipelineConfig


def test_under_a_pipeline_learners_work_by_orders_only():
    assert PipelineConfig().learner_mode == LearnerMode(stages=True)
    assert not any(config().learner_mode.stages for config in (LocalConfig, GradAverageConfig))
    assert not FREE.stages
