"""One value at a time: from what a source holds to what the schema takes.

Files and programs hand over typed values (`coerce`); the command line and the environment hand
over text (`coerce_text`), which is read as a TOML value first, and as plain text when that fails
or when the key takes text.
"""

from __future__ import annotations

import math
import tomllib
from typing import Any

import msgspec

from p2pdrl.config.schema import allowed, choices, sequence_item, takes_none

__all__ = ["coerce", "coerce_text", "parse_text", "shown"]

NONE = "none"
"""How none is written: TOML has no word for it. Only where a key may be without a value."""

_INT64 = 2**63


def coerce(value: Any, annotation: Any) -> Any:
    """Turn a typed value into what ``annotation`` says.

    ``"none"`` stands for none, an integral float (1e6) may stand for an integer.

    Raises:
        ValueError: if it can't be; the message says what is allowed.
    """
    if takes_none(annotation) and (value is None or value == NONE):
        return None
    _check_plain(value)
    try:
        return msgspec.convert(value, annotation)
    except (msgspec.ValidationError, OverflowError):
        pass
    if isinstance(value, float) and value.is_integer():
        try:
            return msgspec.convert(int(value), annotation)
        except msgspec.ValidationError:
            pass
    raise ValueError(f"must be {allowed(annotation)}")


def coerce_text(text: str, annotation: Any) -> Any:
    """Turn text into what ``annotation`` says.

    Text for a list may leave the brackets out: ``64,64``. 1 and 0 stand for true and false.

    Raises:
        ValueError: if it can't be; the message says what is allowed.
    """
    _check_plain(text)
    parsed = parse_text(text)
    try:
        return coerce(parsed, annotation)
    except ValueError:
        item = sequence_item(annotation)
        if item is not None and not isinstance(parsed, list):
            parts = parsed.split(",") if isinstance(parsed, str) else [text]
            return tuple(coerce_text(part.strip(), item) for part in parts if part.strip())
        if len(choices(annotation)) > 2:
            raise  # a value of an open section: what TOML says, it is
        try:
            # Lax conversion: a node named 123, 1 and True for true.
            value = msgspec.convert(text, annotation, strict=False)
            _check_plain(value)
        except msgspec.ValidationError:
            pass
        else:
            return value
        raise


def parse_text(text: str) -> Any:
    """Read text as a TOML value; return it unchanged when it isn't one."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # bad TOML, a number of too many digits, brackets nested too deep
        return text
    return document["value"] if len(document) == 1 else text


def _check_plain(value: Any) -> None:
    """Refuse what can't travel or be hashed: NaN, infinity, integers beyond 64 bits, broken text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise ValueError("must fit in 64 bits")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid UTF-8") from None
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)


def shown(value: Any, limit: int = 80) -> str:
    """Write a value for a message: as TOML would, bounded, without control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
