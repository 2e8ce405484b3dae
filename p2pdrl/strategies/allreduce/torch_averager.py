"""Exact averaging through torch.distributed, in a child process of each member.

For each view the first member's process opens a store on a free port, and its daemon tells the port to those
who ask on route ``reduce``, which the swarm authenticates. The store and the connections of
torch.distributed authenticate nobody: hence only where ``node.trusted_network`` says so.

Views, who is doubted and who has to catch up are the same as with the swarm's own connections
(`reduce_scatter`). When somebody is gone, the others' processes fail at once; a member whose daemon is frozen
is found by `LivenessCheck`, one whose process alone is frozen by torch's timeout. Whoever fails asks all
others whether they are alive, then for a new view: there the round is done again.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import msgspec
import numpy as np

from p2pdrl.config.strategy import Grouped
from p2pdrl.errors import ConfigError, PeerUnreachableError, WireError, WorkerError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.calls import HOLD
from p2pdrl.group.round_collector import UpdatePosition, leader_ends
from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.allreduce.averager import (
    ROUTE,
    Average,
    Averager,
    Backend,
    ReduceAnswer,
    ReduceRequest,
    RoundContribution,
)
from p2pdrl.strategies.allreduce.group_process import GroupProcess, GroupRank, Sum, SumOrder
from p2pdrl.strategies.allreduce.reduce_scatter import AverageMemory
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["TIMEOUT_S", "TorchAverager", "TorchBackend"]

TIMEOUT_S = 15.0
"""How long torch waits for a member; longer where the strategy's deadline is."""
SLACK_S = 5.0
"""A member whose daemon is alive has the strategy's deadline; torch waits at least so much longer."""
PORT_S = 5.0
"""How long an asker waits for the store's port."""
CALM_S = (0.25, 5.0)
"""Pause after the second failure in a row before a new view is asked for; doubles, up to the greatest."""


class TorchBackend(Backend):
    """Makes averagers; see `averager.Backend`.

    Raises:
        ConfigError: this node may not, or can't.
    """

    def __init__(self, context: StrategyContext, config: Grouped, memory: AverageMemory) -> None:
        if not context.trusted_network:
            raise ConfigError(
                "torch.distributed listens without authentication; where everybody who reaches this machine "
                "may be trusted set node.trusted_network = true on each node, else take backend = own"
            )
        if context.group_process is None:
            raise ConfigError("this node starts no processes for torch.distributed: take backend = own")
        self.context, self.config, self.memory = context, config, memory
        self.process: GroupProcess = context.group_process
        self.timeout = AdaptiveTimeout(config.deadline_s)
        self._failures = 0
        self._carrier = ""

    async def start(self) -> None:
        """Have the first process made."""
        await self.process.start(self.context.size, max(TIMEOUT_S, self.config.deadline_s + SLACK_S))

    async def stop(self) -> None:
        """End the processes."""
        await self.process.stop()

    def averager(
        self, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool
    ) -> TorchAverager:
        """Return one for ``view``; see `averager.Backend`."""
        return TorchAverager(self, group, view, raw=first if raw else -1, spread=spread)

    def succeeded(self) -> None:
        """A round was done."""
        self._failures = 0

    def carries(self, carrier: str) -> None:
        """Tell people what carries vectors, when that is something else than before."""
        if carrier != self._carrier:
            self._carrier = carrier
            self.context.swarm.tell("torch", f"vectors travel through torch.distributed ({carrier})")

    def failed(self, why: str) -> float:
        """Tell people; return how many seconds to wait before the next try."""
        self._failures += 1
        self.context.swarm.tell("torch-failed", f"the group of processes broke: {why}", warning=True)
        if self._failures == 1:
            return 0.0
        return min(CALM_S[0] * 2.0 ** min(self._failures - 2, 16), CALM_S[1])


