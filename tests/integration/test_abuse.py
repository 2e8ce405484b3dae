"""What strangers and liars send changes nothing: status, parameters, members and a counter are looked at."""

from __future__ import annotations

import http.client
import pickle

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.group.compatibility import Summary
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.node.settings import stamp
from p2pdrl.strategies.gossip.adpsgd import ExchangeHead
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address

STILL = ["--set", "task.algorithm.learning_rate=0", "--set", "task.env.num_envs=1", "--set", "node.seed=1"]
STILL += ["--set", "task.algorithm.unroll_steps=8", "--set", "task.algorithm.minibatches=1"]
STILL += ["--set", "node.learner.max_updates_per_s=2", "--set", "task.strategy.compression=none"]
LIAR = "f" * 32


@pytest.fixture
def victim(swarm):
    node = swarm.start("victim", *STILL)
    swarm.training(node)
    return node


class Unchanged:
    """The victim's parameters, members, lineage and memory before and after."""

    def __init__(self, victim):
        self.victim = victim
        self.before = self.look()
        self.rss = victim.status()["rss_bytes"]

    def look(self):
        status = self.victim.status()
        params = self.victim.checkpoint().meta["params_hash"]
        return params, status["members"], status["lineage"], status["mode_epoch"]

    def check(self):
        assert self.victim.process.poll() is None, self.victim.text()[-2000:]
        assert self.look() == self.before
        assert self.victim.status()["rss_bytes"] - self.rss < 20e6
        assert "Traceback" not in self.victim.text()


def refused(victim) -> float:
    lines = victim.get("/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("p2pdrl_refused_total{"))


def request(victim, method, path, headers=None, body=b""):
    connection = http.client.HTTPConnection("127.0.0.1", victim.port, timeout=15)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def peer_headers(victim, **changed):
    return {
        "Content-Type": "application/x-p2pdrl",
        "P2PDRL-Protocol": str(PROTOCOL_VERSION),
        "P2PDRL-Sender": LIAR,
        "P2PDRL-Target": "-",
        "P2PDRL-Swarm": victim.status()["swarm_id"],
        "P2PDRL-Meta-Length": "4",
        "P2PDRL-Vector-Length": "0",
        **{name.replace("_", "-"): value for name, value in changed.items()},
    }


def test_strangers_and_browsers(victim):
    unchanged, count = Unchanged(victim), refused(victim)
    assert request(victim, "GET", "/v1/status", {"Host": "evil.example"}) == 403
    assert request(victim, "POST", "/v1/leave", {"Origin": "http://evil.example"}) == 403
    assert request(victim, "POST", "/v1/leave") == 401
    assert request(victim, "POST", "/v1/pause", {"Authorization": "Bearer " + "0" * 64}) == 401
    assert request(victim, "GET", "/v1/nothing") == 404
    pickled = pickle.dumps({"a": 1})
    headers = {"Content-Type": "application/octet-stream"}
    assert request(victim, "POST", "/p2p/exchange", headers, pickled) == 415
    zipped = peer_headers(victim, Content_Encoding="gzip")
    assert request(victim, "POST", "/p2p/exchange", zipped, b"1234") == 415
    assert (
        request(victim, "POST", "/p2p/exchange", peer_headers(victim, P2PDRL_Swarm="0" * 16), b"1234") == 403
    )
    assert (
        request(victim, "POST", "/p2p/exchange", peer_headers(victim, P2PDRL_Target="e" * 32), b"1234") == 403
    )
    huge = peer_headers(victim, P2PDRL_Meta_Length="99999999")
    assert request(victim, "POST", "/p2p/exchange", huge, b"1234") in (400, 413)
    assert refused(victim) > count
    unchanged.check()


ROUTES = ("exchange", "state", "metrics", "swim/ping", "swim/gossip", "swim/join", "swim/sync", "swim/delta")
MALFORMED = {
    "garbage": b"\xff" * 4,
    "deep": b"\x91" * 20000,
    "pickle": pickle.dumps([1]),
    "huge integer": msgspec.msgpack.encode({"a": 2**63}),
    "invalid": b"\xc1\x00\x00\x00",
    "empty": b"",
}


async def refusal(victim, route, meta, vector=None) -> int:
    """Send it as a member would; return the status that it is refused with."""
    transport = HttpTransport(LIAR, victim.status()["swarm_id"], None, clock=SystemClock())
    await transport.start()
    try:
        where = Address("127.0.0.1", victim.port)
        with pytest.raises(PeerRefusedError) as info:
            await transport.call(where, None, route, meta, vector=vector, deadline_s=10, lane="bulk")
    finally:
        await transport.close()
    return info.value.status


async def test_malformed_messages(victim):
    unchanged, count = Unchanged(victim), refused(victim)
    for route in ROUTES:
        for what, meta in MALFORMED.items():
            assert await refusal(victim, route, meta) in (400, 403, 422), (route, what)
    assert refused(victim) >= count + len(ROUTES) * len(MALFORMED)
    unchanged.check()


async def test_poisoned_vectors_and_lies_end_in_quarantine(victim):
    unchanged = Unchanged(victim)
    status, checkpoint = victim.status(), victim.checkpoint()
    record = victim.json("/v1/mode")["record"]
    size = checkpoint.layout.size

    def head(**changed):
        told = {
            "node_id": LIAR,
            "task_hash": checkpoint.meta["task_hash"],
            "layout_hash": checkpoint.layout.hash,
            "mode_epoch": stamp(record["epoch"], record["proposer"]),
            "lineage": status["lineage"],
            "lineage_steps": status["swarm_env_steps"],
            "policy_version": status["policy_version"],
            **changed,
        }
        exchange_id = f"{np.random.default_rng().integers(2**60):016x}"
        return msgspec.msgpack.encode(ExchangeHead(exchange_id, "float32", Summary(**told)))

    def vector(*values):
        vector_D = np.zeros(size, np.float32)
        vector_D[: len(values)] = values
        return vector_D.data.cast("B")

    good = vector(0.1)
    assert await refusal(victim, "exchange", head(layout_hash="0" * 32), good) == 409
    assert await refusal(victim, "exchange", head(task_hash="0" * 32), good) == 409
    assert await refusal(victim, "exchange", head(mode_epoch=99), good) == 409
    assert await refusal(victim, "exchange", head(policy_version=2**52), good) == 409
    assert await refusal(victim, "exchange", head(policy_version=-1), good) == 400
    assert await refusal(victim, "exchange", head(), good[:-4]) == 422
    assert await refusal(victim, "exchange", head(), good[:4]) == 422
    for poison in (vector(np.nan), vector(np.inf), vector(3e38)):
        assert await refusal(victim, "exchange", head(), poison) == 422
    assert await refusal(victim, "exchange", head(), good) == 403, "three strikes are enough"
    assert len(victim.events("strike")) == 3
    assert not victim.status()["healthy"]
    assert "p2pdrl_strikes_total 3.0" in victim.get("/metrics").decode()
    unchanged.check()
