"""One call on its way out, and one that came in, wherever its vector comes from."""

from __future__ import annotations

from typing import Protocol

from p2pdrl.errors import PeerRefusedError, WireError
from p2pdrl.transport.pieces import views_of
from p2pdrl.transport.protocol import VectorBuffer, check_route
from p2pdrl.transport.routes import MAX_REASON_CHARS

__all__ = ["BodyIncoming", "OutgoingCall", "VectorSource", "refused"]


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


class OutgoingCall:
    """What one call sends; kept together so that it can be tried at several addresses.

    Args:
        target_id: who must answer; None when unknown.
        route: name of the route.
        meta: metadata.
        vector: sent after it.
        into: gives the buffer for the answer's vector.
    """

    def __init__(
        self,
        target_id: str | None,
        route: str,
        meta: bytes,
        vector: memoryview | None,
        into: VectorBuffer | None,
    ) -> None:
        self.target_id = target_id
        self.route = check_route(route)
        self.meta = meta
        self.views = views_of(vector)
        self.vector_nbytes = sum(view.nbytes for view in self.views)
        self._into = into

    @property
    def path(self) -> str:
        """Where it is posted."""
        return f"/p2p/{self.route}"

    def buffer(self, meta: bytes, nbytes: int) -> memoryview:
        """Return where the answer's vector goes.

        Raises:
            WireError: it isn't wanted.
            ValueError: the caller gave a buffer of another length.
        """
        out = self._into(meta, nbytes) if self._into is not None else None
        if out is None:
            raise WireError(f"the answer carries a vector of {nbytes} bytes that isn't wanted")
        if out.nbytes != nbytes:
            raise ValueError(f"the buffer holds {out.nbytes} bytes, the vector has {nbytes}")
        return out.cast("B")


def refused(status: int, text: bytes) -> PeerRefusedError:
    """Return the error for a refusal; its text is cut and made printable."""
    words = text.decode("utf-8", "replace")
    reason = "".join(c if c.isprintable() else " " for c in words)[:MAX_REASON_CHARS]
    return PeerRefusedError(status, reason)
