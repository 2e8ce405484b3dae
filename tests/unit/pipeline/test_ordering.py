"""The order of peers against trying all orders and all cuts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import Layer, Peer, PeerLink
from p2pdrl.pipeline.partition import MOST_PEERS, Demands, in_order, partition, partition_in_best_order

amounts = st.integers(0, 16).map(float)
links = st.builds(PeerLink, amounts, st.sampled_from([0.5, 2.0, math.inf]))


@st.composite
def chains(draw):
    count = draw(st.integers(1, 4))
    layer = st.builds(Layer, st.just("l"), amounts, amounts, amounts, amounts, amounts)
    layers = draw(st.lists(layer, min_size=count, max_size=6))
    memory = st.one_of(st.just(math.inf), st.integers(0, 200).map(float))
    peers = [Peer(f"p{n}", draw(st.sampled_from([0.5, 1.0, 2.0])), draw(memory)) for n in range(count)]
    pairs = itertools.permutations(range(count), 2)
    between = draw(links) if draw(st.booleans()) else {pair: draw(links) for pair in pairs}
    stored = tuple(range(count, 0, -1)) if draw(st.booleans()) else 2
    anew = draw(st.one_of(st.booleans(), st.tuples(*[st.booleans()] * count)))
    return layers, peers, between, Demands(stored=stored, checkpoint=anew)


def slowest(layers, peers, between, demands, order):
    links = in_order(between, order)
    try:
        return partition(layers, [peers[n] for n in order], links=links, demands=demands).slowest_s
    except ConfigError:
        return math.inf


@given(chains())
@settings(max_examples=150, deadline=None)
def test_no_order_is_better(chain):
    layers, peers, between, demands = chain
    orders = itertools.permutations(range(len(peers)))
    best = min(slowest(*chain, order) for order in orders)
    if best == math.inf:
        with pytest.raises(ConfigError, match="no cut fits"):
            partition_in_best_order(layers, peers, links=between, demands=demands)
        return
    order, found = partition_in_best_order(layers, peers, links=between, demands=demands)
    assert sorted(order) == list(range(len(peers)))
    assert [stage.peer for stage in found.stages] == [peers[n] for n in order]
    assert found.slowest_s == best == slowest(*chain, order)


def test_who_is_fast_gets_the_large_layer():
    layers = [Layer(str(i), t, 0.0, 0.0, 0.0) for i, t in enumerate([1.0, 1.0, 8.0])]
    order, found = partition_in_best_order(layers, [Peer("fast", 4.0), Peer("slow"), Peer("slower", 0.5)])
    assert order == (1, 2, 0)
    assert found.slowest_s == 2.0


def test_neighbours_are_those_with_a_good_link():
    layers = [Layer(str(i), 1.0, 1.0, 0.0, 10.0) for i in range(3)]
    good = {(0, 2), (2, 0), (2, 1), (1, 2)}
    between = {
        pair: PeerLink(0.0, 100.0 if pair in good else 1.0) for pair in itertools.permutations(range(3), 2)
    }
    order, _ = partition_in_best_order(layers, [Peer(name) for name in "abc"], links=between)
    assert order in {(0, 2, 1), (1, 2, 0)}


def test_links_follow_the_order():
    between = {(0, 1): PeerLink(1.0), (1, 0): PeerLink(2.0), (0, 2): PeerLink(3.0)}
    assert in_order(between, (1, 0)) == {(1, 0): PeerLink(1.0), (0, 1): PeerLink(2.0)}
    assert in_order(PeerLink(1.0), (1, 0)) == PeerLink(1.0)


@pytest.mark.slow
def test_eight_different_peers_are_put_in_order():
    layers = [Layer(str(i), 1.0 + i % 5, 1.0, 1.0, 1.0) for i in range(24)]
    peers = [Peer(str(n), 1.0 + n / 8) for n in range(8)]
    order, found = partition_in_best_order(layers, peers, links=PeerLink(0.01, 1e3))
    assert len(set(order)) == 8
    assert found.slowest_s <= partition(layers, peers, links=PeerLink(0.01, 1e3)).slowest_s


def test_too_many_peers_are_told():
    layers = [Layer(str(i), 1.0, 1.0, 1.0, 1.0) for i in range(10)]
    with pytest.raises(ConfigError, match="the order of 9 peers must be given"):
        partition_in_best_order(layers, [Peer(str(n)) for n in range(MOST_PEERS + 1)])


@settings(max_examples=60)
@given(chains(), st.integers(0, 3))
def test_who_is_to_be_first_is(chain, first):
    layers, peers, between, demands = chain
    first %= len(peers)
    orders = [order for order in itertools.permutations(range(len(peers))) if order[0] == first]
    best_s = min(slowest(layers, peers, between, demands, order) for order in orders)
    if math.isinf(best_s):
        with pytest.raises(ConfigError):
            partition_in_best_order(layers, peers, links=between, demands=demands, first=first)
        return
    order, found = partition_in_best_order(layers, peers, links=between, demands=demands, first=first)
    assert order[0] == first
    assert found.slowest_s == best_s
