"""The history of a group's rounds in one short digest, and who has to catch up with whose. Pure.

Every completed round adds to the *digest* of all rounds so far, each named by its view and number. In one
view all members who complete a round get the same bytes, so equal digests mean equal results. When a view
begins, everybody computes the same `CatchUpPlan` from the members' notes:

- Of lineages that of several members stays, then that with most environment steps (`group.compatibility`).
- Of its members, those lead who have completed most rounds; of several such histories the one with most
  members, then the first in rendezvous order. Where nobody has a history yet, those with the most steps
  and the highest policy version come first.
- ``same``: the leader's digest. ``behind``: exactly one round short of it, to be had from a leader.
  ``other``: everybody else; they take a leader's whole state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from p2pdrl.group.compatibility import Natural, Short, lineage_of_most_words
from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.view import GroupNote, ViewKey
from p2pdrl.strategies.allreduce.averager import Digest

__all__ = ["AveragingNote", "CatchUpPlan", "RoundHistory", "Standing", "make_plan"]

DIGEST_BYTES = 12

Standing = Literal["same", "behind", "other"]


class AveragingNote(GroupNote, frozen=True, array_like=True):
    """What a member says of itself when it acknowledges a view; under 256 bytes."""

    number: Natural = 0
    """Rounds that it has completed in its history."""
    digest: Digest = b""
    """Digest of that history; empty for none."""
    before: Digest = b""
    """The same, one round earlier."""
    lineage: Short = ""
    steps: Natural = 0
    policy_version: Natural = 0


@dataclass(slots=True)
class RoundHistory:
    """A member's own history.

    Attributes:
        digest: digest of all of them; empty for none.
        before: the digest one round earlier.
    """

    number: int = 0
    digest: bytes = b""
    before: bytes = b""

    def completed(self, key: ViewKey, number: int) -> None:
        """Add round ``number``, which ended in view ``key``."""
        self.number, self.before, self.digest = number, self.digest, _digest(self.digest, key, number)

    def ended_in(self, key: ViewKey, number: int) -> bool:
        """Whether the last round is round ``number``, as it ended in view ``key``."""
        return self.digest == _digest(self.before, key, number)

    def found(self, key: ViewKey) -> None:
        """Begin a history with our own state, in view ``key``."""
        self.number, self.before, self.digest = 0, b"", _digest(b"", key, 0)

    def take(self, number: int, digest: bytes, before: bytes) -> None:
        """Have another member's history, having taken its state."""
        self.number, self.digest, self.before = number, digest, before


class CatchUpPlan(NamedTuple):
    """What follows from a view's notes; the same at all members.

    Args:
        number: the round that is to be done next.
        leaders: who can give the state, the first first.
        lineage: the one that stays.
        fresh: whether nobody has a history yet.
    """

    number: int
    leaders: tuple[str, ...]
    standing: dict[str, Standing]
    lineage: str
    fresh: bool


def make_plan(
    key: ViewKey, members: Sequence[str], notes: Mapping[str, AveragingNote], *, led: bool
) -> CatchUpPlan:
    """Decide who leads and who has to catch up.

    Args:
        led: whether all must begin with one member's state; else members without a history count as the
            same, and their first round brings them together.
    """
    order = ranked(str(key), members)
    able = [peer for peer in order if notes[peer].lineage] or order
    lineage = lineage_of_most_words((notes[peer].lineage, notes[peer].steps) for peer in able)
    able = [peer for peer in able if notes[peer].lineage == lineage]
    with_history = [peer for peer in able if notes[peer].digest]
    if not with_history:
        first = min(able, key=lambda peer: (-notes[peer].steps, -notes[peer].policy_version))
        same = [first] if led else able
        standing: dict[str, Standing] = {peer: "same" if peer in same else "other" for peer in order}
        leaders = (first, *(peer for peer in same if peer != first))
        return CatchUpPlan(1, leaders, standing, lineage, fresh=True)
    counts = [notes[peer].digest for peer in with_history]
    best = notes[max(with_history, key=lambda peer: (notes[peer].number, counts.count(notes[peer].digest)))]
    standing = {peer: _standing(notes[peer], best) for peer in order}
    leaders = tuple(peer for peer in with_history if notes[peer].digest == best.digest)
    return CatchUpPlan(best.number + 1, leaders, standing, lineage, fresh=False)


def _standing(note: AveragingNote, best: AveragingNote) -> Standing:
    if note.lineage != best.lineage or not note.digest:
        return "other"
    if note.digest == best.digest:
        return "same"
    return "behind" if note.digest == best.before and note.number + 1 == best.number else "other"


def _digest(digest: bytes, key: ViewKey, number: int) -> bytes:
    return blake2b(
        digest + msgspec.msgpack.encode((key.epoch, key.generation, key.proposer, number)),
        digest_size=DIGEST_BYTES,
    ).digest()
