"""Attacks a live swarm in every way that docs/SECURITY.md answers, and sees that nothing changes.

Three nodes that train CartPole with a swarm key and an operator are started on loopback; then each row of
the table is played against them: as a stranger, as a web page, as a member that lies, and as a member in
another's name. After each row all of this has to hold: the answers are those of the table; parameters
(nothing is learned, the learning rate is 0), the swarm's records, lineage, mode and members are what they
were; a counter in ``/metrics`` went up where the row says so; memory grew by less than 20 MB; no log holds a
traceback; no answer holds a secret.

    python scripts/attack.py                    # all rows, about two minutes
    python scripts/attack.py --rows vectors     # those whose name holds that
    python scripts/attack.py --quick --json     # those that take a few seconds, as JSON

Exit code 0 if every row held, else 1. Nothing but loopback is ever dialled.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.client
import json
import pickle
import random
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from aiohttp import web

from p2pdrl.api.keyfile import read_operator_key, read_swarm_keys, write_operator_key, write_swarm_key
from p2pdrl.clock import SystemClock
from p2pdrl.config.strategy import LocalConfig
from p2pdrl.config.task import StopConfig
from p2pdrl.errors import P2PDRLError, PeerRefusedError, TransportError
from p2pdrl.group.compatibility import Summary
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.messages import Ack, GossipMessage, JoinRequest, Ping, encode
from p2pdrl.membership.operators import Ban, BansSetting, Operator, OperatorsSetting
from p2pdrl.membership.records import (
    Incarnation,
    MemberRecord,
    Suspicion,
    SwarmRecord,
    sign_member,
    sign_suspicion,
    sign_swarm_record,
)
from p2pdrl.node.accounting.counters import Counts, NodeCounts
from p2pdrl.node.accounting.evaluations import Evaluation
from p2pdrl.node.accounting.facts import FactSigner, SignedFact
from p2pdrl.node.accounting.metrics_gossip import ROUTE as METRICS
from p2pdrl.node.accounting.report_table import PeerReport, ReportRow
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting, stamp
from p2pdrl.strategies.gossip.adpsgd import ExchangeHead
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes
from p2pdrl.tensors.moments import Moments
from p2pdrl.transport.auth import (
    OPERATOR_HEADER,
    format_time,
    new_nonce,
    operator_payload,
    sign_api,
)
from p2pdrl.transport.http.headers import RequestHead
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply
from p2pdrl.versions import SPOKEN
from support.local_swarm import LocalSwarm, Node, free_ports

OPTIONS = {
    "task.algorithm.learning_rate": 0,
    "task.algorithm.unroll_steps": 8,
    "task.algorithm.minibatches": 1,
    "task.env.num_envs": 1,
    "task.strategy.compression": "none",
    "task.stop.env_steps": 10**12,
    "node.learner.max_updates_per_s": 2,
    "node.checkpoint.every_s": 0,
}
GROWTH_BYTES = 20e6
ANSWER_S = 0.5
"""An honest probe is answered within this during a flood."""
BUSY = 423
"""It is in an exchange with somebody else."""
SLOW_S = 10.0
"""A connection that is slow is closed within this."""
INVENTED = 10_000
VOUCHED = 40
"""So many newcomers may be held alive on one member's word, until they are found not to answer."""
TABLES = {"abuse": "what is sent", "trust": "who says and commands what"}


@dataclass
class Row:
    """One row of the tables.

    Attributes:
        name: what is sent, in a few words.
        attacker: "stranger", "web page", "member" or "member in another's name".
        answer: what stands against it, in words.
        counts: whether a counter of refusals has to go up.
        quick: whether it is one of ``--quick``.
    """

    table: str
    name: str
    attacker: str
    answer: str
    play: Callable[[Siege], Awaitable[None]]
    counts: bool = True
    quick: bool = True
    failures: list[str] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0


ROWS: list[Row] = []


def row(
    table: str, name: str, attacker: str, answer: str, *, counts: bool = True, quick: bool = True
) -> Callable[[Callable[[Siege], Awaitable[None]]], Callable[[Siege], Awaitable[None]]]:
    """Add a row, played in the order of this file."""

    def add(play: Callable[[Siege], Awaitable[None]]) -> Callable[[Siege], Awaitable[None]]:
        ROWS.append(Row(table, name, attacker, answer, play, counts, quick))
        return play

    return add


class Member:
    """Holds the swarm's key, proves its own id, and answers probes as long as it is told to.

    Args:
        name: as it calls itself.
        siege: whose swarm it is a member of.
        claims: the id that it sends in place of its own.
        swarm_id: told in place of the swarm's.
        keys: held in place of the swarm's.
    """

    def __init__(
        self,
        siege: Siege,
        *,
        name: str = "liar",
        claims: str | None = None,
        swarm_id: str | None = None,
        keys: list[bytes] | None = None,
    ) -> None:
        self.siege, self.name = siege, name
        self.identity = Identity(random.randbytes(32))
        self.id = self.identity.node_id
        self.tls = self.identity.tls(keys or [siege.key])
        self.transport = HttpTransport(
            claims or self.id, swarm_id or siege.swarm_id, self.tls, clock=SystemClock()
        )
        self.boot = int(time.time() * 1000)
        self.address = Address("127.0.0.1", 1)
        self._listener: Listener | None = None
        self.answer: Callable[[Incoming], Awaitable[Reply]] = self._ack

    async def __aenter__(self) -> Member:
        await self.transport.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()
        if self._listener is not None:
            await self._listener.close()

    async def _ack(self, incoming: Incoming) -> Reply:
        return Reply(encode(Ack(Incarnation(self.boot, 0), (self.record(),))))

    async def join(self) -> None:
        """Become a member as far as probes go, of the first node's view."""
        app = web.Application()

        async def answered(incoming: Incoming) -> Reply:
            return await self.answer(incoming)

        for route in ("swim/ping", "swim/gossip", "swim/sync", "swim/delta", METRICS, "exchange", "state"):
            self.transport.serve(route, answered, max_meta_bytes=1 << 20, max_vector_bytes=1 << 20)
        self.transport.mount(app)
        self._listener = Listener(self.transport.limits, SystemClock(), self.transport.counters)
        self.address = await self._listener.listen(app, "127.0.0.1", 0, has_key=True)
        await self.send("swim/join", encode(JoinRequest(self.record(), b"")))
        until_s = time.monotonic() + 10.0
        while time.monotonic() < until_s:
            await self.send("swim/gossip", self.gossip(self.record()))
            if self.siege.view().get(self.id) == "alive":
                return
            await asyncio.sleep(0.2)

    def record(self, **changes: Any) -> MemberRecord:
        """Return our signed record."""
        given = {
            "id": self.id, "public_key": self.identity.public_key, "name": self.name,
            "address": str(self.address), "incarnation": Incarnation(self.boot, 0), "state": "alive",
            "tags": {}, "protocol": SPOKEN.oldest,
        }  # fmt: skip
        return sign_member(self.identity, self.siege.swarm_id, MemberRecord(**(given | changes)))

    def gossip(self, *records: MemberRecord | Suspicion | SwarmRecord) -> bytes:
        """Return a message that brings these."""
        return encode(GossipMessage(Incarnation(self.boot, 0), records))

    def setting(
        self,
        key: str,
        value: Any,
        epoch: int,
        *,
        lineage: str | None = None,
        signer: Identity | None = None,
        **forged: Any,
    ) -> SwarmRecord:
        """Return a setting of the swarm in our name, changed after it was signed."""
        by = signer or self.identity
        ours = "" if key in ("bans", "operators") else self.siege.lineage
        plain = SwarmRecord(
            key, epoch, by.node_id, msgspec.msgpack.encode(value), by.public_key,
            lineage=ours if lineage is None else lineage,
        )  # fmt: skip
        signed = sign_swarm_record(by, self.siege.swarm_id, plain)
        return msgspec.structs.replace(signed, **forged) if forged else signed

    async def send(
        self,
        route: str,
        meta: bytes,
        vector: memoryview | None = None,
        *,
        to: Node | None = None,
        target: str | None = None,
        lane: Any = "probe",
    ) -> int:
        """Send one message; return the status of the answer, 0 when there is none."""
        where = (to or self.siege.victim).address
        self.siege.sent += 1
        try:
            answer = await self.transport.call(
                where, target, route, meta, vector=vector, deadline_s=10.0, lane=lane
            )
        except PeerRefusedError as error:
            self.siege.answers.append(error.reason)
            return error.status
        except TransportError:
            return 0
        self.siege.answers.append(bytes(answer.meta).decode("latin-1"))
        return 200


