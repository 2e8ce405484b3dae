"""How messages between members of a group travel: each is repeated until it is answered, or its time is up.

So a network that loses one message in twenty doesn't look like members that come and go.
"""

from __future__ import annotations

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.strategies.group.core import Call
from p2pdrl.strategies.group.view import Held, Holding, Ping, Response, Timing
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.repeating import repeated
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Answer, Transport

__all__ = ["ELSEWHERE", "ROUTE", "Sender"]

ROUTE = "group"
ELSEWHERE = 409
"""Refusal by which a peer says that it is in another mode."""
GONE = frozenset({403, 404})
"""Refusals by which a peer says that it is in no group of ours; others may pass."""
LIVES_S = 1.0
"""Who answers nothing at all for so long is taken for dead."""


class Sender:
    """Sends messages of the group.

    Args:
        transport: carries them.
        clock: monotonic time.
        epoch: mode epoch.
        timing: how long things take.
    """

    def __init__(self, transport: Transport, clock: Clock, epoch: int, timing: Timing) -> None:
        self._transport, self._clock, self._epoch, self._timing = transport, clock, epoch, timing
        self._patience = Patience(timing.answer_s / 2, least_s=timing.again_s, quantile=0.25, margin=3.0)

    async def send(self, to: Address | None, call: Call) -> Response | str:
        """Send a message of the core's; return the answer, or the word for what became of it.

        Args:
            to: where its receiver listens; None where nobody knows.
            call: the message.
        """
        if to is None:
            return "unreachable"
        try:
            answer = await self._repeated(to, call.to, call.message, call.deadline_s)
            response: Response = decode(answer.meta, Response, "group message")
        except PeerTimeoutError:
            return "timeout"
        except PeerRefusedError as refusal:
            if refusal.status == ELSEWHERE:
                return "elsewhere"
            return "refused" if refusal.status in GONE else "hindered"
        except TransportError:
            return "unreachable"
        return response

    async def holding(self, to: Address, peer: str, number: int) -> bool:
        """Whether ``peer`` works at our call of that number.

        Raises:
            TransportError: it doesn't say.
        """
        message = Holding(self._epoch, number)
        answer = await self._repeated(to, peer, message, self._timing.answer_s)
        held: Held = decode(answer.meta, Held, "group message")
        return held.yes

    async def lives(self, to: Address, peer: str) -> bool:
        """Whether ``peer`` answers anything at all, a refusal too."""
        try:
            await self._repeated(to, peer, Ping(self._epoch, proposes=False, active=None), LIVES_S)
        except (PeerTimeoutError, PeerUnreachableError):
            return False
        except TransportError:
            return True
        return True

    async def _repeated(self, to: Address, peer: str, message: msgspec.Struct, deadline_s: float) -> Answer:
        meta, began_s = msgspec.msgpack.encode(message), self._clock.monotonic()

        async def call(left_s: float) -> Answer:
            return await self._transport.call(to, peer, ROUTE, meta, deadline_s=left_s)

        again_s = self._patience.deadline_s
        answer = await repeated(call, again_s=again_s, deadline_s=deadline_s, clock=self._clock)
        self._patience.observe(self._clock.monotonic() - began_s)
        return answer
