"""Rules that no single key can break: combinations that make no sense together.

Each problem comes with its reason and what to do. The loader's merged configuration is checked by them, what
a person types on a live swarm, and a task or strategy that comes from a peer. Whatever isn't refused here
must run. Blocks of a model are counted without torch, so that a pipeline of more stages than blocks is
refused before anything runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, cast

from msgspec.structs import replace

from p2pdrl.config.fields import Problem
from p2pdrl.config.matrix import pair_problem, placement_problem
from p2pdrl.config.node import LearnerConfig, NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import PipelineConfig, StrategyConfig
from p2pdrl.config.task import (
    AlgorithmOptions,
    DDPGConfig,
    DQNConfig,
    EnvConfig,
    NetworkConfig,
    NoiseOptions,
    OnlineQOptions,
    RegressionConfig,
    ReplayOptions,
    SACConfig,
    TaskConfig,
    batches_of,
    minibatch_rows,
)

__all__ = [
    "LIST_BLOCKS",
    "Problem",
    "as_built",
    "block_count",
    "idle_keys",
    "mode_problems",
    "pipeline_problems",
    "problems",
    "role_problems",
    "strategy_problems",
    "task_problems",
    "too_few_blocks",
    "trust_problems",
]

IMPALA_RESIDUALS = 2
"""Residual blocks of each section of the ResNet (Espeholt 2018)."""
NATURE_CONVOLUTIONS = 3
CONVOLUTIONS = {"trunk.convolutions.": "nature_cnn", "trunk.convolution.": "minatar_cnn"}
"""Parameters that a network of pictures has, and no network of vectors."""
MOST_BLOCKS = 1 << 16
"""Of a network that nobody here has seen; the child that builds it counts them."""
LIST_BLOCKS = "`p2pdrl pipeline plan --config …` lists them"
"""Where to find the numbers of a model's blocks."""
MAX_DATA_NUMBERS = 1 << 28
"""What a regression's made-up rows may come to: every node of the swarm holds them in memory."""


def block_count(task: TaskConfig) -> tuple[int, int]:
    """Return the least and the greatest number of blocks that the model may have.

    They differ where ``network.kind = auto`` leaves it to the observations, which only the environment knows.
    """
    algorithm, network = task.algorithm, task.network
    if isinstance(algorithm, RegressionConfig):
        count = len(algorithm.hidden) + 1 if algorithm.kind == "classifier" else 1
        return count, count
    if network.kind == "own":
        return 2, MOST_BLOCKS
    if isinstance(algorithm, DDPGConfig):
        count = max(len(network.hidden), 1) + 1 + len(network.hidden) + 1  # of the actor, of the critic
        return count, count
    kinds = ("mlp", "nature_cnn", "minatar_cnn") if network.kind == "auto" else (network.kind,)
    counts = [_trunk(kind, network) + (network.core != "none") + 1 for kind in kinds]
    return min(counts), max(counts)


def as_built(task: TaskConfig, parameter_names: Iterable[str]) -> TaskConfig:
    """Return the task with the network's kind that ``auto`` has become, by the names of its parameters."""
    network = task.network
    if network.kind != "auto" or isinstance(task.algorithm, RegressionConfig):
        return task
    names = tuple(parameter_names)
    found = (kind for prefix, kind in CONVOLUTIONS.items() if any(name.startswith(prefix) for name in names))
    kind = cast("Literal['nature_cnn', 'minatar_cnn', 'mlp']", next(found, "mlp"))
    return replace(task, network=replace(network, kind=kind))


def _trunk(kind: str, network: NetworkConfig) -> int:
    """Blocks before the memory and the heads."""
    given = network.hidden != NetworkConfig().hidden
    behind = len(network.hidden) if given else 1  # the papers have one dense layer behind the convolutions
    match kind:
        case "nature_cnn":
            return NATURE_CONVOLUTIONS + behind
        case "minatar_cnn":
            return 1 + behind
        case "impala_resnet":
            return len(network.channels) * (1 + IMPALA_RESIDUALS) + behind
        case "transformer":
            return 1 + 2 * network.layers + 1
    return max(len(network.hidden), 1)


