"""Messages between the daemon and its learner, actor and evaluator processes, and their framing.

Daemon and child hold the ends of a Unix socket pair: nothing else can connect to it. Each frame is a
length (4 bytes, little endian) and one msgpack message. Vectors don't travel here but on the
board, shared memory whose file descriptor is passed once.

    daemon                          learner
      │  Start                        │
      ├──────────────────────────────▶│  builds environments, model, optimizer
      │                        Hello  │
      │◀──────────────────────────────┤  layout of parameters and sidecar
      │  Attach (+ file descriptor)   │
      ├──────────────────────────────▶│  restores from the board, or publishes the first weights
      │         Report, Report, …     │
      │◀──────────────────────────────┤
      │  Others, Progress, DataShare, │
      │  LendActors, Stop, LearnerPace│
      ├──────────────────────────────▶│  begins to train once it has heard the first LearnerPace
      │  Collect (+ 2 descriptors)    │
      ├──────────────────────────────▶│  learns from what actor processes make
      │  ReplayRows (+ descriptor)    │
      ├──────────────────────────────▶│  keeps its replay there, and goes on with what a predecessor left
      │  Sampled (+ 3 descriptors)    │
      ├──────────────────────────────▶│  learns from samples of a replay on other nodes
      │  WorkMode (+ file descriptors)│
      ├──────────────────────────────▶│  works by another learner mode from its next update on
      │                PostedRequest  │
      │◀──────────────────────────────┤  under some learner modes, and waits
      │  RequestAnswer                │
      ├──────────────────────────────▶│  goes on

A shard of the replay memory is a process of the same module; it hears these as well:

      │  SampleSlots (+ descriptor)   │
      ├──────────────────────────────▶│  draws into that memory
      │  DrawRows                     │
      ├──────────────────────────────▶│
      │                    DrawnRows  │
      │◀──────────────────────────────┤
      │  Prioritize                   │
      ├──────────────────────────────▶│  gives rows new priorities

An actor inherits two pieces of shared memory as well: the ring that its unrolls go through
(`tensors.unroll_ring`) and the policy that it acts with (`tensors.shared_policy`).

    daemon                          actor
      │  StartActor                   │
      ├──────────────────────────────▶│  builds environments and network
      │  ActorReady, or ChildFailed   │
      │◀──────────────────────────────┤
      │                               │  makes unrolls until it is killed, or the daemon is gone
      │                      Crashed  │
      │◀──────────────────────────────┤  an error ends it, of an environment, say

The evaluator inherits one piece of shared memory, which holds a checkpoint while it plays.

    daemon                          evaluator
      │  Play                         │
      ├──────────────────────────────▶│  plays episodes with the checkpoint's policy
      │  Played, or ChildFailed       │
      │◀──────────────────────────────┤
      │  Film                         │
      ├──────────────────────────────▶│  films an episode
      │  Filmed, or ChildFailed       │
      │◀──────────────────────────────┤

A writer of figures (W&B, MLflow) inherits nothing, and ends its run when the daemon sends no more.

    daemon                          run writer
      │  PrepareWriter                │
      ├──────────────────────────────▶│  imports its package
      │  WriterReady, or ChildFailed  │
      │◀──────────────────────────────┤
      │  OpenRun                      │
      ├──────────────────────────────▶│
      │                    RunOpened  │
      │◀──────────────────────────────┤
      │  RunPoint, RunPoint, …        │
      ├──────────────────────────────▶│  writes figures

The inference process inherits the policy that it acts with (`tensors.shared_policy`), which the daemon
writes, or, where it acts for the node's actors too, the learner. Observations and actions lie in slots of
shared memory (`tensors.inference_slots`); actors ask and are answered there without a message.

    daemon                          inference process
      │  StartInference               │
      ├──────────────────────────────▶│  builds the network
      │  InferenceReady, ChildFailed  │
      │◀──────────────────────────────┤
      │  UseSlots (+ file descriptor) │
      │  UseSteps (+ file descriptor) │
      ├──────────────────────────────▶│
      │  Infer, Infer, …              │
      ├──────────────────────────────▶│  acts on the batch in that slot
      │  Inferred, Inferred, …        │
      │◀──────────────────────────────┤
      │                      ActedForActors  │
      │◀──────────────────────────────┤  each second: how it acted for actors

Each second from its start the learner says that it is `Alive`; where an error ends it, it says which
(`Crashed`). A report's counts are cumulative over the learner's life, so a lost or doubled report does no
harm. Requests and answers name the epoch of their learner mode; what belongs to another is passed over.
`pipeline.protocol` has what is said where a learner is a stage of a pipeline. A descriptor travels
beside the first byte of its frame, so they are claimed in the order of the frames. Torch-free:
the daemon imports this module.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from p2pdrl.config.fields import Microbatches
from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.errors import WireError
from p2pdrl.telemetry.writers import RunInfo, ServedKind
from p2pdrl.tensors.inference_slots import InferenceSpec, StepSpec
from p2pdrl.transport.codec import decode
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, News, StartStage, Trace, Traced

__all__ = [
    "ActedForActors",
    "ActorReady",
    "Alive",
    "AnswerKind",
    "Attach",
    "ChildFailed",
    "Collect",
    "Crashed",
    "DataShare",
    "DrawRows",
    "DrawnRows",
    "FrameBuffer",
    "FromActor",
    "FromInference",
    "FromLearner",
    "Hello",
    "Infer",
    "InferenceReady",
    "Inferred",
    "JoinHogwild",
    "LearnerPace",
    "LendActors",
    "OpenRun",
    "Others",
    "PostedRequest",
    "PrepareWriter",
    "Prioritize",
    "Progress",
    "ReplayRows",
    "Report",
    "RequestAnswer",
    "RequestKind",
    "RunOpened",
    "RunPoint",
    "SampleSlots",
    "Sampled",
    "Start",
    "StartActor",
    "StartInference",
    "Stop",
    "ToInference",
    "ToLearner",
    "TrainingNews",
    "UseSlots",
    "UseSteps",
    "WorkMode",
    "WriterReady",
    "actor_seed",
    "decode_from_actor",
    "decode_from_inference",
    "decode_from_learner",
    "decode_from_run_writer",
    "decode_start_actor",
    "decode_to_inference",
    "decode_to_learner",
    "decode_to_run_writer",
    "frame",
]

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")

AnswerKind = Literal["none", "replace", "add", "set"]
"""What to do about a request; `strategies.protocol.AnswerKind` says it in full."""
RequestKind = Literal["parameters", "gradients"]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: what to train, and with what."""

    task: bytes
    """The task as JSON of `p2pdrl.config.task.TaskConfig`."""
    seed: int
    """Seed of this learner's environments and exploration."""
    device: str
    threads: int
    allow_import: bool
    step_delay_s: float = 0.0
    """Slept at each step of the environments: this machine is to be a slow one."""
    microbatches: Microbatches = 1
    checkpoint_activations: bool = False
    activation_limit_bytes: int = 0
    split_devices: tuple[str, ...] = ()
    split_cuts: tuple[int, ...] = ()
    compiled: bool = False
    """How gradients are computed here; `config.node.LearnerConfig` explains all six."""
    actors: int = 0
    """Processes that act for this learner; 0 has the environments in its own."""
    actors_ahead: int = 0
    """Unrolls that each may make ahead of the learner."""
    remote_actors: int = 0
    """Actors of other nodes that it may learn from, at most."""
    remote_ahead: int = 1
    """Unrolls that each of those may make ahead of the learner, at least."""
    replay: Literal["own", "shard", "sampled"] = "own"
    """Where an algorithm's replay memory is: its learner's own; this process is a shard of it, and learns
    nothing; or in shards on other nodes."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The board is ready; its file descriptor travels beside this frame."""

    nbytes: int
    restore: bool
    """True: parameters and sidecar on the board replace the learner's own."""


