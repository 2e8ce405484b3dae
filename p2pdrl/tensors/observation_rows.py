"""Observations that a caller brings, checked and as rows in memory: what a policy is asked with.

`InferenceSpec` says what is wanted. The API reads JSON with it (`api.act`), a policy in a caller's own
process arrays (`library.policy`). Nothing that is given gets into a row unchecked: wrong lengths and types,
numbers out of bounds, NaN and infinity are refused, and the message says what is wanted.

Shape suffixes: N observations, X one observation's own dimensions, A one mask's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import UsageError
from p2pdrl.tensors.inference_slots import InferenceEntry, InferenceSpec

__all__ = ["rows_of_arrays", "rows_of_lists", "wanted"]

Array = npt.NDArray[Any]


def wanted(spec: InferenceSpec) -> str:
    """Return what one observation is, for people."""
    if spec.several:
        entries = ", ".join(f"{entry.name}: {entry}" for entry in spec.entries)
        return f"a {spec.several} of {entries}"
    if spec.entries:
        return str(spec.entries[0])
    return f"{spec.obs_dtype} of shape {list(spec.obs_shape)}"


def rows_of_lists(spec: InferenceSpec, given: Any, mask: Any, most: int) -> Array:
    """Return rows_NX of JSON types: a list of observations, or a single one.

    Args:
        given: of a Dict each observation is an object, of a Tuple a list.
        mask: of each observation, where masks come beside them; None allows everything.
        most: observations.

    Raises:
        UsageError: they are anything else.
    """
    if not spec.entries:
        _require_no_mask(mask)
        return _plain_rows(spec, given, most)
    if not spec.several:
        one = spec.entries[0]
        values = _batch(given, one.dtype, one.shape, name="observations", most=most, words=str(one))
        return _rows(spec, [values], len(values), mask)
    if spec.several == "dict" and isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise UsageError(f"observations are a list of 1 to {most}, each {wanted(spec)}")
    columns = [[_at(one, entry, spec) for one in given] for entry in spec.entries]
    if spec.mask is not None and not spec.info_mask:
        _require_no_mask(mask, spec.mask)
        mask = [_at(one, spec.mask, spec) for one in given]
    return _rows(spec, columns, len(given), mask)


def rows_of_arrays(spec: InferenceSpec, given: Any, mask: Any = None) -> tuple[Array, bool]:
    """Return rows_NX of arrays, and whether they were one observation without a batch dimension.

    Args:
        given: an array; of a Dict a dictionary of them, of a Tuple a tuple. All have a leading batch
            dimension, or none has. Lists of dictionaries or of tuples are a batch, too.
        mask: of actions, where masks come beside observations, with the same batch dimension; None allows
            everything.

    Raises:
        UsageError: they are anything else.
    """
    if not spec.entries:
        _require_no_mask(mask)
        return _plain_rows(spec, given, None), _as_array(given).shape == spec.obs_shape
    if spec.several and isinstance(given, list) and given and isinstance(given[0], Mapping | tuple):
        return rows_of_lists(spec, given, _plain(mask), len(given)), False
    found = [_at(given, entry, spec) for entry in spec.entries] if spec.several else [given]
    columns = [_as_array(column) for column in found]
    single = _is_single(spec, columns)
    if single:
        columns = [column[None] for column in columns]
    if spec.mask is not None and not spec.info_mask:
        _require_no_mask(mask, spec.mask)
        mask = _at(given, spec.mask, spec)
    if mask is not None and single:
        mask = _as_array(mask)[None]
    counts = {len(column) for column in columns}
    if len(counts) > 1 or not counts.pop():
        raise UsageError(f"entries are batches of different lengths, or empty; each is {wanted(spec)}")
    return _rows(spec, columns, len(columns[0]), mask), single


def _plain(mask: Any) -> Any:
    return mask if mask is None else np.asarray(mask).tolist()


def _is_single(spec: InferenceSpec, columns: Sequence[Array]) -> bool:
    """Whether arrays are one observation's; a choice may come as a number or as a list of one.

    Raises:
        UsageError: they are neither that nor a batch.
    """
    alone = together = True
    for entry, column in zip(spec.entries, columns, strict=True):
        shapes = {entry.shape, entry.shape[:-1]} if entry.shape[-1:] == (1,) else {entry.shape}
        alone = alone and column.shape in shapes
        together = together and column.ndim > 0 and column.shape[1:] in shapes
        if not (alone or together):
            raise UsageError(
                f"{entry.name or 'observations'} must be {entry}, with a batch dimension before all entries "
                f"or before none; it is of shape {list(column.shape)}"
            )
    # arrays of one choice each may be either: environments give choices as numbers without a dimension
    return alone and not (together and all(entry.sizes for entry in spec.entries))


def _require_no_mask(mask: Any, entry: InferenceEntry | None = None) -> None:
    if mask is None:
        return
    if entry is None:
        raise UsageError("this environment has no action masks; leave mask out")
    raise UsageError(f"the mask is the entry {entry.name!r} of observations; leave mask out")


def _rows(spec: InferenceSpec, columns: Sequence[Any], count: int, mask: Any) -> npt.NDArray[np.uint8]:
    """Return rows of all entries' values, and of masks."""
    rows_NX = np.zeros((count, *spec.obs_shape), np.uint8)
    for entry, column in zip(spec.entries, columns, strict=True):
        _put(rows_NX, entry, _entry_values(column, entry, count))
    if spec.mask is None:
        _require_no_mask(mask)
        return rows_NX
    allowed_NA = (
        np.ones((count, *spec.mask.shape), np.bool_) if mask is None else _mask(mask, spec.mask, count)
    )
    _put(rows_NX, spec.mask, allowed_NA)
    return rows_NX


