"""Modes that are proposed at once, or on both sides of a partition, end in one mode everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from p2pdrl.config.strategy import AdpsgdConfig, GalaConfig, LocalConfig, ServerSyncConfig, SgpConfig
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.settings import MODE, ModeSetting
from p2pdrl.testing.membership_simulator import SimulatedSwarm

N = 12
SOON_S = 5.0


def settle(swarm: SimulatedSwarm, seconds: float, numbers: Iterable[int] = range(N)) -> None:
    """Let time pass; then those whom gossip has missed ask whoever is ahead, as nodes do."""
    swarm.run(seconds)
    held = {
        number: (record.epoch, record.proposer) if record is not None else (0, "")
        for number, record in zip(numbers, modes(swarm, numbers), strict=True)
    }
    ahead = max(held, key=lambda number: held[number])
    for _ in range(3):  # each try may be lost
        for number in numbers:
            if held[number] < held[ahead]:
                swarm.catch_up(number, ahead)
        swarm.run(1.0)


def modes(swarm: SimulatedSwarm, numbers: Iterable[int] = range(N)) -> list[SwarmRecord | None]:
    return [swarm.nodes[number].core.swarm.get(MODE) for number in numbers]


def agreed(swarm: SimulatedSwarm, numbers: Iterable[int] = range(N)) -> SwarmRecord:
    """The one record that those nodes hold."""
    found = modes(swarm, numbers)
    assert found[0] is not None
    assert all(record == found[0] for record in found)
    return found[0]


def strategy(record: SwarmRecord) -> object:
    setting = settings.decode(record.value, ModeSetting)
    assert setting is not None
    return setting.strategy


@pytest.fixture(params=[1, 2, 3])
def swarm(request: pytest.FixtureRequest) -> SimulatedSwarm:
    made = SimulatedSwarm(N, seed=request.param, loss=0.05)
    made.run(1.0)
    made.propose(0, MODE, ModeSetting.of(AdpsgdConfig()))
    settle(made, SOON_S)
    assert strategy(agreed(made)) == AdpsgdConfig()
    return made


def test_two_proposals_at_once(swarm: SimulatedSwarm) -> None:
    records = [
        swarm.propose(3, MODE, ModeSetting.of(SgpConfig())),
        swarm.propose(9, MODE, ModeSetting.of(GalaConfig())),
    ]
    stamps = {settings.stamp(record.epoch, record.proposer) for record in records}
    assert records[0].epoch == records[1].epoch
    assert len(stamps) == 2, "until one has won, messages under the two never mix"
    settle(swarm, SOON_S)
    assert agreed(swarm) == max(records, key=lambda record: (record.epoch, record.proposer))


def test_proposals_on_both_sides_of_a_partition(swarm: SimulatedSwarm) -> None:
    left, right = range(5), range(5, N)
    swarm.partition(left, right)
    swarm.run(1.0)
    swarm.propose(1, MODE, ModeSetting.of(SgpConfig()))
    settle(swarm, SOON_S, left)
    swarm.propose(2, MODE, ModeSetting.of(LocalConfig()))
    swarm.propose(8, MODE, ModeSetting.of(GalaConfig()))
    settle(swarm, SOON_S, left)
    settle(swarm, 0.0, right)
    assert strategy(agreed(swarm, left)) == LocalConfig()
    assert strategy(agreed(swarm, right)) == GalaConfig()
    swarm.heal()
    swarm.run(60.0)
    assert strategy(agreed(swarm)) == LocalConfig(), "two changes beat one"
    assert agreed(swarm).epoch == 3


def test_who_was_away_takes_the_swarms_mode(swarm: SimulatedSwarm) -> None:
    swarm.kill(4)
    swarm.propose(6, MODE, ModeSetting.of(ServerSyncConfig(servers=2)))
    swarm.run(SOON_S)
    swarm.restart(4, through=0)
    settle(swarm, SOON_S)
    assert strategy(agreed(swarm)) == ServerSyncConfig(servers=2)


def test_a_proposal_after_another_was_heard_wins(swarm: SimulatedSwarm) -> None:
    for number, config in ((11, SgpConfig()), (1, GalaConfig()), (5, LocalConfig())):
        swarm.propose(number, MODE, ModeSetting.of(config))
        settle(swarm, SOON_S)
        assert strategy(agreed(swarm)) == config
