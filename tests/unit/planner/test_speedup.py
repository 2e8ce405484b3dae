"""What a swarm's updates are worth, on swarms simple enough to reckon by hand."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    GradAverageConfig,
    LocalConfig,
    ServerAsyncConfig,
    StrategyConfig,
    StromConfig,
)
from p2pdrl.planner.description import CallCosts, Machine, NodeLink, SwarmDescription, Update
from p2pdrl.planner.parsing import ALL_STRATEGIES
from p2pdrl.planner.speedup import AVERAGED, MOST_UPDATES, Speedup, divided, parts_of, time_to_solve

FREE = CallCosts(call_s=0, byte_s=0, post_s=0, call_bytes=0, background_bytes_s=0)
FAST = NodeLink(delay_s=0, out_bytes_s=1e15, in_bytes_s=1e15)


def swarm(nodes: int, **changes: object) -> SwarmDescription:
    """Machines that make an update in a second; the network takes no time."""
    given = {
        "size": 10,
        "machines": (Machine(update_s=1.0, jitter=0.0),),
        "links": (FAST,),
        "costs": FREE,
        "update": Update(rows=1000, parts=16, fixed=0.0, critical_rows=1000),
    }
    return SwarmDescription(nodes=nodes, **{**given, **changes})


def predicted(nodes: int, strategy: StrategyConfig, **changes: object) -> Speedup:
    return time_to_solve(swarm(nodes, **changes), strategy, seconds=60)


def test_a_divided_update_takes_its_part_and_what_is_fixed():
    update = Update(fixed=0.2, parts=4)
    parts = divided(swarm(2, update=update), GradAverageConfig())
    assert [machine.update_s for machine in parts.machines] == pytest.approx([0.2 + 0.8 / 2])
    assert parts_of(swarm(9, update=update), AdpsgdConfig()) == 4
    for alone in (LocalConfig(), StromConfig(), ServerAsyncConfig(), GradAverageConfig(reduce="sum")):
        assert parts_of(swarm(9), alone) == 1
        assert divided(swarm(9), alone).machines[0].update_s == 1.0


def test_exact_averages_of_a_divided_update_are_n_times_as_fast():
    found = predicted(4, GradAverageConfig())
    assert (found.label, found.parts) == ("grad_average", 4)
    assert found.speedup == pytest.approx(4.0, rel=0.05)


def test_beyond_its_parts_an_update_grows_and_is_worth_less():
    few = Update(rows=1000, parts=4, fixed=0.0, critical_rows=1000)
    found = predicted(16, GradAverageConfig(), update=few)
    # four times the data for each update: (1 + 4) / (1 + 1) as many rows, at sixteen times the rate
    assert found.speedup == pytest.approx(16 * 2 / 5, rel=0.05)
    large = msgspec.structs.replace(few, critical_rows=1e6)
    assert predicted(16, GradAverageConfig(), update=large).speedup == pytest.approx(16, rel=0.06)


def test_unknown_critical_rows_are_half_of_an_updates():
    unknown, half = (Update(rows=1000, parts=1, critical_rows=rows) for rows in (0.0, 500.0))
    assert (
        predicted(4, StromConfig(), update=unknown).speedup
        == predicted(4, StromConfig(), update=half).speedup
    )


def test_nodes_that_never_meet_are_worth_the_fastest_of_them():
    assert predicted(4, LocalConfig()).speedup == 1.0
    assert predicted(1, AdpsgdConfig()).speedup == 1.0


def test_averaged_parameters_are_worth_a_little_less():
    found = predicted(2, AdpsgdConfig(every_updates=1, min_interval_s=0.0))
    assert 1.6 * AVERAGED < found.speedup <= 2.0 * AVERAGED


def test_the_fastest_machine_is_what_a_swarm_is_compared_with():
    machines = (Machine(update_s=1.0, jitter=0.0), Machine(update_s=1.0, factor=10.0, jitter=0.0))
    found = predicted(2, GradAverageConfig(), machines=machines)
    assert found.speedup == pytest.approx(0.2, rel=0.1), "all wait for the slow one"


def test_torch_is_told_apart_and_has_no_heads_to_send():
    own = predicted(8, GradAverageConfig(), size=10**7, links=(NodeLink(),), costs=CallCosts())
    torch = predicted(
        8, GradAverageConfig(backend="torch"), size=10**7, links=(NodeLink(),), costs=CallCosts()
    )
    assert torch.label == "grad_average (torch)"
    # 2 · 7/8 of 20 MB at 125 MB/s, and an update of 1/8 s
    round_s = 2 * 7 / 8 * 2e7 / 1.25e8
    assert torch.forecast.updates_s == pytest.approx(1 / (0.125 + round_s), rel=0.05)
    assert own.speedup < torch.speedup


def test_as_long_as_some_nodes_take_to_be_killed():
    churn = {"kills_per_minute": 1.0}
    described = msgspec.convert({"nodes": 4, "churn": churn}, SwarmDescription)
    assert time_to_solve(described, AdpsgdConfig()).forecast.seconds == 180
    assert time_to_solve(described, AdpsgdConfig()).forecast.kills > 0
    many = msgspec.convert({"nodes": 1000, "churn": churn}, SwarmDescription)
    seconds = time_to_solve(many, LocalConfig()).forecast.seconds
    assert seconds == pytest.approx(MOST_UPDATES / 1e4, rel=0.01)


@pytest.mark.parametrize("strategy", ALL_STRATEGIES, ids=lambda one: type(one).__struct_config__.tag)
def test_all_can_be_weighed(strategy):
    found = time_to_solve(SwarmDescription(nodes=3), strategy, seconds=10)
    assert 0 < found.speedup <= 3.3
