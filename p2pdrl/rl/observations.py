"""Observations of several entries (Dict, Tuple), and action masks: how they lie in one row of bytes.

    {"camera": uint8 HWC, "joints": float32 J, "tool": one of n, "action_mask": A}
        ── pack ──►  | joints: 4 J bytes | tool: 4 bytes | camera: H·W·C bytes | mask: A bytes |

Unrolls, rings and replay memories know arrays of one type only. So what isn't a plain array travels as rows
of ``uint8`` in which each entry keeps its own type; the network's first layer takes them apart again, by
views (`networks.entries`). Vectors of float32 come first: they are what is normalised where observations are.
Then come other entries of four bytes, then single bytes, the mask last, so that all of them are aligned.

``envs`` packs. An action mask lies in the row of the observation that it belongs to: so whoever has an
observation, acting or learning, now or drawn from a replay memory, has its mask.

Shape suffixes: B environments, X bytes of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from p2pdrl.errors import ConfigError

__all__ = [
    "ObservationEntry",
    "ObservationLayout",
    "ObservationPacker",
    "channels_last",
    "check_observations",
    "is_picture",
    "layout_of",
    "pixels_of",
]

Array = npt.NDArray[Any]
Path = tuple[str | int, ...]

SMALLEST_SIDE = 3
"""Of an image of several channels, in pixels: the kernel of the smallest network for images."""
SMALLEST_PICTURE = 36
"""Sides of a grey image in pixels, the least that ``nature_cnn`` takes; smaller grids of bytes are boards."""
MOST_CHOICES = 1 << 16
"""Of one Discrete entry, each of which is an input of the network."""
WORD_BYTES = 4


@dataclass(frozen=True)
class ObservationEntry:
    """One entry of an observation.

    Attributes:
        path: keys and indices that lead to it.
        kind: ``vector`` of numbers (of any shape), ``image`` (three dimensions), ``choices`` of one of
            several each, or action ``mask``.
        shape: of its array.
        dtype: float32, int32, uint8 or bool.
        most: greatest value of bytes and of an image's pixels, by which networks divide them; 1 leaves them.
        sizes: of choices: how many each has.
        start: of choices: the number of the first of each.
        offset: of its first byte in a row.
    """

    path: Path
    kind: Literal["vector", "image", "choices", "mask"]
    shape: tuple[int, ...]
    dtype: str
    most: float = 1.0
    sizes: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    offset: int = 0

    @property
    def name(self) -> str:
        """For people, keys with dots between them; empty for an observation that is a single array."""
        return ".".join(str(key) for key in self.path)

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def width(self) -> int:
        """Numbers that it comes to as part of a vector: choices are one-hot."""
        return sum(self.sizes) if self.kind == "choices" else math.prod(self.shape)


@dataclass(frozen=True)
class ObservationLayout:
    """Where entries lie in a row, and which of them are what.

    Attributes:
        inputs: entries that the network sees.
        mask: of actions: true (1) where they are allowed; None where environments have no masks.
        info_mask: whether the mask is from the environment's ``info``, not from its observation.
    """

    inputs: tuple[ObservationEntry, ...]
    mask: ObservationEntry | None = None
    info_mask: bool = False

    @cached_property
    def nbytes(self) -> int:
        """X: bytes of a row, a multiple of a float's."""
        last = self.inputs[-1] if self.mask is None else self.mask
        return -(-(last.offset + last.nbytes) // WORD_BYTES) * WORD_BYTES

    @cached_property
    def floats(self) -> int:
        """Numbers of float32 at the beginning of a row, all vectors' together: what can be normalised."""
        return sum(entry.width for entry in self.inputs if _order(entry) == 0)

    @property
    def images(self) -> tuple[ObservationEntry, ...]:
        """Those that want convolutions."""
        return tuple(entry for entry in self.inputs if entry.kind == "image")

    @property
    def width(self) -> int:
        """Numbers that all inputs come to as one vector."""
        return sum(entry.width for entry in self.inputs)


class ObservationPacker:
    """Writes observations of B environments into rows.

    Args:
        mask_key: of masks in ``info``.
    """

    def __init__(self, layout: ObservationLayout, environments: int, mask_key: str) -> None:
        self._rows_BX = np.zeros((environments, layout.nbytes), np.uint8)
        self._inputs = [(entry, self._view(entry)) for entry in layout.inputs]
        self._mask = None if layout.mask is None else (layout.mask, self._view(layout.mask))
        self._info_mask = layout.info_mask
        self._key = mask_key

    def _view(self, entry: ObservationEntry) -> Array:
        """Return the entry's array in all rows."""
        rows_BX = self._rows_BX
        inner = np.empty(entry.shape, entry.dtype).strides
        shape, strides = (len(rows_BX), *entry.shape), (rows_BX.strides[0], *inner)
        return np.ndarray(shape, entry.dtype, rows_BX.data, entry.offset, strides)

    def pack(self, obs: Any, infos: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Return rows_BX of a batch of observations and their infos; the next call overwrites them."""
        for entry, view in self._inputs:
            values = _at(obs, entry.path).reshape(view.shape)
            if entry.sizes:
                values = values - np.array(entry.start).reshape(entry.shape)
            np.copyto(view, values, casting="unsafe")
        if self._mask is not None:
            entry, view = self._mask
            if self._info_mask:
                self._pack_info(view, infos)
            else:
                np.not_equal(_at(obs, entry.path).reshape(view.shape), 0, out=view)
        return self._rows_BX

    def _pack_info(self, view_BA: Array, infos: Mapping[str, Any]) -> None:
        masks, there_B = infos.get(self._key), infos.get(f"_{self._key}")
        if masks is None:  # nothing is said: everything is allowed
            view_BA[:] = True
            return
        for b, mask in enumerate(masks):
            view_BA[b] = True if there_B is not None and not there_B[b] else np.asarray(mask).reshape(-1) != 0


def _at(obs: Any, path: Path) -> Array:
    for key in path:
        obs = obs[key]
    return np.asarray(obs)


def layout_of(
    space: gym.Space[Any], *, mask_key: str = "", info_mask: bool = False, mask_size: int = 0
) -> ObservationLayout:
    """Return how observations of a space lie in a row.

    Args:
        mask_key: name of the entry of a Dict that is the action mask, if there is such an entry.
        info_mask: a mask comes with ``info``; one in the observation goes before.
        mask_size: of masks; 0 where actions have none, so that an entry of that name is like any other.

    Raises:
        ConfigError: nothing can be learned from it, or the mask has another size.
    """
    check_observations(space)
    mask_space = None
    if mask_key and mask_size and isinstance(space, gym.spaces.Dict):
        mask_space = space.spaces.get(mask_key)
    path: Path = (mask_key,)
    inputs = sorted(
        (entry for entry in _entries(space, ()) if mask_space is None or entry.path[:1] != path), key=_order
    )
    if not inputs:
        raise ConfigError(f"observations are a {space}, in which there is nothing to see but the action mask")
    if mask_space is not None and (mask_space.shape is None or math.prod(mask_space.shape) != mask_size):
        raise ConfigError(
            f"the action mask {mask_key!r} is a {mask_space}, and the actions here want {mask_size} truth "
            "values; if it isn't a mask, set task.env.action_mask to another name, or to nothing"
        )
    has_mask = mask_space is not None or (info_mask and mask_size > 0)
    offset, placed = 0, []
    for entry in inputs:
        placed.append(replace(entry, offset=offset))
        offset += entry.nbytes
    mask = ObservationEntry(path, "mask", (mask_size,), "bool", offset=offset) if has_mask else None
    return ObservationLayout(tuple(placed), mask, has_mask and mask_space is None)


def _order(entry: ObservationEntry) -> int:
    """Return where in a row an entry's kind comes."""
    if entry.dtype == "float32":
        return 0 if entry.kind == "vector" else 2
    return 1 if entry.dtype == "int32" else 3


def check_observations(space: gym.Space[Any], path: Path = ()) -> None:
    """Check that something can be learned from observations of a space, whatever is inside it.

    Raises:
        ConfigError: nothing can, with the reason and what to do.
    """
    named = f"the entry {'.'.join(map(str, path))!r} of observations is" if path else "observations are"
    match space:
        case gym.spaces.Dict() | gym.spaces.Tuple():
            if not len(space.spaces):
                raise ConfigError(f"{named} an empty {space}: there is nothing to learn from")
            for key, inner in _members(space):
                check_observations(inner, (*path, key))
            return
        case gym.spaces.Box() if space.dtype.kind in "biuf":
            if math.prod(space.shape):
                return
            advice = "it has no numbers; leave it out in a wrapper"
        case gym.spaces.Box():
            advice = "numbers are real ones, of an integer or float type; wrap the environment"
        case gym.spaces.Discrete() if path and space.n > MOST_CHOICES:
            advice = f"each choice is an input of the network, {MOST_CHOICES} at most; wrap the environment"
        case gym.spaces.Discrete() | gym.spaces.MultiDiscrete() | gym.spaces.MultiBinary():
            return
        case gym.spaces.Text():
            advice = "turn words into numbers in a wrapper, or leave them out"
        case gym.spaces.Graph() | gym.spaces.Sequence():
            advice = "its size changes from step to step; give it a fixed one (a padded Box) in a wrapper"
        case _:
            advice = "bring it to Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple in a wrapper"
    raise ConfigError(f"{named} a {space}, which no network here takes: {advice}")


def _members(space: gym.spaces.Dict | gym.spaces.Tuple[Any]) -> Iterator[tuple[str | int, gym.Space[Any]]]:
    yield from enumerate(space.spaces) if isinstance(space, gym.spaces.Tuple) else space.spaces.items()


def _entries(space: gym.Space[Any], path: Path) -> Iterator[ObservationEntry]:
    """Yield what a space is made of, however deep, without offsets."""
    match space:
        case gym.spaces.Dict() | gym.spaces.Tuple():
            for key, inner in _members(space):
                yield from _entries(inner, (*path, key))
        case gym.spaces.Discrete():
            one, first = int(space.n), int(space.start)
            yield ObservationEntry(path, "choices", (1,), "int32", sizes=(one,), start=(first,))
        case gym.spaces.MultiDiscrete():
            sizes = tuple(int(size) for size in space.nvec.reshape(-1))
            start = tuple(int(number) for number in space.start.reshape(-1))
            yield ObservationEntry(path, "choices", (len(sizes),), "int32", sizes=sizes, start=start)
        case gym.spaces.MultiBinary():
            yield ObservationEntry(path, "vector", tuple(space.shape), "bool")
        case gym.spaces.Box():
            shape = tuple(space.shape)
            if len(shape) == 2 and space.dtype == np.uint8 and min(shape) >= SMALLEST_PICTURE:
                shape = (*shape, 1)
            dtype, most = pixels_of(space)
            if is_picture(shape):
                yield ObservationEntry(path, "image", shape, dtype, most)
            else:
                most = most if dtype == "uint8" else 1.0
                yield ObservationEntry(path, "vector", shape or (1,), dtype, most)


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is taken for an image: HWC or CHW, with sides of `SMALLEST_SIDE`."""
    if len(shape) != 3:
        return False
    sides = shape[:2] if channels_last(shape) else shape[1:]
    return min(sides) >= SMALLEST_SIDE


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels are its last dimension; else they are its first.

    Of two equal dimensions and another, the other; else the last if none is smaller.
    """
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return first == middle
    return last <= min(first, middle)


def pixels_of(space: gym.spaces.Box) -> tuple[str, float]:
    """Return the type of an image's pixels, and their greatest value: 1 where they are to stay as they are.

    Pixels that aren't bytes or truth values become float32; bounded ones are scaled by their bounds.
    """
    if space.dtype == np.bool_:
        return "bool", 1.0
    most = float(np.abs(np.stack((space.low, space.high)).astype(np.float64)).max())
    if not math.isfinite(most) or most > 1e30:  # open, or as good as that
        most = 1.0
    return "uint8" if space.dtype == np.uint8 else "float32", most or 1.0