class JoinHogwild(msgspec.Struct, frozen=True, tag="join"):
    """In place of `Attach`: help another learner of this node, by stepping the vector that it has filled.

    The descriptor of that memory (`tensors.shared_memory`) travels beside this frame. A helper has no board.
    """

    nbytes: int
    shared_statistics: bool = False
    """Whether the optimizers' state lies there, too."""


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Learn from what actor processes make.

    The descriptors of the ring of unrolls (`tensors.unroll_ring`) and of the policy that they act with
    (`tensors.shared_policy`) travel beside this frame, in this order.
    """

    ring_nbytes: int
    policy_nbytes: int


class ReplayRows(msgspec.Struct, frozen=True, tag="replay_rows"):
    """The memory that the replay's rows lie in; comes before the first pace."""

    nbytes: int


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """Learn from samples of a replay memory that is elsewhere.

    The descriptors of the samples, of the errors on their way back (`workers.sample_source`), and of the
    policy for those who act travel beside this frame, in this order.
    """

    samples_nbytes: int
    errors_nbytes: int
    policy_nbytes: int


class SampleSlots(msgspec.Struct, frozen=True, tag="sample_slots"):
    """Where a shard of the replay memory puts what it draws; its descriptor travels beside this frame."""

    nbytes: int


class DrawRows(msgspec.Struct, frozen=True, tag="draw"):
    """Draw rows from this shard of the replay memory; answered by `DrawnRows`, in order."""

    number: int
    slot: int
    """Of `SampleSlots`, the daemon's again once it is answered."""
    rows: int
    """0 only asks how things stand."""