def strategy_problems(strategy: StrategyConfig) -> Iterator[Problem]:
    """Every rule that ``strategy`` breaks, one for each key."""
    told: set[str] = set()
    for problem in strategy.rules():
        if problem.key not in told:
            told.add(problem.key)
            yield problem


def pipeline_problems(task: TaskConfig) -> Iterator[Problem]:
    """Yield what a pipeline asks of its task: as many blocks as stages, as many rows as microbatches."""
    strategy = task.strategy
    if not isinstance(strategy, PipelineConfig):
        return
    yield from _block_problems(strategy, task)
    most, what = minibatch_rows(task)
    if strategy.microbatches != "auto" and strategy.microbatches > most:
        yield Problem(
            "task.strategy.microbatches",
            f"{strategy.microbatches} microbatches can't be cut from the {most} {what} of a minibatch; "
            f"take {most} at most, or auto",
        )


def too_few_blocks(strategy: PipelineConfig, blocks: int, *, most: bool = False) -> Problem | None:
    """The problem of a pipeline with more stages than ``blocks`` (or fewer, if ``most``); None without."""
    stages, chunks = strategy.stages, strategy.chunks
    if stages * chunks <= blocks:
        return None
    has = f"this model has {blocks}{' at most' if most else ''}"
    if chunks == 1:
        return Problem(
            "task.strategy.stages",
            f"{stages} stages need as many blocks, and {has}; lower stages, or add layers to the model",
        )
    return Problem(
        "task.strategy.chunks",
        f"{strategy.schedule} with chunks = {chunks} on stages = {stages} peers needs {stages * chunks} "
        f"blocks, and {has}; lower chunks or stages, or add layers to the model",
    )


def _block_problems(strategy: PipelineConfig, task: TaskConfig) -> Iterator[Problem]:
    least, blocks = block_count(task)
    problem = too_few_blocks(strategy, blocks, most=least < blocks)
    if problem is not None:
        yield problem
    elif strategy.cuts and strategy.cuts[-1] >= blocks:
        several = "" if least == blocks else " at most"
        yield Problem(
            "task.strategy.cuts",
            f"this model's blocks are numbered 0 to {blocks - 1}{several}, so no stage begins at "
            f"{strategy.cuts[-1]}; {LIST_BLOCKS}",
        )


def idle_keys(strategy: StrategyConfig, learner: LearnerConfig) -> Iterator[Problem]:
    """Yield what a node has set about its gradients and has no effect under its strategy."""
    if not isinstance(strategy, PipelineConfig):
        return
    why = "has no effect under pipeline, where all peers compute as the strategy says"
    if learner.microbatches != 1:
        yield Problem(
            "node.learner.microbatches", f"{why}; leave it 1, and set task.strategy.microbatches instead"
        )
    if learner.checkpoint_activations:
        yield Problem(
            "node.learner.checkpoint_activations",
            f"{why}; leave it false, and set task.strategy.checkpoint_activations instead",
        )
    if learner.activation_limit_bytes:
        yield Problem(
            "node.learner.activation_limit_bytes",
            f"{why}; leave it 0: stages are cut to fit the peers' memory, and task.strategy.microbatches and "
            "task.strategy.checkpoint_activations make them need less",
        )


def problems(config: Config) -> list[Problem]:
    """Every rule that ``config`` breaks."""
    task, learner = config.task, config.node.learner
    idle = list(idle_keys(task.strategy, learner))
    said = {problem.key for problem in idle}
    gradients = [*_parts_problems(task, learner), *_split_problems(task, learner)]
    return [
        *_fixed_problems(task),
        *mode_problems(task, config.node),
        *_node_problems(config.node),
        *_actor_problems(task, config.node),
        *_inference_problems(task, config.node),
        *role_problems(task, config.node),
        *(problem for problem in gradients if problem.key not in said),
        *idle,
    ]


