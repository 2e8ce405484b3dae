"""What torch.distributed means by its errors: most are RuntimeErrors like any other."""

from __future__ import annotations

import re

from torch.distributed import DistError

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError

__all__ = ["peer_error"]

_NETWORK = re.compile(r"/gloo/|timeout caused pair closure|NCCL", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_ADVICE = re.compile(r"^\[[^\]]*:\d+\] ?|\. This is typically caused by.*")


def peer_error(error: BaseException) -> TransportError | None:
    """Return what torch.distributed means by an error, if it is about other processes or the network."""
    text = str(error)
    if not isinstance(error, DistError) and not _NETWORK.search(text):
        return None
    why = _ADVICE.sub("", " ".join(text.split()))[:200]
    late = _LATE.search(text) and "pair closure" not in text
    return PeerTimeoutError(why) if late else PeerUnreachableError(why)
