"""Whether a pipeline pays: how long an update takes in it, and on one peer alone that accumulates.

A peer alone computes its microbatches one after another and sends nothing. In a pipeline microbatches pass
as `timeline` predicts; then the sums of squares come up to the first rank, which steps with everybody by
them. At the end of an update it fetches all other ranks' parameters through the chain, and every so many
updates the optimizer's state too, which all get as a whole. What both ways have in common, like collecting
experience and the optimizer's arithmetic, isn't counted. Ranks talk to their neighbours only: what comes from
far down passes through all between, each of whom has the whole of it before it sends it on.

Peers are told by index; the first of them makes the experience and is rank 0 whatever the order of the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import FREE, Layer, Links, Peer, PeerLink, link_between
from p2pdrl.pipeline.partition import (
    MOST_PEERS,
    Demands,
    Partition,
    in_order,
    partition,
    partition_at,
    partition_in_best_order,
)
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import ScheduleName, computes_anew, make_schedule, peak_activations, route
from p2pdrl.pipeline.timeline import MicrobatchCosts, Timeline, predict
from p2pdrl.pipeline.wording import in_bytes, in_seconds

__all__ = [
    "Advice",
    "Alone",
    "Pipeline",
    "PipelineOptions",
    "Traffic",
    "UpdateWork",
    "advise",
    "busiest",
    "bytes_alone",
    "fetch_s",
    "spread_s",
    "step_s",
    "too_large",
]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What there is to compute.

    Attributes:
        blocks: what each block costs on the first peer for one microbatch, by the number of microbatches
            that a minibatch is cut into. Numbers that aren't there are worked out of the nearest that is, as
            though a microbatch's cost were proportional to its rows.
        input_bytes: of a whole minibatch.
        parameter_copies: as of `Demands`.
        checkpoint: whether ranks that store several microbatches compute their activations anew.
        state_every: updates until the optimizer's state is fetched and spread; 0 is never.
        state_vectors: how many vectors as long as the parameters that state has; Adam has 2.
    """

    blocks: Mapping[int, Sequence[Layer]]
    minibatches: int = 1
    input_bytes: float = 0.0
    parameter_copies: float = 4.0
    checkpoint: bool = False
    state_every: int = 0
    state_vectors: int = 2

    def check(self) -> None:
        """Raise a `ConfigError` for a number that makes no sense, or when nothing is known."""
        if not self.blocks or min(self.blocks) < 1 or not all(self.blocks.values()):
            raise ConfigError("nothing was measured: there must be blocks for 1 microbatch or more")
        if self.minibatches < 1 or self.state_every < 0 or self.state_vectors < 0:
            raise ConfigError(
                f"{self.minibatches} minibatches an update, state every {self.state_every} updates: "
                "the one begins at 1, the other at 0"
            )

    def layers(self, microbatches: int) -> list[Layer]:
        """Return what one of so many microbatches costs."""
        nearest = min(self.blocks, key=lambda known: (abs(math.log(known / microbatches)), known))
        part = nearest / microbatches
        return [
            layer._replace(
                forward_s=layer.forward_s * part,
                backward_s=layer.backward_s * part,
                output_bytes=layer.output_bytes * part,
                inner_bytes=layer.inner_bytes * part,
            )
            for layer in self.blocks[nearest]
        ]

    def demands(self, microbatches: int, peaks: tuple[int, ...] = (1,), chunks: int = 1) -> Demands:
        """Return what stages keep where each rank stores ``peaks`` microbatches, in ``chunks`` stages."""
        stored = tuple(math.ceil(peak / chunks) for peak in peaks)
        anew = tuple(computes_anew(self.checkpoint, peak) for peak in peaks)
        return Demands(self.parameter_copies, stored * chunks, anew * chunks, self.input_bytes / microbatches)


class Traffic(NamedTuple):
    """What passes between two ranks in one update.

    Attributes:
        update_bytes: both ways.
        bandwidth_bytes_s: at which these bytes pass, one direction after the other.
        latency_s: of the slower direction.
        busy_s: how long they take so, latencies not counted.
    """

    ranks: tuple[int, int]
    update_bytes: float
    bandwidth_bytes_s: float
    latency_s: float
    busy_s: float


