"""Whether a pipeline pays, against times worked out by hand."""

from __future__ import annotations

import math

import pytest

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.advice import PipelineOptions, UpdateWork, advise, bytes_alone
from p2pdrl.pipeline.layers import FREE, Layer, Peer, PeerLink

A, B, C = Peer("node a"), Peer("node b"), Peer("node c")
SLOW = PeerLink(0.04, 1e6)
"""40 ms, 1 MB/s."""


def blocks(count=4, forward_s=0.1, parameter_bytes=250e3, activation_bytes=20e3):
    return [Layer(f"l{n}", forward_s, forward_s, parameter_bytes, activation_bytes) for n in range(count)]


def wishes(*microbatches, **options):
    return PipelineOptions(**{"schedule": "gpipe", "microbatches": microbatches or (1,)} | options)


def test_over_links_that_cost_nothing_it_pays():
    """4 microbatches through 2 stages of 0.4 s: (4+1)·0.4 s; alone 4·0.8 s."""
    advice = advise(UpdateWork({4: blocks()}, minibatches=3), [A, B])
    assert advice.take_pipeline
    assert advice.pipeline.step_s == pytest.approx(2.0)
    assert advice.pipeline.update_s == pytest.approx(6.0)
    assert advice.pipeline.plan.cuts == (2,)
    assert advice.pipeline.plan.microbatches == 4
    assert advice.alone.update_s == pytest.approx(9.6)
    assert advice.why == (
        "a pipeline over node a, node b takes 2.0 s a step, node a alone would take 3.2 s: "
        "peers idle 20% of the time"
    )


def test_over_a_slow_link_it_is_refused_with_numbers():
    """One microbatch: 0.8 s and 2·(40+20) ms; 500 kB at the end: 500 ms and asking, 80 ms."""
    advice = advise(UpdateWork({1: blocks()}, minibatches=3), [A, B], SLOW, wishes())
    assert not advice.take_pipeline
    pipeline = advice.pipeline
    assert pipeline.minibatch_s == pytest.approx(0.92)
    assert pipeline.fetch_s == pytest.approx(0.58)
    assert pipeline.update_s == pytest.approx(3 * 0.92 + 0.58)
    assert pipeline.step_s == pytest.approx(0.92 + 0.58 / 3)
    assert advice.alone.step_s == pytest.approx(0.8)
    assert advice.why == (
        "a pipeline over node a, node b would take 1.1 s a step, node a alone takes 0.80 s: "
        "620 kB an update over 1.00 MB/s, 40 ms each way"
    )


@pytest.mark.parametrize(("bandwidth", "take"), [(12.1e6, False), (1e9, True)])
def test_what_travels_at_the_end_of_an_update_decides(bandwidth, take):
    """34 MB at 12.1 MB/s take 2.8 s, more than the pipeline saves in one minibatch of four parts."""
    work = UpdateWork({4: blocks(parameter_bytes=17e6, activation_bytes=0.0)})
    advice = advise(work, [A, B], PeerLink(0.0, bandwidth))
    assert advice.pipeline.update_s == pytest.approx(2.0 + 34e6 / bandwidth)
    assert advice.take_pipeline is take
    assert ("34.0 MB an update over 12.1 MB/s" in advice.why) is not take


def test_the_optimizers_state_counts_by_how_often_it_travels():
    """Every 10th update 3 times as much comes up, and the whole 3 times goes down."""
    work = UpdateWork({1: blocks(activation_bytes=0.0)}, state_every=10)
    pipeline = advise(work, [A, B], SLOW, wishes()).pipeline
    up_s, down_s = 0.08 + 1.5, 0.04 + 3.0
    assert pipeline.fetch_s == pytest.approx(0.9 * 0.58 + 0.1 * (up_s + down_s))
    assert pipeline.slowest.update_bytes == pytest.approx(500e3 * 1.2 + 1e6 * 0.3)


def test_a_model_too_large_for_one_is_not_refused():
    """Alone 4 copies of 1 MB and 80 kB; a half each with 2.1 MB is possible, however slow."""
    peers = [peer._replace(memory_bytes=2.2e6) for peer in (A, B)]
    advice = advise(UpdateWork({1: blocks()}), peers, SLOW, wishes())
    assert advice.take_pipeline
    assert advice.alone is None
    assert advice.pipeline.step_s == pytest.approx(1.5)
    assert advice.why == (
        "a pipeline over node a, node b takes 1.5 s a step: the model doesn't fit one peer alone, "
        "for it needs 4.08 MB, and node a has 2.20 MB"
    )