@dataclass(frozen=True)
class State:
    """What no row may change, of one node."""

    params: str
    lineage: str
    mode: str
    state: str
    records: str
    members: frozenset[str]


class Siege:
    """The swarm under attack, and what was seen of it.

    Attributes:
        victim: the node that most is sent to.
        sent: messages and requests so far.
        answers: what came back in the row that is played.
    """

    def __init__(self, swarm: LocalSwarm, key_file: Path, operator_file: Path) -> None:
        self.swarm, self.key_file = swarm, key_file
        keys = read_swarm_keys(key_file)
        (self.key,) = keys.good(time.time())
        self.swarm_id = keys.swarm_id
        self.operator = read_operator_key(operator_file)
        self.nodes = list(swarm.nodes)
        self.victim = self.nodes[0]
        self.ids = {node.name: node.status()["id"] for node in self.nodes}
        self.lineage = str(self.victim.status()["lineage"])
        self.token = (self.victim.folder / "token").read_text().strip()
        self.sent = 0
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._secrets = self._all_secrets()

    def expect(self, got: object, *good: object, what: str) -> None:
        """Note a failure unless the answer is one of these."""
        if got not in good:
            self.failures.append(f"{what}: answered {got}, not {' or '.join(map(str, good))}")

    def demand(self, holds: object, what: str) -> None:
        """Note a failure unless it holds."""
        if not holds:
            self.failures.append(what)

    # What is seen of the swarm

    def view(self, node: Node | None = None) -> dict[str, str]:
        """Return members' states by id, as a node sees them."""
        return {one["id"]: one["state"] for one in (node or self.victim).client.get("/v1/peers")}

    def checkpoint(self, node: Node | None = None) -> Checkpoint:
        """Return a node's parameters and what goes with them."""
        room = BytesIO()
        (node or self.victim).client.download("/v1/checkpoint", room)
        return from_bytes(room.getvalue())

    def state(self, node: Node) -> State:
        """Return what mustn't change."""
        status, told = node.client.status(), node.client.get("/v1/records")
        records = [(one["key"], one["epoch"], one["by"]) for one in told["records"] if one["key"] != "halt"]
        own = set(self.ids.values())
        return State(
            params=str(self.checkpoint(node).meta["params_hash"]),
            lineage=str(status["lineage"]),
            mode=f"{status['mode']} {status['mode_epoch']}",
            state=str(status["state"]),
            records=json.dumps([sorted(records), told["operators"]], sort_keys=True, default=str),
            members=frozenset(
                one for one, state in self.view(node).items() if state == "alive" and one in own
            ),
        )

    def counted(self) -> float:
        """Return the sum of all nodes' counters of what they refused, ended or passed over."""
        names = ("refused_total", "records_refused_total", "facts_refused_total", "facts_held_total")
        names = (*names, "strikes_total", "connections_ended_total")
        pattern = re.compile(rf"^p2pdrl_(?:{'|'.join(names)})(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
        total = 0.0
        for node in self.nodes:
            room = BytesIO()
            node.client.download("/metrics", room)
            total += sum(float(value) for value in pattern.findall(room.getvalue().decode()))
        return total

    def memory(self) -> list[float]:
        """Return each daemon's resident bytes."""
        return [float(psutil.Process(node.process.pid).memory_info().rss) for node in self.nodes]

    def log(self, node: Node) -> str:
        """Return what a node has logged."""
        return (self.swarm.root / f"{node.name}.log").read_text(errors="replace")

    def _all_secrets(self) -> list[str]:
        signer = (self.key_file.parent / "swarm.key.operator").read_text().split()[0]
        found = [self.key.hex(), base64.b64encode(self.key).decode(), signer]
        for node in self.nodes:
            found.append((node.folder / "token").read_text().strip())
            raw = (node.folder / "identity.key").read_bytes()
            found += [raw.hex(), base64.b64encode(raw).decode()]
        return found

    def leaks(self, text: str) -> bool:
        """Tell whether a text holds a secret."""
        return any(secret in text for secret in self._secrets)

    # Raw requests

    async def ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: Any = None,
        *,
        to: Node | None = None,
        tls: ssl.SSLContext | None = None,
        chunked: bool = False,
    ) -> int:
        """Send one HTTP request; return the status, 0 when the connection broke."""
        return await asyncio.to_thread(
            self._ask, method, path, headers, body, to=to, tls=tls, chunked=chunked
        )

    def _ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None,
        body: Any,
        *,
        to: Node | None,
        tls: ssl.SSLContext | None,
        chunked: bool,
    ) -> int:
        where = (to or self.victim).address
        self.sent += 1
        kind = (
            http.client.HTTPConnection(where.host, where.port, timeout=15)
            if tls is None
            else http.client.HTTPSConnection(where.host, where.port, timeout=15, context=tls)
        )
        try:
            kind.request(method, path, body=body, headers=headers or {}, encode_chunked=chunked)
            answer = kind.getresponse()
            self.answers.append(answer.read().decode("latin-1") + str(answer.getheaders()))
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            kind.close()

    def signed(
        self, key: bytes, method: str, path: str, target: str, at: float | None = None
    ) -> dict[str, str]:
        """Return the headers of a request that the operator signs for ``target``."""
        wall_s, nonce = time.time() if at is None else at, new_nonce()
        mac = sign_api(key, method, path, wall_s, nonce, target=target)
        signer = self.operator.signer
        return {
            "P2PDRL-Time": format_time(wall_s),
            "P2PDRL-Nonce": nonce,
            "P2PDRL-Mac": mac,
            OPERATOR_HEADER: f"{signer.public_key.hex()}.{signer.sign(operator_payload(mac)).hex()}",
        }

    def target(self, node: Node) -> str:
        """Ask a node what requests for it have to name."""
        return str(node.client.get(f"/v1/target?nonce={new_nonce()}")["target"])

    def bearer(self) -> dict[str, str]:
        """Return the credentials of the victim's owner."""
        return {"Authorization": f"Bearer {self.token}"}


