"""Who computes and sends what in which order: schedules of pipeline parallelism.

With M microbatches and R ranks, rank r does, and stores at once at most the activations of:

``gpipe``: all forwards, then all backwards (Huang 2019, arXiv 1811.06965, figure 2c). M microbatches.

``1f1b``: R−r−1 forwards, then one forward and one backward in turn, then the backwards that are left
(PipeDream-Flush: Narayanan 2021, arXiv 2006.09503, section 2.2). min(M, R−r) microbatches.

``interleaved``: the same with V stages per rank, K microbatches through one of them before the next, and
(V−1)·K + 2(R−r−1) forwards ahead (Narayanan 2021, arXiv 2104.04473, section 2.2). One more than these
microbatches, and at most V·M, each through one stage only, which is 1/V of the rank's layers.

Rank r holds the stages r, r+R, r+2R, … Stages and microbatches are counted from 0, and all gradients of
one batch are of the same parameters: nobody steps before the last backward.

Sends are asynchronous: they cost their rank no time. A receive waits for its message, right before the
forward or backward that needs it. Messages form one stream per (sender, receiver, activation or gradient)
and are received in the order in which they were sent; streams must hold all that is sent. Then none of
these schedules deadlocks: only receives wait, and never in a circle, which `check_schedule` proves of any
schedule by running it. No stream ever holds more messages than the one of its two ranks that is nearer to
the model's input stores activations. Stages of one rank (R = 1) hand over without messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from p2pdrl.config.schedules import ScheduleName
from p2pdrl.errors import ConfigError

__all__ = [
    "Action",
    "Kind",
    "MessageRoute",
    "Schedule",
    "ScheduleName",
    "check_schedule",
    "computes_anew",
    "make_schedule",
    "peak_activations",
    "route",
]

Kind = Literal["forward", "backward", "send_activation", "recv_activation", "send_gradient", "recv_gradient"]


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: ``send_activation`` sends the stage's output to the next stage, ``recv_activation`` its input;
            ``send_gradient`` sends the gradient of its input back, ``recv_gradient`` gets its output's.
        stage: the stage that does it, 0 … S−1; its rank is the remainder by R.
        microbatch: 0 … M−1.
    """

    kind: Kind
    stage: int
    microbatch: int


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


class MessageRoute(NamedTuple):
    """From which stage to which a message goes: to the next an activation, to the one before a gradient."""

    source: int
    target: int


def make_schedule(
    name: ScheduleName, stages: int, microbatches: int, *, ranks: int | None = None
) -> Schedule:
    """Make the schedule of one batch.

    Args:
        name: of the schedule.
        stages: S, of the whole model.
        microbatches: M. Interleaved needs M to be a multiple of the number of rounds max(1, M // R), which
            holds for all M < 2R and, as in the paper, for multiples of R.
        ranks: R devices; S by default. Interleaved needs it, with S = V·R and V of at least 2.

    Raises:
        ConfigError: the name is unknown, or the numbers don't fit it.
    """
    if name not in get_args(ScheduleName):
        raise ConfigError(f"there is no schedule {name!r}: take {', '.join(get_args(ScheduleName))}")
    if stages < 1 or microbatches < 1:
        raise ConfigError(
            f"{stages} stages and {microbatches} microbatches: there must be at least one of each"
        )
    if name == "interleaved":
        orders = _interleaved(stages, microbatches, ranks)
    else:
        if ranks not in {None, stages}:
            raise ConfigError(
                f"{name} runs one stage per rank, not {stages} on {ranks}: take interleaved for more"
            )
        make = _gpipe if name == "gpipe" else _1f1b
        orders = [make(rank, stages, microbatches) for rank in range(stages)]
    return tuple(tuple(_with_messages(order, stages, len(orders))) for order in orders)


def _gpipe(rank: int, _stages: int, microbatches: int) -> list[Action]:
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return [Action(kind, rank, microbatch) for kind in kinds for microbatch in range(microbatches)]


