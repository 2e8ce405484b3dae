"""What a node shows of its place in the pipelines."""

from __future__ import annotations

import msgspec

__all__ = ["Figures"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Where this node stands; all of it as it was ordered or predicted, nothing measured."""

    standby: bool = False
    """Whether it is in no pipeline, although others are."""
    pipeline: int | None = None
    """Number of its pipeline, from 0; None without one."""
    pipelines: int = 0
    """How many there are."""
    rank: int | None = None
    """Its place; 0 is the head."""
    ranks: tuple[str, ...] = ()
    """Names of all ranks' nodes."""
    stages: tuple[int, ...] = ()
    """Numbers of the stages that it holds."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks in them."""
    schedule: str = ""
    microbatches: int = 0
    """At most, where the head measures which number is fastest."""
    generation: int = 0
    from_version: int = 0
    """Policy version with which the generation began."""
    backend: str = ""
    """``stream`` or ``torch``; ``none`` where a node computes by itself."""
    alone: bool = False
    """Whether all ranks compute by themselves, because a pipeline would be slower."""
    why: str = ""
    """Why it is as it is, with numbers, as the head told all ranks."""
    limit: str = ""
    """What can't be as the strategy's options ask, and which of them to change; empty when all can."""
    step_s: float = 0.0
    """Predicted for one minibatch."""
    bubble: float = 0.0
    """Predicted part of the time in which ranks idle."""
    copies: int = 0
    """State copies in this generation."""

    @property
    def role(self) -> str:
        """In a few words."""
        if self.standby:
            return "standby"
        if self.rank is None:
            return "forming"
        if self.alone:
            return "alone"
        return f"pipeline {self.pipeline} rank {self.rank}"
