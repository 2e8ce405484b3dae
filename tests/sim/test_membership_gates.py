"""The promises of the membership protocol, measured on simulated swarms.

A handful of seeds run always; the campaign over 200 seeds and the long ones are marked slow.
"""

from __future__ import annotations

import pytest

from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.testing.membership_simulator import SimulatedSwarm

DETECTION_S = {8: 8.0, 32: 11.0, 100: 15.0}
HEAL_S = {8: 15.0, 20: 15.0, 100: 45.0}

slow = pytest.mark.slow
SEEDS = [*range(3), *(pytest.param(seed, marks=slow) for seed in range(3, 20))]
FEW_SEEDS = [0, *(pytest.param(seed, marks=slow) for seed in range(1, 20))]


def settled(n: int, seed: int, **options: object) -> SimulatedSwarm:
    swarm = SimulatedSwarm(n, seed=seed, **options)
    swarm.run(max(8.0, 0.6 * n) + 0.37 * seed % 1.0)  # long enough for everybody to have met most others
    return swarm


@pytest.mark.parametrize(
    ("n", "seed"),
    [
        pytest.param(n, seed, marks=[slow] if seed >= (1 if n == 100 else 3) else [])
        for n in DETECTION_S
        for seed in range(200)
    ],
)
def test_the_last_survivor_knows_of_a_kill_in_time(n: int, seed: int) -> None:
    swarm = settled(n, seed)
    swarm.kill(3)
    assert swarm.seconds_until(lambda: swarm.all_see(3, "dead"), DETECTION_S[n]) is not None
    assert swarm.converged()
    assert {event.member.name for _, _, event in swarm.told("dead")} == {"n3"}


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize("n", [8, 32])
def test_a_machine_that_vanishes_is_found_too(n: int, seed: int) -> None:
    swarm = settled(n, seed)
    swarm.unplug(3)
    assert swarm.seconds_until(lambda: swarm.all_see(3, "dead"), DETECTION_S[n] + 4.0) is not None
    reasons = {event.reason for _, _, event in swarm.told("dead")}
    assert any("relays could not reach it either" in reason for reason in reasons)


@pytest.mark.parametrize("n", [2, 8, 32, 100])
def test_an_idle_swarm_is_quiet(n: int) -> None:
    swarm = SimulatedSwarm(n, seed=n, count_bytes=True)
    swarm.run(20.0)
    messages, nbytes = swarm.messages, swarm.nbytes
    swarm.run(60.0)
    assert (swarm.messages - messages) / n / 60 <= 2.5
    assert (swarm.nbytes - nbytes) / n / 60 <= 400


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize(("n", "loss"), [(8, 0.0), (8, 0.2), pytest.param(32, 0.0, marks=slow)])
def test_nobody_dies_in_ten_idle_minutes(n: int, loss: float, seed: int) -> None:
    swarm = SimulatedSwarm(n, seed=seed, loss=loss)
    swarm.run(600.0)
    assert swarm.told("dead") == []


@slow
@pytest.mark.parametrize("seed", range(200))
def test_nobody_dies_in_ten_idle_minutes_campaign(seed: int) -> None:
    swarm = SimulatedSwarm(8, seed=seed, loss=0.2)
    swarm.run(600.0)
    assert swarm.told("dead") == []


@slow
@pytest.mark.parametrize(("n", "loss"), [(32, 0.2), (100, 0.0), (100, 0.2)])
def test_nobody_dies_in_ten_idle_minutes_when_many(n: int, loss: float) -> None:
    swarm = SimulatedSwarm(n, seed=7, loss=loss)
    swarm.run(600.0)
    assert swarm.told("dead") == []


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize("n", [8, 32])
def test_a_pause_shorter_than_the_minimum_suspicion_kills_nobody(n: int, seed: int) -> None:
    swarm = settled(n, seed)
    swarm.pause(1)
    swarm.run(swarm.config.suspicion_min_s(n) - 0.1)
    swarm.resume(1)
    swarm.run(20.0)
    assert swarm.told("dead") == []
    assert swarm.converged()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [8, 32])
