"""How the swarm agrees: one section per strategy, told apart by its ``name``.

A section says what travels between nodes, who steps and what comes back. It travels as a swarm record and may
be replaced on a live swarm. It is also the one place that says of a strategy to which families it belongs
(`StrategyOptions.modes`), how learners work under it (`StrategyOptions.learner_mode`) and which of its
options make no sense together (`StrategyOptions.rules`). What is inherited and needs code of its own, lossy
compressions and robust mixing, is refused until a strategy declares that it honours it. Durations are in
seconds (``_s``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from p2pdrl.config.fields import (
    Count,
    Fraction,
    Microbatches,
    Natural,
    NonNegative,
    PositiveSeconds,
    Problem,
    Seconds,
    Travelling,
)
from p2pdrl.config.learner_mode import FREE, LearnerMode
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
    "MixingChoice",
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
    "StrategyOptions",
    "StromConfig",
    "Topology",
]


Mode = Literal["gossip", "server-sync", "server-async", "allreduce", "pipeline", "local"]
"""What people type after ``mode set``: a family of strategies."""
Compression = Literal["none", "bf16", "int8", "topk", "threshold"]
Mixing = Literal["mean", "clipped", "trimmed"]
MixingChoice = Literal["auto", "mean", "clipped", "trimmed"]
Content = Literal["parameters", "gradients"]
Partners = Literal["random", "ring", "exponential"]
Topology = Literal["ring", "torus", "exponential", "random_regular", "complete"]
Identity = Annotated[str, Meta(min_length=1, max_length=64)]
LOSSY = ("int8", "topk", "threshold")
"""What loses too much at once for a copy of parameters, whose error nothing feeds back."""
SPARSE = ("topk", "threshold")


class StrategyOptions(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every strategy says of itself beside its options."""

    modes: ClassVar[tuple[Mode, ...]] = ()
    """The families under which people find it; the first of a family's strategies is its default."""
    told: ClassVar[tuple[str, ...]] = ()
    """Options that say what a mode is, so that people are told them even where they are the defaults."""

    @property
    def mode(self) -> Mode:
        """The family that it belongs to with these options."""
        return self.modes[0]

    @property
    def learner_mode(self) -> LearnerMode:
        """How learners work under it: by themselves, unless it says otherwise."""
        return FREE

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """What learners come to the mean of: then the data of an update may be divided among them.

        Not where each one's steps are applied in full (sums, servers that don't wait), nor where all of them
        together are one learner.
        """
        return "nothing"

    def rules(self) -> Iterator[Problem]:
        """Yield what these options, each right alone, can't do together: why, and what to set instead.

        Of several about one key the first is told.
        """
        yield from ()


def _problem(key: str, message: str) -> Problem:
    return Problem(f"task.strategy.{key}", message)


