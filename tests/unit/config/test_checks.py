"""Combinations that make no sense are refused, with the key to change and its origin."""

from __future__ import annotations

import pytest

from p2pdrl.config.checks import problems, task_problems
from p2pdrl.config.loader import resolve
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError


def test_the_default_breaks_no_rule() -> None:
    assert problems(Config()) == []


PIPELINE = ["task.strategy.name=pipeline"]
DQN = ["task.algorithm.name=dqn"]
AT_FETCHES = ["task.algorithm.target_tau=0.01", "task.algorithm.target_moves=fetch"]
SAC = ["task.algorithm.name=sac"]
TD3 = ["task.algorithm.name=td3"]
CLASSIFIER = [
    "task.algorithm.name=regression",
    "task.algorithm.kind=classifier",
    "task.algorithm.hidden=[8, 8]",
]


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["task.algorithm.unroll_steps=1", "task.env.num_envs=3"], "task.algorithm.minibatches (by default)"),
        (
            ["task.algorithm.unroll_steps=1", "task.env.num_envs=1", "task.algorithm.minibatches=1"],
            "task.algorithm.normalize_advantages",
        ),
        (["task.algorithm.anneal=linear"], "task.algorithm.anneal (in --set)"),
        (["task.algorithm.clip_anneal=linear"], "task.algorithm.clip_anneal (in --set)"),
        (
            ["task.algorithm.minibatches=1024", "task.algorithm.normalize_over=minibatch"],
            "task.algorithm.normalize_over (in --set)",
        ),
        (["task.algorithm.name=a2c", "task.algorithm.anneal=linear"], "task.algorithm.anneal"),
        (["task.strategy.every_updates=0"], "task.strategy.every_updates"),
        (["node.learner.restart_min_s=60"], "node.learner.restart_min_s"),
        (["task.algorithm.name=regression", "task.algorithm.anneal=linear"], "task.algorithm.anneal"),
        (
            ["task.algorithm.name=regression", "task.algorithm.features=1000000"],
            "task.algorithm.features (in --set)",
        ),
        (["node.learner.activation_limit_bytes=1000000"], "node.learner.activation_limit_bytes (in --set)"),
        (["node.learner.microbatches=0"], "node.learner.microbatches"),
        (['node.learner.split_devices=["cpu"]'], "node.learner.split_devices (in --set)"),
        (
            ['node.learner.split_devices=["cpu", "cpu"]', "node.learner.split_cuts=[1, 2]"],
            "node.learner.split_cuts (in --set)",
        ),
        (
            ['node.learner.split_devices=["cpu", "cpu", "cpu"]', "node.learner.split_cuts=[2, 2]"],
            "node.learner.split_cuts (in --set)",
        ),
        (["node.learner.split_cuts=[1]"], "node.learner.split_cuts (in --set)"),
        ([*DQN, *PIPELINE], "task.strategy.name"),
        ([*DQN, 'node.learner.split_devices=["cpu", "cpu"]'], "node.learner.split_devices (in --set)"),
        ([*DQN, "task.network.core=lstm"], "task.network.core (in --set)"),
        ([*DQN, "task.network.squash=tanh"], "task.network.squash (in --set)"),
        ([*DQN, "task.network.exploration_noise=sde"], "task.network.exploration_noise (in --set)"),
        ([*DQN, "task.algorithm.buffer_size=999"], "task.algorithm.learning_starts (by default)"),
        (
            [*DQN, "task.algorithm.buffer_size=40", "task.algorithm.learning_starts=1"],
            "task.algorithm.buffer_size (in --set)",
        ),
        ([*SAC, *PIPELINE], "task.strategy.name"),
        ([*TD3, "task.strategy.name=server_sync"], "task.strategy.name (in --set)"),
        ([*SAC, 'node.learner.split_devices=["cpu", "cpu"]'], "node.learner.split_devices (in --set)"),
        ([*SAC, "task.network.core=lstm"], "task.network.core (in --set)"),
        ([*SAC, "task.network.squash=tanh"], "task.network.squash (in --set)"),
        ([*TD3, "task.network.rescale_actions=true"], "task.network.rescale_actions (in --set)"),
        ([*TD3, "task.network.exploration_noise=sde"], "task.network.exploration_noise (in --set)"),
        ([*TD3, "task.network.log_std_init=-1"], "task.network.log_std_init (in --set)"),
        ([*SAC, "task.network.dueling=true"], "task.network.dueling (in --set)"),
        ([*SAC, "task.algorithm.buffer_size=999"], "task.algorithm.learning_starts (by default)"),
        (
            ["task.algorithm.name=sac_discrete", "task.network.exploration_noise=sde"],
            "task.network.exploration_noise (in --set)",
        ),
        ([*DQN, *AT_FETCHES], "task.algorithm.target_moves (in --set)"),
        ([*DQN, *AT_FETCHES, "task.strategy.name=grad_average"], "task.algorithm.target_moves (in --set)"),
        (
            [*DQN, *AT_FETCHES, "task.strategy.name=server_async", "task.strategy.local_steps=true"],
            "task.algorithm.target_moves (in --set)",
        ),
        (["task.network.dueling=true"], "task.network.dueling (in --set)"),
        (["task.network.noisy=true"], "task.network.noisy (in --set)"),
        ([*DQN, "task.network.noisy=true", "task.network.kind=transformer"], "task.network.noisy (in --set)"),
        (
            ["task.algorithm.name=n_step_q", "task.algorithm.exploration_ends=[0.1, 0.2]"],
            "task.algorithm.exploration_shares (by default)",
        ),
        (["task.algorithm.name=one_step_sarsa", *PIPELINE], "task.strategy.name"),
        (["task.algorithm.name=one_step_q", "task.network.core=lstm"], "task.network.core (in --set)"),
        (
            ['node.learner.split_devices=["cpu", "cpu"]', "node.learner.device=cuda"],
            "node.learner.device (in --set)",
        ),
        (
            ['node.learner.split_devices=["cpu", "cpu"]', "task.strategy.name=hogwild"],
            "node.learner.split_devices (in --set)",
        ),
        (
            ['node.learner.split_devices=["cpu", "cpu"]', "task.strategy.name=pipeline"],
            "node.learner.split_devices (in --set)",
        ),
        (["node.learner.microbatches=many"], "node.learner.microbatches"),
        (["task.gradients.precision=fp8"], "task.gradients.precision"),
        (["task.gradients.precision=fp16", "task.strategy.name=pipeline"], "task.gradients.precision"),
        (
            ["task.algorithm.name=regression", "node.learner.microbatches=33"],
            "node.learner.microbatches (in --set)",
        ),
        (["task.algorithm.name=a2c", "node.learner.microbatches=41"], "node.learner.microbatches (in --set)"),
        (
            ["task.algorithm.name=impala", "node.learner.microbatches=9"],
            "node.learner.microbatches (in --set)",
        ),
        (["task.env.num_envs=9", "node.learner.microbatches=289"], "node.learner.microbatches (in --set)"),
        (
            ["task.network.core=lstm", "node.learner.microbatches=3"],
            "node.learner.microbatches (in --set)",
        ),
        (
            ["task.strategy.name=pipeline", "task.algorithm.name=regression"],
            "task.strategy.stages (by default)",
        ),
        (
            [*PIPELINE, *CLASSIFIER, "task.strategy.microbatches=33"],
            "task.strategy.microbatches (in --set)",
        ),
        ([*PIPELINE, "node.learner.microbatches=4"], "node.learner.microbatches (in --set)"),
        ([*PIPELINE, "node.learner.microbatches=100000"], "node.learner.microbatches"),
        (
            [*PIPELINE, "node.learner.checkpoint_activations=true"],
            "node.learner.checkpoint_activations (in --set)",
        ),
        (
            [
                "task.strategy.name=pipeline",
                "task.algorithm.minibatches=1",
                "task.algorithm.unroll_steps=2",
                "task.env.num_envs=3",
                "task.strategy.microbatches=7",
            ],
            "task.strategy.microbatches (in --set)",
        ),
    ],
)
def test_rules(sets: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=sets)
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    "sets",
    [
        ["task.algorithm.anneal=linear", "task.stop.env_steps=1000"],
        ["task.strategy.every_updates=0", "task.strategy.every_s=1"],
        ["task.strategy.name=local"],
        ["task.algorithm.name=a2c", "task.env.num_envs=1", "task.algorithm.unroll_steps=1"],
        ["task.algorithm.name=regression", "task.env.num_envs=1"],
        [
            "task.algorithm.name=regression",
            "task.algorithm.features=10000000",
            "task.algorithm.rows=16",
            "task.algorithm.batch_size=16",
        ],
        ["node.learner.microbatches=auto", "node.learner.activation_limit_bytes=1000000"],
        ["task.algorithm.name=regression", "node.learner.microbatches=32"],
        ["task.env.num_envs=9", "node.learner.microbatches=288"],
        ["task.network.core=lstm", "node.learner.microbatches=2"],
        ["task.algorithm.name=impala", "node.learner.microbatches=8"],
        ["node.learner.microbatches=4096"],  # for whatever task its swarm will have
        ["task.gradients.precision=bf16"],
        ["task.gradients.precision=fp16"],
        [*PIPELINE, *CLASSIFIER, "task.strategy.stages=3"],
        [*DQN, *AT_FETCHES, "task.strategy.name=server_async"],
        [*DQN, *AT_FETCHES, "task.strategy.name=server_sync"],
    ],
)
def test_what_the_rules_let_pass(sets: list[str]) -> None:
    resolve(sets=sets)


