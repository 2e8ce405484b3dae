"""Where a node's first state comes from: its own checkpoint, a donor, or the task's initial weights."""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress

import msgspec

from p2pdrl.errors import CheckpointError, WireError
from p2pdrl.ids import founded_by, new_lineage
from p2pdrl.node.accounting.counters import Counts, NodeCounts
from p2pdrl.node.accounting.facts import ForgedFactError
from p2pdrl.node.accounting.progress_tracker import LineageFacts, ProgressTracker
from p2pdrl.node.bootstrap.joining import JoinInfo, SwarmOrigin
from p2pdrl.node.bootstrap.starting_point import StartingPoint
from p2pdrl.node.context import NodeContext
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.checkpoints import Checkpoint, CheckpointStore, as_state
from p2pdrl.node.state.state_transfer import TransferredState
from p2pdrl.node.training import Training

__all__ = ["first_state", "founded_at", "load_checkpoint", "restore_steps"]

UnsignedCounts = tuple[str, Counts, int, tuple[tuple[int, Counts], ...]]
"""A node's counts in checkpoints of earlier releases."""
ORPHANED_S = 10.0
ASKED = 8
"""Members that are asked for the swarm's counts before a node decides between it and its own checkpoint."""


async def load_checkpoint(
    store: CheckpointStore, progress_tracker: ProgressTracker, events: EventLog
) -> Checkpoint | None:
    """Return the newest whole checkpoint of an earlier run, and tell what was passed over."""

    def readable(checkpoint: Checkpoint) -> None:
        restore_steps(progress_tracker.scratch(), checkpoint)

    loaded = await asyncio.to_thread(store.load_latest, accept=readable)
    for reason in loaded.skipped:
        events.emit("checkpoint-skipped", reason, level="warning")
    if loaded.checkpoint is not None:
        restore_steps(progress_tracker, loaded.checkpoint)
    return loaded.checkpoint


def restore_steps(progress_tracker: ProgressTracker, checkpoint: Checkpoint) -> None:
    """Give the progress tracker back what the checkpoint knew of counts and moments.

    What isn't signed by the node that it is about is forgotten. Checkpoints of earlier releases have no
    signatures: of those our own counts stay, as the disk is ours, and others' come again from them.

    Raises:
        CheckpointError: that part of it can't be read.
    """
    meta = checkpoint.meta
    try:
        if "facts" in meta:
            facts = msgspec.msgpack.decode(base64.b64decode(meta["facts"]), type=LineageFacts)
            for lineage, rows in facts.items():
                for row in rows:
                    with suppress(ForgedFactError):
                        progress_tracker.merge_counts({lineage: [row]})
        else:
            for lineage, wire in dict(meta["counts"]).items():
                for node, base, folded, boots in msgspec.convert(wire[0], list[UnsignedCounts]):
                    if node == progress_tracker.signer.node_id:
                        progress_tracker.recall_unsigned(lineage, NodeCounts(base, folded, boots))
        progress_tracker.restore_moments(dict(msgspec.msgpack.decode(base64.b64decode(meta["moments"]))))
    except (KeyError, IndexError, TypeError, ValueError, msgspec.MsgspecError, WireError) as error:
        raise CheckpointError(f"the counts of the checkpoint can't be read: {error}") from error


