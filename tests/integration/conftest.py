"""Real nodes as real processes, started as a person would start them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import pytest

from p2pdrl.api.client import NodeClient
from p2pdrl.errors import P2PDRLError
from p2pdrl.node.accounting.exchanges import GOOD
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes
from p2pdrl.transport.protocol import Address

Json = Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.1) -> Any:
    """Poll until ``condition`` is truthy; return what it gave."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(every_s)
    raise AssertionError(f"after {timeout_s} s still not: {what}")


@dataclass
class RealNode:
    """One ``p2pdrl node`` process."""

    name: str
    port: int
    data: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def api(self) -> str:
        return f"127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 5.0) -> bytes | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except OSError:
            return None
        except http.client.HTTPException:
            return None
        finally:
            connection.close()
        return body if answer.status == 200 else None

    def json(self, path: str) -> Json:
        body = self.get(path)
        return None if body is None else json.loads(body)

    def status(self) -> Json:
        return self.json("/v1/status") or {}

    def peers(self) -> Json:
        return self.json("/v1/peers") or []

    def view(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.peers()}

    def events(self, kind: str = "") -> list[Json]:
        found = self.json("/v1/events?follow=0") or []
        return [event for event in found if kind in ("", event["kind"])]

    def set_mode(self, mode: str, *options: str) -> Json:
        """Propose another mode through this node; return the record's epoch and proposer."""
        query = urlencode([("mode", mode), *(("set", option) for option in options)])
        return self.post(f"/v1/mode?{query}")

    def ask(self, path: str) -> Json:
        """What the node's owner may read of one whose swarm has a key."""
        return NodeClient(Address("127.0.0.1", self.port), data_dir=self.data).get(path)

    def post(self, path: str) -> Json:
        """Do what a command would; raises `P2PDRLError` where the node doesn't."""
        return NodeClient(Address("127.0.0.1", self.port), data_dir=self.data).post(path)

    def hold(self) -> None:
        """Pause the swarm as soon as this node, which just starts, takes commands."""

        def held() -> bool:
            try:
                self.post("/v1/pause?scope=swarm")
            except P2PDRLError:  # it is still starting
                return False
            return True

        wait_until(held, 60, f"{self.name} can be held:\n{self.text()[-3000:]}", every_s=0.02)

    def summary(self) -> Json:
        """The account of its run that a node left as it ended."""
        return json.loads((self.data / "summary.json").read_bytes())

    def told(self) -> list[Json]:
        """Events in its log, which outlives it."""
        lines = (line for line in self.text().splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if "kind" in event]

    def rounds_in(self, protocol: str) -> int:
        """Rounds of a strategy that went well here, over this boot."""
        account = self.status().get("accounting", {}).get(protocol, {})
        return sum(account.get("rounds", {}).get(word, 0) for word in GOOD)

    def checkpoint(self) -> Checkpoint:
        body = self.get("/v1/checkpoint", timeout_s=20)
        assert body is not None, f"{self.name} gave no checkpoint"
        return from_bytes(body)

    def params(self) -> np.ndarray:
        return np.asarray(self.checkpoint().params, np.float64)

    def learner_pid(self) -> int | None:
        learner = self.status().get("learner") or {}
        return learner.get("pid")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill9(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class RealSwarm:
    """Starts nodes and sees to it that none outlives the test."""

    folder: Path
    nodes: list[RealNode] = field(default_factory=list)

    @property
    def temporary(self) -> Path:
        """The nodes' folder for temporary files."""
        return self.folder / "tmp"

    def start(
        self,
        name: str,
        *arguments: str,
        peers: RealNode | None = None,
        data: Path | None = None,
        port: int | None = None,
        env: dict[str, str] | None = None,
    ) -> RealNode:
        port = port or free_port()
        data = data or self.folder / name
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", "p2pdrl", "node", "--data-dir", str(data)]
        command += [] if any("node.name=" in argument for argument in arguments) else ["--name", name]
        command += ["--listen", f"127.0.0.1:{port}"]
        command += ["--peers", peers.api] if peers is not None else []
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=out,
                stderr=out,
                env=os.environ | {"TMPDIR": str(self.temporary)} | (env or {}),
            )
        node = RealNode(name, port, data, process, log)
        self.nodes.append(node)
        return node

    def start_team(self, count: int, options: dict[str, object]) -> list[RealNode]:
        """Start ``n0``, ``n1``, …, each with another seed, and wait until all train."""
        nodes: list[RealNode] = []
        for seed in range(count):
            own = [f"--set={key}={value}" for key, value in (options | {"node.seed": seed}).items()]
            nodes.append(self.start(f"n{seed}", *own, peers=nodes[0] if nodes else None))
        self.training(*nodes, timeout_s=90)
        return nodes

    def training(self, *nodes: RealNode, timeout_s: float = 60.0) -> None:
        """Wait until these train."""
        for node in nodes or self.nodes:
            wait_until(
                lambda node=node: node.status().get("state") == "training",
                timeout_s,
                f"{node.name} trains:\n{node.text()[-3000:]}",
            )

    def found(self, name: str, *arguments: str, **given: Any) -> RealNode:
        """Start a node and wait until it has founded: of two that start at once, either may."""
        node = self.start(name, *arguments, **given)
        wait_until(
            lambda: node.process.poll() is not None or node.events("founded") or node.events("resumed-swarm"),
            60,
            f"{name} founds:\n{node.text()[-3000:]}",
        )
        assert node.process.poll() is None, node.text()[-3000:]
        return node

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                for child in node.children():
                    child.kill()
                node.signal(signal.SIGCONT)
                node.kill9()


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    made = RealSwarm(tmp_path)
    made.temporary.mkdir()
    yield made
    made.close()