def mode_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """Every rule that keeps the strategy of ``task`` from working for it, or on ``node``."""
    yield from _strategy_problems(task)
    yield from trust_problems(task.strategy, trusted_network=node.trusted_network)
    if node.learner.split_devices:
        refused = placement_problem(task.algorithm, task.strategy, "split_devices")
        if refused is not None:
            yield refused


def task_problems(task: TaskConfig) -> Iterator[Problem]:
    """Every rule that ``task`` breaks."""
    yield from _fixed_problems(task)
    yield from _strategy_problems(task)


def _strategy_problems(task: TaskConfig) -> Iterator[Problem]:
    """Its strategy's rules, alone and with the rest of the task."""
    yield from strategy_problems(task.strategy)
    mode = task.strategy.learner_mode
    refused = pair_problem(task.algorithm, task.strategy)
    if refused is not None:
        yield refused
        return
    if getattr(task.algorithm, "target_moves", "step") == "fetch" and mode.steps:
        yield Problem(
            "task.algorithm.target_moves",
            "nothing is fetched where learners step by themselves, and the target would never move; set it "
            "to step, or take server_async or server_sync",
        )
        return
    if mode.stages and task.gradients.precision == "fp16":
        yield Problem(
            "task.gradients.precision",
            "stages of a pipeline don't scale the loss, without which float16 loses small gradients; take "
            "bf16 or float32",
        )
    if mode.stages and isinstance(task.algorithm, ReplayOptions) and task.algorithm.prioritized:
        yield Problem(
            "task.algorithm.prioritized",
            "errors are known to a pipeline's last stage, the memory to its first; set it to false, or take "
            "another strategy",
        )
    if mode.stages and isinstance(task.algorithm, DDPGConfig) and task.network.kind not in ("auto", "mlp"):
        yield Problem(
            "task.network.kind",
            "actor and critic of ddpg are cut between dense layers only; take mlp, or another strategy",
        )
    yield from pipeline_problems(task)


def _fixed_problems(task: TaskConfig) -> Iterator[Problem]:
    """Rules among what a live swarm can't change."""
    if isinstance(task.algorithm, RegressionConfig):
        yield from _regression_problems(task.algorithm)
    else:
        yield from _batch_problems(task.algorithm, task.env.num_envs)
        yield from _env_problems(task.env)
        yield from _network_problems(task.network)
        yield from _memory_problems(task)
        yield from _replay_problems(task)
    if task.algorithm.anneal == "linear" and task.stop.env_steps == 0:
        yield Problem(
            "task.algorithm.anneal",
            "linear lowers the learning rate until task.stop.env_steps, so it must be set",
        )
    if getattr(task.algorithm, "clip_anneal", "none") == "linear" and task.stop.env_steps == 0:
        yield Problem(
            "task.algorithm.clip_anneal",
            "linear lowers the clip range until task.stop.env_steps, so it must be set",
        )


def _batch_problems(algorithm: AlgorithmOptions, num_envs: int) -> Iterator[Problem]:
    batch = num_envs * algorithm.unroll_steps
    steps = f"env.num_envs × algorithm.unroll_steps = {batch} steps"
    if batches_of(algorithm) > batch:
        yield Problem(
            "task.algorithm.minibatches",
            f"{batches_of(algorithm)} minibatches can't be cut from {steps}; lower it, or gather more steps",
        )
    if not getattr(algorithm, "normalize_advantages", False):
        return
    if batch < 2:
        yield Problem(
            "task.algorithm.normalize_advantages",
            f"a batch of {steps} has no deviation to divide by; turn it off, or gather more steps",
        )
    elif getattr(algorithm, "normalize_over", "batch") == "minibatch" and batches_of(algorithm) >= batch:
        yield Problem(
            "task.algorithm.normalize_over",
            f"{batches_of(algorithm)} minibatches of {steps} have one step each, which has no deviation to "
            "divide by; lower minibatches, or take batch",
        )


