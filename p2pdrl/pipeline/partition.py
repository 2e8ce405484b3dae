"""Where a chain of layers is cut into one stage per peer so that the slowest stage is as quick as can be.

In its steady state a pipeline goes at the pace of its slowest stage, so that stage is what is minimised,
exactly, by dynamic programming over (stages so far, layers so far), as PipeDream does (Narayanan 2019,
"PipeDream: generalized pipeline parallelism for DNN training", section 3.1). A stage costs the time of its
layers' forwards and backwards divided by its peer's speed, plus the time in which its output travels on and
the gradient back: 1F1B allows so few microbatches under way that it can't hide both behind computing (see
`timeline`; GPipe can, and this then says too much of a slow link). Of all cuts with the same slowest stage,
that with the least sum over all stages is taken: filling and draining the pipeline takes about this sum.

A stage needs memory for its parameters (several copies: gradients, the optimizer's state) and for the
activations of each microbatch that its schedule stores: its input and what every layer keeps. A stage that
computes activations anew keeps its input and its output of each microbatch, and what is between them of one;
its backward has another forward in it.

Matrices are of shape (L+1, L+1) with L layers: [i, j] is of a stage of the layers i … j−1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import (
    FREE,
    Layer,
    Links,
    Peer,
    PeerLink,
    check_links,
    check_numbers,
    link_between,
)
from p2pdrl.pipeline.timeline import MicrobatchCosts

__all__ = [
    "MOST_PEERS",
    "Demands",
    "Matrix",
    "Partition",
    "StageCut",
    "StageTables",
    "in_order",
    "partition",
    "partition_at",
    "partition_in_best_order",
]

MOST_PEERS = 8
"""Whose order is searched for: with eight there are 40,320 orders."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Demands:
    """What a stage's memory holds.

    Attributes:
        parameter_copies: bytes kept per byte of parameters; 4: parameters, gradients, Adam's two moments.
        stored: microbatches whose activations each stage keeps at once, as `peak_activations` tells of a
            schedule; or one number for all stages.
        checkpoint: whether activations are computed anew; of each stage, or the same for all. That the
            forward is done twice is reckoned here, and isn't in the layers' backward times.
        input_bytes: of the first stage's input, for one microbatch.
    """

    parameter_copies: float = 4.0
    stored: int | tuple[int, ...] = 1
    checkpoint: bool | tuple[bool, ...] = False
    input_bytes: float = 0.0

    def stored_at(self, stage: int) -> int:
        """Microbatches that a stage stores at once."""
        return self.stored[stage] if isinstance(self.stored, tuple) else self.stored

    def computes_anew(self, stage: int) -> bool:
        """Whether a stage does its forwards twice."""
        return self.checkpoint[stage] if isinstance(self.checkpoint, tuple) else self.checkpoint

    def check(self, stages: int) -> None:
        """Raise a `ConfigError` for negative numbers, or for others than as many as there are stages."""
        stored = self.stored if isinstance(self.stored, tuple) else (self.stored,) * stages
        if len(stored) != stages:
            raise ConfigError(
                f"{stages} stages need as many numbers of stored microbatches, not {len(stored)}"
            )
        if isinstance(self.checkpoint, tuple) and len(self.checkpoint) != stages:
            raise ConfigError(f"{stages} stages compute activations anew or not, not {len(self.checkpoint)}")
        check_numbers(
            "stored microbatches, copies and bytes", (*stored, self.parameter_copies, self.input_bytes)
        )


PLAIN = Demands()


