"""One rank of a pipeline over torch.distributed: meets the others, connects to its neighbours."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from p2pdrl.errors import ConfigError, PeerTimeoutError, PeerUnreachableError, TransportError, WorkerError
from p2pdrl.pipeline.plan import Rendezvous, StageOrder, StageSide
from p2pdrl.rl.pipeline.torch_runner import peer_error
from p2pdrl.transport.pipe.ticket import PipeTicket
from p2pdrl.workers.pipeline.protocol import Measure, StartStage
from p2pdrl.workers.protocol import Stop, ToLearner, WorkMode
from p2pdrl.workers.torch_group.rendezvous import (
    abort_group,
    bounded,
    connect_store,
    cut_connections,
    join,
    leave,
    local_address,
    open_store,
    wait_for_all,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # it lists no exports

    from p2pdrl.rl.gradients import Outputs
    from p2pdrl.rl.pipeline.links import Links
    from p2pdrl.rl.pipeline.stage_parameters import StageParameters
    from p2pdrl.rl.pipeline.torch_runner import TorchRunner
    from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier

__all__ = ["OrderWatch", "TorchStages", "import_schedules"]

POLL_S = 0.05
AGAIN_S = 1.0
"""Seconds after which a group is broken off again: a wait that begins at that moment may be missed."""
TOKEN_TIMEOUT_S = 1.0
"""How long a connection may take to bring its token: others may be waiting behind it."""

_TOKEN_BYTES = 16
_TICKET = PipeTicket(keys=None, leftover=b"")
EVERY_S = 0.05
CLOSE_S = 2.0
"""To end waits takes milliseconds, but it asks the same library that may hang."""
_ENDS = (StartStage, WorkMode, Stop)
"""What ends a stage."""


class OrderWatch:
    """Ends waits once the daemon has said something by which they end; calls both in a thread of its own.

    Args:
        ahead: what the daemon has said and wasn't heard yet: `mailbox.Mailbox.ahead`.
        end: ends the waits; called again until `close`, for another wait may have begun meanwhile.

    Attributes:
        meeting: whether the wait is for others to come. The daemon asks what blocks cost only when it has
            given that up, and wants an answer.
    """

    def __init__(
        self,
        ahead: Callable[[], Sequence[ToLearner]],
        end: Callable[[], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.meeting = True
        self._ahead, self._end, self._every_s = ahead, end, every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="order-watch", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Look no more, and return whether ``end`` has returned in time; calling it again does nothing."""
        self._closed.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _look(self) -> None:
        while not self._closed.wait(self._every_s):
            if self.wanted:
                self._end()

    @property
    def wanted(self) -> bool:
        """Whether it has. From any thread."""
        try:
            ahead = self._ahead()
        except WorkerError:  # whoever listens will be told
            return True
        ends = (*_ENDS, Measure) if self.meeting else _ENDS
        return any(isinstance(message, ends) for message in ahead)


