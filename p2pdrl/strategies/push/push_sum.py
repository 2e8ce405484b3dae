"""Push-sum: who has which weight, what is under way, and what has arrived already. Pure.

Stochastic gradient push (Assran 2019, arXiv 1811.10792; push-sum: Kempe 2003, Nedić 2016, arXiv 1406.2075).
Each node has a vector z and a weight w, and stands for x = w · z. It pushes a part m of its weight along
with its z, which leaves its own z alone; the receiver averages by weight:

    sender     w ← w − m                         (z stays)
    receiver   z ← z + m / (w + m) · (z_sent − z),  w ← w + m

Σ w and Σ w·z, over nodes **and messages under way**, are kept, so every z goes to Σ w·z / Σ w whatever the
directed graph is. The mass of a message is set aside when it is sent, and settled by the answer:

- ``acknowledged``: it is the receiver's;
- ``returned``: it definitely didn't arrive: z ← z + m / (w + m) · (z_sent − z), w ← w + m;
- neither is known: it is sent again, under the same number, until it is;
- ``lost``: the peer died meanwhile. Its own part is lost with it, and so is this one.

What is kept is the mean by weight, Σ w·z / Σ w. Where the weights are forgotten, as at the end of the mode,
the plain mean of z goes on. It is another by the covariance of w and z over the nodes: at most the deviation
of w, which was 0.3 to 0.5 with five nodes, times the consensus distance; nothing once all z agree.

A receiver takes each number once, and remembers numbers that it refused: an earlier copy that arrives
after the refusal isn't taken either, for the sender has its mass back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

__all__ = ["FLOOR", "Arrival", "Parcel", "PushSum", "Result"]

FLOOR = 2.0**-20
"""A node keeps at least this weight: one that only gives would underflow, and with it what it stands for."""

CEILING = 2.0**40
"""No honest swarm has this much weight in one place."""

SENDERS = 1024
NUMBERS = 1024
"""How much is remembered of what arrived: (sender, boot) pairs, and numbers of each."""

Result = Literal["new", "taken", "void"]


class Arrival(NamedTuple):
    """What names a message."""

    sender: str
    boot: str
    number: int


class Parcel(NamedTuple):
    """A message under way.

    Args:
        number: names it, with the sender and its boot.
        peer: to whom.
        mass: weight set aside for it.
        left: weight that the sender kept.
    """

    number: int
    peer: str
    mass: float
    left: float


class PushSum:
    """One node's weight and its messages; the caller moves the vectors by the factors it is given."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._number = 0
        self._open: dict[int, Parcel] = {}
        self._seen: OrderedDict[tuple[str, str], _Numbers] = OrderedDict()

    @property
    def under_way(self) -> float:
        """Mass that is set aside."""
        return sum(parcel.mass for parcel in self._open.values())

    def send(self, peer: str, share: float) -> Parcel | None:
        """Set aside ``share`` of the weight; None when too little is left to give.

        Args:
            peer: to whom.
            share: in (0, 1); less is given where the weight would fall below `FLOOR`.
        """
        if self.weight < 2 * FLOOR:
            return None
        mass = min(share * self.weight, self.weight - FLOOR)
        self._number += 1
        self.weight -= mass
        parcel = Parcel(self._number, peer, mass, self.weight)
        self._open[parcel.number] = parcel
        return parcel

    def acknowledged(self, number: int) -> None:
        """The peer has it."""
        self._open.pop(number, None)

    def lost(self, number: int) -> None:
        """Nobody will ever tell what became of it."""
        self._open.pop(number, None)

    def returned(self, number: int) -> float:
        """It came to nothing: have the mass back.

        Returns:
            How far z is to move towards the z that was sent.
        """
        parcel = self._open.pop(number, None)
        return 0.0 if parcel is None else self._gain(parcel.mass)

    def restart(self) -> None:
        """Another vector is in place of ours: begin anew with weight 1, and forget what is under way."""
        self.weight = 1.0
        self._open.clear()

    def result(self, arrival: Arrival) -> Result:
        """What became of a message that arrives, if it was here before."""
        numbers = self._seen.get(arrival[:2])
        return "new" if numbers is None else numbers.result(arrival.number)

    def acceptable(self, mass: float) -> bool:
        """Whether an honest peer could send so much."""
        return 0 < mass < CEILING and self.weight + mass < CEILING

    def factor(self, mass: float) -> float:
        """How far z would move towards the z that came with ``mass``."""
        return mass / (self.weight + mass)

    def take(self, arrival: Arrival, mass: float) -> float:
        """Take a new message.

        Returns:
            How far z is to move towards the z that came.

        Raises:
            ValueError: it was here before, or the mass isn't acceptable.
        """
        if self.result(arrival) != "new" or not self.acceptable(mass):
            raise ValueError(f"message {arrival.number} of {arrival.sender} can't be taken")
        self._numbers(arrival).note(arrival.number, "taken")
        return self._gain(mass)

    def refuse(self, arrival: Arrival) -> Result:
        """Never take a message, unless that is done already; return what became of it."""
        if self.result(arrival) == "new":
            self._numbers(arrival).note(arrival.number, "void")
        return self.result(arrival)

    def _gain(self, mass: float) -> float:
        factor = self.factor(mass)
        self.weight += mass
        return factor

    def _numbers(self, arrival: Arrival) -> _Numbers:
        numbers = self._seen.setdefault(arrival[:2], _Numbers())
        self._seen.move_to_end(arrival[:2])
        while len(self._seen) > SENDERS:
            self._seen.popitem(last=False)
        return numbers


class _Numbers:
    """What became of one sender's messages; those too old to be remembered count as void."""

    def __init__(self) -> None:
        self._results: dict[int, Result] = {}
        self._forgotten = 0

    def result(self, number: int) -> Result:
        return "void" if number <= self._forgotten else self._results.get(number, "new")

    def note(self, number: int, result: Result) -> None:
        self._results[number] = result
        if len(self._results) > NUMBERS:
            self._forgotten = min(self._results)
            del self._results[self._forgotten]
