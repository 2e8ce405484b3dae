"""How the swarm agrees: one section per strategy, told apart by its ``name``.

A section says what travels between nodes, who steps and what comes back. It travels as a swarm record and may
be replaced on a live swarm. Combinations that make no sense are refused by `checks`, with the reason.
Durations are in seconds (``_s``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from p2pdrl.config.fields import (
    Count,
    Fraction,
    Microbatches,
    Natural,
    NonNegative,
    PositiveSeconds,
    Seconds,
    Travelling,
)
from p2pdrl.config.schedules import MAX_CHUNKS, MAX_STAGES, ScheduleName

__all__ = [
    "AdpsgdConfig",
    "Averaged",
    "Compressed",
    "Compression",
    "Content",
    "DsgdConfig",
    "FederatedConfig",
    "GalaConfig",
    "GradAverageConfig",
    "Grouped",
    "Guarded",
    "HogwildConfig",
    "LocalConfig",
    "Mixing",
    "Mode",
    "Paced",
    "ParamAverageConfig",
    "Partners",
    "PipelineConfig",
    "Robust",
    "ServerAsyncConfig",
    "ServerOptions",
    "ServerSyncConfig",
    "SgpConfig",
    "StrategyConfig",
    "StromConfig",
    "Topology",
    "mode_of",
]


Compression = Literal["none", "bf16", "int8", "topk", "threshold"]
Mixing = Literal["mean", "clipped", "trimmed"]
Identity = Annotated[str, Meta(min_length=1, max_length=64)]


class Compressed(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors are written on the wire."""

    compression: Compression = "bf16"
    """``none`` sends float32; ``bf16`` halves the bytes; ``int8`` quarters them; ``topk`` sends the
    largest entries, ``threshold`` those beyond a bound. The last three lose much at once, so they are
    for gradients and differences only, and keep what they left out for the next time (error feedback)."""
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Share of the entries that ``topk`` sends."""
    threshold: Annotated[float, Meta(gt=0, le=1e6)] = 1e-3
    """Bound beyond which ``threshold`` sends an entry, as plus or minus the bound."""


class Robust(Compressed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors of several nodes become one."""

    mixing: Mixing = "mean"
    """``clipped`` shortens what is far from our own before it is averaged; ``trimmed`` leaves out the
    greatest and least values of each entry. Both bound what one bad node can do and cost some accuracy."""
    clip_distance: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """With ``clipped``: longest difference let through, as a multiple of our own vector's norm."""
    trim: Annotated[float, Meta(gt=0, lt=0.5)] = 0.2
    """With ``trimmed``: share left out at each end, at least one node's value."""


