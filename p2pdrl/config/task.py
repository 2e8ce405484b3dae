"""The swarm's half of the configuration: what is trained, how, until when.

Every member of a swarm runs the same task. The fields under ``env``, ``network``,
``algorithm`` and ``gradients`` are fixed at founding and hashed: a node whose hash differs isn't let in. The
fields under ``strategy`` and ``stop`` travel as swarm records and may change on a live swarm.

Durations are in seconds (``_s``).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from p2pdrl.config.fields import (
    LATER,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Precision,
    Travelling,
    hashed,
)
from p2pdrl.config.strategy import AdpsgdConfig, StrategyConfig

__all__ = [
    "HASHED",
    "A2CConfig",
    "AlgorithmConfig",
    "AlgorithmOptions",
    "AtariConfig",
    "DDPGConfig",
    "DQNConfig",
    "DiscreteSACConfig",
    "EnvConfig",
    "EvaluationConfig",
    "GradientsConfig",
    "ImpalaConfig",
    "MinigridConfig",
    "NStepQConfig",
    "NetworkConfig",
    "NoiseOptions",
    "OffPolicyOptions",
    "OneStepQConfig",
    "OneStepSarsaConfig",
    "OnlineQOptions",
    "PPOConfig",
    "RegressionConfig",
    "ReplayOptions",
    "SACConfig",
    "StopConfig",
    "TD3Config",
    "TaskConfig",
    "TemperatureOptions",
    "batches_of",
    "losses_of",
    "minibatch_rows",
    "minibatches_of",
    "rate_power",
    "relative_speeds",
    "task_hash",
]


class AtariConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Atari games (``ALE/Pong-v5``, ``PongNoFrameskip-v4`` …) are seen and played.

    The defaults are those of Mnih 2015 (Methods) and Machado 2018 (arXiv 1709.06009). Without effect on other
    environments.
    """

    preprocess: bool = True
    """Observations are stacked grey pictures, each the greatest of two successive frames. Without it they are
    the emulator's own (``kwargs.obs_type``: rgb, grayscale or ram), and of what follows only
    ``full_action_space`` and ``repeat_action_probability`` have an effect."""
    screen_size: Annotated[int, Meta(ge=36, le=210)] = 84
    """Height and width of a picture in pixels."""
    frame_skip: Annotated[int, Meta(ge=1, le=64)] = 4
    """Frames that an action is held for: an environment step is so many of the game's 60 a second."""
    frame_stack: Annotated[int, Meta(ge=1, le=16)] = 4
    """Pictures in an observation, the newest last; those before an episode's first are zero. A replay memory
    stores each picture once."""
    noop_max: Annotated[int, Meta(ge=0, le=1000)] = 30
    """A game begins with a random number of frames without action, fewer than this (up to this where
    ``kwargs`` are given)."""
    repeat_action_probability: Fraction | None = None
    """Sticky actions: how likely a frame repeats the last frame's action instead of the one that was chosen.
    None takes what the id stands for: 0.25 for ``ALE/…-v5``, 0 for ``…NoFrameskip-v4``."""
    episodic_life: bool = False
    """For learning, a lost life ends the episode; the game goes on, and returns that are reported are whole
    games'. The policy has no say in the step behind it, which does nothing, or presses FIRE."""
    fire_reset: bool = False
    """Press FIRE where an episode begins, in games that have the button: Breakout waits for it."""
    full_action_space: bool = False
    """All 18 actions of the joystick, not only those that have an effect in the game."""


class MinigridConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Minigrid's worlds are played. Without effect on other environments."""

    mask_idle: bool = False
    """Mask actions that can't do anything: to pick up where nothing lies ahead or the hands are full, to drop
    with empty hands or onto something, to toggle what is no box and no door that would open, and ``done``
    where no mission asks for it (GoTo… and BabyAI do). Turns and steps are always allowed."""


class EnvConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where experience comes from."""

    id: str = "CartPole-v1"
    """Name in gymnasium's registry, or ``module:name`` of an environment's class or of an id that the module
    registers: that is imported and wants ``--allow-import`` (docs/own_code.md)."""
    kwargs: dict[str, bool | int | float | str] = {}  # noqa: RUF012 - msgspec copies it
    """Arguments handed to the environment's constructor."""
    num_envs: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Copies stepped together by one learner. More give larger batches and better use of the
    processor, but staler data: each update waits for num_envs × unroll_steps steps."""
    max_episode_steps: Annotated[int, Meta(ge=1)] | None = None
    """Overrides the environment's own time limit, in steps; none keeps it."""
    action_mask: str = "action_mask"
    """Name of the action mask: of an entry of Dict observations, or of the ``info`` that comes with them, 1
    or true where an action is allowed. Where environments have it, policies never take another. The default
    name is looked for and may be missing; empty looks for none. Discrete and MultiDiscrete actions only."""
    observation_keys: tuple[str, ...] = ()
    """Entries of dictionary observations that are used; none are all but texts (Minigrid's ``mission``). A
    single one, as ``["image"]``, stands for itself."""
    normalize_observations: bool = False
    """Shift and scale observations by the swarm's running mean and deviation. Helps with raw
    physical units (MuJoCo), needless for images. Of several entries (Dict, Tuple) vectors of floats are."""
    normalize_returns: bool = True
    """Divide rewards by the running deviation of the discounted return; reported returns stay raw.
    Without it large returns (CartPole's reach 100) can saturate a tanh value function, which then
    predicts one constant and lets a good policy decay."""
    clip_rewards: bool = False
    """Learn from the rewards' signs only (Mnih 2015): one learning rate suits games of any score. Reported
    returns stay raw."""
    atari: AtariConfig = AtariConfig()
    minigrid: MinigridConfig = MinigridConfig()


class NetworkConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of policy and value function."""

    kind: Literal["auto", "mlp", "nature_cnn", "impala_resnet", "minatar_cnn", "transformer", "own"] = "auto"
    """``mlp``: dense layers, separate ones for policy and values; ``nature_cnn`` (Mnih 2015), the deeper
    ``impala_resnet`` (Espeholt 2018) and the one convolution of ``minatar_cnn`` (Young 2019), all for images;
    ``transformer`` over parts of the observation. ``auto`` takes the Nature CNN for images of 36 × 36 pixels
    or more, MinAtar's for smaller ones down to 3 × 3, and an MLP for everything else. Where observations have
    several entries, each image among them goes through its own convolutions, and all together through dense
    layers (``hidden``). ``own`` is yours, see ``own``."""
    own: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """A network of your own, ``module:name`` of a ``Trunk`` (docs/own_code.md), which policy and values
    share. It is imported and wants ``--allow-import``; ``kind`` must be ``own``."""
    hidden: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers of the MLP; of the dense layers behind the convolutions, where the
    default stands for the papers' single layer (512, 256 for the ResNet, 128 for MinAtar's). No part of a
    transformer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Non-linearity of the MLP; the convolutional networks always use relu."""
    channels: tuple[Annotated[int, Meta(ge=1, le=65_536)], ...] = (16, 32, 32)
    """Widths of the ResNet's sections, each of which halves the picture. More see larger things, wider
    ones more kinds of them."""
    layers: Annotated[int, Meta(ge=1, le=256)] = 2
    """Depth of the transformer: pairs of attention and feed-forward layers."""
    heads: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Heads of each attention; divides ``width``."""
    width: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Numbers in one token of the transformer."""
    patch: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """What a token of the transformer is made of: so many neighbouring features of a vector, or a square of
    so many pixels. Fewer make more tokens, and attention costs their number squared. 0 chooses: vectors are
    cut into 32 tokens at most, pictures into the largest squares up to 16 that fit."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Memory between the network and the last layers, for environments that don't show everything: ``lstm``
    (Hochreiter 1997), or ``gru`` (Cho 2014), which has a quarter fewer weights. With it an MLP is shared by
    policy and values, and minibatches are cut between environments, never in time."""
    core_size: Annotated[int, Meta(ge=1, le=65_536)] = 128
    """Units of the memory."""
    dueling: bool = False
    """Action values as the sum of a state's value and each action's advantage (Wang 2016): better where many
    actions are worth the same. Only where action values are learned (``dqn``, ``n_step_q`` …)."""
    noisy: bool = False
    """Explore by noise in the weights of all dense layers, whose size is learned (Fortunato 2018, arXiv
    1706.10295), instead of by ε: with it ``dqn`` has none. The evaluation takes the mean weights. Twice the
    parameters of these layers; not for transformers."""
    noisy_sigma: NonNegative = 0.5
    """σ_0 of ``noisy``: the noise of a layer's weights at first, in parts of what its weights are drawn
    from."""
    log_std_init: Annotated[float, Meta(ge=-20, le=5)] = 0.0
    """Logarithm of the deviation that continuous actions begin with; 0 is a deviation of 1, in the policy's
    own units (see ``rescale_actions``). Under ``sde`` that of each weight of the noise: the actions' is
    larger by the length of the features, so -2 or so is usual there."""
    rescale_actions: bool = False
    """The policy's -1 … 1 is what the environment's bounds enclose, in each dimension of a continuous action,
    rather than the environment's own units; beyond the bounds actions are clipped, as without. Refused where
    an action has no finite bounds."""
    squash: Literal["none", "tanh"] = "none"
    """``tanh`` brings continuous actions into their bounds by tanh, and so rescales them too, where ``none``
    clips them. Probabilities are those of what the environment gets. The entropy has no closed form then: it
    is the Gaussian's, and the logarithm of the squashing's slope at the action that was taken. Refused where
    an action has no finite bounds."""
    exploration_noise: Literal["white", "sde"] = "white"
    """What is added to the means of continuous actions: ``white`` is new at each step; ``sde``
    (state-dependent exploration, Raffin 2021) is a linear function of the policy's features that is drawn
    rarely, so that actions follow each other smoothly, as real machines want them."""
    sde_sample_freq: Natural = 0
    """Steps after which ``sde`` draws its function anew, counted from the beginning of each unroll; 0 keeps
    one for the whole unroll. Fewer come nearer to ``white``, and want memory: an unroll of T steps then
    keeps T × features × actions numbers of noise for each environment."""


