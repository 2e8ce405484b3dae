"""Who we are when we call: heads of requests are made and signed here, and those of answers are checked."""

from __future__ import annotations

from p2pdrl.clock import Clock
from p2pdrl.errors import WireError
from p2pdrl.transport.auth import SwarmKeys, format_time, new_nonce
from p2pdrl.transport.headers import NO_TARGET, AnswerHead, RequestHead

__all__ = ["Credentials"]


class Credentials:
    """What this node proves itself with, and holds others to.

    Args:
        node_id: our id, told to peers.
        swarm_id: told to peers.
        keys: the swarm's keys; None calls without MACs.
        clock: wall time for the stamps.
    """

    def __init__(self, node_id: str, swarm_id: str, keys: SwarmKeys | None, clock: Clock) -> None:
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._clock = clock
        self.keys = keys

    def head(
        self,
        path: str,
        target_id: str | None,
        *,
        method: str = "POST",
        meta_nbytes: int = 0,
        vector_nbytes: int = 0,
    ) -> RequestHead:
        """Return the head of a new request.

        Args:
            path: as in the request line.
            target_id: who must answer; None when unknown.
            method: likewise.
            meta_nbytes: length of the metadata.
            vector_nbytes: length of the vector.
        """
        head = RequestHead(
            path=path,
            method=method,
            sender=self._node_id,
            target=target_id if target_id is not None else NO_TARGET,
            swarm=self._swarm_id,
            meta_nbytes=meta_nbytes,
            vector_nbytes=vector_nbytes,
            time=format_time(self._clock.wall()),
            nonce=new_nonce(),
        )
        return head.sign(self.keys) if self.keys is not None else head

    def sealed(self, head: RequestHead, meta: bytes) -> bytes:
        """Return the body of a request that has no vector: its metadata with their MAC."""
        return meta + self.keys.request_pieces(head.nonce).of(0, meta) if self.keys is not None else meta

    def check(self, answer: AnswerHead, request: RequestHead) -> None:
        """Make sure that an answer is to our request, and of the node that it was for.

        Raises:
            WireError: it isn't.
        """
        if self.keys is not None and not (answer.mac and answer.authentic(self.keys, request.nonce)):
            raise WireError("the answer isn't signed with this swarm's key")
        if request.target not in (NO_TARGET, answer.sender):
            raise WireError(f"node {answer.sender} answered in place of {request.target}")
