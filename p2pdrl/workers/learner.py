"""The learner process: model, optimizer, environments; trains and never waits for the network.

Started by the node's supervisor as ``python -m p2pdrl.workers.learner --fd N --parent PID``.
One turn of its loop:

1. read the daemon's messages (pace, progress, others' normaliser moments, stop), before the first
   turn until the pace is known;
2. take what peers changed from the board's inbox: add a delta, or replace everything by a set;
3. collect one unroll and update;
4. publish parameters and sidecar, count the policy version up, report.

The policy version is a Lamport count: a delta or a set carries its sender's, and the greater stays.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import P2PDRLError, UsageError, WorkerError
from p2pdrl.tensors.board import BoardSpec, LearnerBoard
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.transport.codec import decode
from p2pdrl.workers.mailbox import Mailbox
from p2pdrl.workers.parent import die_with_parent
from p2pdrl.workers.protocol import (
    Attach,
    Failed,
    Hello,
    Others,
    Pace,
    Progress,
    Report,
    Start,
    Stop,
    ToLearner,
)

if TYPE_CHECKING:
    from p2pdrl.rl.registry import AnyTrainer

__all__ = ["Learner", "main"]

REPORT_INTERVAL_S = 0.02
IDLE_POLL_S = 0.05
FIRST_WORDS_S = 5.0
"""The longest wait for the daemon's first words; a daemon that is well sends them at once."""


class Learner:
    """One learner's life after its board is attached.

    Args:
        trainer: environments, policy and algorithm.
        board: the learner's end of the board.
        mailbox: messages to and from the daemon.
    """

    def __init__(self, trainer: AnyTrainer, board: LearnerBoard, mailbox: Mailbox) -> None:
        self._trainer = trainer
        self._board = board
        self._mailbox = mailbox
        self._version = 0
        self._updates = 0
        self._env_steps = 0
        self._episodes = 0
        self._returns: list[float] = []
        self._metrics: dict[str, float] = {}
        self._paced = False
        self._paused = False
        self._min_update_s = 0.0
        self._reported_s = float("-inf")
        self._began_s = float("-inf")

    def begin(self, *, restore: bool) -> None:
        """Take up the state on the board, or publish the first one there.

        Raises:
            WorkerError: if the board should hold a state and doesn't.
        """
        if restore:
            restored = self._board.restore()
            if restored is None:
                raise WorkerError("the board holds no readable state to restore")
            vector, sidecar, self._version = restored
            self._trainer.set_state(vector, sidecar, own=True)
        self._take_inbox()
        self._publish()
        self._report()

    def run(self) -> None:
        """Train until told to stop, or until the daemon is gone."""
        going = self._obey_first_words()
        while going and self._obey(self._mailbox.receive(self._wait_s())):
            changed = self._take_inbox()
            if not self._paused and time.monotonic() >= self._began_s + self._min_update_s:
                self._update()
                changed = True
            if changed:
                self._publish()
            self._report_if_due()
        self._publish()
        self._report()
        self._mailbox.drain(1.0)

    def _obey_first_words(self) -> bool:
        """Read until the pace is known and nothing follows, so that no update is made without it.

        A learner that is started again while the swarm is paused must not train, and one that joins
        must know the others' normalisation first.
        """
        until_s = time.monotonic() + FIRST_WORDS_S
        messages: list[ToLearner] = []
        while messages or (not self._paced and time.monotonic() < until_s):
            messages = self._mailbox.receive(IDLE_POLL_S)
            if not self._obey(messages):
                return False
            self._mailbox.flush()
        return True

    def _wait_s(self) -> float:
        if self._paused:
            return IDLE_POLL_S
        rest_s = self._began_s + self._min_update_s - time.monotonic()
        return min(max(rest_s, 0.0), IDLE_POLL_S)

    def _obey(self, messages: list[ToLearner]) -> bool:
        go_on = True
        for message in messages:
            match message:
                case Stop():
                    go_on = False
                case Pace(paused=paused, max_updates_per_s=rate):
                    self._paced = True
                    self._paused = paused
                    self._min_update_s = 1.0 / rate if rate > 0 else 0.0
                case Progress(fraction=fraction):
                    self._trainer.set_progress(fraction)
                case Others(moments=moments):
                    self._trainer.set_other_moments(
                        {
                            name: Moments.from_wire(decode(data, Any, "moments"))
                            for name, data in moments.items()
                        }
                    )
                case Start() | Attach():
                    raise WorkerError("the daemon began the conversation anew")
        return go_on

    def _take_inbox(self) -> bool:
        taken = self._board.take()
        if taken is None:
            return False
        if taken.kind == "set":
            self._trainer.set_state(taken.vector, taken.sidecar)
            self._version = taken.policy_version
        else:
            self._trainer.add_delta(taken.vector)
            self._version = max(self._version, taken.policy_version)
        return True

    def _update(self) -> None:
        self._began_s = time.monotonic()
        stats = self._trainer.step()
        self._version += 1
        self._updates += 1
        self._env_steps += stats.env_steps
        self._episodes += len(stats.episodes)
        self._returns += [episode_return for episode_return, _ in stats.episodes]
        self._metrics = stats.metrics

    def _publish(self) -> None:
        self._board.publish(self._trainer.flat, self._trainer.sidecar(), self._version)

    def _report_if_due(self) -> None:
        self._mailbox.flush()
        due = time.monotonic() >= self._reported_s + REPORT_INTERVAL_S
        if due and not self._mailbox.backlog:
            self._report()

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        moments = {
            name: msgspec.msgpack.encode(value.to_wire())
            for name, value in self._trainer.own_moments().items()
        }
        self._mailbox.send(
            Report(
                policy_version=self._version,
                updates=self._updates,
                env_steps=self._env_steps,
                episodes=self._episodes,
                returns=self._returns,
                metrics=self._metrics,
                moments=moments,
            )
        )
        self._returns = []


def _build(start: Start) -> tuple[AnyTrainer, str]:
    import torch

    torch.set_num_threads(start.threads)
    from p2pdrl.rl.registry import build_trainer
    from p2pdrl.rl.trainer import resolve_device

    device = str(resolve_device(start.device))

    task = msgspec.json.decode(start.task, type=TaskConfig)
    trainer = build_trainer(
        task, start.seed, device, allow_import=start.allow_import, step_delay_s=start.step_delay_s
    )
    return trainer, device


def _live(mailbox: Mailbox) -> None:
    messages = mailbox.receive(None)
    start = messages[0] if messages else None
    if not isinstance(start, Start):
        raise WorkerError("the daemon didn't say what to train")
    trainer, device = _build(start)
    spec = BoardSpec(trainer.layout, trainer.sidecar_layout)
    mailbox.send(
        Hello(
            device=device,
            spec=msgspec.msgpack.encode(spec.to_wire()),
        )
    )
    attach, fd = mailbox.attach()
    region = SharedRegion.attach(fd, attach.nbytes)
    learner = Learner(trainer, LearnerBoard(region, spec), mailbox)
    learner.begin(restore=attach.restore)
    learner.run()


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.learner")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(socket.socket(fileno=arguments.fd))
    try:
        _live(mailbox)
    except WorkerError as error:
        print(f"learner ended: {error}", file=sys.stderr)
        return 1
    except P2PDRLError as error:
        mailbox.send(Failed(message=str(error), usage=isinstance(error, UsageError)))
        mailbox.drain(1.0)
        return error.exit_code
    finally:
        mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
