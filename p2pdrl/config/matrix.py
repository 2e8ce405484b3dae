"""Which algorithm goes with which strategy in which placement: one table, which refuses and is printed.

A placement says where the parts of a node run. Each rule refuses some combinations, with the reason and what
to do; what none refuses must run. `checks` refuses by them what a configuration says, and ``p2pdrl presets
--matrix`` prints them. Rules that depend on single options (fp16, minibatches …) are in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from p2pdrl.config.fields import Problem
from p2pdrl.config.strategy import HogwildConfig, PipelineConfig, StrategyConfig
from p2pdrl.config.task import AlgorithmConfig, DDPGConfig, RegressionConfig, ReplayOptions, losses_of

__all__ = [
    "PLACEMENTS",
    "Combination",
    "Placement",
    "combinations",
    "cut_into_stages",
    "pair_problem",
    "placement_problem",
    "variant_of",
]

Placement = Literal["inline", "actors", "actor_nodes", "replay_nodes", "stages", "learners", "split_devices"]
PLACEMENTS: dict[Placement, str] = {
    "inline": "each node's environments and its learner in one process (node.actors.count = 0)",
    "actors": "environments in processes of their own on each node (node.actors.count)",
    "actor_nodes": "nodes that only act, for learners on other nodes (node.roles)",
    "replay_nodes": "the replay memory in shards on nodes of their own (node.roles = replay)",
    "stages": "one model in stages over several peers",
    "learners": "several learner processes on each node, with one vector",
    "split_devices": "one model over several devices of a node (node.learner.split_devices)",
}
"""With what each is."""


def cut_into_stages(algorithm: AlgorithmConfig) -> bool:
    """Whether an algorithm's model can be cut into stages, over peers or over devices."""
    if isinstance(algorithm, DDPGConfig):
        return algorithm.joint
    return isinstance(algorithm, RegressionConfig) or algorithm.stages


def variant_of(algorithm: AlgorithmConfig) -> str:
    """The name that people type, and the option with which an algorithm goes with more than without."""
    joint = isinstance(algorithm, DDPGConfig) and algorithm.joint
    return f"{name_of(algorithm)} joint" if joint else name_of(algorithm)


def name_of(config: AlgorithmConfig | StrategyConfig) -> str:
    """The name that people type."""
    return str(config.__struct_config__.tag)


class PairRule(NamedTuple):
    """Refuses combinations, in one placement or, where ``placement`` is None, in all."""

    placement: Placement | None
    key: str
    """Of the configuration, that is told to be wrong; empty where no configuration can say such a thing."""
    refuses: Callable[[AlgorithmConfig, StrategyConfig], bool]
    why: Callable[[AlgorithmConfig], str]


