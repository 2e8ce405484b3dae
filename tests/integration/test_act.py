"""Actions from a real node: JSON, bytes, and a new inference process after each that was killed."""

from __future__ import annotations

import http.client
import json
import os
import signal

import numpy as np

BINARY = {"Content-Type": "application/octet-stream"}


def ask(node, body, query="", headers=None, method="POST"):
    """Return status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    try:
        given = {"Content-Type": "application/json"} if headers is None else headers
        connection.request(method, f"/v1/act{query}", body, given)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def test_a_node_acts_and_acts_again_after_kill_9(swarm, wait_until, small_updates, no_orphans):
    options = [f"--set={key}={value}" for key, value in small_updates.items()]
    node = swarm.found("n0", *options, "--set=node.inference.idle_s=3")
    swarm.training(node)
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype("<f4")
    status, _, body = ask(node, json.dumps({"observations": obs.tolist(), "greedy": True}))
    assert status == 200, body
    told = json.loads(body)
    assert set(told) == {"actions", "values", "log_probs", "policy_version"}
    assert set(told["actions"]) <= {0, 1}
    assert len(told["values"]) == 64
    assert max(told["log_probs"]) <= 0

    node.hold()  # the same parameters for both forms from now on

    def in_both_forms():
        """The answers in JSON and in bytes, when both are of the newest parameters."""
        in_json = json.loads(ask(node, json.dumps({"observations": obs.tolist(), "greedy": True}))[2])
        status, headers, body = ask(node, obs.tobytes(), "?rows=64&greedy=1&values=1", BINARY)
        assert status == 200, body
        versions = {in_json["policy_version"], int(headers["P2PDRL-Policy-Version"])}
        return versions == {node.checkpoint().meta["policy_version"]} and (in_json, body)

    # An update that was under way when the pause came still counts.
    in_json, body = wait_until(in_both_forms, 30, "both forms are answered by the last update")
    assert np.frombuffer(body, "<i8", 64).tolist() == in_json["actions"]
    np.testing.assert_allclose(np.frombuffer(body, "<f4", 64, 512), in_json["values"], rtol=1e-5)

    assert ask(node, json.dumps({"observations": [[0] * 3]}))[0] == 400
    assert ask(node, obs.tobytes()[:-1], "?rows=64", BINARY)[0] == 400

    first = node.status()["inference"]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: node.events("inference-failed"), 10, "its end is told")
    status, _, body = ask(node, json.dumps({"observations": obs.tolist(), "greedy": True}))
    assert status == 200, body
    assert json.loads(body)["actions"] == in_json["actions"]
    second = node.status()["inference"]["pid"]
    assert second != first

    wait_until(lambda: node.status()["inference"]["pid"] is None, 15, "it ends when nobody asks")
    assert len(node.events("inference-failed")) == 1
    assert ask(node, json.dumps({"observations": [0] * 4}))[0] == 200
    text = (node.get("/metrics") or b"").decode()
    assert "p2pdrl_inference_starts_total 3.0" in text
    assert "p2pdrl_inference_failures_total 1.0" in text
    node.post("/v1/leave")
    assert node.wait(30) == 0


def test_a_regression_has_nothing_to_ask(swarm):
    node = swarm.found("n0", "--set=task.algorithm.name=regression", "--set=node.learner.max_updates_per_s=5")
    swarm.training(node)
    status, _, body = ask(node, json.dumps({"observations": [0] * 4}))
    assert (status, b"regression" in body) == (409, True)
