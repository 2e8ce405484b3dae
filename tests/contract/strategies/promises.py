"""Every strategy as the contract suite runs it, and what each promises where they differ.

Every strategy promises all that the suite checks, except for what is told here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    FederatedConfig,
    GalaConfig,
    GradAverageConfig,
    HogwildConfig,
    LocalConfig,
    ParamAverageConfig,
    PipelineConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StrategyConfig,
    StromConfig,
)

DEADLINE_S = 4.0
NONE = {"compression": "none"}
QUICK = {**NONE, "deadline_s": 2.0}
GROUPED = {**NONE, "deadline_s": DEADLINE_S}
SERVED = {**GROUPED, "optimizer": "sgd"}


@dataclass(frozen=True)
class Case:
    """One strategy under test.

    Args:
        config: its options.
        route: on which vectors travel; empty for none.
        grouped: whether its messages belong to a group's view (its first rounds wait for one).
        close: how far apart nodes with different targets stay at most, as a share of the targets' own
            distance; None: as far as they like.
        off: how far the swarm's mean may stay from the mean of the targets, as a share of the same.
        waits: whether the learner stands still for rounds.
        keeps_mean: whether the mean of all vectors stays as it is while nobody learns.
        adopts: whether nodes take each other's whole state without any fault.
        names_all: whether reports of rounds name all whose vectors count; else only some.
        still_rate: learning rate where the suite wants learners to stand still, for those that would never
            begin a round otherwise.
        moved: outcomes of rounds that changed our vector.
        learner: arguments of the stand-in learner.
    """

    config: StrategyConfig
    route: str = ""
    grouped: bool = False
    close: float | None = 0.3
    off: float = 0.15
    waits: bool = False
    keeps_mean: bool = True
    adopts: bool = False
    names_all: bool = True
    still_rate: float = 0.0
    moved: tuple[str, ...] = ("ok",)
    learner: dict[str, Any] = field(default_factory=dict)

    @property
    def deadline_s(self) -> float:
        """The longest that anybody waits for a round."""
        return float(getattr(self.config, "deadline_s", DEADLINE_S))

    @property
    def guarded(self) -> bool:
        """Whether a vector that is finite and far beyond all others is refused (``max_distance``).

        Gradients and differences have no such bound: ``mixing`` is what limits them.
        """
        gradients = getattr(self.config, "exchanges", "parameters") == "gradients"
        return hasattr(self.config, "max_distance") and not gradients

    @property
    def loss(self) -> float:
        """Chance of each message to be lost with which it still makes rounds all the time.

        In a round of a whole group dozens of messages must come through, and one that is lost costs up to
        the deadline. (Over TCP single messages aren't lost; connections break, which is known at once.)
        """
        return 0.02 if self.grouped else 0.1

    @property
    def serves(self) -> bool:
        """Whether some nodes are servers."""
        return isinstance(self.config, ServerSyncConfig | ServerAsyncConfig)


PAIRED = ("ok", "answered")
CASES: dict[str, Case] = {
    "adpsgd": Case(AdpsgdConfig(**QUICK), "exchange", moved=PAIRED),
    # Gradients of both are averaged, and parameters only now and then: replicas are further apart.
    "adpsgd gradients": Case(
        AdpsgdConfig(**QUICK, exchanges="gradients", parameters_every=3), "exchange", close=0.5, moved=PAIRED
    ),
    "hogwild": Case(HogwildConfig(**QUICK), "exchange", moved=PAIRED),
    "dsgd": Case(DsgdConfig(**GROUPED), "neighbour", grouped=True, waits=True),
    "dsgd gradients": Case(
        DsgdConfig(**GROUPED, exchanges="gradients", parameters_every=3),
        "neighbour",
        grouped=True,
        close=0.5,
        waits=True,
    ),
    # Push-sum keeps Σ w·z, not Σ z: the mean of the z comes back to it only as the nodes come together.
    "sgp": Case(SgpConfig(**QUICK), "push", keeps_mean=False, off=0.3),
    # Averages on arrival, alone: rows of its matrix sum to one, columns don't.
    "gala": Case(GalaConfig(**QUICK, partners="exponential"), "push", keeps_mean=False, off=0.3),
    "gala gradients": Case(
        GalaConfig(**QUICK, partners="exponential", exchanges="gradients", parameters_every=3),
        "push",
        keeps_mean=False,
        close=0.6,
        off=0.3,
    ),
    # What moves is sent, so nothing is while nobody learns; all begin with one member's parameters.
    "strom": Case(
        StromConfig(deadline_s=2.0, tau=0.03),
        "relay",
        keeps_mean=False,
        still_rate=0.01,
        off=0.3,
        moved=("pushed", "answered"),
        learner={"learning_rate": 0.02},
    ),
    "server_sync": Case(ServerSyncConfig(**SERVED), "push", grouped=True, waits=True),
    "server_sync 2": Case(ServerSyncConfig(**SERVED, servers=2), "push", grouped=True, waits=True),
    # Its learners run ahead of their gradients' answers; a push tells what its own gradient counted for.
    "server_async": Case(ServerAsyncConfig(**SERVED), "push", grouped=True, names_all=False),
    # All begin with the same optimizer state, too, which only an adoption brings.
    "grad_average": Case(GradAverageConfig(**GROUPED), "reduce", grouped=True, waits=True, adopts=True),
    "param_average": Case(ParamAverageConfig(**GROUPED, every_updates=4), "reduce", grouped=True, waits=True),
    # Nobody's own parameters are to be seen: a history begins with those of one member.
    "federated": Case(
        FederatedConfig(**GROUPED, every_updates=4, participation=1.0, clip_norm=10.0),
        "reduce",
        grouped=True,
        waits=True,
        keeps_mean=False,
    ),
    # Everybody goes to the own target, and so their mean to the mean of all.
    "local": Case(LocalConfig(), close=None, off=0.1),
}
STAGED: dict[str, Case] = {
    # One model over all nodes learns from the experience of the first alone; no vector travels as a message,
    # for pipes carry activations and states are adopted.
    "pipeline": Case(
        PipelineConfig(stages=8, backend="stream", deadline_s=DEADLINE_S, state_every=2),
        "stage",
        grouped=True,
        waits=True,
        adopts=True,
        keeps_mean=False,
        off=1.2,
    ),
}
"""Those whose learners work by orders alone: what they promise about vectors in messages doesn't apply."""

ALL = CASES | STAGED

SWARMING = {name: case for name, case in CASES.items() if case.route}
"""Those that have peers."""

TRIED = {name: case for name, case in SWARMING.items() if name != "hogwild"}
"""The same without Hogwild, whose part between the nodes is adpsgd: the same class, the same messages."""

every = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_and_staged = pytest.mark.parametrize("case", ALL.values(), ids=list(ALL))
tried_and_staged = pytest.mark.parametrize("case", (TRIED | STAGED).values(), ids=list(TRIED | STAGED))
every_swarming = pytest.mark.parametrize("case", SWARMING.values(), ids=list(SWARMING))
every_tried = pytest.mark.parametrize("case", TRIED.values(), ids=list(TRIED))
