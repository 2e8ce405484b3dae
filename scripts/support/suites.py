"""What `reproduce.py` trains: our presets with budgets and goals, and the values for the library beside them.

Stable-Baselines3's hyperparameters are those that RL Baselines3 Zoo (github.com/DLR-RM/rl-baselines3-zoo,
``hyperparams/*.yml``) gives for the same task; where it has none for a task, there is no comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SUITES", "Case", "Zoo"]


@dataclass(frozen=True)
class Zoo:
    """Stable-Baselines3 on the same task."""

    algorithm: str
    """Name of the class in ``stable_baselines3``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of its constructor; ``lin_X`` decays from X to 0."""
    n_envs: int = 1
    normalize: bool = False
    """Observations and rewards, by running moments."""


@dataclass(frozen=True)
class Case:
    """One algorithm on one task.

    Attributes:
        preset: ours.
        steps: environment steps of a run, ours and theirs.
        goal: the interquartile mean that is wanted; ``worst`` is wanted of the worst seed.
        sets: ``KEY=VALUE`` over the preset.
        extra: of the package, which holds the environment.
    """

    preset: str
    steps: int
    goal: float
    worst: float | None = None
    sets: tuple[str, ...] = ()
    zoo: Zoo | None = None
    extra: str = ""


CARTPOLE = {
    "cartpole-ppo": Case(
        "cartpole", 100_000, 475,
        sets=("task.algorithm.anneal=linear",),
        zoo=Zoo("PPO", {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
            "ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2",
        }, n_envs=8),
    ),
    "cartpole-a2c": Case("a2c", 500_000, 475, zoo=Zoo("A2C", {"ent_coef": 0.0}, n_envs=8)),
    "cartpole-dqn": Case(
        "dqn", 50_000, 475,
        sets=("task.algorithm.exploration_steps=8000",),
        zoo=Zoo("DQN", {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
            "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
            "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        }),
    ),
    "cartpole-impala": Case("impala", 300_000, 475),
}  # fmt: skip

TINY = {"cartpole-ppo": Case("cartpole", 2_048, 20)}
"""Shows in seconds that all works; no goal."""

SUITES: dict[str, dict[str, Case]] = {"tiny": TINY, "small": {**CARTPOLE}}
