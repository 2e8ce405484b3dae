"""What in-peers pushed last: one vector of each, used once, and not when it is too old. Pure.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from p2pdrl.strategies.push.messages import PushHead
from p2pdrl.tensors.layout import Float32Array

__all__ = ["MOST", "Inbox", "Letter"]

MOST = 16
"""In-peers whose vectors are kept at once; each costs D float32."""


@dataclass(slots=True)
class Letter:
    """An in-peer's latest vector.

    Attributes:
        peer: node id.
        vector: the vector; belongs to the inbox.
        boot: of the peer's strategy.
        number: of the push.
        policy_version: of the vector.
        nbytes: as it travelled.
        fresh: whether it waits to be used.
    """

    peer: str
    vector: Float32Array
    boot: str = ""
    number: int = -1
    policy_version: int = 0
    nbytes: int = 0
    fresh: bool = False


class Inbox:
    """The latest vectors.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._letters: dict[str, Letter] = {}

    @property
    def any_fresh(self) -> bool:
        """Whether something waits to be used."""
        return any(letter.fresh for letter in self._letters.values())

    def known(self, peer: str, boot: str, number: int) -> bool:
        """Whether this push, or a later one of the peer's boot, was here."""
        letter = self._letters.get(peer)
        return letter is not None and letter.boot == boot and number <= letter.number

    def open(self, peer: str) -> Letter | None:
        """Give the letter to write the peer's vector into; call `seal` when it is good.

        Returns:
            None when there are too many in-peers, all of whose vectors wait to be used.
        """
        letter = self._letters.get(peer)
        if letter is None:
            vector = self._vacant()
            if vector is None:
                return None
            letter = self._letters[peer] = Letter(peer, vector)
        letter.fresh = False
        return letter

    def seal(self, letter: Letter, head: PushHead, nbytes: int) -> None:
        """The vector in ``letter`` is good: it waits to be used."""
        letter.boot, letter.number, letter.nbytes = head.boot, head.number, nbytes
        letter.policy_version = head.summary.policy_version
        letter.fresh = True

    def take(self, policy_version: int, max_lag: int) -> tuple[list[Letter], tuple[str, ...]]:
        """Take all that waits.

        Args:
            policy_version: ours.
            max_lag: τ, policy versions; what is older is left out.

        Returns:
            The letters to use, by peer, and the peers whose vectors are too old. Neither waits any longer.
        """
        waiting = [letter for _, letter in sorted(self._letters.items()) if letter.fresh]
        for letter in waiting:
            letter.fresh = False
        good = [letter for letter in waiting if policy_version - letter.policy_version <= max_lag]
        late = tuple(letter.peer for letter in waiting if policy_version - letter.policy_version > max_lag)
        return good, late

    def clear(self) -> None:
        """Use none of what waits: our own vector was replaced."""
        for letter in self._letters.values():
            letter.fresh = False

    def _vacant(self) -> Float32Array | None:
        if len(self._letters) < MOST:
            return np.zeros(self._size, np.float32)
        for peer, letter in self._letters.items():
            if not letter.fresh:
                return self._letters.pop(peer).vector
        return None