def test_a_model_too_large_for_all_is_an_error():
    peers = [peer._replace(memory_bytes=1e6) for peer in (A, B)]
    with pytest.raises(ConfigError, match="no cut fits the memory"):
        advise(UpdateWork({1: blocks()}), peers, SLOW, wishes())
    with pytest.raises(ConfigError, match=r"needs 4\.08 MB, and node a has 1\.00 MB"):
        advise(UpdateWork({1: blocks()}), peers[:1], SLOW, wishes())


def test_who_alone_has_the_memory_is_the_one_alone():
    """The fast one has too little: the slow one's 1.6 s is what counts."""
    peers = [A._replace(memory_bytes=2.2e6), B._replace(speed=0.5)]
    advice = advise(UpdateWork({1: blocks()}), peers, FREE, wishes())
    assert advice.alone.peer == 1
    assert advice.alone.step_s == pytest.approx(1.6)


def test_the_fastest_peer_alone_is_the_measure():
    advice = advise(UpdateWork({1: blocks()}), [A, B._replace(speed=4.0)], FREE, wishes())
    assert advice.alone.step_s == pytest.approx(0.2)
    assert not advice.take_pipeline
    assert "node b alone takes 0.20 s" in advice.why


def test_one_peer_needs_no_pipeline():
    advice = advise(UpdateWork({1: blocks()}), [A])
    assert not advice.take_pipeline
    assert advice.pipeline is None
    assert advice.why == "node a alone takes 0.80 s a step: no pipeline, there is one peer only"


def test_more_peers_than_blocks():
    advice = advise(UpdateWork({1: blocks(2)}), [A, B, C], FREE, wishes())
    assert not advice.take_pipeline
    assert "no pipeline, 2 layers can't be cut for 3 peers" in advice.why


def test_costs_that_are_not_known_follow_from_the_nearest():
    work = UpdateWork({1: blocks(), 8: [one._replace(inner_bytes=1e3) for one in blocks(forward_s=0.02)]})
    assert work.layers(8)[0].forward_s == 0.02
    assert work.layers(4)[0].forward_s == pytest.approx(0.04)
    assert work.layers(2)[0].forward_s == pytest.approx(0.05)
    assert work.layers(2)[0].output_bytes == pytest.approx(10e3)
    assert work.layers(4)[0].inner_bytes == pytest.approx(2e3)
    assert work.layers(2)[0].parameter_bytes == 250e3


def test_the_best_number_of_microbatches_is_taken():
    """4 smaller parts are less efficient here; each way takes its own best number."""
    work = UpdateWork({1: blocks(), 4: blocks(forward_s=0.03)})
    advice = advise(work, [A, B], FREE, wishes(1, 2, 4))
    # 1 part: 0.8; 2 parts of a half: 3·0.2; 4 parts: 5·0.12
    assert advice.pipeline.step_s == pytest.approx(0.6)
    assert advice.alone.microbatches == 1
    assert advice.alone.step_s == pytest.approx(0.8)


def test_numbers_that_the_schedule_refuses_are_passed_over():
    work = UpdateWork({1: blocks()})
    options = {"schedule": "interleaved", "chunks": 2}
    assert advise(work, [A, B], FREE, wishes(5, 4, **options)).pipeline.plan.microbatches == 4
    advice = advise(work, [A, B], FREE, wishes(5, **options))
    assert advice.pipeline is None
    assert "can't run 5 microbatches" in advice.why


def test_what_is_computed_anew_takes_another_forward():
    """gpipe: each of 4 parts takes each of 2 stages 0.2 s, then 0.2 + 0.2 s. Alone nothing is done twice."""
    advice = advise(UpdateWork({4: blocks()}, checkpoint=True), [A, B], FREE, wishes(4))
    assert advice.pipeline.step_s == pytest.approx(5 * 0.6)
    assert advice.alone.step_s == pytest.approx(4 * 0.8)
    # with one part there is nothing to be saved
    single = advise(UpdateWork({1: blocks()}, checkpoint=True), [A, B], FREE, wishes()).pipeline
    assert single.step_s == pytest.approx(0.8)


def test_a_rank_that_stores_one_microbatch_computes_nothing_anew():
    """With 1F1B the last rank's backward follows its forward: its layers take 2/3 of the others' time."""
    work = UpdateWork({4: blocks(5)}, checkpoint=True)
    pipeline = advise(work, [A, B], FREE, wishes(4, schedule="1f1b")).pipeline
    assert pipeline.plan.cuts == (2,)
    # the first part's forward, 4 parts of the slower, the last part's backward
    assert pipeline.step_s == pytest.approx(0.2 + 4 * 0.6 + 0.4)


def test_an_interleaved_rank_stores_parts_in_one_stage_while_it_is_in_another():
    """Each of 2 ranks stores the only part in each of 2 stages, and so computes it anew."""
    work = UpdateWork({1: blocks()}, checkpoint=True)
    links = {(0, 1): FREE, (1, 0): FREE}
    pipeline = advise(work, [A, B], links, wishes(1, schedule="interleaved", chunks=2)).pipeline
    assert pipeline.step_s == pytest.approx(4 * 0.3)


