"""A member that holds the key and sends anything at all: the daemon lives on, and counts it; and one that
would command the swarm.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import pkgutil
import random
import time
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import read_swarm_keys, write_operator_key, write_swarm_key
from p2pdrl.cli.main import cli, run_command
from p2pdrl.clock import SystemClock
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.errors import P2PDRLError, TransportError
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.messages import ROUTES as SWIM
from p2pdrl.membership.messages import Ack, GossipMessage, JoinRequest, encode
from p2pdrl.membership.operators import OperatorsSetting
from p2pdrl.membership.records import (
    Incarnation,
    MemberRecord,
    Suspicion,
    SwarmRecord,
    sign_member,
    sign_suspicion,
    sign_swarm_record,
)
from p2pdrl.node.accounting import metrics_gossip
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting
from p2pdrl.node.state import state_transfer
from p2pdrl.node.status import traces
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import ROUTES as STRATEGY
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address, Reply
from p2pdrl.versions import SPOKEN

PACE = ["--set", "node.learner.max_updates_per_s=10", "--set", "task.algorithm.unroll_steps=16"]
SLOW = ["--set", "node.learner.max_updates_per_s=2", "--set", "task.algorithm.unroll_steps=16"]
SETTINGS = {
    "operators": OperatorsSetting,
    "mode": ModeSetting,
    "stop": StopSetting,
    "halt": HaltSetting,
    "pause": PauseSetting,
}
JUNK: list[Any] = [
    *(None, True, 0, -1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, math.nan, math.inf, -math.inf, 5e-324, ""),
    *("x" * 300, "\x00\x1b[2J<script>", "é" * 64, b"", b"\xff" * 300, [], {}, [[[]]], {"a": {"b": []}}),
]
DEEP = b"\x91" * 5000 + b"\xc0"


def structs() -> list[type[msgspec.Struct]]:
    """Every struct of the package: messages, records, reports, settings, configurations."""
    found: set[type[msgspec.Struct]] = set()
    for folder in ("membership", "node", "strategies", "config", "transport", "workers"):
        package = importlib.import_module(f"p2pdrl.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                held = vars(importlib.import_module(module.name)).values()
            except ImportError:
                continue
            found |= {kind for kind in held if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    found.discard(msgspec.Struct)
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


class Fuzzer:
    """Values that a type allows, at its edges; now and then one that it doesn't."""

    def __init__(self, seed: int, *, ids: list[str], lineage: str) -> None:
        self.rng = random.Random(seed)
        self.ids, self.lineage = ids, lineage
        self.junk = 0.02

    def value(self, kind: Any, name: str = "", depth: int = 0) -> Any:
        rng = self.rng
        if rng.random() < self.junk:
            return rng.choice(JUNK)
        origin, arguments = get_origin(kind), get_args(kind)
        bounds = {}
        if origin is Annotated:
            for meta in arguments[1:]:
                if isinstance(meta, msgspec.Meta):
                    bounds |= {key: getattr(meta, key) for key in ("ge", "gt", "le", "lt", "max_length")}
            kind, origin, arguments = arguments[0], get_origin(arguments[0]), get_args(arguments[0])
        if origin in (Union, types.UnionType):
            return self.value(rng.choice(arguments), name, depth)
        if origin is Literal:
            return rng.choice(arguments)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self.struct(kind, depth + 1)
        if origin in (tuple, list, set, frozenset) or kind in (tuple, list):
            count = 0 if depth > 4 else rng.choice((0, 1, 1, 2, 5))
            inner = arguments[0] if arguments else int
            return [self.value(inner, name, depth + 1) for _ in range(count)]
        if origin is dict or kind is dict:
            inner = arguments or (str, int)
            keys = [] if depth > 4 else [str(self.value(str, "key", depth + 1)) for _ in range(2)]
            return {key: self.value(inner[1], name, depth + 1) for key in keys}
        if kind is Incarnation:
            return [int(time.time() * 1000) + rng.choice((0, 1, 10**9)), rng.choice((0, 1, 2**52))]
        return self.plain(kind, name, bounds)

    def plain(self, kind: Any, name: str, bounds: dict[str, Any]) -> Any:
        rng = self.rng
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            low = bounds.get("ge") if bounds.get("ge") is not None else bounds.get("gt")
            high = bounds.get("le") if bounds.get("le") is not None else bounds.get("lt")
            low, high = (-(2**62) if low is None else int(low)), (2**62 if high is None else int(high))
            return rng.choice((low, low + 1, 1, 2, 100, max(low, high - 1)))
        if kind is float:
            edges = [bounds[key] for key in ("ge", "gt", "le", "lt") if bounds.get(key) is not None]
            wild = (1e300, -1e300, -1.0, math.inf, math.nan) if rng.random() < 5 * self.junk else ()
            return rng.choice((*edges, *edges, 0.0, -0.0, 1.0, 0.5, 1e-300, *wild))
        if kind is bytes:
            return rng.choice((b"", b"\x00" * 16, b"\x00" * 32, DEEP[:200], b"\xc1", rng.randbytes(40)))
        if kind is str:
            given = [*self.ids, self.lineage, "", "x", "mode", "0" * 32, "0" * 64, "a\nb", "é" * 20, "1:2"]
            return self.lineage if "lineage" in name and rng.random() < 0.7 else rng.choice(given)
        return rng.choice(JUNK)

    def struct(self, kind: type[msgspec.Struct], depth: int = 0) -> Any:
        info = kind.__struct_config__
        hints = msgspec._utils.get_class_annotations(kind)  # noqa: SLF001 (resolves what the structs' modules name)
        values = {name: self.value(hints[name], name, depth) for name in kind.__struct_fields__}
        if info.array_like:
            return ([] if info.tag is None else [info.tag]) + list(values.values())
        named = dict(zip(kind.__struct_encode_fields__, values.values(), strict=True))
        if self.rng.random() < 0.3:
            named.pop(self.rng.choice(list(named)), None) if named else None
        return named if info.tag is None else {info.tag_field: info.tag, **named}

    def encoded(self, kind: type[msgspec.Struct]) -> bytes:
        self.junk = self.rng.choice((0.0, 0.0, 0.003, 0.02))
        data = msgspec.msgpack.encode(self.struct(kind))
        if self.rng.random() < 0.1 and data:
            at = self.rng.randrange(len(data))
            data = data[:at] + self.rng.randbytes(1) + data[at + 1 :]
        return data[: self.rng.randrange(len(data) + 1)] if self.rng.random() < 0.05 else data


