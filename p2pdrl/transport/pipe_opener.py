"""Asks a peer for a pipe: like a call, but what follows its answer is the pipe. `http_client` owns this."""

from __future__ import annotations

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES
from p2pdrl.transport.credentials import Credentials
from p2pdrl.transport.headers import AnswerHead, RequestHead
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe import MAX_PIPE_META_BYTES, Pipe, PipeTicket
from p2pdrl.transport.pipe_frames import PIPE_PREFIX, UPGRADE
from p2pdrl.transport.protocol import Address, check_route
from p2pdrl.transport.stream_socket import StreamSocket
from p2pdrl.transport.upgrading import Upgrader

__all__ = ["PipeOpener"]


class PipeOpener:
    """Opens pipes.

    Args:
        credentials: sign requests, check answers.
        limits: all bounds.
    """

    def __init__(self, credentials: Credentials, limits: TransportLimits) -> None:
        self._credentials = credentials
        self._limits = limits
        self._upgrader = Upgrader(credentials, limits)

    def close(self) -> None:
        """End what is being opened."""
        self._upgrader.close()

    async def open(self, address: Address, peer_id: str, route: str, meta: bytes) -> Pipe:
        """Return a new pipe to the node at an IP address.

        Raises:
            NotConnectedError: nothing listens there.
            ConnectionError: the connection broke.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
            PeerTimeoutError: the answer stopped coming.
            ValueError: the name is malformed, or the metadata are too long.
        """
        if len(meta) > MAX_PIPE_META_BYTES:
            raise ValueError(f"{len(meta)} bytes of metadata are too many for the request")
        credentials = self._credentials
        head = credentials.head(PIPE_PREFIX + check_route(route), peer_id, meta_nbytes=len(meta))
        body = credentials.sealed(head, meta)
        async with self._upgrader.connection(address) as sock:
            answer = await self._upgrader.ask(sock, address, head, UPGRADE, body=body)
            said = await self._said(sock, head, answer)
        keys = credentials.keys.pipe(head.nonce, answer.nonce) if credentials.keys is not None else None
        connection, leftover = sock.detach()
        return Pipe(connection, answer.sender, said, PipeTicket(keys, leftover))

    async def _said(self, sock: StreamSocket, request: RequestHead, answer: AnswerHead) -> bytes:
        """Read and check the metadata of the answer."""
        if answer.vector_nbytes or answer.meta_nbytes > MAX_PIPE_META_BYTES:
            raise WireError(f"the answer announces {answer.meta_nbytes} bytes of metadata")
        stall_s = self._limits.stall_deadline_s
        meta = await sock.read(answer.meta_nbytes, stall_s)
        keys = self._credentials.keys
        if keys is not None:
            mac = await sock.read(MAC_BYTES, stall_s)
            if not keys.answer_pieces(request.nonce, answer.nonce).good(0, meta, mac):
                raise WireError("the answer isn't authentic")
        return meta