class Prioritize(msgspec.Struct, frozen=True, tag="prioritize"):
    """TD errors of rows that were drawn before; `replay.shards.PRIORITIES` says how they lie in it."""

    rows: int
    content: bytes


class WorkMode(msgspec.Struct, frozen=True, tag="work"):
    """How to work from the next update on. A request that waits for its answer is given up at once.

    Descriptors of the ring and of the shared vector, as far as there are any, travel beside this frame.
    """

    learner_mode: LearnerMode
    epoch: int
    """Of the mode; requests and answers carry it."""
    ring_nbytes: int = 0
    """Of the `tensors.shared_memory`; 0 when gradients don't travel."""
    shared_nbytes: int = 0
    """Of the `tensors.shared_memory`; 0 when the learner has its parameters for itself."""


class RequestAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The learner may go on; each of them arrives, in order."""

    number: int
    """Of the request."""
    epoch: int
    kind: AnswerKind
    content: int = 0
    """With ``set``: id of the board's content that is to be taken first; 0 is whatever lies there."""
    learning_rate: float | None = None
    """With ``replace``: at which to step; None for the algorithm's own."""
    end_update: bool = False
    """Whether to leave out what is left of the update; `group.round_collector` says why."""


class Others(msgspec.Struct, frozen=True, tag="others"):
    """Normaliser moments of all other nodes, merged, by name; msgpack of `Moments.to_wire`."""

    moments: dict[str, bytes]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the swarm is."""

    fraction: float
    """Towards its last environment step, 0 to 1 (for annealing)."""
    env_steps: int = 0
    """That the whole swarm has made (for exploration)."""


class DataShare(msgspec.Struct, frozen=True, tag="share"):
    """Which part of divided data, or of the batch of each update, is this learner's; at first it has all."""

    rank: int
    """Of the learner, from 0."""
    learners: int
    """Who have a part each."""
    rate_power: float = 0.0
    """With batches of 1/n of their length the learning rate is n to this power times as high."""
    speed: float = 1.0
    """Of the learner, that of the fastest one being 1: its part is in proportion to it. 0: it has none, and
    moves with the average only."""
    total_speed: float = 0.0
    """Of all of them; 0 takes all for equally fast."""


class LearnerPace(msgspec.Struct, frozen=True, tag="pace"):
    """How fast to go. The first one lets the learner begin: what is told before it counts from the start."""

    paused: bool
    max_updates_per_s: float
    """0 is no bound."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Publish once more and end."""


class LendActors(msgspec.Struct, frozen=True, tag="lend"):
    """Leave this node's actors to the daemon, who sends what they make to another learner.

    The learner lets go of them between two updates, and says so in its reports.
    """

    number: int
    """Of the loan, from 1; 0: they are the learner's again, from its next update on."""


TrainingNews = LearnerPace | Progress | Others | DataShare | LendActors
"""What is told to each learner, and to each that replaces it, when it changes."""