class Liar:
    """A member in good standing, as far as probes go."""

    def __init__(self, victim: Any, seed: int) -> None:
        status = victim.status()
        self.identity = Identity(random.Random(seed).randbytes(32))
        self.swarm_id, self.lineage, self.victim_id = status["swarm_id"], status["lineage"], status["id"]
        self.to = Address("127.0.0.1", victim.port)
        self.fuzz = Fuzzer(seed, ids=[self.identity.node_id, self.victim_id], lineage=self.lineage)
        self.rng = random.Random(seed)
        self.transport = HttpTransport(self.identity.node_id, self.swarm_id, None, clock=SystemClock())
        self.boot = int(time.time() * 1000)
        self.epoch = 1
        self.kinds = structs()
        self.sent = self.refused = self.asked = 0

    def record(self, **changes: Any) -> MemberRecord:
        given = {
            "id": self.identity.node_id, "public_key": self.identity.public_key, "name": "liar",
            "address": str(self.own), "incarnation": Incarnation(self.boot, 0), "state": "alive",
            "tags": {}, "protocol": SPOKEN.oldest,
        }  # fmt: skip
        return sign_member(self.identity, self.swarm_id, MemberRecord(**(given | changes)))

    async def send(self, route: str, meta: bytes, vector: bytes = b"", lane: str = "probe") -> None:
        self.sent += 1
        view = memoryview(vector) if vector else None
        try:
            await self.transport.call(self.to, None, route, meta, vector=view, deadline_s=5.0, lane=lane)
        except TransportError:
            self.refused += 1

    async def records(self) -> None:
        """Signed in our own name: every key of a setting, keys that don't exist, every kind of value."""
        made: list[Any] = []
        for _ in range(4):
            self.epoch += 1
            key = self.rng.choice((*SETTINGS, *SETTINGS, f"junk{self.epoch}"))
            value = self.fuzz.encoded(SETTINGS.get(key, ModeSetting))
            if self.rng.random() < 0.2:
                value = self.rng.choice((DEEP, b"", b"\xc1", msgspec.msgpack.encode(self.rng.choice(JUNK))))
            if key == "mode" and self.rng.random() < 0.8:
                value = msgspec.msgpack.encode({"mode": "x", "strategy": self.strategy()})
            if key == "stop":  # one that is met ends the rest of the test
                stop = {"env_steps": self.rng.choice((0, 2**52)), "mean_return": self.fuzz.value(float)}
                value = msgspec.msgpack.encode({"stop": stop, "founded_at": self.fuzz.value(float)})
            plain = SwarmRecord(
                key, self.epoch, self.identity.node_id, value[:8192], self.identity.public_key,
                lineage=self.rng.choice((self.lineage, self.lineage, "", "other")),
            )  # fmt: skip
            made.append(sign_swarm_record(self.identity, self.swarm_id, plain))
        for verdict in ("suspect", "dead"):
            about = Suspicion(
                self.rng.choice((self.victim_id, "9" * 32)), Incarnation(self.boot, 2**40),
                self.identity.node_id, verdict, self.rng.choice(("", "x" * 200, "\x1b[2J")),
            )  # fmt: skip
            made.append(sign_suspicion(self.identity, self.swarm_id, about))
        made.append(self.record(incarnation=Incarnation(self.boot, self.epoch), tags={"a": "\x00"}))
        for record in made:
            gossip = GossipMessage(Incarnation(self.boot, self.epoch), (record,))
            await self.send("swim/gossip", msgspec.msgpack.encode(gossip))

    def strategy(self) -> dict[str, Any]:
        """Some strategy's defaults with one or two options at an edge, so that most can be followed."""
        kind = self.rng.choice(get_args(StrategyConfig))
        options: dict[str, Any] = msgspec.to_builtins(kind())
        self.fuzz.junk = 0.01
        hints = msgspec._utils.get_class_annotations(kind)  # noqa: SLF001 (resolves what the structs' modules name)
        for name in self.rng.sample(sorted(hints), min(len(hints), self.rng.choice((0, 1, 2)))):
            if name in options:
                options[name] = self.fuzz.value(hints[name], name)
        return options

    async def forged(self) -> None:
        """A record whose signature isn't its own."""
        plain = SwarmRecord(
            "pause", 1, self.identity.node_id, b"\xc3", self.identity.public_key, lineage=self.lineage
        )
        signed = sign_swarm_record(self.identity, self.swarm_id, plain)
        gossip = GossipMessage(Incarnation(self.boot, 0), (msgspec.structs.replace(signed, epoch=2),))
        await self.send("swim/gossip", msgspec.msgpack.encode(gossip))

    async def messages(self) -> None:
        """Every kind of struct to the routes that may take it, and to one that doesn't."""
        own: dict[str, type[msgspec.Struct]] = {**SWIM, metrics_gossip.ROUTE: metrics_gossip.MetricsExchange}
        for route, kind in own.items():
            for _ in range(6):
                await self.send(route, self.fuzz.encoded(kind))
        for route in (*STRATEGY, state_transfer.ROUTE, traces.ROUTE, metrics_gossip.ROUTE):
            for kind in self.rng.sample(self.kinds, 12):
                vector = self.rng.randbytes(self.rng.choice((0, 0, 4, 400)))
                await self.send(route, self.fuzz.encoded(kind), vector, self.rng.choice(("probe", "bulk")))
            await self.send(route, self.rng.choice((DEEP, b"", b"\xc1", b"\xdd\xff\xff\xff\xff")))
        try:
            meta = self.fuzz.encoded(self.rng.choice(self.kinds))[:1000]
            pipe = await self.transport.open_pipe(self.to, self.victim_id, PIPE_ROUTE, meta, deadline_s=3.0)
            pipe.close()
        except TransportError:
            self.refused += 1

    async def answer(self, incoming: Any) -> Reply:
        """What the victim asks of us is answered as badly."""
        self.asked += 1
        if incoming.route.startswith("swim/") and self.rng.random() < 0.9:
            return Reply(encode(Ack(Incarnation(self.boot, self.epoch))))
        return Reply(self.fuzz.encoded(self.rng.choice(self.kinds)))

    async def rage(self, rounds: int) -> None:
        from aiohttp import web

        app = web.Application()
        for route in (*SWIM, *STRATEGY, state_transfer.ROUTE, traces.ROUTE, metrics_gossip.ROUTE):
            self.transport.serve(route, self.answer, max_meta_bytes=1 << 20, max_vector_bytes=1 << 20)
        self.transport.mount(app)
        listener = Listener(self.transport.limits, SystemClock(), self.transport.counters)
        await self.transport.start()
        self.own = await listener.listen(
            app, "127.0.0.1", 0, port_is_default=False, has_key=False, insecure=False
        )
        try:
            await self.send("swim/join", msgspec.msgpack.encode(JoinRequest(self.record(), b"")))
            await self.forged()
            for _ in range(rounds):
                await self.records()
                await self.messages()
        finally:
            await self.transport.close()
            await listener.close()