class Guarded(Robust, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When to take a peer's whole state instead of averaging with it."""

    max_staleness: Count = 1000
    """A node this many policy versions behind its peer adopts the peer's state instead of averaging."""
    max_distance: Annotated[float, Meta(gt=0, le=1e12)] = 1e3
    """A vector whose norm is this many times ours is refused."""


class Paced(Guarded, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When an exchange, or a push, begins, and how long it may take."""

    every_updates: Natural = 1
    """One begins after this many updates of the learner; 0 leaves it to ``every_s``."""
    every_s: Seconds = 0.0
    """… or after this many seconds, whichever comes first; 0 leaves it to ``every_updates``."""
    min_interval_s: Seconds = 0.05
    """They are never begun closer together. Lower mixes faster and costs more processor time."""
    deadline_s: PositiveSeconds = 2.0
    """The longest that one may take; usually it is given up much sooner, by what was observed."""


class Grouped(Robust, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What strategies with rounds of a whole group share."""

    deadline_s: PositiveSeconds = 10.0
    """The longest that a round waits; usually much less, by what was observed. A member that is later
    than this is left out of the group until it answers again."""


class ServerOptions(Grouped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the two server strategies share."""

    servers: Annotated[int, Meta(ge=1, le=256)] = 1
    """Nodes that hold a shard of the parameters each; fewer members than this hold larger shards."""
    pinned: tuple[Identity, ...] = ()
    """Ids or names of the nodes that serve while they live; none leaves it to a hash of the ids."""
    optimizer: Literal["sgd", "momentum", "rmsprop", "adagrad", "adam"] = "adam"
    """What a server applies to its shard."""
    learning_rate: NonNegative | None = None
    """Step of the servers' optimizer; none takes the algorithm's, annealing included."""
    momentum: Fraction = 0.9
    """Of ``momentum``; β₁ of ``adam``."""
    decay: Fraction = 0.999
    """Of the squared gradients: β₂ of ``adam``; α of ``rmsprop``."""
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    """Added to the denominators."""


class Averaged(Grouped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the strategies share that average parameters after several local updates."""

    every_updates: Count = 8
    """H: local updates between two rounds. More cost fewer bytes and let replicas drift further."""
    outer_learning_rate: NonNegative = 1.0
    """Step of the outer optimizer along (mean − old); 1 without momentum is the plain mean."""
    outer_momentum: Fraction = 0.0
    """Of the outer optimizer; DiLoCo takes 0.9 with a step of 0.7."""
    nesterov: bool = True
    """Whether the outer momentum looks ahead, as in DiLoCo (Douillard 2023, arXiv 2311.08105)."""
    weighting: Literal["samples", "equal"] = "samples"
    """Whether a node counts by the environment steps it made in the round, or all count the same."""


class PipelineConfig(
    Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="pipeline"
):
    """One model over several peers: each holds a stage of it, and batches pass through in microbatches.

    More peers than stages form further pipelines, whose first peers agree by gossip. Whoever is left over
    stands by.
    """

    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)] = 2
    """Peers of one pipeline. Where fewer are alive, they hold the whole model among them. No more than the
    model has blocks, ``chunks`` of them for each."""
    schedule: ScheduleName = "1f1b"
    """``gpipe`` does all forwards, then all backwards; ``1f1b`` alternates, so a peer keeps no more
    microbatches than there are stages below it; ``interleaved`` alternates over ``chunks`` stages a peer."""
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)] = 1
    """Stages that each peer holds; more than one with ``interleaved`` only, which needs it: a shorter bubble
    for more messages."""
    microbatches: Microbatches = 4
    """Parts that each minibatch is cut into, as equal as can be: more make a shorter bubble of smaller, less
    efficient parts. ``auto`` measures 1, 2, 4 and 8 in the first updates and stays with the fastest."""
    cuts: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Number of the first block of each stage but the first; empty has the stages balanced by measured times,
    bytes and speeds of the peers. ``p2pdrl pipeline plan --config NAME`` numbers the blocks. With fewer peers
    than ``stages`` are alive these cuts fit no pipeline, and stages are balanced."""
    backend: Literal["auto", "stream", "torch"] = "auto"
    """``stream`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication. ``auto`` takes ``torch`` where each peer
    has a GPU of its own that NCCL reaches, trusts its network and reaches all others directly, until that
    fails before a first update; else ``stream``; and none of both where a pipeline would be slower than one
    peer alone: then each peer accumulates microbatches by itself."""
    state_every: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Updates until all peers of a pipeline get a copy of the whole parameters and of the optimizer's state:
    what is lost at most when peers die."""
    deadline_s: PositiveSeconds = 10.0
    """Longest wait for a neighbour within an update; who takes longer is left out. With ``torch`` at least
    10 s, and no more than 30."""
    checkpoint_activations: bool = False
    """Keep only what comes into a stage, and compute the rest anew on the way back (Chen 2016,
    arXiv 1604.06174): less memory for about a third more time."""
    gossip_every_s: PositiveSeconds = 1.0
    """Seconds between two exchanges of a pipeline's first peer with another's."""


Mode = Literal["gossip", "server-sync", "server-async", "allreduce", "pipeline", "local"]
"""What people type after ``mode set``: a family of strategies."""
Content = Literal["parameters", "gradients"]
Partners = Literal["random", "ring", "exponential"]
Topology = Literal["ring", "torus", "exponential", "random_regular", "complete"]


class AdpsgdConfig(
    Paced,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="adpsgd",
):
    """Asynchronous pairwise parameter averaging (AD-PSGD, Lian 2018, arXiv 1710.06952)."""

    partners: Partners = "random"
    """Whom to meet: anyone; the two neighbours in id order; neighbours at distances 1, 2, 4, … .
    Random mixes fastest; ring and exponential keep each node's set of peers small."""
    weight: Annotated[float, Meta(gt=0, le=0.5)] = 0.5
    """How far each side moves towards the other: ½ is the average."""
    merge_weights: Literal["equal", "fresh"] = "equal"
    """``fresh`` moves the side further that made fewer environment steps since the last exchange or
    lags in version; the two weights then add up to twice ``weight``. ``equal`` keeps the mean exactly."""
    exchanges: Content = "parameters"
    """``gradients`` averages gradients pairwise, and parameters each ``parameters_every`` exchanges."""
    parameters_every: Count = 10
    """With ``gradients``: every so many exchanges mix parameters, or replicas would drift apart."""


class DsgdConfig(
    Guarded,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="dsgd",
):
    """Synchronous gossip with neighbours on a graph (D-PSGD, Lian 2017, arXiv 1705.09056)."""

    topology: Topology = "ring"
    """The graph over the members: more edges mix in fewer rounds and send more bytes in each."""
    degree: Annotated[int, Meta(ge=2, le=64)] = 3
    """Neighbours of each node in ``random_regular``."""
    every_updates: Count = 1
    """Updates of the learner between two rounds."""
    deadline_s: PositiveSeconds = 10.0
    """The longest that a round waits for a neighbour; usually much less, by what was observed."""
    exchanges: Content = "parameters"
    """``gradients`` mixes gradients with neighbours, and parameters each ``parameters_every`` rounds."""
    parameters_every: Count = 10
    """With ``gradients``: every so many rounds mix parameters, or replicas would drift apart."""


class SgpConfig(
    Paced,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="sgp",
):
    """Stochastic gradient push: push-sum over a directed graph (Assran 2019, arXiv 1811.10792)."""

    partners: Partners = "exponential"
    """Whom to push to: anyone; the next in id order; those at distances 1, 2, 4, … in turn."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Part of a node's weight that goes along with each push."""


class GalaConfig(
    Paced,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="gala",
):
    """Gossiping actor-learners: non-blocking pushes, averaged on arrival (Assran 2019, arXiv 1906.04585)."""

    partners: Partners = "ring"
    """Whom to push to: anyone; the next in id order; those at distances 1, 2, 4, … ."""
    max_lag: Count = 50
    """τ: a push that is more than this many policy versions behind us isn't averaged in. Nobody waits for a
    newer one: of a learner that stays so far behind nothing is taken."""
    exchanges: Content = "parameters"
    """``gradients`` averages peers' gradients in, and parameters each ``parameters_every`` pushes."""
    parameters_every: Count = 10
    """With ``gradients``: every so many pushes carry parameters, or replicas would drift apart."""


class StromConfig(
    Guarded, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="strom"
):
    """Threshold-compressed asynchronous updates to everybody (Strom 2015, Interspeech)."""

    tau: Annotated[float, Meta(gt=0, le=1e3)] = 2e-3
    """τ: an entry travels, as ±τ, once the parameter has moved by so much and nobody was told. Lower
    keeps replicas closer and sends more; the residual stays and counts on."""
    every_updates: Count = 1
    """Updates of the learner between two messages."""
    min_interval_s: Seconds = 0.02
    """Messages are never begun closer together."""
    deadline_s: PositiveSeconds = 2.0
    """The longest that a message may take before it is sent again."""
    max_staleness: Count = 1000
    """A node this many policy versions behind its peer adopts the peer's state instead."""


class ServerSyncConfig(
    ServerOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="server_sync"
):
    """Synchronous parameter servers: broadcast, map, reduce (backup workers: Chen 2016, arXiv 1604.00981)."""

    reduce: Literal["mean", "sum", "count"] = "count"
    """What a round steps along, of the workers' gradients g_k, each the mean over n_k samples: ``count``
    weights them by their samples, Σ n_k g_k / Σ n_k, which is the gradient of one big batch; ``mean`` is
    (1/n) Σ g_k, each worker counting the same; ``sum`` is Σ g_k, whose step grows with the workers."""
    quorum: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the workers whose gradients a round needs once its deadline has passed."""
    backups: Natural = 0
    """Workers whose gradients a round doesn't wait for: the slowest so many are dropped each time."""


class ServerAsyncConfig(
    ServerOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="server_async"
):
    """Asynchronous parameter servers (DistBelief's Downpour SGD, Dean 2012)."""

    push_every: Count = 1
    """n_push: gradients that a worker adds up before it sends their sum."""
    fetch_every: Count = 1
    """n_fetch: pushes between two fetches of the parameters."""
    max_staleness: Natural = 100
    """τ: a gradient computed on parameters up to this many of the server's steps ago counts whole; ``stale``
    says what becomes of older ones."""
    stale: Literal["drop", "scale"] = "scale"
    """``scale`` steps along a gradient that is s > τ steps old by (1+τ)/(1+s) of the learning rate, so that
    slow workers count for less (τ = 0: by 1/(1+s), Zhang 2016, arXiv 1511.05950); ``drop`` refuses it."""
    ahead: Annotated[int, Meta(ge=0, le=8)] = 1
    """Pushes that may be under way while the worker computes the next; 0 waits for each."""
    local_steps: bool = False
    """Whether the worker also steps by itself between fetches, as in DistBelief."""


class GradAverageConfig(
    Grouped,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="grad_average",
):
    """Data parallelism: average gradients, then everybody takes the same step (DDP, Horovod)."""

    backend: Literal["own", "torch"] = "own"
    """``own`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication."""


class ParamAverageConfig(
    Averaged, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="param_average"
):
    """Periodic averaging of everybody's parameters (local SGD, FedAvg; with momentum: DiLoCo)."""

    backend: Literal["own", "torch"] = "own"
    """``own`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication."""


