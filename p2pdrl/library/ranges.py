"""Ranges of settings, as ``p2pdrl sweep --set KEY=RANGE`` takes them. Pure.

| written | values | elsewhere |
|---|---|---|
| ``uniform(a, b)`` | real numbers from a to b | Hydra's ``interval(a, b)`` |
| ``loguniform(a, b)`` | the same, of their logarithm | Hydra's ``tag(log, interval(a, b))`` |
| ``int(a, b)``, ``int(a, b, step)`` | whole numbers from a to b, both included | Optuna's ``suggest_int`` |
| ``logint(a, b)`` | whole numbers, of their logarithm | |
| ``range(a, b)``, ``range(a, b, step)`` | a, a + step … below b, as in Python | Hydra's ``range`` |
| ``choice(x, y, …)`` | one of these, each as ``--set`` takes it | Hydra's ``choice`` |

Hydra's ways of writing are read, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2pdrl.errors import ConfigError, UsageError

__all__ = ["SearchRange", "read_settings"]

_CALL = re.compile(
    r"\s*(uniform|interval|loguniform|int|logint|range|choice|tag)\s*\((.*)\)\s*", re.DOTALL | re.IGNORECASE
)
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class SearchRange:
    """The values that one setting may have.

    Attributes:
        text: as it was written.
        low: and ``high`` are included.
        step: None for all numbers between them.
        choices: as texts.
    """

    text: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SearchRange:
        """Read a range.

        Raises:
            UsageError: it isn't one.
        """
        match = _CALL.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is no range")
        name, parts = match[1].lower(), _split(match[2])
        if name == "tag":
            return cls._tagged(text, parts)
        if name == "choice":
            if len(parts) < 2 or not all(parts) or len(set(parts)) < len(parts):
                raise UsageError(f"{text}: choice wants several values, each once, as in choice(32, 64)")
            return cls(text, "choice", choices=tuple(parts))
        whole = name in ("int", "logint") or (name == "range" and all(map(_is_whole, parts)))
        numbers = [_number(part, text, whole=whole) for part in parts]
        most = 3 if name in ("int", "range") else 2
        if not 2 <= len(numbers) <= most:
            raise UsageError(f"{text}: {name} wants {'two numbers, or three' if most > 2 else 'two numbers'}")
        low, high, *rest = numbers
        step = rest[0] if rest else None
        if step is not None and step <= 0:
            raise UsageError(f"{text}: the step must be above 0")
        if name == "range":
            step = step or 1.0
            high = low + (math.ceil((high - low) / step - 1e-9) - 1) * step
        log = name in ("loguniform", "logint")
        if not low < high:
            raise UsageError(f"{text}: the first number must be below the second")
        if log and low <= 0:
            raise UsageError(f"{text}: a logarithm wants numbers above 0")
        if step is not None:
            high = low + math.floor((high - low) / step + 1e-9) * step
        return cls(text, "int" if whole else "float", low, high, step, log)

    @classmethod
    def _tagged(cls, text: str, parts: list[str]) -> SearchRange:
        inner = cls.parse(parts[1]) if len(parts) == 2 and parts[0].lower() == "log" else None
        if inner is None or inner.kind == "choice" or inner.step is not None:
            raise UsageError(f"{text}: tag is read as tag(log, interval(a, b))")
        if inner.low <= 0:
            raise UsageError(f"{text}: a logarithm wants numbers above 0")
        return cls(text, inner.kind, inner.low, inner.high, log=True)

    @property
    def ends(self) -> tuple[str, ...]:
        """Its lowest and its highest value, or all choices, as ``--set`` takes them."""
        return self.choices if self.kind == "choice" else (self.write(self.low), self.write(self.high))

    def write(self, value: object) -> str:
        """Return a value as ``--set`` takes it."""
        if self.kind == "choice" or not isinstance(value, int | float):
            return str(value)
        return str(round(value)) if self.kind == "int" else repr(float(value))


def read_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, SearchRange]]:
    """Tell fixed settings (``KEY=VALUE``) from ranges, by key.

    Raises:
        UsageError: a range can't be read.
        ConfigError: one isn't written ``KEY=VALUE``.
    """
    fixed: list[str] = []
    ranges: dict[str, SearchRange] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {text!r} isn't written KEY=VALUE, as in --set task.env.id=CartPole-v1")
        if _CALL.fullmatch(value) is None:
            fixed.append(text)
            ranges.pop(key, None)
            continue
        try:
            ranges[key] = SearchRange.parse(value.strip())
        except UsageError as error:
            raise UsageError(f"--set {key}={error}") from error
    return fixed, ranges


def _split(text: str) -> list[str]:
    """Split at commas that aren't inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts]


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9][0-9_]*", text) is not None


def _number(text: str, where: str, *, whole: bool) -> float:
    try:
        value = int(text) if _is_whole(text) else float(text)
    except ValueError:
        raise UsageError(f"{where}: {text!r} is no number") from None
    if not math.isfinite(value) or (whole and value != int(value)):
        raise UsageError(f"{where}: {text!r} is no {'whole ' if whole else 'finite '}number")
    return int(value) if whole else float(value)
