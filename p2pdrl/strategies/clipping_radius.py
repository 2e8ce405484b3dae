"""How far one peer may pull: the clipping radius τ of ClippedGossip (He 2022, arXiv 2202.01545), learnt.

    x_i ← x_i + w · min(1, τ_i / ‖x_j − x_i‖) · (x_j − x_i)

Each node learns its own τ_i from the distances that it measures, and takes nothing of it from anybody:

- For each peer it keeps one usual distance; τ is a multiple (``clip_distance``) of their lower median. While
  more than half of the peers that it meets are honest, others can't raise τ beyond that multiple of honest
  distances, and as nodes agree better, τ falls.
- What one peer's distance counts for is bounded by how far our own training moves us: the way that our
  vector went in about the last `WAY` exchanges, and `FASTER` times the way since we last met that peer, or in
  as long a time. So even where liars are the majority, or the only peer, τ follows our own training.
- A peer that stays beyond τ, while the others don't, pulls half as far each time: its pull, however long it
  goes on, has a finite sum. Each vector within τ forgives one.
- A peer that stays within τ and pulls the same way each time goes farther in sum than honest ones, whose
  pulls differ in direction. The sum of the pulls of one peer, over about `SUMMED` vectors, is bounded by the
  same multiple of the lower median over the peers (clipping with memory: Karimireddy 2021, arXiv 2012.10333).
- A vector that is many τ away, again, and farther than its sender can have come, and no nearer than the last
  one, is a strike, where at least `ENOUGH` peers say what is usual.

A node that returns, or a healed half of the swarm, is far from others for a while. Most of its peers are
far then, so that its own τ is large: it comes to them in a few exchanges.

Our own way and the sums of pulls are estimated from some thousands of entries. Steps that mixing added are
subtracted from our way.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import PairFigures
from p2pdrl.tensors.robust import Clipping

__all__ = ["STRIKE", "BeyondCounts", "Clip", "ClippingRadius", "UsualLengths", "tell_far"]

STRIKE = 4.0
"""A vector this many τ away may be a strike."""
WAY = 16
"""Exchanges over which our own way counts."""
STILL = 0.1
"""An exchange before which our training moved us by less than this share of what is usual doesn't count: the
learner is paused, or made no update since the last one."""
FASTER = 4.0
"""So much faster than ours a peer's training may move it."""
WARM = 8
"""Exchanges after the start, or after our vector was replaced, in which our own way says little yet: a
distance then counts up to `WARM_SHARE` of our vector's norm."""
WARM_SHARE = 0.1
SOME = 2
"""With fewer peers there is nobody to compare one with. Of two the farther one, while it is beyond τ, pulls
less and less: it would else pull us away from the nearer one, and τ would grow with that distance."""
ENOUGH = 3
"""Peers of whom one can be told to be the odd one."""
SUMMED = 32
"""Vectors of one peer over which its pulls are added up."""
FEW = 4
"""The sums of pulls of peers that sent fewer vectors aren't compared."""
MOST_FAR = 0.25
"""Where more of the other peers are far as well nobody is struck: the swarm was parted."""
NEARER = 0.95
"""Who is so much nearer than the last time isn't struck: it comes to us."""
FULL = 2
"""Vectors beyond τ in a row that still pull by all of τ."""
MOST_IN_A_ROW = 30
PEERS = 64
"""Peers whose distances are kept: those met last."""
SAMPLED = 4096
"""Entries, at least, from which our own way is estimated."""


class UsualLengths:
    """One usual length for each of the peers met last, and their lower median."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lengths)

    def note(self, peer: str, length: float) -> None:
        """One more length of ``peer``, which moves its usual one half way."""
        before = self._lengths.pop(peer, length)
        self._lengths[peer] = 0.5 * (before + length)
        while len(self._lengths) > PEERS:
            self._lengths.popitem(last=False)

    def of(self, peer: str) -> float | None:
        """The usual one of ``peer``; None for one that isn't known."""
        return self._lengths.get(peer)

    @property
    def median(self) -> float:
        """The lower median over the peers; infinite while none is known."""
        return statistics.median_low(self._lengths.values()) if self._lengths else math.inf


