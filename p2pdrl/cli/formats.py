"""Numbers and names as people read them; what isn't known is shown as a dash."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

__all__ = [
    "NONE",
    "age",
    "as_number",
    "beside",
    "byte_size",
    "clean",
    "count",
    "duration",
    "fixed",
    "grouped",
    "millis",
    "mode_words",
    "percent",
    "scientific",
]

NONE = "–"
"""Shown for what isn't known."""


def as_number(value: object) -> float | None:
    """``value`` when it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def clean(text: object, longest: int = 200) -> str:
    """Text from elsewhere, safe for a terminal: what can't be printed becomes ``?``."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:longest])


def _of_number(form: Callable[..., str]) -> Callable[..., str]:
    """Give ``form`` finite numbers only; anything else is `NONE`."""

    @functools.wraps(form)
    def shown(value: object, *args: int) -> str:
        number = as_number(value)
        return NONE if number is None else form(number, *args)

    return shown


@_of_number
def fixed(value: float, digits: int = 1) -> str:
    """``431.3``."""
    return f"{value:.{digits}f}"


@_of_number
def count(value: float) -> str:
    """``950``, ``12.3k``, ``4.56M``: three figures or so."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


@_of_number
def grouped(value: float) -> str:
    """``1,234,567``."""
    return f"{value:,.0f}"


@_of_number
def scientific(value: float) -> str:
    """``0.0123``, ``1.2e-05``: three figures of a number of any size."""
    return f"{value:.3g}"


@_of_number
def millis(seconds: float) -> str:
    """``2.1 ms`` below ten milliseconds, ``38 ms`` above."""
    return f"{1000 * seconds:.1f} ms" if abs(seconds) < 0.01 else f"{1000 * seconds:.0f} ms"


@_of_number
def percent(part: float) -> str:
    """``12%``."""
    return f"{part:.0%}"


@_of_number
def duration(seconds: float) -> str:
    """``1:02:03``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@_of_number
def age(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min``, ``2 h``."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


@_of_number
def byte_size(value: float) -> str:
    """``90.1 MB``: powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def beside(measured: object, predicted: object, form: Callable[[object], str]) -> str:
    """``77% measured here, 34% predicted``, as far as they are known; empty for neither."""
    pairs = ((measured, "measured here"), (predicted, "predicted"))
    return ", ".join(f"{form(value)} {word}" for value, word in pairs if as_number(value) is not None)


def mode_words(mode: object, protocol: object = None, options: object = None) -> str:
    """``gossip: adpsgd (weight=0.3)``, a strategy of the mode's own name left out."""
    words = clean(mode or NONE, 40)
    if protocol and str(protocol).replace("_", "-") != str(mode):
        words += f": {clean(protocol, 40)}"
    if not isinstance(options, Mapping) or not options:
        return words
    return f"{words} ({', '.join(f'{clean(key, 40)}={clean(value, 80)}' for key, value in options.items())})"
