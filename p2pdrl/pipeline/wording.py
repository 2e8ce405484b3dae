"""Seconds and bytes as people read them: few digits, and a unit."""

from __future__ import annotations

import math

__all__ = ["in_bytes", "in_seconds"]


def in_seconds(seconds: float) -> str:
    """Write a time with two digits: ``1.9 s``, ``0.80 s``, ``40 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.0995:
            return f"{_digits(seconds * factor, 2)} {unit}"
    return f"{_digits(seconds * 1e6, 2)} µs"


def in_bytes(size: float) -> str:
    """Write a size with three digits: ``34.0 MB``, ``620 kB``."""
    for unit, factor in (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3)):
        if size * factor >= 0.9995:
            return f"{_digits(size * factor, 3)} {unit}"
    return f"{size:.0f} bytes"


def _digits(number: float, digits: int) -> str:
    """So many digits, or all of those before the point where these are more."""
    if number <= 0.0 or not math.isfinite(number):
        return f"{number:g}"
    exponent = int(f"{number:.{digits - 1}e}".split("e")[1])  # after rounding
    return f"{number:.{max(0, digits - 1 - exponent)}f}"
