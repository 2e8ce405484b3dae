"""What group views promise, checked from outside, by somebody who sees all nodes at once.

- A node acts only in the greatest view that it acknowledged, and these only grow within one life.
- Two views that differ never have the same key, nor the members of one view different notes.
- A view is in force nowhere before all of its members acknowledged it.

Called by `simulator` after each step of a node.
"""

from __future__ import annotations

from collections import defaultdict

from p2pdrl.strategies.group.view import ActiveView, GroupView, ViewKey

__all__ = ["Promises"]


class Promises:
    """Remembers every view that there ever was."""

    def __init__(self) -> None:
        self._views: dict[ViewKey, GroupView] = {}
        self._notes: dict[ViewKey, dict[str, bytes]] = {}
        self._acknowledged: defaultdict[ViewKey, set[str]] = defaultdict(set)
        self._greatest: dict[tuple[str, int], ViewKey] = {}
        self._entered: dict[str, ActiveView] = {}

    def check(self, node: str, life: int, view: GroupView | None, active: ActiveView | None) -> bool:
        """Look at one node; return whether a view has come in force there.

        Args:
            node: its id.
            life: raised when it restarts.
            view: the greatest that it acknowledged.
            active: what is in force there.

        Raises:
            AssertionError: a promise is broken.
        """
        if view is None:
            self._insist(active is None, "in force without being acknowledged")
            return False
        key = view.key
        self._insist(self._views.setdefault(key, view) == view, f"two views of key {key}")
        before = self._greatest.get((node, life), key)
        self._insist(key >= before, f"{key} acknowledged after {before}")
        self._greatest[node, life] = key
        self._acknowledged[key].add(node)
        if active is None or self._entered.get(node) is active:
            return False
        self._entered[node] = active
        self._insist(active.view == view, f"acts in {active.view.key} after acknowledging {key}")
        self._insist(self._acknowledged[key] == set(view.members), f"{key} is in force too early")
        self._insist(self._notes.setdefault(key, active.notes) == active.notes, f"notes of {key} differ")
        self._insist(set(active.notes) == set(view.members), f"notes of {key} are missing")
        return True

    @staticmethod
    def _insist(holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(what)
