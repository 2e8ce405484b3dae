"""The node as its HTTP API sees it: implements `api.protocol.NodeView` over the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy.typing as npt

from p2pdrl.api.answers import ApiRefusal
from p2pdrl.api.protocol import EventSource
from p2pdrl.config.mode import stop_from, strategy_from
from p2pdrl.errors import CheckpointError, ConfigError, WireError
from p2pdrl.ids import is_node_id
from p2pdrl.membership.invites import Inviter
from p2pdrl.membership.records import BadRecordError, SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.context import NodeContext
from p2pdrl.node.events import EventLog
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.state.checkpoints import Checkpointer
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.tensors.inference_slots import InferenceSpec, PolicyAnswer
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Refusal

__all__ = ["ApiView"]

T = TypeVar("T")


class ApiView:
    """What people and scripts may see and do; the attributes are as in `NodeView`."""

    def __init__(
        self,
        *,
        name: str,
        node_id: str,
        token: str,
        swarm_keys: tuple[bytes, ...],
        keyed: bool,
        open_metrics: bool,
        data_dir: str,
        events: EventLog,
        leave: Callable[[str], None],
    ) -> None:
        self.name = name
        self.node_id = node_id
        self.token = token
        self.swarm_keys = swarm_keys
        self.keyed = keyed
        self.inviter: Inviter | None = None
        self.open_metrics = open_metrics
        self.data_dir = data_dir
        self._events = events
        self._leave = leave
        self._context: NodeContext | None = None
        self._reporter: StatusReporter | None = None
        self._meters: Meters | None = None
        self._follower: RecordFollower | None = None
        self._set_roles: Callable[[Sequence[str]], None] | None = None

    def attach(
        self,
        context: NodeContext,
        reporter: StatusReporter,
        meters: Meters,
        follower: RecordFollower,
        set_roles: Callable[[Sequence[str]], None],
    ) -> None:
        """Give the view what it shows, and who changes roles, once it is there."""
        self._set_roles = set_roles
        self._context, self._reporter, self._meters, self._follower = context, reporter, meters, follower

    @property
    def operator_keys(self) -> tuple[bytes, ...]:
        """Public keys of those who may command; none where everybody may."""
        if self._context is None:
            return ()
        records = self._context.membership.records
        return tuple(operator.public_key for operator in records.operators)

    def status(self) -> dict[str, object]:
        """The document of ``/v1/status``."""
        return _need(self._reporter).status()

    def peers(self) -> list[dict[str, object]]:
        """The document of ``/v1/peers``."""
        return _need(self._reporter).peers()

    def health(self) -> tuple[bool, list[str]]:
        """Whether this node is well, and why not."""
        return _need(self._reporter).health()

    def ready(self) -> tuple[bool, list[str]]:
        """Whether this node trains, and why not."""
        return _need(self._reporter).ready()

    def metrics(self) -> bytes:
        """The page of ``/metrics``."""
        return _need(self._meters).render()

    def events(self) -> EventSource:
        """The event log."""
        return self._events

    async def leave(self) -> None:
        """Begin to leave the swarm."""
        self._leave("asked to")

    async def pause(self, *, paused: bool, swarm: bool) -> None:
        """Hold this node's learner, or everybody's, or let it go on."""
        _need(self._follower).check_open("a pause counts")
        if swarm:
            self._settings().pause(paused=paused)
        else:
            _need(self._follower).hold(_need(_need(self._context).training), paused=paused)

    def mode(self) -> dict[str, object]:
        """The document of ``/v1/mode``."""
        return _need(self._reporter).mode()

    def rounds(self) -> list[dict[str, object]]:
        """The document of ``/v1/rounds``."""
        return _need(self._reporter).rounds()

    def history(self) -> dict[str, object]:
        """The document of ``/v1/history``."""
        return _need(self._reporter).history()

    def evaluations(self) -> list[dict[str, object]]:
        """The document of ``/v1/evaluations``."""
        return _need(self._reporter).evaluations()

    async def trace(self, seconds: float) -> dict[str, object]:
        """The timeline of this node's pipeline."""
        return await _need(_need(self._context).training).traces.collect(seconds)

    async def set_mode(self, mode: str, sets: Sequence[str]) -> dict[str, object]:
        """Propose another mode to the swarm."""
        _need(_need(self._context).training)
        return _named(self._settings().propose_mode(strategy_from(mode, sets)))

    def records(self) -> dict[str, object]:
        """The document of ``/v1/records``."""
        return _need(self._context).membership.records.document()

    async def submit(self, record: bytes) -> dict[str, object]:
        """Give the swarm a record that an operator has signed."""
        membership = _need(self._context).membership
        if not membership.records.roots:
            raise ApiRefusal(409, "the swarm's key names no operators here; every member may command")
        self._check_say()  # others take no settings from it, whoever has signed them
        try:
            decoded: SwarmRecord = codec.decode(record, SwarmRecord, "swarm record")
        except WireError as error:
            raise ApiRefusal(400, str(error)) from error
        kind = settings.KINDS.get(decoded.key)
        value = None if kind is None else settings.decode(decoded.value, kind)
        if value is None:
            raise ApiRefusal(
                400, f"this node can't read such a record {decoded.key!r}: is it of another p2pdrl?"
            )
        held = membership.records.get(decoded.key)
        if held is None or held.value != decoded.value:  # else an operator signs for another, as it is
            self._check_setting(value)
        try:
            membership.submit(decoded)
        except BadRecordError as error:
            raise ApiRefusal(error.status, str(error)) from error
        if membership.records.get(decoded.key) != decoded:
            raise ApiRefusal(409, f"a newer record {decoded.key!r} is there by now; try again")
        return _named(decoded)

    def _check_setting(self, value: msgspec.Struct) -> None:
        """See whether the swarm could take what is new.

        Raises:
            ConfigError: it can't.
        """
        if isinstance(value, settings.ModeSetting):
            _need(self._follower).check_mode(value.strategy)
        if isinstance(value, settings.StopSetting):
            _need(self._follower).check_open("its stop condition counts")
        if isinstance(value, settings.PauseSetting):
            _need(self._follower).check_open("a pause counts")

    async def set_stop(self, sets: Sequence[str]) -> dict[str, object]:
        """Give the swarm another stop condition."""
        _need(_need(self._context).training)
        _need(self._follower).check_open("its stop condition counts")
        return _named(self._settings().set_stop(stop_from(sets)))

    async def halt(self, reason: str) -> dict[str, object]:
        """End the training everywhere."""
        _need(_need(self._context).training)
        return _named(self._settings().end_all(reason[:200]))

    async def ban(self, node: str, *, reason: str, banned: bool) -> dict[str, object]:
        """Have all refuse a node, or take it again."""
        if not is_node_id(node):
            raise ConfigError("a node's id has 32 hex digits")
        return _named(self._settings().ban(node, reason=reason, banned=banned))

    async def set_roles(self, roles: Sequence[str]) -> None:
        """Have this node do something else for the swarm."""
        _need(_need(self._context).training)
        _need(self._set_roles)(roles)

    @property
    def max_act_rows(self) -> int:
        """Most observations of one request for actions."""
        return _need(_need(self._context).inference).max_rows

    async def act_spec(self) -> InferenceSpec:
        """What the policy takes and gives."""
        return await _need(_need(self._context).inference).spec()

    async def act(self, obs_NX: npt.NDArray[Any], *, greedy: bool) -> PolicyAnswer:
        """Actions of the newest policy."""
        return await _need(_need(self._context).inference).act(obs_NX, greedy=greedy)

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its path."""
        return await self._checkpointer().save()

    async def export(self) -> bytes:
        """The present state as a checkpoint file."""
        return await self._checkpointer().export()

    async def dial_back(self, host: str, port: int, nonce: str) -> dict[str, object]:
        """Dial who asks."""
        try:
            return await _need(self._context).reachability.dial_for(host, port, nonce)
        except Refusal as refusal:
            raise ApiRefusal(refusal.status, refusal.reason) from refusal

    def config(self) -> dict[str, object]:
        """The configuration in force; it holds no secrets, only where they are."""
        context = _need(self._context)
        document = msgspec.to_builtins(context.config)
        if context.training is not None:
            document["task"] = msgspec.to_builtins(context.training.task)
        return {"task": document["task"], "node": document["node"]}

    def meeting_points(self) -> list[str]:
        """Addresses for a newcomer, ours first: of members that can take it in."""
        context = _need(self._context)
        others = [str(address) for address in context.learners().values()]
        return [str(context.address), *others]

    def addresses_of(self, node_id: str) -> list[str]:
        """Where a member is now, if it is known."""
        members = () if self._context is None else self._context.membership.members()
        return [member.address for member in members if member.id == node_id]

    def _check_say(self) -> None:
        """Refuse what the others would refuse.

        Raises:
            ConfigError: this node's certificate gives it no say in the swarm's settings.
        """
        context = _need(self._context)
        if not context.steers:
            may = " and ".join(sorted(context.allowed or ()))
            raise ConfigError(
                f"this node was invited as {may} alone, without a say in that: ask another node"
            )

    def _settings(self) -> RecordFollower:
        """Who changes the swarm's settings; refused while they are of no lineage: founding loses those.

        Raises:
            ApiRefusal: 403 where operators do that.
        """
        records = _need(self._context).membership.records
        if records.roots:
            names = ", ".join(operator.words for operator in records.operators)
            raise ApiRefusal(
                403, f"the swarm is commanded by its operators alone, who sign what they want: {names}"
            )
        self._check_say()
        _need(records.lineage or None)
        return _need(self._follower)

    def _checkpointer(self) -> Checkpointer:
        checkpointer = _need(self._context).checkpointer
        if checkpointer is None:
            raise CheckpointError("this node has no state yet; wait until it trains")
        return checkpointer


def _named(record: SwarmRecord) -> dict[str, object]:
    return {"epoch": record.epoch, "proposer": record.proposer}


def _need(thing: T | None) -> T:
    if thing is None:
        raise CheckpointError("this node is still starting")
    return thing
