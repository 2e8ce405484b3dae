"""``p2pdrl mode`` and ``rounds``, against a fake node over real HTTP."""

from __future__ import annotations

import json

import pytest


def follow(node, **late):
    """Everybody follows epoch 2 at once, but those that a test names with what they say instead."""
    strategy = {"mode": "gossip", "protocol": "dsgd", "options": {}}
    node.mode_state |= {"epoch": 2, **strategy}
    node.mode_state["record"] |= {"epoch": 2, **strategy}
    for member in node.mode_state["members"]:
        member |= {"epoch": 2, "protocol": "dsgd", "follows": True}
        member |= late.get(member["name"].replace("-", "_"), {})


def test_show(p2pdrl, served):
    served.node.mode_state["facts"] = {"group": {"generation": 3, "members": ["a", "b"]}, "role": "server"}
    result = p2pdrl("mode", "show", "--api", served.address)
    assert result.exit_code == 0
    for part in ["gossip: adpsgd (weight=0.3)", "node-1", "node-2", "2023-11", "generation 3, members a, b"]:
        assert part in result.stdout
    assert json.loads(p2pdrl("mode", "show", "--json", "--api", served.address).stdout)["epoch"] == 1


def test_show_tells_what_is_coming_and_what_failed(p2pdrl, served):
    served.node.mode_state["record"] |= {"epoch": 2, "mode": "server-sync", "protocol": "server_sync"}
    served.node.mode_state["error"] = "this node can't run it\x1b[2J"
    served.node.mode_state["members"][1]["follows"] = False
    shown = p2pdrl("mode", "show", "--api", served.address).stdout
    assert "server-sync (weight=0.3), epoch 2" in shown
    assert "this node can't run it?[2J" in shown
    assert "not yet" in shown


def test_show_has_the_measured_beside_the_predicted(p2pdrl, served):
    served.node.mode_state["facts"] = {
        "why": "x" * 90 + " " + "y" * 390, "limited": "z" * 300, "generation": 3,
        "predicted_step_s": 0.00114, "predicted_bubble": 0.336, "measured_step_s": 0.0021,
        "measured_bubble": 0.77,
    }  # fmt: skip
    shown = p2pdrl("mode", "show", "--api", served.address).stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["step", "2.1", "ms", "measured", "here,", "1.1", "ms", "predicted"] in rows
    assert ["bubble", "77%", "measured", "here,", "34%", "predicted"] in rows
    assert (shown.count("y") > 385, shown.count("z")) == (True, 300), "reasons are long"
    served.node.mode_state["facts"] = {
        "predicted_step_s": 0.5,
        "measured_bubble": "x",
        "predicted_bubble": None,
    }
    shown = p2pdrl("mode", "show", "--api", served.address).stdout
    assert "500 ms predicted" in shown
    assert "bubble" not in shown


@pytest.mark.parametrize("odd", [{}, {"members": 3, "facts": 3, "record": "x"}, {"members": [None, {}]}])
def test_an_odd_mode_is_shown_as_far_as_it_goes(p2pdrl, served, odd):
    served.node.mode_state = odd
    if isinstance(odd.get("members"), int):
        served.node.mode_state["members"] = []
    assert p2pdrl("mode", "show", "--api", served.address).exit_code == 0


def test_set_waits_until_everybody_follows(p2pdrl, served):
    served.node.on_mode = follow
    result = p2pdrl("mode", "set", "gossip", "--set", "protocol=dsgd", "--api", served.address)
    assert result.exit_code == 0
    assert result.stdout == "mode is gossip: dsgd (topology=ring), epoch 2\n"
    assert "2 of 2 members are in mode gossip: dsgd (topology=ring)" in result.stderr
    assert served.node.done == ["mode gossip protocol=dsgd"]


def test_set_tells_who_isnt_there_in_time(p2pdrl, served):
    served.node.on_mode = lambda node: follow(node, node_2={"follows": False, "epoch": 1})
    result = p2pdrl("mode", "set", "gossip", "--wait", "0.3", "--api", served.address)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith(
        "after 0.3 s not everybody is in mode gossip: adpsgd: node-2 is at epoch 1"
    )
    assert "1 of 2 members" in result.stderr


def test_set_tells_who_cant_run_it_and_who_is_silent(p2pdrl, served):
    served.node.on_mode = lambda node: follow(
        node, node_1={"follows": False}, node_2={"follows": False, "state": "unheard"}
    )
    result = p2pdrl("mode", "set", "gossip", "--wait", "0", "--api", served.address)
    assert result.exit_code == 1
    assert "node-1 can't run it" in result.stderr
    assert "node-2 hasn't been heard of" in result.stderr


