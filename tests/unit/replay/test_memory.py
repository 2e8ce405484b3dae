"""The replay memory beside a naive one: lists of dicts, one for each step, searched and stacked by loops."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, TensorError
from p2pdrl.replay import memory as module
from p2pdrl.replay.memory import ReplayLayout, ReplayMemory, importance_weights
from p2pdrl.tensors.shared_memory import SharedRegion

GAMMA = 0.9
SHAPE = (2, 3)


class Environments:
    """Made-up environments with NEXT_STEP resets, and a naive memory of all that happened in them.

    No two observations are alike. ``history[b]`` has a dict for each step, with the observation behind it;
    "lost" marks a gap in what the memory was shown.
    """

    def __init__(self, count, seed, dtype="float32", p_end=0.15):
        self.rng = np.random.default_rng(seed)
        self.count, self.dtype, self.p_end = count, dtype, p_end
        self.episodes = [0] * count
        self.running = [True] * count
        self.obs = [self.draw() for _ in range(count)]
        self.history = [[] for _ in range(count)]

    def draw(self):
        values = self.rng.integers(1, 256, SHAPE) if self.dtype == "uint8" else self.rng.random(SHAPE)
        return values.astype(self.dtype)

    def step(self, b, shown):
        action, valid = int(self.rng.integers(1000)), self.running[b]
        terminated = truncated = False
        reward = 0.0
        if valid:
            reward = float(np.float32(self.rng.normal()))
            end = self.rng.random()
            terminated, truncated = end < self.p_end / 2, self.p_end / 2 <= end < self.p_end
        behind = self.draw()
        row = {
            "obs": self.obs[b],
            "behind": behind,
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "episode": self.episodes[b] + (not valid),
            "shown": shown,
        }
        if not valid:
            self.episodes[b] += 1
        self.history[b].append(row)
        self.running[b] = not (terminated or truncated)
        self.obs[b] = behind
        return row

    def skip(self, b, steps):
        """Steps that the memory never sees."""
        for _ in range(steps):
            self.step(b, shown=False)

    def unroll(self, columns, T):
        rows = [[self.step(b, shown=True) for b in columns] for _ in range(T)]
        array = lambda name, dtype: np.array([[r[name] for r in step] for step in rows], dtype)  # noqa: E731
        obs = np.concatenate((array("obs", self.dtype), [[r["behind"] for r in rows[-1]]])).astype(self.dtype)
        ends = {f"{name}_TB": array(name, bool) for name in ("terminated", "truncated", "valid")}
        return (obs, array("action", np.int64), array("reward", np.float32)), ends

    def expected(self, n, K, rows):
        """Every transition that may be sampled, by the (unique) action, observation and reward behind it."""
        found = {}
        for history in self.history:
            shown = [at for at, row in enumerate(history) if row["shown"]]
            gaps = sum(b - a > 1 for a, b in itertools.pairwise(shown))
            inserted = dict.fromkeys(shown, 0)
            for a, b in itertools.pairwise(shown):
                inserted[b] = inserted[a] + (b - a > 1)
            # A gap takes one row of the ring, so the oldest row that is left is counted from the end.
            newest = len(shown) + gaps
            kept = {at for i, at in enumerate(shown) if i + inserted[at] >= newest - rows}
            for at in sorted(kept):
                transition = self.transition(history, kept, at, n, K)
                if transition is not None:
                    found[history[at]["obs"].tobytes()] = transition
        return found

    def transition(self, history, kept, at, n, K):
        if not history[at]["valid"]:
            return None
        total, factor = 0.0, 1.0
        for step in range(n):
            row = history[at + step]
            total += factor * row["reward"]
            factor *= GAMMA
            end, gap = row["terminated"] or row["truncated"], at + step + 1 not in kept
            if end or step == n - 1:
                break
            if gap:
                if at + step < max(kept):
                    break  # steps were lost: cut here
                return None  # not there yet
        last = at + step
        stack = self.stack(history, kept, at, K)
        if stack is None:
            return None
        newest = [*stack, *(history[i]["behind"] for i in range(at, last + 1))][-K:]
        return {
            "obs": np.array(stack),
            "next_obs": np.array(newest),
            "action": history[at]["action"],
            "return": total,
            "discount": 0.0 if history[last]["terminated"] else factor,
        }

    def stack(self, history, kept, at, K):
        frames = [history[at]["obs"]]
        while len(frames) < K:
            before = at - len(frames)
            if before >= 0 and not history[before]["shown"]:
                return None
            first = before < 0 or history[before]["episode"] != history[at]["episode"]
            if first or not history[before]["valid"]:
                frames += [np.zeros_like(frames[0])] * (K - len(frames))
            elif before not in kept:
                return None
            else:
                frames.append(history[before]["obs"])
        return frames[::-1]


def layout_of(streams, capacity, **options):
    options = {"obs_dtype": "float32", **options}
    return ReplayLayout(
        obs_shape=SHAPE,
        action_shape=(),
        action_dtype="int64",
        streams=streams,
        capacity=capacity,
        **options,
    )


def check(memory, environments, rng, draws=600):
    """Everything sampled is what the naive memory has, and all that it has may be sampled."""
    K, axis = memory.layout.frame_stack, memory.layout.stack_axis
    expected = environments.expected(memory.n_step, K, memory.rows)
    assert memory.count == len(expected)
    assert memory.stored <= memory.layout.capacity
    if not expected:
        return
    seen = set()
    sample = None
    for _ in range(3):
        sample = memory.sample(draws, rng, discount=GAMMA, beta=0.4, out=sample)
        assert sample.obs_NX.shape == (draws, *memory.layout.sampled_shape)
        obs, next_obs = sample.obs_NX, sample.next_obs_NX
        if K == 1:
            obs, next_obs = obs[:, None], next_obs[:, None]
        elif axis == -1:
            obs, next_obs = np.moveaxis(obs, -1, 1), np.moveaxis(next_obs, -1, 1)
        for row in range(draws):
            key = obs[row, -1].tobytes()
            want = expected[key]
            seen.add(key)
            assert (obs[row] == want["obs"]).all()
            assert (next_obs[row] == want["next_obs"]).all()
            assert sample.actions[row] == want["action"]
            assert abs(sample.returns_N[row] - want["return"]) < 1e-5
            assert abs(sample.discounts_N[row] - want["discount"]) < 1e-6
    if len(expected) < draws / 5:
        assert seen == set(expected)


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("alpha", [None, 0.6])
@pytest.mark.parametrize(("K", "axis"), [(1, 0), (4, 0), (3, -1)])
def test_every_row_is_that_of_a_naive_memory(n, alpha, K, axis):
    """Interleaved streams of different fill, both ends, gaps, and rings that come round several times."""
    dtype = "float32" if K == 1 else "uint8"
    environments = Environments(5, seed=10 * n + K, dtype=dtype)
    layout = layout_of(5, 150, obs_dtype=dtype, frame_stack=K, stack_axis=axis, alpha=alpha)
    memory, rng = ReplayMemory(layout, n_step=n), np.random.default_rng(n)
    choose = np.random.default_rng(n + 100)
    for turn in range(30):
        count = int(choose.integers(1, 5))  # stream 4 is rarer: another fill
        columns = choose.permutation(4)[:count]
        if turn % 4 == 0:
            columns[0] = 4
        restarts = choose.random(count) < 0.2
        for b, restart in zip(columns, restarts, strict=True):
            if restart and environments.history[b]:
                environments.skip(b, int(choose.integers(1, 4)))
            restart &= bool(environments.history[b])
        restarts &= np.array([any(row["shown"] for row in environments.history[b]) for b in columns])
        arrays, ends = environments.unroll(columns, int(choose.integers(1, 13)))
        memory.append(*arrays, **ends, columns_B=columns, restarts_B=restarts)
        if turn % 4 == 3:
            check(memory, environments, rng, draws=100)
    check(memory, environments, rng, draws=400)


def test_a_gap_that_nobody_told_of_is_seen():
    """Row 0 isn't what the stream ended with: taken for a restart."""
    environments = Environments(1, seed=3, p_end=0.0)
    memory = ReplayMemory(layout_of(1, 50), n_step=3)
    for _ in range(2):
        arrays, ends = environments.unroll([0], 5)
        memory.append(*arrays, **ends)
        environments.skip(0, 2)
    check(memory, environments, np.random.default_rng(0))