RULES = (
    PairRule(
        None,
        "task.strategy.name",
        lambda algorithm, strategy: (
            losses_of(algorithm) > 1
            and (strategy.learner_mode.sends == "gradients" or strategy.learner_mode.stages)
        ),
        lambda algorithm: (
            f"this algorithm has {losses_of(algorithm)} losses, whose gradients can't travel and whose model "
            "can't be cut into stages; "
            + ("set task.algorithm.joint = true, or " if isinstance(algorithm, DDPGConfig) else "")
            + "take a strategy that exchanges parameters, as adpsgd"
        ),
    ),
    PairRule(
        None,
        "task.strategy.name",
        lambda algorithm, strategy: strategy.learner_mode.stages and not cut_into_stages(algorithm),
        lambda _: (
            "this algorithm's model can't be cut into stages, only an actor-critic's; take another strategy"
        ),
    ),
    PairRule(
        None,
        "task.strategy.name",
        lambda algorithm, strategy: (
            strategy.learner_mode.stages
            and isinstance(algorithm, RegressionConfig)
            and algorithm.sample == "shards"
        ),
        lambda _: (
            "the peers of a pipeline hold one batch among them, so sample = shards would leave out all "
            "shards but the first peer's; take another strategy, as grad_average, or "
            "sample = sequence"
        ),
    ),
    PairRule(
        "actors",
        "node.actors.count",
        lambda algorithm, _: isinstance(algorithm, RegressionConfig),
        lambda _: "a regression has no environments to act in; leave it 0",
    ),
    PairRule(
        "actor_nodes",
        "node.roles",
        lambda algorithm, _: isinstance(algorithm, RegressionConfig),
        lambda _: "a regression has no environments to act in; leave it out",
    ),
    PairRule(
        "actor_nodes",
        "node.roles",
        lambda algorithm, _: not (isinstance(algorithm, RegressionConfig) or algorithm.remote_actors),
        lambda algorithm: (
            f"{name_of(algorithm)} learns from unrolls of its newest policy only, so not from afar; name "
            "both learner and actor, or neither"
        ),
    ),
    PairRule(
        "replay_nodes",
        "node.roles",
        lambda algorithm, _: not isinstance(algorithm, ReplayOptions),
        lambda algorithm: (
            f"{name_of(algorithm)} has no replay memory that could be held for others; leave replay out"
        ),
    ),
    PairRule(
        "stages",
        "",
        lambda _, strategy: not strategy.learner_mode.stages,
        lambda _: "only pipeline cuts a model into stages over peers; set task.strategy.name = pipeline",
    ),
    PairRule(
        "learners",
        "",
        lambda _, strategy: not isinstance(strategy, HogwildConfig),
        lambda _: "only hogwild has several learners on a node; set task.strategy.name = hogwild",
    ),
    PairRule(
        "split_devices",
        "node.learner.split_devices",
        lambda algorithm, _: not cut_into_stages(algorithm),
        lambda _: "this algorithm's model can't be cut into stages, only an actor-critic's; name no devices",
    ),
    PairRule(
        "split_devices",
        "node.learner.split_devices",
        lambda _, strategy: isinstance(strategy, HogwildConfig),
        lambda _: (
            "under hogwild each learner of this machine has a device for itself; leave it empty, or take "
            "another strategy"
        ),
    ),
    PairRule(
        "split_devices",
        "node.learner.split_devices",
        lambda _, strategy: isinstance(strategy, PipelineConfig),
        lambda _: (
            "under pipeline each peer has one part of the network, on one device; leave it empty, or take "
            "another strategy"
        ),
    ),
)
"""In the order in which they are told: of several that refuse, the first."""


def pair_problem(algorithm: AlgorithmConfig, strategy: StrategyConfig) -> Problem | None:
    """Why an algorithm doesn't go with a strategy wherever it runs; None if it does."""
    return _first(algorithm, strategy, None)


def placement_problem(
    algorithm: AlgorithmConfig, strategy: StrategyConfig, placement: Placement
) -> Problem | None:
    """Why a pair that goes together can't run so; None if it can."""
    return _first(algorithm, strategy, placement)


def _first(
    algorithm: AlgorithmConfig, strategy: StrategyConfig, placement: Placement | None
) -> Problem | None:
    for rule in RULES:
        if rule.placement == placement and rule.refuses(algorithm, strategy):
            return Problem(rule.key, rule.why(algorithm))
    return None


class Combination(NamedTuple):
    """One cell of the matrix, with default options.

    Attributes:
        problem: why it is refused; None if it is possible.
    """

    algorithm: AlgorithmConfig
    strategy: StrategyConfig
    placement: Placement
    problem: Problem | None

    @property
    def names(self) -> tuple[str, str, Placement]:
        """Algorithm, with its variant (`variant_of`), strategy and placement, as people type them."""
        return variant_of(self.algorithm), name_of(self.strategy), self.placement


def combinations() -> Iterator[Combination]:
    """Yield every algorithm with every strategy in every placement."""
    algorithms: list[AlgorithmConfig] = []
    for algorithm_type in get_args(AlgorithmConfig):
        algorithms.append(algorithm_type())
        if algorithm_type is DDPGConfig:
            algorithms.append(DDPGConfig(joint=True))
    for algorithm in algorithms:
        for strategy_type in get_args(StrategyConfig):
            strategy = strategy_type()
            for placement in PLACEMENTS:
                problem = pair_problem(algorithm, strategy) or placement_problem(
                    algorithm, strategy, placement
                )
                yield Combination(algorithm, strategy, placement, problem)