class BeyondCounts:
    """How often in a row each of the peers met last was beyond what is let through; one within forgives one.

    Args:
        told: told of a peer that was `MOST_IN_A_ROW` times more often beyond than within; again only once all
            of them were forgiven. Sooner it may be chance: of three honest nodes' gradients one lay beyond λ
            in two of three rounds, as the two others happen to be near (CartPole, PPO, 690 rounds).
    """

    def __init__(self, told: Callable[[str], None] = lambda peer: None) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._told = told
        self._known: set[str] = set()

    def share(self, peer: str, *, beyond: bool) -> float:
        """Note one more vector of ``peer``; return by what its pull is to be multiplied."""
        count = self._counts.pop(peer, 0) + (1 if beyond else -1)
        self._counts[peer] = count = min(max(count, 0), MOST_IN_A_ROW)
        while len(self._counts) > PEERS:
            self._known.discard(self._counts.popitem(last=False)[0])
        if count == 0:
            self._known.discard(peer)
        elif count == MOST_IN_A_ROW and peer not in self._known:
            self._known.add(peer)
            self._told(peer)
        return 0.5 ** max(0, count - FULL) if beyond else 1.0

    def shortened(self, clipping: Clipping, peers: Sequence[str]) -> Clipping:
        """The same with factors multiplied by the shares of ``peers``, whose vectors it is about."""
        factors = [
            factor * self.share(peer, beyond=factor < 1.0)
            for factor, peer in zip(clipping.factors, peers, strict=True)
        ]
        return clipping._replace(factors=factors)


def tell_far(swarm: SwarmView) -> Callable[[str], None]:
    """Tell people of a peer that is far off again and again, once until it comes back."""

    def told(peer: str) -> None:
        swarm.tell(
            "far", f"what {swarm.name_of(peer)} sends is far off again and again: it counts less and less",
            warning=True,
        )  # fmt: skip

    return told


class Clip(NamedTuple):
    """What becomes of one peer's vector.

    Args:
        factor: by which the difference to ours is shortened.
        radius: τ.
        strike: why its sender is struck; empty where it isn't.
    """

    factor: float
    radius: float
    strike: str = ""


@dataclass(slots=True)
class _Seen:
    """What is remembered of a peer.

    Attributes:
        way: ours, when we met it last.
        at_s: when that was.
        distance: then.
        met: how often.
        pull: sum of its pulls, each as a multiple of the usual distance then; in the sampled entries.
        length: norm of that, of all entries.
    """

    way: float
    at_s: float
    distance: float = 0.0
    met: int = 0
    pull: Float32Array | None = None
    length: float = 0.0