class FederatedConfig(
    Averaged, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="federated"
):
    """Federated averaging with differential privacy (McMahan 2018, arXiv 1710.06963)."""

    participation: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Chance of each member to take part in a round."""
    min_members: Count = 1
    """Rounds of fewer members change nothing, and what learners did meanwhile is dropped: each would bear too
    much of the noise."""
    clip_norm: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    """S: longest change that one member contributes to a round."""
    noise_multiplier: NonNegative = 0.0
    """z: the sum of a round's changes carries Gaussian noise of deviation z·S; 0 adds none."""
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    """δ of the (ε, δ) that is reported."""


class HogwildConfig(
    AdpsgdConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="hogwild"
):
    """Learners of one node write one vector without locks (Hogwild, Recht 2011); nodes gossip pairwise."""

    learners: Annotated[int, Meta(ge=1, le=64)] = 2
    """Learner processes of each node."""
    between_nodes: bool = True
    """Whether nodes average pairwise as in ``adpsgd``; the other options are about that."""


class LocalConfig(
    Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="local"
):
    """No averaging: each node trains alone. The reference that others are measured against."""


StrategyConfig = (
    AdpsgdConfig
    | DsgdConfig
    | SgpConfig
    | GalaConfig
    | StromConfig
    | ServerSyncConfig
    | ServerAsyncConfig
    | GradAverageConfig
    | ParamAverageConfig
    | FederatedConfig
    | HogwildConfig
    | PipelineConfig
    | LocalConfig
)


def mode_of(strategy: StrategyConfig) -> Mode:
    """The word that people type for the family that ``strategy`` belongs to."""
    match strategy:
        case LocalConfig():
            return "local"
        case HogwildConfig(between_nodes=False):
            return "local"
        case ServerSyncConfig():
            return "server-sync"
        case ServerAsyncConfig():
            return "server-async"
        case GradAverageConfig() | ParamAverageConfig() | FederatedConfig():
            return "allreduce"
        case PipelineConfig():
            return "pipeline"
        case _:
            return "gossip"
