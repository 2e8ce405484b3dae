"""The order that a head gives all ranks, as most tests want it: two peers, six blocks."""

from __future__ import annotations

from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.pipeline.messages import Form

__all__ = ["make_form"]


def make_form(**changes) -> Form:
    """A form; ``changes`` are fields of it."""
    usual = {
        "key": ViewKey(1, 2, "a"),
        "generation": 9,
        "members": ("a", "b"),
        "blocks": 6,
        "cuts": (3,),
        "microbatches": 4,
        "lineage": "aa",
        "policy_version": 0,
        "digest": b"",
    }
    return Form(**usual | changes)