ToLearner = (
    Start
    | Attach
    | JoinHogwild
    | Collect
    | ReplayRows
    | Sampled
    | SampleSlots
    | DrawRows
    | Prioritize
    | WorkMode
    | RequestAnswer
    | Others
    | Progress
    | DataShare
    | LearnerPace
    | LendActors
    | Stop
    | StartStage
    | Finish
    | Measure
    | Trace
)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The model is built."""

    device: str
    spec: bytes
    """msgpack of `BoardSpec.to_wire`: the layout of parameters and sidecar."""
    unrolls: bytes = b""
    """With actors: msgpack of `UnrollSpec.to_wire`, what their unrolls are made of."""
    replay_nbytes: int = 0
    """Of the memory that the replay's rows lie in; 0 without a replay."""
    replay_places: int = 0
    """How many rows it has room for: their indices are less."""
    samples: bytes = b""
    """Of a shard of the replay, and of a learner that draws from shards: msgpack of `UnrollSpec.to_wire`,
    what samples are made of."""
    spaces: dict[str, str] = {}
    """What observations and actions are, in words; empty for a regression."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """News after one or several updates."""

    policy_version: int
    updates: int
    """Updates since this process began."""
    env_steps: int
    """Environment steps since this process began, without those that the nodes count that made them."""
    episodes: int
    """Episodes ended since this process began; likewise."""
    returns: list[float]
    """Returns of the episodes ended since the last report, oldest first."""
    metrics: dict[str, float]
    """The algorithm's own figures (losses, entropy, …) of the last update."""
    moments: dict[str, bytes] = {}
    """This node's own cumulative normaliser moments, by name; empty when nothing is normalised."""
    busy_steps_per_s: float = 0.0
    """Environment steps a second of the last updates, without the time in which it waited for others; 0 while
    that isn't known, and where actors make them."""
    loan: int = 0
    """Number of the `LendActors` by which the daemon has this node's actors; 0: the learner has them."""


class PostedRequest(msgspec.Struct, frozen=True, tag="posted"):
    """A gradient lies in a slot of the ring, or (``parameters``) a round is due; see `WorkMode`."""

    number: int
    """Grows by one with each request of this process."""
    epoch: int
    kind: RequestKind
    slot: int
    """The slot belongs to the daemon until it answers; -1 for ``parameters``."""
    policy_version: int
    """Of the parameters behind it, which are published."""
    samples: int
    """Environment steps behind it: of the gradient, or since the last round. A gradient of 0 has
    nothing to add, and its vector is zero (the own one was not finite): so nobody waits in vain."""
    alone: bool = False
    """Whether the learner gave up the wait for its last answer and went on without it, once or more often."""
    left: int = 0
    """Gradients of the same update that come after this one."""


class ChildFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The process can't go on, and starting it again wouldn't help (unknown environment, …)."""

    message: str
    usage: bool
    """True when the person can mend it (exit code 2)."""


class Crashed(msgspec.Struct, frozen=True, tag="crashed"):
    """An error that nobody caught ends the process; another one may do better.

    All texts are bounded; see `workers.child`.
    """

    kind: str
    """Type of the exception."""
    message: str
    where: str
    """``FILE:LINE in FUNCTION``, where it was raised."""
    trace: str
    """The last lines of the traceback."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A heartbeat, each second from the start, from a thread of the learner's that does nothing else."""


class DrawnRows(msgspec.Struct, frozen=True, tag="drawn"):
    """What a shard has drawn, and how it stands."""

    number: int
    """Of the request."""
    rows: int
    """As asked for, or 0 where none may be drawn yet."""
    mass: float
    count: int
    appended: int
    full: bool
    """These four as in `replay.shards.ShardState`."""


FromLearner = (
    Hello | DrawnRows | Report | PostedRequest | ChildFailed | Crashed | Alive | Blocks | Traced | News
)

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_to_learner(body: bytes) -> ToLearner:
    """Decode a frame's body as the learner reads it.

    Raises:
        WireError: if it isn't a message of this protocol.
    """
    message: ToLearner = decode(body, ToLearner, "message of the daemon")
    return message