class ClippingRadius:
    """τ of one node. Vectors are flat, of D elements, and only read.

    Args:
        clip_distance: τ as a multiple of the usual distance.
        gradients: the vectors are gradients, which don't add up: bounded by our own norm, not by our way.
    """

    def __init__(self, clip_distance: float, clock: Clock, *, gradients: bool = False) -> None:
        self._multiple, self._clock, self._gradients = clip_distance, clock, gradients
        self._usual, self._beyond = UsualLengths(), BeyondCounts()
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._expected: Float32Array | None = None
        self._sets: int | None = None
        self._way = self._recent = self._speed = 0.0
        self._began_s: float | None = None
        self._read_s = math.inf
        self._warm = WARM

    @property
    def radius(self) -> float:
        """τ; infinite before the first exchange."""
        return self._multiple * self._usual.median

    def read(self, mine: Float32Array, sets: int = 0) -> None:
        """Our vector is ``mine`` now; ``sets`` differs from the last time where it was replaced meanwhile."""
        sample = _sampled(mine)
        if sets != self._sets:
            self._sets, self._warm, self._read_s = sets, WARM, self._clock.monotonic()
        elif self._expected is not None and not self._gradients:
            moved = _length(np.subtract(sample, self._expected), mine.size)
            if moved > STILL * self._recent / WAY:
                self._note_way(moved)
        self._expected = sample.copy()

    def added(self, delta: Float32Array) -> None:
        """Mixing moves our vector by ``delta``."""
        if self._expected is not None and not self._gradients:
            self._expected += _sampled(delta)

    def clip(self, peer: str, mine: Float32Array, theirs: Float32Array | None, figures: PairFigures) -> Clip:
        """Say what becomes of the vector of ``peer``.

        Args:
            theirs: None where ``mine`` is the difference of the two already, or a multiple of it.
            figures: norms, and the distance of the two.
        """
        now_s, distance = self._clock.monotonic(), figures.distance
        self._began_s = now_s if self._began_s is None else self._began_s
        seen = self._seen.pop(peer, None) or _Seen(0.0, self._began_s)
        plausible = self._plausible(seen, figures.mine, now_s)
        self._usual.note(peer, min(distance, plausible))
        radius = self.radius
        several = len(self._usual) >= ENOUGH
        factor, strike = 1.0, ""
        if len(self._usual) >= SOME or distance <= radius:
            factor = self._beyond.share(peer, beyond=distance > radius)
        if distance > radius:
            factor *= radius / distance
            far = distance > max(STRIKE * radius, plausible)
            again = STRIKE * radius < seen.distance < distance / NEARER
            if far and again and several and self._others_far(radius) <= MOST_FAR:
                times = distance / max(radius, 1e-30)
                strike = (
                    f"its vector is {distance:.3g} from ours, {times:.3g} times what is let through, and it "
                    f"can't have come farther than {plausible:.3g}"
                )
        if not self._gradients and distance > 0:
            sample = _sampled(mine) if theirs is None else np.subtract(_sampled(theirs), _sampled(mine))
            factor *= self._share_of_sum(seen, sample, mine.size, factor * distance)
        seen.way, seen.at_s, seen.distance = self._way, now_s, distance
        self._seen[peer] = seen
        while len(self._seen) > PEERS:
            self._seen.popitem(last=False)
        return Clip(factor, radius, strike)

    def _note_way(self, moved: float) -> None:
        now_s = self._clock.monotonic()
        self._way += moved
        self._recent += moved - self._recent / WAY
        if now_s > self._read_s:
            speed = moved / (now_s - self._read_s)
            self._speed += (speed - self._speed) / (WAY if self._speed else 1.0)
        self._read_s = now_s

    def _others_far(self, radius: float) -> float:
        """Share of the other peers that were as far when we met them last."""
        return sum(one.distance > STRIKE * radius for one in self._seen.values()) / max(1, len(self._seen))

    def _plausible(self, seen: _Seen, norm: float, now_s: float) -> float:
        """How far a peer can have come."""
        if self._gradients:
            return FASTER * norm
        since = max(self._way - seen.way, self._speed * (now_s - seen.at_s))
        plausible = self._recent + FASTER * since
        if self._warm > 0:
            self._warm -= 1
            # With enough peers their majority says where we belong; before, one may pull a little.
            return math.inf if len(self._usual) >= ENOUGH else max(plausible, WARM_SHARE * norm)
        return plausible if self._way else math.inf

    def _share_of_sum(self, seen: _Seen, sample: Float32Array, size: int, length: float) -> float:
        """By what a pull of that length, along ``sample``, is shortened, lest the peer's sum be unusual."""
        whole, usual = _length(sample, size), self._usual.median
        pull = sample * np.float32(length / (whole * usual) if whole and usual else 0.0)
        before = np.zeros_like(pull) if seen.pull is None else seen.pull * np.float32(1.0 - 1.0 / SUMMED)
        lengths = [one.length for one in self._seen.values() if one.met >= FEW]
        share = 1.0
        if len(lengths) + 1 >= SOME and seen.met >= FEW:
            most = self._multiple * statistics.median_low([*lengths, seen.length])
            share = _largest_share(_length(before, size), _length(pull, size), most,
                                   float(np.dot(before, pull)) * size / sample.size)  # fmt: skip
        seen.pull = before + np.float32(share) * pull
        seen.length, seen.met = _length(seen.pull, size), seen.met + 1
        return share


def _sampled(vector: Float32Array) -> Float32Array:
    return vector[:: max(1, vector.size // SAMPLED)]


def _length(sample: Float32Array, size: int) -> float:
    """Norm of a vector of that size, from its sampled entries."""
    return math.sqrt(float(np.dot(sample, sample)) * size / sample.size)


def _largest_share(before: float, pull: float, most: float, product: float) -> float:
    """The largest s in [0, 1] with ‖b + s p‖ ≤ most; 1 where that is nearer to zero than b itself.

    Args:
        before: ‖b‖.
        pull: ‖p‖.
        product: b · p.
    """
    if pull == 0 or math.sqrt(max(0.0, before**2 + 2 * product + pull**2)) <= max(
        most, before * (product < 0)
    ):
        return 1.0
    # pull² s² + 2 product s + before² − most² = 0
    root = product**2 - pull**2 * (before**2 - most**2)
    return min(1.0, max(0.0, (-product + math.sqrt(root)) / pull**2)) if root > 0 else 0.0