def test_a_received_task_can_be_checked_alone() -> None:
    task = TaskConfig(env=EnvConfig(num_envs=1), algorithm=PPOConfig(unroll_steps=2, minibatches=4))
    assert [problem.key for problem in task_problems(task)] == ["task.algorithm.minibatches"]


@pytest.mark.parametrize(
    ("network", "key", "words"),
    [
        (NetworkConfig(kind="transformer", width=64, heads=6), "task.network.heads", "multiple of heads"),
        (NetworkConfig(kind="impala_resnet", channels=()), "task.network.channels", "one section at least"),
    ],
)
def test_networks_that_can_not_be_built(network: NetworkConfig, key: str, words: str) -> None:
    (problem,) = task_problems(TaskConfig(network=network))
    assert problem.key == key
    assert words in problem.message


def test_options_of_other_networks_do_not_matter() -> None:
    assert list(task_problems(TaskConfig(network=NetworkConfig(width=64, heads=6, channels=())))) == []


def test_a_memory_learns_from_whole_environments() -> None:
    lstm, envs = NetworkConfig(core="lstm"), EnvConfig(num_envs=8)
    (problem,) = task_problems(TaskConfig(env=envs, network=lstm, algorithm=PPOConfig(minibatches=9)))
    assert problem.key == "task.algorithm.minibatches"
    assert "8 environments can't be cut into 9" in problem.message
    fits = (PPOConfig(minibatches=8), A2CConfig())
    for algorithm in fits:
        assert list(task_problems(TaskConfig(env=envs, network=lstm, algorithm=algorithm))) == []


def test_shards_need_rows_and_no_pipeline():
    few = RegressionConfig(rows=10, shards=11, sample="shards")
    assert [problem.key for problem in task_problems(TaskConfig(algorithm=few))] == ["task.algorithm.shards"]
    cut = TaskConfig(
        algorithm=RegressionConfig(kind="classifier", hidden=(8,), sample="shards"), strategy=PipelineConfig()
    )
    assert "one batch" in next(task_problems(cut)).message
