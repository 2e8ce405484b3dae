"""Policies on their way from the learner's node to those who act, or hand them on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.clock import Clock
from p2pdrl.errors import LayoutMismatchError, TensorError, TransportError, WorkerError
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import ROUTE, Enlist, FetchPolicy, SentUnroll, UnrollReceipt
from p2pdrl.tensors.shared_policy import PolicyCopies, PolicyImage
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Refusal, Reply, Transport

__all__ = ["PolicyFollower", "PolicyServer", "ask_policy", "keep_policy"]

DEADLINE_S = 10.0
SLOWEST_BYTES_S = 1e6
FETCH_EVERY_S = 0.1
REST_TIMES = 9.0
"""Between two fetches; more often than a tenth of the time none is under way."""
INLINE_NUMBERS = 1 << 17
"""A policy of more parameters is read and put together in a thread."""

P = ParamSpec("P")
T = TypeVar("T")


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


async def keep_policy(
    copies: PolicyCopies, receipt: UnrollReceipt, policy: npt.NDArray[np.uint8] | None
) -> int | None:
    """Let actors have what came with a receipt.

    Returns:
        Version that they have then; -1 where it must come whole next time; None where nothing came.

    Raises:
        LayoutMismatchError: it is of another network.
        PoisonedVectorError: a number in it isn't finite.
        WireError: differences are malformed.
    """
    if policy is None:
        return None
    if not receipt.begins:
        if policy.nbytes != copies.nbytes:
            raise LayoutMismatchError(f"a policy of {policy.nbytes} bytes")
        return copies.write(policy)
    held = copies.read()
    version = copies.version
    if held is None or version is None:
        return -1
    if version not in receipt.begins:  # with another actor's unroll came a newer one, maybe
        return version if version >= receipt.policy_version else -1
    image = await _here_or_in_a_thread(
        copies.size,
        PolicyImage.after,
        held,
        receipt.begins,
        policy,
        size=copies.size,
        features=copies.features,
    )
    if copies.version != version:
        return copies.version
    return copies.write(image.whole) if image.checksum == receipt.checksum else -1


async def _here_or_in_a_thread(numbers: int, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Compute something on so many numbers without holding up the loop."""
    if numbers <= INLINE_NUMBERS:
        return call(*args, **kwargs)
    return await asyncio.to_thread(call, *args, **kwargs)


class PolicyServer:
    """Gives out the newest policy of a learner of this node: whole, or as differences from what one has.

    It is read from the memory that is shared with the learner once a version, however many ask for it.

    Args:
        copies: tells that memory; raises WorkerError while there is none.
    """

    def __init__(self, copies: Callable[[], PolicyCopies]) -> None:
        self._copies = copies
        self._image: PolicyImage | None = None
        self._from: PolicyCopies | None = None
        """What the newest was read from."""
        self._reading = asyncio.Lock()
        self.reads = 0
        """How often the memory was read."""
        self.given = {"whole": 0, "differences": 0}
        """How often a policy went with an answer, as what."""

    async def newest(self) -> PolicyImage | None:
        """Return the newest policy; None while there is none."""
        async with self._reading:
            copies = self._copies()
            version = copies.version
            if version is None:
                return None
            before = self._image if self._from is copies else None
            if before is None or before.version != version:
                content = copies.read()
                if content is not None:
                    self.reads += 1
                    first = functools.partial(PolicyImage.first, size=copies.size, features=copies.features)
                    then = first if before is None else before.then
                    self._image = await _here_or_in_a_thread(copies.size, then, content)
                    self._from = copies
            return self._image

    async def answer(self, held: int, *, differences: bool) -> Reply:
        """Return a receipt, with the policy if it is newer than version ``held``.

        Args:
            differences: whether it may come as such.
        """
        image = await self.newest()
        if image is None:
            return Reply(msgspec.msgpack.encode(UnrollReceipt(0)))
        if image.version <= held:
            return Reply(msgspec.msgpack.encode(UnrollReceipt(image.version)))
        if differences and (since := image.since(held)) is not None:
            begins, content = since
            self.given["differences"] += 1
            receipt = UnrollReceipt(image.version, begins, image.checksum)
            return Reply(msgspec.msgpack.encode(receipt), vector=memoryview(content))
        self.given["whole"] += 1
        return Reply(msgspec.msgpack.encode(UnrollReceipt(image.version)), vector=image.whole.data)

    async def fetched(self, asked: FetchPolicy, task_hash: str) -> Reply:
        """Serve `FetchPolicy`.

        Raises:
            Refusal: another task (409), no learner yet (503).
        """
        if asked.task_hash != task_hash:
            raise Refusal(409, "our task is another one")
        try:
            return await self.answer(asked.held, differences=asked.differences)
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
        message = FetchPolicy(self._task_hash, self.version, differences=True)
        answer, policy = await ask_policy(
            self._transport, learner, address, message, max_bytes=self._max_bytes, moved_bytes=copies.nbytes
        )
        receipt: UnrollReceipt = codec.decode(answer, UnrollReceipt, "learner's answer")
        if (version := await keep_policy(copies, receipt, policy)) is not None:
            self.version = version
