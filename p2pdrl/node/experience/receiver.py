"""Takes in unrolls of other nodes' actors, into lanes of the learner's ring of shared memory.

Nothing that came is believed: its length, its layout and all its numbers are looked at before the learner
sees it. Parameters go back with the answer, read from the learner's memory once a version, however many
actors there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.node.children.actors import ActorPool
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import Enlist, Enlisted, ExperienceRoute, FetchPolicy, SentUnroll
from p2pdrl.node.experience.policy import PolicyServer
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.shared_policy import PolicyImage
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["ExperienceReceiver", "RemoteActor"]

INLINE_BYTES = 1 << 20
"""More numbers of an unroll than these are looked at in a thread."""


@dataclass
class RemoteActor:
    """A lane that somebody's actor fills, as far as it has come."""

    node: str
    boot: int
    environments: int
    """It has, at most; it acts in `acting` of them."""
    acting: int = 0
    serial: int = 0
    life: int = 0
    unrolls: int = 0
    env_steps: int = 0
    repeated: int = 0
    lost: int = 0
    filling: bool = False


class ExperienceReceiver(ExperienceRoute):
    """Serves `messages.ROUTE` on a node that learns.

    Args:
        spec: tells the layout of parameters and sidecar.
        named: the name that people gave a node.
        stale: told of each unroll how many versions the policy that acted was older than the newest.
    """

    def __init__(
        self,
        *,
        task_hash: str,
        pool: ActorPool,
        spec: Callable[[], BoardSpec],
        strikes: SwarmView,
        named: Callable[[str], str],
        events: EventLog,
        stale: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(strikes)
        self._task_hash = task_hash
        self._pool = pool
        self._spec = spec
        self._named = named
        self._events = events
        self._claims: dict[int, RemoteActor] = {}
        self._stale = stale
        self._policy = PolicyServer(lambda: pool.policy)
        self.unrolls = 0
        """That came, of all nodes so far."""

    @property
    def reads(self) -> int:
        """How often the learner's memory was read for its parameters."""
        return self._policy.reads

    @property
    def claims(self) -> dict[int, RemoteActor]:
        """Who fills which lane."""
        return self._claims

    async def _answer(self, incoming: Incoming) -> Reply:
        """Serve a call.

        Raises:
            Refusal: malformed (400), another task or a lane not the sender's (409),
                numbers or a length that can't be (422), no room for another unroll yet (423), no lanes left
                or no policy yet (503).
        """
        try:
            message: Enlist | SentUnroll | FetchPolicy = codec.decode(
                incoming.meta, Enlist | SentUnroll | FetchPolicy, "unroll's head"
            )
        except WireError as error:
            raise Refusal(400, str(error)) from error
        if isinstance(message, Enlist):
            policy = await self._policy.newest()
            return self._enlist(incoming.sender, message, policy)
        if isinstance(message, FetchPolicy):
            return await self._policy.fetched(message, self._task_hash)
        return await self._take(incoming, message)

    def _enlist(self, sender: str, wanted: Enlist, policy: PolicyImage | None) -> Reply:
        if wanted.task_hash != self._task_hash:
            raise Refusal(409, "our task is another one")
        spec = self._pool.spec
        free = [number for number in range(spec.local, len(spec.shares)) if number not in self._claims]
        own = sorted(number for number, claim in self._claims.items() if claim.node == sender)
        if [(wanted.boot, one) for one in wanted.environments] == [
            (self._claims[number].boot, self._claims[number].environments) for number in own
        ]:
            return self._enlisted(own, policy)  # it goes on: what it sends again is still known
        lanes = sorted(own + free)[: len(wanted.environments)]
        if len(lanes) < len(wanted.environments):
            raise Refusal(
                503,
                f"takes unrolls of {spec.remote} actors at most (node.learner.remote_actors), and "
                f"{len(self._claims)} are here",
            )
        if max(wanted.environments) > max(spec.shares):
            raise Refusal(422, f"an actor here has {max(spec.shares)} environments at most")
        enlisted = self._enlisted(lanes, policy)
        for number in own:
            self._release(number)
        for number, environments in zip(lanes, wanted.environments, strict=True):
            self._claims[number] = RemoteActor(sender, wanted.boot, environments)
            self._pool.lanes[number].started()
        self._events.emit(
            "actors-enlisted",
            f"{len(lanes)} actor{'s' * (len(lanes) > 1)} of {self._named(sender)} work for this learner",
            peer=sender,
            lanes=lanes,
        )
        return enlisted

    def _enlisted(self, lanes: Sequence[int], policy: PolicyImage | None) -> Reply:
        if policy is None:
            raise Refusal(503, "no parameters yet")
        enlisted = Enlisted(
            lanes=tuple(lanes),
            board=msgspec.msgpack.encode(self._spec().to_wire()),
            unrolls=msgspec.msgpack.encode(self._pool.spec.to_wire()),
        )
        return Reply(msgspec.msgpack.encode(enlisted), vector=policy.whole.data)

    async def _take(self, incoming: Incoming, sent: SentUnroll) -> Reply:
        claim = self._claims.get(sent.lane)
        if claim is None or (claim.node, claim.boot) != (incoming.sender, sent.boot):
            raise Refusal(409, "that lane isn't yours: enlist again")
        if sent.serial <= claim.serial:
            claim.repeated += 1
            return await self._policy.answer(sent.held, differences=sent.differences)
        spec, lane = self._pool.spec, self._pool.lanes[sent.lane]
        environments = sent.environments
        if environments > claim.environments:
            raise self._wrong(
                incoming, f"an unroll of {environments} environments, of at most {claim.environments}"
            )
        if incoming.vector_nbytes != (nbytes := spec.content_nbytes(environments)):
            raise self._wrong(incoming, f"an unroll of {incoming.vector_nbytes} bytes, not {nbytes}")
        if claim.filling or not lane.may_begin:
            raise Refusal(423, "no room for another unroll yet")
        claim.filling = True
        try:
            await incoming.read_vector_into(lane.fill(environments))
            arrays = lane.filled(environments)
            if spec.checked_nbytes(environments) <= INLINE_BYTES:
                spec.check(arrays)
            else:
                await asyncio.to_thread(spec.check, arrays)
        except PoisonedVectorError as error:
            self._strikes.strike(incoming.sender, str(error))
            raise Refusal(422, str(error)) from error
        finally:
            claim.filling = False
        if self._claims.get(sent.lane) is not claim:
            raise Refusal(409, "that lane isn't yours any more: enlist again")
        followed = claim.serial + 1, claim.life, claim.acting
        if claim.serial and (sent.serial, sent.life, environments) != followed:
            claim.lost += sent.serial - claim.serial - 1
            lane.started()  # its streams begin anew
        claim.serial, claim.life, claim.acting = sent.serial, sent.life, environments
        env_steps = int(arrays["valid"].sum())
        claim.unrolls += 1
        claim.env_steps += env_steps
        version = self._pool.policy.version or 0
        acted = min(sent.policy_version, version)
        self.unrolls += 1
        self._stale(version - acted)
        lane.commit(
            policy_version=acted,
            episodes=min(sent.episodes, arrays["episode_returns"].size),
            env_steps=env_steps,
            environments=environments,
            counted=sent.counted,
        )
        lane.running = True  # from now on batches may wait for the next
        return await self._policy.answer(sent.held, differences=sent.differences)

    def _wrong(self, incoming: Incoming, why: str) -> Refusal:
        self._strikes.strike(incoming.sender, why)
        return Refusal(422, why)

    def keep(self, nodes: Collection[str]) -> None:
        """Free the lanes of all other nodes: they send to another learner from now on."""
        for number, claim in list(self._claims.items()):
            if claim.node not in nodes:
                self._release(number)

    def sweep(self, alive: Collection[str]) -> None:
        """Free the lanes of nodes that are gone: nobody waits for their unrolls any more."""
        gone = {claim.node for claim in self._claims.values()}.difference(alive)
        for number, claim in list(self._claims.items()):
            if claim.node in gone:
                self._release(number)
        for node in gone:
            self._events.emit("actors-left", f"the actors of {self._named(node)} are gone", peer=node)

    def _release(self, number: int) -> None:
        del self._claims[number]
        if self._pool.lanes:
            self._pool.lanes[number].running = False

    def figures(self) -> dict[str, object]:
        """What came, by node and lane; JSON types."""
        rows = [
            {
                "lane": number,
                "node": claim.node,
                "name": self._named(claim.node),
                "environments": claim.acting or claim.environments,
                "unrolls": claim.unrolls,
                "env_steps": claim.env_steps,
                "repeated": claim.repeated,
                "lost": claim.lost,
            }
            for number, claim in sorted(self._claims.items())
        ]
        return {
            "actors": rows,
            "policies": dict(self._policy.given),
            "refused": {str(status): count for status, count in self.refused.items()},
        }
