"""The replay memory: rows of every environment's stream in the order of time, and n-step samples of them.

    unroll ──append──► stream b: a ring of rows ──sample──► obs, actions, returns, discounts, next_obs
                            priorities ◄──update_priorities── |δ| ◄── learner ◄──┘

A row is one step: observation, action, reward, and how the step ended. Every observation is stored once, as
the environment gave it: that which follows row t is row t + 1's, also after an episode's end, as the step
behind it (NEXT_STEP resets, see `rl.envs`) shows the true final observation. The observation behind the
newest row lies in the ring's next place, which is why a ring has one more place than rows. Where frames are
stacked, a row holds the newest frame only; the older ones are in the rows before.

A row counts (may be sampled) once the row is valid, its n steps or its episode's end are there, and no frame
of its stack is lost. Rows are numbered within their stream by *serials*; a place in memory, the *index* of a
row, is taken by a later serial when the ring has come round.

Everything that must survive a process lies in one buffer. An append first gives up the oldest rows, then
copies, then stores how many rows the stream has had: 8 bytes, the only store that makes the new rows visible.
Whoever attaches to the buffer of a killed process therefore finds all but the unroll that was being appended;
what can be derived (the sum tree, which rows count) is derived anew. One process at a time.

There may be fewer streams than there might: the memory is divided among those that have come, the *grid*, and
anew when others come, which keeps the newest rows of each. Streams move one after the other, each to places
that none lies in which is yet to move; one that is being moved when the process is killed loses its rows, the
others are where their words say, and whoever attaches moves the rest. Serials that are handed out carry how
often that was: what is said of rows as they lay before is passed over.

A stream to which nothing has come while the others came round their rings twice, on average, is given up: an
actor has died, or acts in fewer environments. Its rows, older than all others, would be drawn for ever. Its
room is the others'.

Prioritized experience replay: Schaul 2016, arXiv 1511.05952, sections 3.3 and 3.4; with several actors and n
steps: Horgan 2018, arXiv 1803.00933.

Shape suffixes: T unroll, T1 unroll with the observation behind it (T+1), B environments of an unroll, S
streams, N rows of a sample, n steps of the return, W rows of a window in time, K stacked frames, X the
observation's own dimensions (with K where frames are stacked), A the action's.
"""

# ruff: noqa: N815 (names carry shape suffixes)
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, TensorError
from p2pdrl.replay.sum_tree import Float64Array, Int64Array, SumTree
from p2pdrl.tensors.layout import hash_of
from p2pdrl.tensors.shared_memory import fence

__all__ = ["NewestRows", "ReplayLayout", "ReplayMemory", "ReplaySample", "importance_weights"]

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

DTYPES = ("bool", "uint8", "int64", "float32", "float64")
MAX_FRAMES = 256
_LINE_BYTES = 64
_USED, _GRID, _TIMES, _APPENDED = range(4)
"""Words: how many streams have come, among how many the memory is divided, how often that was done anew, and
how many rows ever came."""
_GIVEN_UP = -1
"""In place of a stream's number and one: it had rows before, as far as is known."""
_ROUNDS = 2
"""How often others come round before a stream is given up; one that is so much slower is, now and then."""
_SERIAL_BITS = 40
_VALID, _TERMINATED, _TRUNCATED, _PARTIAL = (np.uint8(1 << bit) for bit in range(4))
"""Bits of a row; partial: frames of its stack were lost before the row came."""
_ENDED = _TERMINATED | _TRUNCATED


