"""Types that configuration fields share, the base of sections that travel, and what is said of broken rules.

Durations are in seconds.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "Count",
    "Fraction",
    "Microbatches",
    "Natural",
    "NonNegative",
    "Positive",
    "PositiveSeconds",
    "Precision",
    "Problem",
    "Seconds",
    "Travelling",
]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e6)]
Precision = Literal["float32", "bf16", "fp16"]
Microbatches = Annotated[int, Meta(ge=1, le=65_536)] | Literal["auto"]


class Travelling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section that travels between nodes: whatever it holds, it holds no infinity and no NaN."""

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            ValueError: a number isn't finite; msgspec turns it into its own ValidationError.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"{name} must be a finite number")


class Problem(msgspec.Struct, frozen=True):
    """A broken rule: the key to change first, and what is wrong, in words."""

    key: str
    message: str
