"""The learner process: model, optimizer, environments; trains, and waits only where its learner mode says so.

Started by the node's supervisor as ``python -m p2pdrl.workers.learner --fd N --parent PID``.
One turn of its loop:

1. read the daemon's messages (pace, progress, others' normaliser moments, another learner mode, stop),
   before the first turn until the pace is known;
2. bring another learner mode into force (`learner_modes`), and under one of stages another order
   (`pipeline.stage_runner`);
3. take what peers changed from the board's inbox: add a delta, or replace everything by a set (`replica`);
4. collect one unroll, take what peers changed meanwhile, and update; some learner modes send gradients or
   parameters and wait meanwhile (`learner_modes`);
   as a stage of a pipeline the learner takes part in another's updates instead, unless it is the first;
5. publish parameters and sidecar, let actor processes go on with them, report.

A Hogwild worker (`JoinHogwild`) is a further learner of the same node: it steps the vector that the first one
shares with it and has no board.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.tensors.board import BoardSpec, LearnerBoard
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.transport.codec import decode
from p2pdrl.workers.child import (
    PollPause,
    die_with_parent,
    keep_freed_memory,
    made_for_good,
    print_without_blocking,
    report_of,
)
from p2pdrl.workers.learner_modes import ModeSwitcher
from p2pdrl.workers.mailbox import Mailbox
from p2pdrl.workers.pipeline.protocol import Finish, Measure, StartStage, Trace
from p2pdrl.workers.pipeline.stage_runner import StageRunner
from p2pdrl.workers.protocol import (
    Attach,
    Collect,
    DataShare,
    DrawRows,
    FromLearner,
    Hello,
    JoinHogwild,
    LearnerPace,
    LendActors,
    Others,
    Prioritize,
    Progress,
    ReplayRows,
    Report,
    RequestAnswer,
    Sampled,
    SampleSlots,
    Start,
    Stop,
    ToLearner,
    WorkMode,
)
from p2pdrl.workers.replay_shard import ReplayShard, insert_limiter
from p2pdrl.workers.replica import Replica

if TYPE_CHECKING:
    from p2pdrl.rl.registry import SourceMaker
    from p2pdrl.rl.trainer import Trainer

__all__ = ["Learner", "main"]

REPORT_INTERVAL_S = 0.02
PAUSED_REPORT_INTERVAL_S = 0.5
"""While it is paused and nothing changes."""
IDLE_POLL_S = 0.05
BEAT_S = 1.0
"""Between two heartbeats."""
FIRST_MESSAGES_S = 5.0
"""The longest wait for the daemon's first messages; a healthy daemon sends them at once."""
MEMORY = 0.8
"""Part of how fast earlier updates were that one more leaves."""