def step_s(timeline: Timeline, links: Links) -> float:
    """When the first rank knows the sum of squares of all ranks, and can step.

    Each adds its own to those from below and sends them up behind its last gradient.
    """
    known_s = 0.0
    for rank in reversed(range(len(timeline.rows))):
        row = timeline.rows[rank]
        known_s = max(known_s, *(t.end_s for t in row if t.action.kind == "backward"))
        if rank > 0:
            before_s = (t.end_s for t in row if t.action.kind == "send_gradient")
            known_s = max(known_s + link_between(links, rank, rank - 1).latency_s, *before_s)
    return known_s


def fetch_s(slice_bytes: Sequence[float], links: Links) -> float:
    """How long the first rank takes to ask for all ranks' slices and get them; its own needn't travel."""
    ranks = len(slice_bytes)
    asked_s = [0.0]
    for rank in range(1, ranks):
        asked_s.append(asked_s[-1] + link_between(links, rank - 1, rank).latency_s)
    arrivals_s: list[float] = []
    for rank in range(ranks - 1, 0, -1):
        link = link_between(links, rank, rank - 1)
        free_s, passed_s = 0.0, []
        for ready_s, size in zip([asked_s[rank], *arrivals_s], slice_bytes[rank:], strict=True):
            free_s = max(free_s, ready_s) + link.busy_s(size)
            passed_s.append(free_s + link.latency_s)
        arrivals_s = passed_s
    return max(arrivals_s, default=0.0)


def spread_s(size_bytes: float, ranks: int, links: Links) -> float:
    """How long it takes until the last rank has something of the first."""
    return sum(link_between(links, rank, rank + 1).transfer_s(size_bytes) for rank in range(ranks - 1))


def busiest(
    timeline: Timeline,
    costs: MicrobatchCosts,
    minibatches: int,
    slice_bytes: Sequence[float],
    spread_bytes: float = 0.0,
) -> Traffic | None:
    """Return the neighbours between whom an update's bytes take longest; None where all links are free.

    An update sends ``slice_bytes`` of each rank up through all above it, and ``spread_bytes`` of the first
    rank down through all.
    """
    ranks = len(timeline.rows)
    sent: defaultdict[tuple[int, int], float] = defaultdict(float)
    for row in timeline.rows:
        for action in (t.action for t in row if t.action.kind.startswith("send")):
            way = route(action)
            sent[way.source % ranks, way.target % ranks] += minibatches * costs.boundary_bytes(way)
    for rank in range(1, ranks):
        sent[rank, rank - 1] += sum(slice_bytes[rank:])
        sent[rank - 1, rank] += spread_bytes
    between = [_traffic(sent, costs.links, (a, b)) for a, b in sent if a < b]
    slowest = max(between, key=lambda one: (one.busy_s, one.latency_s), default=None)
    return slowest if slowest is not None and slowest.busy_s + slowest.latency_s > 0.0 else None


def _traffic(sent: Mapping[tuple[int, int], float], links: Links, ranks: tuple[int, int]) -> Traffic:
    ways = [ranks, ranks[::-1]]
    size = sum(sent.get(way, 0.0) for way in ways)
    busy_s = sum(link_between(links, *way).busy_s(sent.get(way, 0.0)) for way in ways)
    return Traffic(
        ranks=ranks,
        update_bytes=size,
        bandwidth_bytes_s=size / busy_s if busy_s > 0.0 else math.inf,
        latency_s=max(link_between(links, *way).latency_s for way in ways),
        busy_s=busy_s,
    )


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How the pipeline is to be.

    Attributes:
        microbatches: numbers to choose from.
    """

    schedule: ScheduleName = "1f1b"
    microbatches: tuple[int, ...] = (4,)
    chunks: int = 1
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alone:
    """One peer that computes all.

    Attributes:
        update_s: all minibatches of an update.
        step_s: one of them.
    """

    peer: int
    microbatches: int
    update_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All peers, one behind the other.

    Attributes:
        order: indices of the peers by rank; the first is 0.
        minibatch_s: until the first rank has stepped.
        fetch_s: until it has all parameters, at the end of an update; the mean with and without the
            optimizer's state and its spreading.
        update_s: all minibatches of an update, and the end of it.
        step_s: one minibatch's part of that.
        slowest: the neighbours whose link is busy for longest, and with what.
    """

    plan: PipelinePlan
    order: tuple[int, ...]
    timeline: Timeline
    minibatch_s: float
    fetch_s: float
    update_s: float
    step_s: float
    slowest: Traffic | None