def head_of(member: Member, path: str, meta: int, vector: int = 0, **changed: Any) -> dict[str, str]:
    """Return the headers of a peer's request, with some changed."""
    head = RequestHead(
        path=path, sender=member.id, target="-", swarm=member.siege.swarm_id, meta_nbytes=meta,
        vector_nbytes=vector,
    )  # fmt: skip
    return head.to_headers() | {name.replace("_", "-"): str(value) for name, value in changed.items()}


async def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Wait until a condition holds, and tell whether it does."""
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.2)
    return True


def start(siege: Siege, name: str, *words: str, before: Iterable[str] = (), **options: Any) -> Node:
    """Start another node; ``before`` goes in front of its command."""
    (port,) = free_ports(1)
    folder = siege.swarm.root / name
    command = [*before, sys.executable, "-m", "p2pdrl", "node", "--name", name]
    command += ["--listen", f"127.0.0.1:{port}", "--data-dir", str(folder), *words]
    command += [f"--set={key}={value}" for key, value in (OPTIONS | options).items()]
    with (siege.swarm.root / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    return Node(name, Address("127.0.0.1", port), folder, process)


# SECURITY: what is sent


@row("abuse", "no credentials, wrong ones", "stranger", "401; another swarm's key: no connection, or 403")
async def _credentials(siege: Siege) -> None:
    for method, path in (("GET", "/v1/status"), ("GET", "/metrics"), ("POST", "/v1/leave")):
        siege.expect(await siege.ask(method, path), 401, what=f"{method} {path} without a token")
        wrong = {"Authorization": "Bearer " + "0" * 64}
        siege.expect(await siege.ask(method, path, wrong), 401, what=f"{method} {path} with a wrong token")
    wrong_key = siege.signed(b"x" * 32, "POST", "/v1/leave", siege.target(siege.victim))
    siege.expect(await siege.ask("POST", "/v1/leave", wrong_key), 401, what="another swarm's operator")
    ping = encode(Ping(Incarnation(1, 0), Incarnation(1, 0)))
    async with Member(siege, keys=[b"x" * 32]) as other:
        siege.expect(await other.send("swim/ping", ping), 0, 403, what="a member of another swarm")
    async with Member(siege, swarm_id="0" * 16) as other:
        siege.expect(await other.send("swim/ping", ping), 403, what="a message for another swarm")
    async with Member(siege) as member:
        plain = head_of(member, "/p2p/swim/ping", len(ping))
        siege.expect(await siege.ask("POST", "/p2p/swim/ping", plain, ping), 401, what="a peer without TLS")


@row("abuse", "replayed, stale, meant for another node", "stranger", "409, 401, 401 or 403")
async def _replays(siege: Siege) -> None:
    first, second = siege.nodes[:2]
    path = "/v1/checkpoint"
    captured = siege.signed(siege.key, "POST", path, siege.target(first))
    siege.expect(await siege.ask("POST", path, captured), 200, what="the operator's own request")
    siege.expect(await siege.ask("POST", path, captured), 409, what="the same again")
    for command in ("/v1/pause", "/v1/leave"):
        captured = siege.signed(siege.key, "POST", command, siege.target(first))
        answer = await siege.ask("POST", command, captured, to=second)
        siege.expect(answer, 401, 403, what=f"{command} signed for another node")
        stale = siege.signed(siege.key, "POST", command, siege.target(first), at=time.time() - 120)
        siege.expect(await siege.ask("POST", command, stale), 401, what=f"{command} of two minutes ago")
        other = siege.signed(siege.key, "POST", "/v1/resume", siege.target(first))
        siege.expect(await siege.ask("POST", command, other), 401, what=f"{command} signed as another one")
    ping = encode(Ping(Incarnation(1, 0), Incarnation(1, 0)))
    async with Member(siege) as member:
        answer = await member.send("swim/ping", ping, target=siege.ids[second.name])
        siege.expect(answer, 403, what="a message for another node")


@row("abuse", "foreign Host and Origin, every method", "web page", "403")
async def _foreign(siege: Siege) -> None:
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
    for method in methods:
        for path in ("/", "/healthz", "/v1/status", "/v1/leave", "/p2p/swim/ping"):
            rebound = await siege.ask(method, path, {"Host": "evil.example", **siege.bearer()})
            siege.expect(rebound, 403, what=f"{method} {path}, Host evil.example")
            crossed = await siege.ask(method, path, {"Origin": "http://evil.example", **siege.bearer()})
            siege.expect(crossed, 403, what=f"{method} {path}, Origin evil.example")


@row("abuse", "too large, chunked too; encoded", "member", "413, 415")
async def _large(siege: Siege) -> None:
    megabytes = b"\x00" * (8 << 20)
    async with Member(siege) as member:
        client = member.tls.client
        siege.expect(await member.send("swim/ping", megabytes), 413, what="8 MB as a probe")
        for path, chunked in (("/p2p/swim/ping", True), ("/p2p/swim/ping", False)):
            head = head_of(member, path, 4)
            body = iter([megabytes[: 1 << 20]] * 4) if chunked else megabytes
            siege.expect(
                await siege.ask("POST", path, head, body, tls=client, chunked=chunked),
                413, 400, 0, what=f"8 MB where 4 bytes were told, chunked {chunked}",
            )  # fmt: skip
        zipped = head_of(member, "/p2p/swim/ping", 4, Content_Encoding="gzip")
        siege.expect(await siege.ask("POST", "/p2p/swim/ping", zipped, b"1234", tls=client), 415, what="gzip")
    owner = siege.bearer()
    siege.expect(await siege.ask("POST", "/v1/records", owner, megabytes), 413, what="8 MB as a record")
    answer = await siege.ask("POST", "/v1/act", owner, iter([megabytes[: 1 << 20]] * 4), chunked=True)
    siege.expect(answer, 413, 400, 411, what="4 MB of observations, chunked")
    encoded = {**owner, "Content-Encoding": "gzip"}
    siege.expect(await siege.ask("POST", "/v1/act", encoded, b"1234"), 415, what="encoded observations")


@row("abuse", "pickle, zip, wrong content type", "member", "415, nothing executed")
async def _pickle(siege: Siege) -> None:
    canary = siege.swarm.root / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
            return Path.touch, (str(canary),)

    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1))
    bomb = pickle.dumps({"path": str(canary)}) + pickle.dumps(np.zeros(4))
    async with Member(siege) as member:
        for what, data in (("pickle", bomb), ("torch.save's zip", packed.getvalue())):
            for kind in ("application/octet-stream", "application/python-pickle", "application/zip"):
                head = head_of(member, "/p2p/exchange", len(data), Content_Type=kind)
                answer = await siege.ask("POST", "/p2p/exchange", head, data, tls=member.tls.client)
                siege.expect(answer, 415, what=f"{what} as {kind}")
            for route in ("exchange", "state", METRICS):
                siege.expect(
                    await member.send(route, data[:60000]), 400, 403, 413, 422, what=f"{what} to {route}"
                )
    siege.demand(not canary.exists(), "something was executed")


ROUTES = ("exchange", "state", METRICS, "swim/ping", "swim/gossip", "swim/join", "swim/sync", "swim/delta")
MALFORMED = {
    "garbage": b"\xff" * 4,
    "20,000 nested arrays": b"\x91" * 20000,
    "a huge integer": msgspec.msgpack.encode({"a": 2**63}),
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "not MessagePack": b"\xc1\x00\x00\x00",
    "nothing": b"",
}
MALFORMED_JSON = {
    "not UTF-8": b'{"observations": "\xff\xfe"}',
    "20,000 nested lists": b'{"observations": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    "10,000 digits": b'{"observations": [' + b"9" * 10000 + b", 0, 0, 0]}",
    "NaN": b'{"observations": [NaN, 0, 0, 0]}',
    "Infinity": b'{"observations": [Infinity, 0, 0, 0]}',
    "a key twice": b'{"observations": [0, 0, 0, 0], "observations": [0, 0, 0]}',
    "half": b'{"observations": [',
    "another shape": b'{"observations": [[[1]]]}',
}


@row("abuse", "malformed, deep, huge, NaN, a key twice", "member", "400, 403 or 422, never 500")
async def _malformed(siege: Siege) -> None:
    async with Member(siege) as member:
        for route in ROUTES:
            for what, meta in MALFORMED.items():
                siege.expect(await member.send(route, meta), 400, 403, 422, what=f"{what} to {route}")
    siege.expect(await siege.ask("GET", "/v1/act", siege.bearer()), 200, what="the policy's description")
    with socket.create_connection((siege.victim.address.host, siege.victim.address.port)) as half:
        head = f"POST /v1/act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {siege.token}\r\n"
        half.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{{".encode())
        await asyncio.sleep(0.5)  # and goes away in the middle of its body
    for what, body in MALFORMED_JSON.items():
        headers = {**siege.bearer(), "Content-Type": "application/json"}
        siege.expect(await siege.ask("POST", "/v1/act", headers, body), 400, 422, what=f"{what} to /v1/act")
    for path in ("/v1/mode?mode=%ff", "/v1/roles?role=" + "x" * 3000, "/v1/mode?set=" + "a" * 5000):
        siege.expect(await siege.ask("POST", path, siege.bearer()), 400, 403, 414, what=path[:30])
    siege.expect(await siege.ask("GET", "/v1/nothing", siege.bearer()), 404, what="no such route")
    siege.expect(await siege.ask("DELETE", "/v1/status", siege.bearer()), 405, what="no such method")


class Exchange:
    """Makes exchanges of gossip that are right but for what is changed."""

    def __init__(self, siege: Siege, member: Member) -> None:
        status, self.checkpoint = siege.victim.status(), siege.checkpoint()
        mode = siege.victim.client.get("/v1/mode")["record"]
        self.size = self.checkpoint.layout.size
        self.told = {
            "node_id": member.id,
            "task_hash": self.checkpoint.meta["task_hash"],
            "layout_hash": self.checkpoint.layout.hash,
            "mode_epoch": stamp(mode["epoch"], mode["proposer"]),
            "lineage": status["lineage"],
            "lineage_steps": status["swarm_env_steps"],
            "policy_version": status["policy_version"],
        }
        self.member = member

    def vector(self, *values: float) -> memoryview:
        """Return the swarm's own parameters, the first of them replaced."""
        made = np.asarray(self.checkpoint.params, np.float32).copy()
        made[: len(values)] = values
        return memoryview(made).cast("B")

    async def send(self, vector: memoryview, dtype: str = "float32", **changed: Any) -> int:
        """Send it; return the status."""
        for _ in range(100):
            head = ExchangeHead(f"{random.getrandbits(60):016x}", dtype, Summary(**(self.told | changed)))
            answer = await self.member.send("exchange", msgspec.msgpack.encode(head), vector, lane="bulk")
            if answer != BUSY:
                break
            await asyncio.sleep(0.05)
        return answer