@dataclass(frozen=True, slots=True)
class StageCut:
    """What one peer gets.

    Attributes:
        forward_s: of one microbatch on this peer.
        backward_s: of one microbatch on this peer, with a forward where activations are computed anew.
        transfer_s: of its output to the next stage and of the gradient back; 0 of the last stage.
        output_bytes: of its output for one microbatch.
        memory_bytes: all that it keeps.
    """

    peer: Peer
    start: int
    stop: int
    forward_s: float
    backward_s: float
    transfer_s: float
    parameter_bytes: float
    output_bytes: float
    memory_bytes: float

    @property
    def total_s(self) -> float:
        """Computing and sending of one microbatch."""
        return self.forward_s + self.backward_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Partition:
    """A chain of layers, cut."""

    stages: tuple[StageCut, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first layer of each stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def slowest_s(self) -> float:
        """Time per microbatch of the slowest stage, which is the pace of the pipeline."""
        return max(stage.total_s for stage in self.stages)

    def costs(self, links: Links = FREE) -> MicrobatchCosts:
        """For `predict`: the stages' times, and what travels between them."""
        return MicrobatchCosts(
            tuple(stage.forward_s for stage in self.stages),
            tuple(stage.backward_s for stage in self.stages),
            tuple(stage.output_bytes for stage in self.stages[:-1]),
            links,
        )


def partition(
    layers: Sequence[Layer], peers: Sequence[Peer], *, links: Links = FREE, demands: Demands = PLAIN
) -> Partition:
    """Cut a chain into one stage per peer, in their order, with the quickest slowest stage.

    Links are by the peers' places in ``peers``.

    Raises:
        ConfigError: a number is bad, there are fewer layers than peers, or no cut fits the peers' memory.
    """
    tables = StageTables(layers, peers, links, demands)
    last = len(peers) - 1
    seconds = [tables.seconds(k, k, None if k == last else k + 1) for k in range(len(peers))]
    slowest_s, _ = _shortest(seconds, sums=False)
    if math.isinf(slowest_s):
        _, cuts = _shortest([tables.shortfall(k) for k in range(len(peers))], sums=False)
        raise ConfigError(f"no cut fits the memory of all {len(peers)} peers; at best {_lack(tables, cuts)}")
    _, cuts = _shortest([np.where(each <= slowest_s, each, np.inf) for each in seconds], sums=True)
    return tables.cut(cuts)


def partition_at(
    layers: Sequence[Layer],
    peers: Sequence[Peer],
    cuts: Sequence[int],
    *,
    links: Links = FREE,
    demands: Demands = PLAIN,
) -> Partition:
    """Cut a chain where somebody says: ``cuts`` are the first layers of all stages but the first.

    Raises:
        ConfigError: a number is bad, the cuts don't fit the layers or peers, or a stage doesn't fit its peer.
    """
    tables = StageTables(layers, peers, links, demands)
    edges = [0, *cuts, len(layers)]
    if len(cuts) != len(peers) - 1:
        raise ConfigError(f"{len(peers)} peers need {len(peers) - 1} cuts, not {len(cuts)}")
    if any(one >= other for one, other in itertools.pairwise(edges)):
        raise ConfigError(
            f"cuts must rise from 1 to at most {len(layers) - 1}, the last layer, not be {list(cuts)}"
        )
    if any(tables.shortfall(k)[edges[k], edges[k + 1]] > 0 for k in range(len(peers))):
        raise ConfigError(f"these cuts don't fit the peers' memory: {_lack(tables, cuts)}")
    return tables.cut(cuts)


class StageTables:
    """What every possible stage costs on every peer; checks what it is given.

    Raises:
        ConfigError: a number is bad, or there are fewer layers than peers.
    """

    def __init__(
        self, layers: Sequence[Layer], peers: Sequence[Peer], links: Links, demands: Demands
    ) -> None:
        for layer in layers:
            layer.check()
        for peer in peers:
            peer.check()
        check_links(links)
        demands.check(len(peers))
        if not 1 <= len(peers) <= len(layers):
            raise ConfigError(
                f"{len(layers)} layers can't be cut for {len(peers)} peers, one layer each at least"
            )
        self.layers, self.peers = layers, peers
        self._links, self._demands = links, demands
        self._forward_s = _spans([layer.forward_s for layer in layers])
        self._backward_s = _spans([layer.backward_s for layer in layers])
        self._parameters = _spans([layer.parameter_bytes for layer in layers])
        self._kept = _spans([layer.kept_bytes for layer in layers])
        self._edges = np.array([demands.input_bytes, *(layer.output_bytes for layer in layers)])
        self._computing_s: dict[tuple[int, int], Matrix] = {}
        self._possible = np.triu(np.ones_like(self._kept, dtype=bool), 1)

    def memory(self, place: int) -> Matrix:
        """Bytes that a stage at a place in the pipeline keeps."""
        stored, inputs, outputs = self._demands.stored_at(place), self._edges[:, None], self._edges[None, :]
        kept: Matrix = stored * (inputs + self._kept)
        if self._demands.computes_anew(place):
            kept = stored * (inputs + outputs) + (self._kept - outputs)
        return self._demands.parameter_copies * self._parameters + kept

    def shortfall(self, place: int, peer: int | None = None) -> Matrix:
        """Bytes by which a stage at a place is too large for a peer; infinite where there is no stage."""
        limit = self.peers[place if peer is None else peer].memory_bytes
        return np.where(self._possible, self.memory(place) - limit, np.inf)

    def seconds(self, place: int, peer: int, following: int | None) -> Matrix:
        """Time of a stage at a place on a peer whose output goes to another; infinite where it can't be."""
        if (place, peer) not in self._computing_s:
            compute_s = (self._forward_s + self._back_s(place)) / self.peers[peer].speed
            self._computing_s[place, peer] = np.where(self.shortfall(place, peer) <= 0, compute_s, np.inf)
        if following is None:
            return self._computing_s[place, peer]
        return self._computing_s[place, peer] + self._transfer_s(peer, following)[None, :]

    def _back_s(self, place: int) -> Matrix:
        """Time from the gradient that comes to that which goes."""
        return self._backward_s + (self._forward_s if self._demands.computes_anew(place) else 0.0)

    def _transfer_s(self, peer: int, following: int | None) -> Matrix:
        """Time of an activation on and its gradient back, by the end of the stage."""
        if following is None:
            return np.zeros_like(self._edges)
        on, back = link_between(self._links, peer, following), link_between(self._links, following, peer)
        each_byte_s = 1.0 / on.bandwidth_bytes_s + 1.0 / back.bandwidth_bytes_s
        return on.latency_s + back.latency_s + self._edges * each_byte_s

    def cut(self, cuts: Sequence[int]) -> Partition:
        """The stages between cuts that fit."""
        edges = [0, *cuts, len(self.layers)]
        return Partition(tuple(self._stage(k, *edges[k : k + 2]) for k in range(len(self.peers))))

    def _stage(self, place: int, start: int, stop: int) -> StageCut:
        peer = self.peers[place]
        following = None if place == len(self.peers) - 1 else place + 1
        return StageCut(
            peer=peer,
            start=start,
            stop=stop,
            forward_s=float(self._forward_s[start, stop]) / peer.speed,
            backward_s=float(self._back_s(place)[start, stop]) / peer.speed,
            transfer_s=float(self._transfer_s(place, following)[stop]),
            parameter_bytes=float(self._parameters[start, stop]),
            output_bytes=float(self._edges[stop]),
            memory_bytes=float(self.memory(place)[start, stop]),
        )


def _spans(values: Sequence[float]) -> Matrix:
    """[i, j]: the sum of the values i … j−1."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(sums[None, :] - sums[:, None])


def _shortest(matrices: Sequence[Matrix], *, sums: bool) -> tuple[float, list[int]]:
    """Cuts with the least sum, or the least maximum, of their stages' values, and that value."""
    value = np.full(len(matrices[0]), np.inf)
    value[0] = 0.0 if sums else -np.inf
    choices = []
    for matrix in matrices:
        through = value[:, None] + matrix if sums else np.maximum(value[:, None], matrix)
        choices.append(through.argmin(axis=0))
        value = through.min(axis=0)
    edge, cuts = len(value) - 1, []
    for choice in reversed(choices[1:]):
        edge = int(choice[edge])
        cuts.append(edge)
    return float(value[-1]), cuts[::-1]


def _lack(tables: StageTables, cuts: Sequence[int]) -> str:
    """Which stage lacks most memory, in words."""
    edges = [0, *cuts, len(tables.layers)]
    lacks = [float(tables.shortfall(k)[edges[k], edges[k + 1]]) for k in range(len(tables.peers))]
    place = lacks.index(max(lacks))
    start, stop, peer = edges[place], edges[place + 1], tables.peers[place]
    first, last = tables.layers[start].name, tables.layers[stop - 1].name
    return (
        f"stage {place} ({first if stop == start + 1 else f'{first} … {last}'}) needs "
        f"{tables.memory(place)[start, stop]:,.0f} bytes, but {peer.name} has {peer.memory_bytes:,.0f}"
    )


def partition_in_best_order(
    layers: Sequence[Layer],
    peers: Sequence[Peer],
    *,
    links: Links = FREE,
    demands: Demands = PLAIN,
    first: int | None = None,
) -> tuple[tuple[int, ...], Partition]:
    """Choose the order of the peers and the cut, with the quickest slowest stage that any order has.

    Links are by the peers' places in ``peers``, ``demands.stored`` by place in the pipeline. The peer of
    index ``first`` is to have the first stage; None has it chosen.

    Returns:
        The peers' indices in the order of their stages (the first found of equally good ones), and the cut.

    Raises:
        ConfigError: as `partition`, or there are too many peers.
    """
    if len(peers) > MOST_PEERS:
        raise ConfigError(
            f"the order of {len(peers)} peers must be given: all orders are tried up to {MOST_PEERS}"
        )
    search = _Search(StageTables(layers, peers, links, demands), alike=isinstance(links, PeerLink))
    order = search.best_order(first)
    if order is None:  # nothing fits in any order: `partition` says why
        order = tuple(sorted(range(len(peers)), key=lambda index: index != first))
    found = partition(layers, [peers[one] for one in order], links=in_order(links, order), demands=demands)
    return order, found


def in_order(links: Links, order: Sequence[int]) -> Links:
    """Links by place in an order, from links by index of peer."""
    if not isinstance(links, Mapping):
        return links
    place = {peer: at for at, peer in enumerate(order)}
    return {(place[a], place[b]): link for (a, b), link in links.items() if a in place and b in place}


class _Search:
    """Depth-first through the orders, the same dynamic programming as `partition` on the way down.

    Args:
        tables: of the stages.
        alike: whether peers of the same speed and memory may be exchanged, because all links are the same.
    """

    def __init__(self, tables: StageTables, *, alike: bool) -> None:
        self._tables, self._alike = tables, alike
        self._best_s = math.inf
        self._order: tuple[int, ...] | None = None

    def best_order(self, first: int | None) -> tuple[int, ...] | None:
        """The order with the quickest slowest stage, maybe of those that begin alike; None when none fits."""
        start = np.full(len(self._tables.layers) + 1, np.inf)
        start[0] = -np.inf
        for head in self._choices(()) if first is None else (first,):
            self._extend((head,), start)
        return self._order

    def _extend(self, order: tuple[int, ...], slowest_s: Matrix) -> None:
        """Go on behind ``plan``, whose last peer's stage isn't in ``slowest_s`` (by layers so far) yet."""
        place = len(order) - 1
        if len(order) == len(self._tables.peers):
            total_s = float(_step(slowest_s, self._tables.seconds(place, order[-1], None))[-1])
            if total_s < self._best_s:
                self._best_s, self._order = total_s, order
            return
        for following in self._choices(order):
            after_s = _step(slowest_s, self._tables.seconds(place, order[-1], following))
            if after_s.min() < self._best_s:
                self._extend((*order, following), after_s)

    def _choices(self, order: tuple[int, ...]) -> Iterator[int]:
        seen = set()
        for index, peer in enumerate(self._tables.peers):
            kind = (peer.speed, peer.memory_bytes)
            if index in order or (self._alike and kind in seen):
                continue
            seen.add(kind)
            yield index


def _step(slowest_s: Matrix, seconds: Matrix) -> Matrix:
    through: Matrix = np.maximum(slowest_s[:, None], seconds).min(axis=0)
    return through
