"""Groups on a simulated network in virtual time: loss, delay, duplicates, cuts, crashes, frozen nodes.

The cores are the real ones; every chance comes from one generator, so a seed tells the whole story. After
every step of a node `ViewInvariants` checks, as somebody who sees all nodes at once, what group views
promise:

- A node acts only in the greatest view that it acknowledged, and these only grow within one life.
- Two views that differ never have the same key, nor the members of one view different notes.
- A view is in force nowhere before all of its members acknowledged it.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from p2pdrl.group.agreement import GroupCall, GroupCore
from p2pdrl.group.calls import MOST_TIMES
from p2pdrl.group.view import ActiveView, GroupView, Response, Timing, ViewKey

__all__ = ["SimulatedGroups", "SimulatedMember", "ViewInvariants"]


class ViewInvariants:
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


End = Callable[[Response | str], None]


class SimulatedMember:
    """One node.

    Args:
        number: makes its id.
        now_s: time.
        epoch: mode epoch.
        timing: of its core.
    """

    def __init__(self, number: int, now_s: float, epoch: int, timing: Timing) -> None:
        self.number = number
        self.id = f"{number:032x}"
        self.life = 0
        self.running = True
        self.frozen = False
        self.inbox: list[Callable[[], None]] = []
        self.knows: set[str] = set()
        self.epoch = epoch
        self._timing = timing
        self.core = self._make(now_s)
        self.entered: list[float] = []
        """When a view came in force there."""

    def _make(self, now_s: float) -> GroupCore:
        name = f"{self.number}.{self.life}".encode()
        first = int(now_s * 1000) + self.life
        return GroupCore(
            self.id, self.epoch, lambda: name, now_s, first_generation=first, timing=self._timing
        )

    def begin_life(self, now_s: float, epoch: int) -> None:
        """Begin anew and know nothing."""
        self.life += 1
        self.running, self.frozen = True, False
        self.inbox.clear()
        self.knows.clear()
        self.epoch = epoch
        self.core = self._make(now_s)

    @property
    def view(self) -> GroupView | None:
        """The view in force there."""
        return None if self.core.active is None else self.core.active.view


class SimulatedGroups:
    """Nodes that form groups.

    Args:
        count: nodes at first.
        seed: of all chances.
        loss: probability that a message, and again that its answer, is lost.
        delay_s: least and greatest time of one way.
        duplicate: probability that a request arrives twice.
        learn_s: greatest time until a node hears of another's birth or death.
        acquainted: whether all know each other at the beginning.
        timing: of the cores.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        loss: float = 0.0,
        delay_s: tuple[float, float] = (0.001, 0.02),
        duplicate: float = 0.0,
        learn_s: float = 0.0,
        acquainted: bool = True,
        timing: Timing | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.loss, self.delay_s, self.duplicate, self.learn_s = loss, delay_s, duplicate, learn_s
        self.now_s = 0.0
        self._timing = timing if timing is not None else Timing()
        self.messages = 0
        self.epoch = 1
        self.nodes: list[SimulatedMember] = []
        self._by_id: dict[str, SimulatedMember] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._cut: set[tuple[str, str]] = set()
        self._promises = ViewInvariants()
        for _ in range(count):
            self.add(acquainted=acquainted)

    # Nodes and faults

    def add(self, *, acquainted: bool = True) -> SimulatedMember:
        """One more node, known at once when ``acquainted``."""
        node = SimulatedMember(len(self.nodes), self.now_s, self.epoch, self._timing)
        self.nodes.append(node)
        self._by_id[node.id] = node
        self._begin(node, acquainted=acquainted)
        return node

    @property
    def living(self) -> list[SimulatedMember]:
        """Those that run, frozen or not."""
        return [node for node in self.nodes if node.running]

    def crash(self, number: int) -> None:
        """End a node; the others hear of it."""
        node = self.nodes[number]
        node.running = False
        for other in self.nodes:
            self._later(self._learning_s(), self._forgetting(other, node))

    def restart(self, number: int) -> None:
        """Start a node that crashed, in the swarm's mode epoch."""
        node = self.nodes[number]
        if not node.running:
            node.begin_life(self.now_s, self.epoch)
            self._begin(node, acquainted=False)

    def switch(self, number: int, epoch: int) -> None:
        """Let a node follow a mode record: its group ends, another begins."""
        node = self.nodes[number]
        self.epoch = max(self.epoch, epoch)
        if node.running and not node.frozen and node.epoch < epoch:
            knows = set(node.knows)
            node.begin_life(self.now_s, epoch)
            self._begin(node, acquainted=False)
            node.knows = knows

    def freeze(self, number: int) -> None:
        """Stop a node as SIGSTOP does."""
        self.nodes[number].frozen = True

    def thaw(self, number: int) -> None:
        """Let it go on: what came meanwhile is handled now, in order."""
        node = self.nodes[number]
        node.frozen = False
        inbox, node.inbox = node.inbox, []
        for event in inbox:
            event()

    def cut(self, sides: Iterable[Collection[int]], *, known: bool = True) -> None:
        """Cut all links between the sides; ``known``: membership finds out."""
        groups = [{self.nodes[number].id for number in side} for side in sides]
        for one in groups:
            for other in groups:
                if one is not other:
                    self._cut |= {(a, b) for a in one for b in other}
                    for a in one:
                        for b in other if known else ():
                            self._later(self._learning_s(), self._forgetting(self._by_id[a], self._by_id[b]))

    def cut_one_way(self, source: int, target: int) -> None:
        """Lose what ``source`` sends to ``target``; membership doesn't find out."""
        self._cut.add((self.nodes[source].id, self.nodes[target].id))

    def mend(self) -> None:
        """Mend all links; membership finds out."""
        self._cut.clear()
        for node in self.living:
            for other in self.living:
                self._later(self._learning_s(), self._learning(node, other))

    def suspect(self, number: int, other: int) -> None:
        """Let a node's membership believe, falsely, that another is gone."""
        self.nodes[number].knows.discard(self.nodes[other].id)

    def doubt(self, number: int, other: int) -> None:
        """Let a node's strategy doubt another."""
        node = self.nodes[number]
        if node.running and not node.frozen:
            self._carry_out(node, node.core.doubt(self.nodes[other].id, "simulated", self.now_s))

    def settle(self) -> None:
        """Make the network whole and membership right, at once; thaw the frozen, end all faults."""
        self.loss = self.duplicate = 0.0
        self.delay_s = (0.001, 0.02)
        self._cut.clear()
        for node in self.living:
            if node.frozen:
                self.thaw(node.number)
        for node in self.living:
            self.switch(node.number, self.epoch)
        for node in self.living:
            node.knows = {other.id for other in self.living if other is not node}

    # Time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._queue)
            event()
        self.now_s = end_s

    def seconds_until(self, condition: Callable[[], bool], limit_s: float) -> float | None:
        """Let time pass until ``condition``; return how long it took, or None at the limit."""
        began_s = self.now_s
        while not condition():
            if self.now_s >= began_s + limit_s:
                return None
            self.run(0.01)
        return self.now_s - began_s

    def agreed(self) -> bool:
        """Whether all the living, and nobody else, are in one view."""
        views = {node.view for node in self.living}
        return len(views) == 1 and all(
            view is not None and set(view.members) == {node.id for node in self.living} for view in views
        )

    # Below: events

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._count, event))

    def _learning_s(self) -> float:
        return self.rng.uniform(0.0, self.learn_s)

    def _learning(self, node: SimulatedMember, other: SimulatedMember) -> Callable[[], None]:
        def learn() -> None:
            whole = not {(node.id, other.id), (other.id, node.id)} & self._cut
            if other.running and node is not other and whole:
                node.knows.add(other.id)

        return learn

    def _forgetting(self, node: SimulatedMember, other: SimulatedMember) -> Callable[[], None]:
        life, cut_at_s = other.life, self.now_s

        def forget() -> None:
            cut = {(node.id, other.id), (other.id, node.id)} & self._cut
            if other.life == life and (cut or not other.running) and cut_at_s <= self.now_s:
                node.knows.discard(other.id)

        return forget

    def _begin(self, node: SimulatedMember, *, acquainted: bool) -> None:
        for other in self.nodes if acquainted else ():
            if other is not node and other.running:
                node.knows.add(other.id)
                other.knows.add(node.id)
        for other in () if acquainted else self.nodes:
            self._later(self._learning_s(), self._learning(node, other))
            self._later(self._learning_s(), self._learning(other, node))
        life = node.life

        def tick() -> None:
            if node.life != life or not node.running:
                return
            if not node.frozen:
                self._look(node)
            self._later(self._timing.poll_s, tick)

        self._later(self.rng.uniform(0.0, self._timing.poll_s), tick)

    def _look(self, node: SimulatedMember) -> None:
        self._carry_out(node, node.core.tick(node.knows, self.now_s))

    def _at(self, node: SimulatedMember, seconds: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen at a node, in its present life, when it isn't frozen."""
        life = node.life

        def happen() -> None:
            if not node.running or node.life != life:
                return
            if node.frozen:
                node.inbox.append(happen)
            else:
                event()

        self._later(seconds, happen)

    def _carry_out(self, node: SimulatedMember, calls: list[GroupCall]) -> None:
        if self._promises.check(node.id, node.life, node.core.acknowledged, node.core.active):
            node.entered.append(self.now_s)
        for call in calls:
            self._call(node, call)

    def _call(self, node: SimulatedMember, call: GroupCall) -> None:
        ended, life = False, node.life

        def end(outcome: Response | str) -> None:
            nonlocal ended
            if ended or node.life != life:
                return
            ended = True
            if isinstance(outcome, str):
                self._carry_out(node, node.core.failed(call.number, outcome, self.now_s))
            else:
                self._carry_out(node, node.core.answered(call.number, outcome, self.now_s))

        def send() -> None:
            if ended:
                return
            self.messages += 1
            for _ in range(2 if self.rng.random() < self.duplicate else 1):
                if self._passes(node, target):
                    self._later(self._way_s(), lambda: self._arrive(node, target, call, end))

        target = self._by_id[call.to]
        self._at(node, call.deadline_s, lambda: end("timeout"))
        for time in range(MOST_TIMES):
            self._at(node, min(time * self._timing.again_s, call.deadline_s), send)

    def _arrive(self, node: SimulatedMember, target: SimulatedMember, call: GroupCall, end: End) -> None:
        epoch = node.epoch

        def answer() -> None:
            outcome: Response | str = "refused"
            if target.epoch == epoch:
                outcome, calls = target.core.request(node.id, call.message, self.now_s)
                self._carry_out(target, calls)
            back(outcome)

        def back(outcome: Response | str) -> None:
            if self._passes(target, node):
                self._at(node, self._way_s(), lambda: end(outcome))

        if target.running:
            self._at(target, 0.0, answer)
        else:
            back("unreachable")

    def _way_s(self) -> float:
        return self.rng.uniform(*self.delay_s)

    def _passes(self, source: SimulatedMember, target: SimulatedMember) -> bool:
        return (source.id, target.id) not in self._cut and self.rng.random() >= self.loss
