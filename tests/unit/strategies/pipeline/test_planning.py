"""What a head orders, for ranks of different speeds, cuts by hand, and links that are too slow."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.errors import ConfigError
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.layers import PeerLink
from p2pdrl.strategies.pipeline.forming import generation_of
from p2pdrl.strategies.pipeline.planning import RankCandidate, design, measured_with, schedule_of
from p2pdrl.testing.fake_stages import blocks_of

from .forms import make_form

BLOCKS = blocks_of(6, seconds=0.01)


def ranks(*seconds: float) -> list[RankCandidate]:
    return [RankCandidate(f"id{number}", f"n{number}", each) for number, each in enumerate(seconds)]


def test_equal_peers_share_equally():
    found = design(PipelineConfig(backend="stream"), BLOCKS, ranks(0.06, 0.06))
    assert (found.members, found.plan.cuts, found.plan.microbatches) == (("id0", "id1"), (3,), 4)
    assert not found.alone
    # 1F1B of equal stages: (M + S - 1) / M of the ideal, so a bubble of 1/5.
    assert found.bubble == pytest.approx(0.2)
    assert found.step_s == pytest.approx(5 * 0.03)


def test_the_faster_peer_holds_more_and_the_head_stays_first():
    found = design(PipelineConfig(backend="stream"), BLOCKS, ranks(0.12, 0.06))
    assert found.members == ("id0", "id1")
    assert found.plan.cuts == (2,)


def test_the_others_are_ordered_by_their_links():
    slow, fast = PeerLink(0.01, 1e6), PeerLink(0.0001, 1e9)
    links = {(0, 1): slow, (1, 0): slow, (0, 2): fast, (2, 0): fast, (1, 2): fast, (2, 1): fast}
    found = design(PipelineConfig(backend="stream", stages=3), BLOCKS, ranks(0.06, 0.06, 0.06), links)
    assert found.members == ("id0", "id2", "id1")


def test_cuts_by_hand_count_only_for_as_many_peers_as_they_were_made_for():
    config = PipelineConfig(backend="stream", stages=3, cuts=(1, 2))
    assert design(config, BLOCKS, ranks(1, 1, 1)).plan.cuts == (1, 2)
    assert design(config, BLOCKS, ranks(1, 1)).plan.cuts == (3,)


def test_cuts_beyond_the_blocks_come_to_nothing_and_say_so():
    found = design(PipelineConfig(backend="stream", cuts=(6,)), BLOCKS, ranks(1, 1))
    assert found.alone
    assert found.why.startswith(
        "no pipeline: task.strategy.cuts = [6] must rise from 1 to at most 5, the number"
    )
    assert "pipeline plan --config" in found.why


@pytest.mark.parametrize("backend", ["auto", "stream", "torch"])
def test_only_auto_refuses_what_is_slower(backend):
    links = {(0, 1): PeerLink(0.5, 1e5), (1, 0): PeerLink(0.5, 1e5)}
    found = design(PipelineConfig(backend=backend), BLOCKS, ranks(0.06, 0.06), links)
    assert found.alone == (backend == "auto")
    assert "n0 alone" in found.why
    assert found.plan.ranks == (1 if found.alone else 2)


def test_alone_there_is_one_stage_whatever_the_schedule():
    config = PipelineConfig(schedule="interleaved", chunks=2)
    found = design(config, BLOCKS, ranks(0.06))
    assert (found.plan.ranks, found.plan.cuts, found.plan.schedule, found.alone) == (1, (), "1f1b", False)
    assert schedule_of(config, 2) == "interleaved"


@pytest.mark.parametrize(("asked", "given"), [(4, 4), (6, 6), (7, 6), (1, 1)])
def test_an_interleaved_schedule_takes_the_most_microbatches_that_it_can(asked, given):
    config = PipelineConfig(backend="stream", schedule="interleaved", chunks=2, stages=2, microbatches=asked)
    assert design(config, BLOCKS, ranks(1, 1)).plan.microbatches == given


def test_auto_plans_the_most_that_will_be_tried():
    config = PipelineConfig(backend="stream", microbatches="auto")
    assert measured_with(config) == 8
    assert design(config, BLOCKS, ranks(0.06, 0.06)).plan.microbatches == 8


def test_a_minibatch_of_few_rows_is_planned_as_it_runs():
    config = PipelineConfig(backend="stream", microbatches=4)
    assert [measured_with(config, rows) for rows in (0, 1, 3, 4, 9)] == [4, 1, 3, 4, 4]
    found = design(config, BLOCKS, ranks(0.06, 0.06), rows=2)
    assert found.plan.microbatches == found.plan.parts(2) == 2
    assert found.bubble == pytest.approx(1 / 3)  # 1F1B: (S - 1) / (M + S - 1)
    assert found.step_s == pytest.approx(3 * 0.03)
    one = design(msgspec.structs.replace(config, microbatches="auto"), BLOCKS, ranks(0.06, 0.06), rows=1)
    assert one.bubble == pytest.approx(1 / 2)
    interleaved = PipelineConfig(backend="stream", schedule="interleaved", chunks=2, microbatches=4)
    plan = design(interleaved, BLOCKS, ranks(1, 1), rows=3).plan
    assert plan.microbatches == plan.parts(3) == 3


def test_activations_computed_anew_take_time_and_save_memory():
    """Rank 0 takes 0.01 s more for each backward; the first begins after 0.04 s, with two forwards to go.
    Rank 1 stores one microbatch, and keeps it."""
    plain = PipelineConfig(backend="stream", cuts=(3,))
    anew = msgspec.structs.replace(plain, checkpoint_activations=True)
    assert design(plain, BLOCKS, ranks(0.06, 0.06)).step_s == pytest.approx(5 * 0.03)
    assert design(anew, BLOCKS, ranks(0.06, 0.06)).step_s == pytest.approx(0.04 + 4 * 0.03 + 2 * 0.01)
    # 2 microbatches of 3 · 10,000 bytes, or what goes out of both, and what is between of one
    large = [block._replace(inner_bytes=9_000.0, parameter_bytes=1.0) for block in BLOCKS]
    tight = [RankCandidate("id0", "n0", 0.06, 12.0 + 31_000.0), RankCandidate("id1", "n1", 0.06)]
    assert design(anew, large, tight).plan.cuts == (3,)
    assert design(plain, large, tight).alone


def test_auto_counts_the_forwards_that_are_done_twice():
    """One that barely pays doesn't any more: alone, nothing is computed anew."""
    link = PeerLink(0.012)
    plain = PipelineConfig(backend="auto", cuts=(3,))
    anew = msgspec.structs.replace(plain, checkpoint_activations=True)
    links = {(0, 1): link, (1, 0): link}
    found = [design(config, BLOCKS, ranks(0.06, 0.06), links) for config in (plain, anew)]
    assert [one.alone for one in found] == [False, True]