def _1f1b(rank: int, stages: int, microbatches: int) -> list[Action]:
    forwards = [Action("forward", rank, microbatch) for microbatch in range(microbatches)]
    backwards = [Action("backward", rank, microbatch) for microbatch in range(microbatches)]
    return _in_turn(forwards, backwards, warmup=stages - rank - 1)


def _interleaved(stages: int, microbatches: int, ranks: int | None) -> list[list[Action]]:
    """Stages of a rank take turns, K microbatches each; backwards begin with the last of them.

    The number of rounds is PyTorch's: with M a multiple of R, K is R as in the paper.
    """
    if ranks is None or ranks < 1:
        raise ConfigError("interleaved needs the number of ranks, of which each gets several stages")
    if stages % ranks or stages == ranks:
        raise ConfigError(
            f"interleaved runs the same number of stages, 2 or more, on each rank, and {stages} don't fit "
            f"{ranks} ranks so: take {2 * ranks} or {3 * ranks} stages, or 1f1b for one stage per rank"
        )
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        below = microbatches - microbatches % ranks
        raise ConfigError(
            f"interleaved over {ranks} ranks can't run {microbatches} microbatches: make them a multiple of "
            f"{ranks} ({below} or {below + ranks}), or fewer than {2 * ranks}"
        )
    size, chunks = microbatches // rounds, stages // ranks

    def action(kind: Kind, rank: int, step: int) -> Action:
        chunk = step // size % chunks
        stage = rank + ranks * (chunk if kind == "forward" else chunks - 1 - chunk)
        return Action(kind, stage, step // (size * chunks) * size + step % size)

    return [
        _in_turn(
            [action("forward", rank, step) for step in range(chunks * microbatches)],
            [action("backward", rank, step) for step in range(chunks * microbatches)],
            warmup=(chunks - 1) * size + 2 * (ranks - rank - 1),
        )
        for rank in range(ranks)
    ]


def _in_turn(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _with_messages(order: Iterable[Action], stages: int, ranks: int) -> Iterator[Action]:
    """Each forward and backward between the receive that it needs and the send of what it makes."""
    for action in order:
        before, after = _messages(action, stages, ranks)
        yield from (*before, action, *after)


def _messages(action: Action, stages: int, ranks: int) -> tuple[list[Action], list[Action]]:
    _, stage, microbatch = action
    if ranks == 1:
        return [], []
    first, last = stage == 0, stage == stages - 1
    if action.kind == "forward":
        return (
            [] if first else [Action("recv_activation", stage, microbatch)],
            [] if last else [Action("send_activation", stage, microbatch)],
        )
    return (
        [] if last else [Action("recv_gradient", stage, microbatch)],
        [] if first else [Action("send_gradient", stage, microbatch)],
    )


def route(action: Action) -> MessageRoute:
    """From which stage to which the message of a send or receive goes."""
    stage = action.stage
    if action.kind == "send_activation":
        return MessageRoute(stage, stage + 1)
    if action.kind == "recv_activation":
        return MessageRoute(stage - 1, stage)
    if action.kind == "send_gradient":
        return MessageRoute(stage, stage - 1)
    if action.kind == "recv_gradient":
        return MessageRoute(stage + 1, stage)
    raise ValueError(f"a {action.kind} sends nothing")


def peak_activations(actions: Iterable[Action]) -> int:
    """Most forwards of one rank whose backward is still to come: what it must keep in memory at once."""
    stored = peak = 0
    for action in actions:
        stored += (action.kind == "forward") - (action.kind == "backward")
        peak = max(peak, stored)
    return peak


def computes_anew(checkpoint: bool, stored: int) -> bool:
    """Whether a rank keeps only what comes into its stages and goes out, and computes the rest anew.

    Args:
        checkpoint: that is wanted.
        stored: the rank's `peak_activations`. With one there is nothing to be saved.
    """
    return checkpoint and stored > 1


def check_schedule(schedule: Sequence[Sequence[Action]], stages: int, microbatches: int) -> None:
    """Make sure that a schedule, from wherever it comes, computes one batch and ends.

    Every forward and backward comes once and on the rank of its stage, every message is sent and received
    once, each after what it needs, in the order of its stream; and running it comes to its end. The work is
    linear in the number of actions, which is compared with S and M first.

    Raises:
        ConfigError: something of this doesn't hold; says what, and on which rank.
    """
    ranks = len(schedule)
    if ranks < 1 or stages < 1 or microbatches < 1 or stages % ranks:
        raise ConfigError(
            f"no schedule of {microbatches} microbatches through {stages} stages has {ranks} ranks"
        )
    for rank, actions in enumerate(schedule):
        _check_complete(rank, actions, stages, microbatches, ranks)
    _run(schedule, stages)


def _check_complete(rank: int, actions: Sequence[Action], stages: int, microbatches: int, ranks: int) -> None:
    own = range(rank, stages, ranks)
    each = sum(2 + (0 if ranks == 1 else 2 * (s > 0) + 2 * (s < stages - 1)) for s in own)
    if len(actions) != each * microbatches:
        raise ConfigError(f"rank {rank} has {len(actions)} actions, not {each * microbatches}")
    computes: list[Kind] = ["forward", "backward"]
    orders = (Action(kind, s, m) for kind in computes for s in own for m in range(microbatches))
    missing = set(_with_messages(orders, stages, ranks))
    for action in actions:
        if action not in missing:
            raise ConfigError(f"rank {rank}: {_words(action)} isn't its to do, or comes twice")
        missing.remove(action)


def _run(schedule: Sequence[Sequence[Action]], stages: int) -> None:
    """Run all ranks; only receives wait."""
    ranks = len(schedule)
    done: set[Action] = set()
    streams: defaultdict[tuple[int, int, bool], deque[tuple[MessageRoute, int]]] = defaultdict(deque)
    todo = [deque(actions) for actions in schedule]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(todo):
            while actions:
                action = actions[0]
                _check_needs(rank, action, done, stages, ranks)
                if action.kind not in {"forward", "backward"}:
                    way = route(action)
                    stream = streams[way.source % ranks, way.target % ranks, way.target > way.source]
                    if action.kind.startswith("send"):
                        stream.append((way, action.microbatch))
                    elif not stream:
                        break
                    elif stream.popleft() != (way, action.microbatch):
                        raise ConfigError(
                            f"rank {rank}: another message arrives before that of {_words(action)}"
                        )
                done.add(actions.popleft())
                progress = True
    if any(todo):
        waits = [f"rank {rank} for {_words(actions[0])}" for rank, actions in enumerate(todo) if actions]
        raise ConfigError(f"the schedule never ends: {', '.join(waits[:8])}, each waiting for the others")


def _check_needs(rank: int, action: Action, done: set[Action], stages: int, ranks: int) -> None:
    for need in _needs(action, stages, ranks):
        if need not in done:
            raise ConfigError(f"rank {rank}: {_words(action)} comes before {_words(need)}")


def _needs(action: Action, stages: int, ranks: int) -> Iterator[Action]:
    """What the same rank must have done before; what others must have done is in the streams."""
    kind, stage, microbatch = action
    if kind in {"backward", "send_activation"}:
        yield Action("forward", stage, microbatch)
    if kind == "send_gradient":
        yield Action("backward", stage, microbatch)
    if kind == "forward" and stage > 0:
        yield Action("recv_activation", stage, microbatch) if ranks > 1 else action._replace(stage=stage - 1)
    if kind == "backward" and stage < stages - 1:
        yield Action("recv_gradient", stage, microbatch) if ranks > 1 else action._replace(stage=stage + 1)


def _words(action: Action) -> str:
    return f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
