"""An actor process: environments, a copy of the policy, unrolls into shared memory.

Started by the daemon (`node.children.actors`) as ``python -m p2pdrl.workers.actor --fd N --parent PID --ring
FD --policy FD …``. One turn of its loop: wait until the learner grants an unroll, copy the newest parameters,
run T steps in its environments, commit the unroll. Observations and rewards are raw. The actor keeps no state
that must survive: it ends when it is killed, when the daemon dies or closes its socket.

With ``node.actors.inference = "batched"`` it has no policy: it asks the node's inference process at each step
(`StepAsker`), and sleeps until the answer is there.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.tensors.inference_slots import StepLane, StepLanes
from p2pdrl.tensors.shared_memory import Doorbell, SharedRegion
from p2pdrl.tensors.shared_policy import SharedPolicy
from p2pdrl.tensors.unroll_ring import Assignment, UnrollLane, UnrollRing, UnrollSpec
from p2pdrl.workers.child import PollPause, child_main, made_for_good
from p2pdrl.workers.protocol import (
    ActorReady,
    FrameBuffer,
    StartActor,
    actor_seed,
    decode_start_actor,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from p2pdrl.rl.policy import Acted
    from p2pdrl.rl.rollout_worker import RolloutWorker

__all__ = ["AssignedWorker", "StepAsker", "main", "make_unroll"]

READ_BYTES = 1 << 16
ASK_AGAIN_S = 1.0
"""After which an actor that waits rings once more: whoever was to hear it may have died."""


class StepAsker:
    """An `AskedPolicy`: the node's inference process, through this actor's rows of shared memory.

    Args:
        asked: the doorbell of that process.
        answered: this actor's own.
        sock: the daemon's, which is looked at while it waits.

    Attributes:
        policy: what that process acts with; None where there is one in any case.
    """

    def __init__(self, lane: StepLane, asked: Doorbell, answered: Doorbell, sock: socket.socket) -> None:
        self.policy: SharedPolicy | None = None
        self._lane = lane
        self._asked = asked
        self._answered = answered
        self._sock = sock
        self._oldest: int | None = None
        self._tensors: dict[str, Tensor] | None = None

    def begin(self) -> None:
        """An unroll begins: batches wait for this actor."""
        self._oldest = None
        self._lane.acting = True

    def end(self) -> int:
        """It has ended; return the oldest policy version that acted in it."""
        self._lane.acting = False
        return self._oldest or 0

    def ask(self, obs_BX: npt.NDArray[Any], noise_B: Tensor, state_BS: Tensor | None) -> Acted:
        """See `AskedPolicy.ask`.

        Raises:
            WorkerError: the daemon is gone.
        """
        import torch

        from p2pdrl.rl.policy import Acted

        if self._tensors is None:
            self._tensors = {name: torch.from_numpy(rows) for name, rows in self._lane.answered.items()}
        environments = len(obs_BX)  # or fewer than the lane has rows
        rows = self._lane.asked
        tensors = {name: tensor[:environments] for name, tensor in self._tensors.items()}
        rows["obs"][:environments] = obs_BX
        rows["noise"][:environments] = noise_B.numpy()
        if state_BS is not None:
            rows["state"][:environments] = state_BS.numpy()
        self._answered.hush()
        self._lane.ask()
        self._asked.ring()
        self._wait()
        version = self._lane.version
        self._oldest = version if self._oldest is None else min(self._oldest, version)
        if state_BS is not None:
            state_BS.copy_(tensors["state"])
        return Acted(tensors["actions"], tensors["log_probs"], tensors["values"], tensors.get("taken"))

    def _wait(self) -> None:
        while self._lane.waits:
            daemon = self._sock.fileno()
            readable, _, _ = select.select([self._answered.waiter, daemon], [], [], ASK_AGAIN_S)
            if not readable:
                self._asked.ring()
            elif daemon in readable and not self._sock.recv(READ_BYTES):
                raise WorkerError("the daemon is gone")
            self._answered.hush()


def make_unroll(worker: RolloutWorker, lane: UnrollLane, policy: SharedPolicy | StepAsker) -> bool:
    """Collect one unroll into this actor's lane if the learner allows it; return whether that happened."""
    if not lane.may_begin:
        return False
    from p2pdrl.rl.sources.unrolls import pack  # torch is slow to import: not before it is needed

    if isinstance(policy, StepAsker):
        if policy.policy is not None and not policy.policy.writes:
            return False
        arrays = lane.begin(worker.environments)
        policy.begin()
        raw = worker.collect()
        version = policy.end()
    else:
        acting = policy.read(worker.parameters_D)
        if acting is None:
            return False
        arrays = lane.begin(worker.environments)
        raw = worker.collect(acting)
        version = acting.version
    pack(raw, arrays)
    lane.commit(
        policy_version=version,
        episodes=len(raw.episodes),
        env_steps=int(raw.valid_TB.sum()),
        environments=worker.environments,
    )
    return True