@row("abuse", "vectors of another layout, type or length", "member", "409 or 422")
async def _layouts(siege: Siege) -> None:
    async with Member(siege) as member:
        await member.join()
        exchange = Exchange(siege, member)
        good = exchange.vector()
        siege.expect(await exchange.send(good, layout_hash="0" * 32), 409, what="another layout")
        siege.expect(await exchange.send(good, task_hash="0" * 32), 409, what="another task")
        siege.expect(await exchange.send(good[:-4]), 422, what="four bytes too few")
        siege.expect(await exchange.send(good[:4]), 422, what="one number")
        siege.expect(await exchange.send(good, dtype="float64"), 400, 422, what="as float64")
        siege.expect(await exchange.send(good, dtype="object"), 400, 422, what="as objects")


@row("abuse", "vectors with NaN, infinity, 3e38", "member", "422 and a strike; at the third 403: quarantine")
async def _poison(siege: Siege) -> None:
    async with Member(siege) as member:
        await member.join()
        exchange = Exchange(siege, member)
        for what in (float("nan"), float("inf"), 3e38):
            siege.expect(await exchange.send(exchange.vector(what)), 422, what=f"a vector with {what}")
        siege.expect(await exchange.send(exchange.vector()), 403, what="a good one after three strikes")
        events = siege.victim.client.get("/v1/events?follow=0")
        strikes = [event for event in events if event["kind"] == "strike" and event.get("peer") == member.id]
        siege.demand(len(strikes) == 3, f"{len(strikes)} strikes were told, not 3")


@row(
    "abuse",
    "steps and modes from the future and the past",
    "member",
    "409 or 400; another lineage's vector is passed over",
)
async def _versions(siege: Siege) -> None:
    async with Member(siege) as member:
        await member.join()
        exchange = Exchange(siege, member)
        good = exchange.vector()
        siege.expect(await exchange.send(good, policy_version=2**52), 409, what="policy version 2^52")
        siege.expect(await exchange.send(good, policy_version=-1), 400, what="policy version -1")
        siege.expect(await exchange.send(good, mode_epoch=99), 409, what="another mode")
        siege.expect(await exchange.send(good, lineage="0" * 16), 200, 409, what="another lineage")


