"""Takes a whole state from a peer: the next donor when one fails, the hash checked.

Called when a node joins, when it meets a greater lineage, and when it has fallen too far behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, TensorError, TransportError
from p2pdrl.ids import short
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.state_transfer import StateRequest, TransferredState, fetch
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.transport.protocol import Address, Transport

__all__ = ["Adoptions", "Donors", "Download", "without_moments"]

Donors = Callable[[], Sequence[tuple[str, Address]]]
"""Living members, the best donor first."""

PAUSE_S = 0.5


class Download:
    """Asks donors in turn.

    Args:
        transport: how they are reached.
        events: where failures are told.
        max_abs: largest parameter accepted.
    """

    def __init__(self, transport: Transport, events: EventLog, max_abs: float) -> None:
        self._transport = transport
        self._events = events
        self._max_abs = max_abs

    async def once(
        self,
        donors: Sequence[tuple[str, Address]],
        request: StateRequest,
        spec: BoardSpec,
        *,
        lineage: str | None = None,
    ) -> tuple[str, TransferredState] | None:
        """Return the first donor that gives its state, with it; None when none does.

        Args:
            donors: asked in this order.
            request: what we expect.
            spec: our own layout.
            lineage: the only one that will do; None takes any.
        """
        for donor, address in donors:
            try:
                state = await fetch(
                    self._transport, donor, address, request=request, spec=spec, max_abs=self._max_abs
                )
            except PeerRefusedError as error:
                if error.status != 503:
                    self._tell(donor, address, error)
            except (TransportError, TensorError) as error:
                self._tell(donor, address, error)
            else:
                if lineage in (None, state.head.lineage):
                    return donor, state
        return None

    async def until(
        self, donors: Donors, request: StateRequest, spec: BoardSpec, give_up: Callable[[], bool]
    ) -> tuple[str, TransferredState] | None:
        """Ask again and again until a donor gives its state, or ``give_up`` says so."""
        while True:
            found = await self.once(donors(), request, spec)
            if found is not None or give_up():
                return found
            await asyncio.sleep(PAUSE_S)

    def _tell(self, donor: str, address: Address, error: Exception) -> None:
        self._events.emit(
            "donor-failed",
            f"{short(donor)} at {address} didn't give its state: {error}",
            level="warning",
            peer=donor,
        )


class Adoptions:
    """Takes states over: the first one, and later ones in the background, one at a time.

    Args:
        download: asks donors.
        donors: the living members, the best donor first.
        clock: time.
        request: what is expected of a donor.
        spec: our own layout.
        take: makes a state that arrived our own: ``(giver, state, why)``.
    """

    def __init__(
        self,
        *,
        download: Download,
        donors: Donors,
        clock: Clock,
        request: Callable[[], StateRequest],
        spec: Callable[[], BoardSpec],
        take: Callable[[str, TransferredState, str], Awaitable[None]],
    ) -> None:
        self._download = download
        self._donors = donors
        self._clock = clock
        self._request = request
        self._spec = spec
        self._take = take
        self._task: asyncio.Task[bool] | None = None
        self._since_s = 0.0
        self._crash: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    @property
    def under_way(self) -> bool:
        """Whether one is going on in the background."""
        return self._task is not None

    @property
    def seconds(self) -> float:
        """How long it has been going on; 0 when none is."""
        return 0.0 if self._task is None else self._clock.monotonic() - self._since_s

    async def first(self, give_up: Callable[[], bool]) -> tuple[str, TransferredState] | None:
        """Return the state of the best donor, for a node that has none; None when ``give_up`` says so."""
        return await self._download.until(self._donors, self._request(), self._spec(), give_up)

    def begin(self, donor: str, lineage: str | None, why: str) -> None:
        """Take the state of ``donor`` in the background, or of another member of ``lineage``.

        Args:
            donor: asked first; empty begins with the best.
            lineage: the only one that will do; None takes any.
            why: told when it is done.
        """
        if self._task is None:
            self._since_s = self._clock.monotonic()
            self._task = asyncio.create_task(self._adopt(donor, lineage, why), name="adoption")
            self._task.add_done_callback(self._ended)

    async def ended(self) -> bool:
        """Wait for the end of the one under way; False when there is none, or nobody gave a state."""
        task = self._task
        if task is None:
            return False
        await asyncio.wait([task])
        return not task.cancelled() and task.exception() is None and task.result()

    async def watch(self) -> None:
        """Wait for ever; raise what ended an adoption, by now or before: a bug of ours."""
        if self._error is not None:
            raise self._error
        self._crash = asyncio.get_running_loop().create_future()
        await self._crash

    async def stop(self) -> None:
        """Give up the one under way."""
        if self._task is not None:
            task = self._task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _adopt(self, donor: str, lineage: str | None, why: str) -> bool:
        donors = sorted(self._donors(), key=lambda entry: entry[0] != donor)
        found = await self._download.once(donors, self._request(), self._spec(), lineage=lineage)
        if found is not None:
            await self._take(*found, why)
        return found is not None

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None or self._error is not None:
            return
        self._error = error
        if self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)


def without_moments(state: TransferredState, spec: BoardSpec) -> TransferredState:
    """Return ``state`` with its normaliser moments zeroed: they are the donor's own counts, not ours."""
    if state.sidecar is None:
        return state
    moments = {item.name for item in spec.sidecar.items if item.rule == "moments"}
    sidecar = {name: value * 0 if name in moments else value.copy() for name, value in state.sidecar.items()}
    return TransferredState(state.head, state.vector, sidecar)