class Learner:
    """The loop of one learner, once its memory is attached.

    Args:
        trainer: environments, policy and algorithm.
        board: the learner's end of the board; None for a Hogwild worker.
        mailbox: messages to and from the daemon.
    """

    def __init__(self, trainer: Trainer, board: LearnerBoard | None, mailbox: Mailbox) -> None:
        self._trainer = trainer
        self._mailbox = mailbox
        self._replica = Replica(trainer, board)
        self._mode_switcher = ModeSwitcher(
            trainer,
            self._replica,
            say=self._say,
            listen=self._listen,
            report=self._report_now,
            paused=lambda: self._paused,
        )
        self._stage_runner = StageRunner(
            trainer,
            self._replica,
            say=self._say,
            listen=lambda: self._listen(0.0),
            paused=lambda: self._paused,
            ahead=mailbox.ahead,
        )
        trainer.collected = self._take
        self._told_actors = (0, 0)
        self._loan = self._wanted_loan = 0
        self._replay_region: SharedRegion | None = None
        self._pause = PollPause()
        self._updates = 0
        self._env_steps = 0
        self._episodes = 0
        self._returns: list[float] = []
        self._metrics: dict[str, float] = {}
        self._going = True
        self._paced = False
        self._paused = False
        self._reported = (-1, -1)
        """Version and updates of the last report."""
        self._min_update_s = 0.0
        self._reported_s = float("-inf")
        self._began_s = float("-inf")
        self._busy_steps = self._busy_s = 0.0

    def begin(self, *, restore: bool) -> None:
        """Load the state on the board, or publish the first one there.

        Raises:
            WorkerError: if the board should hold a state and doesn't.
        """
        if restore:
            self._replica.restore()
        self._replica.take()
        self._replica.publish(always=True)
        self._report()

    def help(self, region: SharedRegion, *, shared_statistics: bool = False) -> None:
        """Step the vector of another learner of this node, by its optimizers' state or by an own one."""
        self._mode_switcher.help(region, shared_statistics=shared_statistics)
        self._report()

    def run(self) -> None:
        """Train until the daemon stops this learner, or is gone."""
        try:
            self._read_first_messages()
            while self._going and self._handle(self._mailbox.receive(self._wait_s())):
                self._turn()
        finally:
            self._stage_runner.close()
        self._replica.publish(always=True)
        self._report()
        self._mailbox.drain(1.0)

    def _turn(self) -> None:
        """Do one turn of the loop, after the messages are obeyed."""
        self._stage_runner.leave()
        self._mode_switcher.turn()
        self._stage_runner.turn(stages=self._mode_switcher.learner_mode.stages)
        self._take()
        if self._loan != self._wanted_loan:
            self._lend()
        if not self._paused and self._ready and time.monotonic() >= self._next_s and self._trainer.ready:
            self._update()
        self._stage_runner.work()
        self._replica.publish()
        self._tell_actors()
        self._report_if_due()

    def _take(self) -> None:
        """Take what peers changed, unless a pipeline holds the state."""
        if self._stage_runner.takes:
            self._replica.take()

    def _tell_actors(self) -> None:
        """Hand parameters to the actors that wait for them: newer ones, or the same once a batch was used."""
        news = (self._replica.publications, self._updates)
        if not self._paused and self._told_actors != news:
            self._told_actors = news
            self._trainer.publish()

    def _lend(self) -> None:
        """Leave this node's actors to the daemon, or have them again, as it said."""
        self._loan = self._wanted_loan
        self._trainer.source.lend(lent=self._loan > 0)
        self._told_actors = (-1, 0)  # once they are back they hear of our policy
        self._report()

    def _read_first_messages(self) -> None:
        """Read until the pace is known and nothing follows, so that no update is made without it.

        A learner that is started again while the swarm is paused must not train, one that joins must know
        the others' normalisation first, and one that follows another works by the same learner_mode.
        """
        until_s = time.monotonic() + FIRST_MESSAGES_S
        messages: list[ToLearner] = []
        while self._going and (messages or (not self._paced and time.monotonic() < until_s)):
            messages = self._mailbox.receive(IDLE_POLL_S)
            self._handle(messages)
            self._mailbox.flush()

    @property
    def _next_s(self) -> float:
        """When the next update may begin."""
        return self._began_s + self._min_update_s

    @property
    def _ready(self) -> bool:
        """Whether there is anything to update, once there is a batch."""
        return self._mode_switcher.ready and self._stage_runner.trains

    def _wait_s(self) -> float:
        if self._stage_runner.serves:
            return 0.0  # a stage waits for its neighbours
        if self._paused or not self._ready:
            return IDLE_POLL_S
        wait_s = max(self._next_s - time.monotonic(), 0.0)
        if not self._trainer.ready:
            return min(max(wait_s, self._pause.next_s()), IDLE_POLL_S)
        self._pause.reset()
        return min(wait_s, IDLE_POLL_S)

    def _say(self, message: FromLearner) -> None:
        self._mailbox.send(message)

    def _listen(self, timeout_s: float) -> None:
        """Read messages while an answer is awaited."""
        self._handle(self._mailbox.receive(timeout_s))
        self._report_if_due()

    def _handle(self, messages: list[ToLearner]) -> bool:
        """Handle the messages; False once the learner is to end."""
        for message in messages:
            match message:
                case RequestAnswer():
                    self._mode_switcher.answered(message)
                case Stop():
                    self._going = False
                    self._mode_switcher.stop()
                    self._stage_runner.end(stages=False)
                case WorkMode(learner_mode=learner_mode):
                    self._mode_switcher.hear(message, self._mailbox.take_fd)
                    self._stage_runner.end(stages=learner_mode.stages)
                case StartStage() | Finish() | Measure() | Trace():
                    self._stage_runner.hear(message, self._mailbox.take_fd)
                case LearnerPace() | LendActors():
                    self._pace(message)
                case Collect() | ReplayRows() | Sampled():
                    self._map(message)
                case Progress(fraction=fraction, env_steps=env_steps):
                    self._trainer.set_progress(fraction, env_steps)
                case DataShare():
                    self._trainer.share(*msgspec.structs.astuple(message))
                case Others(moments=moments):
                    self._trainer.set_other_moments(
                        {
                            name: Moments.from_wire(decode(data, Any, "moments"))
                            for name, data in moments.items()
                        }
                    )
                case Start() | Attach() | JoinHogwild() | SampleSlots() | DrawRows() | Prioritize():
                    raise WorkerError(
                        f"the daemon began the conversation anew, with {type(message).__name__}"
                    )
        return self._going

    def _pace(self, message: LearnerPace | LendActors) -> None:
        """Go as fast as that says, or without actors."""
        if isinstance(message, LendActors):
            self._wanted_loan = message.number
            return
        self._paced = True
        self._paused = message.paused
        rate = message.max_updates_per_s
        self._min_update_s = 1.0 / rate if rate > 0 else 0.0

    def _map(self, message: Collect | ReplayRows | Sampled) -> None:
        """Learn from what lies in the daemon's memory from now on, or keep the replay there."""
        if isinstance(message, ReplayRows):
            self._replay_region = SharedRegion.attach(self._mailbox.take_fd(), message.nbytes)
            if not self._trainer.keep_replay(self._replay_region.buf):
                print("learner: the replay was of another layout; it begins empty", file=sys.stderr)
            return
        from p2pdrl.workers.actor_source import ActorSource
        from p2pdrl.workers.sample_source import SampleSource

        self._told_actors = (-1, 0)
        source = self._trainer.source
        if isinstance(message, Sampled) and isinstance(source, SampleSource):
            sizes = (message.samples_nbytes, message.errors_nbytes, message.policy_nbytes)
            source.attach(*(SharedRegion.attach(self._mailbox.take_fd(), nbytes) for nbytes in sizes))
            return
        if isinstance(message, Sampled) or not isinstance(source, ActorSource):
            raise WorkerError("the daemon sent experience to a learner that gets its own otherwise")
        ring, policy = (
            SharedRegion.attach(self._mailbox.take_fd(), nbytes)
            for nbytes in (message.ring_nbytes, message.policy_nbytes)
        )
        source.attach(ring, policy)

    def _update(self) -> None:
        self._began_s = time.monotonic()
        self._mode_switcher.waited()
        stats = self._stage_runner.step()
        if stats is None:
            return
        if stats.acted:
            busy_s = time.monotonic() - self._began_s - self._mode_switcher.waited()
            self._busy_steps, self._busy_s = (
                MEMORY * total + new
                for total, new in ((self._busy_steps, stats.env_steps), (self._busy_s, busy_s))
            )
        self._replica.moved(versions=int(self._mode_switcher.learner_mode.steps))
        self._updates += 1
        self._env_steps += stats.env_steps - stats.elsewhere.env_steps
        self._episodes += len(stats.episodes) - stats.elsewhere.episodes
        self._returns += [episode_return for episode_return, _ in stats.episodes]
        self._metrics = stats.metrics
        self._stage_runner.updated()
        self._mode_switcher.updated(stats.env_steps)

    def _report_if_due(self) -> None:
        self._mailbox.flush()
        quiet = self._paused and (self._replica.version, self._updates) == self._reported
        due = time.monotonic() >= self._reported_s + (
            PAUSED_REPORT_INTERVAL_S if quiet else REPORT_INTERVAL_S
        )
        if due:
            self._report_now()

    def _report_now(self) -> None:
        """Report, unless an earlier report waits for room in the socket."""
        if not self._mailbox.backlog:
            self._report()

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        self._reported = self._replica.version, self._updates
        moments = {
            name: msgspec.msgpack.encode(value.to_wire())
            for name, value in self._trainer.own_moments().items()
        }
        self._mailbox.send(
            Report(
                policy_version=self._replica.version,
                updates=self._updates,
                env_steps=self._env_steps,
                episodes=self._episodes,
                returns=self._returns,
                metrics=self._stage_runner.metrics(self._metrics),
                moments=moments,
                busy_steps_per_s=self._busy_steps / self._busy_s if self._busy_s > 0 else 0.0,
                loan=self._loan,
            )
        )
        self._returns = []


