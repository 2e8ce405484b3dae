"""Policies on their way from the learner's node to those who act, or hand them on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.clock import Clock
from p2pdrl.errors import LayoutMismatchError, TensorError, TransportError, WorkerError
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import ROUTE, Enlist, FetchPolicy, SentUnroll, UnrollReceipt
from p2pdrl.tensors.shared_policy import PolicyCopies
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Refusal, Reply, Transport

__all__ = ["PolicyFollower", "PolicyServer", "ask_policy", "keep_policy"]

DEADLINE_S = 10.0
SLOWEST_BYTES_S = 1e6
FETCH_EVERY_S = 0.1
REST_TIMES = 9.0
"""Between two fetches; more often than a tenth of the time none is under way."""


async def ask_policy(
    transport: Transport,
    learner: str,
    address: Address,
    message: Enlist | SentUnroll | FetchPolicy,
    content: memoryview | None = None,
    *,
    max_bytes: int,
    moved_bytes: int,
) -> tuple[bytes, npt.NDArray[np.uint8] | None]:
    """Call a learner that may answer with its policy; return the answer, and that.

    Args:
        content: of an unroll.
        max_bytes: no policy larger than that is taken.
        moved_bytes: what the deadline is to suffice for.

    Raises:
        TransportError: it can't be reached, refuses, or is too slow.
    """
    got: list[npt.NDArray[np.uint8]] = []

    def into(_: bytes, nbytes: int) -> memoryview | None:
        if nbytes > max_bytes:
            return None
        got.append(np.empty(nbytes, np.uint8))
        return got[0].data

    answer = await transport.call(
        address,
        learner,
        ROUTE,
        msgspec.msgpack.encode(message),
        vector=content,
        into=into,
        deadline_s=DEADLINE_S + moved_bytes / SLOWEST_BYTES_S,
        lane="bulk",
    )
    return answer.meta, got[0] if got and answer.vector_nbytes else None


def keep_policy(copies: PolicyCopies, policy: npt.NDArray[np.uint8]) -> int:
    """Let actors have a policy; return its version.

    Raises:
        LayoutMismatchError: it is of another network.
        PoisonedVectorError: a number in it isn't finite.
    """
    if policy.nbytes != copies.nbytes:
        raise LayoutMismatchError(f"a policy of {policy.nbytes} bytes")
    return copies.write(policy)


class PolicyServer:
    """Gives out the newest policy of a learner of this node.

    It is read from the memory that is shared with the learner once a version, however many ask for it.

    Args:
        copies: tells that memory; raises WorkerError while there is none.
    """

    def __init__(self, copies: Callable[[], PolicyCopies]) -> None:
        self._copies = copies
        self._newest: tuple[int, npt.NDArray[np.uint8]] | None = None
        self.reads = 0
        """How often the memory was read."""

    def newest(self) -> tuple[int, npt.NDArray[np.uint8]] | None:
        """Return the newest policy and its version; None while there is none."""
        copies = self._copies()
        version = copies.version
        if version is None:
            return None
        if self._newest is None or self._newest[0] != version:
            content = copies.read()
            if content is None:
                return self._newest
            self.reads += 1
            self._newest = int(content[:8].view(np.uint64)[0]), content
        return self._newest

    def answer(self, held: int) -> Reply:
        """Return a receipt, with the policy if it is newer than version ``held``."""
        newest = self.newest()
        if newest is None:
            return Reply(msgspec.msgpack.encode(UnrollReceipt(0)))
        version, content = newest
        return Reply(
            msgspec.msgpack.encode(UnrollReceipt(version)), vector=content.data if version > held else None
        )

    def fetched(self, asked: FetchPolicy, task_hash: str) -> Reply:
        """Serve `FetchPolicy`.

        Raises:
            Refusal: another task (409), no learner yet (503).
        """
        if asked.task_hash != task_hash:
            raise Refusal(409, "our task is another one")
        try:
            return self.answer(asked.held)
        except WorkerError as error:
            raise Refusal(503, str(error)) from error


class PolicyFollower:
    """Keeps a copy of a learner's newest policy, for actors that send their unrolls to this node.

    Args:
        learner: tells whose, by id, and where that is; None while nobody learns.
        copies: where it is kept.
        max_bytes: no policy larger than that is taken.
    """

    def __init__(
        self,
        *,
        task_hash: str,
        transport: Transport,
        learner: Callable[[], tuple[str, Address] | None],
        copies: Callable[[], PolicyCopies],
        named: Callable[[str], str],
        clock: Clock,
        events: EventLog,
        max_bytes: int,
    ) -> None:
        self._task_hash = task_hash
        self._transport = transport
        self._learner = learner
        self._copies = copies
        self._named = named
        self._clock = clock
        self._events = events
        self._max_bytes = max_bytes
        self._follows = ""
        self.version = -1
        """Of the newest; -1 while there is none."""

    async def run(self) -> None:
        """Fetch for ever."""
        while True:
            began_s = self._clock.monotonic()
            wanted = self._learner()
            if wanted is not None:
                try:
                    await self._fetch(*wanted)
                except (TransportError, TensorError) as error:
                    self._events.remind("experience", f"{self._named(wanted[0])} gives no policy: {error}")
            took_s = self._clock.monotonic() - began_s
            await asyncio.sleep(max(FETCH_EVERY_S, REST_TIMES * took_s))

    async def _fetch(self, learner: str, address: Address) -> None:
        if learner != self._follows:
            self._follows, self.version = learner, -1  # versions of two learners don't compare
        copies = self._copies()
        message = FetchPolicy(self._task_hash, self.version)
        answer, policy = await ask_policy(
            self._transport, learner, address, message, max_bytes=self._max_bytes, moved_bytes=copies.nbytes
        )
        codec.decode(answer, UnrollReceipt, "learner's answer")
        if policy is not None:
            self.version = keep_policy(copies, policy)
