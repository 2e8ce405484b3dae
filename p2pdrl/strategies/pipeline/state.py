"""Which parameters a node holds, in a few bytes, and whose are the newest."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.pipeline.messages import Offered
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array

__all__ = ["State", "newest", "read_state"]

DIGEST_BYTES = 16


class State(NamedTuple):
    """What is on a board, with all that was posted to it.

    Args:
        digest: of the parameters.
        policy_version: theirs.
    """

    digest: bytes
    policy_version: int


async def read_state(board: DaemonBoard, size: int) -> State:
    """Read a board.

    Args:
        board: holds the parameters.
        size: D, float32 parameters.

    Raises:
        TensorError: there is nothing on it.
    """

    def work() -> State:
        vector: Float32Array = np.empty(size, np.float32)
        version = board.now(vector).policy_version
        return State(blake2b(vector.data.cast("B"), digest_size=DIGEST_BYTES).digest(), version)

    return await heavy(4 * size, work)


def newest(head: str, offers: Mapping[str, Offered]) -> str:
    """Return whose state all are to begin with.

    The lineage with the most environment steps stays, then the lower id, as everywhere (see `judgement`);
    in it the highest policy version; of equals the head, then the lowest node id.

    Args:
        head: node id; among the offers.
        offers: of all ranks.
    """
    steps: dict[str, int] = {}
    for offer in offers.values():
        steps[offer.lineage] = max(steps.get(offer.lineage, 0), offer.lineage_steps)
    lineage = min(steps, key=lambda one: (-steps[one], one))
    candidates = [peer for peer, offer in offers.items() if offer.lineage == lineage]
    return min(candidates, key=lambda peer: (-offers[peer].policy_version, peer != head, peer))
