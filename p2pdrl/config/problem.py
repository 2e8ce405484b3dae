"""A broken rule, as `checks` and `strategy_checks` tell it."""

from __future__ import annotations

import msgspec

__all__ = ["Problem"]


class Problem(msgspec.Struct, frozen=True):
    """A broken rule: the key to change first, and what is wrong, in words."""

    key: str
    message: str
