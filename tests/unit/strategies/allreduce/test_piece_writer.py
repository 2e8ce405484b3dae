"""Pieces on the wire, and what compression loses."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig
from p2pdrl.strategies.allreduce.reduce_scatter import PieceWriter, is_lossy, piece_codec
from p2pdrl.tensors.compression import make_codec

SIZE = 300
CUTS = (slice(0, 100), slice(100, 300))
LOSSY = [
    GradAverageConfig(compression="int8"),
    GradAverageConfig(compression="topk", keep=0.1),
    GradAverageConfig(compression="threshold", threshold=0.5),
]
by_kind = pytest.mark.parametrize("config", LOSSY, ids=lambda config: config.compression)


def sent(config, writer, spans=CUTS, *, raw=False):
    out = np.zeros(SIZE, np.float32)
    for span in spans:
        part = writer.encode(span)
        codec = make_codec("none", out[span].size) if raw else piece_codec(config, out[span].size)
        codec.decode(part, out[span])
        assert writer.nbytes(span, raw=raw) == part.nbytes
    return out


def gradients(count, seed=2):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SIZE).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_plain_kinds_keep_nothing(kind):
    config = GradAverageConfig(compression=kind)
    writer = PieceWriter(config, SIZE)
    for vector in gradients(3):
        writer.load(vector, raw=False)
        assert np.allclose(sent(config, writer), vector, rtol=2**-8)
        assert np.array_equal(writer.own(CUTS[0]), vector[CUTS[0]])
        writer.counted()
    assert not is_lossy(config)


@by_kind
def test_what_is_lost_is_given_the_next_time(config):
    writer = PieceWriter(config, SIZE)
    vectors, total = gradients(60), np.zeros(SIZE)
    for vector in vectors:
        writer.load(vector, raw=False)
        total += sent(config, writer)
        writer.counted()
    writer.load(np.zeros(SIZE, np.float32), raw=False)
    left = np.concatenate([writer.own(span) for span in CUTS])
    assert np.allclose(total + left, np.sum(vectors, axis=0, dtype=np.float64), atol=1e-4)


@by_kind
def test_a_round_done_again_gives_the_same_however_it_is_cut(config):
    writer = PieceWriter(config, SIZE)
    first, second = gradients(2)
    writer.load(first, raw=False)
    sent(config, writer)
    writer.counted()
    writer.load(second, raw=False)
    once = writer.own(slice(0, SIZE)).copy()
    sent(config, writer)
    writer.recut()
    writer.load(second, raw=False)
    assert np.array_equal(writer.own(slice(0, SIZE)), once)


@by_kind
def test_our_own_piece_loses_nothing(config):
    writer = PieceWriter(config, SIZE)
    vector = gradients(1)[0]
    writer.load(vector, raw=False)
    writer.encode(CUTS[0])
    writer.counted()
    writer.load(np.zeros(SIZE, np.float32), raw=False)
    assert not writer.own(CUTS[1]).any()
    assert writer.own(CUTS[0]).any()


@by_kind
def test_raw_rounds_travel_as_float32_and_leave_what_is_kept_alone(config):
    writer = PieceWriter(config, SIZE)
    vector = gradients(1)[0]
    writer.load(vector, raw=True)
    assert np.array_equal(sent(config, writer, raw=True), vector)
    writer.counted()
    writer.load(np.zeros(SIZE, np.float32), raw=False)
    assert not writer.own(slice(0, SIZE)).any()


@by_kind
def test_after_a_reset_nothing_is_kept(config):
    writer = PieceWriter(config, SIZE)
    writer.load(gradients(1)[0], raw=False)
    sent(config, writer)
    writer.counted()
    writer.reset()
    writer.load(np.zeros(SIZE, np.float32), raw=False)
    assert not writer.own(slice(0, SIZE)).any()
