"""The learner's loop with a trainer that only counts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.workers.learner import Learner
from p2pdrl.workers.protocol import (
    Attach,
    LearnerPace,
    LendActors,
    Others,
    Progress,
    Report,
    Start,
    Stop,
)

ELSEWHERE = SimpleNamespace(env_steps=0, episodes=0)
"""Nobody else has made anything of a batch."""

SPEC = BoardSpec(Layout((TensorEntry("w", (3,)),)), SidecarLayout((SidecarItem("step", (), "int64"),)))


class FakeTrainer:
    """Adds one to each parameter with every step; a hook acts as the world around the learner."""

    ready = True
    policy_version = 0

    def __init__(self, at_step) -> None:
        self.flat = np.zeros(3, np.float32)
        self.steps = 0
        self.calls: list[tuple[str, object]] = []
        self._at_step = at_step

    def publish(self) -> None:
        """Nobody else acts."""

    def step(self):
        self.steps += 1
        self.flat += 1.0
        self._at_step(self.steps)
        episodes = [(float(self.steps), 10)] if self.steps % 2 == 0 else []
        metrics = {"loss": 1.0 / self.steps}
        return SimpleNamespace(
            env_steps=8, episodes=episodes, metrics=metrics, elsewhere=ELSEWHERE, acted=True
        )

    def add_delta(self, delta) -> None:
        self.flat += delta

    def set_state(self, vector, sidecar, *, own=False) -> None:
        self.flat[:] = vector
        if sidecar is not None:
            self.steps = int(sidecar["step"])
        self.calls.append(("set", own))

    def reset_targets(self) -> None:
        self.calls.append(("targets", self.flat.copy()))

    def sidecar(self):
        return {"step": np.array(self.steps, np.int64)}

    def set_progress(self, fraction, env_steps=0) -> None:
        self.calls.append(("progress", fraction))

    def own_moments(self):
        return {"observations": Moments(float(self.steps), np.ones(2), np.zeros(2))}

    def set_other_moments(self, moments) -> None:
        self.calls.append(("others", {name: value.count for name, value in moments.items()}))


class World:
    """A learner, its daemon's board, and what happens after which step."""

    def __init__(self, ends) -> None:
        self.mailbox, self.daemon = ends
        self.region = SharedRegion.create(SPEC.nbytes, "learner")
        self.board = DaemonBoard(self.region, SPEC)
        self.events: dict[int, object] = {}
        self.trainer = FakeTrainer(self.at_step)

    def at_step(self, number: int) -> None:
        event = self.events.get(number)
        if callable(event):
            event()
        elif event is not None:
            self.daemon.say(event)

    def learner(self) -> Learner:
        return Learner(self.trainer, LearnerBoard(self.region, SPEC), self.mailbox)

    def live(self, *, restore: bool = False) -> list[Report]:
        learner = self.learner()
        learner.begin(restore=restore)
        learner.run()
        return self.daemon.hear()

    def now(self) -> tuple[list[float], int]:
        out = np.empty(3, np.float32)
        version = self.board.now(out).policy_version
        return out.tolist(), version


@pytest.fixture
def world(ends, monkeypatch):
    monkeypatch.setattr("p2pdrl.workers.learner.FIRST_MESSAGES_S", 0.0)
    made = World(ends)
    yield made
    made.region.close()


def test_it_trains_until_it_is_told_to_stop(world):
    world.events[5] = Stop()
    reports = world.live()
    assert world.now() == ([5.0] * 3, 5)
    assert reports[0].updates == 0
    last = reports[-1]
    assert (last.policy_version, last.updates, last.env_steps, last.episodes) == (5, 5, 40, 2)
    assert last.metrics == {"loss": 0.2}
    assert [one for report in reports for one in report.returns] == [2.0, 4.0]
    moments = Moments.from_wire(msgspec.msgpack.decode(last.moments["observations"]))
    assert moments.count == 5.0


def test_actors_are_lent_and_taken_back_between_two_updates(world):
    source = world.trainer.source = SimpleNamespace(lent=[])
    source.lend = lambda *, lent: source.lent.append((world.trainer.steps, lent))
    world.events = {2: LendActors(7), 4: LendActors(0), 6: Stop()}
    loans = [(report.updates, report.loan) for report in world.live()]
    assert source.lent == [(2, True), (4, False)]
    assert {(2, 7), (4, 0)} <= set(loans)
    assert not [updates for updates, loan in loans if loan and not 2 <= updates <= 4]


