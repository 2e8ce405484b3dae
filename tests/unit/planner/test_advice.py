"""Recommendations on swarms where it is clear what to take."""

from __future__ import annotations

from p2pdrl.planner.advice import advise
from p2pdrl.planner.description import LAN, Churn, Machine, SwarmDescription
from p2pdrl.planner.parsing import ALL_STRATEGIES, link_of, machines_of
from p2pdrl.planner.simulate import predict


def advice(swarm: SwarmDescription, trust="lan") -> list[str]:
    return advise(swarm, [predict(swarm, one, seconds=30) for one in ALL_STRATEGIES], trust)


def test_equal_machines_on_a_lan_average_gradients():
    swarm = SwarmDescription(nodes=4, machines=(Machine(update_s=0.5),), links=(LAN,))
    assert advice(swarm)[0].startswith("Take grad_average")


def test_a_straggler_asks_for_gossip():
    swarm = SwarmDescription(nodes=4, machines=machines_of(4, 0.1, ["1x10"]))
    first = advice(swarm)[0]
    assert first.startswith("Take adpsgd")
    assert "waits" in first


def test_thin_links_ask_for_threshold_messages():
    swarm = SwarmDescription(
        nodes=4, size=300_000, machines=(Machine(update_s=0.2),), links=(link_of("10,60,0"),)
    )
    words = advice(swarm)
    assert words[0].startswith("Take strom"), words
    assert "1%" in words[0], "it says what it takes for granted"
    assert any(word.startswith("adpsgd is out") for word in words)


def test_strangers_rule_out_servers():
    words = advice(SwarmDescription(nodes=4, churn=Churn(kills_per_minute=1)), "strangers")
    assert any(word.startswith("server_async is out") for word in words)
    assert "server" not in words[0]


def test_one_node_needs_no_strategy():
    assert advise(SwarmDescription(nodes=1), []) == [
        "Take local: there is one node, and nobody to agree with."
    ]