def figure(victim: Any, name: str) -> float:
    lines = victim.get("/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"p2pdrl_{name}"))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_member_that_sends_anything_ends_nobody(swarm, wait_until, seed):
    victim = swarm.start("victim", *PACE, "--set", f"node.seed={seed}", "--set", "node.keep_running=true")
    swarm.training(victim)
    before = figure(victim, "records_refused_total")
    liar = Liar(victim, seed)
    asyncio.run(liar.rage(rounds=8))
    assert victim.process.poll() is None, victim.text()[-3000:]
    wait_until(lambda: victim.status().get("state"), 20, "it answers")
    text = victim.text()
    assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:4000]
    assert "the handler failed" not in text
    assert liar.refused > liar.sent / 2
    assert figure(victim, "records_refused_total") > before
    other = swarm.start("other", "--set", "node.learner.max_updates_per_s=10", peers=victim)
    wait_until(lambda: other.events("joined"), 60, "others still join:\n")


class Operated:
    """Nodes of a swarm with one operator, and its command line."""

    def __init__(self, swarm: Any, folder: Any, capfd: Any) -> None:
        self.swarm, self.capfd = swarm, capfd
        self.key = folder / "swarm.key"
        self.operator_file = folder / "swarm.key.operator"
        self.operator = write_operator_key(self.operator_file, "alice").public
        write_swarm_key(self.key, [self.operator])
        (self.swarm_key,) = read_swarm_keys(self.key).good(time.time())
        self.nodes: list[Any] = []

    def start(self, name: str, **given: Any) -> Any:
        options = [*SLOW, "--swarm-key-file", str(self.key), "--set", "task.stop.env_steps=100000000"]
        options += ["--set", "node.open_metrics=true"]
        node = self.swarm.start(name, *options, peers=self.nodes[0] if self.nodes else None, **given)
        self.nodes.append(node)
        return node

    def run(self, *words: str) -> tuple[int, str]:
        self.capfd.readouterr()
        where = ["--api", self.nodes[0].api, "--swarm-key-file", str(self.key)]
        code = run_command(cli, "p2pdrl", [*words, *where])
        return code, "".join(self.capfd.readouterr())