def test_set_tells_when_another_proposal_won(p2pdrl, served):
    def lose(node):
        follow(node)
        node.mode_state["record"] |= {"proposer": "f" * 32, "proposer_name": "node-2", "options": {}}
        node.mode_state["record"] |= {"mode": "pipeline", "protocol": "pipeline"}

    served.node.on_mode = lose
    result = p2pdrl("mode", "set", "gossip", "--api", served.address)
    assert result.exit_code == 1
    assert "another mode was proposed at the same time and counts: pipeline by node-2" in result.stderr


def test_set_without_waiting(p2pdrl, served):
    result = p2pdrl("mode", "set", "server-sync", "--servers", "2", "--no-wait", "--api", served.address)
    assert result.exit_code == 0
    assert result.stdout == "proposed mode server-sync (servers=2), epoch 2\n"
    assert served.node.done == ["mode server-sync servers=2"]


def test_set_takes_stages(p2pdrl, served):
    args = ["--stages", "3", "--set", "microbatches=8", "--no-wait"]
    result = p2pdrl("mode", "set", "pipeline", *args, "--api", served.address)
    words = "pipeline (stages=3, schedule=1f1b, microbatches=8, backend=auto)"
    assert result.stdout == f"proposed mode {words}, epoch 2\n"
    assert served.node.done == ["mode pipeline microbatches=8 stages=3"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["pipeline", "--set", "chunks=2"], "schedule = interleaved"),
        (["gosip"], "did you mean gossip?"),
        (["gossip", "--set", "wieght=0.3"], "did you mean weight?"),
        (["gossip", "--set", "weight=2"], "≤ 0.5"),
        (["gossip", "--servers", "2"], "'servers': server_sync and server_async have it"),
        (["gossip", "--stages", "2"], "adpsgd has no option 'stages': it belongs to mode pipeline"),
        (["gossip", "--set", "compression=int8"], "isn't an average"),
        (["server-sync", "--servers", "0"], "--servers takes a whole number of at least 1"),
        (["pipeline", "--stages", "65"], "a whole number from 1 to 64"),
        (["pipeline", "--set", "cuts=1,2"], "2 peers with 1 stage each need 1 cut, not 2"),
    ],
)
def test_mistakes_are_exit_2_before_anything_is_asked(p2pdrl, free_address, args, says):
    result = p2pdrl("mode", "set", *args, "--api", free_address)
    assert result.exit_code == 2
    assert says in result.stderr


def test_what_the_node_refuses_is_exit_2_too(p2pdrl, served):
    from p2pdrl.errors import ConfigError

    def refuse(_node):
        raise ConfigError("task.strategy.backend: torch.distributed listens without authentication")

    served.node.on_mode = refuse
    result = p2pdrl("mode", "set", "allreduce", "--set", "backend=torch", "--api", served.address)
    assert result.exit_code == 2
    assert "without authentication" in result.stderr


@pytest.mark.parametrize("command", [["mode", "show"], ["mode", "set", "local"], ["rounds"]])
def test_nobody_there_is_exit_3(p2pdrl, free_address, command):
    assert p2pdrl(*command, "--api", free_address).exit_code == 3


def test_status_shows_the_strategy(p2pdrl, served):
    served.node.state["strategy"] = {"name": "dsgd", "options": {"topology": "torus"}}
    assert "gossip: dsgd (topology=torus), epoch 1" in p2pdrl("status", "--api", served.address).stdout


def test_rounds(p2pdrl, served):
    result = p2pdrl("rounds", "--api", served.address)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    whole = " ".join(" ".join(lines).split())
    for part in ["ok", "timeout", "×0.50", "40.0 kB", "12 ms", "0.25"]:
        assert part in whole
    assert len(json.loads(p2pdrl("rounds", "--json", "--api", served.address).stdout)) == 2
    last = json.loads(p2pdrl("rounds", "-n", "1", "--json", "--api", served.address).stdout)
    assert [one["number"] for one in last] == [2]


def test_no_rounds_yet(p2pdrl, served):
    served.node.last_rounds = []
    assert p2pdrl("rounds", "--api", served.address).stdout == "no rounds yet\n"


def test_names_in_rounds_cant_steer_the_terminal(p2pdrl, served):
    served.node.last_rounds[0]["merged"][0]["name"] = "\x1b[2J"
    served.node.last_rounds[1] |= {"error": "[red]\x07", "missing": ["\r"], "merged": [None]}
    shown = p2pdrl("rounds", "--api", served.address).stdout
    assert not {"\x1b", "\x07", "\r"} & set(shown)