async def first_state(
    context: NodeContext,
    training: Training,
    origin: SwarmOrigin,
    checkpoint: Checkpoint | None,
    start: StartingPoint | None = None,
) -> tuple[TransferredState | None, str]:
    """Return the state to begin from (None: the task's initial weights) and its lineage.

    Args:
        checkpoint: of an earlier run of this task, if any.
        start: what a swarm that this node founds begins from, in place of the initial weights.

    Raises:
        CheckpointError: the checkpoint is of another layout.
        ConfigError: the one to start from doesn't fit the task.
    """
    own = None if checkpoint is None else await asyncio.to_thread(as_state, checkpoint, training.spec)
    info = origin.info
    if context.config.node.debug.perturb_start > 0:
        return None, _lineage(context, origin, origin.lineage) if info is None else info.lineage
    if info is not None and not (own is not None and await _stays(own, info, context, training)):
        context.state = "fetching"
        found = await training.adoptions.first(_Orphaned(context).judge)
        if found is not None:
            donor, state = found
            alive = context.learners()
            context.progress_tracker.follow(state.head.lineage)  # its founder may tell of more than others
            if context.gossip is not None and donor in alive:
                await context.gossip.tell(donor, alive[donor])  # its counts and moments
            training.tell_adopted(donor, state, "joined")
            _tell_not_needed(context, start, "the swarm's parameters are taken, as by every node that joins")
            return state, state.head.lineage
    if own is None and start is not None:
        return _begin_from(context, training, start), new_lineage(context.membership.public_key)
    if own is None:
        return None, _lineage(context, origin, origin.lineage)
    _tell_not_needed(context, start, "this node goes on from its own parameters, of its last checkpoint")
    context.events.emit(
        "resumed-checkpoint",
        f"goes on from its checkpoint at version {own.head.policy_version}; "
        "another --data-dir would begin afresh",
        policy_version=own.head.policy_version,
        params_hash=own.head.params_hash,
        optimizer=own.sidecar is not None,
    )
    return own, own.head.lineage if info is not None else _lineage(context, origin, own.head.lineage)


def _begin_from(context: NodeContext, training: Training, start: StartingPoint) -> TransferredState:
    state = start.begin(training, context.progress_tracker)
    context.events.emit(
        "started-from",
        f"begins with the parameters and the normalisation of {start.words}; optimizer, counts and schedules "
        "begin anew",
        source=start.source,
        params_hash=state.head.params_hash,
    )
    return state


def _tell_not_needed(context: NodeContext, start: StartingPoint | None, why: str) -> None:
    if start is not None:
        context.events.emit("start-not-needed", f"{why}, not those of --from {start.source}")


def _lineage(context: NodeContext, origin: SwarmOrigin, earlier: str) -> str:
    """Return the lineage of a state that nobody gave us: the earlier one, or one that this node founds.

    In a swarm with operators a lineage's first settings are its founder's. Where this node isn't that, and
    doesn't remember them, the earlier lineage would stay without any.
    """
    membership = context.membership
    remembered = origin.settled and origin.lineage == earlier
    ours = founded_by(earlier, membership.public_key)
    if earlier and (remembered or ours or not membership.records.roots):
        return earlier
    if earlier:
        text = f"the settings of lineage {earlier} aren't remembered here: founds another one"
        context.events.emit("lineage-founded", text, level="warning")
    return new_lineage(membership.public_key)


async def _stays(own: TransferredState, info: JoinInfo, context: NodeContext, training: Training) -> bool:
    """Whether our checkpoint is at least as good as the swarm's state, by the rules of an exchange.

    How far another lineage is, its members say by signed counts.
    """
    if own.head.lineage != info.lineage:
        if context.gossip is not None:
            some = list(context.alive().items())[:ASKED]
            await asyncio.gather(*(context.gossip.tell(node, address) for node, address in some))
        return context.rank(info.lineage) < context.rank(own.head.lineage)
    limit = getattr(training.task.strategy, "max_staleness", 0)
    return info.policy_version - own.head.policy_version <= int(limit)


def founded_at(checkpoint: Checkpoint | None, now_s: float) -> float:
    """Return the wall time at which the swarm was founded: as an earlier run has it, or now."""
    stop = None if checkpoint is None else checkpoint.meta.get("stop")
    return float(stop["founded_at"]) if isinstance(stop, dict) and "founded_at" in stop else now_s


class _Orphaned:
    """Notices that nobody is left who could give a state.

    That happens when the founder dies before anybody has its state. After ten such seconds the
    living node with the lowest id goes on by itself, and the others adopt from it.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._since_s: float | None = None

    def judge(self) -> bool:
        """Tell whether this node is to go on by itself."""
        context = self._context
        now_s = context.clock.monotonic()
        alive = context.learners()
        if any(self._may_give(node, now_s) for node in alive):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        waited = now_s - self._since_s >= ORPHANED_S
        return context.config.node.learns and waited and context.node_id < min(alive, default="g")

    def _may_give(self, node: str, now_s: float) -> bool:
        gossip = self._context.gossip
        found = None if gossip is None else gossip.table.get(node, now_s)
        return found is None or found[0].state not in ("joining", "fetching")