class TorchAverager(Averager):
    """`Averager` for one view.

    Args:
        raw: the round whose vectors travel as float32 whatever the config says; -1 for none.
        spread: whether it is measured how far the parts are apart.
    """

    def __init__(
        self, backend: TorchBackend, group: Group, view: GroupView, *, raw: int, spread: bool
    ) -> None:
        super().__init__(backend.context, group, view, backend.timeout)
        self._backend, self._raw, self._spread = backend, raw, spread
        self._others = [member for member in view.members if member != self._me]
        loop = asyncio.get_running_loop()
        self._port: asyncio.Future[int] = loop.create_future()
        self._joined = loop.create_task(self._join(), name="torch-join")

    async def _average(self, number: int, part: RoundContribution) -> Average:
        try:
            await asyncio.shield(self._joined)
            average = await (self._with_others if self._others else self._alone)(number, part)
        except WorkerError as error:
            await self._begin_anew(str(error))
        self._backend.succeeded()
        return average

    def _silent(self) -> list[str]:
        return self._others

    async def serve(self, incoming: Incoming, ask: ReduceRequest) -> Reply:
        """Tell a member the port of our store.

        Raises:
            Refusal: we have none (409), or not yet (503).
        """
        del incoming
        if ask.what != "store" or self._me != self.view.members[0]:
            raise Refusal(409, "this group averages through torch.distributed, and its store is elsewhere")
        await asyncio.wait([self._port], timeout=HOLD * PORT_S)
        if self._port.cancelled():
            raise Refusal(409, "the group's view has ended")
        if not self._port.done():
            raise Refusal(503, "the store isn't open yet")
        return Reply(msgspec.msgpack.encode(ReduceAnswer(self._port.result())))

    def close(self) -> None:
        """See `Averager`."""
        self._port.cancel()
        self._joined.cancel()

    async def closed(self) -> None:
        """See `Averager`."""
        await asyncio.wait([self._joined])
        await self._backend.process.leave()
        if not self._joined.cancelled():
            self._joined.result()

    # Rendezvous

    async def _join(self) -> None:
        """Meet the other members; when that fails, wait for the view's end."""
        if not self._others:
            return
        process, rank = self._backend.process, self.view.members.index(self._me)
        try:
            hosts = [self._group.address(peer).host for peer in self._others]
            if rank == 0:
                self._port.set_result(await process.host(hosts))
            port = self._port.result() if rank == 0 else await self._ask_port()
            place = GroupRank(rank, len(self.view.members), hosts[0], port)
            self._backend.carries(await process.join(place))
        except (WorkerError, PeerUnreachableError) as error:
            await self._begin_anew(str(error))

    async def _ask_port(self) -> int:
        """Ask the first member for its store's port, until the view ends."""
        host, ask = self.view.members[0], ReduceRequest("store", self.view.key, 0)

        async def attempt() -> int:
            answer = await self._group.call(host, ROUTE, ask, deadline_s=PORT_S)
            head: ReduceAnswer = codec.decode(answer.meta, ReduceAnswer, "port")
            if not 0 < head.number < 1 << 16:
                raise WireError(f"{host} answered no port: {head.number}")
            return head.number

        return await self._group.insist(host, attempt)

    async def _begin_anew(self, why: str) -> NoReturn:
        """Doubt who doesn't answer, and ask for a new view until this one ends, and we with it."""
        await asyncio.sleep(self._backend.failed(why))
        await self._group.break_up(self.view, why)

    # Averaging

    async def _with_others(self, number: int, part: RoundContribution) -> Average:
        out, max_abs = self._backend.memory.results[number % 2], self._context.max_abs
        bf16 = self._backend.config.compression == "bf16" and number != self._raw
        order = SumOrder(
            number=number,
            vector=part.vector,
            weight=part.weight,
            policy_version=part.policy_version,
            learning_rate=part.learning_rate,
            max_abs=max_abs,
            bf16=bf16,
            spread=self._spread,
            left=part.left,
        )
        got = await self._backend.process.sum(order, out)
        if len(got.weights) != len(self.view.members):
            raise WorkerError(f"the group has {len(got.weights)} members instead of {len(self.view.members)}")
        if not got.sound:
            self._context.swarm.tell(
                "poisoned", f"the average of round {number} is NaN or too great, and isn't used", warning=True
            )
            out[:] = 0
            nothing = (0.0,) * len(got.weights)
            got = got._replace(weights=nothing, squares=nothing, norm=0.0, sound=True)
        size = len(self.view.members)
        travelled = 2 * (size - 1) * out.size * (2 if bf16 else 4) // size if any(got.weights) else 0
        return Average(
            vector=out,
            weights=got.weights,
            versions=got.versions,
            norm=got.norm,
            spread=_spread(got),
            bytes_out=travelled,
            bytes_in=travelled,
            round_trips=2,
            learning_rates=got.learning_rates,
            ends_update=leader_ends(map(UpdatePosition, self.view.members, got.weights, got.lefts)),
        )

    async def _alone(self, number: int, part: RoundContribution) -> Average:
        out, vector = self._backend.memory.results[number % 2], part.vector

        def work() -> float:
            np.copyto(out, np.float32(0) if vector is None else vector)
            return float(np.linalg.norm(out))

        await asyncio.sleep(0)  # others run between two rounds, though nobody is waited for
        norm = await heavy(out.nbytes, work)
        return Average(
            vector=out,
            weights=(part.weight,),
            versions=(part.policy_version,),
            norm=norm,
            spread=0.0,
            learning_rates=(part.learning_rate,),
        )


def _spread(got: Sum) -> float:
    """Σ w_k ‖x_k − mean‖² / Σ w_k, from norms alone."""
    total = sum(got.weights)
    if not total or not any(got.squares):
        return 0.0
    energy = sum(weight * square for weight, square in zip(got.weights, got.squares, strict=True))
    return max(0.0, energy / total - got.norm**2)