def test_steps_that_other_nodes_count_are_not_reported(world):
    step = world.trainer.step

    def shared():
        stats = step()
        stats.elsewhere = SimpleNamespace(env_steps=3, episodes=len(stats.episodes))
        return stats

    world.trainer.step = shared
    world.events = {4: Stop()}
    reports = world.live()
    assert (reports[-1].env_steps, reports[-1].episodes) == (20, 0)
    assert [one for report in reports for one in report.returns] == [2.0, 4.0]


def test_a_delta_is_added_and_raises_the_version(world):
    def post() -> None:
        world.board.post_delta(np.full(3, 0.5, np.float32), 100)

    world.events = {2: post, 4: Stop()}
    world.live()
    # Two updates, the delta, two more: the version goes on from the greater one.
    assert world.now() == ([4.5] * 3, 102)


def test_an_older_delta_doesnt_lower_the_version(world):
    world.events = {3: lambda: world.board.post_delta(np.ones(3, np.float32), 1), 4: Stop()}
    world.live()
    assert world.now() == ([5.0] * 3, 4)


def test_a_set_replaces_everything_the_version_too(world):
    def post() -> None:
        world.board.post_set(np.full(3, 50.0, np.float32), {"step": np.array(70, np.int64)}, 2)

    world.events = {5: post, 71: Stop()}
    reports = world.live()
    assert world.now() == ([51.0] * 3, 3)
    assert world.trainer.calls == [("set", False)]
    assert reports[-1].updates == 6


def test_a_paused_learner_holds_and_still_takes_deltas(world):
    def act() -> None:
        heard: list[Report] = []
        while not heard or heard[-1].updates < 2:
            heard += world.daemon.hear()
        world.board.post_delta(np.full(3, 8.0, np.float32), 9)
        while world.board.absorbed is False:
            pass
        world.daemon.say(Stop())

    friend = threading.Thread(target=act)

    def pause() -> None:
        world.daemon.say(LearnerPace(paused=True, max_updates_per_s=0.0))
        friend.start()

    world.events[2] = pause
    world.live()
    friend.join(5)
    assert world.trainer.steps == 2
    assert world.now() == ([10.0] * 3, 9)