def _build(start: Start) -> tuple[Trainer, str]:
    import torch

    torch.set_num_threads(start.threads)
    from p2pdrl.rl.engines import EngineOptions, resolve_device
    from p2pdrl.rl.registry import build_trainer
    from p2pdrl.workers.actor_source import ActorSource
    from p2pdrl.workers.sample_source import SampleSource

    device = str(resolve_device(start.split_devices[0] if start.split_devices else start.device))

    task = msgspec.json.decode(start.task, type=TaskConfig)
    engine = EngineOptions(
        microbatches=start.microbatches,
        checkpoint_activations=start.checkpoint_activations,
        activation_limit_bytes=start.activation_limit_bytes,
        split_devices=start.split_devices,
        split_cuts=start.split_cuts,
        compiled=start.compiled,
        say=lambda text: print(f"learner: {text}", file=sys.stderr),
    )
    source: SourceMaker | None = None
    streams = None
    if start.replay == "sampled":
        source = partial(SampleSource, seed=start.seed)
    elif start.actors or start.remote_actors:
        source = partial(
            ActorSource,
            actors=start.actors,
            ahead=start.actors_ahead,
            remote=start.remote_actors,
            remote_ahead=start.remote_ahead,
        )
        streams = task.env.num_envs * (bool(start.actors) + start.remote_actors)
    trainer = build_trainer(
        task,
        start.seed,
        device,
        allow_import=start.allow_import,
        step_delay_s=start.step_delay_s,
        engine=engine,
        source=source,
        streams=streams,
    )
    return trainer, device


