"""The serving half of streams: takes connections over from aiohttp.

`http_server` judges the request for a stream as it judges a call and hands it over here. aiohttp goes
on to hold the connection, deaf, as long as its handler runs, so that it counts and is closed with all
others; a duplicate of its socket carries the frames.
"""

from __future__ import annotations

from aiohttp import web

from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.headers import AnswerHead, RequestHead
from p2pdrl.transport.protocol import Refusal
from p2pdrl.transport.stream_frames import UPGRADE
from p2pdrl.transport.stream_served import ServedStream, Shared
from p2pdrl.transport.takeover import Over, switching, take_over
from p2pdrl.transport.watchdog import Watched

__all__ = ["StreamServer"]


class StreamServer:
    """Every stream that peers have opened here.

    Args:
        node_id: our id.
        keys: the swarm's keys; None without a key.
        shared: what all streams share.
    """

    def __init__(self, node_id: str, keys: SwarmKeys | None, shared: Shared) -> None:
        self._node_id = node_id
        self._keys = keys
        self._shared = shared
        self._streams: dict[str, set[ServedStream]] = {}

    def mount(self, app: web.Application) -> None:
        """End streams in good order when ``app`` does."""

        async def end(_: web.Application) -> None:
            for stream in self._all():
                stream.end()

        async def abort(_: web.Application) -> None:
            for stream in self._all():
                stream.abort()

        app.on_shutdown.append(end)
        app.on_cleanup.append(abort)

    def _all(self) -> tuple[ServedStream, ...]:
        return tuple(stream for streams in self._streams.values() for stream in streams)

    async def serve(self, request: web.Request, head: RequestHead, watched: Watched) -> web.StreamResponse:
        """Take the connection of ``request`` over, and serve calls on it until it ends.

        Raises:
            Refusal: 429, the peer has too many streams.
            ConnectionError: the caller went away.
        """
        self._make_room(head.sender)
        answer = AnswerHead.answering(head, self._node_id, self._keys)
        macs = self._keys.stream(head.nonce, answer.nonce) if self._keys is not None else (None, None)
        stream = ServedStream(self._shared, take_over(request), head.sender, request.remote or "", macs)
        self._streams.setdefault(head.sender, set()).add(stream)
        watched.lend(stream)
        try:
            await stream.run(switching(UPGRADE, answer))
        finally:
            stream.abort()
            streams = self._streams[head.sender]
            streams.discard(stream)
            if not streams:
                del self._streams[head.sender]
        return Over()

    def _make_room(self, peer: str) -> None:
        """Close the peer's longest idle stream when it has too many.

        Raises:
            Refusal: 429, none is idle.
        """
        streams = self._streams.get(peer, ())
        if len(streams) < self._shared.limits.max_streams_per_peer:
            return
        idle = [stream for stream in streams if not stream.busy]
        if not idle:
            raise Refusal(429, f"{len(streams)} of your streams are busy: wait for their answers")
        min(idle, key=lambda stream: stream.idle_since_s).abort()