@row("abuse", "alive, left and dead of others; the far future", "member in another's name", "403 or 400")
async def _forged_records(siege: Siege) -> None:
    other = siege.ids[siege.nodes[1].name]
    async with Member(siege) as member:
        for state in ("alive", "left"):
            record = member.record(id=other, state=state, incarnation=Incarnation(member.boot, 2**40))
            siege.expect(
                await member.send("swim/gossip", member.gossip(record)), 403, what=f"{state} of another"
            )
        future = member.record(incarnation=Incarnation(member.boot + 10**9, 0))
        siege.expect(
            await member.send("swim/gossip", member.gossip(future)), 400, what="started in the future"
        )
        peers = {one["id"]: one for one in siege.victim.client.get("/v1/peers")}
        lives_in = Incarnation(*peers[other]["incarnation"])
        accused = Suspicion(other, lives_in, siege.ids[siege.nodes[2].name], "dead", "gone")
        signed = sign_suspicion(member.identity, siege.swarm_id, accused)
        answer = await member.send("swim/gossip", member.gossip(signed))
        siege.expect(answer, 403, what="a death in another accuser's name")
        own = Suspicion(other, lives_in, member.id, "dead", "I say so")
        own = sign_suspicion(member.identity, siege.swarm_id, own)
        for node in siege.nodes:
            await member.send("swim/gossip", member.gossip(member.record(), own), to=node)
    async with Member(siege, claims=other) as member:
        ping = encode(Ping(Incarnation(1, 0), Incarnation(1, 0)))
        siege.expect(await member.send("swim/ping", ping), 403, what="a call in another's name")
        siege.expect(
            await member.send("exchange", b"x", lane="bulk"), 403, what="an exchange in another's name"
        )


@row(
    "abuse",
    "addresses of metadata services, redirects",
    "member",
    "400 or passed over, and no dial",
    counts=False,
)
async def _addresses(siege: Siege) -> None:
    followed: list[str] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n" % there
        )
        writer.close()

    async def canary(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        followed.append((await reader.read(100)).decode("latin-1"))
        writer.close()

    async with Member(siege) as member:
        there_server = await asyncio.start_server(canary, "127.0.0.1", 0)
        there = there_server.sockets[0].getsockname()[1]
        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            forbidden = ("169.254.169.254:80", "metadata.google.internal:80", "0.0.0.0:80", "224.0.0.1:80")
            for number, address in enumerate(forbidden, 1):
                record = member.record(address=address, incarnation=Incarnation(member.boot, number))
                answer = await member.send("swim/gossip", member.gossip(record))
                siege.expect(answer, 200, 400, what=f"a record with {address}")
                answer = await member.send("swim/join", encode(JoinRequest(record, b"")))
                good = (200, 400) if address.startswith("0.") else (400,)  # is told where it was seen
                siege.expect(answer, *good, what=f"a join from {address}")
            record = member.record(address=f"127.0.0.1:{port}", incarnation=Incarnation(member.boot, 9))
            await member.send("swim/gossip", member.gossip(record))
            until_s = time.monotonic() + 3.0
            while time.monotonic() < until_s:
                for node in siege.nodes:
                    for one in psutil.Process(node.process.pid).net_connections("inet"):
                        remote = one.raddr.ip if one.raddr else "127.0.0.1"
                        siege.demand(remote in ("127.0.0.1", "::1"), f"{node.name} dialled {remote}")
                await asyncio.sleep(0.05)
            siege.demand(not followed, f"a redirect was followed: {followed[:1]}")
        finally:
            server.close()
            there_server.close()


@row(
    "abuse",
    f"{INVENTED} invented members, too many tags",
    "member",
    "at most a few are believed, for a minute or so",
    quick=False,
)
async def _invented(siege: Siege) -> None:
    async with Member(siege) as member:
        await member.join()
        newer = Incarnation(member.boot, 1)
        tags = member.record(incarnation=newer, tags={str(number): "x" for number in range(100)})
        siege.expect(await member.send("swim/gossip", member.gossip(tags)), 400, what="100 tags")
        long = member.record(incarnation=newer, tags={"a": "x" * 5000})
        siege.expect(await member.send("swim/gossip", member.gossip(long)), 400, what="a tag of 5,000 bytes")
        made: list[MemberRecord] = []
        for number in range(INVENTED):
            who = Identity(random.randbytes(32))
            plain = msgspec.structs.replace(
                member.record(), id=who.node_id, public_key=who.public_key, name=f"m{number}",
                address=f"127.0.{number // 250 % 250}.{number % 250 + 1}:9",
            )  # fmt: skip
            made.append(sign_member(who, siege.swarm_id, plain))
        for first in range(0, INVENTED, 200):
            answer = await member.send("swim/gossip", member.gossip(*made[first : first + 200]))
            siege.expect(answer, 200, 429, 0, what="200 invented members")
    invented = {record.id for record in made}
    for node in siege.nodes:
        seen = siege.view(node)
        alive = [one for one in seen if one in invented and seen[one] == "alive"]
        siege.demand(len(alive) <= VOUCHED, f"{node.name} holds {len(alive)} invented members alive")
        siege.demand(len(seen) < 100, f"{node.name} holds {len(seen)} members")

    def believed() -> bool:
        return any(
            state == "alive" and one in invented
            for node in siege.nodes
            for one, state in siege.view(node).items()
        )

    siege.demand(await until(lambda: not believed(), 90.0), "invented members stay alive")


@row(
    "abuse",
    "a flood of requests",
    "member",
    f"honest probes are answered in {ANSWER_S:g} s",
    counts=False,
    quick=False,
)
async def _flood(siege: Siege) -> None:
    ping = encode(Ping(Incarnation(1, 0), Incarnation(1, 0)))
    async with Member(siege) as flooder, Member(siege, name="honest") as honest:
        done = asyncio.Event()

        async def flood() -> None:
            while not done.is_set():
                await flooder.send("swim/ping", ping)

        floods = [asyncio.create_task(flood()) for _ in range(64)]
        took_s: list[float] = []
        until_s = time.monotonic() + 6.0
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            siege.expect(await honest.send("swim/ping", ping), 200, what="an honest probe")
            took_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)
        done.set()
        await asyncio.gather(*floods)
    slowest = statistics.quantiles(took_s, n=10)[-1] if len(took_s) > 1 else 99.0
    siege.demand(slowest < ANSWER_S, f"one honest probe in ten took over {slowest:.2f} s")


@row("abuse", "a flood of bad requests", "member", "429 beyond some a second")
async def _bad_flood(siege: Siege) -> None:
    async with Member(siege) as flooder:
        statuses = [await flooder.send("swim/ping", b"\xc1") for _ in range(300)]
    siege.demand(set(statuses) <= {400, 429}, f"answered {set(statuses)}")
    siege.demand(429 in statuses, "no 429 among 300 bad requests")
    limits = TransportLimits()  # later rows want their refusals with the reason, however soon they come
    await asyncio.sleep(limits.failures_burst / limits.failures_per_s)