@dataclass(frozen=True, slots=True)
class Advice:
    """What would be best, and why.

    Attributes:
        take_pipeline: whether the pipeline is at least as fast as the fastest peer alone, or the only way.
        why: in a sentence, with numbers.
    """

    take_pipeline: bool
    why: str
    pipeline: Pipeline | None
    alone: Alone | None


def advise(
    work: UpdateWork, peers: Sequence[Peer], links: Links = FREE, options: PipelineOptions = PipelineOptions()
) -> Advice:
    """Predict both ways, and choose.

    Peers' speeds are relative to the first, on which the blocks were measured. A link between two others that
    nobody measured is taken to be as bad as the worse of theirs with the first peer.

    Raises:
        ConfigError: a number makes no sense, or the model fits neither a peer alone nor all together.
    """
    work.check()
    if not peers or not options.microbatches or min(options.microbatches) < 1:
        raise ConfigError("advice needs a peer, and numbers of microbatches from 1 on")
    alone = _best_alone(work, peers, options.microbatches)
    pipeline, trouble = None, "there is one peer only"
    if len(peers) > 1:
        try:
            pipeline = _best_pipeline(work, peers, _completed(links, len(peers)), options)
        except ConfigError as error:
            if alone is None:
                raise
            trouble = str(error)
    if alone is None and pipeline is None:
        raise ConfigError(too_large(work, peers, options.microbatches))
    take = pipeline is not None and (alone is None or pipeline.update_s <= alone.update_s)
    if pipeline is None:
        assert alone is not None  # noqa: S101 - checked above
        why = (
            f"{peers[alone.peer].name} alone takes {in_seconds(alone.step_s)} a step: no pipeline, {trouble}"
        )
    elif alone is None:
        trouble = too_large(work, peers, options.microbatches)
        why = f"{_over(peers, pipeline)} takes {in_seconds(pipeline.step_s)} a step: {trouble}"
    else:
        why = _compared(peers, pipeline, alone, take)
    return Advice(take, why, pipeline, alone)


def _best_alone(work: UpdateWork, peers: Sequence[Peer], numbers: Sequence[int]) -> Alone | None:
    """The fastest peer on which the model fits."""
    best: Alone | None = None
    for microbatches in numbers:
        layers = work.layers(microbatches)
        seconds = sum(layer.forward_s + layer.backward_s for layer in layers)
        needs = bytes_alone(work, microbatches)
        for index, peer in enumerate(peers):
            peer.check()
            each_s = microbatches * seconds / peer.speed
            if needs <= peer.memory_bytes and (best is None or each_s < best.step_s):
                best = Alone(index, microbatches, work.minibatches * each_s, each_s)
    return best


def bytes_alone(work: UpdateWork, microbatches: int) -> float:
    """Return what one peer alone needs."""
    (stage,) = partition_at(
        work.layers(microbatches), [Peer("alone")], (), demands=work.demands(microbatches)
    ).stages
    return stage.memory_bytes


def too_large(work: UpdateWork, peers: Sequence[Peer], numbers: Sequence[int]) -> str:
    """Say what one peer alone needs, and what the largest of some has."""
    needs = min(bytes_alone(work, microbatches) for microbatches in numbers)
    largest = max(peers, key=lambda peer: peer.memory_bytes)
    return (
        f"the model doesn't fit one peer alone, for it needs {in_bytes(needs)}, "
        f"and {largest.name} has {in_bytes(largest.memory_bytes)}"
    )


def _best_pipeline(
    work: UpdateWork, peers: Sequence[Peer], links: Links, options: PipelineOptions
) -> Pipeline:
    """The fastest of all numbers of microbatches that the schedule allows and the memory bears.

    Raises:
        ConfigError: there is none.
    """
    found: list[Pipeline] = []
    trouble: ConfigError | None = None
    for microbatches in options.microbatches:
        try:
            found.append(_pipeline(work, peers, links, options, microbatches))
        except ConfigError as error:
            trouble = trouble or error
    if not found:
        assert trouble is not None  # noqa: S101 - there are numbers
        raise trouble
    return min(found, key=lambda one: one.update_s)


