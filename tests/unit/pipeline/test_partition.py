"""Cuts against trying all of them, and cuts by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import Layer, Peer, PeerLink
from p2pdrl.pipeline.partition import Demands, partition, partition_at
from p2pdrl.pipeline.schedule import make_schedule, peak_activations
from p2pdrl.pipeline.timeline import predict


def plain(*times, parameter_bytes=0.0, output_bytes=0.0, inner_bytes=0.0):
    return [
        Layer(f"l{i}", t / 4, 3 * t / 4, parameter_bytes, output_bytes, inner_bytes)
        for i, t in enumerate(times)
    ]


def stage_costs(layers, peers, edges, links, demands):
    """Seconds and memory of each stage, summed layer by layer."""
    sizes = [demands.input_bytes, *(layer.output_bytes for layer in layers)]
    for k, (peer, start, stop) in enumerate(zip(peers, edges, edges[1:], strict=False)):
        inside = layers[start:stop]
        anew = demands.checkpoint if isinstance(demands.checkpoint, bool) else demands.checkpoint[k]
        total_s = sum((1 + anew) * layer.forward_s + layer.backward_s for layer in inside) / peer.speed
        if k + 1 < len(peers):
            for way in [(k, k + 1), (k + 1, k)]:
                link = links if isinstance(links, PeerLink) else links[way]
                total_s += link.latency_s + sizes[stop] / link.bandwidth_bytes_s
        stored = demands.stored if isinstance(demands.stored, int) else demands.stored[k]
        between = sum(layer.output_bytes + layer.inner_bytes for layer in inside) - sizes[stop]
        kept = (sizes[start] + sizes[stop]) * stored + between * (1 if anew else stored)
        yield total_s, demands.parameter_copies * sum(layer.parameter_bytes for layer in inside) + kept


def tried(layers, peers, links, demands):
    """(slowest stage, sum of stages, cuts) of every cut that fits."""
    for cuts in itertools.combinations(range(1, len(layers)), len(peers) - 1):
        stages = list(stage_costs(layers, peers, [0, *cuts, len(layers)], links, demands))
        if all(size <= peer.memory_bytes for (_, size), peer in zip(stages, peers, strict=True)):
            yield max(s for s, _ in stages), sum(s for s, _ in stages), cuts


# Quarters and powers of two: sums are exact, so that ties are ties.
quarters = st.integers(0, 40).map(lambda n: n / 4)
sizes = st.integers(0, 64).map(lambda n: 2.0**20 * n)
links = st.builds(PeerLink, quarters, st.sampled_from([2.0**18, 2.0**20, 2.0**24, math.inf]))


@st.composite
def chains(draw, most_peers=4):
    count = draw(st.integers(1, most_peers))
    layers = draw(
        st.lists(
            st.builds(Layer, st.just("l"), quarters, quarters, sizes, sizes, sizes),
            min_size=count,
            max_size=8,
        )
    )
    memory = st.one_of(st.just(math.inf), st.integers(0, 1500).map(lambda n: 2.0**20 * n))
    peers = [Peer(f"p{n}", draw(st.sampled_from([0.25, 0.5, 1.0, 2.0])), draw(memory)) for n in range(count)]
    pairs = itertools.permutations(range(count), 2)
    between = draw(links) if draw(st.booleans()) else {pair: draw(links) for pair in pairs}
    stored = st.one_of(st.integers(1, 4), st.tuples(*[st.integers(1, 4)] * count))
    anew = st.one_of(st.booleans(), st.tuples(*[st.booleans()] * count))
    demands = Demands(draw(st.sampled_from([1.0, 4.0])), draw(stored), draw(anew), draw(sizes))
    return layers, peers, between, demands


@given(chains())
@settings(max_examples=200, deadline=None)
def test_the_cut_is_the_best_of_all(chain):
    layers, peers, between, demands = chain
    ways = list(tried(*chain))
    if not ways:
        with pytest.raises(ConfigError, match="no cut fits"):
            partition(layers, peers, links=between, demands=demands)
        return
    best = min(ways)
    found = partition(layers, peers, links=between, demands=demands)
    assert (found.slowest_s, sum(stage.total_s for stage in found.stages)) == pytest.approx(best[:2])
    assert found.cuts in [cuts for slowest, total, cuts in ways if (slowest, total) == best[:2]]


@given(chains(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_cut_by_hand_costs_what_its_layers_cost(chain, data):
    layers, peers, between, demands = chain
    every = list(itertools.combinations(range(1, len(layers)), len(peers) - 1))
    cuts = data.draw(st.sampled_from(every))
    costs = list(stage_costs(layers, peers, [0, *cuts, len(layers)], between, demands))
    if any(size > peer.memory_bytes for (_, size), peer in zip(costs, peers, strict=True)):
        with pytest.raises(ConfigError, match="these cuts don't fit the peers' memory"):
            partition_at(layers, peers, cuts, links=between, demands=demands)
        return
    found = partition_at(layers, peers, cuts, links=between, demands=demands)
    assert found.cuts == cuts
    assert [stage.total_s for stage in found.stages] == pytest.approx([total_s for total_s, _ in costs])
    assert [stage.memory_bytes for stage in found.stages] == [size for _, size in costs]


def test_a_peer_twice_as_fast_gets_twice_the_work():
    found = partition(plain(*[1.0] * 9), [Peer("slow"), Peer("fast", 2.0)])
    assert found.cuts == (3,)
    assert [stage.total_s for stage in found.stages] == [3.0, 3.0]
    assert [(stage.forward_s, stage.backward_s) for stage in found.stages] == [(0.75, 2.25)] * 2


def test_a_cut_avoids_what_is_slow_to_send():
    layers = [Layer(str(i), 0.5, 0.5, 0.0, size) for i, size in enumerate([1.0, 8.0, 1.0, 8.0])]
    peers = [Peer("a"), Peer("b")]
    assert partition(layers, peers).cuts == (2,)
    assert partition(layers, peers, links=PeerLink(0.0, 4.0)).cuts == (1,)
    dear_back = {(0, 1): PeerLink(), (1, 0): PeerLink(0.0, 0.5)}
    found = partition(layers, peers, links=dear_back)
    assert [stage.transfer_s for stage in found.stages] == [2.0, 0.0]


def test_memory_moves_the_cut():
    layers = plain(*[1.0] * 4, parameter_bytes=10.0)
    assert partition(layers, [Peer("a"), Peer("b", 1.0, 40.0)]).cuts == (3,)
    assert partition(layers, [Peer("a"), Peer("b", 1.0, 40.0)], demands=Demands(1.0)).cuts == (2,)


def test_1f1b_leaves_more_room_at_the_end():
    """The last stage of three stores one microbatch, the first three: it takes more layers then."""
    layers = plain(*[1.0] * 7, output_bytes=10.0, inner_bytes=20.0)
    stored = tuple(peak_activations(actions) for actions in make_schedule("1f1b", 3, 8))
    peers = [Peer(name, 1.0, 140.0) for name in "abc"]
    found = partition(layers, peers, demands=Demands(stored=stored, input_bytes=10.0))
    assert found.cuts == (1, 3)
    # 3·(10 + 30), 2·(10 + 2·30), 10 + 4·30
    assert [stage.memory_bytes for stage in found.stages] == [120.0, 140.0, 130.0]
    eased = Demands(stored=stored, input_bytes=10.0, checkpoint=(True, True, False))
    found = partition_at(layers, peers, (2, 4), demands=eased)
    # 3·(10 + 10) + 20 + 30, 2·(10 + 10) + 20 + 30, 10 + 3·30
    assert [stage.memory_bytes for stage in found.stages] == [110.0, 90.0, 100.0]
    assert [(stage.forward_s, stage.backward_s) for stage in found.stages] == [
        (0.5, 2),
        (0.5, 2),
        (0.75, 2.25),
    ]
    assert partition(layers, peers, demands=eased).slowest_s == 3.0


def test_what_is_computed_anew_moves_the_cut():
    """Two thirds of a layer's time are in its forward: it takes 5/3 of it where that is done twice."""
    layers = [Layer(str(i), 2.0, 1.0, 0.0, 1.0) for i in range(8)]
    peers = [Peer("a"), Peer("b")]
    assert partition(layers, peers).cuts == (4,)
    found = partition(layers, peers, demands=Demands(checkpoint=(True, False)))
    assert found.cuts == (3,)
    assert [stage.total_s for stage in found.stages] == [15.0, 15.0]
    assert found.costs().backward_s == (9.0, 5.0)