async def _open(
    node: Node, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(node.address.host, node.address.port, ssl=tls)


@row("abuse", "slow headers, silence, stalled bodies", "stranger", f"closed within {SLOW_S:g} s", quick=False)
async def _slow(siege: Siege) -> None:
    async with Member(siege) as member:
        stalled = head_of(member, "/p2p/swim/ping", 4096)
        lines = "".join(f"{name}: {value}\r\n" for name, value in stalled.items())
        body = f"POST /p2p/swim/ping HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4096\r\n{lines}\r\n12"
        cases: dict[str, tuple[bytes, ssl.SSLContext | None]] = {
            "half a header": (b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n", None),
            "silence": (b"", None),
            "half a TLS handshake": (b"\x16\x03\x01\x02\x00\x01\x00", None),
            "silence after TLS": (b"", member.tls.client),
            "a stalled body": (body.encode(), member.tls.client),
        }

        async def hold(what: str, data: bytes, tls: ssl.SSLContext | None) -> None:
            reader, writer = await _open(siege.victim, tls)
            siege.sent += 1
            writer.write(data)
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(3 * SLOW_S):
                    while await reader.read(4096):
                        pass
            except TimeoutError:
                siege.demand(False, f"{what}: still open after {3 * SLOW_S:g} s")
            except (OSError, ssl.SSLError):
                pass
            took_s = time.monotonic() - began_s
            siege.demand(took_s < SLOW_S + 1.5, f"{what}: closed after {took_s:.1f} s")
            writer.close()

        await asyncio.gather(*(hold(what, *case) for what, case in cases.items()))


@row("abuse", "hostile answers: garbage, huge, endless", "member", "aborted; told as suspect", counts=False)
async def _answers(siege: Siege) -> None:
    for what, meta in (("garbage", b"\xc1" * 40), ("8 MB", b"\x00" * (8 << 20))):
        async with Member(siege, name=f"answers {what}") as member:
            await member.join()
            siege.demand(siege.view().get(member.id) == "alive", "the liar isn't taken in")

            async def lie(incoming: Incoming, meta: bytes = meta) -> Reply:
                return Reply(meta)

            member.answer = lie
            gone = await until(lambda member=member: siege.view().get(member.id) != "alive", 20.0)
            siege.demand(gone, f"who answers {what} stays alive")


SCRIPT = "<script>alert(1)</script>"


@row(
    "abuse",
    "a script as a node's name",
    "member",
    "text, under a policy that runs no other script",
    counts=False,
)
async def _script(siege: Siege) -> None:
    async with Member(siege, name=SCRIPT) as member:
        await member.join()
        names = {one["name"] for one in siege.victim.client.get("/v1/peers")}
        siege.demand(SCRIPT in names, "the member isn't shown")
        siege.answers.clear()
        siege.expect(await siege.ask("GET", "/v1/peers", siege.bearer()), 200, what="the list of members")
        told = siege.answers.pop()
        siege.demand("application/json" in told, "members aren't told as JSON")
        siege.demand("'nosniff'" in told, "browsers may guess the type of it")
        siege.expect(await siege.ask("GET", "/"), 200, what="the page")
        page = siege.answers.pop()
        siege.demand("Content-Security-Policy" in page, "the page has no policy")
        siege.demand(
            "'unsafe-inline'" not in page.split("script-src")[-1].split(";")[0], "it runs any script"
        )
        siege.demand(SCRIPT not in page, "the page holds the name as markup")


@row("abuse", "secrets in logs, ps, API, files", "stranger", "none; files are 0600", counts=False)
async def _secrets(siege: Siege) -> None:
    for node in siege.nodes:
        siege.demand(not siege.leaks(siege.log(node)), f"{node.name}'s log holds a secret")
        processes = [
            psutil.Process(node.process.pid),
            *psutil.Process(node.process.pid).children(recursive=True),
        ]
        for one in processes:
            words = " ".join(one.cmdline())
            siege.demand(not siege.leaks(words), f"ps shows a secret of {node.name}")
        for name in ("token", "identity.key"):
            mode = (node.folder / name).stat().st_mode & 0o777
            siege.demand(mode == 0o600, f"{name} has mode {mode:o}")
    for path in ("status", "peers", "config", "mode", "records", "rounds", "history", "events?follow=0"):
        answer = await siege.ask("GET", f"/v1/{path}", siege.bearer())
        siege.expect(answer, 200, what=path)  # what came is looked through after each row
    proxied = {"X-Forwarded-For": "198.51.100.7"}
    siege.answers.clear()
    siege.expect(await siege.ask("GET", "/healthz", proxied), 200, 503, what="/healthz")
    siege.demand(
        str(siege.victim.folder) not in siege.answers[-1], "/healthz shows the data folder to others"
    )
    siege.expect(await siege.ask("GET", "/readyz", proxied), 200, what="/readyz")
    siege.expect(await siege.ask("GET", "/metrics", proxied), 401, what="/metrics")


# TRUST: who says and commands what


@row("trust", "settings by who may not command", "member", "403, nothing changes")
async def _usurp(siege: Siege) -> None:
    stop = next(one for one in siege.victim.client.get("/v1/records")["records"] if one["key"] == "stop")
    root = siege.operator.public
    async with Member(siege) as member:
        values: dict[str, Any] = {
            "mode": ModeSetting.of(LocalConfig()),
            "stop": StopSetting(StopConfig(env_steps=1), 0.0),
            "pause": PauseSetting(True),
            "bans": BansSetting((Ban(siege.ids[siege.nodes[1].name]),)),
            "operators": OperatorsSetting((Operator(member.identity.public_key, "me"),)),
        }
        for node in siege.nodes:
            for key, value in values.items():
                for epoch in (2, 500):
                    own = member.setting(key, value, epoch)
                    siege.expect(
                        await member.send("swim/gossip", member.gossip(own), to=node),
                        403,
                        what=f"{key} of its own",
                    )
                    named = member.setting(key, value, epoch, proposer=root.id)
                    siege.expect(
                        await member.send("swim/gossip", member.gossip(named), to=node),
                        403,
                        what=f"{key} in the operator's name",
                    )
                    dressed = member.setting(key, value, epoch, proposer=root.id, public_key=root.public_key)
                    siege.expect(
                        await member.send("swim/gossip", member.gossip(dressed), to=node),
                        403,
                        what=f"{key} with the operator's key",
                    )
        path = "/v1/leave"
        bare = siege.signed(siege.key, "POST", path, siege.target(siege.victim))
        del bare[OPERATOR_HEADER]
        siege.expect(await siege.ask("POST", path, bare), 403, what="leave with the swarm's key alone")
        forged = siege.signed(siege.key, "POST", path, siege.target(siege.victim))
        forged[OPERATOR_HEADER] = forged[OPERATOR_HEADER][:-1] + (
            "0" if forged[OPERATOR_HEADER][-1] != "0" else "1"
        )
        siege.expect(await siege.ask("POST", path, forged), 403, what="leave with a forged signature")
        halt = HaltSetting("env_steps", "I say so", stop["epoch"], stop["by"])
        for node in siege.nodes:
            await member.send("swim/gossip", member.gossip(member.setting("halt", halt, 9)), to=node)
        await asyncio.sleep(1.5)  # a round, in which the claim is judged


@row(
    "trust",
    "64 made-up keys of settings",
    "member",
    "passed over: a later release may have them",
    counts=False,
)
async def _junk_keys(siege: Siege) -> None:
    async with Member(siege) as member:
        for number in range(64):
            junk = member.setting(f"junk{number}", {"a": 1}, 1)
            answer = await member.send("swim/gossip", member.gossip(junk))
            siege.expect(answer, 200, 400, what=f"the key junk{number}")
        for node in siege.nodes:
            keys = {one["key"] for one in node.client.get("/v1/records")["records"]}
            siege.demand(not any(key.startswith("junk") for key in keys), f"{node.name} holds {keys}")


class Forger:
    """Makes up facts, of itself and of a node that nobody has seen."""

    def __init__(self, siege: Siege, member: Member) -> None:
        self.siege, self.member = siege, member
        self.own = FactSigner(member.identity, siege.swarm_id)
        self.invented = FactSigner(Identity(random.randbytes(32)), siege.swarm_id)

    def counts(self, signer: FactSigner, lineage: str, steps: int) -> SignedFact:
        """Return counts of so many steps in a lineage."""
        boots = ((self.member.boot, Counts(steps, steps // 100, steps // 1000)),)
        return signer.sign("counts", lineage, msgspec.msgpack.encode(NodeCounts(boots=boots)))

    def report(self, node: str, lineage: str, seq: int) -> ReportRow:
        """Return a report about a node that did wonders."""
        report = PeerReport(
            id=node, boot=self.member.boot, seq=seq, state="training", lineage=lineage, updates=2**40,
            env_steps=2**50, policy_version=2**40, mean_return=1e9, episodes_in_window=1000,
            evaluations=(Evaluation(0, 1, 30, 1e9, 0.0, 1.0, 1.0),),
        )  # fmt: skip
        return ReportRow(0.0, self.own.sign("report", "", msgspec.msgpack.encode(report)))

    def moments(self, count: float) -> dict[str, list[object]]:
        """Return a normaliser's moments of so many samples."""
        wire = Moments(count, np.full((), 1e5), np.full((), count)).to_wire()
        fact = self.own.sign("moments", "returns", msgspec.msgpack.encode((self.member.boot, wire)))
        return {"returns": [[self.member.id, self.member.boot, wire, fact.public_key + fact.signature]]}

    async def tell(self, **said: Any) -> int:
        """Send facts; return the status."""
        empty: dict[str, Any] = {"reports": [], "counts": {}, "moments": {}, "holds": {}}
        return await self.member.send(METRICS, msgspec.msgpack.encode(empty | said))


def _adoptions(node: Node) -> int:
    return sum(event["kind"] == "adopted" for event in node.client.get("/v1/events?follow=0"))


def _facts(siege: Siege) -> tuple[int, float]:
    status = siege.victim.status()
    return int(status["swarm_env_steps"]), abs(float(status["mean_return"] or 0.0))


@row("trust", "10^9 and 2^50 steps, 10^12 moments, a lineage", "member", "held back until time allows them")
async def _facts_of_its_own(siege: Siege) -> None:
    before, adopted = _facts(siege)[0], [_adoptions(node) for node in siege.nodes]
    began_s = time.monotonic()
    async with Member(siege) as member:
        await member.join()
        forger = Forger(siege, member)
        for seq in range(1, 16):
            for signer in (forger.own, forger.invented):
                for lineage in (siege.lineage, "0" * 16):
                    for steps in (10**9, 2**50):
                        await forger.tell(counts={lineage: [forger.counts(signer, lineage, steps)]})
            await forger.tell(reports=[forger.report(member.id, "0" * 16, seq)])
            await forger.tell(moments=forger.moments(1e12))
            await asyncio.sleep(0.1)
    after, mean_return = _facts(siege)
    plausible = 200_000 * (time.monotonic() - began_s + 10.0)
    siege.demand(after - before < plausible, f"{after - before} steps were believed")
    siege.demand(mean_return < 1000, f"a mean return of {mean_return:g} was believed")
    for node, times in zip(siege.nodes, adopted, strict=True):
        siege.demand(_adoptions(node) == times, f"{node.name} adopted the forged lineage")


@row("trust", "facts of others", "member in another's name", "403 and a strike")
async def _facts_of_others(siege: Siege) -> None:
    async with Member(siege) as member:
        await member.join()
        forger = Forger(siege, member)
        counts = forger.counts(forger.own, siege.lineage, 10**9)
        stolen = msgspec.structs.replace(counts, public_key=Identity(random.randbytes(32)).public_key)
        siege.expect(await forger.tell(counts={siege.lineage: [stolen]}), 403, what="counts of another")
        report = forger.report(siege.ids[siege.nodes[1].name], siege.lineage, 1)
        siege.expect(await forger.tell(reports=[report]), 403, what="a report of another")


@row(
    "trust", "18 vectors with NaN in members' names", "member in another's name", "403; nobody is quarantined"
)
async def _poison_in_names(siege: Siege) -> None:
    for node in siege.nodes[1:]:
        async with Member(siege, claims=siege.ids[node.name]) as member:
            exchange = Exchange(siege, member)
            for _ in range(9):
                answer = await exchange.send(exchange.vector(float("nan")), node_id=siege.ids[node.name])
                siege.expect(answer, 403, what="a vector in a member's name")
    for one in siege.victim.client.get("/v1/peers"):
        if one["id"] in siege.ids.values():
            siege.demand(not one.get("quarantined"), f"{one['name']} was quarantined for another's vectors")


@row(
    "trust",
    "600 connections, renewed for 6 s",
    "stranger",
    "displaced; the owner and members come through",
    quick=False,
)
async def _connections(siege: Siege) -> None:
    ping = encode(Ping(Incarnation(1, 0), Incarnation(1, 0)))
    held: list[socket.socket] = []
    where = (siege.victim.address.host, siege.victim.address.port)
    took_s: list[float] = []

    def renew() -> None:
        for one in list(held):
            try:
                if one.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                    held.remove(one)
                    one.close()
            except BlockingIOError:
                pass
            except OSError:
                held.remove(one)
                one.close()
        while len(held) < 600:
            one = socket.socket()
            one.settimeout(2.0)
            one.connect(where)
            siege.sent += 1
            held.append(one)

    try:
        async with Member(siege) as member:
            until_s = time.monotonic() + 6.0
            while time.monotonic() < until_s:
                await asyncio.to_thread(renew)
                began_s = time.monotonic()
                siege.expect(await member.send("swim/ping", ping), 200, what="a member's probe")
                answer = await siege.ask("GET", "/v1/status", siege.bearer())
                siege.expect(answer, 200, what="the owner's request")
                took_s.append(time.monotonic() - began_s)
                await asyncio.sleep(0.05)
    finally:
        for one in held:
            one.close()
    siege.demand(took_s and statistics.median(took_s) < 2.0, f"both took {statistics.median(took_s):.1f} s")


@row(
    "trust",
    "a node with 64 file descriptors and 200 callers",
    "stranger",
    "it lives, and says so in words",
    counts=False,
    quick=False,
)
async def _descriptors(siege: Siege) -> None:
    node = start(siege, "few-files", before=("bash", "-c", 'ulimit -n 64; exec "$@"', "bash"))
    try:
        trains = await until(lambda: node.status().get("state") == "training" or not node.alive, 60.0)
        siege.demand(trains and node.alive, f"it doesn't start: {siege.log(node)[-400:]}")
        held = [socket.socket() for _ in range(200)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", node.address.port))
            siege.sent += 1
        await asyncio.sleep(3.0)
        siege.demand(node.alive, "it ended")
        for one in held:
            one.close()
        siege.demand(await until(node.status, 15.0), "it doesn't answer after")
        text = siege.log(node)
        siege.demand("Traceback" not in text, f"its log holds a traceback: {_tail(text)}")
        siege.demand("ulimit -n" in text, "it doesn't say what to do")
        siege.demand(text.count("\n") < 200, f"its log has {text.count(chr(10))} lines")
    finally:
        node.process.kill()
        await asyncio.to_thread(node.process.wait, 20)


@row(
    "trust",
    "a newcomer while all its seeds are frozen",
    "newcomer",
    "waits; then joins, and the records stay",
    counts=False,
    quick=False,
)
async def _newcomer(siege: Siege) -> None:
    words = ["--swarm-key-file", str(siege.key_file)]
    for node in siege.nodes:
        words += ["--peers", str(node.address)]
        node.process.send_signal(signal.SIGSTOP)
    try:  # its own stop condition would end the swarm at once
        newcomer = start(siege, "newcomer", *words, **{"task.stop.env_steps": 1000})
        await asyncio.sleep(9.0)
        siege.demand(newcomer.alive, f"it ended: {siege.log(newcomer)[-400:]}")
        kinds = re.findall(r'"kind": ?"([a-z-]+)"', siege.log(newcomer))
        siege.demand("founded" not in kinds, "it founded a swarm of its own")
    finally:
        for node in siege.nodes:
            node.process.send_signal(signal.SIGCONT)
    try:
        trains = await until(lambda: newcomer.status().get("state") == "training", 60.0)
        siege.demand(trains, f"it isn't in: {siege.log(newcomer)[-400:]}")
        siege.expect(newcomer.status().get("lineage"), siege.lineage, what="the newcomer's lineage")
        own = frozenset(siege.ids.values())
        await until(lambda: all(siege.state(node).members == own for node in siege.nodes), 30.0)
    finally:
        newcomer.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(newcomer.process.wait, 30)


async def play(siege: Siege, one: Row) -> None:
    """Play one row, and look what has changed."""
    before, counted, memory = [siege.state(node) for node in siege.nodes], siege.counted(), siege.memory()
    siege.failures, siege.sent, began_s = [], 0, time.monotonic()
    siege.answers.clear()
    try:
        async with asyncio.timeout(150.0):
            await one.play(siege)
    except TimeoutError:
        siege.failures.append("it wasn't over after 150 s")
    one.seconds, one.sent = time.monotonic() - began_s, siege.sent
    try:  # who was accused refutes it
        own = frozenset(siege.ids.values())
        await until(lambda: all(siege.state(node).members == own for node in siege.nodes), 15.0)
        for node, then, rss in zip(siege.nodes, before, memory, strict=True):
            siege.demand(node.alive, f"{node.name} ended: {siege.log(node)[-500:]}")
            now = siege.state(node)
            for name in State.__dataclass_fields__:
                was, is_ = getattr(then, name), getattr(now, name)
                siege.demand(
                    was == is_, f"{node.name}'s {name} changed from {str(was)[:200]} to {str(is_)[:200]}"
                )
            grown = psutil.Process(node.process.pid).memory_info().rss - rss
            siege.demand(grown < GROWTH_BYTES, f"{node.name} grew by {grown / 1e6:.0f} MB")
            text = siege.log(node)
            siege.demand("Traceback" not in text, f"{node.name}'s log holds a traceback: {_tail(text)}")
        siege.demand(not one.counts or siege.counted() > counted, "no counter went up")
    except (P2PDRLError, psutil.Error) as error:
        siege.failures.append(f"a node doesn't answer any more: {error}")
    siege.demand(not siege.leaks("\n".join(siege.answers)), "an answer holds a secret")
    one.failures = list(dict.fromkeys(siege.failures))


def _tail(text: str) -> str:
    return text[text.index("Traceback") :][:1500] if "Traceback" in text else text[-500:]


async def play_all(siege: Siege, rows: Iterable[Row], quiet: bool) -> None:
    """Play rows in turn; tell how each went."""
    for one in rows:
        await play(siege, one)
        if not quiet:
            verdict = "held" if not one.failures else "BROKEN"
            print(
                f"{verdict:6}  {one.seconds:5.1f} s  {one.name} ({one.attacker})", file=sys.stderr, flush=True
            )
            for failure in one.failures[:8]:
                print(f"        {failure}", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """Return the result as Markdown."""
    lines = ["| what | attacker | answer | sent | |", "|---|---|---|---|---|"]
    for one in rows:
        verdict = "held" if not one.failures else "**broken**: " + "; ".join(one.failures[:2])
        lines.append(f"| {one.name} | {one.attacker} | {one.answer} | {one.sent} | {verdict} |")
    return "\n".join(lines)


def attack(rows: list[Row], nodes: int, *, quiet: bool = False) -> None:
    """Start a swarm, and play ``rows`` against it; what came of it is in them."""
    with tempfile.TemporaryDirectory(prefix="p2pdrl-attack-") as folder:
        key_file, operator_file = Path(folder) / "swarm.key", Path(folder) / "swarm.key.operator"
        write_swarm_key(key_file, [write_operator_key(operator_file, "owner").public])
        arguments = [f"--set={key}={value}" for key, value in OPTIONS.items()]
        with LocalSwarm(nodes, [*arguments, "--swarm-key-file", str(key_file)]) as swarm:
            swarm.ready()
            siege = Siege(swarm, key_file, operator_file)
            asyncio.run(play_all(siege, rows, quiet))


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", default="", help="only those whose name, table or attacker holds this")
    parser.add_argument("--nodes", type=int, default=3, help="how many (default 3; at least 3)")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="only rows that take a few seconds")
    parser.add_argument("--list", action="store_true", help="list the rows, and play none")
    options = parser.parse_args()
    if options.nodes < 3:
        parser.error("--nodes: it takes three nodes")
    rows = [one for one in ROWS if options.rows in f"{one.name} | {one.table} | {one.attacker}"]
    rows = [one for one in rows if one.quick or not options.quick]
    if not rows:
        parser.error(f"--rows: no row holds {options.rows!r}; see --list")
    if not options.list:
        attack(rows, options.nodes, quiet=options.json)
    if options.json:
        told = [
            {
                "table": one.table, "row": one.name, "attacker": one.attacker, "answer": one.answer,
                "sent": one.sent, "seconds": round(one.seconds, 1), "failures": one.failures,
            }
            for one in rows
        ]  # fmt: skip
        print(json.dumps(told, indent=2))
    else:
        print(table(rows) if not options.list else "\n".join(one.name for one in rows))
    return 1 if any(one.failures for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