def test_memory_is_what_is_kept_and_links_carry_what_goes_out():
    layers = [layer._replace(inner_bytes=1e6) for layer in blocks(parameter_bytes=0.0)]
    plain, anew = UpdateWork({4: layers}), UpdateWork({4: layers}, checkpoint=True)
    pipeline = advise(plain, [A, B], PeerLink(0.0, 1e6), wishes(4)).pipeline
    assert pipeline.slowest.update_bytes == pytest.approx(4 * 2 * 20e3)  # of 4 parts, there and back
    assert bytes_alone(plain, 4) == bytes_alone(anew, 4) == pytest.approx(4 * 1.02e6)  # one part at a time
    small = [peer._replace(memory_bytes=4e6) for peer in (A, B)]
    with pytest.raises(ConfigError, match=r"no cut fits .* needs 8,240,000 bytes"):
        advise(plain, small, FREE, wishes(4))
    assert advise(anew, small, FREE, wishes(4)).pipeline.plan.cuts == (2,)


def test_interleaved_stages_go_round_the_peers():
    """Two chunks on two ranks with 4 microbatches idle 1/9 of the time: 4·0.4 s·9/8."""
    work = UpdateWork({4: blocks()})
    links = {(0, 1): FREE, (1, 0): FREE}
    pipeline = advise(work, [A, B], links, wishes(4, schedule="interleaved", chunks=2)).pipeline
    assert pipeline.plan.cuts == (1, 2, 3)
    assert pipeline.plan.ranks == 2
    assert pipeline.step_s == pytest.approx(1.8)


def test_cuts_by_hand_are_kept():
    pipeline = advise(UpdateWork({1: blocks()}), [A, B], FREE, wishes(cuts=(1,))).pipeline
    assert pipeline.plan.cuts == (1,)
    assert pipeline.plan.blocks == 4


def test_the_first_peer_stays_first():
    """The line c - a - b has quick links, and a must lead: a b c and a c b both cross one slow link."""
    quick, slow = PeerLink(0.001), PeerLink(10.0)
    links = {(0, 1): quick, (1, 0): quick, (0, 2): slow, (2, 0): slow, (1, 2): quick, (2, 1): quick}
    pipeline = advise(UpdateWork({1: blocks()}), [A, C, B], links, wishes()).pipeline
    assert pipeline.order == (0, 1, 2)
    swapped = {({0: 0, 1: 2, 2: 1}[a], {0: 0, 1: 2, 2: 1}[b]): link for (a, b), link in links.items()}
    pipeline = advise(UpdateWork({1: blocks()}), [A, B, C], swapped, wishes()).pipeline
    assert pipeline.order == (0, 2, 1)


def test_links_that_nobody_measured_are_as_bad_as_the_worse_to_the_first():
    good, bad = PeerLink(0.01, 1e6), PeerLink(0.2, 5e6)
    links = {(0, 1): good, (1, 0): good, (0, 2): bad, (2, 0): bad}
    pipeline = advise(UpdateWork({1: blocks(3, activation_bytes=0.0)}), [A, B, C], links, wishes()).pipeline
    assert pipeline.order == (0, 1, 2)
    assert pipeline.timeline.total_s == pytest.approx(0.6 + 2 * 0.01 + 2 * 0.2)
    with pytest.raises(ConfigError, match="nothing is known about the link from 0 to 2"):
        advise(
            UpdateWork({1: blocks(3)}),
            [peer._replace(memory_bytes=2e6) for peer in (A, B, C)],
            {(0, 1): good, (1, 0): good},
            wishes(),
        )


@pytest.mark.parametrize(
    ("work", "peers", "options"),
    [
        (UpdateWork({}), [A, B], {}),
        (UpdateWork({0: blocks()}), [A, B], {}),
        (UpdateWork({1: []}), [A, B], {}),
        (UpdateWork({1: blocks()}, minibatches=0), [A, B], {}),
        (UpdateWork({1: blocks()}, state_every=-1), [A, B], {}),
        (UpdateWork({1: blocks()}), [], {}),
        (UpdateWork({1: blocks()}), [A._replace(speed=0.0)], {}),
        (UpdateWork({1: blocks()}), [A, B], {"microbatches": ()}),
        (UpdateWork({1: blocks()}), [A, B], {"microbatches": (0,)}),
        (UpdateWork({1: blocks(forward_s=math.nan)}), [A], {}),
    ],
)
def test_numbers_that_make_no_sense_are_refused(work, peers, options):
    with pytest.raises(ConfigError):
        advise(work, peers, FREE, wishes(1, **options))
