"""How learners work under a strategy."""

from __future__ import annotations

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.config.regime import FREE, Regime, regime_of
from p2pdrl.config.strategy import GradAverageConfig, LocalConfig


def test_under_a_pipeline_learners_work_by_orders_only():
    assert regime_of(PipelineConfig()) == Regime(stages=True)
    assert not any(regime_of(config()).stages for config in (LocalConfig, GradAverageConfig))
    assert not FREE.stages