def test_what_is_impossible_is_told_with_numbers():
    layers = plain(1.0, 1.0, 1.0, parameter_bytes=1_000_000.0)
    with pytest.raises(ConfigError) as told:
        partition(layers, [Peer("a", 1.0, 5e6), Peer("b", 1.0, 6e6)])
    assert str(told.value) == (
        "no cut fits the memory of all 2 peers; at best stage 1 (l1 … l2) needs 8,000,000 bytes, "
        "but b has 6,000,000"
    )
    with pytest.raises(ConfigError) as told:
        partition_at(layers, [Peer("a", 1.0, 3e6), Peer("b")], [1])
    assert str(told.value) == (
        "these cuts don't fit the peers' memory: stage 0 (l0) needs 4,000,000 bytes, but a has 3,000,000"
    )


@pytest.mark.parametrize(
    ("layers", "peers", "more", "why"),
    [
        (plain(1.0), [Peer("a"), Peer("b")], {}, "1 layers can't be cut for 2 peers"),
        (plain(1.0), [], {}, "1 layers can't be cut for 0 peers"),
        (plain(-1.0), [Peer("a")], {}, "layer l0 must be finite and not negative, not -0.25"),
        (plain(math.nan), [Peer("a")], {}, "not nan"),
        (plain(1.0), [Peer("a", 0.0)], {}, "speed of peer a must be positive, not 0.0"),
        (plain(1.0), [Peer("a", math.nan)], {}, "speed of peer a must be positive, not nan"),
        (plain(1.0), [Peer("a", 1.0, -1.0)], {}, "memory of peer a can't be -1.0 bytes"),
        (plain(1.0, 2.0), [Peer("a"), Peer("b")], {"links": {(0, 1): PeerLink()}}, "link from 1 to 0"),
        (plain(1.0), [Peer("a")], {"links": PeerLink(0.0, -1.0)}, "bandwidth of a link must be positive"),
        (plain(1.0), [Peer("a")], {"demands": Demands(stored=(1, 1))}, "1 stages need as many numbers"),
        (plain(1.0), [Peer("a")], {"demands": Demands(stored=-1)}, "not negative, not -1"),
        (
            plain(1.0),
            [Peer("a")],
            {"demands": Demands(checkpoint=(True, True))},
            "1 stages compute .*, not 2",
        ),
        (
            plain(1.0, inner_bytes=-1.0),
            [Peer("a")],
            {},
            "bytes of layer l0 must be .* not negative, not -1.0",
        ),
    ],
)
def test_bad_numbers_are_told(layers, peers, more, why):
    with pytest.raises(ConfigError, match=why):
        partition(layers, peers, **more)


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        ((1,), "3 peers need 2 cuts, not 1"),
        ((2, 2), r"cuts must rise from 1 to at most 3, the last layer, not be \[2, 2\]"),
        ((0, 2), "cuts must rise"),
        ((2, 4), "cuts must rise"),
        ((3, 1), "cuts must rise"),
    ],
)
def test_bad_cuts_are_told(cuts, why):
    with pytest.raises(ConfigError, match=why):
        partition_at(plain(1.0, 1.0, 1.0, 1.0), [Peer(name) for name in "abc"], cuts)


