"""What liars do to a swarm: members in good standing that send something else than what they learnt.

A swarm trains a preset in virtual time (`time_to_solve.py`) for so many environment steps, and some of its
nodes lie in each vector that they send: as callers, and where vectors are exchanged in pairs, as answerers.
They train and follow the protocol otherwise. At the end each honest node's policy is judged.

    flip             -v
    x10 x100 x1000   so many times v
    noise            a random vector, three times as long as v
    constant         one, in each entry
    drift            v and a fixed direction, by 2 % of |v| more with each message
    within           v, shortened by so much that it stays just within what receivers let through
    counts           -v, which claims a million times its samples, or its push-sum weight

    python scripts/liars.py --strategies adpsgd dsgd --attacks none flip x10 --rules mean clipped
    python scripts/liars.py --nodes 8 --liars 2 --strategies adpsgd --attacks within

With `--owner` the liar is the server, or owns a piece of the all-reduce, and lies in what it hands out.
Rows are added to OUT/runs.csv as they come; what is there isn't run again. `--table-only` reads them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np

from p2pdrl.config.loader import resolve
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.node.swarm_view import Quarantine
from p2pdrl.planner.description import LAN
from p2pdrl.strategies.allreduce.averager import ReduceRequest
from p2pdrl.strategies.gossip.push import PushHead
from p2pdrl.strategies.registry import build
from p2pdrl.strategies.servers.messages import GradientPush
from p2pdrl.tensors.wire import decode, encode, encoded_nbytes
from p2pdrl.testing.virtual_swarm import SimNode
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import Incoming, Reply
from support.rows import Rows, command_line, commit
from support.virtual_training import Costs, VirtualTraining

__all__ = ["LyingSwarm", "distort", "table"]

FIELDS = (
    *("preset", "strategy", "rule", "attack", "nodes", "liars", "seed", "owner", "env_steps"),
    *("final", "best", "norm", "strikes", "wrong_strikes", "quarantined", "clipped", "wall_s"),
    *("commit", "command"),
)
ATTACKS = ("none", "flip", "x10", "x100", "x1000", "noise", "constant", "drift", "within", "counts")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "adpsgd": (),
    "dsgd": ("task.strategy.topology=complete",),
    "sgp": (),
    "gala": ("task.strategy.partners=exponential",),
    "server_sync": (),
    "server_async": (),
    "grad_average": (),
    "param_average": ("task.strategy.every_updates=1",),
}
PAIRWISE = ("exchange", "neighbour")
LYING_ROUTES = (*PAIRWISE, "push", "reduce")
COSTS = Costs(env_step_s=0.002, gradient_s=0.001)
JUDGED_EPISODES = 1
"""Evaluations of each honest node at the end."""


def distort(attack: str, vector: np.ndarray, sent: int, usual: float, rng: np.random.Generator) -> np.ndarray:
    """What a liar sends instead of ``vector``.

    Args:
        sent: messages before this one.
        usual: distance of the liar's own vector to its peers', usually.
        rng: always at the same point.
    """
    length = float(np.linalg.norm(vector))
    if attack in ("flip", "counts"):
        return -vector
    if attack.startswith("x"):
        return vector * float(attack[1:])
    if attack == "noise":
        noise = np.random.default_rng(sent).standard_normal(vector.size)
        return noise * (3.0 * length / np.linalg.norm(noise))
    if attack == "constant":
        return np.ones_like(vector)
    if attack == "drift":
        way = rng.standard_normal(vector.size)
        return vector + way * (0.02 * sent * length / np.linalg.norm(way))
    if attack == "within":
        return vector * max(0.0, 1.0 - 1.5 * usual / max(length, 1e-12))
    return vector


class Liar:
    """Distorts what a node sends.

    Args:
        node: whose transport it takes over.
        seed: of directions.
    """

    def __init__(self, attack: str, node: SimNode, seed: int) -> None:
        self.attack, self.node, self._seed, self.sent = attack, node, seed, 0

    def lie(self, route: str, meta: bytes, vector: bytes) -> tuple[bytes, bytes]:
        """What goes out instead."""
        size = self.node.learner.x.size
        for wire in ("float32", "bf16"):
            if len(vector) == encoded_nbytes(size, wire):
                true = np.empty(size, np.float32)
                decode(memoryview(vector), wire, true)
                apart = self.node.strategy.consensus_distance or 0.0
                false = distort(
                    self.attack,
                    true.astype(np.float64),
                    self.sent,
                    1.6 * apart,
                    np.random.default_rng(self._seed),
                )
                out = bytearray(len(vector))
                encode(np.clip(false, -1e6, 1e6).astype(np.float32), wire, memoryview(out))
                self.sent += 1
                return self._head(route, meta), bytes(out)
        return meta, vector

    def _head(self, route: str, meta: bytes) -> bytes:
        if self.attack != "counts":
            return meta
        for kind, field, factor in (
            (ReduceRequest, "weight", 1e6),
            (GradientPush, "weight", 1e6),
            (PushHead, "mass", 3.0 * self.node.learner.x.size),
        ):
            try:
                head = msgspec.msgpack.decode(meta, type=kind)
            except msgspec.DecodeError:
                continue
            return msgspec.msgpack.encode(
                msgspec.structs.replace(head, **{field: factor * getattr(head, field)})
            )
        return meta


class LyingTransport:
    """A node's transport, through which it lies once it is a liar.

    Args:
        may: asked at each vector whether the node lies.
    """

    def __init__(self, transport: Any, liar: Liar, may: Callable[[str], bool]) -> None:
        self._transport, self._liar, self._may = transport, liar, may

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(
        self, to: Any, peer: str | None, route: str, meta: bytes, *, vector: Any = None, **options: Any
    ) -> Any:
        """Send, maybe something else."""
        if vector is not None and route in LYING_ROUTES and self._may(route):
            meta, body = self._liar.lie(route, meta, bytes(vector))
            vector = memoryview(body)
        return await self._transport.call(to, peer, route, meta, vector=vector, **options)


class LyingSwarm(VirtualTraining):
    """A swarm some of whose nodes lie.

    Args:
        attack: of `ATTACKS`.
        liars: how many lie: the last ones, or of an all-reduce the first to send their parts to an owner.
        owner: the first node that hands out results lies instead, in those.
    """

    def __init__(
        self, task: TaskConfig, nodes: int, *, attack: str, liars: int, seed: int, owner: bool = False
    ) -> None:
        super().__init__(task, nodes, COSTS, LAN, seed=seed)
        self._attack, self._liars, self._nodes, self._owner = attack, liars, nodes, owner
        self.lying: set[str] = set()
        self.final: list[float] = []
        self.norms: list[float] = []

    def _may(self, node: SimNode, route: str) -> bool:
        if node.id in self.lying:
            return True
        late = route == "reduce" or self._owner
        last = int(node.id, 16) >= self._nodes - self._liars
        if self._attack == "none" or len(self.lying) >= self._liars or not (late or last):
            return False
        self.lying.add(node.id)
        return True

    def _add(self) -> SimNode:
        node = super()._add()
        liar = Liar(self._attack, node, self._seed)
        node.transport = LyingTransport(
            node.transport, liar, lambda route: not self._owner and self._may(node, route)
        )
        quarantine = Quarantine(3, 300.0)
        swarm, strike = node.swarm, node.swarm.strike
        swarm.ever = set()

        def struck(peer: str, why: str) -> None:
            strike(peer, why)
            import asyncio

            loop = asyncio.get_running_loop()
            if quarantine.strike(peer, loop.time()):
                swarm.held.add(peer)
                swarm.ever.add(peer)
                loop.call_later(300.0, swarm.held.discard, peer)

        swarm.strike = struck
        node.strategy = build(node.config, node.context())

        async def answer(incoming: Incoming) -> Reply:
            reply = await node.strategy.answer(incoming)
            vector = bytes(join_views(reply.vector))
            tells = incoming.route in PAIRWISE or (self._owner and incoming.route in ("push", "reduce"))
            if not vector or not tells or not self._may(node, incoming.route):
                return reply
            meta, vector = liar.lie(incoming.route, reply.meta, vector)
            return Reply(meta, memoryview(vector), on_end=reply.on_end)

        node.answer = answer
        return node

    @property
    def honest(self) -> list[SimNode]:
        """Nodes that don't lie; those that would have, where nobody does."""
        return [node for node in self._swarm.living if node.id not in self.lying]

    def judged_nodes(self) -> list[SimNode]:
        """The honest."""
        return self.honest

    async def ended(self) -> None:
        """Judge each honest node."""
        for number, node in enumerate(self.honest):
            self.final += [
                self.judge(node, 1000 + number * JUDGED_EPISODES + one) for one in range(JUDGED_EPISODES)
            ]
            self.norms.append(float(np.linalg.norm(node.learner.now().astype(np.float64))))


