"""A learner whose learner mode changes under way: real messages and memory, a trainer that only counts."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import TensorError, WorkerError
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion, SharedVector
from p2pdrl.workers.learner import Learner
from p2pdrl.workers.learner_modes import ModeSwitcher
from p2pdrl.workers.protocol import LearnerPace, PostedRequest, Report, RequestAnswer, Stop, WorkMode, frame
from p2pdrl.workers.replica import Replica

ELSEWHERE = SimpleNamespace(env_steps=0, episodes=0)
"""Nobody else has made anything of a batch."""

SIZE = 3
SPEC = BoardSpec(Layout((TensorEntry("w", (SIZE,)),)))


class Trainer:
    """Adds one to each parameter with every step, and posts a gradient where it is told to."""

    layout = SPEC.layout

    ready = True
    policy_version = 0

    def __init__(self, at_step) -> None:
        self.flat = np.zeros(SIZE, np.float32)
        self.stepper = None
        self.steps = 0
        self.at_step = at_step
        self.binds: list[bool] = []

    def publish(self) -> None:
        """Nobody else acts."""

    def step(self):
        self.steps += 1
        self.flat += 1.0
        self.at_step(self.steps)
        return SimpleNamespace(env_steps=8, episodes=[], metrics={}, elsewhere=ELSEWHERE, acted=True)

    def rebind(self, buffer, *, write) -> None:
        if write:
            buffer[:] = self.flat
        self.flat = buffer
        self.binds.append(write)

    def add_delta(self, delta) -> None:
        self.flat += delta

    def set_state(self, vector, sidecar, *, own=False) -> None:
        self.flat[:] = vector

    def sidecar(self):
        return {}

    def own_moments(self):
        return {}


class World:
    """A learner and a daemon that is played by hooks after its steps, and by a thread."""

    def __init__(self, ends) -> None:
        self.mailbox, self.daemon = ends
        self.regions = [SharedRegion.create(SPEC.nbytes, "board")]
        self.board = DaemonBoard(self.regions[0], SPEC)
        self.trainer = Trainer(self.at_step)
        self.events: dict[int, object] = {}
        self.heard: list[object] = []
        self.learner = Learner(self.trainer, LearnerBoard(self.regions[0], SPEC), self.mailbox)

    def at_step(self, number: int) -> None:
        event = self.events.get(number)
        if event is not None:
            event()

    def work(self, learner_mode: LearnerMode, epoch: int) -> SharedRegion | None:
        """Say how to work; return the memory that goes along."""
        ring = GradientRing.nbytes_of(learner_mode.slots, SIZE) if learner_mode.slots else 0
        shared = SharedVector.nbytes_of(SIZE) if learner_mode.learners > 1 else 0
        message = frame(WorkMode(learner_mode, epoch, ring, shared))
        if not ring + shared:
            self.daemon.sock.sendall(message)
            return None
        self.regions.append(SharedRegion.create(ring + shared, "memory"))
        self.daemon.sock.setblocking(True)
        socket.send_fds(self.daemon.sock, [message], [self.regions[-1].fd])
        return self.regions[-1]

    def answers(self, *rules) -> threading.Thread:
        """Play the daemon: each rule is given the next post, until they run out; then stop."""

        def play() -> None:
            for rule in rules:
                posted = None
                while posted is None:
                    news = self.daemon.hear()
                    self.heard += news
                    posted = next((one for one in news if isinstance(one, PostedRequest)), None)
                said = rule(posted)
                self.daemon.say(*(said if isinstance(said, tuple) else (said,)))
            self.daemon.say(Stop())

        thread = threading.Thread(target=play)
        thread.start()
        return thread

    def live(self) -> Report:
        self.daemon.say(LearnerPace(paused=False, max_updates_per_s=0.0))
        self.learner.begin(restore=False)
        self.learner.run()
        self.heard += self.daemon.hear()
        return [one for one in self.heard if isinstance(one, Report)][-1]

    def now(self) -> tuple[list[float], int]:
        out = np.empty(SIZE, np.float32)
        version = self.board.now(out).policy_version
        return out.tolist(), version


@pytest.fixture
def world(ends):
    made = World(ends)
    yield made
    made.trainer.flat = made.trainer.flat.copy()
    made.learner._mode_switcher._regions = []
    for region in made.regions:
        region.close()


def test_rounds_of_parameters_every_so_many_updates(world):
    world.work(LearnerMode("parameters", every=3), 5)

    def mean(posted: PostedRequest) -> RequestAnswer:
        value, version = world.now()
        assert value == [3.0] * 3
        assert posted == PostedRequest(1, 5, "parameters", -1, policy_version=3, samples=24)
        assert version == 3
        world.board.post_set(np.full(SIZE, 10.0, np.float32), None, 40)
        return RequestAnswer(posted.number, 5, "set", world.board.content_id)

    def delta(posted: PostedRequest) -> RequestAnswer:
        assert world.now() == ([13.0] * 3, 43)
        world.board.post_delta(np.full(SIZE, 0.5, np.float32), 60)
        return RequestAnswer(posted.number, 5, "set", world.board.content_id)

    def nothing(posted: PostedRequest) -> RequestAnswer:
        assert (posted.number, posted.policy_version) == (3, 63)
        assert world.now()[0] == [16.5] * 3
        return RequestAnswer(posted.number, 5, "none")

    friend = world.answers(mean, delta, nothing)
    last = world.live()
    friend.join(5)
    assert last.updates >= 9
    assert world.board.absorbed


def test_another_mode_ends_the_wait_and_stays(world):
    world.work(LearnerMode("parameters"), 1)

    def switch(_: PostedRequest) -> WorkMode:
        return WorkMode(FREE, 2)

    events = world.events
    events[2] = lambda: world.answers().join(5)  # an update of its own, then stop
    friend = world.answers(switch)
    last = world.live()
    friend.join(5)
    assert sum(isinstance(one, PostedRequest) for one in world.heard) == 1
    assert last.updates >= 1


def test_stop_ends_the_wait(world):
    world.work(LearnerMode("parameters"), 1)
    friend = world.answers(lambda posted: Stop())
    assert world.live().updates == 1
    friend.join(5)


def test_it_reads_and_reports_while_it_waits(world):
    world.work(LearnerMode("parameters"), 1)

    def wait(posted: PostedRequest):
        world.daemon.say(LearnerPace(paused=True, max_updates_per_s=0.0))
        reports: list[Report] = []
        while len(reports) < 3:
            reports += [one for one in world.daemon.hear() if isinstance(one, Report)]
        world.heard += reports
        assert {report.updates for report in reports} == {1}
        return RequestAnswer(posted.number, 1, "none")

    friend = world.answers(wait)
    assert world.live().updates == 1  # and held after the answer
    friend.join(5)


def test_the_stepper_is_put_up_and_taken_down(world):
    own = world.trainer.stepper = object()
    steppers: list[object] = []
    numbers = {1: LearnerMode("gradients"), 2: LearnerMode("gradients", ahead=2), 3: FREE}
    for number, learner_mode in numbers.items():

        def switch(number=number, learner_mode=learner_mode) -> None:
            steppers.append(world.trainer.stepper)
            world.work(learner_mode, number)

        world.events[number] = switch
    world.events[4] = lambda: (steppers.append(world.trainer.stepper), world.daemon.say(Stop()))
    world.live()
    assert steppers[0] is steppers[3] is own
    assert [type(each).__name__ for each in steppers[1:3]] == ["RequestStepper"] * 2
    assert steppers[1] is not steppers[2]


def test_only_sets_move_the_version_where_a_server_steps(world):
    world.work(LearnerMode("gradients", steps=False), 1)
    world.events = {
        3: lambda: world.board.post_set(np.zeros(SIZE, np.float32), None, 77),
        5: lambda: world.daemon.say(Stop()),
    }
    assert world.live().policy_version == 77


def test_the_parameters_move_onto_the_shared_vector_and_back(world):
    shared: list[SharedRegion] = []
    seen: list[float] = []

    def helped() -> None:
        vector = SharedVector(shared[0], SIZE)
        assert vector.filled
        seen.append(float(vector.vector[0]))
        vector.vector += 100.0
        world.work(FREE, 2)

    def alone() -> None:
        SharedVector(shared[0], SIZE).vector[:] = 1e9
        world.daemon.say(Stop())

    world.events = {
        2: lambda: shared.append(world.work(LearnerMode(learners=2), 1)),
        4: helped,
        6: alone,
    }
    world.live()
    assert seen == [4.0]
    assert world.now() == ([106.0] * 3, 6)
    assert world.trainer.binds == [True, True]


def test_a_helper_waits_for_the_first_learner_and_steps_its_vector(world):
    region = SharedRegion.create(SharedVector.nbytes_of(SIZE), "shared")
    vector = SharedVector(region, SIZE)
    helper = Learner(world.trainer, None, world.mailbox)
    world.daemon.say(LearnerPace(paused=False, max_updates_per_s=0.0))

    def lead() -> None:
        reports = 0
        while reports < 3:
            reports += sum(isinstance(one, Report) and one.updates == 0 for one in world.daemon.hear())
        vector.vector[:] = 40.0
        vector.fill()

    friend = threading.Thread(target=lead)
    world.events[2] = lambda: world.daemon.say(Stop())
    friend.start()
    helper.help(region)
    helper.run()
    friend.join(5)
    assert vector.vector.tolist() == [42.0] * 3
    assert world.trainer.binds == [False]
    assert not world.board.published_once
    region.close()


def test_memory_that_is_missing_or_short(world):
    message = frame(WorkMode(LearnerMode("gradients"), 1, 4096, 0))
    world.daemon.sock.sendall(message)
    with pytest.raises(WorkerError, match="didn't send the memory"):
        world.live()
    region = SharedRegion.create(64, "short")
    fd = os.dup(region.fd)
    socket.send_fds(world.daemon.sock, [message], [fd])
    os.close(fd)
    with pytest.raises(TensorError, match="holds 64 bytes"):
        world.learner.run()
    region.close()


def test_learners_share_their_optimizers_state_where_asked_to():
    task = TaskConfig(algorithm=RegressionConfig(optimizer="adam", features=4, rows=16))
    trainers = [build_trainer(task, seed, "cpu") for seed in (1, 2)]
    first, helper = (
        ModeSwitcher(
            trainer,
            Replica(trainer, None),
            say=print,
            listen=print,
            report=lambda: None,
            paused=lambda: False,
        )
        for trainer in trainers
    )
    trainers[0].step()
    statistics = trainers[0].sidecar_layout.under("optimizer")
    region = SharedRegion.create(SharedVector.nbytes_of(4, statistics), "shared")

    def enter(learner_mode: LearnerMode, epoch: int, nbytes: int) -> None:
        first.hear(WorkMode(learner_mode, epoch, shared_nbytes=nbytes), lambda: os.dup(region.fd))
        first.turn()

    enter(LearnerMode(learners=2, shared_statistics=True), 1, region.nbytes)
    helper.help(SharedRegion.attach(os.dup(region.fd), region.nbytes), shared_statistics=True)
    assert helper.ready
    for trainer in (trainers[1], trainers[0]):
        trainer.step()
    for name in ("m", "v", "steps"):
        theirs, ours = (np.array(one.sidecar()[f"optimizer.{name}"]) for one in trainers)
        np.testing.assert_array_equal(theirs, ours)
    assert theirs == 3

    enter(FREE, 2, 0)
    trainers[1].step()
    assert [int(one.sidecar()["optimizer.steps"]) for one in trainers] == [3, 4]
    region.close()
