"""Every bound of the transport: sizes, deadlines, counts and rates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PIECE_BYTES", "PipeBounds", "TransportLimits"]

PIECE_BYTES = 1 << 20
"""Vectors travel in pieces of 1 MiB, each sealed by itself (`cipher`). Part of the protocol.

Greater pieces hold the event loop longer at a time; one buffer for everything cost a
factor of 10 in throughput (340 against 4,227 MB/s on loopback)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds with which a node meets strangers.

    Attributes:
        header_deadline_s: from the first byte of a request (or from the connection) to the end
            of its header. Longer tolerates worse links, shorter frees slots sooner.
        stall_deadline_s: longest time without progress in a body, either direction. With
            ``watchdog_tick_s`` or ``lingering_s`` on top it stays under the 10 s after which
            every slow connection has to be gone.
        min_body_bytes_s: a body slower than this over one ``stall_deadline_s`` counts as
            stalled, so that a byte now and then can't hold a connection for ever; 0 allows it.
        watchdog_tick_s: how often connections are looked at: the error of both deadlines.
        keepalive_s: an idle connection is closed by the server after this time.
        client_keepalive_s: by the client, after this; shorter, so that a client never
            sends into a connection that the server is just closing.
        probe_keepalive_s: likewise in the probe lane, which calls everybody in turn: so the number of open
            connections follows that of calls, not that of members. Shorter connects more often, and a TLS
            handshake costs some twenty kept probes.
        lingering_s: how long the rest of a refused body is read and dropped, so that the caller gets the
            refusal.
        shutdown_grace_s: how long running handlers may go on when the listener closes.
        max_connections: open connections in all.
        max_connections_per_host: of one remote IP address; loopback is exempt, since all nodes
            of one machine share it.
        max_requests: handlers running at a time.
        max_requests_per_peer: of one peer.
        requests_per_s: steady rate allowed to one peer.
        requests_burst: requests that one peer may send at once.
        failures_per_s: steady rate of refusals that one host gets with their reason; beyond it 429.
        failures_burst: such refusals at once.
        max_answer_meta_bytes: longest metadata accepted in an answer (a view of 4,096 members).
        max_refusal_bytes: bytes of a refusal that are read.
        max_api_body_bytes: ``client_max_size`` for the application that shares the port.
        read_buffer_bytes: aiohttp's receive buffer; reading pauses at twice this.
        probe_connections_per_host: connections of the probe lane to one peer.
        bulk_connections_per_host: connections of the bulk lane to one peer.
        max_streams_per_peer: streams that one peer may have open here; a further one takes the place of
            the one idle for longest. 0 offers none, so that peers post their calls.
        max_pipes_per_peer: pipes that one peer may have open here; further ones are refused. 0 offers none.
        max_pipes: of all peers.
        max_relayed: members that this node relays connections for; 0 relays for nobody.
        max_tunnels: relayed connections of all of them.
        max_tunnels_per_member: to one of them.
        max_tunnels_per_caller: by one peer, and how many it may ask for at once.
        tunnels_per_s: steady rate at which one peer may ask for them.
        relay_bytes_s: of all tunnels together, both ways; 0 is no bound.
        stream_retry_s: how long calls are posted to a peer that offered no stream.
        resolve_ttl_s: how long a resolved name is reused.
    """

    header_deadline_s: float = 8.0
    stall_deadline_s: float = 8.0
    min_body_bytes_s: float = 1024.0
    watchdog_tick_s: float = 1.0
    keepalive_s: float = 75.0
    client_keepalive_s: float = 60.0
    probe_keepalive_s: float = 45.0
    lingering_s: float = 1.0
    shutdown_grace_s: float = 2.0
    max_connections: int = 512
    max_connections_per_host: int = 64
    max_requests: int = 256
    max_requests_per_peer: int = 32
    requests_per_s: float = 1000.0
    requests_burst: float = 2000.0
    failures_per_s: float = 20.0
    failures_burst: float = 100.0
    max_answer_meta_bytes: int = 4 << 20
    max_refusal_bytes: int = 4096
    max_api_body_bytes: int = 1 << 20
    read_buffer_bytes: int = 1 << 18
    probe_connections_per_host: int = 8
    bulk_connections_per_host: int = 4
    max_streams_per_peer: int = 8
    max_pipes_per_peer: int = 8
    max_pipes: int = 64
    max_relayed: int = 16
    max_tunnels: int = 128
    max_tunnels_per_member: int = 32
    max_tunnels_per_caller: int = 32
    tunnels_per_s: float = 10.0
    relay_bytes_s: float = 0.0
    stream_retry_s: float = 60.0
    resolve_ttl_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeBounds:
    """Bounds of one end of a pipe.

    Attributes:
        queued_bytes: messages that wait to be sent; beyond it `PipeEnd.send` waits. A single longer
            message passes when nothing else waits.
        prefetched_bytes: messages that came and that nobody asked for yet; beyond it no further one is
            taken from the peer.
        vector_bytes: longest vector that is accepted.
        silence_s: a peer whose host answers nothing for so long is gone; and so is one that takes
            nothing of what waits to be sent for so long, whatever its host answers.
    """

    queued_bytes: int = 64 << 20
    prefetched_bytes: int = 64 << 20
    vector_bytes: int = 1 << 30
    silence_s: float = 60.0
