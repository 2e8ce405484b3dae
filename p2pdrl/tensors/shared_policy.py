"""The policy that actor processes act with, in shared memory: one learner writes it, many actors read it.

A sequence lock over two copies (`shared_memory`): readers never block the writer, and a learner that is
killed while it writes leaves the copy before whole. Beside the parameters lie the moments that observations
are normalised with, as merged over the swarm, so that actors see what the learner will.

From node to node a policy goes as a `PolicyImage`: whole, or as differences from one that the other has, in
a quarter of the bytes.

Shape suffixes: D parameters, X the observation's own dimensions.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.compression import Int8Codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.shared_memory import SeqLock, SharedRegion

__all__ = ["MOST_DIFFERENCES", "ActingPolicy", "PolicyCopies", "PolicyImage", "SharedPolicy", "features_of"]

Float64Array = npt.NDArray[np.float64]

MOST_DIFFERENCES = 3
"""From one policy to the next, in one answer: four take as many bytes as a whole policy."""

LEAST_NBYTES = 1 << 15
"""A smaller policy always goes whole: that takes less time than to say what changed."""

_HEADER_BYTES = 64
_FACTS_BYTES = 64


class ActingPolicy(NamedTuple):
    """What one acts with, beside the parameters.

    Args:
        exploration: ε; how far to stray from the best actions.
        mean_X: of observations.
        scale_X: 1 / their deviation.
    """

    version: int
    exploration: float
    mean_X: Float64Array
    scale_X: Float64Array


@dataclass(frozen=True)
class _Copy:
    version: npt.NDArray[np.uint64]
    exploration: Float64Array
    mean: Float64Array
    scale: Float64Array
    vector: Float32Array


class SharedPolicy:
    """Views of both copies.

    Args:
        region: shared memory, of at least `nbytes_of` bytes, zero at first; readers may map it read-only.
        obs_shape: X; empty dimensions where observations aren't normalised.
    """

    def __init__(self, region: SharedRegion, size: int, obs_shape: tuple[int, ...]) -> None:
        needed = self.nbytes_of(size, obs_shape)
        if region.nbytes < needed:
            raise LayoutMismatchError(f"a policy takes {needed} bytes, the region has {region.nbytes}")
        self._lock = SeqLock(np.frombuffer(region.buf, np.uint64, 2))
        features = math.prod(obs_shape)
        copies = []
        for number in range(2):
            at = _HEADER_BYTES + number * (needed - _HEADER_BYTES) // 2
            moments = np.frombuffer(region.buf, np.float64, 2 * features, at + _FACTS_BYTES)
            copies.append(
                _Copy(
                    np.frombuffer(region.buf, np.uint64, 1, at),
                    np.frombuffer(region.buf, np.float64, 1, at + 8),
                    moments[:features].reshape(obs_shape),
                    moments[features:].reshape(obs_shape),
                    np.frombuffer(region.buf, np.float32, size, at + _FACTS_BYTES + 16 * features),
                )
            )
        self._copies = copies

    @staticmethod
    def nbytes_of(size: int, obs_shape: tuple[int, ...]) -> int:
        """Bytes of shared memory that it takes."""
        one = _FACTS_BYTES + 16 * math.prod(obs_shape) + 4 * size
        return _HEADER_BYTES + 2 * (-(-one // 64) * 64)

    def write(self, vector_D: Float32Array, policy: ActingPolicy) -> None:
        """Let readers have this policy from now on."""
        with self._lock.write() as number:
            copy = self._copies[number]
            copy.version[0] = policy.version
            copy.exploration[0] = policy.exploration
            np.copyto(copy.mean, policy.mean_X)
            np.copyto(copy.scale, policy.scale_X)
            np.copyto(copy.vector, vector_D)

    @property
    def writes(self) -> int:
        """How many policies have been written; 0 while there is none."""
        return self._lock.writes

    def read(self, out_D: Float32Array) -> ActingPolicy | None:
        """Copy the parameters to ``out_D`` and return the rest; None while there is none."""

        def take(number: int) -> ActingPolicy:
            copy = self._copies[number]
            np.copyto(out_D, copy.vector)
            exploration = float(copy.exploration[0])
            return ActingPolicy(int(copy.version[0]), exploration, copy.mean.copy(), copy.scale.copy())

        return self._lock.read(take)


class PolicyCopies:
    """The same memory to who carries policies from node to node without knowing what they are made of.

    Args:
        region: of a `SharedPolicy`.
        features: numbers that observations have, where they are normalised; else 0.

    Attributes:
        size: D.
        features: as above.
        nbytes: of one policy with all that one acts with.

    Raises:
        LayoutMismatchError: the region has another size.
    """

    def __init__(self, region: SharedRegion, size: int, features: int) -> None:
        needed = SharedPolicy.nbytes_of(size, (features,))
        if region.nbytes != needed:
            raise LayoutMismatchError(f"two copies of a policy take {needed} bytes, not {region.nbytes}")
        self.nbytes = (needed - _HEADER_BYTES) // 2
        self.size, self.features = size, features
        self._lock = SeqLock(np.frombuffer(region.buf, np.uint64, 2))
        self._copies = [
            np.frombuffer(region.buf, np.uint8, self.nbytes, _HEADER_BYTES + number * self.nbytes)
            for number in range(2)
        ]

    @staticmethod
    def nbytes_of(size: int, features: int) -> int:
        """Bytes of shared memory that both copies take."""
        return SharedPolicy.nbytes_of(size, (features,))

    @property
    def version(self) -> int | None:
        """Policy version of the newest; None while there is none."""
        return self._lock.read(lambda number: _version_of(self._copies[number]))

    def read(self) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the newest one's bytes; None while there is none."""
        return self._lock.read(lambda number: self._copies[number].copy())

    def write(self, content: npt.NDArray[np.uint8]) -> int:
        """Let readers have what `read` returned elsewhere; return its policy version.

        Raises:
            LayoutMismatchError: it has another length.
            PoisonedVectorError: a number in it isn't finite.
        """
        if content.shape != (self.nbytes,):
            raise LayoutMismatchError(f"a policy has {self.nbytes} bytes here, not {content.nbytes}")
        facts: Float64Array = np.frombuffer(content, np.float64, 1, 8)
        moments: Float64Array = np.frombuffer(content, np.float64, 2 * self.features, _FACTS_BYTES)
        vector = _vector_of(content, self.size, self.features)
        if not (np.isfinite(facts).all() and np.isfinite(moments).all() and np.isfinite(vector).all()):
            raise PoisonedVectorError("a policy holds what isn't finite")
        with self._lock.write() as number:
            np.copyto(self._copies[number], content)
        return _version_of(content)