@pytest.mark.parametrize("fill", [3, 60])
def test_uniform_samples_are_uniform(fill):
    """χ² over all rows that count, streams of different fill; few come from a list, many by rejection."""
    environments = Environments(3, seed=4)
    memory, rng = ReplayMemory(layout_of(3, 150), n_step=3), np.random.default_rng(5)
    for b, steps in enumerate((fill // 3 + 4, fill, fill)):
        for at in range(0, steps, 5):
            arrays, ends = environments.unroll([b], min(5, steps - at))
            memory.append(*arrays, **ends, columns_B=np.array([b]))
    drawn = Counter()
    for _ in range(100):
        drawn.update(memory.sample(1000, rng, discount=GAMMA).indices_N.tolist())
    assert len(drawn) == memory.count
    each = 100_000 / memory.count
    chi2 = sum((n - each) ** 2 / each for n in drawn.values())
    df = memory.count - 1
    assert chi2 < df + 4 * np.sqrt(2 * df)


def five_rows(alpha=0.6, **options):
    """Rows without ends, of which five count."""
    environments = Environments(1, seed=6, p_end=0.0)
    memory = ReplayMemory(layout_of(1, 20, alpha=alpha, epsilon=1e-9), **options)
    arrays, ends = environments.unroll([0], 5)
    return memory, arrays, ends


@pytest.mark.parametrize("by_actor", [False, True])
@pytest.mark.parametrize("batch", [50, 1000])
def test_prioritized_samples_are_drawn_in_proportion(by_actor, batch):
    memory, arrays, ends = five_rows()
    p = np.array([0.1, 1.0, 2.0, 5.0, 10.0])
    if by_actor:
        memory.append(*arrays, **ends, td_errors_TB=-p[:, None])
    else:
        memory.append(*arrays, **ends)
        assert memory.update_priorities(np.arange(5), np.arange(5), -p) == 5
    rng = np.random.default_rng(7)
    drawn = np.zeros(5)
    for _ in range(200_000 // batch):
        sample = memory.sample(batch, rng, discount=GAMMA, beta=0.4)
        np.add.at(drawn, sample.serials_N, 1)
    P = p**0.6 / (p**0.6).sum()
    assert ((drawn - 200_000 * P) ** 2 / (200_000 * P)).sum() < 18.5
    assert memory.mass == pytest.approx((p**0.6).sum(), rel=1e-6)
    expected = (5 * P[sample.serials_N]) ** -0.4
    np.testing.assert_allclose(sample.weights_N, expected / expected.max(), rtol=1e-5)
    again = importance_weights(sample.masses_N, mass=memory.mass, count=memory.count, beta=0.4)
    np.testing.assert_array_equal(again, sample.weights_N)


def test_new_rows_have_the_greatest_priority_so_far():
    memory, arrays, ends = five_rows(alpha=1.0)
    memory.append(*arrays, **ends)
    assert memory.mass == pytest.approx(5.0)
    memory.update_priorities(np.array([0, 1]), np.array([0, 1]), np.array([7.0, 0.5]))
    assert memory.mass == pytest.approx(3 + 7.5)
    memory.append(*arrays, **ends, restarts_B=np.array([True]))
    assert memory.mass == pytest.approx(3 + 7.5 + 5 * 7)
    td_errors = np.array([[np.nan], [1.0], [2.0], [np.nan], [0.25]])
    memory.append(*arrays, **ends, restarts_B=np.array([True]), td_errors_TB=td_errors)
    assert memory.mass == pytest.approx(3 + 7.5 + 5 * 7 + 7 + 1 + 2 + 7 + 0.25)
    memory.reset_priorities()
    assert memory.mass == memory.count == 15


def test_priorities_of_rows_that_have_no_n_steps_yet_are_kept_until_they_have():
    environments = Environments(1, seed=8, p_end=0.0)
    memory = ReplayMemory(layout_of(1, 20, alpha=1.0, epsilon=1e-9), n_step=3)
    arrays, ends = environments.unroll([0], 4)
    memory.append(*arrays, **ends, td_errors_TB=np.array([[1.0], [2.0], [3.0], [4.0]]))
    assert (memory.count, memory.mass) == (2, pytest.approx(3.0))
    arrays, ends = environments.unroll([0], 1)
    memory.append(*arrays, **ends, td_errors_TB=np.array([[5.0]]))
    assert (memory.count, memory.mass) == (3, pytest.approx(6.0))


def test_priorities_of_overwritten_rows_are_refused():
    environments = Environments(2, seed=9)
    memory, rng = ReplayMemory(layout_of(2, 40, alpha=0.6)), np.random.default_rng(0)
    memory.append(*(unroll := environments.unroll([0, 1], 8))[0], **unroll[1])
    old = memory.sample(64, rng, discount=GAMMA)
    for _ in range(2):
        memory.append(*(unroll := environments.unroll([1], 8))[0], **unroll[1], columns_B=np.array([1]))
    before = memory.mass
    kept = (old.indices_N < 21) | (old.serials_N >= 4)  # stream 1 has had 24 rows and holds 20
    assert 0 < kept.sum() < 64
    errors = np.where(kept, 1.0 - 1e-6, 99.0)
    assert memory.update_priorities(old.indices_N, old.serials_N, errors) == kept.sum()
    assert memory.mass == pytest.approx(before, rel=1e-6)
    with pytest.raises(PoisonedVectorError):
        memory.update_priorities(old.indices_N, old.serials_N, np.full(64, np.nan))


def test_a_second_process_goes_on_in_the_same_buffer():
    environments = Environments(3, seed=11, dtype="uint8")
    layout = layout_of(3, 90, obs_dtype="uint8", frame_stack=4, alpha=0.6)
    region = SharedRegion.create(layout.nbytes, "test")
    rng = np.random.default_rng(0)
    for turn in range(20):
        memory = ReplayMemory(layout, n_step=3, buffer=region.buf)
        arrays, ends = environments.unroll([turn % 3, (turn + 1) % 3], 7)
        memory.append(*arrays, **ends, columns_B=np.array([turn % 3, (turn + 1) % 3]))
        sample = memory.sample(64, rng, discount=GAMMA)
        memory.update_priorities(sample.indices_N, sample.serials_N, rng.random(64) * 3)
        again = ReplayMemory(layout, n_step=3, buffer=region.buf)
        assert again.count == memory.count
        assert again.mass == pytest.approx(memory.mass, rel=1e-12)
        draws = [m.sample(64, np.random.default_rng(1), discount=GAMMA) for m in (memory, again)]
        for name in ("obs_NX", "next_obs_NX", "returns_N", "weights_N", "serials_N"):
            np.testing.assert_array_equal(*(getattr(draw, name) for draw in draws))
        check(again, environments, rng, draws=100)
    with pytest.raises(LayoutMismatchError, match="another layout"):
        ReplayMemory(layout_of(3, 87, obs_dtype="uint8", alpha=0.6), buffer=region.buf)
    del memory, again, draws, sample
    region.close()


class KilledError(Exception):
    """Stands for kill -9."""


@contextlib.contextmanager
def killed_at(monkeypatch, number, counts=lambda: True):
    """Kill the memory's process at its fence of that number, of those that count, by a `KilledError`."""
    calls = 0

    def killed():
        nonlocal calls
        calls += counts()
        if calls == number:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(module, "fence", killed)
        yield


@pytest.mark.parametrize("fence", [1, 2])
@pytest.mark.parametrize("again", [True, False])
def test_a_kill_during_an_append_loses_only_that_unroll(monkeypatch, fence, again):
    """Before the copies and before the last store; the unroll is appended again, or lost for good."""
    environments = Environments(2, seed=12, dtype="uint8")
    layout = layout_of(2, 60, obs_dtype="uint8", frame_stack=3, alpha=0.6)
    buffer, rng = bytearray(layout.nbytes), np.random.default_rng(0)
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    for _ in range(9):
        arrays, ends = environments.unroll([0, 1], 7)
        memory.append(*arrays, **ends)
    full = memory.stored
    arrays, ends = environments.unroll([0, 1], 7)
    with pytest.raises(KilledError), killed_at(monkeypatch, fence):
        memory.append(*arrays, **ends)
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    assert memory.stored == full - 2 * 7  # what it was about to overwrite
    sample = memory.sample(200, rng, discount=GAMMA)
    known = {row["obs"].tobytes() for history in environments.history for row in history[:-7]}
    assert {obs[-1].tobytes() for obs in sample.obs_NX} <= known
    restarts = None
    if again:
        memory.append(*arrays, **ends)
    else:
        for history in environments.history:
            for row in history[-7:]:
                row["shown"] = False
        restarts = np.array([True, True])
    for _ in range(5):
        arrays, ends = environments.unroll([0, 1], 6)
        memory.append(*arrays, **ends, restarts_B=restarts)
        restarts = None
    check(memory, environments, rng)


def grown(environments, memory, turns, columns, T=7):
    for _ in range(turns):
        arrays, ends = environments.unroll(columns, T)
        memory.append(*arrays, **ends, columns_B=np.array(columns))


def test_streams_that_have_come_share_all_rows():
    """Twelve might come: two have 60 rows each; when more do, the newest of each stay."""
    environments, rng = Environments(12, seed=21), np.random.default_rng(0)
    memory = ReplayMemory(layout_of(12, 120, alpha=0.6), n_step=2)
    grown(environments, memory, 12, [7, 3])
    assert (memory.rows, memory.stored, memory.full) == (60, 120, True)
    check(memory, environments, rng)
    old = memory.sample(100, rng, discount=GAMMA)
    grown(environments, memory, 1, [0])
    assert (memory.rows, memory.stored, memory.full) == (40, 87, False)
    check(memory, environments, rng)
    before = memory.mass
    assert memory.update_priorities(old.indices_N, old.serials_N, np.full(100, 5.0)) == 0
    assert memory.mass == before  # what was said of rows as they lay before is passed over
    new = memory.sample(100, rng, discount=GAMMA)
    assert memory.update_priorities(new.indices_N, new.serials_N, np.full(100, 1.0)) == 100
    assert memory.rows_of(np.array([3, 7, 0, 11])).tolist() == [84, 84, 7, 0]
    grown(environments, memory, 3, [11, 0, 5, 7])
    assert (memory.rows, memory.layout.rows) == (24, 10)
    check(memory, environments, rng)
    grown(environments, memory, 4, list(range(12)))
    assert (memory.rows, memory.stored) == (10, 120)
    check(memory, environments, rng)


def given_up(environments, columns):
    for row in (row for b in columns for row in environments.history[b]):
        row["shown"] = False


def test_a_stream_that_others_left_behind_is_given_up():
    """Two of four environments aren't acted in any more: their rows go, the others have their room."""
    environments, rng = Environments(4, seed=23, dtype="uint8"), np.random.default_rng(0)
    layout = layout_of(4, 120, obs_dtype="uint8", frame_stack=3, alpha=0.6)
    memory = ReplayMemory(layout, n_step=3)
    grown(environments, memory, 6, [2, 0, 1, 3])
    old = memory.sample(100, rng, discount=GAMMA)
    grown(environments, memory, 8, [1, 2])
    assert (memory.rows, memory.stored, memory.appended) == (30, 120, 280)
    check(memory, environments, rng)
    grown(environments, memory, 1, [1, 2])  # they have come round twice: 63 rows each
    given_up(environments, (0, 3))
    assert (memory.rows, memory.stored, memory.appended) == (60, 60, 294)
    known = {row["obs"].tobytes() for b in (1, 2) for row in environments.history[b]}
    assert {obs[-1].tobytes() for obs in memory.sample(200, rng, discount=GAMMA).obs_NX} <= known
    assert memory.update_priorities(old.indices_N, old.serials_N, np.full(100, 5.0)) == 0
    assert memory.rows_of(np.array([0, 1, 2, 3])).tolist() == [0, 105, 105, 0]
    grown(environments, memory, 5, [1, 2])
    assert (memory.stored, memory.full) == (120, True)
    check(memory, environments, rng)
    grown(environments, memory, 2, [0, 1])  # in the middle of an episode, whose first frames nobody knows
    assert memory.rows == 40
    check(memory, environments, rng)


def test_streams_that_come_unevenly_are_kept():
    environments, rng = Environments(5, seed=24), np.random.default_rng(0)
    memory = ReplayMemory(layout_of(5, 500), n_step=1)
    for turn in range(120):
        grown(environments, memory, 1, [0, 1, 2, *[3] * (turn % 3 == 0), *[4] * (turn % 12 == 0)])
    assert memory.rows == 100
    check(memory, environments, rng)


@pytest.mark.parametrize("fence", range(1, 14))
def test_a_kill_while_streams_are_given_up_loses_one_more_at_most(monkeypatch, fence):
    environments, rng = Environments(5, seed=25, dtype="uint8"), np.random.default_rng(0)
    layout = layout_of(5, 150, obs_dtype="uint8", frame_stack=3, alpha=0.6)
    buffer = bytearray(layout.nbytes)
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    grown(environments, memory, 6, [4, 0, 1, 2, 3])
    grown(environments, memory, 8, [0, 2, 4])
    last = environments.unroll([0, 2, 4], 7)
    with pytest.raises(KilledError), killed_at(monkeypatch, fence + 2):  # two are the append's own
        memory.append(*last[0], **last[1], columns_B=np.array([0, 2, 4]))
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    expected = environments.expected(3, 3, 150)
    sample = memory.sample(400, rng, discount=GAMMA)
    for row in range(400):
        want = expected[sample.obs_NX[row, -1].tobytes()]
        assert (sample.obs_NX[row] == want["obs"]).all()
        assert (sample.next_obs_NX[row] == want["next_obs"]).all()
    seen = {obs[-1].tobytes() for obs in sample.obs_NX}
    keys = [{row["obs"].tobytes() for row in history} for history in environments.history]
    lost = [b for b in (0, 2, 4) if not keys[b] & seen]
    assert len(lost) <= 1
    assert 0 < memory.stored <= layout.capacity
    grown(environments, memory, 12, [0, 2, 4])
    given_up(environments, (1, 3))
    assert memory.rows == 50
    grown(environments, memory, 4, [0, 2, 4])
    check(memory, environments, rng)


def test_streams_that_went_together_are_given_up_at_once():
    environments, rng = Environments(8, seed=26), np.random.default_rng(0)
    memory = ReplayMemory(layout_of(8, 400), n_step=1)
    for turn in range(60):
        grown(environments, memory, 1, [7, 0])
        grown(environments, memory, int(turn < 10), [2, 4, 6])
        grown(environments, memory, int(turn < 9), [1, 3, 5])
        if memory.rows != 50:
            break
    given_up(environments, (1, 2, 3, 4, 5, 6))
    assert memory.rows == 200
    grown(environments, memory, 30, [7, 0])
    check(memory, environments, rng)


@pytest.mark.parametrize("fence", range(1, 12))
def test_a_kill_while_an_old_stream_is_given_up_hides_no_new_rows(monkeypatch, fence):
    """The stream that takes its place has had fewer rows."""
    environments, rng = Environments(3, seed=27), np.random.default_rng(0)
    layout = layout_of(3, 60)
    buffer = bytearray(layout.nbytes)
    memory = ReplayMemory(layout, n_step=1, buffer=memoryview(buffer))
    grown(environments, memory, 40, [0])
    grown(environments, memory, 1, [1])
    with (
        pytest.raises(KilledError),
        killed_at(monkeypatch, fence, lambda: memory.rows_of(np.array([0]))[0] == 0),
    ):
        grown(environments, memory, 30, [1, 2])
    memory = ReplayMemory(layout, n_step=1, buffer=memoryview(buffer))
    assert 0 < memory.stored <= 60
    assert memory.appended <= 7 * (40 + 1 + 60)
    grown(environments, memory, 6, [1, 2])
    given_up(environments, (0,))
    assert memory.full
    check(memory, environments, rng)


@pytest.mark.parametrize("fence", range(1, 8))
def test_a_kill_while_a_stream_comes_back_makes_up_no_frames(monkeypatch, fence):
    environments = Environments(2, seed=28, dtype="uint8", p_end=0.0)
    layout = layout_of(2, 40, obs_dtype="uint8", frame_stack=3)
    buffer = bytearray(layout.nbytes)
    memory = ReplayMemory(layout, n_step=1, buffer=memoryview(buffer))
    grown(environments, memory, 1, [0, 1])
    grown(environments, memory, 8, [1])
    assert memory.rows_of(np.array([0])) == 0
    unroll = environments.unroll([0], 7)
    with contextlib.suppress(KilledError), killed_at(monkeypatch, fence):
        memory.append(*unroll[0], **unroll[1], columns_B=np.array([0]))
    memory = ReplayMemory(layout, n_step=1, buffer=memoryview(buffer))
    memory.append(*unroll[0], **unroll[1], columns_B=np.array([0]))
    sample = memory.sample(300, np.random.default_rng(0), discount=GAMMA)
    own = {row["obs"].tobytes() for row in environments.history[0]}
    mine = [obs for obs in sample.obs_NX if obs[-1].tobytes() in own]
    assert mine
    assert all(obs.reshape(3, -1).any(axis=1).all() for obs in mine), "no frame of its stacks is made up"


@pytest.mark.parametrize("fence", range(1, 12))
def test_a_kill_while_the_memory_is_divided_anew_loses_one_streams_rows_at_most(monkeypatch, fence):
    environments = Environments(6, seed=22, dtype="uint8")
    layout = layout_of(6, 90, obs_dtype="uint8", frame_stack=3, alpha=0.6)
    buffer, rng = bytearray(layout.nbytes), np.random.default_rng(0)
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    grown(environments, memory, 6, [0, 4, 2])
    new = environments.unroll([1, 3], 7)
    with pytest.raises(KilledError), killed_at(monkeypatch, fence):
        memory.append(*new[0], **new[1], columns_B=np.array([1, 3]))
    for b in (1, 3):
        environments.history[b].clear()
    memory = ReplayMemory(layout, n_step=3, buffer=memoryview(buffer))
    assert memory.rows == 18

    def kept():
        """Rows of each stream that may be sampled: how many there are, and how many should be."""
        expected = environments.expected(3, 3, memory.rows)
        sample = memory.sample(600, rng, discount=GAMMA)
        seen = {obs[-1].tobytes() for obs in sample.obs_NX}
        # behind what was lost the memory may know that an episode began there, and the naive one doesn't
        own = {row["obs"].tobytes() for b in lost for row in environments.history[b]}
        assert seen - own <= set(expected)
        known = truths()
        for row in range(len(sample.obs_NX)):
            want = known[sample.obs_NX[row, -1].tobytes()]
            assert (sample.obs_NX[row] == want["obs"]).all()
            assert (sample.next_obs_NX[row] == want["next_obs"]).all()
        keys = [{row["obs"].tobytes() for row in history} for history in environments.history]
        return {b: (len(keys[b] & seen), len(keys[b] & set(expected))) for b in (0, 4, 2)}

    def truths():
        """All transitions, had nothing been lost."""
        shown = [(row, row["shown"]) for history in environments.history for row in history]
        for row, _ in shown:
            row["shown"] = True
        found = environments.expected(3, 3, 1000)
        for row, was in shown:
            row["shown"] = was
        return found

    lost = []
    lost = [b for b, (there, wanted) in kept().items() if there != wanted]
    assert len(lost) <= 1
    assert all(kept()[b][0] == 0 for b in lost)
    for row in (row for b in lost for row in environments.history[b]):
        row["shown"] = False
    grown(environments, memory, 2, [0, 1, 2, 3, 4])
    kept()
    grown(environments, memory, 2, [0, 1, 2, 3, 4])
    check(memory, environments, rng)


def test_continuous_actions_and_scalar_observations():
    layout = ReplayLayout((), "float64", (2,), "float32", streams=1, capacity=10)
    memory = ReplayMemory(layout)
    no = np.zeros((3, 1), bool)
    actions = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    ends = {"terminated_TB": no, "truncated_TB": no, "valid_TB": ~no}
    memory.append(np.arange(4.0).reshape(4, 1), actions, np.ones((3, 1)), **ends)
    sample = memory.sample(20, np.random.default_rng(0), discount=GAMMA)
    np.testing.assert_array_equal(sample.actions, actions[sample.serials_N, 0])
    np.testing.assert_array_equal(sample.obs_NX + 1, sample.next_obs_NX)


def test_what_can_not_be_is_refused():
    for options in (
        {"streams": 0},
        {"capacity": 1},
        {"obs_dtype": "float16"},
        {"frame_stack": 0},
        {"alpha": 2.0},
    ):
        with pytest.raises(LayoutMismatchError):
            layout_of(**{"streams": 1, "capacity": 10, **options})
    layout = layout_of(2, 20)
    with pytest.raises(LayoutMismatchError, match="returns of 10 steps"):
        ReplayMemory(layout, n_step=10)
    with pytest.raises(LayoutMismatchError, match="bytes"):
        ReplayMemory(layout, buffer=memoryview(bytearray(layout.nbytes - 1)))
    memory = ReplayMemory(layout)
    with pytest.raises(TensorError, match="no row"):
        memory.sample(1, np.random.default_rng(0), discount=GAMMA)
    with pytest.raises(TensorError, match="uniformly"):
        memory.update_priorities(np.arange(1), np.arange(1), np.ones(1))
    environments = Environments(2, seed=13)
    with pytest.raises(LayoutMismatchError, match="10 steps"):
        memory.append(*(unroll := environments.unroll([0], 10))[0], **unroll[1])
    arrays, ends = environments.unroll([0, 1], 3)
    for columns in ([0, 0], [0, 2], [-1, 0], [0]):
        with pytest.raises(LayoutMismatchError, match="streams"):
            memory.append(*arrays, **ends, columns_B=np.array(columns))
    with pytest.raises(LayoutMismatchError, match="observations"):
        memory.append(arrays[0].astype("float64"), *arrays[1:], **ends)
    with pytest.raises(LayoutMismatchError, match="actions"):
        memory.append(arrays[0], arrays[1].astype("int32"), arrays[2], **ends)
    with pytest.raises(LayoutMismatchError, match="bool"):
        memory.append(*arrays, **{**ends, "valid_TB": np.ones((3, 2))})
    assert memory.stored == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux tells of a process")
def test_rows_take_memory_when_they_come_and_not_before():
    def resident_mib():
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize() / 2**20

    before = resident_mib()
    memory = ReplayMemory(ReplayLayout((84, 84), "uint8", (), "int64", streams=1, capacity=40_000))
    assert memory.layout.nbytes > 250 * 2**20
    assert resident_mib() - before < 50