class AssignedWorker:
    """A worker that acts in the environments which the daemon assigns to a lane, from one unroll to the next.

    Where their number changes all begin anew: a batch of environments is stepped as a whole.

    Args:
        make: makes a worker for an assignment; told how many there were before.
        own: in force while nothing is assigned.
    """

    def __init__(
        self, make: Callable[[Assignment, int], RolloutWorker], lane: UnrollLane, own: Assignment
    ) -> None:
        self._make, self._lane = make, lane
        self._before = 0
        self._assignment = lane.assignment or own
        self._worker = make(self._assignment, 0)

    def follow(self) -> RolloutWorker:
        """Return the worker for the next unroll."""
        found, old = self._lane.assignment, self._assignment
        if found is None or found == old:
            return self._worker
        self._assignment = found
        if found.environments == old.environments:
            self._worker.act_as(found.first, found.total)
        else:
            self._worker.close()
            self._before += 1
            self._worker = self._make(found, self._before)
            self._lane.started()
        return self._worker


def _live(sock: socket.socket, options: argparse.Namespace) -> None:
    start = _receive_start(sock)
    with made_for_good():
        import torch

        torch.set_num_threads(start.threads)
        from p2pdrl.rl.rollout_worker import RolloutWorker

    spec = UnrollSpec.from_wire(msgspec.msgpack.decode(start.spec))
    asker: StepAsker | None = None
    if start.steps is not None:
        lanes = StepLanes(SharedRegion.attach(options.steps, start.steps.nbytes), start.steps)
        asked = Doorbell.attach(-1, options.asked)
        answered = Doorbell.attach(options.answered, -1)
        asker = StepAsker(lanes.lanes[start.number], asked, answered, sock)
    task = msgspec.json.decode(start.task, type=TaskConfig)

    def make(assignment: Assignment, before: int) -> RolloutWorker:
        return RolloutWorker(
            task,
            actor_seed(start.seed, 0, before),
            assignment.environments,
            allow_import=start.allow_import,
            step_delay_s=start.step_delay_s,
            first=assignment.first,
            total=assignment.total,
            asked=asker,
        )

    lane = UnrollRing(SharedRegion.attach(options.ring, spec.nbytes), spec).lanes[start.number]
    own = Assignment(
        spec.shares[start.number], sum(spec.shares[: start.number]), sum(spec.shares[: spec.local])
    )
    assigned = AssignedWorker(make, lane, own)
    obs_shape = assigned.follow().obs_shape
    policy_nbytes = SharedPolicy.nbytes_of(start.policy_size, obs_shape)
    policy_region = SharedRegion.attach(options.policy, policy_nbytes, writable=False)
    shared = SharedPolicy(policy_region, start.policy_size, obs_shape)
    policy: SharedPolicy | StepAsker = shared
    if asker is not None:
        policy, asker.policy = asker, shared
    if lane.enter():
        print("actor: the unroll that was under way when its predecessor ended is dropped", file=sys.stderr)
    sock.sendall(frame(ActorReady()))
    pause = PollPause()
    while True:
        if make_unroll(assigned.follow(), lane, policy):
            pause.reset()
            continue
        readable, _, _ = select.select([sock], [], [], pause.next_s())
        if readable and not sock.recv(READ_BYTES):
            return


def _receive_start(sock: socket.socket) -> StartActor:
    frames = FrameBuffer()
    while True:
        data = sock.recv(READ_BYTES)
        if not data:
            raise WorkerError("the daemon is gone")
        for body in frames.feed(data):
            return decode_start_actor(body)


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    return child_main("actor", _live, ["--ring", "--policy", "--steps", "--asked", "--answered"])


if __name__ == "__main__":
    sys.exit(main())