@dataclass(frozen=True)
class ReplayLayout:
    """What rows are made of, and how many there are.

    Args:
        obs_shape: of one observation; of one frame, where frames are stacked.
        obs_dtype: one of bool, uint8, int64, float32, float64; so is ``action_dtype``.
        action_shape: ``()`` for discrete actions.
        streams: environments that there may be, of all actors together.
        capacity: rows of all streams together; each that has come has the same number, rounded down.
        frame_stack: K, frames in a sampled observation; 1 means that observations are sampled as they are.
        stack_axis: where the frames' axis is in a sampled observation: 0 puts it first, −1 last.
        alpha: α, the exponent of priorities: 0 makes all rows alike, 1 draws in proportion. None stores no
            priorities and draws uniformly.
        epsilon: ε, added to |δ|, so that no row is never drawn again.

    Raises:
        LayoutMismatchError: there can be no such memory.
    """

    obs_shape: tuple[int, ...]
    obs_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str
    streams: int
    capacity: int
    frame_stack: int = 1
    stack_axis: Literal[0, -1] = 0
    alpha: float | None = None
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.obs_dtype not in DTYPES or self.action_dtype not in DTYPES:
            raise LayoutMismatchError(f"rows can't hold {self.obs_dtype} and {self.action_dtype}")
        if min((*self.obs_shape, *self.action_shape), default=1) < 1:
            raise LayoutMismatchError(f"rows can't hold shapes {self.obs_shape} and {self.action_shape}")
        if self.streams < 1 or self.rows < 2:
            raise LayoutMismatchError(
                f"{self.capacity} rows for {self.streams} streams: each needs 2 or more"
            )
        if not 1 <= self.frame_stack <= MAX_FRAMES:
            raise LayoutMismatchError(f"a stack has 1 to {MAX_FRAMES} frames, not {self.frame_stack}")
        if self.alpha is not None and not (0.0 <= self.alpha <= 1.0 and self.epsilon > 0.0):
            raise LayoutMismatchError(
                f"priorities need 0 ≤ α ≤ 1 and ε > 0, not {self.alpha}, {self.epsilon}"
            )

    @property
    def rows(self) -> int:
        """Rows of each stream once all have come: the least that it ever has."""
        return self.capacity // max(self.streams, 1)

    @property
    def places(self) -> int:
        """Rows in memory, however many streams there are, and one more for each."""
        return self.capacity + self.streams

    @property
    def sampled_shape(self) -> tuple[int, ...]:
        """Shape of a sampled observation."""
        return self.stacked(self.frame_stack)

    def stacked(self, count: int) -> tuple[int, ...]:
        """Shape of so many frames."""
        if count == 1:
            return self.obs_shape
        frames = (count,)
        return frames + self.obs_shape if self.stack_axis == 0 else self.obs_shape + frames

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that holds everything which must survive."""
        return sum(_lines(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in self._parts)

    @cached_property
    def fingerprint(self) -> int:
        """A number for what lies where in the buffer; never 0."""
        return (
            int(hash_of("replay memory", [[list(shape), dtype] for shape, dtype in self._parts])[:15], 16) | 1
        )

    @cached_property
    def _parts(self) -> list[tuple[tuple[int, ...], str]]:
        places = self.places
        return [
            ((1,), "int64"),
            ((1,), "float64"),
            ((4,), "int64"),
            ((self.streams,), "int64"),
            ((self.streams,), "int64"),
            ((self.streams,), "int64"),
            ((self.streams,), "int64"),
            ((places,), "uint8"),
            ((places,), "uint8"),
            ((places,), "float32"),
            ((0 if self.alpha is None else places,), "float32"),
            ((places, *self.action_shape), self.action_dtype),
            ((places, *self.obs_shape), self.obs_dtype),
        ]

    def carve(self, buffer: memoryview) -> Iterator[Array]:
        """Give the arrays that lie in the buffer, one after another.

        Raises:
            LayoutMismatchError: the buffer is too small.
        """
        if buffer.nbytes < self.nbytes:
            raise LayoutMismatchError(f"the rows take {self.nbytes} bytes, the buffer has {buffer.nbytes}")
        at = 0
        for shape, dtype in self._parts:
            size = math.prod(shape)
            yield np.frombuffer(buffer, dtype, size, at if size else 0).reshape(shape)
            at += _lines(size * np.dtype(dtype).itemsize)


@dataclass(frozen=True)
class ReplaySample:
    """N rows, drawn with replacement. Observations and rewards are raw, as they were appended.

    Attributes:
        obs_NX: observations; with stacked frames `ReplayLayout.sampled_shape`, zero before the episode's
            first. One step before ``next_obs_NX`` both are views of one array, as all frames but one are in
            both: don't write to them.
        actions: N or NA.
        returns_N: float32, r_t + γ r_{t+1} + …: n rewards, or those up to the episode's end.
        discounts_N: float32, what the value of ``next_obs_NX`` counts: γ^m after m rewards; 0 where the
            episode terminated.
        next_obs_NX: the observations m steps later; the true final one after a truncation.
        weights_N: float32 importance weights, at most 1.
        indices_N: int64, where the rows lie.
        serials_N: int64 numbers of the rows within their streams, above those how often the memory was
            divided anew; with the indices they name rows for good.
        masses_N: float64 p^α of each row, 1 without priorities: what `importance_weights` needs where samples
            of several memories are put together.
        both_NX: the array that both observations are views of; None where they have one each.
    """

    obs_NX: Array
    actions: Array
    returns_N: npt.NDArray[np.float32]
    discounts_N: npt.NDArray[np.float32]
    next_obs_NX: Array
    weights_N: npt.NDArray[np.float32]
    indices_N: Int64Array
    serials_N: Int64Array
    masses_N: Float64Array
    both_NX: Array | None = None


class NewestRows(NamedTuple):
    """Some of the newest rows, without observations.

    Args:
        indices_N: where they lie, with their ``serials_N``.
        returns_N: float32 sums of their rewards, as in `ReplaySample`, like ``discounts_N``.
        lengths_N: how many rewards these are.
        eligible_N: whether a row may be sampled: what is said of others means nothing.
    """

    indices_N: Int64Array
    serials_N: Int64Array
    returns_N: npt.NDArray[np.float32]
    discounts_N: npt.NDArray[np.float32]
    lengths_N: Int64Array
    eligible_N: BoolArray


class ReplayMemory:
    """Rows of S streams, from which samples are drawn.

    Args:
        n_step: n, rewards in a return. Rows count once their n steps are there, so it belongs to the memory;
            whoever attaches may choose another.
        buffer: at least ``layout.nbytes`` bytes, writable; zeros, or what an equal layout left there, from
            which this memory goes on. None allocates.

    Raises:
        LayoutMismatchError: the buffer is too small, or holds rows of another layout.

    Example:
        >>> layout = ReplayLayout((1,), "float32", (), "int64", streams=1, capacity=10)
        >>> memory = ReplayMemory(layout, n_step=2)
        >>> obs, no = np.arange(4, dtype=np.float32).reshape(4, 1, 1), np.zeros((3, 1), bool)
        >>> ends = {"terminated_TB": no, "truncated_TB": no, "valid_TB": ~no}
        >>> memory.append(obs, np.zeros((3, 1), np.int64), np.ones((3, 1)), **ends)
        >>> memory.count, memory.sample(8, np.random.default_rng(0), discount=0.5).returns_N[0]
        (2, np.float32(1.5))
    """

    def __init__(self, layout: ReplayLayout, *, n_step: int = 1, buffer: memoryview | None = None) -> None:
        if not 1 <= n_step < layout.rows:
            raise LayoutMismatchError(f"returns of {n_step} steps from streams of {layout.rows} rows")
        self.layout = layout
        self.n_step = n_step
        # numpy's zeros take no memory before they are touched; a bytearray's do
        arrays = list(layout.carve(np.zeros(layout.nbytes, np.uint8).data if buffer is None else buffer))
        self._fingerprint, self._greatest, self._words, *streams = arrays[:7]
        self._oldest_S, self._counts_S, self._grids_S, self._numbers_C = streams
        self._columns = arrays[7:]
        self._flags, self._ages, self._rewards, self._priorities, self._actions, self._obs = self._columns
        self._frames: Array = self._obs.reshape(layout.places, -1)
        self._claim()
        self._eligible: BoolArray = np.zeros(layout.places, np.bool_)
        self._eligible_slots: Int64Array | None = None
        self._count = 0
        self._tree = None if layout.alpha is None else SumTree(layout.places)
        self._recover()

    def _recover(self) -> None:
        """Make whole what a killed process left."""
        used = self._used
        self._numbers_C[self._numbers_C > used] = _GIVEN_UP  # it had not counted them yet
        self._counts_S[used:] = self._oldest_S[used:] = 0
        np.minimum(self._oldest_S, self._counts_S, out=self._oldest_S)
        self._divide()
        self._came_S = np.full(self.layout.streams, self.appended)
        numbers_S = np.arange(used)
        nobodys_S = ~np.isin(numbers_S, self._numbers_C - 1)  # it was giving them up
        empty_S = self._counts_S[:used] == 0  # or about to append their first rows
        if (nobodys_S | empty_S).any():
            self._give_up(numbers_S[nobodys_S | empty_S])

    def _claim(self) -> None:
        """Mark a new buffer as one of this layout; refuse that of another."""
        found, own = int(self._fingerprint[0]), self.layout.fingerprint
        if found == 0:
            self._greatest[0] = 1.0
            fence()
            self._fingerprint[0] = own
        elif found != own:
            raise LayoutMismatchError("the buffer holds a replay memory of another layout: begin with zeros")

    # streams come

    @property
    def _used(self) -> int:
        """Streams that have come: their numbers are less."""
        return int(self._words[_USED])

    @property
    def rows(self) -> int:
        """Rows that each stream has room for, with as many as have come."""
        return self.layout.capacity // max(int(self._words[_GRID]), 1)

    def _numbers_of(self, columns_B: Int64Array) -> Int64Array:
        """Return the streams' numbers, in the order in which they came; −1 for those that haven't."""
        numbers_B: Int64Array = self._numbers_C.take(columns_B) - 1
        return numbers_B

    def _admit(self, columns_B: Int64Array) -> Int64Array:
        """Return the streams' numbers, and make room for those that are new."""
        numbers_B = self._numbers_of(columns_B)
        new = np.sort(columns_B[numbers_B < 0])
        if not len(new):
            return numbers_B
        used = self._used
        grid = int(self._words[_GRID])
        if used + len(new) > grid:
            # a little more than needed, lest every stream that comes moves all others
            self._divide_among(min(max(used + len(new), grid + grid // 4), self.layout.streams))
        self._numbers_C[new] = used + 1 + np.arange(len(new))
        fence()
        self._words[_USED] = used + len(new)
        return self._numbers_of(columns_B)

    def _give_up(self, numbers: Int64Array) -> None:
        """Forget streams and their rows; give their room to the others."""
        self._words[_TIMES] += 1
        for number in np.sort(numbers)[::-1].tolist():
            self._replace(number, self._used - 1)
        self._divide_among(max(self._used, 1))

    def _replace(self, number: int, last: int) -> None:
        """Forget a stream; the last one takes its place and number."""
        self._numbers_C[self._numbers_C == number + 1] = _GIVEN_UP
        fence()
        if number != last:
            oldest, count = int(self._oldest_S[last]), int(self._counts_S[last])
            self._oldest_S[number] = max(count, int(self._counts_S[number]))  # no rows, whatever is there
            self._counts_S[number] = count
            fence()
            serials = np.arange(oldest, count + 1)
            for column in self._columns:
                if column.size:
                    column[number * self._places + serials % self._places] = column[
                        last * self._places + serials % self._places
                    ]
            self._came_S[number] = self._came_S[last]
            fence()
            self._numbers_C[self._numbers_C == last + 1] = number + 1
            fence()
            self._oldest_S[number] = oldest
        self._words[_USED] = last
        fence()
        self._counts_S[last] = self._oldest_S[last] = 0

    def _give_up_those_left_behind(self) -> None:
        """Give up streams to which nothing came while the others came round, and any older ones."""
        now, came_S = self.appended, self._came_S[: self._used]
        others_S = len(came_S) - np.searchsorted(np.sort(came_S), came_S, side="right")
        behind_S = (now - came_S >= _ROUNDS * self.rows * others_S) & (others_S > 0)
        if behind_S.any():
            behind_S |= came_S <= came_S[behind_S].max()  # actors of one node end together: divide once
        # a process may have been killed before it gave the others their room
        if behind_S.any() or int(self._words[_GRID]) > len(came_S) + len(came_S) // 4:
            self._give_up(np.flatnonzero(behind_S))

    def _divide_among(self, grid: int) -> None:
        """Divide the memory anew."""
        self._words[_TIMES] += int(self._used > 0)
        self._words[_GRID] = grid
        fence()
        self._divide()

    def _divide(self) -> None:
        """Bring all streams to where they lie by the grid in force, and find out which rows count."""
        used = self._used
        moving = np.flatnonzero(self._grids_S[:used] != self._words[_GRID])
        if len(moving) and self.layout.capacity // int(self._grids_S[moving[0]]) < self.rows:
            moving = moving[::-1]  # to places that no earlier one lies in
        for stream in moving.tolist():
            self._move(stream)
        self._grids_S[used:] = self._words[_GRID]
        self._places = self.rows + 1
        self._eligible[:] = False
        self._eligible_slots, self._count = None, 0
        if self._tree is not None:
            self._tree.fill(np.zeros(len(self._eligible)))
        if used:
            self._settle(np.arange(used), self._places)

    def _move(self, stream: int) -> None:
        """Bring one stream's newest rows to where they lie by the grid in force."""
        places = self.rows + 1
        before = self.layout.capacity // int(self._grids_S[stream]) + 1
        count = int(self._counts_S[stream])
        first = max(int(self._oldest_S[stream]), count - self.rows)
        serials = np.arange(first, count + 1)  # the observation behind the newest row, too
        sources, targets = stream * before + serials % before, stream * places + serials % places
        self._oldest_S[stream] = count
        fence()
        for column in self._columns:
            if column.size:
                column[targets] = column[sources]
        if first == count:  # it may be one that was lost in its last move
            self._flags[targets] = _PARTIAL
        fence()
        self._grids_S[stream] = self._words[_GRID]
        fence()
        self._oldest_S[stream] = first

    # what there is

    @property
    def count(self) -> int:
        """Rows that may be sampled: the N of importance weights."""
        return self._count

    @property
    def mass(self) -> float:
        """Σ p^α over these rows; without priorities their count."""
        return float(self._count) if self._tree is None else self._tree.total

    @property
    def stored(self) -> int:
        """Rows in memory, also those that may not be sampled."""
        return int((self._counts_S - self._oldest_S).sum())

    @property
    def full(self) -> bool:
        """Whether each new row takes the place of an old one."""
        return self.stored == max(self._used, 1) * self.rows

    # rows come

    def append(
        self,
        obs_T1BX: Array,
        actions: Array,
        rewards_TB: Array,
        *,
        terminated_TB: Array,
        truncated_TB: Array,
        valid_TB: Array,
        columns_B: Array | None = None,
        restarts_B: Array | None = None,
        td_errors_TB: Array | None = None,
    ) -> None:
        """Append an unroll, in place of the oldest rows once the streams are full.

        A stream goes on where its last unroll ended: row T of that one's observations is row 0 of this one's.
        Where steps between were lost, the last row before is cut there: its return ends as at a truncation,
        with the value of the observation that did follow. Its first rows afterwards have no stack of frames
        that is known; they count from the (K−1)th, or from the next episode on. A stream whose row 0 isn't
        what its last unroll ended with is taken for one that restarts, like one that was given up before.

        Args:
            obs_T1BX: raw observations, of the layout's dtype.
            actions: TB or TBA, of the layout's dtype.
            rewards_TB: raw; stored as float32.
            terminated_TB: the episode ended in a terminal state.
            truncated_TB: the episode was cut.
            valid_TB: false where the step was a reset.
            columns_B: different numbers of the streams; None means the first B.
            restarts_B: whether steps were lost before this unroll; None means none. A stream's very first
                unroll begins an episode, unless it says that it restarts.
            td_errors_TB: δ of each row, as an actor computed them; NaN, as None, gives a row the greatest
                priority so far.

        Raises:
            LayoutMismatchError: shapes, dtypes or columns don't fit, or the unroll is longer than a stream.
            PoisonedVectorError: a TD error is infinite.
        """
        T, B = rewards_TB.shape
        columns_B = np.arange(B) if columns_B is None else np.asarray(columns_B, np.int64)
        self._check(obs_T1BX, actions, rewards_TB, (terminated_TB, truncated_TB, valid_TB), columns_B)
        again_B = self._numbers_C[columns_B] == _GIVEN_UP
        streams_B = self._admit(columns_B)
        places = self._places
        had_B = self._counts_S[streams_B]
        bases_B = streams_B * places
        behind_B = bases_B + had_B % places
        lost_B = (self._frames[behind_B] != obs_T1BX[0].reshape(B, -1)).any(axis=1) & (had_B > 0)
        lost_B |= again_B
        if restarts_B is not None:
            lost_B |= np.asarray(restarts_B, np.bool_)
        cut_B = lost_B & (had_B > 0)
        begins_B = had_B + cut_B
        slots_T1B = bases_B + (begins_B + np.arange(T + 1)[:, None]) % places
        ages_T1B, partial_T1B = self._stacks(behind_B, lost_B, had_B == 0, np.asarray(valid_TB, np.bool_))
        priorities_TB = self._first_priorities((T, B), td_errors_TB)

        self._oldest_S[streams_B] = np.maximum(self._oldest_S[streams_B], begins_B + T - self.rows)
        fence()
        if cut_B.any():
            self._flags[behind_B[cut_B]] &= _PARTIAL
            self._flags[(bases_B + (had_B - 1) % places)[cut_B]] |= _TRUNCATED
        slots_TB = slots_T1B[:-1]
        self._obs[slots_T1B] = obs_T1BX
        self._actions[slots_TB] = actions
        self._rewards[slots_TB] = rewards_TB
        self._ages[slots_T1B] = ages_T1B
        flags_T1B = partial_T1B * _PARTIAL
        flags_T1B[:-1] |= valid_TB * _VALID | terminated_TB * _TERMINATED | truncated_TB * _TRUNCATED
        self._flags[slots_T1B] = flags_T1B
        if priorities_TB is not None:
            self._priorities[slots_TB] = priorities_TB
        fence()
        self._counts_S[streams_B] = begins_B + T
        self._words[_APPENDED] += T * B + int(cut_B.sum())
        self._settle(streams_B, T + 1 + self.n_step)
        self._came_S[streams_B] = self.appended
        self._give_up_those_left_behind()

    def _check(
        self, obs_T1BX: Array, actions: Array, rewards_TB: Array, flags: tuple[Array, ...], columns_B: Array
    ) -> None:
        layout = self.layout
        T, B = rewards_TB.shape
        if not 1 <= T < layout.rows:
            raise LayoutMismatchError(
                f"an unroll of {T} steps for streams of {layout.rows} rows: give them more"
            )
        if obs_T1BX.shape != (T + 1, B, *layout.obs_shape) or obs_T1BX.dtype != layout.obs_dtype:
            raise LayoutMismatchError(f"observations {obs_T1BX.dtype} {obs_T1BX.shape} don't fit {layout}")
        if actions.shape != (T, B, *layout.action_shape) or actions.dtype != layout.action_dtype:
            raise LayoutMismatchError(f"actions {actions.dtype} {actions.shape} don't fit {layout}")
        if any(flag.shape != (T, B) or flag.dtype != np.bool_ for flag in flags):
            raise LayoutMismatchError(f"how steps ended and which are valid: bool {(T, B)}")
        numbers = columns_B.tolist()
        if len(set(numbers)) != B or min(numbers) < 0 or max(numbers) >= layout.streams:
            raise LayoutMismatchError(f"{B} environments are streams {numbers}; there are {layout.streams}")

    def _stacks(
        self, behind_B: Int64Array, lost_B: BoolArray, new_B: BoolArray, valid_TB: BoolArray
    ) -> tuple[npt.NDArray[np.uint8], BoolArray]:
        """Return how many frames of its episode lie before each row, and which rows' stacks aren't whole."""
        T, B = valid_TB.shape
        steps_T1 = np.arange(T + 1)[:, None]
        begins_T1B = np.zeros((T + 1, B), np.int64)
        np.multiply(~valid_TB, steps_T1[1:], out=begins_T1B[1:])
        np.maximum.accumulate(begins_T1B, axis=0, out=begins_T1B)
        went_on_T1B = begins_T1B == 0
        before_B = np.where(lost_B | new_B, 0, self._ages[behind_B])
        ages_T1B = np.minimum(steps_T1 - begins_T1B + went_on_T1B * before_B, MAX_FRAMES - 1)
        partial_B = lost_B | (~new_B & ((self._flags[behind_B] & _PARTIAL) != 0))
        partial_T1B = went_on_T1B & partial_B & (ages_T1B < self.layout.frame_stack - 1)
        return ages_T1B.astype(np.uint8), partial_T1B

    def _first_priorities(
        self, shape: tuple[int, int], td_errors_TB: Array | None
    ) -> npt.NDArray[np.float32] | None:
        if self._tree is None:
            return None
        if td_errors_TB is None:
            return np.full(shape, self._greatest[0], np.float32)
        known_TB = ~np.isnan(td_errors_TB)
        priorities_TB = self._priorities_of(np.where(known_TB, td_errors_TB, 0.0))
        return np.where(known_TB, priorities_TB, np.float32(self._greatest[0]))

    # which rows may be sampled

    def _settle(self, streams_B: Int64Array, newest: int) -> None:
        """Find out which of the newest rows of some streams may be sampled, and give them their masses.

        Args:
            newest: how many, and one more for the place behind them.
        """
        newest = min(newest, self._places)
        oldest_B, counts_B = self._oldest_S[streams_B], self._counts_S[streams_B]
        bases_B = streams_B * self._places
        serials_WB = counts_B - np.arange(newest)[:, None]
        slots_WB = bases_B + serials_WB % self._places
        flags_WB = self._flags[slots_WB]
        ends_WB = (flags_WB & _ENDED) != 0
        ends_WB[0] = False
        whole_WB = ends_WB.copy()
        for later in range(1, self.n_step):
            whole_WB[later:] |= ends_WB[:-later]
        whole_WB[self.n_step :] = True
        whole_WB[0] = False
        eligible_WB = whole_WB & ((flags_WB & (_VALID | _PARTIAL)) == _VALID)
        K = self.layout.frame_stack
        if K > 1:
            eligible_WB &= serials_WB - np.minimum(self._ages[slots_WB], K - 1) >= oldest_B
        there_WB = serials_WB >= oldest_B
        self._mark(slots_WB[there_WB], eligible_WB[there_WB])
        if K > 1:
            serials_KB = oldest_B + np.arange(K - 1)[:, None]
            slots_KB = bases_B + serials_KB % self._places
            torn_KB = serials_KB - np.minimum(self._ages[slots_KB], K - 1) < oldest_B
            slots_N = slots_KB[torn_KB & (serials_KB < counts_B)]
            self._mark(slots_N, np.zeros(len(slots_N), np.bool_))

    def _mark(self, slots_N: Int64Array, eligible_N: BoolArray) -> None:
        """Let rows count or not; each is named once."""
        self._count += int(eligible_N.sum()) - int(self._eligible[slots_N].sum())
        self._eligible[slots_N] = eligible_N
        self._eligible_slots = None
        if self._tree is not None:
            self._tree.set(slots_N, self._masses_of(self._priorities[slots_N]) * eligible_N)

    # samples

    def sample(
        self,
        batch: int,
        rng: np.random.Generator,
        *,
        discount: float,
        beta: float = 1.0,
        times: int = 1,
        out: ReplaySample | None = None,
    ) -> ReplaySample:
        """Draw rows that count, with replacement.

        With priorities, row i has the probability P(i) = p_i^α / Σ p^α, and one row is drawn from each of N
        equal parts of that mass (stratified, section 3.3; rows come in the order in which they lie).
        Without, all have the same: places of the ring are drawn and those that don't count are drawn again;
        while few do, from a list of them.

        Args:
            batch: N, at least 1.
            discount: γ.
            beta: β of the importance weights; see `importance_weights`.
            times: draw so often, one sample behind the other: rows are those that as many calls would give,
                for less than their price. Not with priorities, which change in between.
            out: an earlier sample of this memory and of as many rows, whose observations are overwritten: new
                memory for pictures costs more than copying them.

        Raises:
            TensorError: no row may be sampled yet, or priorities can't be drawn by several times.
        """
        if self._tree is not None and times != 1:
            raise TensorError("priorities change between two samples: draw one at a time")
        if self._count == 0:
            raise TensorError("the replay memory holds no row that could be sampled yet: wait for `count`")
        mass = self.mass
        if self._tree is None:
            drawn = [self._draw_uniformly(batch, rng) for _ in range(times)]
            indices_N = drawn[0] if times == 1 else np.concatenate(drawn)
            masses_N = np.ones(batch * times)
            weights_N = np.ones(batch * times, np.float32)
        else:
            indices_N = self._tree.find((np.arange(batch) + rng.random(batch)) * (mass / batch))
            masses_N = self._tree.masses(indices_N)
            weights_N = importance_weights(masses_N, mass=mass, count=self._count, beta=beta)
        bases_N = indices_N // self._places * self._places
        newest_N = self._counts_S.take(indices_N // self._places) - 1
        serials_N = newest_N - (newest_N - indices_N) % self._places
        returns_N, discounts_N, lengths_N = self._returns(bases_N, serials_N, discount)
        obs_NX, next_obs_NX, both_NX = self._pairs(bases_N, serials_N, lengths_N, out)
        return ReplaySample(
            obs_NX=obs_NX,
            actions=self._actions.take(indices_N, axis=0),
            returns_N=returns_N,
            discounts_N=discounts_N,
            next_obs_NX=next_obs_NX,
            weights_N=weights_N,
            indices_N=indices_N,
            serials_N=serials_N + self._stamp,
            masses_N=masses_N,
            both_NX=both_NX,
        )

    def _draw_uniformly(self, batch: int, rng: np.random.Generator) -> Int64Array:
        places = len(self._eligible)
        if self._count < places // 4:
            if self._eligible_slots is None:
                self._eligible_slots = np.flatnonzero(self._eligible)
            slots = self._eligible_slots
            return slots[rng.integers(len(slots), size=batch)]
        found: list[Int64Array] = []
        missing = batch
        while missing > 0:
            slots = rng.integers(places, size=missing * places // self._count + 8)
            found.append(slots[self._eligible[slots]][:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def _returns(
        self, bases_N: Int64Array, serials_N: Int64Array, discount: float
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], Int64Array]:
        """Return the discounted sums of rewards, the discounts behind them, and how many rewards each has."""
        if self.n_step == 1:
            slots_N = bases_N + serials_N % self._places
            goes_on_N = (self._flags.take(slots_N) & _TERMINATED) == 0
            discounts_N = goes_on_N * np.float32(discount)
            return self._rewards.take(slots_N), discounts_N, np.ones(len(slots_N), np.int64)
        powers = discount ** np.arange(self.n_step + 1)
        slots_nN = bases_N + (serials_N + np.arange(self.n_step)[:, None]) % self._places
        flags_nN = self._flags.take(slots_nN)
        on_nN = np.ones(slots_nN.shape, np.bool_)
        for step in range(1, self.n_step):
            np.logical_and(on_nN[step - 1], (flags_nN[step - 1] & _ENDED) == 0, out=on_nN[step])
        returns_N = powers[:-1] @ np.where(on_nN, self._rewards.take(slots_nN), 0.0)
        lengths_N = on_nN.sum(axis=0)
        terminated_N = (on_nN & ((flags_nN & _TERMINATED) != 0)).any(axis=0)
        discounts_N = powers.take(lengths_N) * ~terminated_N
        return returns_N.astype(np.float32), discounts_N.astype(np.float32), lengths_N

    def _pairs(
        self, bases_N: Int64Array, serials_N: Int64Array, lengths_N: Int64Array, out: ReplaySample | None
    ) -> tuple[Array, Array, Array | None]:
        """Return the rows' observations, those ``lengths_N`` steps later, and what both are views of.

        They lie in an earlier sample's memory if ``out`` isn't None.
        """
        if self.n_step != 1 or not 1 < self.layout.frame_stack < MAX_FRAMES:
            out_NX, next_out_NX = (None, None) if out is None else (out.obs_NX, out.next_obs_NX)
            return (
                self._observations(bases_N, serials_N, out_NX),
                self._observations(bases_N, serials_N + lengths_N, next_out_NX),
                None,
            )
        # One step later a stack has one frame more and one less: K + 1 frames are both. That which follows an
        # episode's end is its final observation, so they all are of one episode.
        both_NX = self._observations(bases_N, serials_N + 1, None if out is None else out.both_NX, more=1)
        last = both_NX.ndim - 1 if self.layout.stack_axis == -1 else 1
        earlier, later = ((slice(None),) * last + (part,) for part in (slice(None, -1), slice(1, None)))
        return both_NX[earlier], both_NX[later], both_NX

    def _observations(
        self, bases_N: Int64Array, serials_N: Int64Array, out_NX: Array | None, *, more: int = 0
    ) -> Array:
        """Return the rows' observations, in ``out_NX`` if that isn't None.

        Args:
            more: so many frames more than K, from before the stack.
        """
        layout, N = self.layout, len(serials_N)
        K = layout.frame_stack + more
        moves = K > 1 and layout.stack_axis == -1
        if out_NX is None:
            frames = np.empty((N * K, self._frames.shape[1]), self._frames.dtype)
        elif out_NX.shape != (N, *layout.stacked(K)) or out_NX.dtype != self._frames.dtype:
            raise LayoutMismatchError(f"{out_NX.dtype} {out_NX.shape} can't take {N} rows of {layout}")
        else:
            frames = np.moveaxis(out_NX, -1, 1) if moves else out_NX
            frames = frames.reshape(N * K, -1)
            if not np.shares_memory(frames, out_NX):
                raise LayoutMismatchError("observations are taken into those of an earlier sample only")
        if K == 1:
            slots = bases_N + serials_N % self._places
        else:
            slots = bases_N[:, None] + (serials_N[:, None] + np.arange(1 - K, 1)) % self._places
        self._frames.take(slots.reshape(-1), axis=0, out=frames, mode="clip")  # "raise" would copy twice
        if K == 1:
            return frames.reshape(N, *layout.obs_shape)
        before_N = self._ages.take(slots[:, -1])
        frames_NKX = frames.reshape(N, K, *layout.obs_shape)
        for row in np.flatnonzero(before_N < K - 1).tolist():
            frames_NKX[row, : K - 1 - before_N[row]] = 0
        return np.moveaxis(frames_NKX, 1, -1) if moves else frames_NKX

    def newest(self, columns_N: Int64Array, ages_N: Int64Array, *, discount: float) -> NewestRows:
        """Return rows by how long ago they came.

        Args:
            columns_N: which streams they are of, as `append` names them; they must have come.
            ages_N: 1 is a stream's newest row; more than it has are told as rows that may not be sampled.
            discount: γ.
        """
        streams_N = self._numbers_of(columns_N)
        bases_N = streams_N * self._places
        serials_N = self._counts_S.take(streams_N) - ages_N
        indices_N = bases_N + serials_N % self._places
        there_N = serials_N >= self._oldest_S.take(streams_N)
        return NewestRows(
            indices_N,
            serials_N + self._stamp,
            *self._returns(bases_N, serials_N, discount),
            eligible_N=there_N & self._eligible.take(indices_N),
        )

    def rows_of(self, columns_N: Int64Array) -> Int64Array:
        """Return how many rows came to streams, which `append` names so, since each was given up last."""
        numbers_N = self._numbers_of(columns_N)
        rows_N: Int64Array = np.where(numbers_N < 0, 0, self._counts_S.take(np.maximum(numbers_N, 0)))
        return rows_N

    @property
    def _stamp(self) -> int:
        """Added to serials that are handed out: how often the memory was divided anew."""
        return int(self._words[_TIMES]) << _SERIAL_BITS

    @property
    def places(self) -> int:
        """Of rows in memory: indices are less."""
        return len(self._eligible)

    @property
    def appended(self) -> int:
        """Rows that ever came, resets included."""
        return int(self._words[_APPENDED])

    # priorities

    def update_priorities(self, indices_N: Int64Array, serials_N: Int64Array, td_errors_N: Array) -> int:
        """Give rows the priorities |δ| + ε, and tell how many of them were still there.

        Rows that have been overwritten since they were drawn are left out; of a row that is named more than
        once the last δ counts.

        Args:
            indices_N: of a sample, like its ``serials_N``.
            td_errors_N: δ, of either sign.

        Raises:
            TensorError: the memory has no priorities.
            PoisonedVectorError: a δ isn't finite.
        """
        if self._tree is None:
            raise TensorError("this replay memory draws uniformly: it has no priorities")
        priorities_N = self._priorities_of(td_errors_N)
        streams_N = indices_N // self._places
        there_N = streams_N < self._used
        streams_N = np.minimum(streams_N, self.layout.streams - 1)
        serials_N = serials_N - self._stamp  # those of an earlier division are less than any now
        there_N &= serials_N >= self._oldest_S.take(streams_N)
        there_N &= serials_N < self._counts_S.take(streams_N)
        there_N &= streams_N * self._places + serials_N % self._places == indices_N
        if not there_N.all():
            indices_N, priorities_N = indices_N[there_N], priorities_N[there_N]
        self._priorities[indices_N] = priorities_N
        self._tree.set(indices_N, self._masses_of(priorities_N) * self._eligible[indices_N])
        return len(indices_N)

    def reset_priorities(self) -> None:
        """Forget all priorities: every row, and every new one, has the same again."""
        if self._tree is None:
            return
        self._greatest[0] = 1.0
        self._priorities[:] = 1.0
        self._tree.fill(self._eligible.astype(np.float64))

    def _priorities_of(self, td_errors: Array) -> npt.NDArray[np.float32]:
        """Return |δ| + ε, and remember the greatest so far."""
        priorities = np.abs(td_errors) + self.layout.epsilon
        greatest = float(priorities.max(initial=0.0))
        if not math.isfinite(greatest):
            raise PoisonedVectorError("a TD error isn't finite: no row can have that as its priority")
        self._greatest[0] = max(float(self._greatest[0]), greatest)
        return priorities.astype(np.float32)

    def _masses_of(self, priorities: npt.NDArray[np.float32]) -> Float64Array:
        """Return p^α."""
        masses: Float64Array = np.power(priorities, self.layout.alpha or 0.0, dtype=np.float64)
        return masses


def importance_weights(
    masses_N: Float64Array, *, mass: float, count: int, beta: float
) -> npt.NDArray[np.float32]:
    """Return (N·P)^−β with P = p^α / Σ p^α, divided by the greatest of them (Schaul 2016, section 3.4).

    Args:
        masses_N: p^α of the rows of a batch.
        mass: Σ p^α over all rows they were drawn from, of all memories.
        count: how many rows these are: the formula's N.
        beta: β; 1 undoes the bias of the draw entirely, 0 not at all.
    """
    weights_N = (masses_N * (count / mass)) ** -beta
    weights_N /= weights_N.max()
    return weights_N.astype(np.float32)


def _lines(nbytes: int) -> int:
    """Up to a whole cache line."""
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES
