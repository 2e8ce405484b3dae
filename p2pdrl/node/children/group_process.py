"""The processes of this node in which torch.distributed runs: one at work, one that stands by."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import ConfigError, TensorError, WireError, WorkerError
from p2pdrl.node.children.child_process import ChildOutput, ProcessLink
from p2pdrl.strategies.allreduce.group_process import GroupRank, Sum, SumOrder
from p2pdrl.strategies.offload import heavy
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.torch_group.protocol import (
    Broken,
    FromGroup,
    GroupReduced,
    Host,
    Hosting,
    Joined,
    JoinGroup,
    Reduce,
    ToGroup,
    decode_from_group,
    frame,
    memory_nbytes,
)

__all__ = ["GroupLink", "GroupProcesses"]

READY_S = 60.0
"""torch is imported by then, even on a busy machine."""

Answer = TypeVar("Answer", bound=FromGroup)


class GroupLink(ProcessLink):
    """A running group process."""

    NAME = "group process"

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: ChildOutput) -> None:
        super().__init__(process, sock, output)
        self._busy = False

    @classmethod
    async def spawn(cls, region: SharedRegion, size: int, config: LearnerConfig) -> GroupLink:
        """Start a process and wait until it has imported torch.

        Raises:
            WorkerError: it can't be started, or wasn't ready in time.
        """
        options = {
            "--memory": region.fd,
            "--size": size,
            "--device": config.device,
            "--threads": config.threads,
        }
        quiet = {"OMP_NUM_THREADS": str(config.threads), "TORCH_NCCL_BLOCKING_WAIT": "1"}
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | quiet
        link = cls(*await cls.launch("p2pdrl.workers.torch_group.process", options, environment, [region.fd]))
        try:
            await link._ready()
        except BaseException:
            await link.kill()
            raise
        return link

    @property
    def usable(self) -> bool:
        """Whether it lives, as far as known, and waits for orders."""
        return not self._busy and self._process.returncode is None

    async def ask(self, order: ToGroup, kind: type[Answer], deadline_s: float) -> Answer:
        """Give an order and wait for its answer.

        The process isn't `usable` any more when this is cancelled, or when it doesn't answer.

        Raises:
            WorkerError: it failed, is gone, or doesn't answer.
            WireError: it answers something else: a bug.
        """
        if not self.usable:
            raise WorkerError("the group process is gone, or still at work")
        self._busy = True
        try:
            async with asyncio.timeout(deadline_s):
                await self.send(frame(order))
                answer = await self._message()
        except TimeoutError:
            raise WorkerError(f"the group process didn't answer within {deadline_s:.0f} s") from None
        self._busy = False
        if isinstance(answer, Broken):
            raise WorkerError(answer.message)
        if not isinstance(answer, kind):
            raise WireError(f"the group process answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._message()
        except TimeoutError:
            raise WorkerError(f"the group process wasn't ready after {READY_S:.0f} s") from None

    async def _message(self) -> FromGroup:
        while True:
            for body in await self.receive():
                return decode_from_group(body)


SLACK_S = 2.0
"""A process gives up by itself after the timeout; one that doesn't is killed so much later."""


class GroupProcesses:
    """Implements `strategies.allreduce.group_process.GroupProcess`.

    torch takes a processor second to import. So once a group stands, the next process is made, and a view
    whose process hangs (another member's is frozen) costs no more than a kill. A process that failed in
    order, because another member is gone, joins the next group itself.
    """

    def __init__(
        self,
        config: LearnerConfig,
        spawn: Callable[[SharedRegion, int, LearnerConfig], Coroutine[Any, Any, GroupLink]] = GroupLink.spawn,
    ) -> None:
        self._config = config
        self._spawn = spawn
        self._size, self._timeout_s = 0, 0.0
        self._region: SharedRegion | None = None
        self._link: GroupLink | None = None
        self._spare: asyncio.Task[GroupLink] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of the one at work."""
        return () if self._link is None else (self._link.pid,)

    async def start(self, size: int, timeout_s: float) -> None:
        """Have a process made, in the background."""
        await self.stop()
        self._size, self._timeout_s = size, timeout_s
        try:
            self._region = SharedRegion.create(memory_nbytes(size), "group")
        except TensorError as error:
            raise ConfigError(f"this node can't average through torch: {error}") from error
        self._stand_by()

    async def host(self, others: Sequence[str]) -> int:
        """Open a store where a new group meets; return its port."""
        order = Host(tuple(others), self._timeout_s)
        return (await self._ask(order, Hosting)).port

    async def join(self, place: GroupRank) -> str:
        """Meet the others; return what carries vectors."""
        answer = await self._ask(JoinGroup(*place, timeout_s=self._timeout_s), Joined)
        self._stand_by()
        return answer.backend

    async def sum(self, order: SumOrder, out: Float32Array) -> Sum:
        """Average with the others."""
        region, vector = self._memory, order.vector
        own, result = np.frombuffer(region.buf, np.float32).reshape(2, self._size)
        if vector is not None:
            await heavy(vector.nbytes, lambda: np.copyto(own, vector))
        answer = await self._ask(
            Reduce(
                number=order.number,
                weight=order.weight,
                policy_version=order.policy_version,
                learning_rate=order.learning_rate,
                max_abs=order.max_abs,
                bf16=order.bf16,
                spread=order.spread,
                left=order.left,
            ),
            GroupReduced,
        )
        await heavy(out.nbytes, lambda: np.copyto(out, result))
        return Sum(
            weights=tuple(row.weight for row in answer.rows),
            versions=tuple(row.policy_version for row in answer.rows),
            learning_rates=tuple(row.learning_rate for row in answer.rows),
            squares=tuple(row.square for row in answer.rows),
            lefts=tuple(row.left for row in answer.rows),
            norm=answer.norm,
            sound=answer.sound,
        )

    async def leave(self) -> None:
        """Have nothing more to do with that group."""
        link = self._link
        if link is not None and not link.usable:
            self._link = None
            await link.kill()
            self._stand_by()

    async def stop(self) -> None:
        """End all processes."""
        link, spare, region = self._link, self._spare, self._region
        self._link = self._spare = self._region = None
        if spare is not None:
            spare.cancel()
            await asyncio.gather(spare, return_exceptions=True)
            if not spare.cancelled() and spare.exception() is None:
                await spare.result().kill()
        if link is not None:
            await link.kill()
        if region is not None:
            region.close()

    @property
    def _memory(self) -> SharedRegion:
        if self._region is None:
            raise WorkerError("no group process was started")
        return self._region

    async def _ask(self, order: ToGroup, kind: type[Answer]) -> Answer:
        link = await self._at_work()
        return await link.ask(order, kind, self._timeout_s + SLACK_S)

    async def _at_work(self) -> GroupLink:
        """The process at work, or else the one that stands by; cancelling loses none."""
        await self.leave()
        if self._link is None:
            spare = self._stand_by()
            await asyncio.wait([spare])
            self._spare = None
            self._link = spare.result()
        return self._link

    def _stand_by(self) -> asyncio.Task[GroupLink]:
        """Have the next process made, unless it is."""
        spare = self._spare
        if spare is None or (spare.done() and spare.exception() is not None):
            made = self._spawn(self._memory, self._size, self._config)
            spare = self._spare = asyncio.create_task(made, name="group-process")
        return spare