@dataclass(frozen=True)
class PolicyImage:
    """A policy as it is given out, beside the last differences that led to it.

    A difference is written as int8 (`compression.Int8Codec`), and is from the image before, not from the
    policy before, so what rounding lost is part of the next (error feedback: Seide 2014, "1-bit SGD",
    Interspeech):

        image_k = image_{k-1} + int8(policy_k - image_{k-1})

    An element of an image is off by 1/254 at most of the largest change beside it since the image before. Who
    adds the same differences to the same image has the same bits.

    Attributes:
        version: of the policy.
        whole: its bytes, as of `PolicyCopies.read`.
        checksum: CRC-32 of these.
        size, features: as there.
        differences: at most `MOST_DIFFERENCES`, each with the version that it begins from, oldest first.
    """

    version: int
    whole: npt.NDArray[np.uint8]
    checksum: int
    size: int
    features: int
    differences: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def first(cls, content: npt.NDArray[np.uint8], size: int, features: int) -> PolicyImage:
        """Return a policy as it is, which follows none."""
        return cls(_version_of(content), content, zlib.crc32(content.data), size, features)

    @property
    def vector_D(self) -> Float32Array:  # noqa: N802 - its shape
        """Its parameters."""
        return _vector_of(self.whole, self.size, self.features)

    def then(self, content: npt.NDArray[np.uint8]) -> PolicyImage:
        """Return the image of the next policy: as it is, where it isn't newer, isn't finite or is small."""
        size, features = self.size, self.features
        if _version_of(content) <= self.version or content.nbytes < LEAST_NBYTES:
            return self.first(content, size, features)
        codec = Int8Codec(size, feedback=False)
        message, whole = bytearray(codec.max_nbytes), content.copy()
        vector_D = _vector_of(whole, size, features)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                codec.encode(vector_D - _vector_of(self.whole, size, features), memoryview(message))
        except PoisonedVectorError:
            return self.first(content, size, features)
        np.copyto(vector_D, _vector_of(self.whole, size, features))
        _add(vector_D, codec, memoryview(message))
        last = (*self.differences, (self.version, bytes(message)))[-MOST_DIFFERENCES:]
        return PolicyImage(_version_of(content), whole, zlib.crc32(whole.data), size, features, last)

    def since(self, held: int) -> tuple[tuple[int, ...], bytes] | None:
        """Return what makes this one of the image of version ``held``, for `after`.

        Returns:
            The versions that its differences begin from, and the bytes; None where it must go whole.
        """
        begins = tuple(begin for begin, _ in self.differences)
        if held not in begins:
            return None
        first = begins.index(held)
        head = self.whole[: _vector_at(self.features)].tobytes()
        messages = [message for _, message in self.differences[first:]]
        content = b"".join((head, *messages))
        return (begins[first:], content) if len(content) < self.whole.nbytes else None

    @classmethod
    def after(
        cls,
        held: npt.NDArray[np.uint8],
        begins: Sequence[int],
        content: npt.NDArray[np.uint8],
        *,
        size: int,
        features: int,
    ) -> PolicyImage:
        """Return the image that somebody's `since` makes of the one of ``held``.

        Args:
            held: bytes of an image whose version is one of ``begins``.
            begins, content: as `since` returned them there.

        Raises:
            WireError: they are malformed, or not for this one.
        """
        version, codec, at = _version_of(held), Int8Codec(size, feedback=False), _vector_at(features)
        if version not in begins or len(begins) > MOST_DIFFERENCES:
            raise WireError(f"differences of policies from versions {list(begins)} on, not {version}")
        if content.nbytes != (needed := at + len(begins) * codec.max_nbytes):
            raise WireError(f"{len(begins)} differences take {needed} bytes, not {content.nbytes}")
        whole = held.copy()
        np.copyto(whole[:at], content[:at])
        vector_D = _vector_of(whole, size, features)
        for number in range(list(begins).index(version), len(begins)):
            message = content[at + number * codec.max_nbytes :][: codec.max_nbytes]
            _add(vector_D, codec, message.data)
        return cls.first(whole, size, features)


def _add(vector_D: Float32Array, codec: Int8Codec, message: memoryview) -> None:
    """Add a difference, always by the same operations."""
    difference_D = np.empty_like(vector_D)
    codec.decode(message, difference_D)
    with np.errstate(over="ignore", invalid="ignore"):  # found out by who keeps it
        np.add(vector_D, difference_D, out=vector_D)


def _vector_at(features: int) -> int:
    """Where the parameters begin in a policy's bytes."""
    return _FACTS_BYTES + 16 * features


def _vector_of(content: npt.NDArray[np.uint8], size: int, features: int) -> Float32Array:
    vector_D: Float32Array = np.frombuffer(content, np.float32, size, _vector_at(features))
    return vector_D


def features_of(board: BoardSpec) -> int:
    """Return how many numbers of observations are normalised; 0 where none are."""
    shapes = {item.name: item.shape for item in board.sidecar.items}
    return math.prod(shapes.get("observations.mean", (0,)))


def _version_of(content: npt.NDArray[np.uint8]) -> int:
    return int(np.frombuffer(content, np.uint64, 1)[0])
