"""Every route of the API over real HTTP: who may ask, what is answered, what is refused."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from aiohttp import web

from p2pdrl.api.routes import mount
from p2pdrl.clock import ManualClock
from p2pdrl.errors import StorageError
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import Operator
from p2pdrl.testing.fake_node import FakeNode
from p2pdrl.transport.auth import (
    OPERATOR_HEADER,
    format_time,
    new_nonce,
    operator_payload,
    sign_api,
    target_proven,
)
from p2pdrl.versions import SPOKEN

KEY = bytes(range(32))


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def start(serve, clock):
    """Serve a node; returns its test client."""

    async def _start(node):
        app = web.Application()
        mount(app, node, clock)
        return await serve(app)

    return _start


def bearer(node):
    return {"Authorization": f"Bearer {node.token}"}


async def target_of(client, *, nonce="0" * 32):
    return (await (await client.get(f"/v1/target?nonce={nonce}")).json())["target"]


async def signed(client, key, method, path, wall_s, nonce=None):
    nonce, target = nonce or new_nonce(), await target_of(client)
    return {
        "P2PDRL-Time": format_time(wall_s),
        "P2PDRL-Nonce": nonce,
        "P2PDRL-Mac": sign_api(key, method, path, wall_s, nonce, target=target),
    }


READS = [
    "/v1/status",
    "/v1/peers",
    "/v1/config",
    "/v1/mode",
    "/v1/rounds",
    "/v1/pipeline/trace",
    "/v1/events?follow=0",
    "/v1/checkpoint",
    "/metrics",
]
CHANGES = [
    "/v1/mode?mode=local",
    "/v1/leave",
    "/v1/dial-back?port=80&nonce=" + "0" * 32,
    "/v1/pause",
    "/v1/resume",
    "/v1/checkpoint",
    "/v1/roles?role=actor",
]


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", *READS])
async def test_a_keyless_node_can_be_read_by_anyone(start, path):
    client = await start(FakeNode())
    assert (await client.get(path)).status == 200


@pytest.mark.parametrize("path", READS)
async def test_with_a_swarm_key_reading_wants_credentials(start, clock, path):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    answer = await client.get(path)
    assert answer.status == 401
    assert "Bearer" in answer.headers["WWW-Authenticate"]
    assert "\n" not in (await answer.json())["error"]
    assert (await client.get(path, headers=bearer(node))).status == 200
    assert (
        await client.get(path, headers=await signed(client, KEY, "GET", path, clock.wall()))
    ).status == 200
    token = node.token.encode()
    assert (
        await client.get(path, headers=await signed(client, token, "GET", path, clock.wall()))
    ).status == 200


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic eDp5"}]
)
async def test_changes_want_credentials_even_on_loopback_without_a_key(start, path, headers):
    node = FakeNode()
    client = await start(node)
    assert (await client.post(path, headers=headers)).status == 401
    assert node.done == []


async def test_changes_are_done_for_the_token(start):
    node = FakeNode()
    client = await start(node)
    answers = [
        await client.post(path, headers=bearer(node))
        for path in [
            "/v1/pause",
            "/v1/pause?scope=swarm",
            "/v1/resume?scope=node",
            "/v1/checkpoint",
            "/v1/roles?role=learner&role=actor",
            "/v1/leave",
        ]
    ]
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 202, 202]
    assert node.done == [
        "pause node",
        "pause swarm",
        "resume node",
        "checkpoint",
        "roles learner,actor",
        "leave",
    ]
    assert (await answers[3].json())["path"].endswith("last.safetensors")


async def test_the_mode_is_changed_by_a_signed_query(start, clock):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    path = "/v1/mode?mode=gossip&set=protocol%3Ddsgd&set=topology%3Dtorus"
    answer = await client.post(path, headers=await signed(client, KEY, "POST", path, clock.wall()))
    assert (answer.status, await answer.json()) == (200, {"ok": True, "epoch": 2, "proposer": "01" * 16})
    assert node.done == ["mode gossip protocol=dsgd topology=torus"]
    other = "/v1/mode?mode=gossip&set=protocol%3Dsgp"
    assert (
        await client.post(other, headers=await signed(client, KEY, "POST", path, clock.wall()))
    ).status == 401
    assert len(node.done) == 1


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("mode=pipeline&set=chunks%3D2", "schedule = interleaved"),
        ("mode=gossip&set=wieght%3D0.3", "did you mean weight?"),
        ("mode=gossip&set=compression%3Dtopk", "isn't an average"),
        ("mode=gossip&set=%00", "KEY=VALUE"),
    ],
)
async def test_a_bad_mode_is_400_with_the_reason(start, query, says):
    node = FakeNode()
    client = await start(node)
    answer = await client.post(f"/v1/mode?{query}", headers=bearer(node))
    assert answer.status == 400
    assert says in (await answer.json())["error"]
    assert node.done == []


async def test_open_metrics_and_health_need_no_credentials(start):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/metrics")).status == 401
    node.open_metrics = True
    answer = await client.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_health_says_why_and_tells_the_data_folder_to_this_machine_only(start):
    node = FakeNode(data_dir="/data/n")
    client = await start(node)
    assert await (await client.get("/healthz")).json() == {
        "ok": True, "reasons": [], "protocol": SPOKEN.oldest, "protocols": SPOKEN.wire, "data_dir": "/data/n",
    }  # fmt: skip
    proxied = await (await client.get("/healthz", headers={"X-Forwarded-For": "203.0.113.9"})).json()
    assert "data_dir" not in proxied
    node.reasons = ["the learner is down"]
    for path in ["/healthz", "/readyz"]:
        answer = await client.get(path)
        assert answer.status == 503
        assert (await answer.json())["reasons"] == ["the learner is down"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_with_a_swarm_key_probes_get_a_verdict_and_who_proves_himself_the_reasons(start, clock, path):
    node = FakeNode(swarm_key=KEY)
    node.reasons = ["in quarantine for bad parameters: n3"]
    client = await start(node)
    proxied = {"X-Forwarded-For": "203.0.113.9"}
    stranger = await client.get(path, headers=proxied)
    assert stranger.status == 503
    assert (await stranger.json()).keys() <= {"ok", "protocol", "protocols"}
    assert (await client.get(path, headers=proxied | {"Authorization": "Bearer wrong"})).status == 401
    proven = await client.get(path, headers=proxied | bearer(node))
    assert (await proven.json())["reasons"] == node.reasons
    signature = await signed(client, KEY, "GET", path, clock.wall())
    assert (await (await client.get(path, headers=proxied | signature)).json())["reasons"] == node.reasons
    assert (await (await client.get(path)).json())["reasons"] == node.reasons  # this machine


async def test_a_signed_request_counts_once_for_its_path_method_and_minute(start, clock):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    good = await signed(client, KEY, "POST", "/v1/pause", clock.wall())
    assert (await client.post("/v1/pause", headers=good)).status == 200
    assert (await client.post("/v1/pause", headers=good)).status == 409
    other_path = await signed(client, KEY, "POST", "/v1/pause", clock.wall())
    assert (await client.post("/v1/leave", headers=other_path)).status == 401
    other_method = await signed(client, KEY, "GET", "/v1/checkpoint", clock.wall())
    assert (await client.post("/v1/checkpoint", headers=other_method)).status == 401
    with_query = await signed(client, KEY, "POST", "/v1/pause", clock.wall())
    assert (await client.post("/v1/pause?scope=swarm", headers=with_query)).status == 401
    stale = await client.post(
        "/v1/pause", headers=await signed(client, KEY, "POST", "/v1/pause", clock.wall() - 61)
    )
    assert stale.status == 401
    assert "clock" in (await stale.json())["error"]
    foreign = await client.post(
        "/v1/pause", headers=await signed(client, b"x" * 32, "POST", "/v1/pause", clock.wall())
    )
    assert foreign.status == 401
    assert node.done == ["pause node"]


@pytest.mark.parametrize("path", ["/v1/pause?scope=swarm", "/v1/leave", "/v1/mode?mode=local"])
@pytest.mark.parametrize("key", [KEY, b"7" * 64])
async def test_a_captured_request_is_worth_nothing_to_another_node(start, clock, path, key):
    """Nor to the same node once it has restarted, when it has forgotten its nonces."""
    nodes = [FakeNode("one", swarm_key=KEY), FakeNode("two", swarm_key=KEY)]
    first, second = [await start(node) for node in nodes]
    captured = await signed(first, key, "POST", path, clock.wall())
    assert (await second.post(path, headers=captured)).status == 401
    assert nodes[1].done == []
    again = await start(nodes[0])
    assert (await again.post(path, headers=captured)).status == 401
    assert nodes[0].done == []
    assert (await first.post(path, headers=captured)).status in (200, 202)


async def test_a_node_proves_whom_to_sign_for_with_each_key_and_to_each_nonce(start):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    said = await (await client.get(f"/v1/target?nonce={'a' * 32}")).json()
    assert said["target"].startswith(f"{node.node_id}.")
    for key in (KEY, node.token.encode()):
        assert any(target_proven(key, said["target"], "a" * 32, proof) for proof in said["proofs"])
        assert not any(target_proven(key, said["target"], "b" * 32, proof) for proof in said["proofs"])
        assert not any(target_proven(key, "another", "a" * 32, proof) for proof in said["proofs"])
    assert not any(target_proven(b"x" * 32, said["target"], "a" * 32, proof) for proof in said["proofs"])
    for bad in ("", "?nonce=", "?nonce=x", f"?nonce={'A' * 32}"):
        assert (await client.get(f"/v1/target{bad}")).status == 400


@pytest.mark.parametrize(
    "spoil",
    [
        {"P2PDRL-Time": "nan"}, {"P2PDRL-Time": ""}, {"P2PDRL-Time": "9" * 400}, {"P2PDRL-Nonce": "x"},
        {"P2PDRL-Mac": "zz"}, {"P2PDRL-Mac": "é" * 64}, {"P2PDRL-Nonce": "é" * 32},
    ],
)  # fmt: skip
async def test_malformed_signatures_are_400(start, clock, spoil):
    node = FakeNode(swarm_key=KEY)
    client = await start(node)
    headers = await signed(client, KEY, "GET", "/v1/status", clock.wall()) | spoil
    assert (await client.get("/v1/status", headers=headers)).status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404), ("GET", "/v1/", 404), ("DELETE", "/v1/status", 405),
        ("GET", "/v1/leave", 405), ("PUT", "/v1/checkpoint", 405), ("POST", "/v1/pause?scope=world", 400),
        ("GET", "/v1/events?since=-1", 400), ("GET", "/v1/events?since=x", 400),
        ("GET", "/v1/events?since=" + "9" * 5000, 400), ("GET", "/v1/events?since=%C2%B2", 400),
        ("GET", "/v1/events?follow=2", 400), ("PUT", "/v1/mode", 405), ("POST", "/v1/mode", 400),
        ("POST", "/v1/mode?mode=local&mode=gossip", 400), ("POST", "/v1/mode?mode=local&weight=1", 400),
        ("POST", "/v1/dial-back", 400), ("POST", "/v1/dial-back?port=0&nonce=" + "0" * 32, 400),
        ("POST", "/v1/dial-back?port=80&nonce=0", 400),
        ("POST", "/v1/roles", 400), ("POST", "/v1/roles?role=king", 400), ("POST", "/v1/roles?as=actor", 400),
        ("POST", "/v1/roles?" + "&role=actor" * 65, 400),
        ("POST", "/v1/mode?mode=gossip" + "&set=weight%3D0.3" * 65, 400),
    ],
)  # fmt: skip
async def test_malformed_requests_are_refused_as_json(start, method, path, status):
    node = FakeNode()
    client = await start(node)
    answer = await client.request(method, path, headers=bearer(node))
    assert answer.status == status
    assert (await answer.json())["error"]
    if status == 405:
        assert answer.headers["Allow"] in {"GET", "POST", "GET, POST"}


@pytest.mark.parametrize("body", [b"{}", b"\x80\x04.", b"[" * 20_000])
async def test_bodies_are_refused(start, body):
    node = FakeNode()
    client = await start(node)
    assert (await client.post("/v1/leave", data=body, headers=bearer(node))).status == 400
    encoded = {**bearer(node), "Content-Encoding": "gzip"}
    assert (await client.post("/v1/leave", data=body, headers=encoded)).status == 415
    assert node.done == []


async def test_a_bearer_token_of_odd_bytes_is_401(start):
    client = await start(FakeNode())
    assert (await client.post("/v1/leave", headers={"Authorization": "Bearer ü\udc80"})).status == 401


async def test_status_with_nan_is_still_json(start):
    node = FakeNode()
    node.state["mean_return"] = math.nan
    client = await start(node)
    text = await (await client.get("/v1/status")).text()
    assert json.loads(text)["mean_return"] is None
    assert "NaN" not in text


async def test_the_export_arrives_whole(start):
    node = FakeNode()
    client = await start(node)
    answer = await client.get("/v1/checkpoint")
    assert answer.headers["Content-Length"] == str(len(await node.export()))
    assert await answer.read() == await node.export()


async def test_an_error_of_the_node_is_told_in_one_line(start):
    class Full(FakeNode):
        async def checkpoint(self):
            raise StorageError("the disk is full:\n free some space")

    node = Full()
    client = await start(node)
    answer = await client.post("/v1/checkpoint", headers=bearer(node))
    assert answer.status == 503
    assert (await answer.json())["error"] == "the disk is full: free some space"


@pytest.mark.parametrize(("query", "status"), [("", 200), ("?seconds=0.5", 200), ("?seconds=60", 200)])
async def test_a_timeline_of_so_many_seconds(start, query, status):
    client = await start(FakeNode())
    answer = await client.get(f"/v1/pipeline/trace{query}")
    assert answer.status == status
    assert (await answer.json())["seconds"] == float(query.partition("=")[2] or 2)


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "soon"])
async def test_a_timeline_of_nonsense_is_refused(start, seconds):
    client = await start(FakeNode())
    answer = await client.get(f"/v1/pipeline/trace?seconds={seconds}")
    assert answer.status == 400


async def test_without_a_pipeline_there_is_no_timeline(start):
    node = FakeNode()
    node.timeline = None
    answer = await (await start(node)).get("/v1/pipeline/trace")
    assert (answer.status, "no pipeline" in (await answer.json())["error"]) == (400, True)


ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)


def operated():
    node = FakeNode(swarm_key=KEY)
    node.swarm_records.use_roots([Operator(ALICE.public_key, "alice")])
    return node


def by(operator, headers):
    signature = operator.sign(operator_payload(headers["P2PDRL-Mac"]))
    return headers | {OPERATOR_HEADER: f"{operator.public_key.hex()}.{signature.hex()}"}


@pytest.mark.parametrize("path", ["/v1/leave", "/v1/pause", "/v1/checkpoint", "/v1/roles?role=actor"])
async def test_where_operators_command_the_swarms_key_alone_changes_no_node(start, clock, path):
    node = operated()
    client = await start(node)

    async def post(dress):
        headers = dress(await signed(client, KEY, "POST", path, clock.wall()))
        return (await client.post(path, headers=headers)).status

    assert await post(lambda headers: headers) == 403
    assert await post(lambda headers: by(MALLORY, headers)) == 403
    other = by(ALICE, await signed(client, KEY, "POST", "/v1/leave?x=1", clock.wall()))[OPERATOR_HEADER]
    assert await post(lambda headers: headers | {OPERATOR_HEADER: other}) == 403
    for odd in ("", ".", "é.é", f"{'0' * 64}.{'0' * 128}", "0" * 300):
        assert await post(lambda headers, odd=odd: headers | {OPERATOR_HEADER: odd}) == 403, odd
    assert node.done == []
    assert await post(lambda headers: by(ALICE, headers)) < 300
    token = await signed(client, node.token.encode(), "POST", path, clock.wall())
    assert (await client.post(path, headers=token)).status < 300, "its owner needs no operator"
    assert len(node.done) == 2


async def test_records_are_read_and_given_by_who_holds_the_key(start, clock):
    node = operated()
    client = await start(node)
    assert (await client.get("/v1/records")).status == 401
    headers = await signed(client, KEY, "GET", "/v1/records", clock.wall())
    told = await (await client.get("/v1/records", headers=headers)).json()
    assert told == node.records()
    assert [operator["name"] for operator in told["operators"]] == ["alice"]
    record = node.swarm_records.compose("pause", {"paused": True}, ALICE)
    for body, status in ((msgspec.msgpack.encode(record), 200), (b"x" * 20_000, 413)):
        headers = await signed(client, KEY, "POST", "/v1/records", clock.wall())
        assert (await client.post("/v1/records", headers=headers, data=body)).status == status
    assert node.done == ["record pause"]