class TorchStages:
    """Meets the other ranks, and leaves them with `close`. Made and closed by the same thread.

    Rank 0 opens a store and says where; the others' orders have its port. A process is in one group at a
    time: the one before must have been closed.

    Args:
        order: with ``meeting``, and at least 2 ranks. Its ``timeout_s`` bounds each wait, and how long
            those who have all come take to connect.
        say_port: told the store's port, where this is rank 0.
        ahead: what the daemon has said and wasn't heard yet, called in a thread: some of it ends all waits.

    Attributes:
        pipes: connections to the neighbours, as `PipeCarrier` takes them: it owns the descriptors. Who
            makes none closes them.
        nccl: whether activations stay on GPUs; else they travel through the memory of the host.

    Raises:
        PeerTimeoutError: somebody didn't come in time.
        PeerUnreachableError: the store isn't there, or somebody is gone.
        ConfigError: it isn't an order for this.
    """

    def __init__(
        self,
        order: StageOrder,
        device: torch.device,
        say_port: Callable[[int], None],
        *,
        ahead: Callable[[], Sequence[ToLearner]] = list,
    ) -> None:
        if order.meeting is None or order.ranks < 2:
            raise ConfigError("an order for the torch backend has a meeting, and at least 2 ranks")
        self.pipes: dict[StageSide, tuple[int, PipeTicket]] = {}
        self.nccl = False
        self._device = device
        self._store: TCPStore | None = None
        self._store_port = 0
        self._broken, self._again_s = False, -math.inf
        # A wait that takes too long is to raise an error, as it does with gloo.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        # On errors it prints whole schedules; neighbours that die are an event here.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        self._watch = OrderWatch(ahead, self.break_off)
        try:
            with _peers_errors():
                self._meet(order, order.meeting, say_port)
            self._watch.meeting = False
        except BaseException:
            for fd, _ in self.pipes.values():
                os.close(fd)
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def runner(
        self, share: StageParameters[Outputs], links: Links, carrier: PipeCarrier | None = None
    ) -> TorchRunner[Outputs]:
        """Return what computes the gradients of this rank's share.

        torch doesn't say who is gone: the pipe of ``carrier`` that broke does, if one did.
        """
        from p2pdrl.rl.pipeline.torch_runner import TorchRunner  # takes a second; see `_meet`

        travelling = share.device if self.nccl else torch.device("cpu")

        def blame() -> None:
            if carrier is not None:
                carrier.side = None
                with contextlib.suppress(TransportError):
                    carrier.check()

        return TorchRunner(share, links, travelling=travelling, leave=self.close, blame=blame)

    def break_off(self) -> None:
        """End all waits at once, here and at the others; from any thread, but not after `close`."""
        if self._watch.meeting and self._store_port:
            cut_connections(self._store_port)
        now_s = time.monotonic()
        if now_s >= self._again_s and abort_group():
            self._broken, self._again_s = True, now_s + AGAIN_S

    def close(self) -> None:
        """Leave the group; calling it again does nothing."""
        if self._watch.close() and not self._broken:
            abort_group()
        leave()
        self._store = None

    def _found(self, order: StageOrder, meeting: Rendezvous, say_port: Callable[[int], None]) -> TCPStore:
        """Open the store, or connect to it."""
        if order.rank == 0:
            store, self._store_port = open_store([meeting.host], order.timeout_s)
            say_port(self._store_port)
            return store
        self._store_port = meeting.port
        with self._bounded(order):
            return connect_store(meeting.host, meeting.port, order.timeout_s)

    def _bounded(self, order: StageOrder) -> contextlib.AbstractContextManager[None]:
        """Bound waits for the store of another process; rank 0 has its own."""
        return bounded(self._store_port, order.timeout_s) if order.rank > 0 else contextlib.nullcontext()

    def _wanted(self) -> bool:
        return self._watch.wanted

    def _check(self) -> None:
        """Go no further once the daemon wants something else."""
        if self._wanted():
            raise PeerUnreachableError("another order ended the meeting")

    def _meet(self, order: StageOrder, meeting: Rendezvous, say_port: Callable[[int], None]) -> None:
        rank, host, timeout_s = order.rank, meeting.host, order.timeout_s
        with contextlib.ExitStack() as stack:
            store = self._store = self._found(order, meeting, say_port)
            import_schedules()  # all ranks at the same time
            listener = None
            token = secrets.token_bytes(_TOKEN_BYTES)
            if rank < order.ranks - 1:  # before this rank counts as there: once all do, this is set
                listener = stack.enter_context(_listener(local_address(host)))
                address, own_port = listener.getsockname()[:2]
                with self._bounded(order):
                    store.set(f"link/{rank}", f"{address} {own_port} {token.hex()}")
            bound, here_s = functools.partial(self._bounded, order), meeting.come_s
            if not wait_for_all(store, rank, order.ranks, within_s=here_s, bound=bound, wanted=self._wanted):
                raise PeerTimeoutError(f"not all ranks came within {here_s:g} s, or before another order")
            until_s = time.monotonic() + timeout_s
            with self._bounded(order):
                where = store.get(f"link/{rank - 1}").decode() if rank > 0 else ""
            device = self._device if self._device.type == "cuda" else None
            with self._bounded(order):
                self.nccl = join(store, rank, order.ranks, host=host, timeout_s=timeout_s, device=device)
            if rank > 0:
                self.pipes["previous"] = _detached(connect_to_rank(where, until_s)), _TICKET
            if listener is not None:
                self.pipes["next"] = _detached(accept_rank(listener, token, until_s, self._check)), _TICKET


def import_schedules() -> None:
    """Import what `TorchStages.runner` makes."""
    # PyTorch's compiler is imported with it, and would make a folder for what it compiles: nothing, here.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    import p2pdrl.rl.pipeline.torch_runner  # noqa: F401


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=8)


def connect_to_rank(where: str, until_s: float) -> socket.socket:
    """Connect to the rank before, and send its token."""
    address, port, token = where.split()
    sock = socket.create_connection((address, int(port)), timeout=_left_s(until_s))
    try:
        sock.sendall(bytes.fromhex(token))
    except BaseException:
        sock.close()
        raise
    return sock


def accept_rank(
    listener: socket.socket, token: bytes, until_s: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """Return the connection of the rank behind, which says ``token``; any other connection is closed.

    ``check`` is called often; its errors end the wait.

    Raises:
        TimeoutError: it didn't come in time.
    """
    while True:
        check()
        listener.settimeout(min(_left_s(until_s), POLL_S))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() >= until_s:
                raise
            continue
        try:
            known = secrets.compare_digest(_read_token(sock, len(token), until_s), token)
        except BaseException:
            sock.close()
            raise
        if known:
            return sock
        sock.close()


def _read_token(sock: socket.socket, nbytes: int, until_s: float) -> bytes:
    """Return the first bytes of a connection, as many as come in time."""
    until_s = min(until_s, time.monotonic() + TOKEN_TIMEOUT_S)
    token = b""
    with contextlib.suppress(OSError):  # it broke off, or took too long
        while len(token) < nbytes and time.monotonic() < until_s:
            sock.settimeout(_left_s(until_s))
            data = sock.recv(nbytes - len(token))
            if not data:
                break
            token += data
    return token


def _detached(sock: socket.socket) -> int:
    sock.settimeout(None)
    return sock.detach()


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.001)


@contextlib.contextmanager
def _peers_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)  # the store is in there: it is closed at once
        meant = _connecting_error(error) if isinstance(error, OSError) else peer_error(error)
        if meant is None:
            raise
        try:
            raise meant from error
        finally:
            del meant, error  # else it holds itself


def _connecting_error(error: OSError) -> TransportError:
    if isinstance(error, TimeoutError):
        return PeerTimeoutError("a rank of the group didn't connect in time")
    return PeerUnreachableError(f"the ranks of the group can't be connected: {error}")
