"""Moves bytes between a socket and the callers' memory, with few system calls and no copies.

The socket stays registered with the event loop: heads and short frames land in a small buffer by one
``recv``; long vectors are received straight where they belong, and sent by ``sendmsg`` from where they are.
asyncio's own transports copy what a partial send leaves, and its ``sock_recv_into`` registers the socket anew
each time it has to wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Iterator

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.framing import STAGE_BYTES, Buffer, Filling, UnreadBytes, unsent
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.rate import Allowance, NodeRates, first_of

__all__ = ["LOCAL_SEND_BYTES", "StreamSocket", "notice_silence", "set_options"]

LOCAL_SEND_BYTES = 384 * 1024
"""Send buffer between two processes of one machine, which the kernel doubles. What is under way then fits
into a core's cache: 160 MB in 19 ms on two cores, against 33 ms with the kernel's own choice (4 MiB),
30 ms at 1 MiB and 24 ms at 128 KiB. Between machines the kernel's choice follows the delay."""


def set_options(sock: socket.socket) -> None:
    """Prepare a connected socket: non-blocking, no delay, and small buffers within one machine."""
    sock.setblocking(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BYTES)
    except OSError:
        pass  # the peer is gone already, as will be noticed


def notice_silence(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel break a TCP connection whose peer is silent for ``silence_s``, where it can do so.

    An idle connection is probed; one on which the peer takes nothing that was sent isn't waited for.
    """
    probe_s = max(1, round(silence_s / 4))
    wanted = {
        "TCP_KEEPIDLE": probe_s,
        "TCP_KEEPINTVL": probe_s,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(silence_s * 1000),
    }
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            except OSError:
                pass  # not TCP, or the peer is gone already, as will be noticed


_TURN_BYTES = 2 * PIECE_BYTES
"""Moved before the event loop gets its turn."""


def _unacknowledged_nbytes(sock: socket.socket) -> int:
    """Bytes that the kernel took and the peer's hasn't acknowledged; 0 where the system doesn't tell."""
    try:
        (nbytes,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return 0
    return int(nbytes)


def _gone(error: OSError) -> ConnectionError:
    """Return ``error`` as a ``ConnectionError``: a ``TimeoutError`` of the kernel isn't one of ours."""
    return error if isinstance(error, ConnectionError) else ConnectionResetError(str(error))


class StreamSocket:
    """A connected socket with one reader and one writer.

    Everything raises ``ConnectionError`` once the connection is gone.

    Args:
        sock: connected; owned from now on.
        arrived: told how many bytes came in, each time.

    Attributes:
        unsent_nbytes: bytes of the message being sent that the kernel hasn't taken.
        sent_nbytes: bytes that the kernel took since the stream was made.
    """

    def __init__(self, sock: socket.socket, arrived: Callable[[int], None] | None = None) -> None:
        set_options(sock)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._arrived = arrived
        self._stage = UnreadBytes()
        self._need = 0
        self._filling: Filling | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[bool] | None = None
        self._progress_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._batches: Iterator[list[Buffer]] = iter(())
        self._batch: list[Buffer] = []
        self._fault: Exception | None = None
        self._listening = False
        self._until_answered = False
        self._up: Allowance | None = None
        self._down: Allowance | None = None
        self._bulk = False
        self._held_up: asyncio.TimerHandle | None = None
        self._held_down: asyncio.TimerHandle | None = None
        """Until our own rate lets more be sent, and received."""
        self.unsent_nbytes = 0
        self.sent_nbytes = 0
        self._listen()

    @property
    def receiving(self) -> bool:
        """Whether somebody waits for bytes of the peer, and no rate of ours keeps them from coming."""
        return self._reader is not None and self._held_down is None

    @property
    def awaiting_nbytes(self) -> int:
        """Bytes of the message being sent that the peer hasn't got; 0 while our rate holds them back."""
        if not self.unsent_nbytes or self._held_up is not None:
            return 0
        return self.unsent_nbytes + _unacknowledged_nbytes(self._sock)

    @property
    def open(self) -> bool:
        """Whether the connection is up, as far as is known."""
        return self._fault is None

    @property
    def staged_nbytes(self) -> int:
        """Bytes that came and that nobody has asked for yet."""
        return len(self._stage)

    def keep_to(self, rates: NodeRates | None) -> None:
        """Have what is filled, and sent in bulk, wait for a node's rates from now on; all else counts."""
        if rates is not None:
            self._up = Allowance(rates.upload) if rates.upload is not None else None
            self._down = Allowance(rates.download) if rates.download is not None else None
            rates.bound_buffer(self._sock)

    def close(self, why: str = "the connection was closed") -> None:
        """Close the socket; whoever waits gets a ``ConnectionError``."""
        self._fail(ConnectionResetError(why))
        if self._sock.fileno() >= 0:
            self._mute()
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def detach(self) -> tuple[socket.socket, bytes]:
        """Give the connection away; return its socket, and what came that nobody asked for."""
        self._fail(ConnectionResetError("the connection was given away"))
        return self._sock, self._stage.take(len(self._stage))

    async def read(self, nbytes: int, stall_s: float | None = None) -> bytes:
        """Return the next ``nbytes``.

        Args:
            nbytes: how many.
            stall_s: seconds without a byte after which the peer counts as stalled; None for no bound.

        Raises:
            ConnectionError: the connection is gone.
            PeerTimeoutError: nothing came for ``stall_s``.
        """
        if nbytes > STAGE_BYTES:
            out = bytearray(nbytes)
            await self.fill(Filling(memoryview(out)), stall_s)
            return bytes(out)
        if len(self._stage) < nbytes:
            self._stage.room(nbytes)
            self._need = nbytes
            await self._wait(stall_s)
        return self._stage.take(nbytes)

    async def fill(self, filling: Filling, stall_s: float | None) -> None:
        """Receive until ``filling`` is full.

        Raises:
            ConnectionError: the connection is gone.
            PeerTimeoutError: nothing came for ``stall_s``.
            WireError: a piece isn't authentic.
        """
        self._stage.pour(filling)
        if filling.full:
            await self.keep_pace()
            return
        self._filling = filling
        try:
            if self._fault is None:
                self._receive()  # the rest of a short vector is here already, most times
            if not filling.full:
                await self._wait(stall_s)
        finally:
            self._filling = None
            self._go_on_receiving()

    async def keep_pace(self) -> None:
        """Wait until all that has come may have, by the rate of `keep_to`; meanwhile little more comes."""
        if self._down is not None:
            await self._down.take(1)

    async def send(
        self,
        batches: Iterator[list[Buffer]],
        nbytes: int,
        *,
        until_answered: bool = False,
        bulk: bool = False,
    ) -> bool:
        """Hand a message to the kernel.

        Args:
            batches: lists of buffers, each list for one system call.
            nbytes: length of the whole message.
            until_answered: stop when the peer speaks before it has everything.
            bulk: wait for the rate of `keep_to`.

        Returns:
            Whether everything was handed over.

        Raises:
            ConnectionError: the connection is gone.
        """
        if self._fault is not None:
            raise self._fault
        self._batches, self._batch, self.unsent_nbytes = batches, [], nbytes
        self._until_answered, self._bulk = until_answered, bulk
        try:
            if self._push():
                return True
            if until_answered and self._stage:
                return False
            self._writer = self._loop.create_future()
            if self._held_up is None:
                self._loop.add_writer(self._sock, self._writable)
            return await self._writer
        except OSError as error:
            if until_answered and self._fault is None:
                self._receive()  # the peer may have said why it hung up
                if self._stage:
                    return False
            self._fail(_gone(error))
            raise _gone(error) from error
        finally:
            if self._writer is not None and self._sock.fileno() >= 0:
                self._loop.remove_writer(self._sock)
            self._writer = None
            self._batches, self._batch, self.unsent_nbytes = iter(()), [], 0
            if self._up is not None:
                self._up.give_back()
                if self._held_up is not None:
                    self._held_up.cancel()
                    self._held_up = None

    def check(self) -> None:
        """Look at the connection now.

        Raises:
            ConnectionError: it is gone.
        """
        if self._fault is None and self._stage.room():
            self._receive()
        if self._fault is not None:
            raise self._fault

    async def _wait(self, stall_s: float | None) -> None:
        """Wait until what the reader asked for has come."""
        if self._fault is not None:
            self._need = 0
            raise self._fault
        self._listen()
        self._reader = self._loop.create_future()
        if stall_s is not None:
            self._progress_s = self._loop.time()
            self._timer = self._loop.call_later(stall_s, self._stalled, stall_s)
        try:
            await self._reader
        finally:
            self._reader, self._need = None, 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _stalled(self, stall_s: float) -> None:
        quiet_s = self._loop.time() - self._progress_s if self._held_down is None else 0.0
        if quiet_s < stall_s:
            self._timer = self._loop.call_later(stall_s - quiet_s, self._stalled, stall_s)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_exception(PeerTimeoutError(f"no byte came for {stall_s:g} s"))

    def _listen(self) -> None:
        if not self._listening and self._fault is None and self._held_down is None:
            self._loop.add_reader(self._sock, self._readable)
            self._listening = True

    def _mute(self) -> None:
        if self._listening:
            self._loop.remove_reader(self._sock)
            self._listening = False

    def _readable(self) -> None:
        if self._filling is None and not self._stage.room():
            self._mute()  # until somebody asks for more
            return
        try:
            self._receive()
        except WireError as error:
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)
        reader, filling = self._reader, self._filling
        if reader is not None and not reader.done():
            if filling.full if filling is not None else len(self._stage) >= self._need:
                reader.set_result(None)
        elif self._stage and self._writer is not None and not self._writer.done() and self._until_answered:
            # Only if the peer spoke: this may be the event of bytes that somebody has taken since.
            self._writer.set_result(False)

    def _receive(self) -> None:
        """Take what the kernel has, for one turn; raises `WireError` only for a filling."""
        turn = _TURN_BYTES
        filling = self._filling
        try:
            if filling is None:
                got = self._sock.recv_into(self._stage.room())
                self._stage.came(got)
                self._came(got)
                return
            while turn > 0 and not filling.full:
                room = self._room(filling)
                if not room:
                    return
                got = self._sock.recv_into(room[0]) if len(room) == 1 else self._sock.recvmsg_into(room)[0]
                self._came(got)
                filling.took(got)
                turn -= got
                if got < len(room[0]):
                    return  # the kernel has no more
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(_gone(error))

    def _room(self, filling: Filling) -> list[memoryview]:
        """Return where the next bytes go; nowhere, and muted for a while, when the rate allows none now."""
        room = filling.room()
        if self._down is None:
            return room
        wait_s = self._down.ask(max(len(filling.out) - filling.taken_nbytes, len(room[-1])))
        if wait_s <= 0.0:
            return first_of(room, self._down.nbytes)
        self._mute()
        self._held_down = self._loop.call_later(wait_s, self._due)
        return []

    def _due(self) -> None:
        self._held_down = None
        self._progress_s = self._loop.time()
        self._listen()

    def _go_on_receiving(self) -> None:
        """Hear the peer again, whose vector has come or isn't waited for any more."""
        if self._down is not None:
            self._down.give_back()
        if self._held_down is not None:
            self._held_down.cancel()
            self._due()

    def _came(self, nbytes: int) -> None:
        if nbytes == 0:
            raise ConnectionResetError("the peer closed the connection")
        self._progress_s = self._loop.time()
        if self._down is not None:
            self._down.used(nbytes)
        if self._arrived is not None:
            self._arrived(nbytes)

    def _writable(self) -> None:
        writer = self._writer
        if writer is None or writer.done():
            return
        try:
            if self._push():
                writer.set_result(True)
        except Exception as error:  # noqa: BLE001 - handed to whoever sends
            writer.set_exception(error)

    def _push(self) -> bool:
        """Give the kernel what it takes, for one turn; tell whether that was all."""
        turn = _TURN_BYTES
        while True:
            if not self._batch:
                batch = next(self._batches, None)
                if batch is None:
                    return True
                self._batch = batch
            if turn <= 0:
                return False
            batch = self._batch
            if self._up is not None and self._bulk:
                wait_s = self._up.ask(self.unsent_nbytes)
                if wait_s > 0.0:
                    self._loop.remove_writer(self._sock)
                    self._held_up = self._loop.call_later(wait_s, self._go_on_sending)
                    return False
                batch = first_of(batch, self._up.nbytes)
            try:
                sent = self._sock.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return False
            if self._up is not None:
                self._up.used(sent)
            turn -= sent
            self.sent_nbytes += sent
            self.unsent_nbytes -= sent
            self._batch = unsent(self._batch, sent)

    def _go_on_sending(self) -> None:
        self._held_up = None
        if self._writer is not None and not self._writer.done() and self._fault is None:
            self._loop.add_writer(self._sock, self._writable)

    def _fail(self, error: Exception) -> None:
        """The connection is of no more use."""
        if self._fault is None:
            self._fault = error
        if self._sock.fileno() >= 0:
            self._mute()
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._fault)
        if self._writer is not None and not self._writer.done():
            self._writer.set_exception(self._fault)
