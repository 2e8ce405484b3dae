"""Rounds of a whole group in virtual time: averaged gradients, averaged parameters, federated averaging.

Every member gives each owner its part of that owner's piece, and the answer carries the average: see
`strategies.allreduce.reduce_scatter`, whose function cuts the pieces. A round begins when all have asked,
or `GRACE` of the deadline after the first request, without the others. Its seconds follow from closed
formulas over all members at once, for with a thousand owners a round is a million calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import FederatedConfig, GradAverageConfig, ParamAverageConfig
from p2pdrl.group.view import GroupView, ViewKey
from p2pdrl.planner.network import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import DOUBT_S, Model, World
from p2pdrl.strategies.allreduce.federated import participants
from p2pdrl.strategies.allreduce.reduce_scatter import cut_pieces
from p2pdrl.strategies.allreduce.rounds import GRACE

__all__ = ["RoundsModel"]

Grouped = GradAverageConfig | ParamAverageConfig | FederatedConfig
Floats = npt.NDArray[np.float64]


class RoundsModel(Model):
    """Exact averaging.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    doubt_s = DOUBT_S

    def __init__(self, config: Grouped, world: World) -> None:
        super().__init__(world)
        self._config = config
        size, kind = world.swarm.size, config.compression
        self._part = payload_nbytes(size, kind, keep=config.keep, moved=world.swarm.moved)
        self._whole = dense_nbytes(size, kind)
        self._number = 0
        self._posted_s: dict[int, float] = {}
        self._running = False
        self._ready_s = 0.0
        self._dead: set[int] = set()
        self._excused: set[int] = set()

    def updated(self, node: int) -> None:
        """Rounds follow requests."""

    def requested(self, node: int) -> None:
        """A member is ready; the last one begins the round."""
        self._posted_s[node] = self.world.now_s
        self._excused.discard(node)
        if len(self._posted_s) == 1:
            wait_s = GRACE * self._config.deadline_s
            self.events.at(self.world.now_s + wait_s, self._overdue, self._number)
        self._begin_if_all()

    def killed(self, node: int) -> None:
        """Its calls are refused: the others doubt it at the round's end, and the group forms anew."""
        self._dead.add(node)
        self._posted_s.pop(node, None)

    def left(self, node: int) -> None:
        """The group has formed anew without it; who waits does the round again."""
        self._dead.discard(node)
        self._regrouped()

    def joined(self, node: int) -> None:
        """The group has formed anew; the newcomer takes the state first, while the others stand still."""
        self._regrouped()

    def _regrouped(self) -> None:
        self._ready_s = self.world.now_s + self.world.swarm.churn.regroup_s
        for node in self._posted_s:
            self.statistics.loss(node, "regrouped")
        self.events.at(self._ready_s, self._begin_if_all)

    def _overdue(self, number: int) -> None:
        """Daemons go on without learners that don't ask."""
        if number == self._number and not self._running and self._posted_s:
            self._excused |= {node for node in self.world.view if node not in self._posted_s}
            self._begin_if_all()

    def _begin_if_all(self) -> None:
        if self._running or self.world.now_s < self._ready_s or self._dead:
            return
        if self._posted_s and all(n in self._posted_s or n in self._excused for n in self.world.view):
            self._running = True
            self._round(list(self.world.view))

    def _round(self, members: list[int]) -> None:
        """Do one round of all ``members``; who has no learner's part takes part as an owner."""
        ready = [node for node in members if node in self._posted_s]
        if isinstance(self._config, FederatedConfig):
            ids = [self.world.ids[node] for node in ready]
            drawn = participants(0, self._number, ids, self._config.participation)
            taking = [int(one) for one in drawn]
        else:
            taking = ready
        ends_s = self._ends_s(members, set(taking))
        for node, end_s in zip(members, ends_s.tolist(), strict=True):
            self.events.at(end_s, self._ended, node, self._number)
        self.events.at(float(ends_s.max()), self._next, members)

    def _ends_s(self, members: list[int], taking: set[int]) -> Floats:
        """When each member has the whole average."""
        world, costs, count = self.world, self.world.costs, len(members)
        if count == 1:
            return np.array([world.now_s])
        if getattr(self._config, "backend", "own") == "torch":
            return self._ring_ends_s(members)
        begin_s = np.array([self._posted_s.get(node, world.now_s) for node in members])
        ids = [world.ids[node] for node in members]
        view = GroupView(ViewKey(epoch=0, generation=count, proposer=ids[0]), tuple(ids))
        pieces = cut_pieces(view, world.swarm.size)
        owners = np.array([members.index(int(piece.owner)) for piece in pieces])
        part, whole = self._part / len(pieces), self._whole / len(pieces)
        gives_N = np.array([node in taking for node in members], float)
        calls_N = np.full(count, float(len(pieces)))
        calls_N[owners] -= 1.0
        out_s_N, in_s_N, delay_s_N = self._links(members, calls_N)
        work_s_N = calls_N * costs.call_s / 2 + self._part * costs.byte_s * gives_N
        sent_s_N = begin_s + np.maximum(work_s_N, calls_N * (part * gives_N + self.half_bytes) * out_s_N)
        serve_s = (count - 1) * (costs.call_s + (part + whole) * costs.byte_s)
        take_s_P = (count - 1) * (part + self.half_bytes) * in_s_N[owners]
        if costs.cores:
            serve_s *= max(1.0, len(pieces) / costs.cores)
        first_s, last_s = float(np.min(sent_s_N + delay_s_N)), float(np.max(sent_s_N + delay_s_N))
        own_s_P = np.maximum(take_s_P, serve_s)
        summed_s_P = np.maximum(first_s + own_s_P, last_s + own_s_P / (count - 1)) + delay_s_N[owners]
        # Owners answer in the order in which they were called.
        place_N = np.empty(count)
        place_N[np.argsort(sent_s_N + delay_s_N, kind="stable")] = np.arange(1, count + 1)
        answer_s_P = (whole + self.half_bytes) * out_s_N[owners]
        come_s_NP = (summed_s_P + delay_s_N[owners]) + np.minimum(place_N, count - 1)[:, None] * answer_s_P
        come_s_NP[owners, np.arange(len(pieces))] = summed_s_P
        ends_s: Floats = np.maximum(come_s_NP.max(1), summed_s_P.min() + calls_N * whole * in_s_N)
        ends_s += np.where(calls_N > 0, delay_s_N, 0.0)
        ends_s = np.maximum(ends_s, world.now_s)
        self._count(members, owners.tolist(), gives_N, calls_N, part=part, whole=whole)
        ends_s += self._whole * costs.byte_s + calls_N * costs.call_s / 2
        return ends_s

    def _ring_ends_s(self, members: list[int]) -> Floats:
        """When each member has the average from torch.distributed: 2(n − 1) steps around a ring of all.

        In each step everybody sends an n-th of the vector on (Patarasuk and Yuan 2009). There are no heads,
        and the daemon has no part in it; the slowest link sets the pace.
        """
        world, count = self.world, len(members)
        begin_s = max(self._posted_s.get(node, world.now_s) for node in members)
        out_s_N, in_s_N, delay_s_N = self._links(members, np.ones(count))
        piece = self._whole / count
        hop_s = float(np.max(piece * np.maximum(out_s_N, in_s_N)) + 2 * delay_s_N.max())
        sent = 2 * (count - 1) * piece
        for node in members:
            self.statistics.out[node] += sent
            self.statistics.into[node] += sent
            self.statistics.wire_out[node] += sent * 1.046
            self.statistics.wire_in[node] += sent * 1.046
        return np.full(count, max(begin_s + 2 * (count - 1) * hop_s, world.now_s))

    def _links(self, members: list[int], calls_N: Floats) -> tuple[Floats, Floats, Floats]:
        """Seconds per byte out and in, and delay, of each; loss bounds each of its connections' rate."""
        network = self.network
        far = members[0]
        rates = [network.rates(node, far if node != far else members[-1]) for node in members]
        back = [network.rates(far if node != far else members[-1], node) for node in members]
        link = self.world.swarm.link
        many_N = np.maximum(1.0, calls_N)
        out_N = np.minimum(
            np.array([rate[0] for rate in rates]) * many_N, [link(n).out_bytes_s for n in members]
        )
        in_N = np.minimum(
            np.array([rate[1] for rate in back]) * many_N, [link(n).in_bytes_s for n in members]
        )
        delay_s = [link(n).delay_s + link(n).jitter_s / 2 for n in members]
        return 1.0 / out_N, 1.0 / in_N, np.array(delay_s)

    def _count(
        self,
        members: list[int],
        owners: list[int],
        gives_N: Floats,
        calls_N: Floats,
        *,
        part: float,
        whole: float,
    ) -> None:
        """Count bytes."""
        statistics, half = self.statistics, self.half_bytes
        owning = set(owners)
        givers = float(gives_N.sum())
        for place, node in enumerate(members):
            out, into = calls_N[place] * part * gives_N[place], calls_N[place] * whole
            extra = calls_N[place] * half
            if place in owning:
                others = len(members) - 1
                out += others * whole
                into += (givers - gives_N[place]) * part
                extra += others * half
            statistics.out[node] += float(out)
            statistics.into[node] += float(into)
            statistics.wire_out[node] += float((out + extra) * 1.046)
            statistics.wire_in[node] += float((into + extra) * 1.046)

    def _ended(self, node: int, number: int) -> None:
        """A member has the average."""
        posted_s = self._posted_s.pop(node, None)
        if posted_s is None or not self.world.up[node]:
            return
        self.statistics.round(node, "ok", self.world.now_s - posted_s)
        self.learners.heard[node] = len(self.world.view) > 1
        self.learners.answer(node, self.world.now_s)

    def _next(self, members: list[int]) -> None:
        """All have it: they are alike; those who asked meanwhile wait for the next round."""
        world = self.world
        newest = max(self.learners.version[node] for node in members)
        for node in members:
            if len(members) > 1:
                self.statistics.merged(0)
            self.learners.version[node] = newest
        there = [node for node in members if world.up[node]]
        first_E = self.replicas.x_NE[there[0]] if there else self.replicas.x_NE[members[0]]
        plain = isinstance(self._config, ParamAverageConfig)
        self.replicas.alike(
            members, self.replicas.x_NE[members].mean(0) if plain else first_E.copy(), world.now_s
        )
        self._number += 1
        self._running = False
        if self._posted_s:
            wait_s = GRACE * self._config.deadline_s
            self.events.at(world.now_s + wait_s, self._overdue, self._number)
        self._begin_if_all()
