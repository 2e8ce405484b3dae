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
    """Of its constructor; ``lin_X`` decays from X to 0, ``normal_X`` is Gaussian noise of actions."""
    n_envs: int = 1
    normalize: bool = False
    """Observations and rewards, by running moments."""
    atari: bool = False
    """Its own preprocessing with four frames stacked, its CNN; judged by sampled actions."""


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
        sets=(
            "task.env.normalize_returns=false", "task.algorithm.anneal=linear",
            "task.algorithm.clip_anneal=linear", "task.algorithm.learning_rate=2e-3",
            "task.algorithm.unroll_steps=32", "task.algorithm.epochs=10", "task.algorithm.minibatches=2",
            "task.algorithm.discount=0.98", "task.algorithm.gae_lambda=0.8", "task.algorithm.value_coef=1",
        ),
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

DETERMINISTIC = {
    "gamma": 0.98, "buffer_size": 200_000, "learning_starts": 10_000, "gradient_steps": 1, "train_freq": 1,
    "learning_rate": 1e-3, "action_noise": "normal_0.1", "policy_kwargs": {"net_arch": [400, 300]},
}  # fmt: skip
PENDULUM = {
    "pendulum-sac": Case("sac", 20_000, -170, zoo=Zoo("SAC", {"learning_rate": 1e-3})),
    "pendulum-td3": Case("pendulum", 20_000, -170, zoo=Zoo("TD3", DETERMINISTIC)),
    "pendulum-ddpg": Case("ddpg", 20_000, -170, zoo=Zoo("DDPG", DETERMINISTIC)),
    "pendulum-ppo": Case(
        "ppo", 100_000, -250,
        sets=(
            "task.env.id=Pendulum-v1", "task.env.num_envs=4", "task.algorithm.unroll_steps=1024",
            "task.algorithm.minibatches=64", "task.algorithm.learning_rate=1e-3",
            "task.algorithm.discount=0.9", "task.network.exploration_noise=sde",
            "task.network.sde_sample_freq=4", "task.evaluation.mode=greedy",
        ),
        zoo=Zoo("PPO", {
            "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0,
            "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
        }, n_envs=4),
    ),
}  # fmt: skip
MOUNTAIN_CAR = {
    "mountaincar-sac": Case(
        "mountaincar", 50_000, 90,
        zoo=Zoo("SAC", {
            "learning_rate": 3e-4, "buffer_size": 50_000, "batch_size": 512, "ent_coef": 0.1,
            "train_freq": 32, "gradient_steps": 32, "gamma": 0.9999, "tau": 0.01, "learning_starts": 0,
            "use_sde": True, "policy_kwargs": {"log_std_init": -3.67, "net_arch": [64, 64]},
        }),
    ),
    "mountaincar-ppo": Case(
        "ppo", 100_000, 90,
        sets=(
            "task.env.id=MountainCarContinuous-v0", "task.env.num_envs=4",
            "task.env.normalize_observations=true", "task.algorithm.unroll_steps=256",
            "task.algorithm.discount=0.9999", "task.network.exploration_noise=sde",
            "task.evaluation.mode=greedy",
        ),
        zoo=Zoo("PPO", {
            "n_steps": 8, "batch_size": 256, "gae_lambda": 0.9, "gamma": 0.9999, "n_epochs": 10,
            "ent_coef": 0.00429, "learning_rate": 7.77e-5, "clip_range": 0.1, "max_grad_norm": 5,
            "vf_coef": 0.19, "use_sde": True,
            "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
        }, normalize=True),
    ),
}  # fmt: skip
ACROBOT = {
    "acrobot-ppo": Case(
        "acrobot", 200_000, -90,
        zoo=Zoo("PPO", {
            "n_steps": 256, "batch_size": 64, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4,
            "ent_coef": 0.0,
        }, n_envs=16, normalize=True),
    ),
}  # fmt: skip
LUNAR_LANDER = {
    "lunarlander-ppo": Case(
        "lunarlander", 1_000_000, 240, worst=180, extra="Box2D",
        zoo=Zoo("PPO", {
            "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4,
            "ent_coef": 0.01,
        }, n_envs=16),
    ),
    "lunarlander-dqn": Case(
        "lunarlander-dqn", 300_000, 220, worst=180, extra="Box2D",
        zoo=Zoo("DQN", {
            "learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0,
            "gamma": 0.99, "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1,
            "exploration_fraction": 0.12, "exploration_final_eps": 0.1,
            "policy_kwargs": {"net_arch": [256, 256]},
        }),
    ),
}  # fmt: skip