def test_the_pace_is_kept_and_lifted(world, monkeypatch):
    now_s, waits = [0.0], []

    def receive(timeout_s):
        waits.append(timeout_s)
        now_s[0] += timeout_s
        return type(world.mailbox).receive(world.mailbox, 0.0)

    monkeypatch.setattr("p2pdrl.workers.learner.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    learner = world.learner()
    learner._mailbox = SimpleNamespace(
        receive=receive,
        send=world.mailbox.send,
        flush=world.mailbox.flush,
        drain=world.mailbox.drain,
        backlog=False,
    )
    world.daemon.say(LearnerPace(paused=False, max_updates_per_s=10.0))
    world.events[21] = LearnerPace(paused=False, max_updates_per_s=0.0)
    world.events[60] = Stop()
    learner.begin(restore=False)
    learner.run()
    # Twenty rests of a tenth of a second, none afterwards.
    assert now_s[0] == pytest.approx(2.0, abs=0.11)
    assert max(waits) <= 0.05


def test_progress_and_the_others_moments_reach_the_trainer(world):
    others = {"observations": msgspec.msgpack.encode(Moments(7.0, np.ones(2), np.ones(2)).to_wire())}
    world.daemon.say(Progress(0.25), Others(others))
    world.events[1] = Stop()
    world.live()
    assert world.trainer.calls == [("progress", 0.25), ("others", {"observations": 7.0})]


def test_no_update_before_the_first_words_are_obeyed(world, monkeypatch):
    monkeypatch.setattr("p2pdrl.workers.learner.FIRST_MESSAGES_S", 60.0)
    others = {"observations": msgspec.msgpack.encode(Moments(7.0, np.ones(2), np.ones(2)).to_wire())}

    def slow_daemon() -> None:
        world.daemon.say(Progress(0.5))
        time.sleep(0.1)
        world.daemon.say(LearnerPace(paused=False, max_updates_per_s=0.0), Others(others))

    friend = threading.Thread(target=slow_daemon)
    known: list[int] = []
    world.events[1] = lambda: (known.append(len(world.trainer.calls)), world.daemon.say(Stop()))
    friend.start()
    world.live()
    friend.join(5)
    assert known == [2]


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_a_paused_learner_makes_no_update(world, monkeypatch, wait_s):
    monkeypatch.setattr("p2pdrl.workers.learner.FIRST_MESSAGES_S", wait_s)
    world.daemon.say(LearnerPace(paused=True, max_updates_per_s=0.0))
    friend = threading.Timer(0.2, lambda: world.daemon.say(Stop()))
    friend.start()
    assert world.live()[-1].updates == 0
    friend.join(5)


def test_stop_may_be_the_first_word(world, monkeypatch):
    monkeypatch.setattr("p2pdrl.workers.learner.FIRST_MESSAGES_S", 60.0)
    world.daemon.say(Stop())
    assert world.live()[-1].updates == 0


def test_a_successor_goes_on_from_the_board(world):
    world.events[3] = Stop()
    world.live()
    world.board.post_delta(np.full(3, 0.25, np.float32), 40)  # never taken by the first one
    heir = world.trainer = FakeTrainer(world.at_step)
    world.events = {5: Stop()}
    reports = world.live(restore=True)
    assert heir.calls == [("set", True)]
    assert world.now() == ([5.25] * 3, 42)
    assert (reports[-1].updates, reports[-1].env_steps) == (2, 16)


def test_a_seeded_board_is_taken_up(world):
    world.board.seed(np.full(3, 6.0, np.float32), {"step": np.array(4, np.int64)}, 30)
    world.events[5] = Stop()
    world.live(restore=True)
    assert world.now() == ([7.0] * 3, 31)


def test_on_parameters_alone_targets_are_copies_of_them(world):
    world.board.seed(np.full(3, 6.0, np.float32), None, 0)
    world.events[1] = Stop()
    world.live(restore=True)
    (_, seen) = next(call for call in world.trainer.calls if call[0] == "targets")
    assert seen.tolist() == [6.0] * 3


def test_an_empty_board_cant_be_restored(world):
    with pytest.raises(WorkerError, match="no readable state"):
        world.learner().begin(restore=True)


@pytest.mark.parametrize("message", [Start(b"{}", 0, "cpu", 1, False), Attach(8, restore=False)])
def test_a_conversation_begins_once(world, message):
    world.daemon.say(message)
    with pytest.raises(WorkerError, match="anew"):
        world.live()


def test_a_daemon_that_is_gone_ends_it(world):
    world.events[2] = world.daemon.sock.close
    with pytest.raises(WorkerError, match="daemon"):
        world.live()


def test_a_daemon_that_doesnt_read_holds_nothing_up(world, monkeypatch):
    monkeypatch.setattr("p2pdrl.workers.learner.REPORT_INTERVAL_S", 0.0)
    big = {"observations": Moments(1.0, np.ones(10_000), np.zeros(10_000))}
    world.trainer.own_moments = lambda: big
    world.events[100] = lambda: world.daemon.say(Stop())
    learner = world.learner()
    monkeypatch.setattr(world.mailbox, "drain", lambda timeout_s: None)
    learner.begin(restore=False)
    learner.run()
    assert world.trainer.steps == 100
    assert world.mailbox.backlog
    # Reports wait for room instead of piling up; the next one brings every return.
    assert len(world.mailbox._unsent) < 1_000_000


def test_the_daemons_first_message_says_what_to_build():
    from p2pdrl.rl.sources.rows import RowSource
    from p2pdrl.workers.learner import _build

    task = TaskConfig(algorithm=RegressionConfig(features=5))
    start = Start(msgspec.json.encode(task), 3, "cpu", 1, False, step_delay_s=0.5)
    trainer, device = _build(start)
    assert isinstance(trainer.source, RowSource)
    assert (trainer.layout.size, device) == (5, "cpu")
    assert trainer.step().seconds >= 0.5


def test_how_gradients_are_computed_is_this_nodes_choice(capsys):
    from p2pdrl.rl.gradients import Accumulated
    from p2pdrl.workers.learner import _build

    task = msgspec.json.encode(TaskConfig(algorithm=RegressionConfig()))
    trainer, _ = _build(Start(task, 3, "cpu", 1, False, microbatches=4, checkpoint_activations=True))
    assert isinstance(trainer.engine, Accumulated)
    assert trainer.step().metrics["microbatches"] == 4.0

    trainer, _ = _build(Start(task, 3, "cpu", 1, False, microbatches="auto"))
    for _ in range(24):  # four numbers of microbatches, six times each
        trainer.step()
    picked = int(trainer.step().metrics["microbatches"])
    assert f"learner: microbatches = {picked} " in capsys.readouterr().err


@pytest.mark.parametrize("module", ["learner", "actor"])
def test_a_process_imports_torch_no_sooner_than_it_needs_it(module):
    code = f"import sys, p2pdrl.workers.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
