"""Streams and pipes are connections of their own, which begin with a token that an HTTP request has brought.

    caller                                                    callee
    POST …, over TLS where the swarm has a key  ────────►   judges it; keeps who asked and what for
                                                ◄────────   `ConnectionOpening`: a token, good once, and keys
    another connection: `HELLO` token           ────────►   finds what the token is for
                                                ◄────────   `OPENED`; from now on the stream or pipe

So what goes over them is encrypted by keys that only these two nodes have, and neither TLS nor aiohttp stands
in the way of long vectors, or of another process that is given the socket.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from p2pdrl.errors import WireError
from p2pdrl.transport import codec
from p2pdrl.transport.cipher import KEY_BYTES, Cipher, new_keys
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address
from p2pdrl.transport.stream.socket import StreamSocket

__all__ = [
    "HELLO",
    "OPENED",
    "TOKEN_BYTES",
    "ConnectionOpening",
    "NotConnectedError",
    "NotOfferedError",
    "Opener",
    "PendingConnections",
    "connect",
    "show",
]

HELLO = b"\0p2pdrl\4"
"""What a connection that isn't HTTP begins with; neither HTTP nor TLS begins so."""

OPENED = b"\6"
"""The callee's answer to a good token."""

TOKEN_BYTES = 16

_OPEN_WITHIN_S = 5.0
"""How long a token waits for its connection."""

T = TypeVar("T")
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class NotConnectedError(OSError):
    """Nothing listens there."""


class NotOfferedError(Exception):
    """The peer doesn't know the protocol, or doesn't offer it."""


class ConnectionOpening(msgspec.Struct, frozen=True):
    """What a caller needs to open a connection."""

    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    keys: tuple[_Key, _Key] | None
    """Of what the caller sends and of what the callee sends; None where nothing is sealed."""
    hides: bool
    """Whether what goes is encrypted, or can only not be changed."""

    @classmethod
    def new(cls, *, sealed: bool, hides: bool) -> ConnectionOpening:
        """Make one with a fresh token and fresh keys."""
        return cls(secrets.token_bytes(TOKEN_BYTES), new_keys() if sealed else None, hides)

    @classmethod
    def decode(cls, data: bytes) -> ConnectionOpening:
        """Parse what a callee told; raises `WireError`."""
        found: ConnectionOpening = codec.decode(data, cls, "opening of a connection")
        return found

    def encode(self) -> bytes:
        """Return the bytes of it."""
        return msgspec.msgpack.encode(self)

    def ciphers(self) -> tuple[Cipher, Cipher]:
        """Of what the caller sends and of what the callee sends."""
        calls, answers = self.keys if self.keys is not None else (None, None)
        return Cipher(calls, hides=self.hides), Cipher(answers, hides=self.hides)

    def __repr__(self) -> str:
        return f"ConnectionOpening({'with' if self.keys is not None else 'without'} keys)"


class PendingConnections(Generic[T]):
    """What was promised to callers whose connection hasn't come yet, by token."""

    def __init__(self, open_within_s: float = _OPEN_WITHIN_S) -> None:
        self._open_within_s = open_within_s
        self._waiting: dict[bytes, tuple[T, asyncio.TimerHandle, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, token: bytes, what: T, lost: Callable[[], None]) -> None:
        """Keep ``what`` for the connection that brings ``token``; call ``lost`` when none does in time."""
        timer = asyncio.get_running_loop().call_later(self._open_within_s, self.drop, token)
        self._waiting[token] = (what, timer, lost)

    def redeem(self, token: bytes) -> T | None:
        """Return what ``token`` is for, once; None when it isn't known."""
        found = self._waiting.pop(token, None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def drop(self, token: bytes) -> None:
        """Give up one whose connection won't come."""
        found = self._waiting.pop(token, None)
        if found is not None:
            found[1].cancel()
            found[2]()

    def close(self) -> None:
        """Give all of them up."""
        for token in tuple(self._waiting):
            self.drop(token)


async def connect(address: Address) -> socket.socket:
    """Return a non-blocking socket connected to an IP address.

    Raises:
        NotConnectedError: nothing listens there.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise NotConnectedError(str(error)) from error
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    except OSError as error:
        sock.close()
        raise NotConnectedError(str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


async def show(sock: socket.socket, token: bytes, within_s: float) -> socket.socket:
    """Show a token on a new connection, and return it with all that comes after the answer unread.

    Raises:
        ConnectionError: the callee doesn't know the token, or the connection broke; it is closed.
        WireError: the callee answered something else; likewise.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            await loop.sock_sendall(sock, HELLO + token)
            answer = await loop.sock_recv(sock, len(OPENED))
        if not answer:
            raise ConnectionResetError("the callee doesn't know the token")  # noqa: TRY301 - closed like all else
        if answer != OPENED:
            raise WireError("the callee speaks another protocol")  # noqa: TRY301 - closed like all else
    except BaseException:
        sock.close()
        raise
    return sock


class Opener:
    """The calling half: makes connections that begin with a token.

    Args:
        connect: connects to an address, without more.
    """

    def __init__(
        self,
        limits: TransportLimits,
        connect: Callable[[Address], Awaitable[socket.socket]] = connect,
    ) -> None:
        self.limits = limits
        self._connect = connect
        self._opening: set[StreamSocket] = set()

    def close(self) -> None:
        """End what is being opened."""
        for sock in self._opening:
            sock.close()

    @asynccontextmanager
    async def open(self, address: Address, token: bytes) -> AsyncIterator[StreamSocket]:
        """Connect and show the token; whatever fails inside closes the connection.

        Raises:
            NotConnectedError: nothing listens there.
            ConnectionError: the callee doesn't know the token, or the connection broke.
            WireError: the callee answered something else.
        """
        sock = StreamSocket(await self._connect(address))
        self._opening.add(sock)
        try:
            await sock.send(iter([[HELLO + token]]), len(HELLO) + len(token))
            answer = await sock.read(1, self.limits.stall_deadline_s)
            if answer != OPENED:
                raise WireError("the peer speaks another protocol")  # noqa: TRY301 - closed like all else
            yield sock
        except BaseException:
            sock.close()
            raise
        finally:
            self._opening.discard(sock)
