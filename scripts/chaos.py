"""Breaks a real swarm on this machine in every way that is at hand, and looks whether all promises are kept.

Nodes are processes that train CartPole. On Linux as root each is a machine of its own (network namespaces,
whose packets this script passes on, delays and loses), one with a wall clock that jumps and one with a small
disk; elsewhere they are on loopback behind proxies, and the report says what was left out. What happens when
is drawn from the seed. The swarm ends by its stop condition; then `report.md` and `report.json` say what
was promised, measured and violated, and how to run the same again.

    python scripts/chaos.py --minutes 15 --seed 1 --out /tmp/chaos-1

Exit code 0 if every promise was kept, else 1. Nodes and this script take about two cores.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from p2pdrl.api.client import NodeClient
from p2pdrl.errors import P2PDRLError
from p2pdrl.node.state.checkpoints import from_bytes, load
from support.fault_schedule import KINDS, Scene, draw
from support.fault_swarm import FaultSwarm, Run, Slot, Usage

TASK = """
[task.env]
id = "CartPole-v1"
num_envs = 4
normalize_observations = true

[task.algorithm]
name = "ppo"
unroll_steps = 32
epochs = 1
minibatches = 2

[task.evaluation]
every = 0

[task.stop]
time_s = {time_s}

[node.checkpoint]
every_s = 5.0
"""
TOLD = {
    "steps": "nodes that are well make updates",
    "views": "views agree once a fault is over",
    "rejoin": "who comes back is in again",
    "deaths": "nobody who could be reached is declared dead",
    "kills": "everybody learns of a kill -9",
    "numbers": "no NaN anywhere",
    "checkpoints": "the newest checkpoint loads",
    "counts": "every step is counted once, the same everywhere",
    "memory": "memory stays",
    "leaks": "no descriptor, task, thread or process leaks",
    "logs": "no traceback in a log",
    "ends": "nodes end with 0, when told to and with the swarm",
    "leftovers": "no process, shared memory or temporary file is left",
}
"""The promises."""

START_S = 300.0
COME_UP_S = 45.0
"""So long the others may take; it is added to the minutes."""
WARM_S = 45.0
"""From the moment that a node trains to the first of the figures that its later ones are held against."""
GROWTH = 0.10
MORE_FILES, MORE_SOCKETS, MORE_THREADS, MORE_TASKS = 2, 12, 6, 15
CRASHED = re.compile(
    r"Traceback \(most recent call last\)|never retrieved|was never awaited|Fatal Python error"
)


class Limits:
    """How long things may take, in seconds.

    Args:
        patience: factor; 1 is for a machine that has little else to do.
    """

    def __init__(self, patience: float) -> None:
        self.stuck_s = 15.0 * patience
        self.views_s = 15.0 * patience
        self.rejoin_s = 30.0 * patience
        self.kill_s = 10.0 * patience
        self.leave_s = 11.0  # a timer of the daemon's own ends it
        self.grace_s = 5.0 * patience
        """A suspicion may end so long after its cause."""
        self.end_s = 25.0 + 25.0 * patience
        """From the last fault to the swarm's end: time to settle and to count."""


@dataclass
class Violation:
    """A promise that wasn't kept."""

    promise: str
    text: str
    at_s: float
    scene: str


@dataclass
class Figure:
    """One promise's measurements.

    Attributes:
        limit: what was promised, in words.
        worst: the worst that was measured, in words.
        looked: how often it was looked at.
    """

    limit: str
    worst: str = ""
    looked: int = 0
    _worst: float = field(default=-math.inf, repr=False)

    def saw(self, value: float, words: str) -> None:
        """Take a measurement; the greatest is the worst."""
        self.looked += 1
        if value > self._worst:
            self._worst, self.worst = value, words


@dataclass
class Apart:
    """A time in which two nodes couldn't reach each other, or one of them wasn't there."""

    pair: frozenset[int]
    began_s: float
    ended_s: float = math.inf


@dataclass
class Upset:
    """A time in which a node isn't expected to make updates."""

    node: int
    began_s: float
    ended_s: float = math.inf