@pytest.fixture
def no_orphans(swarm: RealSwarm) -> Iterator[None]:
    """Fail when a process, a shared memory segment or a temporary file of the swarm is left behind."""
    segments = set(Path("/dev/shm").iterdir())
    yield
    wait_until(lambda: not _processes(swarm), 5, f"all processes ended, but there is {_processes(swarm)}")
    left = [path for path in set(Path("/dev/shm").iterdir()) - segments if "p2pdrl" in path.name]
    temporary = [path for path in swarm.temporary.iterdir() if not path.name.startswith("torchinductor_")]
    left += [*temporary, *swarm.folder.rglob("*.tmp"), *swarm.folder.rglob(".*.tmp*")]  # torch keeps a cache
    assert not left, f"left behind: {left}"


def _processes(swarm: RealSwarm) -> list[str]:
    parents = {f"--parent {node.process.pid}" for node in swarm.nodes}
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [
        line
        for line in lines
        if str(swarm.folder) in line or any(line.endswith(parent) for parent in parents)
    ]


class Recovery:
    """Watches survivors from the moment before a member is lost until all have gone on.

    Args:
        nodes: who survives.
        victim: who is lost.
        protocol: the strategy whose rounds count.
    """

    def __init__(self, nodes: list[RealNode], victim: RealNode, protocol: str) -> None:
        self.nodes, self.protocol = nodes, protocol
        self.victim, self.id = victim, victim.status()["id"]
        self.pids = {node.name: (node.process.pid, node.learner_pid()) for node in nodes}
        self.before = {node.name: node.status() for node in nodes}
        self.lost_at = 0.0
        self.again_at: dict[str, float] = {}
        self.known_at: dict[str, float] = {}
        self.after: dict[str, Json] = {}

    def lose(self, how: Callable[[], None]) -> None:
        """Lose the member by ``how``."""
        how()
        self.lost_at = time.time()

    def known(self, node: RealNode) -> float | None:
        """Wall time at which ``node`` told of the loss: of a suspicion, or of a group without the member."""
        for event in node.events():
            about = event.get("peer") == self.id or event.get("member") == self.id or self.id in str(event)
            grouped = event["kind"] == "group" and self.victim.name not in event["text"].split(": ")[-1]
            if event["time"] > self.lost_at and (grouped or (about and "member" in event["kind"])):
                return float(event["time"])
        return None

    def wait(self, timeout_s: float) -> dict[str, float]:
        """Wait until all make updates in rounds again; return the seconds from the knowledge to that."""
        rounds: dict[str, int] = {}
        updates: dict[str, int] = {}
        end = time.time() + timeout_s
        while len(self.again_at) < len(self.nodes):
            assert time.time() < end, f"still not all go on: {self.again_at}\n" + "\n".join(
                f"{node.name}: {node.text()[-1500:]}" for node in self.nodes
            )
            for node in self.nodes:
                if node.name in self.again_at:
                    continue
                if node.name not in self.known_at:
                    known = self.known(node)
                    if known is None:
                        continue
                    self.known_at[node.name] = known
                    rounds[node.name], updates[node.name] = (
                        node.rounds_in(self.protocol),
                        node.status()["updates"],
                    )
                now = node.rounds_in(self.protocol), node.status()["updates"]
                if now[0] > rounds[node.name] and now[1] > updates[node.name]:
                    self.again_at[node.name] = time.time()
            time.sleep(0.05)
        self.after = {node.name: node.status() for node in self.nodes}
        return {name: round(at - self.known_at[name], 2) for name, at in self.again_at.items()}

    def nothing_lost(self) -> None:
        """Nobody was started anew, and no count or version went back."""
        for node in self.nodes:
            before, after = self.before[node.name], self.after[node.name]
            assert (node.process.pid, after["learner"]["pid"]) == self.pids[node.name]
            assert after["learner"]["restarts"] == 0
            for key in ("env_steps", "updates", "policy_version"):
                assert after[key] >= before[key], (node.name, key, before[key], after[key])


@pytest.fixture
def small_updates() -> dict[str, object]:
    """Options of nodes that make five small updates a second."""
    return {
        "task.env.num_envs": 4,
        "task.algorithm.unroll_steps": 32,
        "task.algorithm.epochs": 1,
        "task.algorithm.minibatches": 1,
        "node.learner.max_updates_per_s": 5,
        "node.checkpoint.every_s": 0,
    }


@pytest.fixture
def make_recovery() -> Callable[..., Recovery]:
    return Recovery
