"""One view's graph from one node's seat: its neighbours, their weights, and a buffer for each edge.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio

import numpy as np

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.strategies.group.view import GroupView
from p2pdrl.strategies.neighbours.messages import Position
from p2pdrl.strategies.topology import matrix, metropolis, spectral_gap
from p2pdrl.tensors.layout import Float32Array

__all__ = ["Line", "Neighbourhood"]


class Line:
    """What an edge keeps from round to round.

    Args:
        size: D.
        max_nbytes: of the longest message.

    Attributes:
        theirs: what the neighbour sent last, decoded.
        lock: held while the buffer is filled and read.
        newest: the latest position that the neighbour called with.
    """

    def __init__(self, size: int, max_nbytes: int) -> None:
        self._buffer = memoryview(bytearray(max_nbytes))
        self.theirs: Float32Array = np.zeros(size, np.float32)
        self.lock = asyncio.Lock()
        self.newest = Position(-1, 0)

    def room(self, nbytes: int) -> memoryview | None:
        """Where ``nbytes`` go; None when they can't be right."""
        return self._buffer[:nbytes] if 0 < nbytes <= len(self._buffer) else None


class Neighbourhood:
    """Neighbours in a view.

    Args:
        config: the strategy's options.
        me: own node id.
        view: in force.
        first: number of the view's first round.
    """

    def __init__(self, config: DsgdConfig, me: str, view: GroupView, first: int) -> None:
        self.view, self.key, self.first = view, view.key, first
        row = metropolis(config.topology, view.members, degree=config.degree, seed=str(view.key))[me]
        self.weights = {peer: weight for peer, weight in row.items() if peer != me}
        W_NN = matrix(config.topology, view.members, degree=config.degree, seed=str(view.key))
        self.spectral_gap = spectral_gap(W_NN)
        self.lines: dict[str, Line] = {}

    def line(self, peer: str, size: int, max_nbytes: int) -> Line:
        """The edge to a neighbour."""
        line = self.lines.get(peer)
        if line is None:
            line = self.lines[peer] = Line(size, max_nbytes)
        return line

    def inherit(self, before: Neighbourhood) -> None:
        """Keep the buffers of those who were neighbours before."""
        for peer, line in before.lines.items():
            if peer in self.weights:
                line.newest = Position(-1, 0)
                self.lines[peer] = line