def trains(node: Any) -> bool:
    """By its log: reading its API wants the key."""
    return any(event["kind"] == "training" for event in node.told())


def members(node: Any) -> dict[str, str]:
    return {row["name"]: row["state"] for row in node.ask("/v1/peers")}


def refuses_who_only_holds_the_key(operated: Operated, node: Any) -> None:
    """What key and token don't allow, in words; `scripts/attack.py` plays forged records."""
    with pytest.raises(P2PDRLError, match="the swarm's key alone changes nothing"):
        NodeClient(Address("127.0.0.1", node.port), swarm_key=operated.swarm_key).post("/v1/leave")
    with pytest.raises(P2PDRLError, match="commanded by its operators alone"):
        node.post("/v1/pause?scope=swarm")


def test_who_holds_the_key_commands_nobody_and_an_operator_does(swarm, tmp_path, wait_until, capfd):
    operated = Operated(swarm, tmp_path, capfd)
    node = operated.start("a")
    wait_until(lambda: trains(node) and len(node.ask("/v1/records")["records"]) == 2, 120, "it founds")
    refuses_who_only_holds_the_key(operated, node)
    operated.operator_file.rename(tmp_path / "elsewhere")
    code, said = operated.run("mode", "set", "local")
    assert code == 1
    assert "only operators command this swarm (operator alice" in said
    assert f"none is at {operated.operator_file}, where it is looked for" in said
    code, said = operated.run("mode", "set", "local", "--operator", str(tmp_path / "elsewhere"))
    assert code == 0, said
    assert f"mode is local by {operated.operator.words}" in node.text()
    commands = {one["key"]: one for one in node.ask("/v1/status")["commands"]}
    assert (commands["mode"]["operator"], commands["stop"]["operator"]) == ("alice", None)
    assert abs(commands["mode"]["at"] - time.time()) < 60
    (tmp_path / "elsewhere").rename(operated.operator_file)
    assert operated.run("halt", "--reason", "enough")[0] == 0
    assert node.wait(60) == 0, node.text()[-2000:]
    assert f"the swarm is done: halted by {operated.operator.words}: enough" in node.text()


