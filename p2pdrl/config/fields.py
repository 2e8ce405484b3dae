"""Types that configuration fields share, the base of sections that travel, and what is said of broken rules.

Durations are in seconds. What travels is what differs from the defaults (`without_defaults`), so a node of an
earlier release reads a task whose options it knows, and refuses one with an option that it doesn't. A later
release may add options that by default change nothing, marked `LATER`, and alters no default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "LATER",
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
    "hashed",
    "without_defaults",
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


LATER = Meta(extra={"later": True})
"""In an option's ``Annotated``: earlier releases don't have it, so by default it isn't hashed (`hashed`)."""


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


def without_defaults(value: Any) -> Any:
    """What in ``value`` isn't as by default, as maps, lists and plain values; decoding fills in the rest."""
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        return _as_map(value, lambda field, held: held == _default(field))
    if isinstance(value, dict):
        return {key: without_defaults(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return [without_defaults(inner) for inner in value]
    return value


def hashed(value: Any) -> Any:
    """All of ``value`` that a hash covers: what is marked `LATER` only where it isn't the default."""
    if isinstance(value, msgspec.Struct):
        return _as_map(value, lambda field, held: _is_later(field) and held == _default(field), hashed)
    return value


def _as_map(
    struct: msgspec.Struct,
    omits: Callable[[msgspec.structs.FieldInfo, Any], bool],
    inner: Callable[[Any], Any] = without_defaults,
) -> dict[str, Any]:
    config = struct.__struct_config__
    found: dict[str, Any] = {} if config.tag_field is None else {config.tag_field: config.tag}
    for field in msgspec.structs.fields(struct):
        held = getattr(struct, field.name)
        if not omits(field, held):
            found[field.encode_name] = inner(held)
    return found


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _is_later(field: msgspec.structs.FieldInfo) -> bool:
    return LATER in getattr(field.type, "__metadata__", ())
