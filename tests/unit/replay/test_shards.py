"""A replay memory in shards beside one memory of all their rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from p2pdrl.replay.memory import ReplayLayout, ReplayMemory, importance_weights
from p2pdrl.replay.shards import (
    InsertLimiter,
    ReplayShards,
    ShardState,
    observations_of,
    pack_sample,
    sample_items,
)
from p2pdrl.tensors.unroll_ring import UnrollSpec

GAMMA = 0.9


def memory(streams, rows, *, alpha=0.6, first=0, n_step=1):
    """Return a memory of one-step rows, each observation a number of its own, from ``first`` on."""
    layout = ReplayLayout((1,), "float32", (), "int64", streams=streams, capacity=streams * rows, alpha=alpha)
    made = ReplayMemory(layout, n_step=n_step)
    numbers = first + np.arange(streams * rows).reshape(streams, rows).T
    obs = np.concatenate((numbers, numbers[-1:] + 0.5))[..., None].astype(np.float32)
    no = np.zeros((rows, streams), bool)
    for begin in range(0, rows, rows - 1):  # an unroll is shorter than its stream
        part = slice(begin, min(begin + rows - 1, rows))
        size = part.stop - part.start
        made.append(
            obs[begin : part.stop + 1],
            np.zeros((size, streams), np.int64),
            np.ones((size, streams)),
            terminated_TB=no[part],
            truncated_TB=no[part],
            valid_TB=~no[part],
        )
    return made


def prioritize(made, rng):
    """Give each row a priority of its own; return |δ| by the number that it observes."""
    found = {}
    drawn = made.sample(4000, rng, discount=GAMMA)
    for index, serial, obs in zip(drawn.indices_N, drawn.serials_N, drawn.obs_NX[:, 0], strict=True):
        if obs not in found:
            found[obs] = error = float(rng.choice([0.1, 1.0, 2.0, 5.0, 10.0]))
            made.update_priorities(np.array([index]), np.array([serial]), np.array([error]))
    assert len(found) == made.count
    return found


def state(made, boot=1):
    return ShardState(boot, made.mass, made.count, made.appended, made.full)


def draw(shards, memories, rows, rng):
    """Return the observations of a sample over all shards, and N·P of each."""
    shares = shards.shares()
    numbers, chances = [], []
    for name, count in shards.split(rows, shares).items():
        made = memories[name]
        mass = made.mass
        spec = UnrollSpec(sample_items(made.layout, made.n_step), (count,), 1)
        arrays = spec.views(memoryview(bytearray(spec.content_nbytes(count))), count)
        pack_sample(made.sample(count, rng, discount=GAMMA), mass, arrays)
        spec.check(arrays)
        numbers += arrays["obs"][:, 0].tolist()
        chances += (arrays["chances"] * shares[name] * shards.count).tolist()
    return numbers, np.array(chances)


def three(alpha=0.6):
    rng = np.random.default_rng(5)
    memories = {
        "a": memory(1, 20, alpha=alpha),
        "b": memory(2, 20, alpha=alpha, first=100),
        "c": memory(1, 5, alpha=alpha, first=200),
    }
    errors = {}
    if alpha is not None:
        for made in memories.values():
            errors |= prioritize(made, rng)
    shards = ReplayShards(rng)
    for name, made in memories.items():
        shards.heard(name, state(made))
    return shards, memories, errors, rng


def test_rows_are_drawn_as_from_one_memory():
    shards, memories, errors, rng = three()
    masses = {number: (error + 1e-6) ** 0.6 for number, error in errors.items()}
    total = sum(masses.values())
    drawn = Counter()
    for _ in range(400):
        drawn.update(draw(shards, memories, 500, rng)[0])
    assert drawn.keys() == masses.keys()
    chi2 = sum((drawn[n] - 200_000 * m / total) ** 2 / (200_000 * m / total) for n, m in masses.items())
    df = len(masses) - 1
    assert chi2 < df + 4 * np.sqrt(2 * df)


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_importance_weights_are_those_of_one_memory(beta):
    shards, memories, errors, rng = three()
    total = sum((error + 1e-6) ** 0.6 for error in errors.values())
    numbers, relative = draw(shards, memories, 300, rng)
    masses = np.array([(errors[number] + 1e-6) ** 0.6 for number in numbers])
    weights = relative**-beta
    np.testing.assert_allclose(
        weights / weights.max(),
        importance_weights(masses, mass=total, count=len(errors), beta=beta),
        rtol=1e-5,
    )


def test_without_priorities_all_rows_of_all_shards_are_alike():
    shards, memories, _, rng = three(alpha=None)
    drawn = Counter()
    for _ in range(200):
        numbers, relative = draw(shards, memories, 500, rng)
        np.testing.assert_allclose(relative, 1.0)
        drawn.update(numbers)
    each = 100_000 / shards.count
    df = shards.count - 1
    assert len(drawn) == shards.count
    assert sum((n - each) ** 2 / each for n in drawn.values()) < df + 4 * np.sqrt(2 * df)


def test_a_mass_that_moved_since_it_was_told_is_weighed_as_it_is():
    shards, memories, _, rng = three()
    prioritize(memories["a"], rng)  # the learner wasn't told yet
    shares = shards.shares()
    mean = []
    for _ in range(300):
        numbers, relative = draw(shards, memories, 100, rng)
        mean.append(np.mean([(number < 100) / r for number, r in zip(numbers, relative, strict=True)]))
    # Σ_i P(i) · 1 / (N P(i)) over a shard's rows is its part of all rows, whatever its mass is
    assert np.mean(mean) == pytest.approx(memories["a"].count / shards.count, rel=0.1)
    assert shares["a"] != pytest.approx(memories["a"].mass / sum(m.mass for m in memories.values()), rel=0.01)


@pytest.mark.parametrize("cycles", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_shard_joins_and_leaves(cycles):
    shards, memories, _, rng = three()
    shards.lost("c")
    since = {"a": Counter(), "c": Counter()}
    for cycle in range(cycles):
        if cycle % 200 == 100:
            shards.heard("c", state(memories["c"], boot=cycle))
        elif cycle % 200 == 0:
            shards.lost("c")
        here = "c" in shards.states
        assert here == (cycle % 200 >= 100)
        numbers, relative = draw(shards, memories, 8, rng)
        assert len(numbers) == 8
        assert here or max(numbers) < 200
        assert relative.min() > 0
        if here:
            since["c"].update(number >= 200 for number in numbers)
        if cycle % 3 == 0:  # priorities change all the time
            made = memories["b"]
            found = made.sample(8, rng, discount=GAMMA)
            made.update_priorities(found.indices_N, found.serials_N, rng.random(8) * 5)
            shards.heard("b", state(made))
    share = since["c"][True] / since["c"].total()
    assert share == pytest.approx(shards.shares().get("c", share), abs=0.05)


def test_rows_that_came_are_counted_since_a_shard_was_first_heard_of():
    shards = ReplayShards(np.random.default_rng(0))
    told = {"mass": 1.0, "count": 1, "full": False}
    assert shards.heard("a", ShardState(boot=1, appended=50, **told)) == 0
    assert shards.heard("a", ShardState(boot=1, appended=58, **told)) == 8
    shards.lost("a")
    assert shards.shares() == {}
    assert shards.heard("a", ShardState(boot=1, appended=60, **told)) == 2
    assert shards.heard("a", ShardState(boot=2, appended=7, **told)) == 7  # its node began anew
    assert shards.heard("a", ShardState(boot=2, appended=3, **told)) == 0


def test_a_shard_without_rows_gives_none():
    shards = ReplayShards(np.random.default_rng(0))
    shards.heard("empty", ShardState(1, 0.0, 0, 0, full=False))
    assert shards.shares() == {}
    shards.heard("other", ShardState(1, 2.0, 4, 4, full=False))
    assert shards.split(10, shards.shares()) == {"other": 10}
    assert (shards.count, shards.full) == (4, False)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("n_step", [1, 3])
def test_stacked_frames_travel_once_and_arrive_as_they_were(axis, n_step):
    rng = np.random.default_rng(3)
    layout = ReplayLayout(
        (4, 5), "uint8", (), "int64", streams=1, capacity=60, frame_stack=3, stack_axis=axis, alpha=0.5
    )
    made = ReplayMemory(layout, n_step=n_step)
    no = np.zeros((40, 1), bool)
    ends = no.copy()
    ends[[11, 25]] = True
    valid = ~np.roll(ends, 1, 0)
    made.append(
        rng.integers(1, 256, (41, 1, 4, 5)).astype(np.uint8),
        np.zeros((40, 1), np.int64),
        np.ones((40, 1)),
        terminated_TB=ends,
        truncated_TB=no,
        valid_TB=valid,
    )
    sample = made.sample(64, rng, discount=GAMMA)
    spec = UnrollSpec(sample_items(layout, n_step, choices=2), (64,), 1)
    arrays = spec.views(memoryview(bytearray(spec.content_nbytes(64))), 64)
    pack_sample(sample, made.mass, arrays)
    obs, next_obs = observations_of(arrays, axis)
    np.testing.assert_array_equal(obs, sample.obs_NX)
    np.testing.assert_array_equal(next_obs, sample.next_obs_NX)
    frames = 4 if n_step == 1 else 6
    assert (
        sum(arrays[name].nbytes for name in ("both", "obs", "next_obs") if name in arrays) == 64 * frames * 20
    )


def test_who_acts_waits_for_who_learns():
    limiter = InsertLimiter(2.0, ahead=10, slack=6)
    limiter.inserted(8)
    limiter.inserted(5)  # ten are free, and three want six drawn
    assert limiter.may_insert(0.0)
    limiter.inserted(1)
    assert not limiter.may_insert(0.0)
    limiter.drawn(2, 0.5)
    assert limiter.may_insert(0.5)
    limiter.drawn(1000, 0.6)  # what is drawn beyond that isn't saved without end
    limiter.inserted(7)
    assert not limiter.may_insert(0.6)
    assert not limiter.may_insert(1.5)
    assert limiter.may_insert(1.7)  # nobody draws any more: it goes on, slowly
    limiter.inserted(1)
    assert not limiter.may_insert(1.8)
    assert limiter.may_insert(2.8)


def test_nobody_waits_where_nothing_is_asked():
    limiter = InsertLimiter(0.0, ahead=0, slack=0)
    limiter.inserted(10**6)
    assert limiter.may_insert(0.0)
