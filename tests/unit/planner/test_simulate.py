"""Whole predictions: closed forms where there are some, and what must hold for every strategy."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    GalaConfig,
    GradAverageConfig,
    LocalConfig,
    ParamAverageConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StromConfig,
)
from p2pdrl.planner.description import LAN, WAN, CallCosts, Churn, Machine, NodeLink, SwarmDescription
from p2pdrl.planner.gossip import GalaModel
from p2pdrl.planner.network import sparse_nbytes
from p2pdrl.planner.parsing import ALL_STRATEGIES
from p2pdrl.planner.simulate import predict
from p2pdrl.planner.world import World

STEADY = Machine(update_s=0.1, jitter=0.0)
BETTER = (Machine(update_s=0.1),)


def swarm(nodes: int = 4, **options: object) -> SwarmDescription:
    return SwarmDescription(**({"nodes": nodes, "machines": (STEADY,)} | options))


def name(strategy: object) -> str:
    return type(strategy).__name__


@pytest.mark.parametrize("strategy", ALL_STRATEGIES, ids=name)
def test_the_same_seed_gives_the_same_figures(strategy):
    one = predict(swarm(5, machines=BETTER, links=(WAN,)), strategy, seconds=5, seed=3)
    assert predict(swarm(5, machines=BETTER, links=(WAN,)), strategy, seconds=5, seed=3) == one


@pytest.mark.parametrize("strategy", ALL_STRATEGIES, ids=name)
def test_figures_stay_in_their_ranges_while_nodes_come_and_go(strategy):
    busy = swarm(6, machines=BETTER, churn=Churn(kills_per_minute=20, joins_per_minute=20))
    found = predict(busy, strategy, seconds=20, seed=1)
    assert 0 <= found.waiting <= 1
    assert 0 <= found.lost <= 1
    assert found.fresh_updates_s >= 0
    assert found.fresh_updates_s <= found.healthy_updates_s
    assert found.updates_s > 1, "the swarm goes on"
    assert found.wire_out_s >= found.bytes_out_s


@pytest.mark.parametrize("strategy", ALL_STRATEGIES, ids=name)
def test_one_node_alone_trains_at_its_own_pace(strategy):
    found = predict(swarm(1), strategy, seconds=10)
    learners = getattr(strategy, "learners", 1)
    assert found.updates_s == pytest.approx(10 * learners, rel=0.06)
    assert found.bytes_out_s == 0


def test_bytes_of_pairwise_exchanges_are_those_of_the_vectors():
    found = predict(swarm(2, size=1000), AdpsgdConfig(compression="none"), seconds=30)
    exchanges = found.rounds_s * 2
    assert found.bytes_out_s == pytest.approx(4000 * exchanges, rel=0.02)
    assert found.bytes_in_s == pytest.approx(found.bytes_out_s, rel=0.02)


def test_bytes_of_an_average_are_those_of_one_owner():
    found = predict(swarm(4, size=1000), GradAverageConfig(), seconds=30)
    # Three send their part (2 bytes an element) and get the average; the owner sends three.
    assert found.bytes_out_s == pytest.approx(found.rounds_s * (3 * 2000 + 3 * 2000) / 4, rel=0.02)


def test_bytes_of_a_ring_are_two_vectors_a_round():
    found = predict(swarm(8, size=1000), DsgdConfig(), seconds=30)
    assert found.bytes_out_s == pytest.approx(found.rounds_s * 2 * 2000, rel=0.02)


def test_a_round_of_gradients_takes_the_slowest_and_the_wire():
    costs = CallCosts(call_s=0, byte_s=0, post_s=0, call_bytes=0)
    link = NodeLink(delay_s=0.05, out_bytes_s=1e12, in_bytes_s=1e12)
    found = predict(swarm(4, costs=costs, links=(link,)), GradAverageConfig(), seconds=60)
    assert 1 / found.updates_s == pytest.approx(0.1 + 4 * 0.05, rel=0.05)
    assert found.waiting == pytest.approx(0.2 / 0.3, rel=0.05)


def test_one_straggler_slows_rounds_and_not_gossip():
    machines = (STEADY, STEADY, STEADY, Machine(update_s=0.1, jitter=0.0, factor=10))
    slow = swarm(4, machines=machines)
    assert slow.stragglers == (3,)
    assert predict(slow, GradAverageConfig(), seconds=30).healthy_updates_s == pytest.approx(1, rel=0.1)
    assert predict(slow, AdpsgdConfig(), seconds=30).healthy_updates_s == pytest.approx(10, rel=0.05)
    spared = predict(slow, ServerSyncConfig(backups=1), seconds=30)
    assert spared.healthy_updates_s == pytest.approx(9, rel=0.1)
    assert spared.outcomes["late"] > 10


def test_updates_between_rounds_begin_on_own_work():
    found = predict(swarm(), ParamAverageConfig(every_updates=4), seconds=30)
    assert found.fresh_updates_s == pytest.approx(found.updates_s / 4, rel=0.05)
    assert predict(swarm(), LocalConfig(), seconds=30).fresh_updates_s == 0


@pytest.mark.parametrize("strategy", [AdpsgdConfig(), SgpConfig(), DsgdConfig()], ids=name)
def test_nodes_come_together(strategy):
    found = predict(swarm(8), strategy, seconds=60)
    assert found.consensus_s is not None
    assert found.left <= 0.01
    parts = [part for _, part in found.walk]
    assert parts[0] == 1.0
    assert parts[-1] <= 0.01


def test_exchanges_to_consensus_follow_the_contraction_of_sweeps():
    # Each node begins one exchange in each sweep, which leaves 1/(2√e) of the squared distance (Jelasity
    # 2005, "Gossip-based aggregation in large dynamic networks"). 1e-4 of 16: ln 1e4 / 1.193 · 16 = 123.
    found = [predict(swarm(16, machines=BETTER), AdpsgdConfig(), seconds=30, seed=seed) for seed in range(8)]
    mean = sum(one.consensus_exchanges for one in found) / len(found)
    assert mean == pytest.approx(123, rel=0.2)


def test_who_has_not_begun_refuses_pushes_and_early_ones_are_a_turn_ahead():
    # Each pushes to the next one up the ring first, who begins later for about half of them. Nodes that all
    # take the same turn at the same time need about 62 pushes to 1 %, those that begin raggedly 73.
    config = SgpConfig(every_updates=0, every_s=1.0)
    found = [predict(swarm(8), config, seconds=30, seed=seed) for seed in range(16)]
    refused = [one.outcomes["refused"] for one in found]
    assert all(1 <= count <= 7 for count in refused), "the first one's is refused, the last one's isn't"
    assert sum(refused) / len(refused) == pytest.approx(4, abs=0.8)
    assert sum(one.consensus_exchanges for one in found) / len(found) == pytest.approx(73, rel=0.1)


def test_a_vector_that_comes_is_averaged_at_once_if_an_update_has_been_made_since_the_last_one():
    world = World(swarm(2), GalaConfig(every_updates=0, every_s=1000.0), 2, seed=0)
    model, x_NE = GalaModel(GalaConfig(every_updates=0, every_s=1000.0), world), world.replicas.x_NE
    mine_E, theirs_E = x_NE.copy()
    model.updated(0)
    arrive = model._arrive  # noqa: SLF001 - at a moment of its own
    arrive(1, 0, (0, theirs_E), 100.0, 0.0)
    assert x_NE[0] == pytest.approx((mine_E + theirs_E) / 2)
    arrive(1, 0, (0, theirs_E), 100.0, 0.0)
    assert x_NE[0] == pytest.approx((mine_E + theirs_E) / 2), "not twice after one update"
    model.updated(0)
    assert x_NE[0] == pytest.approx((mine_E + 3 * theirs_E) / 4)


@pytest.mark.parametrize("seed", [4, 8, 30])
def test_rounds_with_neighbours_go_on_after_one_came_late(seed):
    # These seeds have a learner that comes later than its neighbours' patience, which is short at first.
    late = swarm(8, machines=(Machine(update_s=0.5, jitter=0.02),), costs=CallCosts(call_s=0.005))
    found = predict(late, DsgdConfig(), seconds=60, seed=seed)
    assert found.outcomes["late edges"] > 0
    assert found.rounds_s == pytest.approx(1 / 0.53, rel=0.05)
    assert found.consensus_s is not None


def test_strom_pushes_to_each_of_the_others_after_each_update():
    found = predict(swarm(5, size=1000, moved=0.1), StromConfig(), seconds=30)
    assert found.rounds_s == pytest.approx(4 * found.updates_s, rel=0.02)
    assert found.bytes_out_s == pytest.approx(found.rounds_s * sparse_nbytes(1000, 0.1), rel=1e-6)
    assert found.bytes_in_s == pytest.approx(found.bytes_out_s, rel=1e-6)
    assert found.wire_in_s == pytest.approx(found.wire_out_s, rel=1e-6)


def test_asynchronous_servers_age_gradients_by_the_number_of_workers():
    found = predict(swarm(8, machines=BETTER), ServerAsyncConfig(ahead=0), seconds=30)
    # While one computes, each of the seven others steps once.
    assert found.staleness == pytest.approx(7, rel=0.2)


@pytest.mark.parametrize("stale", ["drop", "scale"])
def test_asynchronous_servers_refuse_a_straggler_or_take_it(stale):
    """Three workers make 60 steps while the fourth, 20 times slower, computes one gradient."""
    machines = (STEADY, STEADY, STEADY, Machine(update_s=2.0, jitter=0.0))
    found = predict(
        swarm(4, machines=machines), ServerAsyncConfig(ahead=0, max_staleness=20, stale=stale), seconds=60
    )
    assert found.outcomes.get("stale", 0) == (pytest.approx(29, abs=1) if stale == "drop" else 0)


def test_a_thin_link_bounds_what_is_exchanged():
    thin = NodeLink(delay_s=0.001, out_bytes_s=1e5, in_bytes_s=1e5)
    found = predict(
        swarm(4, size=100_000, links=(thin,)), SgpConfig(partners="ring", deadline_s=60), seconds=60
    )
    assert found.bytes_out_s <= 1e5
    assert found.bytes_out_s > 0.8e5


def test_loss_costs_time_on_long_ways():
    far = NodeLink(delay_s=0.05, out_bytes_s=1e8, in_bytes_s=1e8)
    lossy = msgspec.structs.replace(far, loss=0.01)
    clean = predict(swarm(4, size=1_000_000, links=(far,)), GradAverageConfig(), seconds=60)
    worse = predict(swarm(4, size=1_000_000, links=(lossy,)), GradAverageConfig(), seconds=60)
    assert worse.updates_s < 0.5 * clean.updates_s


def test_sixty_nodes_agree_on_each_strategy_that_averages_exactly():
    for strategy in (GradAverageConfig(), ParamAverageConfig(), ServerSyncConfig()):
        found = predict(swarm(60, links=(LAN,)), strategy, seconds=10)
        assert found.consensus_exchanges == 60


def test_seconds_must_be_positive():
    with pytest.raises(ValueError, match="above zero"):
        predict(swarm(), LocalConfig(), seconds=0)
