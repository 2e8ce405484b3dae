"""What a board holds at one moment, without its vectors; called by `daemon_board`."""

from __future__ import annotations

from typing import NamedTuple

from p2pdrl.tensors.board_memory import DELTA, NOTHING, SET, InboxSlot, Published

__all__ = ["BoardState"]


class BoardState(NamedTuple):
    """The facts that decide what is in the vector as it is now.

    Args:
        facts: of the last publication.
        slot: what was put into the slot last.
        gathered: what waits for the slot.
    """

    facts: Published
    slot: InboxSlot
    gathered: InboxSlot

    @property
    def in_slot(self) -> int:
        """Kind of the slot's content that the publication lacks; `NOTHING` means that the slot is free."""
        return self.slot.kind if self.slot.id > self.facts.delta_id else NOTHING

    @property
    def policy_version(self) -> int:
        """Policy version of `DaemonBoard.now`: a set's replaces it, a delta's raises it."""
        version = self.facts.policy_version
        for kind, content in ((self.in_slot, self.slot), (self.gathered.kind, self.gathered)):
            if kind == SET:
                version = content.policy_version
            elif kind == DELTA:
                version = max(version, content.policy_version)
        return version