def decode_from_learner(body: bytes) -> FromLearner:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: if it isn't a message of this protocol.
    """
    message: FromLearner = decode(body, FromLearner, "message of the learner")
    return message


class FrameBuffer:
    """Cuts a stream of bytes into frame bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the bodies that are complete now.

        Raises:
            WireError: if a frame says that it is longer than 64 MiB.
        """
        self._data += data
        bodies: list[bytes] = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame between daemon and learner says {length} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return bodies

    def with_more(self, data: bytes) -> list[bytes]:
        """Return what `feed` would, and add nothing.

        Raises:
            WireError: see `feed`.
        """
        other = FrameBuffer()
        return other.feed(bytes(self._data) + data)


_ACTOR_STEP = 0x9E3779B1  # 2³²/φ, odd
_LIFE_STEP = 0x85EBCA77


class StartActor(msgspec.Struct, frozen=True, tag="act"):
    """First message to an actor: what to act in, and how."""

    task: bytes
    """The task as JSON of `p2pdrl.config.task.TaskConfig`."""
    number: int
    """Of the actor: its lane in the ring."""
    seed: int
    """Of its environments and actions."""
    spec: bytes
    """msgpack of `UnrollSpec.to_wire`."""
    policy_size: int
    """D."""
    threads: int
    allow_import: bool
    step_delay_s: float
    steps: StepSpec | None = None
    """How it asks the inference process; None has it act by itself."""


class ActorReady(msgspec.Struct, frozen=True, tag="acts"):
    """Environments and network are built."""


FromActor = ActorReady | ChildFailed | Crashed


def decode_start_actor(body: bytes) -> StartActor:
    """Decode the frame's body that an actor reads.

    Raises:
        WireError: it is another message.
    """
    message: StartActor = decode(body, StartActor, "message of the daemon")
    return message


def decode_from_actor(body: bytes) -> FromActor:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: it isn't a message of an actor.
    """
    message: FromActor = decode(body, FromActor, "message of the actor")
    return message


class Play(msgspec.Struct, frozen=True, tag="play"):
    """Evaluate the checkpoint that the shared memory holds."""

    nbytes: int
    """Of the checkpoint."""
    episodes: int
    greedy: bool
    seed: int
    """Of environments and actions."""
    threads: int
    allow_import: bool


class Played(msgspec.Struct, frozen=True, tag="played"):
    """What an evaluation came to."""

    mean: float
    """Of the returns (raw rewards, undiscounted); ``std`` over the population."""
    std: float
    length: float
    """Mean steps of an episode."""
    seconds: float
    """The episodes took, without the start of the process."""


class Film(msgspec.Struct, frozen=True, tag="film"):
    """Film a greedy episode of the checkpoint that the shared memory holds, at the lowest priority."""

    nbytes: int
    """Of the checkpoint."""
    path: str
    """Of the file, .mp4."""
    seed: int
    allow_import: bool


class Filmed(msgspec.Struct, frozen=True, tag="filmed"):
    """What a film shows."""

    episode_return: float
    seconds: float
    """It took, with the start of the process."""


ToEvaluator = Play | Film
FromEvaluator = Played | Filmed | ChildFailed | Crashed


def decode_to_evaluator(body: bytes) -> ToEvaluator:
    """Decode the frame's body that an evaluator reads.

    Raises:
        WireError: it is another message.
    """
    message: ToEvaluator = decode(body, ToEvaluator, "message of the daemon")
    return message