BIPEDAL_WALKER = {
    "bipedalwalker-sac": Case(
        "bipedalwalker", 500_000, 250, extra="Box2D",
        zoo=Zoo("SAC", {
            "learning_rate": 7.3e-4, "buffer_size": 300_000, "batch_size": 256, "gamma": 0.98, "tau": 0.02,
            "train_freq": 64, "gradient_steps": 64, "learning_starts": 10_000, "use_sde": True,
            "policy_kwargs": {"log_std_init": -3.0, "net_arch": [400, 300]},
        }),
    ),
}  # fmt: skip

MINATAR = {
    "minatar-breakout-ppo": Case("minatar-breakout", 1_000_000, 10, extra="minatar"),
    "minatar-breakout-impala": Case(
        "impala", 3_000_000, 10, extra="minatar",
        sets=(
            "task.env.id=MinAtar/Breakout-v1", "task.env.num_envs=16", "task.network.hidden=[128]",
            "task.algorithm.learning_rate=4e-3", "task.algorithm.entropy_coef=0.02",
        ),
    ),
    "minatar-breakout-dqn": Case(
        "dqn", 500_000, 10, extra="minatar",
        sets=(
            "task.env.id=MinAtar/Breakout-v1", "task.network.kind=minatar_cnn", "task.network.hidden=[128]",
            "task.algorithm.learning_rate=2.5e-4", "task.algorithm.batch_size=64",
            "task.algorithm.unroll_steps=8", "task.algorithm.gradient_steps=16",
            "task.algorithm.exploration_steps=100000", "task.algorithm.exploration_end=0.02",
            "task.algorithm.target_tau=0.005",
        ),
    ),
    "minatar-spaceinvaders-ppo": Case("minatar-spaceinvaders", 1_000_000, 30, extra="minatar"),
}  # fmt: skip
MINIGRID = {"minigrid-doorkey-ppo": Case("minigrid-doorkey", 150_000, 0.9, extra="minigrid")}

HALF_CHEETAH = {
    "halfcheetah-td3": Case(
        "halfcheetah", 300_000, 3_000, extra="mujoco",
        zoo=Zoo("TD3", {
            "learning_rate": 1e-3, "batch_size": 256, "learning_starts": 10_000, "gradient_steps": 1,
            "train_freq": 1, "action_noise": "normal_0.1", "policy_kwargs": {"net_arch": [400, 300]},
        }),
    ),
}  # fmt: skip
_ATARI_PPO = Zoo(
    "PPO",
    {
        "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": "lin_2.5e-4",
        "clip_range": "lin_0.1", "vf_coef": 0.5, "ent_coef": 0.01,
    },
    n_envs=8,
    atari=True,
)  # fmt: skip
ATARI = {
    "pong-ppo": Case("pong", 2_500_000, 18, extra="ale_py", zoo=_ATARI_PPO),
    "breakout-ppo": Case("breakout", 10_000_000, 300, extra="ale_py", zoo=_ATARI_PPO),
}

TINY = {"cartpole-ppo": Case("cartpole", 2_048, 20)}
"""Shows in seconds that all works; no goal."""

SUITES: dict[str, dict[str, Case]] = {
    "tiny": TINY,
    "small": (
        CARTPOLE
        | ACROBOT
        | PENDULUM
        | MOUNTAIN_CAR
        | LUNAR_LANDER
        | BIPEDAL_WALKER
        | HALF_CHEETAH
        | MINATAR
        | MINIGRID
    ),
    "atari": ATARI,
    "mujoco": HALF_CHEETAH,
}