class Compressed(StrategyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors are written on the wire."""

    compression: Compression = "bf16"
    """``none`` sends float32; ``bf16`` halves the bytes; ``int8`` quarters them; ``topk`` sends the
    largest entries, ``threshold`` those beyond a bound. The last three lose much at once, so they are
    for gradients and differences only, and keep what they left out for the next time (error feedback)."""
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Share of the entries that ``topk`` sends."""
    threshold: Annotated[float, Meta(gt=0, le=1e6)] = 1e-3
    """Bound beyond which ``threshold`` sends an entry, as plus or minus the bound."""

    compressions: ClassVar[tuple[Compression, ...]] = ("none", "bf16")
    """Those that the strategy's code honours: the lossy ones want error feedback."""

    def rules(self) -> Iterator[Problem]:
        """Refuse compressions that nobody has declared."""
        if self.compression not in self.compressions:
            yield _problem(
                "compression",
                f"what {self.compression} leaves out is not fed back under this strategy, and would be lost; "
                f"take {' or '.join(self.compressions)}",
            )
        yield from super().rules()


class Robust(Compressed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors of several nodes become one."""

    mixing: MixingChoice = "auto"
    """``clipped`` lets no peer pull farther than a multiple of what is usual among them, and strikes who is
    far off again and again; ``trimmed`` leaves out the greatest and least values of each entry. Both bound
    what a minority can do. ``auto`` is ``clipped`` where the strategy can, and there is a swarm key on a
    network that isn't trusted; else ``mean``."""
    clip_distance: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """With ``clipped``: longest difference let through, as a multiple of the usual one."""
    trim: Annotated[float, Meta(gt=0, lt=0.5)] = 0.2
    """With ``trimmed``: share left out at each end, at least one node's value."""

    mixings: ClassVar[tuple[Mixing, ...]] = ("mean",)
    """Those that the strategy's code honours."""

    def rule(self, *, bounded: bool) -> Mixing:
        """The rule that ``mixing`` comes to.

        Args:
            bounded: whether peers may lie, so that ``auto`` bounds what each can do.
        """
        if self.mixing != "auto":
            return self.mixing
        over_torch = getattr(self, "backend", "own") == "torch"
        return "clipped" if bounded and "clipped" in self.mixings and not over_torch else "mean"

    def rules(self) -> Iterator[Problem]:
        """Refuse mixing that nobody has declared, and trimming of what is sparse."""
        if self.mixing not in ("auto", *self.mixings):
            yield _problem(
                "mixing",
                f"nothing is {self.mixing} under this strategy; set mixing = {' or '.join(self.mixings)}",
            )
        if self.mixing == "trimmed" and self.compression in SPARSE:
            yield _problem(
                "mixing",
                f"with compression = {self.compression} most values of an entry are zero, so trimming leaves "
                "out just what was sent; set mixing = clipped or mean, or compression = int8, bf16 or none",
            )
        yield from super().rules()


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

    def rules(self) -> Iterator[Problem]:
        """Refuse what never begins."""
        if self.every_updates == 0 and self.every_s == 0:
            yield _problem(
                "every_updates",
                "with this and every_s both 0 no exchange ever begins; set one, or task.strategy.name = "
                "local",
            )
        yield from super().rules()


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

    told: ClassVar[tuple[str, ...]] = ("servers",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)

    def rules(self) -> Iterator[Problem]:
        """Refuse servers that can't be pinned so."""
        if len(set(self.pinned)) != len(self.pinned):
            yield _problem("pinned", "a node is named twice; name each server once")
        if len(self.pinned) > self.servers:
            yield _problem(
                "pinned",
                f"{len(self.pinned)} nodes are pinned and servers = {self.servers}; raise servers, "
                "or pin fewer",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("allreduce",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)
    mixings: ClassVar[tuple[Mixing, ...]] = get_args(Mixing)

    @property
    def learner_mode(self) -> LearnerMode:
        """It waits for each round."""
        return LearnerMode("parameters", every=self.every_updates)

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return "parameters"

    def rules(self) -> Iterator[Problem]:
        """Refuse outer steps that lead nowhere."""
        if self.outer_learning_rate == 0:
            yield _problem(
                "outer_learning_rate",
                "0 takes everybody back to where the round began, so nothing is ever learnt; 1 is the plain "
                "mean",
            )
        if self.outer_momentum == 1:
            yield _problem(
                "outer_momentum", "1 never forgets a round, so the steps grow without bound; lower it"
            )
        yield from super().rules()


def _lossy_parameters(strategy: AdpsgdConfig | DsgdConfig | GalaConfig) -> Iterator[Problem]:
    if strategy.compression in LOSSY and strategy.exchanges == "parameters":
        yield _problem(
            "compression",
            f"a quantised or sparse copy of parameters isn't an average: {strategy.compression} is for "
            "gradients and differences; take bf16 or none, or set exchanges = gradients",
        )


def _over_torch(strategy: GradAverageConfig | ParamAverageConfig) -> Iterator[Problem]:
    """What torch.distributed can't do."""
    if strategy.backend != "torch":
        return
    if strategy.compression in LOSSY:
        yield _problem(
            "compression",
            f"torch.distributed adds numbers, not {strategy.compression} messages; take bf16 or none, "
            "or backend = own",
        )
    if strategy.mixing not in ("auto", "mean"):
        yield _problem(
            "mixing",
            f"torch.distributed hands out the sum alone, so there is nothing to be {strategy.mixing}; "
            "set mixing = mean, or backend = own",
        )


class PipelineConfig(
    StrategyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="pipeline"
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

    modes: ClassVar[tuple[Mode, ...]] = ("pipeline",)
    told: ClassVar[tuple[str, ...]] = ("stages", "schedule", "microbatches", "backend")

    @property
    def learner_mode(self) -> LearnerMode:
        """It trains by orders only."""
        return LearnerMode(stages=True)

    def rules(self) -> Iterator[Problem]:
        """Refuse schedules, chunks and cuts that don't go together."""
        if self.schedule == "interleaved" and self.chunks == 1:
            yield _problem(
                "chunks",
                "interleaved takes turns between several stages of each peer; set chunks = 2 or more, or "
                "schedule = 1f1b",
            )
        if self.schedule != "interleaved" and self.chunks > 1:
            yield _problem(
                "chunks",
                f"with {self.schedule} each peer holds one stage, not {self.chunks}; set schedule = "
                "interleaved, or chunks = 1",
            )
        cuts, wanted = self.cuts, self.stages * self.chunks - 1
        if not cuts:
            return
        if len(cuts) != wanted:
            yield _problem(
                "cuts",
                f"{_count(self.stages, 'peer')} with {_count(self.chunks, 'stage')} each "
                f"need{'s' if self.stages == 1 else ''} {_count(wanted, 'cut')}, not {len(cuts)}; "
                "set that many, or none to have the stages balanced",
            )
        elif list(cuts) != sorted(set(cuts)):
            yield _problem(
                "cuts",
                f"{', '.join(map(str, cuts))} don't rise: each is the number of a stage's first block, and "
                "no stage is empty; set rising numbers, or none to have the stages balanced",
            )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


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

    modes: ClassVar[tuple[Mode, ...]] = ("gossip",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)
    mixings: ClassVar[tuple[Mixing, ...]] = ("mean", "clipped")

    @property
    def learner_mode(self) -> LearnerMode:
        """It runs freely, or offers each gradient for a while."""
        return LearnerMode("gradients", ahead=2) if self.exchanges == "gradients" else FREE

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return self.exchanges

    def rules(self) -> Iterator[Problem]:
        """Refuse what two vectors can't do."""
        yield from _lossy_parameters(self)
        if self.mixing == "trimmed":
            yield _problem(
                "mixing",
                "an exchange has two vectors, and two vectors can't be trimmed; set mixing = clipped, "
                "or take dsgd with a denser topology",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("gossip",)
    told: ClassVar[tuple[str, ...]] = ("topology",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)
    mixings: ClassVar[tuple[Mixing, ...]] = get_args(Mixing)

    @property
    def learner_mode(self) -> LearnerMode:
        """It waits for each round."""
        if self.exchanges == "gradients":
            return LearnerMode("gradients")
        return LearnerMode("parameters", every=self.every_updates)

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return self.exchanges

    def rules(self) -> Iterator[Problem]:
        """Refuse lossy copies of parameters."""
        yield from _lossy_parameters(self)
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("gossip",)
    mixings: ClassVar[tuple[Mixing, ...]] = ("mean", "clipped")

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return "parameters"

    def rules(self) -> Iterator[Problem]:
        """Refuse what takes mass away."""
        if self.compression in LOSSY:
            yield _problem(
                "compression",
                "a quantised or sparse copy of parameters isn't an average, and sgp pushes parameters: "
                f"{self.compression} would lose what the weights count on; take bf16 or none",
            )
        if self.mixing == "trimmed":
            yield _problem(
                "mixing",
                "a push is one vector, and one vector can't be trimmed; set mixing = clipped, or take dsgd",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("gossip",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)
    mixings: ClassVar[tuple[Mixing, ...]] = get_args(Mixing)

    @property
    def learner_mode(self) -> LearnerMode:
        """It runs freely, or offers each gradient for a while."""
        return LearnerMode("gradients", ahead=2) if self.exchanges == "gradients" else FREE

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return self.exchanges

    def rules(self) -> Iterator[Problem]:
        """Refuse lossy copies of parameters, and trimming of two."""
        yield from _lossy_parameters(self)
        if self.mixing == "trimmed" and self.partners == "ring":
            yield _problem(
                "mixing",
                "on a ring each node hears of one other, and two vectors can't be trimmed; set mixing = "
                "clipped, or partners = exponential or random",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("gossip",)

    def rules(self) -> Iterator[Problem]:
        """Refuse what changes ±τ on its way."""
        if self.compression in LOSSY:
            yield _problem(
                "compression",
                f"strom sends nothing but ±tau, so {self.compression} has nothing left to compress; set tau, "
                "and leave compression at bf16 or none",
            )
        if self.mixing not in ("auto", "mean"):
            yield _problem(
                "mixing",
                "every node adds the same ±tau, or replicas drift apart for good; there is nothing to be "
                f"{self.mixing}: set mixing = mean, and bound messages by tau",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("server-sync",)
    mixings: ClassVar[tuple[Mixing, ...]] = get_args(Mixing)

    @property
    def learner_mode(self) -> LearnerMode:
        """The servers step; it waits for their parameters."""
        return LearnerMode("gradients", steps=False, clip="before")

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return "nothing" if self.reduce == "sum" else "gradients"

    def rules(self) -> Iterator[Problem]:
        """Refuse sums of what was trimmed."""
        if self.mixing == "trimmed" and self.reduce == "sum":
            yield _problem(
                "reduce",
                "what was trimmed is missing from a sum; set reduce = mean or count, or mixing = clipped",
            )
        yield from super().rules()


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

    modes: ClassVar[tuple[Mode, ...]] = ("server-async",)
    mixings: ClassVar[tuple[Mixing, ...]] = ("mean", "clipped")

    @property
    def learner_mode(self) -> LearnerMode:
        """The servers step, and it too with ``local_steps``; pushes may be under way meanwhile."""
        return LearnerMode(
            "gradients", every=self.push_every, ahead=self.ahead, steps=self.local_steps, clip="before"
        )

    def rules(self) -> Iterator[Problem]:
        """Refuse robust means of one gradient, and bounds that a worker alone would break."""
        if self.mixing == "trimmed":
            yield _problem(
                "mixing",
                "a server applies each gradient alone as it comes: there are no others that it could be "
                "trimmed against; set mixing = clipped, or take server_sync",
            )
        yield from super().rules()
        own = self.fetch_every - 1 + self.ahead
        if self.stale == "drop" and self.max_staleness < own:
            yield _problem(
                "max_staleness",
                f"with fetch_every = {self.fetch_every} and ahead = {self.ahead} a worker's own "
                f"pushes make its gradients up to {own} steps old: even alone it would have them dropped; "
                "raise max_staleness, lower the others, or set stale = scale",
            )


class GradAverageConfig(
    Grouped,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="grad_average",
):
    """Data parallelism: average gradients, then everybody takes the same step (DDP, Horovod)."""

    reduce: Literal["mean", "sum", "count"] = "count"
    """What everybody steps along, of the members' gradients g_k, each the mean over n_k samples: ``count``
    weights them by their samples, Σ n_k g_k / Σ n_k, which is the gradient of one big batch; ``mean`` is
    (1/n) Σ g_k, each member counting the same; ``sum`` is Σ g_k, whose step grows with the members. Who has
    no gradient in a round isn't counted."""
    backend: Literal["own", "torch"] = "own"
    """``own`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication."""
    preemption_threshold: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the members whose gradients must have come for the others' unrolls to end early, after the
    environment step under way (DD-PPO, Wijmans 2020, arXiv 1911.00357, which takes 0.6): nobody waits long
    for slow environments, which then count for less, as they bring fewer samples. 1 waits for everybody.
    Without effect on unrolls that actor processes make."""

    modes: ClassVar[tuple[Mode, ...]] = ("allreduce",)
    compressions: ClassVar[tuple[Compression, ...]] = get_args(Compression)
    mixings: ClassVar[tuple[Mixing, ...]] = get_args(Mixing)

    @property
    def learner_mode(self) -> LearnerMode:
        """It steps with each mean."""
        return LearnerMode("gradients", preempted=self.preemption_threshold < 1)

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return "nothing" if self.reduce == "sum" else "gradients"

    def rules(self) -> Iterator[Problem]:
        """Refuse what torch.distributed can't do, and sums of what was trimmed."""
        yield from _over_torch(self)
        if self.backend == "torch" and self.preemption_threshold < 1:
            yield _problem(
                "preemption_threshold",
                "within torch.distributed nobody sees whose gradients have come; set it to 1, or backend = "
                "own",
            )
        if self.mixing == "trimmed" and self.reduce == "sum":
            yield _problem(
                "reduce",
                "what was trimmed is missing from a sum; set reduce = mean or count, or mixing = clipped",
            )
        yield from super().rules()


class ParamAverageConfig(
    Averaged, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="param_average"
):
    """Periodic averaging of everybody's parameters (local SGD, FedAvg; with momentum: DiLoCo)."""

    backend: Literal["own", "torch"] = "own"
    """``own`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication."""

    told: ClassVar[tuple[str, ...]] = ("every_updates",)

    def rules(self) -> Iterator[Problem]:
        """Refuse what torch.distributed can't do."""
        yield from _over_torch(self)
        yield from super().rules()


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

    def rule(self, *, bounded: bool) -> Mixing:
        """Noise is made for the mean: see `rules`."""
        return super().rule(bounded=bounded and not self.noise_multiplier)

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return "nothing"

    def rules(self) -> Iterator[Problem]:
        """Refuse what the reported (ε, δ) doesn't hold for: a member moves its round's sum by S at most."""
        if self.noise_multiplier > 0:
            yield from self._private()
        yield from super().rules()

    def _private(self) -> Iterator[Problem]:
        if self.mixing not in ("auto", "mean"):
            yield _problem(
                "mixing",
                f"the noise is made for a sum in which each member moves at most clip_norm; {self.mixing} "
                "has another sensitivity, and the privacy told would be wrong; set mixing = mean, or "
                "noise_multiplier = 0",
            )
        if self.compression in LOSSY:
            yield _problem(
                "compression",
                f"what {self.compression} leaves out comes with a later round, beyond clip_norm and perhaps "
                "with its member not drawn; the privacy told would be wrong; take bf16 or none, or "
                "noise_multiplier = 0",
            )
        if self.weighting != "equal":
            yield _problem(
                "weighting",
                "the noise is made for members that count the same; one with many samples would show "
                "through: set weighting = equal, or noise_multiplier = 0",
            )


class HogwildConfig(
    AdpsgdConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="hogwild"
):
    """Learners of one node write one vector without locks (Hogwild, Recht 2011); nodes gossip pairwise."""

    learners: Annotated[int, Meta(ge=1, le=64)] = 2
    """Learner processes of each node."""
    between_nodes: bool = True
    """Whether nodes average pairwise as in ``adpsgd``; the other options are about that."""
    shared_statistics: bool = False
    """Whether the learners of a node share their optimizer's state as well as the vector, without locks, as
    the shared RMSProp of A3C (Mnih 2016, arXiv 1602.01783) does: its averages then see all gradients, and a
    learner that is started again needs no new ones. Otherwise each has its own."""

    modes: ClassVar[tuple[Mode, ...]] = ("gossip", "local")
    told: ClassVar[tuple[str, ...]] = ("learners",)

    @property
    def mode(self) -> Mode:
        """Nodes that don't average train alone."""
        return "gossip" if self.between_nodes else "local"

    @property
    def learner_mode(self) -> LearnerMode:
        """Several run freely."""
        shared = self.shared_statistics and self.learners > 1
        return LearnerMode(learners=self.learners, shared_statistics=shared)

    @property
    def averages(self) -> Literal["nothing", "parameters", "gradients"]:
        """See `StrategyOptions`."""
        return super().averages if self.between_nodes and self.learners == 1 else "nothing"

    def rules(self) -> Iterator[Problem]:
        """Refuse gradients; there is nothing to check where nodes don't average."""
        if not self.between_nodes:
            return
        yield from super().rules()
        if self.exchanges == "gradients":
            yield _problem(
                "exchanges",
                "learners that share one vector step at once and send no gradients; set exchanges = "
                "parameters, or name = adpsgd",
            )


class LocalConfig(
    StrategyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="local"
):
    """No averaging: each node trains alone. The reference that others are measured against."""

    modes: ClassVar[tuple[Mode, ...]] = ("local",)


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
    | PipelineConfig
    | LocalConfig
    | HogwildConfig
)
"""Told apart by their tags; in the order in which people are told them."""
