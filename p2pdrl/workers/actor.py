"""An actor process: environments, a copy of the policy, unrolls into shared memory.

Started by the daemon (`node.children.actors`) as ``python -m p2pdrl.workers.actor --fd N --parent PID --ring
FD --policy FD``. One turn of its loop: wait until the learner grants an unroll, copy the newest parameters,
run T steps in its environments, commit the unroll. Observations and rewards are raw. The actor keeps no state
that must survive: it ends when it is killed, when the daemon dies or closes its socket.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import SharedPolicy
from p2pdrl.tensors.unroll_ring import UnrollLane, UnrollRing, UnrollSpec
from p2pdrl.workers.child import PollPause, child_main
from p2pdrl.workers.protocol import (
    ActorReady,
    FrameBuffer,
    StartActor,
    decode_start_actor,
    frame,
)

if TYPE_CHECKING:
    from p2pdrl.rl.rollout_worker import RolloutWorker

__all__ = ["main", "make_unroll"]

READ_BYTES = 1 << 16


def make_unroll(worker: RolloutWorker, lane: UnrollLane, policy: SharedPolicy) -> bool:
    """Collect one unroll into this actor's lane if the learner allows it; return whether that happened."""
    if not lane.may_begin:
        return False
    acting = policy.read(worker.parameters_D)
    if acting is None:
        return False
    from p2pdrl.rl.sources.unrolls import pack  # torch is slow to import: not before it is needed

    arrays = lane.begin()
    raw = worker.collect(acting.exploration, acting.mean_X, acting.scale_X)
    pack(raw, arrays)
    steps = int(raw.valid_TB.sum())
    lane.commit(policy_version=acting.version, episodes=len(raw.episodes), env_steps=steps)
    return True


def _live(sock: socket.socket, options: argparse.Namespace) -> None:
    start = _receive_start(sock)
    import torch

    torch.set_num_threads(start.threads)
    from p2pdrl.rl.rollout_worker import RolloutWorker

    spec = UnrollSpec.from_wire(msgspec.msgpack.decode(start.spec))
    worker = RolloutWorker(
        msgspec.json.decode(start.task, type=TaskConfig),
        start.seed,
        spec.shares[start.number],
        allow_import=start.allow_import,
        step_delay_s=start.step_delay_s,
        first=sum(spec.shares[: start.number]),
        total=sum(spec.shares[: spec.local]),
    )
    lane = UnrollRing(SharedRegion.attach(options.ring, spec.nbytes), spec).lanes[start.number]
    policy_nbytes = SharedPolicy.nbytes_of(start.policy_size, worker.obs_shape)
    policy_region = SharedRegion.attach(options.policy, policy_nbytes, writable=False)
    policy = SharedPolicy(policy_region, start.policy_size, worker.obs_shape)
    if lane.enter():
        print("actor: the unroll that was under way when its predecessor ended is dropped", file=sys.stderr)
    sock.sendall(frame(ActorReady()))
    pause = PollPause()
    while True:
        if make_unroll(worker, lane, policy):
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
    return child_main("actor", _live, ["--ring", "--policy"])


if __name__ == "__main__":
    sys.exit(main())
