"""Who takes part, how far one member reaches, and how much noise there is."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.loader import preset_path, resolve
from p2pdrl.config.strategy import FederatedConfig
from p2pdrl.strategies.allreduce.federated import KEY_BYTES, Privacy, SecretNoise, epsilon_of, participants

MEMBERS = tuple(f"{number:032x}" for number in range(5))
SIZE = 20_000


def shaped(config, number, seed=0, me=MEMBERS[0], scale=1.0):
    vector = np.random.default_rng(99).standard_normal(SIZE).astype(np.float32) * np.float32(scale)
    before = vector.copy()
    privacy = Privacy(config, 1, me, SecretNoise(bytes([seed]) * KEY_BYTES))
    return privacy.shape(vector, number, MEMBERS), before, vector


def test_everybody_knows_who_takes_part():
    rounds = [participants(1, number, MEMBERS, 0.3) for number in range(2000)]
    assert rounds == [participants(1, number, MEMBERS, 0.3) for number in range(2000)]
    assert sum(map(len, rounds)) / 10_000 == pytest.approx(0.3, abs=0.015)
    assert len(set(rounds)) > 20
    assert rounds != [participants(2, number, MEMBERS, 0.3) for number in range(2000)]
    assert participants(1, 5, MEMBERS, 1.0) == MEMBERS


def test_a_difference_is_shortened_to_the_bound_and_short_ones_are_left():
    config = FederatedConfig(participation=1.0, clip_norm=2.0)
    taken, before, after = shaped(config, 1)
    assert taken
    assert 1.999 < np.linalg.norm(after.astype(np.float64)) <= 2.0
    assert np.allclose(after / np.linalg.norm(after), before / np.linalg.norm(before), atol=1e-6)
    _, before, after = shaped(config, 1, scale=1e-3)
    assert np.array_equal(before, after)


def test_the_sum_carries_noise_of_deviation_z_times_s():
    config = FederatedConfig(participation=1.0, clip_norm=2.0, noise_multiplier=1.5)
    total = np.zeros(SIZE)
    for index, me in enumerate(MEMBERS):
        _, _, after = shaped(config, 1, seed=index, me=me)
        _, _, clipped = shaped(FederatedConfig(participation=1.0, clip_norm=2.0), 1)
        total += after.astype(np.float64) - clipped
    assert total.std() == pytest.approx(1.5 * 2.0, rel=0.03)
    assert abs(total.mean()) < 0.1


def test_without_a_seed_no_two_members_draw_the_same_noise():
    config = FederatedConfig(participation=1.0, noise_multiplier=1.0)
    one, two = np.zeros(100, np.float32), np.zeros(100, np.float32)
    Privacy(config, 1, MEMBERS[0]).shape(one, 1, MEMBERS)
    Privacy(config, 1, MEMBERS[0]).shape(two, 1, MEMBERS)
    assert not np.array_equal(one, two)


def test_who_isnt_drawn_gives_nothing_and_counts_it_apart():
    config = FederatedConfig(participation=0.5, noise_multiplier=2.0)
    privacy = Privacy(config, 1, MEMBERS[0], SecretNoise(bytes(KEY_BYTES)))
    part = 0
    for number in range(1, 41):
        part += privacy.shape(np.ones(4, np.float32), number, MEMBERS)
        privacy.ended(number, 5)
    assert 8 < part < 32
    facts = privacy.facts
    assert facts["private_rounds"] == 40
    assert facts["epsilon"] > 0
    assert facts["epsilon_known"] > 0
    assert facts["epsilon_known"] == pytest.approx(epsilon_of(2.0, 1.0, part, config.delta), rel=1e-12)


def test_a_round_that_is_done_again_counts_twice():
    config = FederatedConfig(participation=1.0, noise_multiplier=2.0)
    privacy = Privacy(config, 1, MEMBERS[0])
    given = [np.ones(4, np.float32) for _ in range(2)]
    for vector in given:
        privacy.shape(vector, 7, MEMBERS)
    assert not np.array_equal(*given)
    privacy.ended(7, 5)
    for name in ("epsilon", "epsilon_known"):
        assert privacy.facts[name] == pytest.approx(epsilon_of(2.0, 1.0, 2, config.delta), rel=1e-12)
    assert privacy.facts["private_rounds"] == 2
    privacy.shape(given[0], 8, MEMBERS)
    privacy.ended(8, 5)
    for name in ("epsilon", "epsilon_known"):
        assert privacy.facts[name] == pytest.approx(epsilon_of(2.0, 1.0, 3, config.delta), rel=1e-12)
    assert privacy.facts["private_rounds"] == 3


def test_who_was_drawn_and_gives_nothing_brings_no_noise():
    """Of five that are to bring noise two come: the sum has two fifths of its variance, and ε says so."""
    given = FederatedConfig(participation=1.0, noise_multiplier=2.0)
    privacy = Privacy(given, 1, MEMBERS[0])
    for number in range(1, 11):
        privacy.shape(np.ones(4, np.float32), number, MEMBERS)
        privacy.ended(number, 2)
    least = epsilon_of(2.0 * np.sqrt(0.4), 1.0, 10, given.delta)
    assert privacy.facts["epsilon"] == privacy.facts["epsilon_known"] == pytest.approx(least, rel=1e-12)
    privacy.shape(np.ones(4, np.float32), 11, MEMBERS)
    privacy.ended(11, 0)  # nobody gave anything, so nothing was given away
    assert privacy.facts["private_rounds"] == 10


def test_without_noise_nothing_is_promised():
    privacy = Privacy(FederatedConfig(), 1, MEMBERS[0])
    privacy.ended(1, 5)
    assert "no noise" in privacy.facts["epsilon"]


def test_rounds_of_too_few_members_change_nothing_and_give_nothing_away():
    """Nobody takes part, whoever would have been drawn; from enough members on it is as ever."""
    privacy = Privacy(FederatedConfig(participation=1.0, noise_multiplier=2.0, min_members=3), 1, MEMBERS[0])
    for number, members in enumerate((MEMBERS[:1], MEMBERS[:2]), 1):
        vector = np.full(4, 9.0, np.float32)
        assert not privacy.shape(vector, number, members)
        assert vector.tolist() == [9.0] * 4
        privacy.ended(number, 0)
        assert privacy.facts["private_rounds"] == 0
        assert privacy.facts["waits"] == f"for 3 members, rounds have {number}"
    assert privacy.shape(np.ones(4, np.float32), 3, MEMBERS[:3])
    privacy.ended(3, 3)
    assert privacy.facts["private_rounds"] == 1
    assert "waits" not in privacy.facts


def test_the_preset_hides_something_and_says_how_much():
    """Its comment tells (ε, δ) after 31 rounds of eight nodes and 62 of four."""
    task = resolve(files=("federated",)).config.task
    given = task.strategy
    assert isinstance(given, FederatedConfig)
    steps = given.every_updates * task.env.num_envs * task.algorithm.unroll_steps
    comment = preset_path("federated").read_text()
    for nodes in (8, 4):
        rounds = -(-task.stop.env_steps // (nodes * steps))
        epsilon = epsilon_of(given.noise_multiplier, given.participation, rounds, given.delta)
        assert f"({epsilon:.1f}, 1e-5) after {rounds}" in comment.replace("\n# ", " ")
    assert given.delta == 1e-5
