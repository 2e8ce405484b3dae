"""A request as its handler sees it, read from wherever its vector comes."""

from __future__ import annotations

from typing import Protocol

__all__ = ["BodyIncoming", "VectorSource"]


class VectorSource(Protocol):
    """What the vector is read from."""

    async def vector_into(self, out: memoryview) -> None:
        """Fill ``out``, checked; raises `WireError` or `PeerTimeoutError`."""
        ...


class BodyIncoming:
    """The attributes are those of `Incoming`.

    Args:
        sender: node id of the caller.
        route: name of the route.
        meta: metadata, authentic.
        vector_nbytes: length of the vector.
        remote_host: IP of the caller.
        body: gives the vector.
    """

    def __init__(
        self,
        *,
        sender: str,
        route: str,
        meta: bytes,
        vector_nbytes: int,
        remote_host: str,
        body: VectorSource,
    ) -> None:
        self.sender = sender
        self.route = route
        self.meta = meta
        self.vector_nbytes = vector_nbytes
        self.remote_host = remote_host
        self._body: VectorSource | None = body

    async def read_vector_into(self, out: memoryview) -> None:
        """Read the vector; see `Incoming`."""
        view = out.cast("B")
        if self._body is None:
            raise ValueError("the vector was read already")
        if view.nbytes != self.vector_nbytes:
            raise ValueError(f"the buffer holds {view.nbytes} bytes, the vector has {self.vector_nbytes}")
        body, self._body = self._body, None
        await body.vector_into(view)
