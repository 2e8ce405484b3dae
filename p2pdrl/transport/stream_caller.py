"""The caller's end of one stream: a call goes out, its answer comes in.

`stream_opener` makes these, `stream_client` keeps them.
"""

from __future__ import annotations

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES, SerialMac
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.filling import STAGE_BYTES, Filling
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.outgoing import Call, refused
from p2pdrl.transport.pieces import batches, body_nbytes
from p2pdrl.transport.protocol import Answer
from p2pdrl.transport.stream_frames import HEAD_BYTES, AnswerFrame, CallFrame
from p2pdrl.transport.stream_socket import StreamSocket

__all__ = ["CallerStream", "StaleError"]


class StaleError(ConnectionError):
    """The stream was dead before the peer can have got the whole head of the call."""


class CallerStream:
    """One open stream.

    Args:
        sock: after the handshake.
        peer_id: who answers.
        macs: of our calls and of the answers.
        limits: all bounds.
        counters: written to.
    """

    def __init__(
        self,
        sock: StreamSocket,
        peer_id: str,
        macs: tuple[SerialMac | None, SerialMac | None],
        limits: TransportLimits,
        counters: TrafficCounters,
    ) -> None:
        self._sock = sock
        self._peer_id = peer_id
        self._out, self._in = macs
        self._limits = limits
        self._counters = counters
        self.idle_since_s = 0.0
        self.usable = True

    def fresh(self, not_before_s: float) -> bool:
        """Whether it can be used again: up, silent, and not idle since before ``not_before_s``."""
        try:
            self._sock.check()
        except ConnectionError:
            return False
        return self.idle_since_s >= not_before_s and not self._sock.staged_nbytes

    def close(self) -> None:
        """Close the connection; a call on it ends with a ``ConnectionError``."""
        self._sock.close()

    async def call(self, call: Call) -> Answer:
        """Make one call; afterwards `usable` tells whether there can be another.

        Raises:
            StaleError: nothing was done.
            ConnectionError: the connection broke before an answer.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
            PeerTimeoutError: the answer stopped coming.
        """
        self.usable = False
        whole = await self._send(call)
        frame = AnswerFrame.decode(head := await self._sock.read(HEAD_BYTES))
        # The rest has to come steadily, and its end is no longer the end of the connection.
        try:
            answer = await self._answer(call, frame, head)
        except ConnectionError as error:
            raise WireError(f"the answer broke off: {error}") from error
        self.usable = whole and not frame.last
        if frame.status != 200:
            raise refused(frame.status, answer.meta)
        return answer

    async def _send(self, call: Call) -> bool:
        """Send a call; return whether all of it was taken before the peer spoke."""
        route = call.route.encode()
        first = CallFrame(len(route), len(call.meta), call.vector_nbytes).encode() + route + call.meta
        nbytes = body_nbytes(len(call.meta), call.vector_nbytes, self._out is not None)
        before = self._sock.sent_nbytes
        try:
            whole = await self._sock.send(
                batches(first, call.views, self._out),
                nbytes + HEAD_BYTES + len(route),
                until_answered=True,
            )
        except ConnectionError as error:
            if self._sock.sent_nbytes - before < len(first):
                raise StaleError(str(error)) from error
            raise
        self._counters.sent(call.target_id, nbytes)
        return whole

    async def _answer(self, call: Call, frame: AnswerFrame, head: bytes) -> Answer:
        most = self._limits.max_answer_meta_bytes if frame.status == 200 else self._limits.max_refusal_bytes
        if frame.meta_nbytes > most:
            raise WireError(f"the answer announces {frame.meta_nbytes} bytes of metadata")
        if frame.status != 200 and frame.vector_nbytes:
            raise WireError("a refusal carries a vector")
        stall_s = self._limits.stall_deadline_s
        nbytes = 0
        try:
            meta = await self._read(frame.meta_nbytes)
            nbytes += len(meta)
            if self._in is not None:
                mac = await self._read(MAC_BYTES)
                nbytes += MAC_BYTES
                if not self._in.good(head + meta, mac):
                    raise WireError("the answer isn't authentic")
            if frame.vector_nbytes:
                filling = Filling(call.buffer(meta, frame.vector_nbytes), self._in)
                try:
                    await self._sock.fill(filling, stall_s)
                finally:
                    nbytes += filling.taken_nbytes
        finally:
            self._counters.received(call.target_id or self._peer_id, nbytes)
        return Answer(meta, frame.vector_nbytes, self._peer_id)

    async def _read(self, nbytes: int) -> bytes:
        stall_s = self._limits.stall_deadline_s
        if nbytes <= STAGE_BYTES:
            return await self._sock.read(nbytes, stall_s)
        out = bytearray(nbytes)
        await self._sock.fill(Filling(memoryview(out), None), stall_s)
        return bytes(out)