def _env_problems(env: EnvConfig) -> Iterator[Problem]:
    if env.minigrid.mask_idle and not env.action_mask:
        yield Problem(
            "task.env.action_mask",
            "task.env.minigrid.mask_idle needs a name for its mask; leave this action_mask",
        )


def _network_problems(network: NetworkConfig) -> Iterator[Problem]:
    if network.kind == "transformer" and network.width % network.heads:
        yield Problem(
            "task.network.heads",
            f"{network.heads} heads can't share a width of {network.width} equally; "
            "width must be a multiple of heads",
        )
    if (network.kind == "own") != bool(network.own):
        yield Problem(
            "task.network.own", "kind = own and own = module:name belong together; set both or none"
        )
    if network.kind == "impala_resnet" and not network.channels:
        yield Problem(
            "task.network.channels", "a ResNet has one section at least; the paper has [16, 32, 32]"
        )


def _memory_problems(task: TaskConfig) -> Iterator[Problem]:
    """Whole unrolls of an environment go into one minibatch where the policy remembers."""
    algorithm, envs = task.algorithm, task.env.num_envs
    if task.network.core != "none" and batches_of(algorithm) > envs:
        yield Problem(
            "task.algorithm.minibatches",
            f"a policy with a memory learns from whole unrolls: {envs} environments can't be cut into "
            f"{batches_of(algorithm)} minibatches; lower it, or raise env.num_envs",
        )


def _replay_problems(task: TaskConfig) -> Iterator[Problem]:
    """What a replay memory asks of the rest, and what makes no sense without action values."""
    algorithm, network = task.algorithm, task.network
    if network.dueling and not isinstance(algorithm, DQNConfig | OnlineQOptions):
        yield Problem("task.network.dueling", "dueling heads are for action values, as dqn's; turn it off")
    if network.noisy and not isinstance(algorithm, DQNConfig):
        yield Problem("task.network.noisy", "noise in the weights is how dqn may explore; turn it off")
    if network.noisy and network.kind == "transformer":
        yield Problem("task.network.noisy", "a transformer's layers can't be noisy; turn it off")
    if isinstance(algorithm, OnlineQOptions):
        yield from _online_q_problems(algorithm)
    if not isinstance(algorithm, ReplayOptions | OnlineQOptions):
        return
    usual = NetworkConfig()
    for key, why in _idle_actions(algorithm).items():
        if getattr(network, key) != getattr(usual, key):
            yield Problem(f"task.network.{key}", f"{why}; leave it out")
    if network.core != "none":
        yield Problem("task.network.core", "action values are learned without a memory here; leave it none")
    if not isinstance(algorithm, ReplayOptions):
        return
    yield from _actor_priority_problems(algorithm, network)
    yield from _joint_problems(algorithm)
    if algorithm.learning_starts > algorithm.buffer_size:
        yield Problem(
            "task.algorithm.learning_starts",
            f"a memory of {algorithm.buffer_size} steps never holds {algorithm.learning_starts}; lower it, "
            "or raise buffer_size",
        )
    least = task.env.num_envs * (algorithm.unroll_steps + algorithm.n_step + 1)
    if algorithm.buffer_size < least:
        yield Problem(
            "task.algorithm.buffer_size",
            f"num_envs × (unroll_steps + n_step + 1) = {least} steps are the least that can be learned from",
        )


def _actor_priority_problems(algorithm: ReplayOptions, network: NetworkConfig) -> Iterator[Problem]:
    """Actors can tell priorities where a row's error is that of one value."""
    key = "task.algorithm.actor_priorities"
    if not algorithm.actor_priorities:
        return
    if not algorithm.prioritized:
        yield Problem(key, "needs prioritized = true")
    elif not isinstance(algorithm, DQNConfig | DDPGConfig):
        yield Problem(
            key, "this algorithm's error isn't that of a single value; take dqn or ddpg, or turn it off"
        )
    elif network.noisy:
        yield Problem(key, "noisy networks have another value for each noise; turn it off")


