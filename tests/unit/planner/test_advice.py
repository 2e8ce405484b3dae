"""Recommendations on swarms where it is clear what to take."""

from __future__ import annotations

from p2pdrl.config.strategy import AdpsgdConfig, GradAverageConfig, LocalConfig
from p2pdrl.planner.advice import advise, choose
from p2pdrl.planner.description import LAN, WAN, Churn, Machine, SwarmDescription, Update
from p2pdrl.planner.parsing import ALL_STRATEGIES, link_of, machines_of
from p2pdrl.planner.speedup import Speedup, time_to_solve

EVERYTHING = (*ALL_STRATEGIES, GradAverageConfig(backend="torch"))


def predictions(swarm: SwarmDescription) -> list[Speedup]:
    return [time_to_solve(swarm, one, seconds=30) for one in EVERYTHING]


def advice(swarm: SwarmDescription, trust="lan") -> list[str]:
    return advise(swarm, predictions(swarm), trust)


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
        nodes=4,
        size=300_000,
        machines=(Machine(update_s=0.2),),
        links=(link_of("10,60,0"),),
        update=Update(critical_rows=5000),
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


def test_ones_own_machines_may_use_torch():
    swarm = SwarmDescription(nodes=4, size=10**6, machines=(Machine(update_s=0.5),), links=(LAN,))
    assert advice(swarm, "own")[0].startswith("Take grad_average (torch)")
    assert any(word.startswith("grad_average (torch) is out") for word in advice(swarm))


def test_thirty_home_machines_gossip_and_dont_wait_for_each_other():
    swarm = SwarmDescription(nodes=30, machines=(Machine(update_s=0.2),), links=(WAN,))
    found = predictions(swarm)
    adpsgd, rounds = (next(one for one in found if one.label == name) for name in ("adpsgd", "param_average"))
    assert adpsgd.forecast.lost > 0.3, "who is in an exchange refuses others"
    assert adpsgd.forecast.failed < 0.1, "and nobody has waited for that"
    assert rounds.forecast.waiting > 0.5
    first = advise(swarm, found)[0]
    assert first.startswith("Take adpsgd")
    assert rounds.speedup < 1 < adpsgd.speedup


def test_where_nodes_gain_nothing_one_machine_does():
    tiny = Update(rows=100, parts=1, critical_rows=10)
    swarm = SwarmDescription(nodes=4, update=tiny)
    found = predictions(swarm)
    assert choose(swarm, found) is None
    assert advise(swarm, found)[0].startswith("Take local, the fastest machine alone")


def test_a_machine_that_brings_nothing_more_is_told():
    def words(nodes, update):
        swarm, twice = (SwarmDescription(nodes=n, update=update) for n in (nodes, 2 * nodes))
        doubled = time_to_solve(twice, AdpsgdConfig(), seconds=20)
        return advise(swarm, [time_to_solve(swarm, AdpsgdConfig(), seconds=20)], doubled=doubled)

    assert words(2, Update())[1].startswith("4 such machines would be worth")
    last = words(8, Update(parts=4, critical_rows=10.0))[1]
    assert last.startswith("Further machines hardly help: 16 would be worth")
    assert "isn't divided further" in last


def test_kills_that_never_happened_are_told():
    swarm = SwarmDescription(nodes=4, churn=Churn(kills_per_minute=1.0))
    short = [time_to_solve(swarm, one, seconds=2) for one in (AdpsgdConfig(), LocalConfig())]
    assert any(word.startswith("No node was killed in the 2 s") for word in advise(swarm, short))
    enough = [time_to_solve(swarm, AdpsgdConfig())]
    assert not any("No node was killed" in word for word in advise(swarm, enough))
