"""Asks a peer for a stream; `stream_client` owns this."""

from __future__ import annotations

from p2pdrl.errors import WireError
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.credentials import Credentials
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address
from p2pdrl.transport.stream_caller import CallerStream
from p2pdrl.transport.stream_frames import STREAM_PATH, UPGRADE
from p2pdrl.transport.upgrading import Upgrader

__all__ = ["StreamOpener"]

_NO_STREAMS = frozenset({404, 405, 426, 501})


class StreamOpener:
    """Opens streams.

    Args:
        credentials: sign requests, check answers.
        limits: all bounds.
        counters: written to by the streams.
    """

    def __init__(self, credentials: Credentials, limits: TransportLimits, counters: TrafficCounters) -> None:
        self._credentials = credentials
        self._limits = limits
        self._counters = counters
        self._upgrader = Upgrader(credentials, limits)

    def close(self) -> None:
        """End what is being opened."""
        self._upgrader.close()

    async def open(self, address: Address, target_id: str | None) -> CallerStream:
        """Return a new stream to the node at an IP address.

        Raises:
            NotConnectedError: nothing listens there.
            NotOfferedError: no streams are offered there.
            ConnectionError: the connection broke.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
        """
        head = self._credentials.head(STREAM_PATH, target_id, method="GET")
        async with self._upgrader.connection(address) as sock:
            answer = await self._upgrader.ask(sock, address, head, UPGRADE, absent=_NO_STREAMS)
            if sock.staged_nbytes:
                raise WireError("the peer spoke before it was asked")
        keys = self._credentials.keys
        macs = keys.stream(head.nonce, answer.nonce) if keys is not None else (None, None)
        return CallerStream(sock, answer.sender, macs, self._limits, self._counters)