def run(arguments: argparse.Namespace, strategy: str, rule: str, attack: str, seed: int) -> dict[str, Any]:
    """Train one swarm; return its row without commit and command."""
    import torch

    torch.set_num_threads(1)
    began_s = time.perf_counter()
    sets = [
        f"task.strategy.name={strategy}", f"task.strategy.mixing={rule}", f"task.seed={seed}",
        "task.stop.mean_return=none", f"task.stop.env_steps={arguments.env_steps}",
        f"task.evaluation.every={arguments.env_steps // 8}", *STRATEGIES[strategy], *arguments.sets,
    ]  # fmt: skip
    if strategy.startswith("server"):
        sets.append(f'task.strategy.pinned=["{0:032x}"]')
    task = resolve(files=[arguments.preset], sets=sets).config.task
    swarm = LyingSwarm(
        task, arguments.nodes, attack=attack, liars=arguments.liars, seed=seed, owner=arguments.owner
    )
    swarm.run(math.inf)
    honest = swarm.honest_at_end if hasattr(swarm, "honest_at_end") else swarm.honest
    struck = [peer for node in honest for peer in node.swarm.strikes]
    rounds = [one for node in honest for one in node.swarm.rounds]
    pairs = [one for one in rounds if one.outcome in ("ok", "answered") and len(one.merged) == 2]
    return {
        "preset": arguments.preset, "strategy": strategy, "rule": rule, "attack": attack,
        "nodes": arguments.nodes, "liars": 0 if attack == "none" else arguments.liars, "seed": seed,
        "owner": int(arguments.owner), "env_steps": arguments.env_steps,
        "final": round(statistics.mean(swarm.final), 1),
        "best": round(max(one.value for one in swarm.judged), 1),
        "norm": f"{statistics.mean(swarm.norms):.4g}",
        "strikes": sum(peer in swarm.lying for peer in struck),
        "wrong_strikes": sum(peer not in swarm.lying for peer in struck),
        "quarantined": sum(len(node.swarm.ever & swarm.lying) for node in honest),
        "clipped": "" if not pairs or strategy != "adpsgd" else round(
            statistics.mean(one.merged[1].weight < 0.4999 for one in pairs
                            if one.merged[1].peer not in swarm.lying), 3),
        "wall_s": round(time.perf_counter() - began_s, 1),
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Markdown: a line for each swarm, strategy and rule; for each attack its share of honest returns."""
    attacks = [attack for attack in ATTACKS if any(row["attack"] == attack for row in rows)]
    lines = [
        f"| liars | strategy | rule | {' | '.join(attacks)} |", "|" + "---|" * (3 + len(attacks)),
    ]  # fmt: skip
    groups: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        lying = f"{row['liars']} of {row['nodes']}" + (", owner" if row["owner"] == "1" else "")
        wanted = [lying] if row["attack"] != "none" else sorted(
            {f"{one['liars']} of {one['nodes']}" + (", owner" if one["owner"] == "1" else "")
             for one in rows if one["nodes"] == row["nodes"] and one["attack"] != "none"
             and one["strategy"] == row["strategy"] and one["rule"] == row["rule"]}
        )  # fmt: skip
        for one in wanted:
            cells = groups.setdefault((one, row["strategy"], row["rule"]), {})
            cells.setdefault(row["attack"], []).append(float(row["final"]))
    for key, cells in groups.items():
        honest = statistics.mean(cells["none"]) if "none" in cells else None
        words = []
        for attack in attacks:
            if attack not in cells:
                words.append("")
                continue
            value = statistics.mean(cells[attack])
            share = "" if honest is None or attack == "none" else f" ({value / honest:.0%})"
            words.append(f"{value:.0f}{share}")
        lines.append(f"| {' | '.join((*key, *words))} |")
    return lines


def main() -> int:
    """Run what is missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="cartpole")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rules", nargs="+", choices=("mean", "clipped", "trimmed"), default=["clipped"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[51])
    parser.add_argument("--env-steps", type=int, default=160_000, help="of all nodes together")
    parser.add_argument("--owner", action="store_true", help="who hands out results lies")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("docs/results/liars"))
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    try:
        resolve(files=[arguments.preset], sets=arguments.sets)
    except ConfigError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = Rows(arguments.out / "runs.csv", FIELDS)
    if not arguments.table_only:
        told = {"commit": commit(), "command": command_line()}
        key = ("strategy", "rule", "attack", "seed", "nodes", "preset", "owner")
        for seed in arguments.seeds:
            for strategy in arguments.strategies:
                for rule in arguments.rules:
                    for attack in arguments.attacks:
                        wanted = (strategy, rule, attack, str(seed), str(arguments.nodes), arguments.preset,
                                  str(int(arguments.owner)))  # fmt: skip
                        if wanted in {tuple(row[one] for one in key) for row in file.read()}:
                            continue
                        row = run(arguments, strategy, rule, attack, seed)
                        file.add(row | told)
                        print(
                            {name: row[name] for name in FIELDS if name in row}, file=sys.stderr, flush=True
                        )
    lines = table(file.read())
    print("\n".join(lines))
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
