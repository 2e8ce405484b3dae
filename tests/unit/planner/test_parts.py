"""The simulator's parts by themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from p2pdrl.planner.description import CallCosts, NodeLink, Pair, SwarmDescription
from p2pdrl.planner.forecast import Replicas, Statistics
from p2pdrl.planner.network import MSS, PACKET_BYTES, Network, Processors, payload_nbytes, sparse_nbytes
from p2pdrl.planner.world import EventQueue, moments
from p2pdrl.tensors.compression import make_codec


def network(**options: object) -> Network:
    link = NodeLink(delay_s=0.01, out_bytes_s=1e6, in_bytes_s=2e6)
    return Network(SwarmDescription(**({"links": (link,)} | options)), 4, Statistics(4), random.Random(0))


def test_agenda_keeps_the_order_of_moments_and_of_one_moment():
    events, seen = EventQueue(), []
    events.at(2.0, seen.append, "c")
    events.at(1.0, seen.append, "a")
    events.at(1.0, seen.append, "b")
    events.at(9.0, seen.append, "never")
    events.run(5.0)
    assert seen == ["a", "b", "c"]
    assert events.now_s == 5.0


def test_a_message_takes_its_bytes_and_both_delays():
    passage = network().send(0, 1, MSS, 0.0, 1.0)
    assert passage.written_s == pytest.approx(1.0 + (MSS + PACKET_BYTES) / 1e6)
    assert passage.arrived_s == pytest.approx(passage.written_s + 0.02)


def test_messages_queue_at_the_sender_and_at_the_receiver():
    links = network()
    first, second = (links.send(0, 1, 1e5, 0.0, 0.0) for _ in range(2))
    assert second.written_s == pytest.approx(2 * first.written_s)
    many = network(links=(NodeLink(delay_s=0, out_bytes_s=1e9, in_bytes_s=1e6),))
    ends = [many.send(sender, 0, 1e5, 0.0, 0.0).arrived_s for sender in (1, 2, 3)]
    assert ends == pytest.approx([ends[0], 2 * ends[0], 3 * ends[0]], rel=0.01)


def test_a_pair_has_its_own_delay_and_rate():
    links = network(pairs=(Pair(one=0, other=1, delay_s=0.5, bytes_s=1e5),))
    assert links.send(1, 0, 1e5, 0.0, 0.0).arrived_s == pytest.approx(0.5 + 1.046, rel=0.01)
    assert links.send(2, 3, 1e5, 0.0, 0.0).arrived_s == pytest.approx(0.02 + 0.1046, rel=0.01)


def test_loss_bounds_the_rate_as_mathis_has_it():
    link = NodeLink(delay_s=0.05, out_bytes_s=1e9, in_bytes_s=1e9, loss=0.005)
    lossy = network(links=(link,))
    out, _ = lossy.rates(0, 1)
    loss = 1 - (1 - 0.005) ** 2
    assert out == pytest.approx(MSS / 0.2 * 1.22 / loss**0.5)


def test_shared_cores_are_shared():
    alone = Processors(CallCosts(call_s=1.0, byte_s=0.0), 4)
    assert [alone.work(node, 0.0, calls=1) for node in range(4)] == [1, 1, 1, 1]
    shared = Processors(CallCosts(call_s=1.0, byte_s=0.0, cores=2), 4)
    assert [shared.work(node, 0.0, calls=1) for node in range(4)] == [1, 1, 2, 2]


def test_a_broadcast_counts_as_the_messages_that_it_is():
    one_by_one, at_once = Statistics(4), Statistics(4)
    for target in (0, 2, 3):
        one_by_one.message(1, target, 100.0, 120.0)
        one_by_one.message(target, 1, 0.0, 50.0)
    at_once.broadcast(1, np.array([0, 2, 3]), 100.0, 120.0, 50.0)
    at_once.settle()
    at_once.settle()
    for name in ("out", "into", "wire_out", "wire_in"):
        assert getattr(at_once, name) == getattr(one_by_one, name)


@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "topk"])
def test_payloads_are_about_what_codecs_write(kind):
    codec = make_codec(kind, 100_000, keep=0.01)
    room = memoryview(bytearray(codec.max_nbytes))
    written = codec.encode(np.random.default_rng(1).normal(size=100_000).astype(np.float32), room)
    assert payload_nbytes(100_000, kind, keep=0.01, moved=0.01) == pytest.approx(written, rel=0.1)


@pytest.mark.parametrize("moved", [1e-4, 0.01, 0.3])
def test_threshold_messages_are_about_what_the_codec_writes(moved):
    vector = np.zeros(100_000, np.float32)
    vector[np.random.default_rng(1).choice(vector.size, round(moved * vector.size), replace=False)] = 0.1
    codec = make_codec("threshold", vector.size, threshold=0.1)
    written = codec.encode(vector, memoryview(bytearray(codec.max_nbytes)))
    assert sparse_nbytes(vector.size, moved) == pytest.approx(written, rel=0.01)


def test_moments_come_at_their_rate():
    found = moments(60.0, 1000.0, random.Random(1))
    assert len(found) == pytest.approx(1000, rel=0.1)
    assert found == sorted(found)
    assert moments(0.0, 1000.0, random.Random(1)) == []


def test_replicas_tell_when_they_agree():
    replicas = Replicas(3, 2, seed=1)
    assert replicas.part() == pytest.approx(1.0)
    replicas.x_NE[0] = replicas.x_NE[1]
    replicas.changed(4.0)
    assert replicas.agreed_s == 4.0
    replicas.joined(2, 0)
    assert replicas.distance() < 1e-12
