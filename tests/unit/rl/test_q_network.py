"""Who explores how much: Ape-X's ladder of ε over all actors."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.config.task import DQNConfig, NetworkConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.q_network import QNetwork, ladder

SPEC = EnvSpec((3,), "float32", Discrete(5))
DRAWS = 40_000


def test_the_ladder_of_eight_actors():
    # Horgan 2018, section 4.1: ε = 0.4, α = 7; with N = 8 each rung is 0.4 times the one before
    expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    assert ladder(0.4, 7.0, 8) == pytest.approx(expected, rel=1e-12)


def test_a_single_actor_has_the_first_rung():
    assert ladder(0.4, 7.0, 1) == [0.4]


@pytest.mark.parametrize(("first", "count"), [(0, 8), (0, 3), (3, 5)])
def test_each_environment_deviates_from_the_greedy_action_as_its_rung_says(first, count):
    policy = QNetwork(SPEC, NetworkConfig(hidden=(8,)), 1)
    policy.configure(DQNConfig(exploration="ladder"))
    policy.act_as(first, count, 8)
    policy.exploration = 1.0
    obs = torch.zeros(DRAWS, count, 3)
    noise = policy.noise((DRAWS, count), torch.Generator().manual_seed(first))
    others = (policy.act(obs, noise) != policy.act(obs)).float().mean(0)
    # one of the five actions that are drawn is the greedy one
    wanted = torch.tensor(ladder(0.4, 7.0, 8)[first : first + count]) * 4 / 5
    deviation = (wanted * (1 - wanted) / DRAWS).sqrt()
    assert ((others - wanted).abs() < 4 * deviation).all()