def test_its_costs_are_the_timelines():
    layers = [Layer(str(i), 1.0, 2.0, 0.0, 10.0 * i) for i in range(6)]
    link = PeerLink(0.5, 100.0)
    found = partition_at(layers, [Peer("a"), Peer("b", 2.0), Peer("c")], [1, 4], links=link)
    costs = found.costs(link)
    assert costs.forward_s == (1.0, 1.5, 2.0)
    assert costs.backward_s == (2.0, 3.0, 4.0)
    assert costs.message_bytes == (0.0, 30.0)
    assert predict(make_schedule("gpipe", 3, 4), costs).one_device_s == 4 * 13.5


def test_a_better_cut_makes_a_quicker_pipeline():
    """Over 40 random chains (seed 7), the chosen cut against the even one by layers, in predicted seconds."""
    rng, won = np.random.default_rng(7), []
    schedule = make_schedule("1f1b", 4, 16)
    for _ in range(40):
        layers = plain(*rng.lognormal(0.0, 1.0, 16))
        peers = [Peer(str(n), speed) for n, speed in enumerate(rng.uniform(0.5, 2.0, 4))]
        best = predict(schedule, partition(layers, peers).costs()).total_s
        even = predict(schedule, partition_at(layers, peers, [4, 8, 12]).costs()).total_s
        won.append(even / best)
    assert min(won) > 0.95
    assert np.mean(won) > 1.3


def test_many_layers_are_cut_at_once():
    layers = plain(*[1.0] * 400)
    assert partition(layers, [Peer(str(n)) for n in range(16)]).slowest_s == 25.0
