"""One end of a pipe in the process that uses it: messages both ways, by two threads and no event loop.

    end = PipeEnd(socket.socket(fileno=fd), keys, leftover, into=buffer_for)
    end.send(KIND, meta, vector, deadline_s=10)
    message = end.receive(deadline_s=10)
    end.close()

`HttpTransport.open_pipe` and `serve_pipes` make the connection; `pipe.Pipe` is what is handed over.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from p2pdrl.transport.auth import SerialMac
from p2pdrl.transport.limits import PipeBounds
from p2pdrl.transport.pipe_link import PipeLink
from p2pdrl.transport.pipe_parser import Message, PipeBuffer, PipeParser
from p2pdrl.transport.pipe_receiver import PipeReceiver
from p2pdrl.transport.pipe_sender import PipeSender
from p2pdrl.transport.socket_options import notice_silence, set_options

__all__ = ["Message", "PipeBuffer", "PipeEnd"]


class PipeEnd:
    """Sends and receives messages; every method may be called from any thread.

    Whatever breaks the pipe ends all calls that wait, at once, and all later ones. Only messages that came
    whole before that can still be received.

    Args:
        sock: connected; owned from now on.
        keys: of what we send and of what we receive; None without a swarm key.
        leftover: bytes of the pipe that were read from the socket already.
        into: asked, in the thread that receives, where a vector goes: what it returns is filled and comes
            back in the message. What is in it before that is worth nothing. None refuses the message, which
            ends the pipe.
        bounds: of queues, vectors and silence.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: tuple[bytes, bytes] | None,
        leftover: bytes = b"",
        *,
        into: PipeBuffer,
        bounds: PipeBounds | None = None,
    ) -> None:
        bounds = bounds if bounds is not None else PipeBounds()
        set_options(sock)
        notice_silence(sock, bounds.silence_s)
        sock.settimeout(None)
        ours, theirs = map(SerialMac, keys) if keys is not None else (None, None)
        self._link = PipeLink(sock)
        self._sender = PipeSender(self._link, ours, bounds.queued_bytes)
        parser = PipeParser(theirs, leftover, into, bounds.vector_bytes)
        self._receiver = PipeReceiver(self._link, parser, bounds.prefetched_bytes)
        for half in (self._sender, self._receiver):
            self._link.on_end(half.wake)
        self._threads = [
            threading.Thread(target=half.run, name=name, daemon=True)
            for half, name in ((self._sender, "pipe-sender"), (self._receiver, "pipe-receiver"))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def open(self) -> bool:
        """Whether the pipe goes on, as far as is known."""
        return self._link.fault is None

    @property
    def bytes_in(self) -> int:
        """Bytes that came so far, with heads and MACs."""
        return self._receiver.nbytes

    @property
    def bytes_out(self) -> int:
        """Bytes that the kernel took so far, with heads and MACs."""
        return self._sender.nbytes

    def send(
        self,
        kind: int,
        meta: bytes = b"",
        vector: Sequence[memoryview] | memoryview | None = None,
        *,
        deadline_s: float,
    ) -> int:
        """Queue a message, and return its number: 1 for the first.

        Waits only while more is queued than `PipeBounds.queued_bytes` allows.

        Args:
            kind: what it means, 0-65535.
            meta: at most 64 KiB.
            vector: one view, or several that are sent one after another as one vector. They must stay
                unchanged until `flush` returned for this number.
            deadline_s: seconds to wait for room.

        Raises:
            PeerTimeoutError: there was no room in time; nothing was queued.
            PeerUnreachableError: the pipe broke, or was closed.
            WireError: what came broke the protocol, which ended the pipe.
            ValueError: something is longer than a message can be.
        """
        return self._sender.send(kind, meta, vector, deadline_s)

    def flush(self, number: int | None = None, *, deadline_s: float) -> None:
        """Wait until the kernel has taken a message and all before it.

        Args:
            number: of the message; None for the last one.
            deadline_s: seconds to wait.

        Raises:
            TransportError: as for `send`.
        """
        self._sender.flush(number, deadline_s)

    def receive(self, *, deadline_s: float) -> Message:
        """Return the next message, waiting for it.

        Raises:
            PeerTimeoutError: no whole message came in time; it may come yet.
            PeerUnreachableError: the pipe broke, or was closed.
            WireError: what came breaks the protocol, which ended the pipe.
        """
        return self._receiver.receive(deadline_s)

    def close(self) -> None:
        """End the pipe at once, whatever is queued; calling it again does nothing.

        Waits for both threads, so that no buffer is written to any more. Called by one of them, from
        ``into``, it ends the pipe only; a later call from elsewhere frees the rest.
        """
        self._link.shut()
        if threading.current_thread() in self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._receiver.close()
        self._sender.close()
        self._link.sock.close()