def _experience(trainer: Trainer, start: Start) -> tuple[bytes, bytes]:
    """Return what actors' unrolls and samples of a replay are made of; empty where there are none."""
    shard = start.replay == "shard"
    samples = msgspec.msgpack.encode(trainer.replay.samples.to_wire()) if shard else b""
    if not (start.actors or start.remote_actors or start.replay == "sampled"):
        return b"", samples
    from p2pdrl.workers.actor_source import ActorSource  # slow to import, and few learners have actors
    from p2pdrl.workers.sample_source import SampleSource

    source = trainer.source
    if isinstance(source, SampleSource):
        return b"", msgspec.msgpack.encode(source.spec.to_wire())
    unrolls = msgspec.msgpack.encode(source.spec.to_wire()) if isinstance(source, ActorSource) else b""
    return unrolls, samples


def _live(mailbox: Mailbox) -> None:
    messages = mailbox.receive(None)
    start = messages[0] if messages else None
    if not isinstance(start, Start):
        raise WorkerError("the daemon didn't say what to train")
    with made_for_good():
        trainer, device = _build(start)
    spec = BoardSpec(trainer.layout, trainer.sidecar_layout)
    packed = msgspec.msgpack.encode(spec.to_wire())
    unrolls, samples = _experience(trainer, start)
    mailbox.send(
        Hello(
            device=device,
            spec=packed,
            unrolls=unrolls,
            replay_nbytes=trainer.replay_nbytes,
            replay_places=trainer.replay.memory.places if start.replay == "shard" else 0,
            samples=samples,
            spaces=trainer.spaces,
        )
    )
    memory, fd = mailbox.attach()
    region = SharedRegion.attach(fd, memory.nbytes)
    if start.replay == "shard":
        from p2pdrl.workers.actor_source import ActorSource

        source = trainer.source
        if not isinstance(source, ActorSource):
            raise WorkerError("a shard of the replay needs actors")
        task = msgspec.json.decode(start.task, type=TaskConfig)
        limiter = insert_limiter(task, trainer.replay.samples.shares[0])
        ReplayShard(trainer, source, mailbox, start.seed, limiter=limiter).run()
        return
    board = LearnerBoard(region, spec) if isinstance(memory, Attach) else None
    learner = Learner(trainer, board, mailbox)
    if isinstance(memory, Attach):
        learner.begin(restore=memory.restore)
    else:
        learner.help(region, shared_statistics=memory.shared_statistics)
    learner.run()


def _beat(mailbox: Mailbox) -> None:
    """Send heartbeats until the daemon is gone or the mailbox is closed."""
    with contextlib.suppress(WorkerError, OSError, ValueError):
        while True:
            mailbox.beat()
            time.sleep(BEAT_S)


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.learner")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    keep_freed_memory()
    print_without_blocking()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(socket.socket(fileno=arguments.fd))
    threading.Thread(target=_beat, args=(mailbox,), name="heartbeat", daemon=True).start()
    try:
        _live(mailbox)
    except WorkerError as error:
        print(f"learner ended: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - an environment's, say: the daemon tells of it and decides
        report, code = report_of(error)
        mailbox.send(report)
        mailbox.drain(1.0)
        return code
    finally:
        mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
