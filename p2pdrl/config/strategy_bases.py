"""What sections of several strategies share: compression, robust mixing, guards, groups, servers, averages.

`strategy` derives each strategy's own section from these. Durations are in seconds (``_s``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from p2pdrl.config.fields import Count, Fraction, Natural, NonNegative, PositiveSeconds, Seconds, Travelling

__all__ = [
    "Averaged",
    "Compressed",
    "Compression",
    "Grouped",
    "Guarded",
    "Mixing",
    "Paced",
    "Robust",
    "Served",
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


class Served(Grouped, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