def _joint_problems(algorithm: ReplayOptions) -> Iterator[Problem]:
    """One step has one learning rate."""
    if not (isinstance(algorithm, DDPGConfig) and algorithm.joint):
        return
    if algorithm.actor_learning_rate not in (None, algorithm.learning_rate):
        yield Problem(
            "task.algorithm.actor_learning_rate",
            "critic and actor step at once with joint = true, at one rate; leave it out",
        )


def _online_q_problems(algorithm: OnlineQOptions) -> Iterator[Problem]:
    """Each ε at last has its share."""
    ends, shares = algorithm.exploration_ends, algorithm.exploration_shares
    if not ends or len(ends) != len(shares) or abs(sum(shares) - 1.0) > 1e-6:
        yield Problem(
            "task.algorithm.exploration_shares",
            f"{len(shares)} shares that add up to {sum(shares):g} for {len(ends)} exploration_ends: give "
            "each its share, all together 1",
        )


def _idle_actions(algorithm: AlgorithmOptions) -> dict[str, str]:
    """Keys of the network about actions that have no part in an algorithm, with the reason."""
    if not isinstance(algorithm, SACConfig | NoiseOptions):
        keys = ("squash", "rescale_actions", "exploration_noise")
        return dict.fromkeys(keys, "is for continuous actions, this algorithm's are discrete")
    idle = dict.fromkeys(("squash", "rescale_actions"), "is always so with this algorithm")
    if isinstance(algorithm, NoiseOptions):
        idle["exploration_noise"] = "is for policies that are stochastic; task.algorithm.noise is this one's"
        idle["log_std_init"] = "is for policies that are stochastic; task.algorithm.noise_std is this one's"
    return idle


def _regression_problems(algorithm: RegressionConfig) -> Iterator[Problem]:
    classes = algorithm.classes if algorithm.kind == "classifier" else 1
    numbers = algorithm.features * max(algorithm.rows, algorithm.batch_size, classes)
    if numbers > MAX_DATA_NUMBERS:
        yield Problem(
            "task.algorithm.features",
            f"rows, batch or classes of {algorithm.features} features come to {numbers} numbers, more than "
            f"{MAX_DATA_NUMBERS} (1 GiB); lower it, or rows, batch_size or classes",
        )
    if algorithm.sample == "shards" and algorithm.shards > algorithm.rows:
        yield Problem(
            "task.algorithm.shards",
            f"{algorithm.rows} rows can't be divided into {algorithm.shards} shards; lower it, or raise rows",
        )


def trust_problems(strategy: StrategyConfig, *, trusted_network: bool) -> Iterator[Problem]:
    """What ``strategy`` wants of this machine's network and may not have."""
    if trusted_network:
        return
    if getattr(strategy, "backend", None) == "torch":
        other = "stream" if isinstance(strategy, PipelineConfig) else "own"
        yield Problem(
            "task.strategy.backend",
            "torch.distributed listens without authentication; where everybody who reaches this machine "
            f"may be trusted set node.trusted_network = true on each node, else take backend = {other}",
        )


def _parts_problems(task: TaskConfig, learner: LearnerConfig) -> Iterator[Problem]:
    """More parts than rows; a node that was given no task may join any swarm, and cuts as far as it can."""
    if task == TaskConfig() or learner.microbatches == "auto":
        return
    most, what = minibatch_rows(task)
    if learner.microbatches > most:
        yield Problem(
            "node.learner.microbatches",
            f"{learner.microbatches} parts can't be cut from the {most} {what} of a gradient; "
            f"take {most} at most, or auto",
        )


