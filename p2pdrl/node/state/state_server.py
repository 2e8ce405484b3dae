"""Gives this node's whole state to peers that ask: newcomers, and those that fell behind."""

from __future__ import annotations

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.ids import short
from p2pdrl.node.accounting.steps import StepAccounting
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.state_transfer import StateHead, decode_request, offer
from p2pdrl.node.training import Training
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["StateServer"]

MAX_AT_ONCE = 2
"""A state may be large: more askers at once are sent elsewhere, or told to come again."""


class StateServer:
    """Serves the state route.

    Args:
        training: whose state.
        step_accounting: tells the lineage's steps.
        events: what is told.
    """

    def __init__(self, training: Training, step_accounting: StepAccounting, events: EventLog) -> None:
        self._training = training
        self._step_accounting = step_accounting
        self._events = events
        self._served = 0

    async def answer(self, incoming: Incoming) -> Reply:
        """Give our state.

        Raises:
            Refusal: no usable state (503), another layout or task (409), enough others served (429).
        """
        training = self._training
        request = decode_request(incoming)
        if training.summary() is None:
            raise Refusal(503, "no state to give yet")
        layout, sidecar = training.spec.layout, training.spec.sidecar
        if (request.layout_hash, request.sidecar_hash) != (layout.hash, sidecar.hash):
            raise Refusal(409, "our parameters have another layout than you expect")
        if request.task_hash != training.task_hash:
            raise Refusal(409, "our task is another one")
        if self._served >= MAX_AT_ONCE:
            raise Refusal(429, "state_server our state to others right now; ask again or elsewhere")
        self._served += 1
        try:
            steps = self._step_accounting.steps(training.lineage)
            reply, head = await offer(training.board, training.spec, training.lineage, steps)
        except PoisonedVectorError as error:
            self._served -= 1
            raise Refusal(503, f"our own state is unusable: {error}") from error
        except BaseException:
            self._served -= 1
            raise

        def ended(sent: bool) -> None:
            self._served -= 1
            if sent:
                self._tell(incoming.sender, head)

        return Reply(reply.meta, vector=reply.vector, on_end=ended)

    def _tell(self, peer: str, head: StateHead) -> None:
        self._events.emit(
            "state-served",
            f"gave state of version {head.policy_version} to {short(peer)}",
            peer=peer,
            policy_version=head.policy_version,
            params_hash=head.params_hash,
        )
