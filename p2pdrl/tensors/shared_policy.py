"""The policy that actor processes act with, in shared memory: one learner writes it, many actors read it.

A sequence lock over two copies (`shared_memory`): readers never block the writer, and a learner that is
killed while it writes leaves the copy before whole. Beside the parameters lie the moments that observations
are normalised with, as merged over the swarm, so that actors see what the learner will.

Shape suffixes: D parameters, X the observation's own dimensions.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.shared_memory import SeqLock, SharedRegion

__all__ = ["ActingPolicy", "PolicyCopies", "SharedPolicy", "features_of"]

Float64Array = npt.NDArray[np.float64]

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
        nbytes: of one policy with all that one acts with.

    Raises:
        LayoutMismatchError: the region has another size.
    """

    def __init__(self, region: SharedRegion, size: int, features: int) -> None:
        needed = SharedPolicy.nbytes_of(size, (features,))
        if region.nbytes != needed:
            raise LayoutMismatchError(f"two copies of a policy take {needed} bytes, not {region.nbytes}")
        self.nbytes = (needed - _HEADER_BYTES) // 2
        self._size, self._features = size, features
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
        numbers = 2 * self._features
        facts: Float64Array = np.frombuffer(content, np.float64, 1, 8)
        moments: Float64Array = np.frombuffer(content, np.float64, numbers, _FACTS_BYTES)
        vector: Float32Array = np.frombuffer(content, np.float32, self._size, _FACTS_BYTES + 8 * numbers)
        if not (np.isfinite(facts).all() and np.isfinite(moments).all() and np.isfinite(vector).all()):
            raise PoisonedVectorError("a policy holds what isn't finite")
        with self._lock.write() as number:
            np.copyto(self._copies[number], content)
        return _version_of(content)


def features_of(board: BoardSpec) -> int:
    """Return how many numbers of observations are normalised; 0 where none are."""
    shapes = {item.name: item.shape for item in board.sidecar.items}
    return math.prod(shapes.get("observations.mean", (0,)))


def _version_of(content: npt.NDArray[np.uint8]) -> int:
    return int(np.frombuffer(content, np.uint64, 1)[0])