def _split_problems(task: TaskConfig, learner: LearnerConfig) -> Iterator[Problem]:
    """A network over several devices of this node, and what doesn't go with it."""
    devices, cuts = learner.split_devices, learner.split_cuts
    if cuts and len(cuts) != len(devices) - 1:
        yield Problem(
            "node.learner.split_cuts",
            f"{len(devices)} split_devices have {max(len(devices) - 1, 0)} cuts between them, "
            f"not {len(cuts)}",
        )
    elif any(one >= other for one, other in itertools.pairwise(cuts)):
        yield Problem("node.learner.split_cuts", f"numbers of blocks must rise, not be {list(cuts)}")
    if not devices:
        return
    if task.gradients.precision == "fp16":
        yield Problem(
            "node.learner.split_devices",
            "parts of a network don't scale the loss, which task.gradients.precision = fp16 needs; name no "
            "devices, or take bf16",
        )
    if len(devices) < 2:
        yield Problem(
            "node.learner.split_devices",
            f"one device is no split; name two at least, or set node.learner.device = {devices[0]}",
        )
    if learner.device not in ("auto", devices[0]):
        yield Problem(
            "node.learner.device",
            f"the first of split_devices is {devices[0]}, and experience is collected there; leave this auto",
        )


def _actor_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """More actors than environments; a node given no task may join any swarm, and takes fewer then."""
    count = node.actors.count
    if task == TaskConfig() or count == "auto" or not count:
        return
    refused = placement_problem(task.algorithm, task.strategy, "actors")
    if refused is not None:
        yield refused
    elif count > task.env.num_envs:
        yield Problem(
            "node.actors.count",
            f"{count} actors can't share task.env.num_envs = {task.env.num_envs} environments; "
            "lower it, or raise that",
        )


def _takes_unrolls(algorithm: AlgorithmOptions, node: NodeConfig) -> bool:
    """Whether a learner takes unrolls of other nodes' actors: then its own are in processes as well."""
    remote = node.learner.remote_actors
    return algorithm.remote_actors and bool(node.roles if remote == "auto" else remote)


def _inference_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """Actors that ask another process for actions, where there are none."""
    key = "node.actors.inference"
    if node.actors.inference == "local":
        return
    if isinstance(task.algorithm, RegressionConfig):
        yield Problem(key, "a regression has no environments to act in; leave it local")
    elif not node.acts:
        yield Problem(
            key,
            f"node.roles = {', '.join(node.roles)}: nobody acts on this node; leave it local, or add actor",
        )
    elif node.learns and node.actors.count == 0 and not _takes_unrolls(task.algorithm, node):
        yield Problem(
            key,
            "the learner itself acts, in its own process (node.actors.count = 0); set a number of actors, or "
            "leave it local",
        )


def role_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """Roles that can't be played; none named are all that the task needs."""
    key, roles = "node.roles", node.roles
    if not roles:
        return
    if len(set(roles)) < len(roles):
        yield Problem(key, f"{', '.join(roles)}: one of them is named twice")
    if "replay" in roles and task != TaskConfig():
        refused = placement_problem(task.algorithm, task.strategy, "replay_nodes")
        if refused is not None:
            yield refused
    if not (node.learns or node.acts or node.holds_replay):
        yield Problem(
            key,
            "a node that neither acts, learns nor holds a replay has nothing to do yet; add learner or actor",
        )
    elif not node.learns and not node.peers and not node.discover:
        what = "acts" if node.acts else "holds a replay"
        yield Problem(key, f"who only {what} needs a learner: name a node of the swarm with node.peers")
    elif node.learns and node.acts:
        return
    elif not (node.learns and isinstance(task.algorithm, RegressionConfig)):
        refused = placement_problem(task.algorithm, task.strategy, "actor_nodes")
        if refused is not None:
            yield refused


def _node_problems(node: NodeConfig) -> Iterator[Problem]:
    learner = node.learner
    if learner.activation_limit_bytes and learner.microbatches != "auto":
        yield Problem(
            "node.learner.activation_limit_bytes",
            "only microbatches = auto looks for a number of parts that keeps to it; set that, or leave it 0",
        )
    if learner.restart_min_s > learner.restart_max_s:
        yield Problem(
            "node.learner.restart_min_s",
            f"{learner.restart_min_s:g} s is beyond restart_max_s = {learner.restart_max_s:g} s",
        )