class Campaign:
    """Plays scenes on a swarm and judges it.

    Args:
        swarm: entered; nothing runs on it yet.
        scenes: what to do, in that order, as far as there is time.
        minutes: how long, from the founding to the swarm's end.
        patience: factor on all limits in seconds.
    """

    def __init__(self, swarm: FaultSwarm, scenes: list[Scene], minutes: float, patience: float) -> None:
        self.swarm, self.scenes, self.minutes = swarm, scenes, minutes
        self.limits = Limits(patience)
        self.violations: list[Violation] = []
        self.busy = 0.0
        """Share of all processors that was busy, as `machine` found it."""
        self.late_s: list[float] = []
        """How much later than planned this script woke up."""
        self.figures = {
            "steps": Figure(f"an update each {self.limits.stuck_s:g} s"),
            "views": Figure(f"within {self.limits.views_s:g} s"),
            "rejoin": Figure(f"within {self.limits.rejoin_s:g} s of its start"),
            "deaths": Figure("none"),
            "kills": Figure(f"within {self.limits.kill_s:g} s"),
            "numbers": Figure("finite"),
            "checkpoints": Figure("each time"),
            "counts": Figure("equal on all; what was told and no more"),
            "memory": Figure(f"grows by {GROWTH:.0%} at most once it has trained for {WARM_S:g} s"),
            "leaks": Figure(
                f"{MORE_FILES} files, {MORE_SOCKETS} sockets, {MORE_THREADS} threads, {MORE_TASKS} tasks more"
            ),
            "logs": Figure("none"),
            "ends": Figure(f"0; within {self.limits.leave_s:g} s of a SIGTERM"),
            "leftovers": Figure("none"),
        }
        self.played: list[dict[str, Any]] = []
        self._apart: list[Apart] = []
        self._upset: list[Upset] = []
        self._scene = "start"
        psutil.cpu_percent()
        self._began_s = time.monotonic()
        self._wall = time.time() - time.monotonic()
        self._deadline_s = math.inf
        self._segments = _segments()
        self._told_by_others: dict[str, int] = {}

    # The course

    def run(self) -> None:
        """Start, break, mend, count, end, judge."""
        self._start()
        for scene in self.scenes:
            needs_s = scene.seconds + min(60.0, self.limits.rejoin_s)
            if time.monotonic() + needs_s > self._deadline_s - self.limits.end_s:
                continue  # a shorter one may still fit
            self._play(scene)
        self._scene = "end"
        self._settle(self.limits.views_s, "views")
        self._count()
        self._finish()
        self._judge_logs()
        self._judge_steps()
        self._judge_usage()
        self._judge_leftovers()

    @property
    def seconds(self) -> float:
        """Since its beginning."""
        return time.monotonic() - self._began_s

    def machine(self) -> str:
        """How busy this machine was: what took too long may be its fault."""
        self.busy = psutil.cpu_percent() / 100
        late_s = max(self.late_s, default=0.0)
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        return (
            f"{os.cpu_count()} processors, {self.busy:.0%} busy; load {load} at the end; "
            f"this script woke up {late_s:.2f} s late at worst"
        )

    def say(self, text: str) -> None:
        """Tell how it goes."""
        print(f"{time.monotonic() - self._began_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    def violate(self, promise: str, text: str) -> None:
        """Note that a promise wasn't kept."""
        self.violations.append(
            Violation(promise, text, round(time.monotonic() - self._began_s, 1), self._scene)
        )
        self.say(f"VIOLATED {promise}: {text}")

    def _start(self) -> None:
        slots = self.swarm.slots
        self.swarm.start(0)
        self._until(lambda: slots[0].status.get("state") == "training", START_S, "the first node trains")
        self._deadline_s = time.monotonic() + 60.0 * self.minutes + COME_UP_S
        for slot in slots[1:]:
            self.swarm.start(slot.number, [0])
            time.sleep(1.0)  # all at once would keep one another from coming up
        self._until(self._agreed, START_S, "all nodes are in")
        self.say(f"{len(slots)} nodes train")
        time.sleep(5.0)

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            ended = [slot for slot in self.swarm.slots if slot.runs and not slot.running]
            if ended:
                raise SystemExit(f"{ended[0].name} ended before {what}: {ended[0].text()[-1000:]}")
            if time.monotonic() > end_s:
                raise SystemExit(f"after {limit_s:g} s still not: {what}; see {self.swarm.folder}")
            time.sleep(0.2)

    def _living(self) -> list[Slot]:
        return [slot for slot in self.swarm.slots if slot.running]

    def _agreed(self) -> bool:
        """Whether all that run train, and see each other and nobody else alive."""
        living = self._living()
        ids = {slot.run.id for slot in living}
        for slot in living:
            look = slot.look
            if not slot.status or look is None or look.status["state"] != "training":
                return False
            if {node for node, row in look.peers.items() if row["state"] == "alive"} != ids:
                return False
        return True

    def _settle(self, limit_s: float, promise: str) -> float:
        """Wait until all views agree; return how long that took."""
        began_s = time.monotonic()
        while not self._agreed():
            took_s = time.monotonic() - began_s
            if took_s > limit_s:
                self.violate(promise, f"after {took_s:.0f} s views still differ: {self._views()}")
                break
            self._look()
            time.sleep(0.1)
        took_s = time.monotonic() - began_s
        self.figures[promise].saw(took_s, f"{took_s:.1f} s ({self._scene})")
        return took_s

    def _views(self) -> str:
        names = {run.id: slot.name for slot in self.swarm.slots for run in slot.runs if run.id}
        told = []
        for slot in self._living():
            look = slot.look
            if not slot.status or look is None:
                told.append(f"{slot.name} says nothing")
                continue
            others = [
                f"{names.get(node, node[:8])} {row['state']}"
                for node, row in look.peers.items()
                if row["state"] not in ("alive", "left")
            ]
            told.append(f"{slot.name} ({look.status['state']}): {', '.join(others) or 'all alive'}")
        return "; ".join(told)

    # Scenes

    def _play(self, scene: Scene) -> None:
        self._scene = f"{len(self.played) + 1}: {scene.kind}"
        names = ", ".join(f"n{number}" for number in scene.nodes) or "all"
        self.say(f"{scene.kind} ({names}) for {scene.seconds:g} s")
        at_s = time.monotonic()
        act = getattr(self, f"_{re.sub(r'[^a-z]+', '_', scene.kind)}")
        back_s = act(scene)
        healed_s = time.monotonic()
        self.swarm.mend()
        self._end_all(healed_s)
        promise = "rejoin" if back_s else "views"
        took_s = self._settle(self.limits.rejoin_s if back_s else self.limits.views_s, promise)
        self._end_upsets(time.monotonic())
        self.played.append(
            asdict(scene)
            | {
                "at_s": round(at_s - self._began_s, 1),
                promise + "_s": round(took_s, 1),
                "number": len(self.played) + 1,
            }
        )
        self._wait(scene.rest_s)

    def _wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._look()
            planned_s = min(1.0, max(0.0, left_s))
            slept_s = -time.monotonic()
            time.sleep(planned_s)
            self.late_s.append(slept_s + time.monotonic() - planned_s)

    def _separate(self, ones: Iterable[int], others: Iterable[int] | None = None) -> None:
        """Note that these can't reach those (none: anybody) from now on."""
        now_s = time.monotonic()
        all_ = range(len(self.swarm.slots))
        for one, other in itertools.product(ones, all_ if others is None else others):
            if one != other:
                self._apart.append(Apart(frozenset((one, other)), now_s))

    def _disturb(self, *nodes: int) -> None:
        self._upset += [Upset(node, time.monotonic()) for node in nodes]

    def _end_all(self, now_s: float) -> None:
        for apart in self._apart:
            apart.ended_s = min(apart.ended_s, now_s)

    def _end_upsets(self, now_s: float) -> None:
        for upset in self._upset:
            upset.ended_s = min(upset.ended_s, now_s)

    def _seeds(self, number: int) -> list[int]:
        """Two to join through."""
        living = [slot.number for slot in self._living() if slot.number != number]
        return living[:2]

    def _again(self, number: int) -> None:
        self.swarm.start(number, self._seeds(number))

    def _kill_and_wait(self, scene: Scene) -> None:
        ids = {number: self.swarm.slots[number].run.id for number in scene.nodes}
        self._disturb(*scene.nodes)
        self._separate(scene.nodes)
        for number in scene.nodes:
            self.swarm.kill(number)
        killed_s = time.monotonic()
        if scene.seconds < self.limits.kill_s:
            self._wait(scene.seconds)
            return

        def known() -> bool:
            looks = [slot.look for slot in self._living()]
            return all(
                look is not None and look.peers.get(node, {}).get("state", "dead") == "dead"
                for look in looks
                for node in ids.values()
            )

        while not known() and time.monotonic() < killed_s + self.limits.kill_s:
            self._look()
            time.sleep(0.1)
        took_s = time.monotonic() - killed_s
        self.figures["kills"].saw(took_s, f"{took_s:.1f} s ({self._scene})")
        if not known():
            self.violate("kills", f"after {took_s:.1f} s not all know: {self._views()}")
        self._wait(killed_s + scene.seconds - time.monotonic())

    def _kill(self, scene: Scene) -> bool:
        self._kill_and_wait(scene)
        for number in scene.nodes:
            self._again(number)
        self._until_back(scene.nodes)
        return True

    _kill_two = _kill

    def _until_back(self, nodes: Iterable[int]) -> None:
        """Wait until started nodes train: others may not reach them before."""
        started_s = time.monotonic()
        nodes = list(nodes)
        while any(self.swarm.slots[number].run.trained_s == math.inf for number in nodes):
            took_s = time.monotonic() - started_s
            gone = [number for number in nodes if not self.swarm.slots[number].running]
            if gone:
                self.violate(
                    "rejoin", f"n{gone[0]} ended as it started: {self.swarm.slots[gone[0]].text()[-400:]}"
                )
                return
            if took_s > self.limits.rejoin_s:
                self.violate("rejoin", f"after {took_s:.0f} s not all train: {self._views()}")
                return
            self._look()
            time.sleep(0.1)
        took_s = time.monotonic() - started_s
        self.figures["rejoin"].saw(took_s, f"{took_s:.1f} s ({self._scene})")

    def _leave_and_wait(self, number: int, seconds: float) -> None:
        slot = self.swarm.slots[number]
        self._disturb(number)
        self._separate([number])
        slot.run.ended_s = time.monotonic()
        self.swarm.send(number, signal.SIGTERM, children=False)
        self._ends(slot, self.limits.leave_s, "SIGTERM")
        self._wait(seconds)

    def _ends(self, slot: Slot, limit_s: float, why: str) -> None:
        began_s = time.monotonic()
        while slot.running and time.monotonic() < began_s + limit_s:
            time.sleep(0.05)
        took_s = time.monotonic() - began_s
        code = slot.run.process.poll()
        self.figures["ends"].saw(took_s, f"code {code} after {took_s:.1f} s ({why}, {self._scene})")
        if code != 0:
            self.violate("ends", f"{slot.name}: code {code} {took_s:.1f} s after {why}")
            if slot.running:
                self.swarm.kill(slot.number)

    def _leave(self, scene: Scene) -> bool:
        self._leave_and_wait(scene.nodes[0], scene.seconds)
        self._again(scene.nodes[0])
        self._until_back(scene.nodes)
        return True

    def _stranger(self, scene: Scene) -> bool:
        self._leave_and_wait(scene.nodes[0], scene.seconds)
        self.swarm.slots[scene.nodes[0]].fresh()
        self._again(scene.nodes[0])
        self._until_back(scene.nodes)
        return True

    def _pause(self, scene: Scene) -> bool:
        self._disturb(*scene.nodes)
        self.swarm.send(scene.nodes[0], signal.SIGSTOP)
        time.sleep(scene.seconds)
        self.swarm.send(scene.nodes[0], signal.SIGCONT)
        return False

    def _freeze(self, scene: Scene) -> bool:
        self._separate(scene.nodes)
        return self._pause(scene)

    def _learner(self, scene: Scene) -> bool:
        self._disturb(*scene.nodes)
        if not self.swarm.kill_child(scene.nodes[0], "learner"):
            self.say("  there was none")
        self._wait(scene.seconds)
        self._wait_for_moves(scene.nodes[0])
        return False

    def _stop_learner(self, scene: Scene) -> bool:
        self._disturb(*scene.nodes)
        self.swarm.kill_child(scene.nodes[0], "learner", signal.SIGSTOP)
        self._wait(scene.seconds)
        self.swarm.kill_child(scene.nodes[0], "learner", signal.SIGCONT)
        self._wait_for_moves(scene.nodes[0])
        return False

    def _actor(self, scene: Scene) -> bool:
        self._disturb(*scene.nodes)
        if not self.swarm.kill_child(scene.nodes[0], "actor"):
            self.say("  there was none")
        self._wait(scene.seconds)
        self._wait_for_moves(scene.nodes[0])
        return False

    def _wait_for_moves(self, number: int) -> None:
        """Wait until a node makes updates again."""
        run, began_s = self.swarm.slots[number].run, time.monotonic()
        while not (run.moves and run.moves[-1] > began_s):
            took_s = time.monotonic() - began_s
            if took_s > self.limits.rejoin_s:
                self.violate("steps", f"n{number} makes no update {took_s:.0f} s after {self._scene}")
                return
            self._look()
            time.sleep(0.1)

    def _network(self) -> Any:
        if self.swarm.network is None:
            raise RuntimeError("there is no network of packets")
        return self.swarm.network

    def _halves(self, scene: Scene) -> bool:
        rest = [slot.number for slot in self.swarm.slots if slot.number not in scene.nodes]
        self._separate(scene.nodes, rest)
        self._network().part(scene.nodes, rest)
        self._wait(scene.seconds)
        return False

    def _halves_kill(self, scene: Scene) -> bool:
        rest = [slot.number for slot in self.swarm.slots if slot.number not in scene.nodes]
        self._separate(scene.nodes, rest)
        self._network().part(scene.nodes, rest)
        self._wait(scene.seconds / 2)
        victim = scene.nodes[0]
        self._disturb(victim)
        self._separate([victim])
        self.swarm.kill(victim)
        self._wait(scene.seconds / 2)
        self.swarm.mend()
        self._again(victim)
        self._until_back([victim])
        return True

    def _island(self, scene: Scene) -> bool:
        self._separate(scene.nodes)
        if self.swarm.network is not None:
            rest = [slot.number for slot in self.swarm.slots if slot.number not in scene.nodes]
            self.swarm.network.part(scene.nodes, rest)
        else:
            self.swarm.proxy(scene.nodes[0], lambda proxy: proxy.cut())
        self._wait(scene.seconds)
        return False

    def _one_way(self, scene: Scene) -> bool:
        self._network().link(*scene.nodes).cut = True
        self._wait(scene.seconds)
        return False

    def _loss(self, scene: Scene) -> bool:
        self._network().each_link(lambda link: setattr(link, "loss", 0.2))
        self._wait(scene.seconds)
        return False

    def _slow(self, scene: Scene) -> bool:
        if self.swarm.network is not None:
            self.swarm.network.each_link(lambda link: setattr(link, "delay_s", (0.05, 0.15)))
        else:

            def slow(proxy: Any) -> None:
                for flow in (proxy.up, proxy.down):
                    flow.delay_s, flow.jitter_s = 0.05, 0.1

            for slot in self.swarm.slots:
                self.swarm.proxy(slot.number, slow)
        self._wait(scene.seconds)
        return False

    def _slow_loss(self, scene: Scene) -> bool:
        self._network().each_link(lambda link: setattr(link, "delay_s", (0.05, 0.15)))
        return self._loss(scene)

    def _clock(self, scene: Scene) -> bool:
        self.swarm.set_clock(scene.nodes[0], scene.value)
        self._wait(scene.seconds)
        self.swarm.set_clock(scene.nodes[0], 0.0)
        return False

    def _far_clock(self, scene: Scene) -> bool:
        # what it sends is refused as stale, so it is as good as cut off; nor does it believe our looks
        self._disturb(*scene.nodes)
        self._separate(scene.nodes)
        return self._clock(scene)

    def _disk(self, scene: Scene) -> bool:
        self.swarm.fill_disk(scene.nodes[0])
        self._wait(scene.seconds)
        self.swarm.empty_disk(scene.nodes[0])
        return False

    # What is looked at all along

    def _look(self) -> None:
        """Look at what nodes say, and at their newest checkpoints, now and then."""
        for slot in self.swarm.slots:
            if slot.look is not None:
                for node, row in slot.look.peers.items():
                    if not row["self"] and row.get("env_steps"):
                        before = self._told_by_others.get(node, 0)
                        self._told_by_others[node] = max(before, int(row["env_steps"]))
                self._finite(slot)
        now_s = time.monotonic()
        if now_s < getattr(self, "_loaded_s", 0.0) + 5.0:
            return
        self._loaded_s = now_s
        for path in self._checkpoints():
            try:
                checkpoint = load(path)
                if not np.isfinite(checkpoint.params).all():
                    self.violate("numbers", f"{path} holds NaN")
            except P2PDRLError as error:
                if path.exists():  # its folder isn't gone
                    self.violate("checkpoints", f"{path}: {error}")
                continue
            self.figures["checkpoints"].saw(0, "all loaded")

    def _checkpoints(self) -> list[Path]:
        return sorted(
            path for slot in self.swarm.slots for path in slot.data.glob("checkpoints/*/last.safetensors")
        )

    def _finite(self, slot: Slot) -> None:
        status = slot.look.status if slot.look is not None else {}
        metrics = (status.get("learner") or {}).get("metrics") or {}
        numbers = {"mean_return": status.get("mean_return"), **metrics}
        bad = [
            name
            for name, value in numbers.items()
            if isinstance(value, float) and not math.isfinite(value) and name != "explained_variance"
        ]
        self.figures["numbers"].saw(0, "all finite")
        if bad and not any(v.promise == "numbers" and slot.name in v.text for v in self.violations):
            self.violate("numbers", f"{slot.name}: {', '.join(bad)}")

    # The end

    def _count(self) -> None:
        """Hold the swarm still and compare what its nodes have counted."""
        self._disturb(*(slot.number for slot in self.swarm.slots))
        living = self._living()
        self.swarm.on(living[0].number, lambda client: client.post("/v1/pause?scope=swarm"))

        def totals() -> list[int]:
            return [int(slot.status.get("swarm_env_steps", -1)) for slot in living]

        began_s, same_s, last = time.monotonic(), time.monotonic(), totals()
        while time.monotonic() < began_s + 25.0:
            now = totals()
            if (
                now != last
                or len(set(now)) > 1
                or any(slot.status.get("state") != "paused" for slot in living)
            ):
                last, same_s = now, time.monotonic()
            elif time.monotonic() > same_s + 4.0:
                break
            self._look()
            time.sleep(0.2)
        last = totals()
        by_id: dict[str, int] = {}
        for slot in self.swarm.slots:
            for run in slot.runs:
                if run.id:
                    by_id[run.id] = max(by_id.get(run.id, 0), run.told)
        here = {slot.run.id: int(slot.status.get("env_steps", 0)) for slot in living}
        gone = {node: steps for node, steps in by_id.items() if node not in here}
        known = sum(here.values())
        least = known + sum(min(self._told_by_others.get(node, 0), steps) for node, steps in gone.items())
        most = known + sum(gone.values()) + 2000 * len(gone)
        words = f"{sorted(set(last))} steps on {len(living)} nodes; {least} were told, {most} at most"
        self.figures["counts"].saw(0, words)
        self.say(f"counts: {words}")
        if len(set(last)) != 1 or not least <= last[0] <= most:
            detail = {slot.name: slot.status.get("swarm_env_steps") for slot in living}
            self.violate("counts", f"{words}: {detail}")
        for slot in living:
            try:
                body = self.swarm.on(slot.number, _checkpoint)
                if not np.isfinite(from_bytes(body).params).all():
                    self.violate("numbers", f"{slot.name}'s parameters hold NaN")
            except P2PDRLError as error:
                self.violate("numbers", f"{slot.name} gave no state: {error}")
        self.swarm.on(living[0].number, lambda client: client.post("/v1/resume?scope=swarm"))

    def _finish(self) -> None:
        """Wait for the swarm's own end."""
        living = self._living()
        if len(living) < len(self.swarm.slots):
            names = [slot.name for slot in self.swarm.slots if not slot.running]
            self.violate("ends", f"{', '.join(names)} ended before the swarm")
        self.say(f"waits for the end, in {self._deadline_s - time.monotonic():.0f} s")
        while time.monotonic() < self._deadline_s + 30 and any(slot.running for slot in living):
            time.sleep(0.2)
        for slot in living:
            late_s = time.monotonic() - self._deadline_s
            code = slot.run.process.poll()
            self.figures["ends"].saw(0 if code == 0 else 1e9, f"code {code}")
            if code != 0:
                self.violate("ends", f"{slot.name}: code {code} {late_s:.0f} s after the swarm's end")
            elif not any("the swarm is done" in str(event) for event in slot.events(("halted", "leaving"))):
                self.violate("ends", f"{slot.name} ended for another reason")

    # Judgements afterwards

    def _judge_logs(self) -> None:
        slots = self.swarm.slots
        numbers = {run.id: slot.number for slot in slots for run in slot.runs if run.id}
        for slot in slots:
            found = CRASHED.search(slot.text())
            self.figures["logs"].saw(0, "none")
            if found:
                start = max(0, found.start() - 300)
                self.violate("logs", f"{slot.log}: {slot.text()[start : found.end() + 1500]}")
            for event in slot.events(("member-dead",)):
                at_s = datetime.fromisoformat(event["time"]).timestamp() - self._wall
                victim = numbers.get(event["peer"])
                pair = frozenset((slot.number, victim)) if victim is not None else frozenset()
                excused = any(
                    apart.pair == pair and apart.began_s <= at_s <= apart.ended_s + self.limits.grace_s
                    for apart in self._apart
                )
                self.figures["deaths"].saw(0, "each with its reason")
                if not excused:
                    self._scene = "logs"
                    at = f"{at_s - self._began_s:.1f} s"
                    self.violate("deaths", f"at {at} {slot.name} declared n{victim} dead: {event['event']}")

    def _judge_steps(self) -> None:
        for slot in self.swarm.slots:
            upsets = [(u.began_s, u.ended_s) for u in self._upset if u.node == slot.number]
            for run in slot.runs:
                end_s = min(run.ended_s, self._deadline_s)
                if run.trained_s >= end_s:
                    continue
                marks = [run.trained_s, *(m for m in run.moves if run.trained_s < m < end_s), end_s]
                for sooner_s, later_s in itertools.pairwise(marks):
                    for begin_s, stop_s in _outside(sooner_s, later_s, upsets):
                        gap_s = stop_s - begin_s
                        at = f"{begin_s - self._began_s:.0f} s"
                        self.figures["steps"].saw(gap_s, f"{gap_s:.1f} s ({slot.name}, at {at})")
                        if gap_s > self.limits.stuck_s:
                            self.violate(
                                "steps", f"{slot.name} made no update for {gap_s:.1f} s from {at} on"
                            )

    def _judge_usage(self) -> None:
        for slot in self.swarm.slots:
            run = slot.run
            warm = [u for u in run.usage if WARM_S <= u.at_s - run.trained_s <= WARM_S + 45]
            last = [u for u in run.usage if u.at_s >= self._deadline_s - 30]
            if len(warm) < 3 or len(last) < 2 or last[0].at_s - warm[-1].at_s < 30:
                continue
            self._compare(slot, run, warm, last)

    def _compare(self, slot: Slot, run: Run, warm: list[Usage], last: list[Usage]) -> None:
        def middle(samples: list[Usage], name: str) -> float:
            return statistics.median(getattr(sample, name) for sample in samples)

        before, after = middle(warm, "rss_bytes"), middle(last, "rss_bytes")
        growth = after / before - 1
        seconds = last[-1].at_s - run.began_s
        words = (
            f"{growth:+.1%}, {before / 1e6:.0f} to {after / 1e6:.0f} MB over {seconds:.0f} s ({slot.name})"
        )
        self.figures["memory"].saw(growth, words)
        if growth > GROWTH:
            self.violate("memory", words)
        allowed = {"files": MORE_FILES, "sockets": MORE_SOCKETS, "threads": MORE_THREADS, "tasks": MORE_TASKS}
        allowed["children"] = 0
        for name, more in allowed.items():
            before, after = middle(warm, name), middle(last, name)
            words = f"{after - before:+.0f} {name}, {before:.0f} to {after:.0f} ({slot.name})"
            self.figures["leaks"].saw(after - before - more, words)
            if after - before > more:
                self.violate("leaks", words)

    def _judge_leftovers(self) -> None:
        self._scene = "after the end"
        end_s = time.monotonic() + 5
        while (processes := self._processes()) and time.monotonic() < end_s:
            time.sleep(0.2)
        left: list[str] = list(processes)
        left += [str(path) for path in _segments() - self._segments if "p2pdrl" in path.name]
        left += [str(path) for slot in self.swarm.slots for path in slot.data.rglob("*.tmp")]
        left += [
            str(path) for path in self.swarm.temporary.iterdir() if not path.name.startswith("torchinductor_")
        ]
        self.figures["leftovers"].saw(len(left), "none" if not left else f"{len(left)}")
        if left:
            self.violate("leftovers", "; ".join(left)[:1000])

    def _processes(self) -> list[str]:
        ours = {f"--parent {run.process.pid}" for slot in self.swarm.slots for run in slot.runs}
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if any(line.endswith(parent) for parent in ours):
                found.append(f"{process.pid}: {line[-120:]}")
        return found


def _checkpoint(client: NodeClient) -> bytes:
    room = io.BytesIO()
    client.download("/v1/checkpoint", room)
    return room.getvalue()


def _segments() -> set[Path]:
    folder = Path("/dev/shm")  # noqa: S108 - that is where they would be
    return set(folder.iterdir()) if folder.exists() else set()


def _outside(begin_s: float, end_s: float, holes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of a time that lie in no hole."""
    parts = [(begin_s, end_s)]
    for hole_begin_s, hole_end_s in holes:
        cut = []
        for a, b in parts:
            cut += [(a, min(b, hole_begin_s)), (max(a, hole_end_s), b)]
        parts = [(a, b) for a, b in cut if a < b]
    return parts


def write_report(campaign: Campaign, out: Path, command: str, left_out: dict[str, str]) -> None:
    """Write `report.json` and `report.md`."""
    document = {
        "command": command,
        "kept": not campaign.violations,
        "seconds": round(campaign.seconds, 1),
        "machine": campaign.machine(),
        "promises": {
            name: {
                "what": TOLD[name],
                "limit": figure.limit,
                "worst": figure.worst,
                "looked": figure.looked,
                "violations": sum(violation.promise == name for violation in campaign.violations),
            }
            for name, figure in campaign.figures.items()
        },
        "violations": [asdict(violation) for violation in campaign.violations],
        "scenes": campaign.played,
        "left_out": left_out,
        "logs": str(campaign.swarm.folder),
    }
    (out / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = ["# A campaign of faults", "", f"`{command}`", "", f"{document['machine']}.", ""]
    lines += [
        "All promises were kept." if document["kept"] else f"**{len(campaign.violations)} violations.**",
        "",
    ]
    lines += ["| promise | limit | worst | looked at | violations |", "|---|---|---|---|---|"]
    for row in document["promises"].values():  # type: ignore[attr-defined]
        cells = [row["what"], row["limit"], row["worst"] or "not measured", row["looked"], row["violations"]]
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    if campaign.violations:
        lines += ["", "## Violations", ""]
        for violation in campaign.violations:
            lines += [f"- {violation.at_s} s, {violation.scene}, {violation.promise}: {violation.text}"]
        lines += ["", f"To reproduce: `{command}`; logs are in `{campaign.swarm.folder}`."]
    lines += [
        "",
        "## What happened",
        "",
        "| at | fault | nodes | seconds | well again after |",
        "|---|---|---|---|---|",
    ]
    for scene in campaign.played:
        nodes = ", ".join(f"n{number}" for number in scene["nodes"]) or "all"
        back = scene.get("rejoin_s", scene.get("views_s"))
        lines.append(f"| {scene['at_s']} s | {scene['kind']} | {nodes} | {scene['seconds']} | {back} s |")
    if left_out:
        lines += ["", "## Left out", ""] + [f"- {kind}: {why}" for kind, why in left_out.items()]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Read the arguments, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="from the founding to the swarm's end; 2 or more"
    )
    parser.add_argument("--seed", type=int, default=1, help="decides what happens when")
    parser.add_argument("--nodes", type=int, default=6, help="how many; 4 or more")
    parser.add_argument(
        "--out", type=Path, help="where the report and logs go; default: a new folder in /tmp"
    )
    parser.add_argument(
        "--step-delay-s", type=float, default=0.02, help="pace of each learner's environments"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on all limits, for a busy machine"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(KINDS), metavar="FAULT", help="only these: " + ", ".join(KINDS)
    )
    parser.add_argument(
        "--proxies", action="store_true", help="proxies on loopback even where namespaces could be"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="options of every node"
    )
    given = parser.parse_args()
    if given.minutes < 2 or given.nodes < 4:
        parser.error("less than two minutes or four nodes is no campaign")
    out = (given.out or Path(tempfile.mkdtemp(prefix="p2pdrl-chaos-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    task = folder / "task.toml"
    task.write_text(TASK.format(time_s=60.0 * given.minutes + COME_UP_S))
    arguments = ["--config", str(task), f"--set=node.learner.step_delay_s={given.step_delay_s}"]
    arguments += [f"--set={word}" for word in given.set]
    clock, disk, actor = 1, 2, 3
    swarm = FaultSwarm(given.nodes, folder, arguments, actors=[actor], seed=given.seed, proxies=given.proxies)
    with swarm:
        left_out = {}
        if swarm.no_packets:
            for kind in ("halves", "halves, kill", "one way", "loss", "slow, loss"):
                left_out[kind] = swarm.no_packets
        swarm.give_clock(clock)
        if why := swarm.give_disk(disk):
            left_out["disk"] = why
        if given.only:
            left_out |= {kind: "not asked for" for kind in KINDS if kind not in given.only}
        scenes = draw(
            given.seed, given.nodes, int(given.minutes * 6), without=left_out, clock=clock, disk=disk,
            actor=actor, shorter=min(1.0, given.minutes / 8),
        )  # fmt: skip
        campaign = Campaign(swarm, scenes, given.minutes, given.patience)
        command = f"python scripts/chaos.py {' '.join(sys.argv[1:])}"
        try:
            campaign.run()
        except BaseException as error:
            campaign.violate("ends", f"the campaign broke off: {error!r}")
            raise
        finally:
            write_report(campaign, out, command, left_out)
    print(out / "report.md")
    raise SystemExit(1 if campaign.violations else 0)


if __name__ == "__main__":
    main()