class AlgorithmOptions(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all algorithms that act in environments have.

    Those that cut a batch and pass over it several times have ``minibatches`` and ``epochs`` too.
    """

    learning_rate: NonNegative = 1e-3
    """Step of the optimizer."""
    anneal: Literal["none", "linear"] = "none"
    """``linear`` lowers the learning rate to zero as the swarm nears ``stop.env_steps``."""
    unroll_steps: Count = 128
    """Steps per environment between updates (T)."""
    discount: Fraction = 0.99
    """γ: weight of the next step's return."""

    losses: ClassVar[int] = 1
    """How many losses it has; gradients of several can't travel, nor can their model be cut into stages."""
    stages: ClassVar[bool] = True
    """Whether its model can be cut into stages: that of an actor-critic can."""
    whole_unrolls: ClassVar[bool] = False
    """Whether its batches are environments with their whole unroll, bootstrap observation included, also
    where the policy has no memory; they are cut between environments then, never in time."""
    divides: ClassVar[bool] = False
    """Whether learners that average may share out the steps of an update: those of fresh unrolls."""
    remote_actors: ClassVar[bool] = False
    """Whether it learns from unrolls of a policy that is some updates old, as other nodes' actors have it."""


class PPOConfig(
    AlgorithmOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="ppo"
):
    """Proximal policy optimization (Schulman 2017, arXiv 1707.06347)."""

    remote_actors: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    learning_rate: NonNegative = 1e-3
    """Step of Adam. Zero leaves parameters alone (for experiments on consensus)."""
    unroll_steps: Count = 128
    """Steps per environment between updates (T). Longer: less bias, staler data."""
    epochs: Count = 4
    """Passes over each batch. More squeeze the data harder and drift further from the behaviour policy."""
    minibatches: Count = 4
    """Parts that each pass is cut into; num_envs × unroll_steps must be at least this."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation (Schulman 2016): 0 trusts the value function, 1 the returns."""
    clip: Positive = 0.2
    """ε: how far the probability ratio may move before its gradient is cut."""
    clip_anneal: Literal["none", "linear"] = "none"
    """``linear`` lowers ``clip`` to zero as the swarm nears ``stop.env_steps``, as ``anneal`` does with the
    learning rate."""
    value_clip: Positive | None = None
    """Bound on the value's move per update; none leaves it free."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus: higher explores longer and ends less sharp."""
    max_grad_norm: Positive = 0.5
    """Global gradient norm is clipped to this."""
    reset_optimizer: Annotated[bool, LATER] = False
    """Have Adam begin anew with each update on parameters that were averaged with peers' (Asadi 2023, arXiv
    2306.17833), where updates are divided (``task.scaling``): what it remembers is of the path of one
    learner's parameters. Its first steps are larger then, which suits LunarLander, not MinAtar's Breakout.
    One learner alone keeps its memory."""
    normalize_advantages: bool = True
    """Shift and scale advantages to zero mean, unit deviation."""
    normalize_over: Literal["batch", "minibatch"] = "batch"
    """What ``normalize_advantages`` takes mean and deviation of: the full batch, or each minibatch by itself,
    as Stable-Baselines3 and CleanRL do: then each step weighs as much as any other, and small minibatches are
    noisier. A minibatch of a single step keeps its advantage as it is."""
    target_kl: Positive | None = None
    """Stop the passes early once the approximate KL divergence exceeds this; none never stops. Estimated as
    the mean of (ρ - 1) - log ρ, with ρ the probability ratio (Schulman 2020); the metric ``kl`` is its mean
    over all minibatches of the update, whose later ones are further from the policy that acted."""
    target_kl_per: Literal["epoch", "minibatch"] = "epoch"
    """When ``target_kl`` is looked at: ``epoch``: at the end of each pass, by the mean over its minibatches;
    ``minibatch``: at each, and stops where a minibatch's own is beyond 1.5 × ``target_kl``, the rule of
    Stable-Baselines3. In both the gradient at hand is still stepped with: peers may wait for it."""


class A2CConfig(
    AlgorithmOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="a2c"
):
    """Advantage actor-critic, the synchronous form of A3C (Mnih 2016, arXiv 1602.01783)."""

    divides: ClassVar[bool] = True

    learning_rate: NonNegative = 7e-4
    """Step of the optimizer."""
    unroll_steps: Count = 5
    """Steps per environment between updates (T); also the n of the n-step return."""
    gae_lambda: Fraction = 1.0
    """λ of the advantage; 1 is the plain n-step return."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive = 0.5
    """Global gradient norm is clipped to this."""
    normalize_advantages: bool = False
    """Shift and scale advantages over the batch."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """The paper's RMSProp, or Adam, which wants less tuning."""
    rmsprop_alpha: Fraction = 0.99
    """Decay of RMSProp's squared-gradient average."""
    rmsprop_eps: Positive = 1e-5
    """Added to RMSProp's (and Adam's) denominator."""
    rmsprop_eps_in_root: bool = False
    """Add it to RMSProp's squared average, under the root, as A3C does; 0.1 there is 0.3 beside the root."""


class ImpalaConfig(
    AlgorithmOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="impala"
):
    """IMPALA, an actor-critic with V-trace targets (Espeholt 2018, arXiv 1802.01561).

    V-trace corrects for actors whose policy is older than the learner's; ``node.actors.ahead`` says by how
    much it may be. An update learns from one unroll of ``env.num_envs`` environments, which are the paper's
    batch.
    """

    whole_unrolls: ClassVar[bool] = True
    remote_actors: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    learning_rate: NonNegative = 6e-4
    """Step of the optimizer."""
    unroll_steps: Count = 20
    """Steps per environment between updates (T); also the n of V-trace."""
    rho_clip: Positive | None = 1.0
    """ρ̄: bound on the importance weights of temporal differences. It decides which policy's value is learned:
    1 keeps variance low and leans towards the policy that acted, none goes for the current one's."""
    c_clip: Positive | None = 1.0
    """c̄: bound on the importance weights along the trace. Lower lets less come back from later steps, with
    less variance; at most ρ̄."""
    pg_rho_clip: Positive | None = 1.0
    """Bound on the importance weights of the policy gradient; none doesn't clip them."""
    lambda_: Fraction = 1.0
    """λ: below 1, targets lean on the value function rather than on the steps that were made."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive = 0.0625
    """Global gradient norm is clipped to this. Losses are means here; the paper sums them, and its 40 for
    32 × 20 steps is 0.0625 for their mean."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """The paper's RMSProp, or Adam, which wants less tuning."""
    rmsprop_alpha: Fraction = 0.99
    """Decay of RMSProp's squared-gradient average."""
    rmsprop_eps: Positive = 1.5e-4
    """Added to RMSProp's (and Adam's) denominator. The paper's 0.01 is added under the root, to squares of
    sums over 32 × 20 steps: 0.1 beside the root of those, and 0.1 / 640 beside that of means."""


class ReplayOptions(AlgorithmOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What algorithms have that learn from a replay memory."""

    stages: ClassVar[bool] = False
    remote_actors: ClassVar[bool] = True

    buffer_size: Annotated[int, Meta(ge=1, le=100_000_000)] = 100_000
    """Environment steps that a learner's memory holds; the oldest make room. They lie in this machine's
    memory: 100,000 of Atari's 84×84 pictures are 0.7 GB."""
    learning_starts: Annotated[int, Meta(ge=1, le=100_000_000)] = 1000
    """Steps in the memory before the first gradient."""
    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Transitions of each gradient."""
    gradient_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """Gradients after each unroll (num_envs × unroll_steps steps): more learn more from each step, slower,
    and overfit to what is stored."""
    min_replay_ratio: Fraction = 0.0
    """Of the gradients that ``gradient_steps`` asks for. Where the memory is in shards on other nodes, those
    take no more unrolls while learners make fewer, and actors wait; 0 has them go on as fast as they can, as
    in Horgan 2018, which wastes their steps where learners are the slower ones. Without effect elsewhere."""
    n_step: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Rewards before the bootstrap. More carry news back faster, and belong to older policies."""
    prioritized: bool = False
    """Draw transitions in proportion to their last error (Schaul 2016, arXiv 1511.05952), not all alike."""
    alpha: Fraction = 0.6
    """Exponent of the priorities: 0 draws all alike."""
    beta: Fraction = 0.4
    """Exponent of the importance weights at first; it rises to 1 as the swarm nears ``stop.env_steps``."""
    actor_priorities: bool = False
    """New transitions get the priority that the actor's own values tell (Horgan 2018, arXiv 1803.00933), not
    the greatest so far: with many actors most of what comes is never drawn otherwise than once. Needs
    ``prioritized``; with ``dqn`` and ``ddpg``, whose target for a transition is a single value."""


class DQNConfig(
    ReplayOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="dqn"
):
    """Deep Q-learning (Mnih 2015), double, and where asked for dueling, noisy, n-step and prioritized."""

    learning_rate: NonNegative = 1e-4
    """Step of Adam."""
    unroll_steps: Count = 4
    """Steps per environment before each block of ``gradient_steps``."""
    double: bool = True
    """The online network picks the next action and the target network judges it (van Hasselt 2016), which
    takes out most of the overestimation."""
    target_every: Count = 10_000
    """How much lies between two copies of the network into its target; ``target_counts`` says of what."""
    target_counts: Literal["env_steps", "versions"] = "env_steps"
    """What ``target_every`` counts: the whole swarm's environment steps, of which a learner hears about once
    a second, or versions of the policy: the steps of a parameter server (Nair 2015, arXiv 1507.04296), which
    each fetch tells exactly, and else this learner's updates."""
    target_tau: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Instead, move the target by this share, see ``target_moves``; none copies."""
    target_moves: Literal["step", "fetch"] = "step"
    """When ``target_tau`` moves the target: after each gradient ``step``, or at each ``fetch`` of parameters
    from a server, whose network it follows then; the target stays each learner's own. ``fetch`` wants servers
    that step (``server_async``, ``server_sync``)."""
    loss: Literal["huber", "squared"] = "huber"
    """What is minimised of an error δ: ``squared`` is ½δ²; ``huber`` is the same up to 1 and grows linearly
    beyond, so that its gradient is clipped (Mnih 2015)."""
    outlier_deviations: NonNegative = 0.0
    """Leave out a gradient whose loss is more than so many standard deviations above the running mean of the
    learner's losses (Nair 2015, arXiv 1507.04296, section 4.3); 0 uses all."""
    exploration: Literal["schedule", "ladder"] = "schedule"
    """``schedule``: one ε for all, which falls; ``ladder``: each of a node's N environments keeps an ε of its
    own, base^(1 + exponent · i / (N − 1)), from much to hardly any (Horgan 2018, arXiv 1803.00933)."""
    exploration_base: Annotated[float, Meta(gt=0, lt=1)] = 0.4
    """ε of the ladder's first environment."""
    exploration_exponent: NonNegative = 7.0
    """α of the ladder: how much less the last one explores."""
    exploration_start: Fraction = 1.0
    """ε of ε-greedy actions at first, by ``schedule``."""
    exploration_end: Fraction = 0.05
    """ε at last."""
    exploration_steps: Annotated[int, Meta(ge=1)] = 50_000
    """Environment steps of the whole swarm over which ε falls."""
    max_grad_norm: Positive = 10.0
    """Global gradient norm is clipped to this."""


class OnlineQOptions(AlgorithmOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the value-based methods of Mnih 2016 (arXiv 1602.01783) have, which learn without a replay."""

    stages: ClassVar[bool] = False

    learning_rate: NonNegative = 7e-4
    """Step of the optimizer."""
    unroll_steps: Count = 5
    """Steps per environment between updates (T), the paper's I_AsyncUpdate and t_max; of ``n_step_q`` also
    the n of its returns."""
    target_every: Count = 10_000
    """How much lies between two copies of the network into its target, by ``target_counts`` (the paper's
    I_target, there 40,000 frames of 4 to a step)."""
    target_counts: Literal["env_steps", "versions"] = "env_steps"
    """What ``target_every`` counts: the whole swarm's environment steps, of which a learner hears about once
    a second, or versions of the policy: the steps of a parameter server (Nair 2015, arXiv 1507.04296), which
    each fetch tells exactly, and else this learner's updates."""
    exploration_start: Fraction = 1.0
    """ε of ε-greedy actions at first."""
    exploration_ends: tuple[Fraction, ...] = (0.1, 0.01, 0.5)
    """ε at last: each environment draws one of these anew for each unroll, so that some explore while others
    show what the policy is worth."""
    exploration_shares: tuple[Fraction, ...] = (0.4, 0.3, 0.3)
    """How likely each of ``exploration_ends`` is drawn; they add up to 1."""
    exploration_steps: Annotated[int, Meta(ge=1)] = 50_000
    """Environment steps of the whole swarm over which ε falls."""
    max_grad_norm: Positive = 10.0
    """Global gradient norm is clipped to this."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """The paper's RMSProp, or Adam, which wants less tuning."""
    rmsprop_alpha: Fraction = 0.99
    """Decay of RMSProp's squared-gradient average."""
    rmsprop_eps: Positive = 1e-5
    """Added to RMSProp's (and Adam's) denominator."""
    rmsprop_eps_in_root: bool = False
    """Add it to RMSProp's squared average, under the root, as the paper does."""


class OneStepQConfig(
    OnlineQOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="one_step_q"
):
    """One-step Q-learning without a replay (Mnih 2016, algorithm 1)."""


class OneStepSarsaConfig(
    OnlineQOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="one_step_sarsa",
):
    """One-step Sarsa without a replay (Mnih 2016, section 4): learns what the exploring policy is worth."""


class NStepQConfig(
    OnlineQOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="n_step_q"
):
    """N-step Q-learning without a replay (Mnih 2016, algorithm S2)."""


class OffPolicyOptions(ReplayOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What actor-critics have that learn Q(s, a) from a replay memory.

    ``learning_starts`` also tells until when actions are drawn uniformly: until the swarm has made so many
    steps, or the memory holds so many.
    """

    losses: ClassVar[int] = 2

    learning_rate: NonNegative = 3e-4
    """Step of Adam, for the critics; for the rest too unless that has its own."""
    actor_learning_rate: NonNegative | None = None
    """Step of Adam for the actor; none takes ``learning_rate``."""
    unroll_steps: Count = 1
    """Steps per environment before each block of ``gradient_steps``. As many gradients as num_envs ×
    unroll_steps are usual; larger blocks cost less to collect, and act with older parameters."""
    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """Transitions of each gradient."""
    target_tau: Annotated[float, Meta(gt=0, le=1)] = 0.005
    """τ: share by which targets move towards the networks after each step. Less is steadier and slower."""
    max_grad_norm: Positive = 1e9
    """The gradient's norm of each loss is clipped to this; the default never clips."""


class NoiseOptions(OffPolicyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What deterministic actors say of the noise that they explore with; actions are scaled to -1 … 1."""

    noise: Literal["gaussian", "ornstein_uhlenbeck"] = "gaussian"
    """``gaussian`` is new at each step; ``ornstein_uhlenbeck`` follows its last value, so that actions push
    in one direction for a while: for masses with inertia."""
    noise_std: NonNegative = 0.1
    """σ: deviation of what is added at each step. An Ornstein-Uhlenbeck process as a whole deviates more, by
    1 / √(1 − (1 − θ)²)."""
    noise_theta: Annotated[float, Meta(gt=0, le=1)] = 0.15
    """θ of ``ornstein_uhlenbeck``: share by which it falls back to zero at each step."""


class TemperatureOptions(OffPolicyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What soft actor-critics say of their temperature α, the weight of the entropy against the reward."""

    losses: ClassVar[int] = 3

    temperature: Positive | Literal["auto"] = "auto"
    """α: higher explores longer and pays less heed to rewards. ``auto`` learns it, so that the policy's
    entropy comes to a target, whatever the scale of the rewards is."""
    temperature_init: Positive = 1.0
    """α that ``auto`` begins with."""
    temperature_learning_rate: NonNegative | None = None
    """Step of Adam for log α; none takes ``learning_rate``."""


class SACConfig(
    TemperatureOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="sac"
):
    """Soft actor-critic for continuous actions (Haarnoja 2018, arXiv 1812.05905)."""

    target_entropy: float | None = None
    """Entropy that ``temperature = auto`` aims at, in nats, of actions scaled to -1 … 1, whose uniform
    distribution has 0.69 for each dimension; none takes -1 for each. Lower ends sharper."""


class DiscreteSACConfig(
    TemperatureOptions,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="sac_discrete",
):
    """Soft actor-critic for discrete actions (Christodoulou 2019, arXiv 1910.07207)."""

    target_entropy_fraction: Fraction = 0.98
    """Entropy that ``temperature = auto`` aims at, as a share of log |A|, that of uniform actions. The
    paper's 0.98 is close to uniform on average; less ends sharper."""


class TD3Config(
    NoiseOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="td3"
):
    """Twin delayed DDPG for continuous actions (Fujimoto 2018, arXiv 1802.09477)."""

    policy_delay: Count = 2
    """d: gradient steps of the critics for each of the actor and of the targets. More let values settle
    before the policy follows them."""
    target_noise_std: NonNegative = 0.2
    """σ̃: deviation of the noise on the targets' actions: close actions then get close values."""
    target_noise_clip: NonNegative = 0.5
    """c: bound on that noise."""


class DDPGConfig(
    NoiseOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="ddpg"
):
    """Deep deterministic policy gradient for continuous actions (Lillicrap 2016, arXiv 1509.02971)."""

    noise: Literal["gaussian", "ornstein_uhlenbeck"] = "ornstein_uhlenbeck"
    """The paper's ``ornstein_uhlenbeck`` follows its last value, so that actions push in one direction for a
    while, for masses with inertia; ``gaussian`` is new at each step."""
    noise_std: NonNegative = 0.2
    """σ: deviation of what is added at each step. An Ornstein-Uhlenbeck process as a whole deviates more, by
    1 / √(1 − (1 − θ)²)."""
    joint: bool = False
    """Critic and actor have one gradient and one step, the actor's part through the critic as it was before,
    not after its step: so gradients can travel, and the network can be cut into stages. Both have one
    learning rate then."""


class RegressionConfig(
    Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="regression"
):
    """Supervised regression on made-up data: the smallest thing a swarm can train, to measure strategies.

    ``task.env`` and ``task.network`` are ignored. A row used counts as an environment step, and
    minus the loss on rows that nobody trains on as the return of an episode.
    """

    kind: Literal["least_squares", "classifier"] = "least_squares"
    """``least_squares``: a linear model of D = ``features`` weights that begin at zero, loss ½(x·w − y)²;
    ``classifier``: softmax over a mixture of ``classes`` Gaussians, with hidden layers where asked for."""
    features: Annotated[int, Meta(ge=1, le=100_000_000)] = 32
    """Length of one input row."""
    rows: Annotated[int, Meta(ge=1, le=10_000_000)] = 4096
    """Rows to train on, drawn from ``task.seed`` and so the same on every node; up to 1024 more are for
    the evaluation."""
    density: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the inputs of ``least_squares`` that aren't zero. Below 1, ``sgd`` writes only the weights
    that a batch moves, as Hogwild asks for."""
    noise: Annotated[float, Meta(ge=0, le=1e3)] = 0.1
    """Deviation of the targets from the linear model, which have deviation 1 themselves; of each Gaussian
    around its centre, which is 1 from the origin."""
    classes: Annotated[int, Meta(ge=2, le=10_000)] = 10
    """Classes of the classifier."""
    hidden: tuple[Count, ...] = ()
    """Widths of the classifier's tanh layers; none is plain softmax regression, which is convex."""
    batch_size: Annotated[int, Meta(ge=1, le=10_000_000)] = 32
    """Rows of each gradient; of each shard of it where ``sample`` is ``shards``."""
    sample: Literal["random", "sequence", "shards"] = "random"
    """``random``: each learner draws rows by its own seed; ``sequence``: update t (from 0) of a learner with
    seed s (``node.seed``) takes batch number t × ``workers`` + s mod ``workers``, counted through the rows
    and round again: n workers of seeds 0 … n−1 use what one with n times the batch would; ``shards``: the
    rows are divided once and for all, and each learner sees only its own part of them, see ``shards``."""
    workers: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Learners that share the sequence; 1 gives all of them the same rows."""
    shards: Annotated[int, Meta(ge=1, le=100_000)] = 12
    """M: parts that ``sample = shards`` divides the rows into, in their order and as equal as can be (the
    splits of MapReduce, Dean and Ghemawat 2004). Of n learners the one of rank r by node id has shards r,
    r + n, r + 2n …, so that each shard is somebody's; who leaves has its shards fall to the others, and who
    joins takes some over. A gradient is over the next ``batch_size`` rows of each own shard, or all of them
    where it has no more: then n learners whose gradients are averaged by count do what one does with the
    whole data set as one batch. A multiple of every n to come makes equal parts; learners beyond M have
    nothing to do."""
    learning_rate: NonNegative = 0.1
    """Step of the optimizer. Zero leaves parameters alone."""
    anneal: Literal["none", "linear"] = "none"
    """``linear`` lowers the learning rate to zero as the swarm nears ``stop.env_steps``."""
    optimizer: Literal["sgd", "momentum", "rmsprop", "adagrad", "adam"] = "sgd"
    """What the learner applies to its gradients."""
    momentum: Fraction = 0.9
    """μ of ``momentum``."""
    nesterov: bool = False
    """Whether ``momentum`` looks ahead."""
    decay: Fraction = 0.99
    """α of ``rmsprop``: decay of its squared-gradient average."""
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    """Added to the denominators of ``rmsprop``, ``adagrad`` and ``adam``."""
    max_grad_norm: Positive = 1e9
    """Global gradient norm is clipped to this; the default never clips."""
    min_update_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """The learner sleeps until a gradient has taken this long: computation as slow as wanted, on
    any number of nodes of one machine. ``node.learner.step_delay_s`` slows a single node down."""
    evaluate_every: Count = 10
    """Updates of a learner between two evaluations, the "episodes" of ``stop.mean_return``."""


AlgorithmConfig = (
    PPOConfig
    | A2CConfig
    | ImpalaConfig
    | DQNConfig
    | OneStepQConfig
    | OneStepSarsaConfig
    | NStepQConfig
    | DDPGConfig
    | TD3Config
    | SACConfig
    | DiscreteSACConfig
    | RegressionConfig
)


# What changes results is the task's. How a batch is cut and what is kept in memory (microbatches and
# checkpoint_activations of node.learner) changes them within rounding only, and depends on the machine.
class GradientsConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How gradients are computed, on every node alike."""

    precision: Precision = "float32"
    """``bf16`` runs the model's matrix products in bfloat16 (8 bits of mantissa) while it learns, and while
    it acts in training those of layers that policy and value function share (of images, say); parameters,
    loss and gradients stay float32, and so does evaluation. Faster and leaner where the hardware knows
    bfloat16 (GPUs since 2020, server processors since 2022), slower elsewhere. Outputs are off by some 0.4 %,
    so the ratios that ``ppo`` clips begin that far from 1. ``fp16`` is for GPUs that know float16 alone (11
    bits of mantissa; its range is made up for by scaling losses, see the metric ``loss_scale``); not in
    pipelines."""


class StopConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the swarm is done; the condition that is met first ends it, what is off never does."""

    env_steps: Annotated[int, Meta(ge=0)] = 0
    """Environment steps of the whole swarm, all nodes and boots together; 0 switches it off."""
    time_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds since the swarm was founded; 0 switches it off."""
    mean_return: float | None = None
    """Two evaluations in a row have reached this, see ``task.evaluation``. Without evaluations (``every``
    is 0) each living node's mean return over its last ``window`` sampled training episodes has. Returns may
    be negative, so 0 is a goal here, unlike above; ``"none"`` switches it off."""
    window: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    """Training episodes that a node's mean return is taken over."""


class EvaluationConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the swarm's policy is judged while it trains.

    The nodes take turns: one plays episodes with the parameters that it holds then, in a process of its own
    beside the learner's.
    """

    every: Annotated[int, Meta(ge=0, le=10**12)] = 50_000
    """Environment steps of the whole swarm between two evaluations; 0 makes none. A node rests nine times as
    long as its last one took, so a swarm that is faster than that leaves some out."""
    episodes: Annotated[int, Meta(ge=1, le=10_000)] = 30
    """Episodes of each."""
    mode: Literal["sampled", "greedy"] = "sampled"
    """``sampled`` draws actions as training does, ``greedy`` takes the likeliest one (the mean, of continuous
    actions)."""


class TaskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole task."""

    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of the initial weights, the same on every node; environments are seeded per node."""
    env: EnvConfig = EnvConfig()
    network: NetworkConfig = NetworkConfig()
    algorithm: AlgorithmConfig = PPOConfig()
    gradients: GradientsConfig = GradientsConfig()
    scaling: Literal["auto", "batch", "none"] = "auto"
    """What an update becomes when there are several learners. ``auto`` divides its steps among all that are
    alive, so that n learners need as much data as one, n times as soon; where they average parameters, they
    also step by √n times the learning rate. ``batch`` only divides. ``none``: each goes on as one alone does,
    and n learners' updates have n times the data. As far as algorithms learn from fresh unrolls (ppo, a2c,
    impala) and learners average what they do; see docs/scaling.md."""
    strategy: StrategyConfig = AdpsgdConfig()
    stop: StopConfig = StopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def evaluated(self) -> bool:
        """Whether there are evaluations: a regression plays no episodes."""
        return self.evaluation.every > 0 and not isinstance(self.algorithm, RegressionConfig)

    @property
    def subject(self) -> str:
        """What is trained, for people: the environment's id, or the kind of regression."""
        if isinstance(self.algorithm, RegressionConfig):
            return f"made-up data ({self.algorithm.kind})"
        return self.env.id


HASHED = ("seed", "env", "network", "algorithm", "gradients", "scaling")
"""The fields of the task that are fixed at founding."""


def task_hash(task: TaskConfig) -> str:
    """Return 32 hex digits: SHA-256 of the canonical JSON (sorted keys) of the fixed fields.

    They are what must be equal for parameters to be averaged: environment, network, algorithm, the precision
    of gradients, how updates are divided, and the seed of the initial weights, but neither strategy nor stop
    conditions.

    Defaults are written out, so a value given and the same value by default hash alike, but for those of
    options that are marked as later ones.
    """
    fixed = {name: hashed(getattr(task, name)) for name in HASHED}
    canonical = msgspec.json.encode(fixed, order="sorted")
    return hashlib.sha256(b"p2pdrl task\0" + canonical).hexdigest()[:32]


LEAST_SPEED = 1.0 / 8.0
"""Of the fastest learner's: see `relative_speeds`."""
FASTEST = 4.0
"""Times the median one: nobody is taken for faster than that, whatever it tells of itself, so that most
learners always have a part."""


def rate_power(task: TaskConfig, strategy: StrategyConfig) -> float | None:
    """Return by which power of its number of parts a divided update raises learning rates.

    None where each learner has updates to itself: under this strategy, or with this algorithm.
    """
    algorithm = task.algorithm
    if isinstance(algorithm, RegressionConfig):
        return 0.0 if algorithm.sample == "shards" else None
    if task.scaling == "none" or not algorithm.divides or strategy.averages == "nothing":
        return None
    return 0.5 if task.scaling == "auto" and strategy.averages == "parameters" else 0.0


def relative_speeds(steps_per_s: Sequence[float], rate_power: float = 0.0) -> list[float]:
    """Return how fast learners are, that of the fastest one being 1: by what their parts of an update go.

    In steps of √2, so that parts don't change with every look; 1 of those not known. `LEAST_SPEED` is the
    least; where parameters are averaged, whoever is no faster has no part (0), as what it could add is less
    than what an update of so old experience does harm.

    Args:
        steps_per_s: of each learner by itself; 0 while it isn't known.
        rate_power: as `rate_power` says; 0 where gradients are averaged.
    """
    known = [speed for speed in steps_per_s if 0.0 < speed < math.inf]
    fastest = min(max(known), FASTEST * statistics.median(known)) if known else 1.0
    found = [
        2.0 ** (round(2.0 * math.log2(min(max(speed / fastest, LEAST_SPEED), 1.0))) / 2.0)
        if speed in known
        else 1.0
        for speed in steps_per_s
    ]
    return [0.0 if rate_power and speed <= LEAST_SPEED else speed for speed in found]


def batches_of(algorithm: AlgorithmOptions | RegressionConfig) -> int:
    """Return how many minibatches an unroll is cut into: ``minibatches`` where there is such a key."""
    return int(getattr(algorithm, "minibatches", 1))


def losses_of(algorithm: AlgorithmOptions | RegressionConfig) -> int:
    """Return how many losses an algorithm has; a regression has one, and so has ``ddpg`` if it is joint."""
    if isinstance(algorithm, RegressionConfig) or (isinstance(algorithm, DDPGConfig) and algorithm.joint):
        return 1
    return algorithm.losses


def minibatches_of(algorithm: AlgorithmConfig) -> int:
    """Return how many gradients an update has, all passes together: ``epochs`` of them, if there are."""
    return int(getattr(algorithm, "epochs", 1)) * batches_of(algorithm)


def minibatch_rows(task: TaskConfig) -> tuple[int, str]:
    """Return what each gradient's batch is made of: how many, and what they are."""
    algorithm = task.algorithm
    if isinstance(algorithm, RegressionConfig) and algorithm.sample == "shards":
        return min(algorithm.batch_size, max(algorithm.rows // algorithm.shards, 1)), "rows"
    if isinstance(algorithm, RegressionConfig | ReplayOptions):
        return algorithm.batch_size, "rows"
    whole = algorithm.whole_unrolls or task.network.core != "none"
    rows = task.env.num_envs * (1 if whole else algorithm.unroll_steps)
    return math.ceil(rows / batches_of(algorithm)), "environments" if whole else "steps"
