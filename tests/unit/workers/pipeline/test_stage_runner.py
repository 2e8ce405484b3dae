"""Learners as stages: they learn what one learner does, keep each other's state, and tell of themselves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.config.task import GradientsConfig
from p2pdrl.workers.pipeline.measure import measured
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, Trace, Traced

from ..stage_learners import CARTPOLE, CLASSIFIER, PENDULUM, RECURRENT, alone, assert_close, build


@pytest.mark.parametrize(
    ("task", "ranks", "options"),
    [
        (CARTPOLE, 2, {"keys": None}),
        (CARTPOLE, 2, {"schedule": "interleaved", "stages": 4}),
        (CLASSIFIER, 3, {"schedule": "gpipe", "checkpoint_activations": True}),
        pytest.param(RECURRENT, 2, {}, marks=pytest.mark.slow),
        (CARTPOLE, 1, {}),
        (PENDULUM, 3, {}),
    ],
)
def test_stages_learn_what_one_learner_does(team, task, ranks, options):
    updates = 3
    expected = alone(task, updates)
    team = team(task, ranks)
    team.finish_after(updates)
    team.form(**options)
    for rank, member in enumerate(team.members):
        said = [member.news("ready", "copied", "over", "broken") for _ in range(3)]
        assert [news.what for news in said] == ["ready", "copied", "over"], said
        assert [news.policy_version for news in said] == [0, 2, 3]
        assert {news.generation for news in said} == {1}
        vector, version = member.now()
        assert_close(vector, expected.flat)
        assert version == 3
        for name, array in member.optimizer().items():
            assert_close(array, expected.sidecar()[name])
        assert member.steps == (updates if rank == 0 else 0)
    for member in team.members[1:]:
        np.testing.assert_array_equal(member.now()[0], team.head.now()[0])


def test_targets_stay_with_the_head_and_whoever_may_go_on_without_it_begins_anew(team):
    expected = alone(PENDULUM, 3).sidecar()
    pair = team(PENDULUM, 2)
    pair.finish_after(3)
    pair.form()
    for rank, member in enumerate(pair.members):
        assert member.news("over", "broken").what == "over"
        found, flat = member.trainer.sidecar(), member.trainer.flat
        targets = np.concatenate([found["target.critics"], found["target.actor"]])
        if rank == 0:
            assert_close(targets, np.concatenate([expected["target.critics"], expected["target.actor"]]))
            assert not np.allclose(targets, flat)
        else:
            np.testing.assert_array_equal(targets, flat)


def dense_of(trainer, block):
    return next(one for one in trainer.parts().blocks[block].modules() if isinstance(one, nn.Linear))


def test_a_rank_computes_activations_anew_if_it_is_ordered_to(team):
    lengths = {}
    for anew in (False, True):
        pair = team(CLASSIFIER, 2)
        second = pair.members[1]
        seen = lengths[anew] = []

        def note(_, given, seen=seen):
            if torch.is_grad_enabled():
                seen.append(len(given[0]))

        dense = dense_of(second.trainer, 2)  # rank 1's first; its rank copies it with its hooks
        dense.register_forward_pre_hook(note)
        pair.finish_after(3)
        pair.form(schedule="gpipe", checkpoint_activations=anew)
        assert second.news("over", "broken").what == "over"
    plain, twice = lengths[False], lengths[True]
    assert len(plain) == 3 * 4
    # each microbatch's twice, and one more of each length to see what it keeps
    assert len(twice) == 2 * len(plain) + len(set(plain))


def test_all_begin_with_the_heads_state_whatever_theirs_was(team):
    team = team(CLASSIFIER, 3)
    expected = alone(CLASSIFIER, 4)
    other = alone(CLASSIFIER, 7)
    sidecar = {name: np.array(array) for name, array in other.sidecar().items()}
    for member in team.members[1:]:
        member.wait(lambda member=member: member.board.published_once)
        member.board.post_set(other.flat.copy(), sidecar, 0)
    team.finish_after(4)
    team.form()
    for member in team.members:
        assert member.news("over", "broken").what == "over"
        assert_close(member.now()[0], expected.flat)
        assert int(member.optimizer()["optimizer.steps"]) == 4


def test_who_has_no_order_stands_still_and_takes_what_is_posted(team):
    member = team(CLASSIFIER, 1).head
    member.wait(lambda: member.reports)
    member.board.post_set(np.full(member.spec.layout.size, 3.0, np.float32), None, 17)
    member.wait(lambda: member.board.absorbed)
    assert member.now()[1] == 17
    assert member.steps == 0


def test_what_lies_on_the_board_comes_before_an_order(team):
    team = team(CLASSIFIER, 2)
    expected = alone(CLASSIFIER, 0)
    expected.set_state(np.full(expected.layout.size, 0.01, np.float32), None)
    for _ in range(2):
        expected.step()
    for member in team.members:
        member.wait(lambda member=member: member.board.published_once)
        member.board.post_set(np.full(member.spec.layout.size, 0.01, np.float32), None, 40)
    team.finish_after(2)
    team.form()
    for member in team.members:
        assert member.news("ready").policy_version == 40
        assert member.news("over").policy_version == 42
        assert_close(member.now()[0], expected.flat)


def test_deltas_are_taken_at_copies_and_reach_all_ranks(team):
    size = alone(CLASSIFIER, 0).layout.size
    delta = np.linspace(-0.1, 0.1, size, dtype=np.float32)
    team = team(CLASSIFIER, 3)
    expected = alone(CLASSIFIER, 2)
    expected.add_delta(delta)
    for _ in range(2):
        expected.step()

    def at_step(number):
        if number == 1:
            team.head.board.post_delta(delta, 100)
        if number == 4:
            team.head.say(Finish(1))

    team.head.at_step = at_step
    team.form()
    for member in team.members:
        said = [member.news("copied", "over", "broken") for _ in range(3)]
        assert [(news.what, news.policy_version) for news in said] == [
            ("copied", 100),
            ("copied", 102),
            ("over", 102),
        ]
        assert_close(member.now()[0], expected.flat)
        assert member.board.absorbed
    np.testing.assert_array_equal(team.members[2].now()[0], team.head.now()[0])


def test_a_set_at_a_copy_brings_its_optimizer(team):
    other = alone(CLASSIFIER, 7, microbatches=1)
    team = team(CLASSIFIER, 2)
    sidecar = {name: np.array(array) for name, array in other.sidecar().items()}
    team.head.at_step = lambda number: {
        1: lambda: team.head.board.post_set(other.flat.copy(), sidecar, 500),
        3: lambda: team.head.say(Finish(1)),
    }.get(number, lambda: None)()
    team.form(state_every=1)
    # the first copy takes it, and two updates follow
    for member in team.members:
        assert member.news("copied").policy_version == 500
        assert member.news("over").policy_version == 502
        assert int(member.optimizer()["optimizer.steps"]) == 9
    np.testing.assert_array_equal(team.members[1].now()[0], team.head.now()[0])


def test_who_serves_takes_nothing_until_it_has_another_order(team):
    team = team(CLASSIFIER, 2)
    first, second = team.members

    def post(number):
        if number == 1:
            second.board.post_delta(np.ones(second.spec.layout.size, np.float32), 9)
        if number == 4:
            first.say(Finish(1))

    first.at_step = post
    team.form()
    second.news("copied")
    assert not second.board.absorbed
    second.news("over")
    second.wait(lambda: second.board.absorbed)
    assert_close(second.now()[0], first.now()[0] + 1.0)


def test_another_head_goes_on_with_the_data_where_the_one_before_was(team):
    sequence = msgspec.structs.replace(
        CLASSIFIER, algorithm=msgspec.structs.replace(CLASSIFIER.algorithm, sample="sequence")
    )
    expected = alone(sequence, 7)
    team = team(sequence, 2)
    team.finish_after(4)
    team.form()
    for member in team.members:
        assert member.news("over", "broken").what == "over"
        assert int(member.board.sidecar()["regression.updates"]) == 4
    team.members.reverse()
    team.finish_after(3, generation=2)
    team.form(generation=2)
    for member in team.members:
        assert member.news("over", "broken").what == "over"
        assert_close(member.now()[0], expected.flat)


def test_figures_and_counts(team):
    team = team(CARTPOLE, 2)
    team.form(generation=4)
    team.head.news("copied")
    for rank, member in enumerate(team.members):
        member.wait(lambda member=member: member.reports and "pipeline_step_s" in member.reports[-1].metrics)
        report = member.reports[-1]
        figures = {name: value for name, value in report.metrics.items() if name.startswith("pipeline_")}
        assert figures.pop("pipeline_step_s") > 0.0
        assert 0.0 <= figures.pop("pipeline_bubble") <= 1.0
        assert figures.pop("pipeline_activation_bytes") > 0
        assert figures == {
            "pipeline_generation": 4.0,
            "pipeline_rank": float(rank),
            "pipeline_ranks": 2.0,
            "pipeline_stages": 2.0,
            "pipeline_microbatches": 4.0,
        }
        assert ("policy_loss" in report.metrics) == (rank == 0)
        assert (report.env_steps > 0, report.updates > 0) == (rank == 0, rank == 0)
    team.head.say(Trace(7, 3600.0))
    traced = team.head.hear()
    while not isinstance(traced, Traced):
        traced = team.head.hear()
    assert traced.number == 7
    assert {"forward", "backward", "step"} <= {span.what for span in traced.spans}


# --- costs ---------------------------------------------------------------------------------------


def test_who_will_work_over_torch_imports_what_that_needs(team, monkeypatch):
    from p2pdrl.workers.pipeline import torch_stages

    imported = []
    monkeypatch.setattr(torch_stages, "import_schedules", lambda: imported.append(1))
    member = team(CLASSIFIER, 1).head
    member.say(Measure(4))
    assert member.hear().microbatches == 4
    assert not imported
    member.say(Measure(4, over_torch=True))
    assert member.hear().microbatches == 4
    assert imported


@pytest.mark.parametrize("task", [CARTPOLE, RECURRENT, CLASSIFIER])
def test_costs_of_blocks_are_measured_once_for_each_number(team, task):
    member = team(task, 1).head
    before = alone(task, 0).flat.copy()
    member.say(Measure(4), Measure(2))
    member.say(Measure(4))
    said = {}
    for _ in range(3):
        blocks = member.hear()
        assert said.setdefault(blocks.microbatches, blocks) == blocks
    assert set(said) == {2, 4}
    parts = member.trainer.parts()
    for microbatches, blocks in said.items():
        assert (blocks.device, blocks.error) == ("cpu", "")
        assert [layer.name for layer in blocks.layers] == list(parts.block_map.titles)
        rows = -(-parts.most_rows // microbatches)
        spec = parts.outputs[0]
        assert blocks.layers[0].output_bytes == spec.nbytes(rows)
    np.testing.assert_array_equal(member.now()[0], before)


def test_blocks_are_measured_as_they_run():
    bf16 = msgspec.structs.replace(CLASSIFIER, gradients=GradientsConfig(precision="bf16"))
    found = {}
    for name, task in (("float32", CLASSIFIER), ("bf16", bf16)):
        trainer, precisions = build(task), set()
        dense = dense_of(trainer, 1)
        dense.register_forward_pre_hook(
            lambda *_, seen=precisions: seen.add(torch.is_autocast_enabled("cpu"))
        )
        blocks = measured(trainer, Measure(4), {})
        assert precisions == {name == "bf16"}
        found[name] = blocks.layers[1]
    assert found["bf16"].output_bytes == found["float32"].output_bytes / 2


def test_a_policy_that_cant_be_cut_says_so(team, monkeypatch):
    from p2pdrl.errors import ConfigError

    member = team(CLASSIFIER, 1).head

    def parts():
        raise ConfigError("one block only")

    monkeypatch.setattr(member.trainer, "parts", parts)
    member.say(Measure(4))
    assert member.hear() == Blocks(4, (), "", "one block only")
