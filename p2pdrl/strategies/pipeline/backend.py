"""What carries activations: as configured, or by trust, devices and reachability. Pure.

Both backends are equally fast from host to host. torch.distributed can do better where NCCL moves tensors
from GPU to GPU; but it listens at further ports, of each rank, and authenticates nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from p2pdrl.pipeline.plan import StageBackend, StageNews
from p2pdrl.strategies.pipeline.generation import Generation
from p2pdrl.strategies.pipeline.messages import RankOffer
from p2pdrl.strategies.protocol import SwarmView

__all__ = ["BackendFallback", "Choice", "chosen"]


class Choice(NamedTuple):
    """A backend, and in a sentence why; empty where there was nothing to choose."""

    backend: StageBackend
    why: str = ""


def chosen(
    wanted: Literal["auto", "stream", "torch"], ranks: Sequence[tuple[str, RankOffer]], failed: str = ""
) -> Choice:
    """Choose a backend.

    Args:
        wanted: by the configuration.
        ranks: name and offer of each.
        failed: how torch came to nothing before; empty where it didn't.
    """
    if wanted != "auto":
        return Choice(wanted)
    if len(ranks) < 2:
        return Choice("stream")
    against = _hindrance(ranks) or failed
    if against:
        return Choice("stream", f"it runs over stream, for {against}")
    return Choice(
        "torch", "it runs over torch, for all trust their network, reach each other, and have a GPU each"
    )


def _hindrance(ranks: Sequence[tuple[str, RankOffer]]) -> str:
    """Return what speaks against torch; empty where nothing does."""
    for name, offer in ranks:
        if not offer.trusted:
            return f"{name} doesn't trust its network (node.trusted_network)"
    owners: dict[str, str] = {}
    for name, offer in ranks:
        if not offer.gpu:
            return f"{name} computes on {offer.device or 'nothing'}, where NCCL doesn't reach"
        if offer.gpu in owners:
            return f"{owners[offer.gpu]} and {name} share a GPU"
        owners[offer.gpu] = name
    for name, offer in ranks:
        if not offer.direct:
            return f"{name} isn't reached at any port, or doesn't reach all others"
    return ""


LONGEST = 160
"""Characters of the reason that a learner told."""


class BackendFallback:
    """Whether torch failed in a pipeline that this node coordinated, since its mode began.

    A set-up that can't work is to cost one generation, not all of them.

    Args:
        counts: whether torch was chosen; what people asked for is tried again and again.

    Attributes:
        failed: how it came to nothing, in words; empty as long as it didn't.
    """

    def __init__(self, swarm: SwarmView, *, counts: bool) -> None:
        self._swarm, self._counts = swarm, counts
        self.failed = ""

    def unmet(self, generation: int, why: str) -> None:
        """Note that the ranks of a generation didn't meet."""
        self._fail(f"the ranks of generation {generation} couldn't meet over torch", why)

    def ended(self, generation: Generation, news: StageNews) -> None:
        """Note a generation's end."""
        if (
            generation.leads
            and generation.order.backend == "torch"
            and news.what == "broken"
            and not generation.progressed
        ):
            self._fail(f"generation {generation.number} broke over torch before its first update", news.why)

    def _fail(self, what: str, why: str) -> None:
        if not self._counts or self.failed:
            return
        self.failed = f"{what}: {why[:LONGEST]}" if why else what
        self._swarm.tell(
            "pipeline-backend",
            f"{self.failed}; the next pipelines that this node coordinates run over stream",
            warning=True,
        )