def test_a_node_stopped_for_20_s_refutes_its_death(n: int, seed: int) -> None:
    swarm = settled(n, seed)
    swarm.pause(1)
    swarm.run(20.0)
    assert swarm.all_see(1, "dead")
    swarm.resume(1)
    assert swarm.seconds_until(swarm.converged, 15.0) is not None
    assert {event.member.name for _, _, event in swarm.told("dead")} == {"n1"}  # it accuses nobody


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize(
    ("n", "split"),
    [pytest.param(n, split, marks=[slow] if n == 100 else []) for n in HEAL_S for split in ("half", "one")],
)
def test_a_partition_of_60_s_heals(n: int, split: str, seed: int) -> None:
    swarm = settled(n, seed)
    first = n // 2 if split == "half" else 1
    swarm.partition(range(first), range(first, n))
    swarm.run(60.0)
    assert not swarm.converged()
    swarm.heal()
    assert swarm.seconds_until(swarm.converged, HEAL_S[n]) is not None


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("after_s", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("address", [None, "10.200.0.1:7600"])
def test_a_killed_node_that_restarts_is_taken_at_once(after_s: float, address: str | None, seed: int) -> None:
    swarm = settled(8, seed)
    swarm.kill(5)
    swarm.run(after_s)
    swarm.restart(5, through=0, address=address)
    assert swarm.seconds_until(swarm.converged, 5.0) is not None
    swarm.run(30.0)
    assert swarm.converged()
    if address is not None:
        views = [swarm.nodes[i].core.member(swarm.nodes[5].signer.node_id, swarm.now) for i in (0, 1, 7)]
        assert all(view is not None and view.address == address for view in views)


def test_a_leaver_is_known_to_have_left_and_is_never_dead() -> None:
    swarm = settled(8, 0)
    swarm.leave(2)
    assert swarm.seconds_until(lambda: swarm.all_see(2, "left"), 3.0) is not None
    swarm.run(30.0)
    assert swarm.told("dead") == []
    swarm.restart(2, through=0)
    assert swarm.seconds_until(swarm.converged, 5.0) is not None


def test_strangers_meet_through_one_of_them() -> None:
    swarm = SimulatedSwarm(16, seed=2, acquainted=False)
    for number in range(1, 16):
        swarm.join(number, 0)
    assert swarm.seconds_until(swarm.converged, 10.0) is not None


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize("n", [32, 64])
def test_newcomers_that_come_all_at_once_meet(n: int, seed: int) -> None:
    """More than one member's word is good for: those beyond it answer a ping first."""
    swarm = SimulatedSwarm(n, seed=seed, acquainted=False)
    for number in range(1, n):
        swarm.join(number, 0)
    assert swarm.seconds_until(swarm.converged, 15.0) is not None


def test_a_one_way_cut_kills_nobody() -> None:
    swarm = settled(8, 0)
    swarm.cut_one_way(1, 2)
    swarm.run(120.0)
    assert swarm.told("dead") == []


def test_half_the_swarm_dies_at_once() -> None:
    swarm = settled(32, 0)
    for number in range(16):
        swarm.kill(number)
    assert swarm.seconds_until(swarm.converged, 25.0) is not None


@slow
def test_a_thousand_nodes_for_80_s() -> None:
    swarm = SimulatedSwarm(1000, seed=0)
    swarm.run(20.0)
    swarm.kill(3)
    assert swarm.seconds_until(lambda: swarm.all_see(3, "dead"), 18.0, every_s=0.5) is not None


WAN_WAY_S = (0.05, 0.8)
"""Round trips of up to 1.6 s, beyond the LAN's deadline of half a second."""


def wan(seed: int, **options: object) -> SimulatedSwarm:
    swarm = SimulatedSwarm(8, seed=seed, config=MembershipConfig.wan(), delay_s=WAN_WAY_S, **options)
    swarm.run(60.0)
    return swarm


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_the_wan_profile_bears_round_trips_of_seconds(seed: int) -> None:
    swarm = wan(seed, loss=0.1)
    before = swarm.messages
    swarm.run(600.0)
    assert swarm.told("dead") == []
    assert (swarm.messages - before) / 8 / 600 <= 2.5


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_the_wan_profile_finds_the_dead_and_heals_within_a_minute(seed: int) -> None:
    swarm = wan(seed)
    swarm.pause(1)
    swarm.run(swarm.config.suspicion_min_s(8) - 0.1)
    swarm.resume(1)
    swarm.run(60.0)
    assert swarm.told("dead") == []
    swarm.kill(3)
    assert swarm.seconds_until(lambda: swarm.all_see(3, "dead"), 60.0) is not None
    swarm.partition(range(4), range(4, 8))
    swarm.run(180.0)
    assert not swarm.converged()
    swarm.heal()
    assert swarm.seconds_until(swarm.converged, 60.0) is not None