def _pipeline(
    work: UpdateWork, peers: Sequence[Peer], links: Links, options: PipelineOptions, microbatches: int
) -> Pipeline:
    ranks = len(peers)
    schedule = make_schedule(options.schedule, ranks * options.chunks, microbatches, ranks=ranks)
    peaks = tuple(peak_activations(actions) for actions in schedule)
    demands = work.demands(microbatches, peaks, options.chunks)
    order, cut = _cut(work.layers(microbatches), peers, links, options, demands)
    between = in_order(links, order)
    timeline = predict(schedule, cut.costs(between))
    slices = [sum(stage.parameter_bytes for stage in cut.stages[rank::ranks]) for rank in range(ranks)]
    minibatch_s, end_s = step_s(timeline, between), fetch_s(slices, between)
    fetched, spread = 1.0, 0.0
    if work.state_every:
        vectors = 1 + work.state_vectors
        state_s = fetch_s([vectors * size for size in slices], between)
        state_s += spread_s(vectors * sum(slices), ranks, between)
        end_s += (state_s - end_s) / work.state_every
        fetched, spread = 1 + work.state_vectors / work.state_every, vectors / work.state_every
    update_s = work.minibatches * minibatch_s + end_s
    plan = PipelinePlan(cut.stages[-1].stop, cut.cuts, options.schedule, microbatches, ranks)
    return Pipeline(
        plan=plan,
        order=order,
        timeline=timeline,
        minibatch_s=minibatch_s,
        fetch_s=end_s,
        update_s=update_s,
        step_s=update_s / work.minibatches,
        slowest=busiest(
            timeline,
            cut.costs(between),
            work.minibatches,
            [fetched * size for size in slices],
            spread * sum(slices),
        ),
    )


def _cut(
    layers: Sequence[Layer], peers: Sequence[Peer], links: Links, options: PipelineOptions, demands: Demands
) -> tuple[tuple[int, ...], Partition]:
    """The order of the peers, which is searched for where it can be, and the stages."""
    given = tuple(range(len(peers)))
    if not options.cuts and options.chunks == 1 and len(peers) <= MOST_PEERS:
        return partition_in_best_order(layers, peers, links=links, demands=demands, first=0)
    places = [
        peer._replace(memory_bytes=peer.memory_bytes / options.chunks)
        for _ in range(options.chunks)
        for peer in peers
    ]
    if isinstance(links, Mapping):  # by place: the peers come again and again
        count = range(len(places))
        links = {
            (a, b): links[a % len(peers), b % len(peers)]
            for a in count
            for b in count
            if a % len(peers) != b % len(peers)
        }
    if options.cuts:
        return given, partition_at(layers, places, options.cuts, links=links, demands=demands)
    return given, partition(layers, places, links=links, demands=demands)


def _completed(links: Links, peers: int) -> Links:
    """All directions of all pairs, as far as the first peer's are known."""
    if not isinstance(links, Mapping):
        return links
    complete = dict(links)
    pairs = [(a, b) for a in range(peers) for b in range(peers) if a != b and (a, b) not in links]
    for a, b in pairs:
        if (a, 0) in links and (0, b) in links:
            one, other = links[a, 0], links[0, b]
            complete[a, b] = PeerLink(
                max(one.latency_s, other.latency_s), min(one.bandwidth_bytes_s, other.bandwidth_bytes_s)
            )
        else:
            raise ConfigError(f"nothing is known about the link from {a} to {b}")
    return complete


def _over(peers: Sequence[Peer], pipeline: Pipeline) -> str:
    return f"a pipeline over {', '.join(peers[index].name for index in pipeline.order)}"


def _compared(peers: Sequence[Peer], pipeline: Pipeline, alone: Alone, take: bool) -> str:
    """The sentence where there is a choice."""
    name = peers[alone.peer].name
    both = (
        f"{_over(peers, pipeline)} {'takes' if take else 'would take'} {in_seconds(pipeline.step_s)} a step, "
        f"{name} alone {'would take' if take else 'takes'} {in_seconds(alone.step_s)}"
    )
    slowest = pipeline.slowest
    if slowest is None:
        idle = sum(pipeline.timeline.bubbles) / len(pipeline.timeline.bubbles)
        return f"{both}: peers idle {idle:.0%} of the time"
    limited = slowest.bandwidth_bytes_s < math.inf
    rate = f" over {in_bytes(slowest.bandwidth_bytes_s)}/s" if limited else ""
    latency = f", {in_seconds(slowest.latency_s)} each way" if slowest.latency_s > 0.0 else ""
    return f"{both}: {in_bytes(slowest.update_bytes)} an update{rate}{latency}"
