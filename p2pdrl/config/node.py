"""This machine's half of the configuration: where to listen, what to use, whom to call.

Nodes of one swarm may differ in every field here. Durations are in seconds (``_s``), sizes
in bytes (``_bytes``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from p2pdrl.config.fields import Count, Microbatches, Natural, NonNegative, PositiveSeconds, Seconds

__all__ = [
    "TRAINS",
    "ActorsConfig",
    "CheckpointConfig",
    "DebugConfig",
    "InferenceConfig",
    "LearnerConfig",
    "LimitsConfig",
    "LogConfig",
    "MembershipProfile",
    "NodeConfig",
    "Role",
    "VideoConfig",
    "WriterKind",
    "beyond",
    "is_heir",
    "roles_in",
    "tags_of",
]


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The learner process of this node."""

    device: str = "auto"
    """``auto`` takes the first GPU if there is one; or ``cpu``, ``cuda``, ``cuda:1``."""
    threads: Count = 1
    """Threads of each torch process. More than one costs dearly when cores are shared."""
    max_updates_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Upper bound on updates a second, to leave the machine room for others; 0 is none."""
    step_delay_s: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """The learner sleeps this long at each step of its environments (all ``num_envs`` together): a slow
    environment, or a slow machine, for benchmarks. A regression sleeps once per update."""
    microbatches: Microbatches = 1
    """Parts that each gradient's batch is cut into, as equal as can be, computed one by one and added up:
    the gradient is that of the whole batch but for rounding, the memory for activations is that of one
    part. More pay off where the whole doesn't fit in memory (or in the cache), else they cost time. A
    batch of fewer rows is cut into its rows; a recurrent policy's into environments. ``auto`` measures 1,
    2, 4 and 8 during the first updates and stays with the fastest that fits. Without effect in mode pipeline,
    as are the next two keys: its peers follow ``task.strategy.microbatches``, ``checkpoint_activations``."""
    checkpoint_activations: bool = False
    """Keep only what passes between the blocks of the network and compute the rest anew on the way back (Chen
    2016, arXiv 1604.06174): less memory for about a third more time. Worth it for residual blocks and
    transformers; of an MLP, whose blocks have no inside, it frees nothing. Gradients are the same."""
    activation_limit_bytes: Natural = 0
    """With ``microbatches = auto``: how much memory a gradient may take beyond parameters and optimizer;
    0 takes what the device has. On a processor, where running out ends the process, what autograd keeps is
    counted against it, the inside of checkpointed blocks left out."""
    split_devices: tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...] = ()
    """Devices over which the network is cut, a part each, as a pipeline within this node: ``["cuda:0",
    "cuda:1"]``, or ``["cpu", "cpu"]`` to try it. Activations are then spread over them, and the parts compute
    at the same time, microbatch by microbatch: take ``microbatches`` of 4 or more, or ``auto``. The first
    device also has what ``device`` has otherwise. Not with the modes pipeline and hogwild."""
    split_cuts: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Number of the first block of each of them but the first; empty has the parts balanced by measured
    times."""
    compile: bool = False
    """Have torch.compile translate the network for gradients into machine code: the first update takes a
    minute longer, and each kind of batch a while; it needs a C++ compiler, or Triton on a GPU. Meant for
    large networks: with MLPs of 64 or 256 units a processor makes 0.96 (PPO), 0.83 (DQN) and 0.79 (SAC) of
    the steps that it makes without."""
    remote_actors: Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Actor processes of other nodes that this learner takes unrolls from, at most; each may have all of the
    task's environments. This node's own are in processes then, too. ``auto`` is 16 where ``node.roles`` says
    something, or 4 to 16 where there is a replay memory, as many as it has room for, which is
    divided among the environments that have come, anew when others do; else it is 0, or 16 for the other
    ranks of its pipeline, and nobody else, where this node has actors. A node that holds a shard of a replay
    takes unrolls likewise."""
    replay_on_disk: bool = False
    """Keep a replay memory in a file of the data folder, as large as ``task.algorithm.buffer_size`` steps
    are: a node that is started again goes on with it, and it may be larger than the machine's memory.
    Otherwise the daemon holds it in memory, where it outlives a learner that is killed but not the node."""
    restart_min_s: PositiveSeconds = 0.5
    """Wait before a learner that died is started again; doubles with each death in a row …"""
    restart_max_s: PositiveSeconds = 30.0
    """… up to this; a learner that lived for a minute begins again at the minimum."""
    give_up_after: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """The node ends (exit code 1) when its learner died so many times in a row in the same way, of the same
    error or with the same exit code, without a minute of life between; 0 tries for ever. Learners that were
    killed from outside (by a person, for want of memory) don't count."""
    stopped_deadline_s: Seconds = 15.0
    """A learner whose process was stopped for so long (SIGSTOP) is killed; another goes on from the board. 0
    waits for ever. A debugger that holds it doesn't count as stopping it."""
    hung_deadline_s: Seconds = 300.0
    """The same for a learner whose process hangs: for so long it gave no sign of life (a thread of its own
    sends one each second, however long a step takes), and neither it nor a process that it started used the
    processor. Raise this, or set 0 (wait for ever), for an environment that waits that long inside a C
    library without letting Python go on meanwhile."""


class ActorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processes of this node that act in environments for its learner."""

    count: Annotated[int, Meta(ge=0, le=256)] | Literal["auto"] = 0
    """How many. The task's ``num_envs`` environments are divided among them, so batches stay as large as they
    are. 0 has all environments in the learner's own process, which is best where they are cheap; where a step
    takes long, two actors make nearly twice the steps of one. ``auto`` takes one for each core, none on a
    single one. In a pipeline the actors of all its nodes act for the first one. More than there are
    environments is refused; a regression has none."""
    ahead: Annotated[int, Meta(ge=0, le=16)] = 0
    """Unrolls that each actor may make while the learner is still learning from older ones. With 0 all keep
    step: each unroll is made by the newest policy, and results are repeatable. 1 lets actors act while the
    learner learns, by a policy that is one update old."""
    inference: Literal["local", "batched"] = "local"
    """Who computes actions: each actor by itself, with a copy of the policy, or for all of them the process
    that answers ``POST /v1/act``, in batches and on ``node.inference.device``; actors only have environments
    then, and the policy of an unroll may become newer in the middle of it (V-trace doesn't mind; it can't
    where a learner's own actors have ``ahead = 0``). For a GPU, or a large network and actors of few
    environments: of a processor's time for a step, eight environments among 1, 2, 4, 8 actors, ``batched``
    saved a factor of 0.9, 1.2, 2.0, 2.3 with the Nature CNN, and of 0.4, 0.8, 0.8, 1.1 with CartPole's MLP
    (``scripts/bench_inference.py``). ``node.inference`` says how batches are made."""
    state_every_s: PositiveSeconds = 30.0
    """A node that acts and doesn't learn fetches the whole state, the optimizer's too, so often: the most
    that is lost when all that learn are gone."""


class InferenceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The process of this node that answers ``POST /v1/act`` with actions of the newest policy.

    It acts for this node's actors, too, if ``node.actors.inference`` says so.
    """

    device: str = "auto"
    """``auto`` takes the first GPU if there is one; or ``cpu``, ``cuda``, ``cuda:1``."""
    max_batch: Annotated[int, Meta(ge=1, le=65_536)] = 256
    """Most observations that are computed together, and that one request may bring."""
    batch_wait_s: Annotated[float, Meta(ge=0, le=1)] = 0.002
    """How long the first request of a batch waits for others, unless the batch is full before, or no actor is
    left that could ask. 0 takes what is there: quicker for one caller at a time, dearer for many."""
    max_waiting: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Observations that may wait for their batch; requests beyond them are refused (503) and may come again
    after a second."""
    deadline_s: PositiveSeconds = 30.0
    """The longest that a request waits for its answer, the start of the process included; then it is refused
    (503). A process that needs so long for one batch is killed; the next request starts another."""
    idle_s: PositiveSeconds = 60.0
    """The process ends when nobody has asked for so long, and frees its memory; the next request starts it
    again, which takes seconds. One that acts for actors stays."""


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What this node keeps on its own disk."""

    every_s: Seconds = 30.0
    """Seconds between checkpoints; 0 writes only at the end. Shorter loses less of the optimizer's
    state in a crash of every node at once, and writes more."""
    keep: Natural = 3
    """How many numbered checkpoints stay besides ``last`` and ``best``."""


class VideoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Videos of this node's policy while it trains, ``videos/step-N.mp4`` in the data folder."""

    every: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Environment steps of the whole swarm between two; 0 makes none. Wants the extra ``video``. Each is one
    greedy episode, played by a process of the lowest priority; the node rests nine times as long as that
    took, so a fast swarm leaves some out."""
    keep: Count = 10
    """How many stay: the newest."""


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on what peers may do to this node, and on what the node takes of its machine."""

    cpus: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Processors that the daemon and all its child processes use, at most; 0, or more than there are, is all.
    Which ones follows from ``node.data_dir``, so that two nodes of one machine may have others. On Linux."""
    memory_bytes: Natural = 0
    """Memory of the daemon and all its child processes together, at most; 0 is no bound. Pages that several
    share count once (PSS), and with ``node.learner.replay_on_disk`` pages of files don't. Looked at every
    2 s: at nine tenths there is a warning, and above it the node writes a checkpoint, leaves, and ends with
    exit code 1. A replay memory that wouldn't fit is refused."""
    upload_bytes_s: Natural = 0
    """Bytes that the node sends to its peers each second, at most, over ten seconds or so, all its processes
    together; 0 is no bound. Vectors wait; heads, metadata and what tells members' deaths count and never do.
    A round that can't end at this rate by ``deadline_s`` of its strategy times out, each time: the node and
    its peers train on without one another's results. A node that joins waits for its donor 10 s, and 1 s for
    each megabyte of parameters and optimizer. A pipeline's ranks wait longer for what moves at 256 KiB/s or
    faster. Peers cut a connection that brings a vector at less than 1 kB/s. Without effect on
    ``backend = "torch"``, whose connections are its own."""
    download_bytes_s: Natural = 0
    """The same for what comes from peers: what is beyond isn't read from the connection, so that TCP has
    them wait."""
    max_vector_bytes: Annotated[int, Meta(ge=1024)] = 4 * 1024**3
    """Largest parameter vector accepted from a peer."""
    max_connections: Count = 512
    """Open connections, all peers together."""
    relayed_members: Annotated[int, Meta(ge=0, le=1024)] = 16
    """Members whom nobody can dial (behind NAT, mostly) for which this node relays what others send them, at
    most; 0 relays for nobody. What is relayed counts against ``upload_bytes_s`` and ``download_bytes_s``."""
    relay_bytes_s: Natural = 25_000_000
    """Bytes that are relayed each second, all such members together and both ways; 0 is no bound."""
    max_abs_parameter: Annotated[float, Meta(gt=0, le=1e30)] = 1e6
    """A vector with an entry beyond this is refused and counts as a strike."""
    max_steps_per_s: Annotated[float, Meta(gt=0, le=1e12)] = 200_000.0
    """Environment steps a second that another node can make, at most (a regression counts rows). What one
    claims beyond that isn't counted before it was there for long enough. A node that makes more than a
    twentieth of it takes twenty times its own rate instead."""
    strikes: Count = 3
    """Poisoned vectors after which a peer is quarantined."""
    quarantine_s: PositiveSeconds = 300.0
    """How long a quarantined peer is neither met nor answered."""


WriterKind = Literal["csv", "tensorboard", "wandb", "mlflow"]
"""What writes a run's figures."""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is told on standard error, and elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is shown."""
    format: Literal["auto", "text", "json"] = "auto"
    """``auto`` writes text to a terminal and JSON lines elsewhere."""
    writers: tuple[WriterKind, ...] = ("csv",)
    """Where figures are written every five seconds, over the swarm's environment steps, and evaluations:
    ``csv`` (``metrics.csv`` in the data folder); ``tensorboard``, ``wandb`` (Weights & Biases) and
    ``mlflow`` want the extra of their name. A writer that fails is told and doesn't disturb the training."""
    project: Annotated[str, Meta(min_length=1, max_length=128)] = "p2pdrl"
    """Project of W&B, experiment of MLflow."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """``offline`` writes into the data folder, for ``wandb sync``; ``auto`` does what ``WANDB_MODE`` says."""
    mlflow_uri: str | None = None
    """MLflow's server or database; none takes ``MLFLOW_TRACKING_URI``, or else ``mlflow.db`` in the data
    folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard event files, in place of ``tensorboard`` in the data folder; setting it has them
    written."""
    opentelemetry: bool = False
    """Write each round as a span, to where the ``OTEL_…`` variables say; wants the ``otel`` extra."""


class DebugConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Knobs for experiments on the swarm itself; leave them alone when training."""

    perturb_start: NonNegative = 0.0
    """This node starts from the task's initial weights plus noise of this deviation, drawn from
    ``node.seed``, instead of a donor's state: to watch the differences average away."""
    start_at_members: Natural = 0
    """Begin no exchange before this many members are alive, ourselves included."""
    max_exchanges: Natural = 0
    """Stop initiating exchanges after this many; 0 is no bound."""


MembershipProfile = Literal["lan", "wan"]
Role = Literal["actor", "learner", "replay", "server"]
"""What a node does for its swarm, told in its signed member record; see ``NodeConfig.roles``.

An actor makes experience, a learner updates parameters; ``replay`` holds transitions for others, ``server``
parameters.
"""


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that is this machine's own."""

    name: str | None = None
    """What people call this node; none takes the host's name and the port."""
    listen: str | None = None
    """HOST:PORT to listen on; none is loopback and the first free port from 7700. Anything but
    loopback wants a swarm key."""
    advertise: str | None = None
    """HOST:PORT that others reach this node at, when it differs from ``listen`` (NAT, containers)."""
    peers: tuple[str, ...] = ()
    """Addresses of members to join through; none founds a swarm of its own."""
    discover: bool = False
    """Look for nodes of the same swarm key, or without one of the same task, on the local network, and be
    found there, by multicast DNS; what is found is tried like ``peers``, and trusted no more. Wants the
    extra ``lan``."""
    port_mapping: bool = False
    """Ask the router, by UPnP, to pass this node's port on to it, and tell others the router's address.
    Without effect with ``advertise``. A node that nobody can dial works all the same, through relays; so this
    is off, for it opens the port to the whole internet. Wants the extra ``nat``."""
    swarm: str = "default"
    """Name of a keyless swarm; with a key, the key alone tells swarms apart."""
    swarm_key_file: str | None = None
    """File that holds the swarm's secret key, made by ``p2pdrl keygen``."""
    data_dir: str | None = None
    """Folder for identity, known members, mode and checkpoints; none takes the first free one under the
    user's data folder."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Seed of this node's environments and exploration; none derives it from identity and boot."""
    start_from: str | None = None
    """Found a swarm with the parameters and normalisation of a checkpoint, for fine-tuning: a file, a folder
    of a node's data, or HOST:PORT of a running node. Everything else begins anew (docs/tuning.md). A node
    that joins a swarm takes that one's state, and one with a checkpoint of its own goes on from it."""
    mode_from_config: bool = False
    """When no other node runs, begin in the mode of the configuration, and not in the one that the swarm
    was in last."""
    keep_running: bool = False
    """Stay up, serving state and numbers, after the swarm's stop condition is met."""
    insecure: bool = False
    """Listen beyond loopback without a swarm key: anyone who reaches the port can take part."""
    allow_import: bool = False
    """Import what this node's own configuration names as ``module:name`` (``task.env.id``,
    ``task.network.own``), which runs its code. A task that a peer brings imports nothing by this."""
    imports: tuple[str, ...] = ()
    """Each ``module:name`` that a task may import here whoever brings it, as ``["my_envs:Pole"]``."""
    trusted_network: bool = False
    """Let strategies use torch.distributed (``backend = "torch"``, or a pipeline's ``auto``). Its store and
    connections listen on further ports without authentication or encryption: anyone who reaches them can read
    and change what is averaged or computed. And with a swarm key, vectors between two nodes that both say so
    are authenticated and not encrypted, which spares about 0.2 ms of processor time a megabyte. Only where
    every machine on the network may be trusted."""
    open_metrics: bool = False
    """Answer ``/metrics`` without authentication even when a swarm key is set."""
    membership: MembershipProfile = "lan"
    """``lan`` finds deaths within seconds; ``wan`` tolerates round trips of seconds."""
    roles: tuple[Role, ...] = ()
    """What this node does for the swarm: any of ``actor`` (makes experience), ``learner`` (updates
    parameters), ``server`` (holds parameters for others), ``replay`` (holds transitions). Empty is all that
    the task needs. All members are told, in this node's signed record; learners exchange with learners only.
    Of algorithms with a replay memory: a node that only learns draws from all nodes with ``replay`` and no
    ``learner``, each of which holds a shard of ``task.algorithm.buffer_size`` steps, and actors send there;
    with ``learner,replay`` the memory is the learner's own."""
    promote: bool = True
    """A node that only acts begins to learn, from the newest whole state that it has, when nobody is left who
    does; of several the first by id."""
    learner: LearnerConfig = LearnerConfig()
    actors: ActorsConfig = ActorsConfig()
    inference: InferenceConfig = InferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    video: VideoConfig = VideoConfig()
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def learns(self) -> bool:
        """Whether it updates parameters."""
        return not self.roles or "learner" in self.roles

    @property
    def acts(self) -> bool:
        """Whether it makes experience."""
        return not self.roles or "actor" in self.roles

    @property
    def holds_replay(self) -> bool:
        """Whether it holds a shard of a replay memory for learners on other nodes."""
        return "replay" in self.roles and "learner" not in self.roles

    @property
    def draws_replay(self) -> bool:
        """Whether its learner draws from such shards, where the algorithm has a replay memory."""
        return "learner" in self.roles and "replay" not in self.roles and "actor" not in self.roles

    @property
    def may_learn(self) -> bool:
        """Whether it acts and doesn't learn, but would if nobody else did."""
        return self.promote and not self.learns and self.acts and not self.holds_replay

    @property
    def may_import(self) -> bool:
        """Whether anything may be imported; a task's names are checked where the task comes in."""
        return self.allow_import or bool(self.imports)

    def placed(self) -> NodeConfig:
        """The same with absolute paths of key and data folder, of which commands on this machine are told."""
        return msgspec.structs.replace(
            self, swarm_key_file=_absolute(self.swarm_key_file), data_dir=_absolute(self.data_dir)
        )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


TRAINS: frozenset[str] = frozenset({"learner", "server"})
"""Roles of those who hold the swarm's parameters: they alone exchange them, give states away, take newcomers
in and change settings. Who is certified for others alone does none of that."""

_ROLES_TAG = "roles"
_HEIR_TAG = "heir"
_ALL_NEEDED: tuple[Role, ...] = ("actor", "learner", "server")
"""What every task there is needs; a replay memory is its learner's own then."""


def tags_of(roles: Sequence[Role], *, promote: bool = False) -> dict[str, str]:
    """The tags of a member record that tell ``roles``; none given are all that a task needs.

    Args:
        promote: whether it may learn, too, when nobody is left who does.
    """
    may = promote and "actor" in roles and "learner" not in roles and "replay" not in roles
    heir = {_HEIR_TAG: "yes"} if may else {}
    return {_ROLES_TAG: ",".join(sorted(set(roles or _ALL_NEEDED)))} | heir


def beyond(tags: Mapping[str, str], allowed: Collection[str] | None) -> tuple[Role, ...]:
    """The roles that a member's tags tell, or hope for, beyond those that its certificate allows.

    Args:
        allowed: None for no limit.
    """
    if allowed is None:
        return ()
    told = (*roles_in(tags), *(("learner",) if _HEIR_TAG in tags else ()))
    return tuple(dict.fromkeys(role for role in told if role not in allowed))


def is_heir(tags: Mapping[str, str], allowed: Collection[str] | None = None) -> bool:
    """Whether a member that doesn't learn would, if nobody else did, and its certificate allows it."""
    return _HEIR_TAG in tags and "learner" not in roles_in(tags) and (allowed is None or "learner" in allowed)


def roles_in(tags: Mapping[str, str], allowed: Collection[str] | None = None) -> tuple[Role, ...]:
    """The roles that a member's tags tell, in order; words of later releases are passed over.

    A member of an earlier release tells none: it does all that its task needs.

    Args:
        allowed: those that its certificate allows; None for all.
    """
    told = tags.get(_ROLES_TAG)
    words = _ALL_NEEDED if told is None else told.split(",")
    return tuple(role for role in get_args(Role) if role in words and (allowed is None or role in allowed))