@pytest.mark.slow
def test_operators_command_three_nodes_and_ban_one(swarm, tmp_path, wait_until, capfd):
    operated = Operated(swarm, tmp_path, capfd)
    a = operated.start("a")
    wait_until(lambda: trains(a), 120, "a founds")
    b, c = operated.start("b"), operated.start("c")
    three = [a, b, c]
    wait_until(lambda: trains(b) and trains(c), 120, "all train")
    wait_until(lambda: all(list(members(node).values()) == ["alive"] * 3 for node in three), 60, "all met")
    wait_until(lambda: all(len(node.ask("/v1/records")["records"]) == 2 for node in three), 60, "settled")
    refuses_who_only_holds_the_key(operated, a)
    code, said = operated.run("mode", "set", "local", "--wait", "60")
    assert code == 0, said
    wait_until(lambda: f"mode is local by {operated.operator.words}" in c.text(), 30, "c follows")
    assert operated.run("pause", "--swarm")[0] == 0
    wait_until(lambda: all(node.ask("/v1/status")["state"] == "paused" for node in three), 30, "all pause")
    assert operated.run("resume", "--swarm")[0] == 0
    code, said = operated.run("peers", "ban", "c", "--reason", "floods")
    assert code == 0, said
    assert c.wait(60) == 2
    assert f"this node is banned from this swarm by {operated.operator.words}: floods" in c.text()
    wait_until(lambda: [members(node).get("c") for node in (a, b)] == ["banned"] * 2, 30, "both hold it so")
    again = operated.start("again", data=c.data)
    assert again.wait(90) == 2
    assert f"doesn't take this node in: banned from this swarm by {operated.operator.words}" in again.text()
    code, said = operated.run("peers", "unban", "c")
    assert code == 0, said
    last = operated.start("last", data=c.data)
    wait_until(lambda: trains(last), 120, "it is taken again")
    wait_until(lambda: all(members(node).get("last") == "alive" for node in (a, b)), 60, "and a member")
    assert operated.run("halt", "--reason", "enough")[0] == 0
    for node in (a, b, last):
        assert node.wait(60) == 0, node.text()[-2000:]
        assert f"the swarm is done: halted by {operated.operator.words}: enough" in node.text()