def _at(observation: Any, entry: InferenceEntry, spec: InferenceSpec) -> Any:
    for key in entry.path:
        is_there = (
            isinstance(observation, Mapping) and key in observation
            if isinstance(key, str)
            else isinstance(observation, list | tuple) and key < len(observation)
        )
        if not is_there:
            raise UsageError(f"an observation has no {entry.name!r}; each is {wanted(spec)}")
        observation = observation[key]
    return observation


def _entry_values(column: Any, entry: InferenceEntry, count: int) -> Array:
    """Return one entry of all observations, checked, as it lies in rows."""
    name = entry.name or "observations"
    found = _numbers(column, entry.dtype, name, str(entry))
    # a choice is a number by itself, not a list of one, and a grey image may come without its channel
    if _without_ones(found.shape[1:]) != _without_ones(entry.shape):
        raise UsageError(f"{name} must be {entry}; it is of shape {list(found.shape[1:])}")
    values = found.reshape(count, *entry.shape)
    if not entry.sizes:
        return values
    chosen = values.astype(np.int64) - np.array(entry.start, np.int64).reshape(entry.shape)
    if not ((chosen >= 0) & (chosen < np.array(entry.sizes).reshape(entry.shape))).all():
        raise UsageError(f"{name} must be {entry}")
    return chosen.astype(entry.dtype)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _mask(given: Any, entry: InferenceEntry, count: int) -> npt.NDArray[np.bool_]:
    words = f"{math.prod(entry.shape)} truth values for each observation"
    allowed = _batch(given, "bool", entry.shape, name="mask", most=count, words=words)
    if len(allowed) != count:
        raise UsageError(f"there are {len(allowed)} masks for {count} observations")
    if not allowed.reshape(count, -1).any(axis=1).all():
        raise UsageError("a mask must allow one action at least")
    return allowed


def _put(rows_NX: npt.NDArray[np.uint8], entry: InferenceEntry, values: Array) -> None:
    """Write an entry of all observations into their rows."""
    flat = np.ascontiguousarray(values, entry.dtype).reshape(len(rows_NX), -1).view(np.uint8)
    rows_NX[:, entry.offset : entry.offset + flat.shape[1]] = flat


def _plain_rows(spec: InferenceSpec, given: Any, most: int | None) -> Array:
    """Return observations that are a single array each."""
    shape, words = spec.obs_shape, wanted(spec)
    return _batch(given, spec.obs_dtype, shape, name="observations", most=most, words=words)


def _batch(
    given: Any, dtype: str, shape: tuple[int, ...], *, name: str, most: int | None, words: str
) -> Array:
    """Return numbers, nested lists or an array, as N x ``shape``, N from 1 to ``most``.

    A single element, without the list around it, is taken for N = 1.

    Raises:
        UsageError: they are anything else.
    """
    found = _numbers(given, dtype, name, words)
    if found.shape == shape:
        found = found[None]
    if found.shape[1:] != shape or len(found) < 1 or (most is not None and len(found) > most):
        how = "with or without a batch dimension" if most is None else f"one or a list of 1 to {most}"
        raise UsageError(f"{name} must be {words}, {how}; they are of shape {list(found.shape)}")
    return found


def _as_array(given: Any) -> Array:
    """Return what is given as an array; of no numbers where it can't be one."""
    try:
        found: Array = np.asarray(given)
    except (ValueError, OverflowError, RecursionError):
        found = np.asarray(None)  # ragged
    return found


def _numbers(given: Any, dtype: str, name: str, words: str) -> Array:
    """Return nested lists of numbers as an array of this type.

    Raises:
        UsageError: they are anything else, or out of bounds.
    """
    found = _as_array(given)
    if found.dtype.kind not in "biuf" or not found.size:
        raise UsageError(f"{name} must be numbers, in lists of one length each: {words}")
    kind = np.dtype(dtype).kind
    if kind == "f":
        with np.errstate(over="ignore"):
            cast = found.astype(dtype)
        if not np.isfinite(cast).all():
            raise UsageError(f"{name} must be finite numbers, none beyond what {dtype} holds")
        return cast
    if found.dtype == np.dtype(dtype):
        return found
    low, high = (0, 1) if kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if found.dtype.kind != "b" and not ((found >= low) & (found <= high) & (found == np.floor(found))).all():
        raise UsageError(f"{name} must be whole numbers from {low} to {high}: {words}")
    return found.astype(dtype)