async def test_alone_one_microbatch_is_stored_at_a_time():
    assert design(PipelineConfig(schedule="gpipe"), BLOCKS, ranks(0.06)).plan.schedule == "1f1b"
    one = msgspec.structs.replace(FORM, alone=True, cuts=())
    assert generation_of(PipelineConfig(schedule="gpipe"), one, 0).order.schedule == "1f1b"


def test_a_rank_without_parameters_is_none():
    blocks = [*BLOCKS[:3], *(layer._replace(parameter_bytes=0.0) for layer in BLOCKS[3:])]
    found = design(PipelineConfig(backend="stream"), blocks, ranks(1, 1))
    assert found.alone
    assert "no parameters" in found.why


FORM = make_form(key=ViewKey(1, 2, "p"))


@pytest.mark.parametrize(("deadline_s", "timeout_s"), [(1.0, 10.0), (20.0, 20.0), (90.0, 30.0)])
async def test_torch_has_its_own_bounds(deadline_s, timeout_s):
    config = PipelineConfig(backend="torch", deadline_s=deadline_s)
    order = generation_of(
        config, msgspec.structs.replace(FORM, backend="torch", port=99), 1, "10.0.0.1"
    ).order
    assert order.timeout_s == timeout_s
    assert (order.backend, order.meeting.host, order.meeting.port) == ("torch", "10.0.0.1", 99)
    assert generation_of(PipelineConfig(deadline_s=deadline_s), FORM, 1).order.timeout_s == deadline_s


@pytest.mark.parametrize("anew", [False, True])
async def test_ranks_are_told_to_compute_activations_anew(anew):
    config = PipelineConfig(checkpoint_activations=anew)
    assert [generation_of(config, FORM, rank).order.checkpoint_activations for rank in (0, 1)] == [anew] * 2


@pytest.mark.parametrize(
    "changes", [{"cuts": (7,)}, {"cuts": (1, 2)}, {"cuts": ()}, {"alone": True}, {"microbatches": 65_537}]
)
def test_orders_that_make_no_sense_are_no_orders(changes):
    with pytest.raises(ConfigError):
        generation_of(PipelineConfig(), msgspec.structs.replace(FORM, **changes), 1)


# A block has 1,000 bytes of parameters, of which 4 copies are kept, and 1,000 of activations, a microbatch
# each: 6 blocks on one peer alone need 30,000, and the last 2 of 6 with their input 11,000.
def test_a_model_too_large_for_one_peer_is_cut_to_fit():
    slow = {(0, 1): PeerLink(0.5, 1e5), (1, 0): PeerLink(0.5, 1e5)}
    config = PipelineConfig(backend="auto")
    small = [RankCandidate("id0", "n0", 0.06, 29_999.0), RankCandidate("id1", "n1", 0.06, 29_999.0)]
    found = design(config, BLOCKS, small, slow)
    assert (found.alone, found.plan.ranks) == (False, 2)
    assert "doesn't fit one peer alone" in found.why
    assert design(config, BLOCKS, [replace(one, memory_bytes=30_000.0) for one in small], slow).alone


def test_one_that_fits_some_peers_only_is_still_cut():
    slow = {(0, 1): PeerLink(0.5, 1e5), (1, 0): PeerLink(0.5, 1e5)}
    mixed = [RankCandidate("id0", "n0", 0.06, 1e9), RankCandidate("id1", "n1", 0.06, 20_000.0)]
    found = design(PipelineConfig(backend="auto"), BLOCKS, mixed, slow)
    assert not found.alone
    assert "it needs 30.0 kB, and n1 has 20.0 kB" in found.why


def test_the_peer_with_less_memory_holds_less():
    less = [RankCandidate("id0", "n0", 0.06), RankCandidate("id1", "n1", 0.06, 11_000.0)]
    found = design(PipelineConfig(backend="stream"), BLOCKS, less)
    assert found.plan.cuts == (4,)


@pytest.mark.parametrize("peers", [1, 2])
def test_a_model_that_fits_nowhere_is_refused_with_numbers(peers):
    tiny = [RankCandidate(f"id{one}", f"n{one}", 0.06, 5_000.0) for one in range(peers)]
    with pytest.raises(ConfigError, match=r"fit one peer alone, for it needs .*, and n0 has"):
        design(PipelineConfig(backend="stream"), BLOCKS, tiny)
