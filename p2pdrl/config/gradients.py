"""How gradients are computed, whatever the algorithm.

What changes results is the task's, the same on every node: the precision. How a batch is cut and what is
kept in memory (``microbatches`` and ``checkpoint_activations`` of ``node.learner``) changes them within
rounding only and depends on the machine, so each node chooses for itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from p2pdrl.config.fields import Travelling

__all__ = ["GradientsConfig", "Microbatches", "Precision"]

Precision = Literal["float32", "bf16"]

Microbatches = Annotated[int, Meta(ge=1, le=65_536)] | Literal["auto"]


class GradientsConfig(Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How gradients are computed, on every node alike."""

    precision: Precision = "float32"
    """``bf16`` runs the model's matrix products in bfloat16 (8 bits of mantissa) while it learns; parameters,
    loss and gradients stay float32, and so do acting and evaluation. Faster and leaner where the hardware
    knows bfloat16 (GPUs since 2020), slower on most processors. Outputs are off by some 0.4 %, so the ratios
    that ``ppo`` clips begin that far from 1."""
