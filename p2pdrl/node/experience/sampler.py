"""Brings samples of the swarm's replay memory to this node's learner, and its TD errors back.

The memory is in shards on other nodes. Each sample is drawn from all of them by their masses
(`replay.shards`), a few samples ahead of the learner. A shard that doesn't answer is left out until it does:
it costs its rows and nothing else.

As in one process, the learner makes ``gradient_steps`` gradients for so many environment steps as an unroll
has, and not more: rows that came to the shards since they hold enough are what it may learn for. Several
learners share them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.clock import Clock
from p2pdrl.config.task import ReplayOptions, TaskConfig
from p2pdrl.errors import PoisonedVectorError, TransportError, WireError, WorkerError
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import (
    REPLAY_ROUTE,
    AskRows,
    ExperienceRoute,
    FetchPolicy,
    RowsDrawn,
    SetPriorities,
)
from p2pdrl.node.experience.policy import PolicyServer
from p2pdrl.replay.shards import ERRORS, PRIORITIES, ReplayShards, ShardState
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import PolicyCopies, features_of
from p2pdrl.tensors.unroll_ring import UnrollLane, UnrollRing, UnrollSpec
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport
from p2pdrl.workers.protocol import Hello, Sampled

__all__ = ["ReplaySampler"]

Array = npt.NDArray[Any]

DEADLINE_S = 3.0
SLOWEST_BYTES_S = 2e6
LOOK_EVERY_S = 0.2
"""Between two questions how a shard stands."""
POLL_S = (0.0005, 0.01)
"""Between two looks whether the learner took a sample: at first, and at most."""
SAMPLES_SAVED = 16
"""So many samples may be made up for, when rows came faster than the learner learned from them."""


class Segment(NamedTuple):
    """What part of a sample is of one shard.

    Args:
        begin: its first row in the sample.
        boot: of the shard's node when it gave them.
        indices: where they lie there, N, with their ``serials``.
    """

    shard: str
    begin: int
    boot: int
    indices: Array
    serials: Array


class ReplaySampler(ExperienceRoute):
    """The memory that a learner's samples lie in, and who fills it.

    Args:
        shards: tells the living nodes that hold one, by id.
        learners: tells how many learners there are, this one included.
        strikes: notes who sent what can't be, and knows who is in quarantine.
        named: the name that people gave a node.
        rng: which shards rows come from.
    """

    def __init__(
        self,
        *,
        task: TaskConfig,
        task_hash: str,
        transport: Transport,
        shards: Callable[[], Mapping[str, Address]],
        learners: Callable[[], int],
        strikes: SwarmView,
        named: Callable[[str], str],
        clock: Clock,
        events: EventLog,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(strikes)
        algorithm = task.algorithm
        if not isinstance(algorithm, ReplayOptions):
            raise WorkerError("only algorithms with a replay memory draw from shards of it")
        self._algorithm = algorithm
        self._per_row = algorithm.gradient_steps / (task.env.num_envs * algorithm.unroll_steps)
        self._task_hash = task_hash
        self._transport = transport
        self._where = shards
        self._learners = learners
        self._named = named
        self._clock = clock
        self._events = events
        self._known = ReplayShards(rng)
        self._spec: UnrollSpec | None = None
        self._regions: list[SharedRegion] = []
        self._samples: UnrollLane | None = None
        self._errors: UnrollLane | None = None
        self._copies: PolicyCopies | None = None
        self.policy = PolicyServer(self._policy)
        self._segments: dict[int, list[Segment]] = {}
        self._saved = 0.0
        self.samples = 0
        """That were filled."""
        self.rows: dict[str, int] = {}
        """That came, by the shard's node."""
        self.failed: dict[str, int] = {}
        """Calls that failed, likewise."""

    # the learner's memory

    def open(self, hello: Hello, board: BoardSpec) -> None:
        """Make the memory for what a learner declared.

        Raises:
            TensorError: the system gives no such memory.
        """
        spec = self._spec = UnrollSpec.from_wire(msgspec.msgpack.decode(hello.samples))
        errors = UnrollSpec(ERRORS, spec.shares, spec.slots)
        features = features_of(board)
        size = board.layout.size
        samples = SharedRegion.create(spec.nbytes, "samples")
        back = SharedRegion.create(errors.nbytes, "errors")
        policy = SharedRegion.create(PolicyCopies.nbytes_of(size, features), "policy")
        self._regions = [samples, back, policy]
        (self._samples,) = UnrollRing(samples, spec).lanes
        (self._errors,) = UnrollRing(back, errors).lanes
        self._copies = PolicyCopies(policy, size, features)

    @property
    def opened(self) -> bool:
        """Whether there is memory for a learner's samples."""
        return self._spec is not None

    def fits(self, hello: Hello) -> bool:
        """Whether another learner wants the same samples."""
        return UnrollSpec.from_wire(msgspec.msgpack.decode(hello.samples)) == self._spec

    def told(self) -> tuple[Sampled, list[SharedRegion]]:
        """Return what a learner is told, and whose descriptors go along."""
        samples, errors, policy = (region.nbytes for region in self._regions)
        return Sampled(samples, errors, policy), self._regions

    def close(self) -> None:
        """Free the memory. Nobody may use it afterwards."""
        self._samples = self._errors = self._copies = None
        for region in self._regions:
            region.close()
        self._regions = []

    def _policy(self) -> PolicyCopies:
        if self._copies is None:
            raise WorkerError("the learner isn't built yet")
        return self._copies

    async def _answer(self, incoming: Incoming) -> Reply:
        """Serve a call of a shard's node that wants the policy.

        Raises:
            Refusal: another task (409), unrolls, which shards take (503).
        """
        try:
            message: FetchPolicy = codec.decode(incoming.meta, FetchPolicy, "request for a policy")
        except WireError as error:
            raise Refusal(
                503, "this learner takes no unrolls: send them to a node that holds a shard of the replay"
            ) from error
        return await self.policy.fetched(message, self._task_hash)

    # samples

    async def run(self) -> None:
        """Bring samples and take errors back, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look(), name="shards of the replay")
            group.create_task(self._fill(), name="samples")
            if self._algorithm.prioritized:
                group.create_task(self._prioritize(), name="priorities")

    async def _look(self) -> None:
        """Ask shards how they stand; one that is slow to answer holds up none of the others."""
        asked: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                where = self._where()
                for shard in [name for name in self._known.states if name not in where]:
                    self._lost(shard, "its node is gone")
                if not where:
                    self._events.remind(
                        "experience", "no node holds the replay memory: start one with --roles replay"
                    )
                asked = {shard: task for shard, task in asked.items() if not task.done()}
                for shard, address in where.items():
                    if shard not in asked:
                        asked[shard] = group.create_task(self._stands(shard, address))
                await asyncio.sleep(LOOK_EVERY_S)

    async def _stands(self, shard: str, address: Address) -> None:
        try:
            await self._ask(shard, address, 0, None)
        except (TransportError, PoisonedVectorError) as error:
            self._failed(shard, str(error))

    async def _fill(self) -> None:
        pause_s, most_s = POLL_S
        while True:
            spec, lane = self._spec, self._samples
            if (
                spec is None
                or lane is None
                or lane.waiting >= spec.slots
                or not await self._bring(spec, lane)
            ):
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, most_s)
            else:
                pause_s, _ = POLL_S

    async def _bring(self, spec: UnrollSpec, lane: UnrollLane) -> bool:
        """Fill one slot of the lane, if the learner may learn; tell whether it did."""
        known, algorithm = self._known, self._algorithm
        rows = spec.shares[0]
        minibatches = rows // algorithm.batch_size
        if not (known.count >= max(algorithm.learning_starts, 1) or (known.count and known.full)):
            self._saved = 0.0
            return False
        if self._saved < minibatches:
            return False
        content = lane.fill(rows)
        arrays = spec.views(content, rows)
        segments: list[Segment] = []
        begin = 0
        while begin < rows:
            shares = known.shares()
            if not shares:
                return False
            wanted = known.split(rows - begin, shares)
            where = self._where()
            found = await asyncio.gather(
                *(self._part(spec, shard, where.get(shard), n) for shard, n in wanted.items())
            )
            for shard, part in zip(wanted, found, strict=True):
                if part is None:
                    continue
                drawn, columns = part
                end = begin + drawn.rows
                np.multiply(columns["chances"], shares[shard] * known.count, out=columns["chances"])
                for name, column in columns.items():
                    arrays[name][begin:end] = column
                indices_N, serials_N = columns["indices"].copy(), columns["serials"].copy()
                segments.append(Segment(shard, begin, drawn.boot, indices_N, serials_N))
                begin = end
                self.rows[shard] = self.rows.get(shard, 0) + drawn.rows
        if not algorithm.prioritized:
            arrays["chances"][:] = 1.0
        lane.commit(policy_version=0, episodes=0, env_steps=known.count, environments=rows)
        self._segments[lane.committed] = segments
        for serial in [one for one in self._segments if one <= lane.committed - 3 * spec.slots]:
            del self._segments[serial]  # its learner died with the errors
        self._saved -= minibatches
        self.samples += 1
        return True

    async def _part(
        self, spec: UnrollSpec, shard: str, address: Address | None, rows: int
    ) -> tuple[RowsDrawn, dict[str, Array]] | None:
        """Draw rows from one shard; None where it gives none."""
        if address is None:
            self._lost(shard, "its node is gone")
            return None
        content = bytearray(spec.content_nbytes(rows))
        try:
            drawn = await self._ask(shard, address, rows, memoryview(content))
            if not drawn.rows:
                return None
            columns = spec.views(memoryview(content), rows)
            _check(spec, columns)
        except PoisonedVectorError as error:
            self._strikes.strike(shard, str(error))
            self._failed(shard, str(error))
            return None
        except TransportError as error:
            self._failed(shard, str(error))
            return None
        return drawn, columns

    async def _ask(self, shard: str, address: Address, rows: int, out: memoryview | None) -> RowsDrawn:
        """Ask a shard for rows, and how it stands.

        Raises:
            TransportError: it can't be reached, refuses, or is too slow.
            PoisonedVectorError: it gives another number of rows or bytes.
        """
        if self._strikes.quarantined(shard):
            raise PoisonedVectorError("it is in quarantine")
        length = 0 if out is None else out.nbytes
        answer = await self._transport.call(
            address,
            shard,
            REPLAY_ROUTE,
            msgspec.msgpack.encode(AskRows(self._task_hash, rows)),
            into=lambda _, nbytes: out if nbytes == length else None,
            deadline_s=DEADLINE_S + length / SLOWEST_BYTES_S,
            lane="bulk" if length else "probe",
        )
        drawn: RowsDrawn = codec.decode(answer.meta, RowsDrawn, "shard's answer")
        if drawn.rows not in (0, rows) or answer.vector_nbytes != (length if drawn.rows else 0):
            raise PoisonedVectorError(f"{drawn.rows} rows of {answer.vector_nbytes} bytes, not {rows}")
        if not (drawn.count == 0 or drawn.mass > 0.0):
            raise PoisonedVectorError(f"{drawn.count} rows without mass")
        state = ShardState(drawn.boot, drawn.mass, drawn.count, drawn.appended, drawn.full)
        new = shard not in self._known.states
        came = self._known.heard(shard, state)
        if new:
            self._events.emit(
                "replay-shard", f"draws from the replay memory of {self._named(shard)}", peer=shard
            )
        most = SAMPLES_SAVED * (
            0 if self._spec is None else self._spec.shares[0] / self._algorithm.batch_size
        )
        self._saved = min(self._saved + came * self._per_row / max(self._learners(), 1), most)
        return drawn

    def _failed(self, shard: str, why: str) -> None:
        self.failed[shard] = self.failed.get(shard, 0) + 1
        self._lost(shard, why)

    def _lost(self, shard: str, why: str) -> None:
        if self._known.lost(shard):
            self._events.emit(
                "replay-shard-lost",
                f"draws without the replay memory of {self._named(shard)}: {why}",
                level="warning",
                peer=shard,
            )

    # errors

    async def _prioritize(self) -> None:
        pause_s, most_s = POLL_S
        while True:
            lane = self._errors
            found = None if lane is None else lane.peek()
            if lane is None or found is None:
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, most_s)
                continue
            pause_s, _ = POLL_S
            errors_N = found.arrays["errors"].copy()
            segments = self._segments.pop(found.policy_version, [])
            lane.consume()
            await asyncio.gather(*(self._set(segment, errors_N) for segment in segments))

    async def _set(self, segment: Segment, errors_N: Array) -> None:
        errors_N = errors_N[segment.begin : segment.begin + len(segment.indices)]
        here_N = np.isfinite(errors_N)
        rows = int(here_N.sum())
        address = self._where().get(segment.shard)
        if not rows or address is None or segment.shard not in self._known.states:
            return
        content = bytearray(PRIORITIES.content_nbytes(rows))
        arrays = PRIORITIES.views(memoryview(content), rows)
        arrays["indices"][:] = segment.indices[here_N]
        arrays["serials"][:] = segment.serials[here_N]
        arrays["errors"][:] = errors_N[here_N]
        message = SetPriorities(self._task_hash, segment.boot, rows)
        try:
            await self._transport.call(
                address,
                segment.shard,
                REPLAY_ROUTE,
                msgspec.msgpack.encode(message),
                vector=memoryview(content),
                deadline_s=DEADLINE_S + len(content) / SLOWEST_BYTES_S,
                lane="bulk",
            )
        except TransportError as error:
            self._failed(segment.shard, str(error))

    def figures(self) -> dict[str, object]:
        """What is drawn from, and how often; JSON types."""
        states = self._known.states
        shares = self._known.shares()
        names = sorted({*states, *self.rows, *self.failed})
        rows = [
            {
                "node": name,
                "name": self._named(name),
                "here": name in states,
                "rows": states[name].count if name in states else 0,
                "share": shares.get(name, 0.0),
                "drawn": self.rows.get(name, 0),
                "failed": self.failed.get(name, 0),
            }
            for name in names
        ]
        return {"shards": rows, "rows": self._known.count, "samples": self.samples}


def _check(spec: UnrollSpec, columns: Mapping[str, Array]) -> None:
    """Look at all numbers of rows that a shard gave.

    Raises:
        PoisonedVectorError: one can't be.
    """
    spec.check(columns)
    chances_N, discounts_N = columns["chances"], columns["discounts"]
    if not 0.0 < chances_N.min() <= chances_N.max() <= 1.0 + 1e-9:
        raise PoisonedVectorError("chances of rows aren't between 0 and 1")
    if not 0.0 <= discounts_N.min() <= discounts_N.max() <= 1.0:
        raise PoisonedVectorError("discounts of rows aren't between 0 and 1")
