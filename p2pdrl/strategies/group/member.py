"""A member's part in group views: what it acknowledged, and what is in force: pure.

The two promises that everything rests on: it acknowledges only a view greater than any before, and from
that moment acts in none until that view's proposer says that all have acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdrl.strategies.group.view import (
    MAX_GENERATION,
    MAX_NOTE_BYTES,
    Accept,
    Activate,
    ActiveView,
    Done,
    GroupView,
    Refuse,
    ViewKey,
)

__all__ = ["Member"]


class Member:
    """What one node acknowledged.

    Args:
        me: own node id.
        epoch: mode epoch.
        note: gives what to note when a view is acknowledged.
    """

    def __init__(self, me: str, epoch: int, note: Callable[[], bytes]) -> None:
        self._me = me
        self._epoch = epoch
        self._note = note
        self.acknowledged: GroupView | None = None
        """The greatest view that was acknowledged."""
        self.noted = b""
        """Our note of then."""
        self.active: ActiveView | None = None
        """The view in force; never another than the one acknowledged."""
        self.entered_s = float("-inf")
        """Since when."""

    @property
    def acknowledged_key(self) -> ViewKey | None:
        """Key of the greatest view that was acknowledged."""
        return None if self.acknowledged is None else self.acknowledged.key

    @property
    def active_key(self) -> ViewKey | None:
        """Key of the view in force."""
        return None if self.active is None else self.active.view.key

    def acknowledge(self, view: GroupView) -> None:
        """Promise to act in no older view; the caller knows that ``view`` is greater."""
        self.acknowledged = view
        self.noted = bytes(self._note())[:MAX_NOTE_BYTES]
        self.active = None

    def enter(self, notes: dict[str, bytes], now_s: float) -> None:
        """All members acknowledged the view that we acknowledged: it is in force."""
        if self.acknowledged is not None and self.active is None:
            self.active = ActiveView(self.acknowledged, notes)
            self.entered_s = now_s

    def invited(self, sender: str, view: GroupView, *, takes: bool) -> Accept | Refuse:
        """Answer a proposal; ``takes``: whether proposals of ``sender`` are taken now."""
        key = view.key
        sound = key.proposer == sender and key.epoch == self._epoch and key.generation < MAX_GENERATION
        if not sound or self._me not in view.members or tuple(sorted(set(view.members))) != view.members:
            return self.refuse(takes=False)
        mine = self.acknowledged
        if mine is not None and mine.key == key:
            return Accept(key, self.noted) if mine == view else self.refuse(takes=False)
        if not takes or (mine is not None and mine.key > key):
            return self.refuse(takes=takes)
        self.acknowledge(view)
        return Accept(key, self.noted)

    def activated(self, sender: str, message: Activate, now_s: float, *, takes: bool) -> Done | Refuse:
        """Answer a proposer that says that its view is in force."""
        view = self.acknowledged
        if view is None or view.key != message.key or sender != message.key.proposer:
            return self.refuse(takes=takes)
        if set(message.notes) != set(view.members):
            return self.refuse(takes=False)
        self.enter(dict(message.notes), now_s)
        return Done()

    def superseded(self, key: ViewKey | None) -> None:
        """Our proposer acts in ``key``: an older view in force here was given up by the others."""
        if key is not None and self.active is not None and key > self.active.view.key:
            self.active = None

    def refuse(self, *, takes: bool) -> Refuse:
        """Say no, and what we acknowledged."""
        return Refuse(self.acknowledged_key, takes)