def decode_from_evaluator(body: bytes) -> FromEvaluator:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: it isn't a message of an evaluator.
    """
    message: FromEvaluator = decode(body, FromEvaluator, "message of the evaluator")
    return message


class PrepareWriter(msgspec.Struct, frozen=True, tag="prepare_writer"):
    """First message to a writer of figures: which one it is."""

    kind: ServedKind


class WriterReady(msgspec.Struct, frozen=True, tag="writer_ready"):
    """Its package is imported."""


class OpenRun(msgspec.Struct, frozen=True, tag="open_run"):
    """Begin a run, or go on with it."""

    run: RunInfo


class RunOpened(msgspec.Struct, frozen=True, tag="run_opened"):
    """The run is open."""

    where: str
    """People find it there: an address or a folder."""


class RunPoint(msgspec.Struct, frozen=True, tag="run_point"):
    """Figures to be written."""

    step: int
    wall_s: float
    values: dict[str, float]


ToRunWriter = PrepareWriter | OpenRun | RunPoint
FromRunWriter = WriterReady | RunOpened | ChildFailed | Crashed


def decode_to_run_writer(body: bytes) -> ToRunWriter:
    """Decode a frame's body as a writer of figures reads it.

    Raises:
        WireError: it isn't a message to one.
    """
    message: ToRunWriter = decode(body, ToRunWriter, "message of the daemon")
    return message


def decode_from_run_writer(body: bytes) -> FromRunWriter:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: it isn't a message of a writer of figures.
    """
    message: FromRunWriter = decode(body, FromRunWriter, "message of the run writer")
    return message


class StartInference(msgspec.Struct, frozen=True, tag="start_inference"):
    """First message to the inference process: whose policy it is to act with, and how."""

    task: bytes
    """The task as JSON of `p2pdrl.config.task.TaskConfig`."""
    seed: int
    """Of sampled actions."""
    device: str
    threads: int
    allow_import: bool
    policy_size: int
    """D."""
    policy_nbytes: int
    """Of the memory that the policy lies in."""
    shares: tuple[int, ...] = ()
    """Environments of each of the node's actors that ask; empty where they act by themselves."""
    bells: tuple[tuple[int, int], ...] = ()
    """Both descriptors of the doorbell that it hears, and of each that it rings, one for each actor: it
    inherits them."""
    step_wait_s: float = 0.0
    """How long the first actor of a batch waits for others."""
    max_rows: int = 0
    """Most environments of such a batch."""


class InferenceReady(msgspec.Struct, frozen=True, tag="inference_ready"):
    """The network is built."""

    spec: InferenceSpec
    device: str
    refusal: str = ""
    """Why it acts for actors only; empty where it answers others, too."""
    steps: StepSpec | None = None
    """How those ask; None where they act by themselves."""


class UseSlots(msgspec.Struct, frozen=True, tag="use_slots"):
    """Where batches lie from now on; the descriptor of that memory travels beside this frame."""

    nbytes: int
    rows: int
    """N, the most observations of a batch."""
    slots: int


class UseSteps(msgspec.Struct, frozen=True, tag="use_steps"):
    """Where actors ask from now on; the descriptor of that memory travels beside this frame."""

    nbytes: int


class Infer(msgspec.Struct, frozen=True, tag="infer"):
    """Act on the observations in a slot."""

    slot: int
    rows: int
    greedy: int
    """So many at the front get the likeliest action, the others a sampled one."""


class Inferred(msgspec.Struct, frozen=True, tag="inferred"):
    """The answers are in the slot, which is the daemon's again."""

    slot: int
    policy_version: int


class ActedForActors(msgspec.Struct, frozen=True, tag="acted"):
    """The batches of actors since the last of these messages."""

    environments: list[int]
    """Of each batch."""
    seconds: list[float]
    """From when its first question was seen until all were answered."""


ToInference = StartInference | UseSlots | UseSteps | Infer
FromInference = InferenceReady | Inferred | ActedForActors | ChildFailed | Crashed


def decode_to_inference(body: bytes) -> ToInference:
    """Decode a frame's body as the inference process reads it.

    Raises:
        WireError: it is another message.
    """
    message: ToInference = decode(body, ToInference, "message of the daemon")
    return message


def decode_from_inference(body: bytes) -> FromInference:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: it isn't a message of the inference process.
    """
    message: FromInference = decode(body, FromInference, "message of the inference process")
    return message


def actor_seed(seed: int, number: int, life: int) -> int:
    """Return the seed of one actor process; the first one's of actor 0 is the learner's own.

    Args:
        seed: of this node's learner.
        number: of the actor.
        life: how many processes it had before: a successor plays other episodes.
    """
    return (seed + number * _ACTOR_STEP + life * _LIFE_STEP) % 2**31
