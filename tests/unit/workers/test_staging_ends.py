"""How learners end as stages: at a word, by another order, for a neighbour's sake, or before they begin."""

from __future__ import annotations

import os
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from p2pdrl.config.learner_mode import FREE
from p2pdrl.rl.gradients import OwnStepper
from p2pdrl.rl.pipeline.rank import Pipelined
from p2pdrl.workers.pipeline import measure
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, StartStage, Trace, Traced
from p2pdrl.workers.pipeline.stage_runner import StageRunner
from p2pdrl.workers.protocol import LearnerPace, Stop, WorkMode

from ..transport.pipes import KEYS
from .pipes import close_all, joined
from .stage_learners import CARTPOLE, CLASSIFIER, STAGES, Hosted, alone, assert_close, orders


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_learner_that_ends_breaks_the_pipeline_for_the_others_and_they_form_another(team, rank):
    team = team(CLASSIFIER, 3)
    team.form()
    for member in team.members:
        member.news("copied")
    team.members[rank].say(Stop())
    rest = [member for member in team.members if member is not team.members[rank]]
    for member in rest:
        broken = member.news("broken")
        assert broken.generation == 1
        assert broken.side == ("previous" if team.members.index(member) > rank else "next")
        assert broken.why
    before = [member.now() for member in rest]
    assert all(version >= 2 for _, version in before)
    newest = max(before, key=lambda state: state[1])
    for member in rest:
        member.board.post_set(newest[0], None, newest[1])
    team.members = [*rest, team.members[rank]]
    team.finish_after(rest[0].steps + 3, generation=2)
    team.form(members=rest, generation=2)
    for member in rest:
        assert member.news("over").policy_version == newest[1] + 3
    np.testing.assert_array_equal(rest[0].now()[0], rest[1].now()[0])


def test_in_a_rank_gradients_and_optimizer_are_the_shares_alone_and_the_trainers_again_after(team):
    team = team(CARTPOLE, 2)
    own = team.head.trainer.engine
    told = []
    for member in team.members:
        trainer, region = member.trainer, np.frombuffer(member.region.buf, np.uint8)

        def offload_to(sidecar, *, trainer=trainer, region=region, plain=trainer.offload_to):
            plain(sidecar)
            gradients = [parameter.grad for parameter in trainer.policy.parameters()]
            moments = [x for name, x in trainer.sidecar().items() if name in ("optimizer.m", "optimizer.v")]
            told.append(
                (gradients == [None] * len(gradients), *(np.shares_memory(x, region) for x in moments))
            )

        trainer.offload_to = offload_to
    team.finish_after(3)
    team.form(state_every=2)
    for member in team.members:
        member.news("over")
    assert len(told) >= 6  # at the beginning, after a copy, and at the end
    assert set(told) == {(True, True, True)}
    team.head.say(WorkMode(FREE, 2))
    team.head.wait(lambda: team.head.steps >= 5)
    assert team.head.trainer.engine is own
    moments = team.head.trainer.sidecar()["optimizer.m"]
    assert not np.shares_memory(moments, np.frombuffer(team.head.region.buf, np.uint8))


def test_the_update_that_broke_isnt_counted(team):
    team = team(CARTPOLE, 2)
    team.form(state_every=1000)
    team.head.wait(lambda: team.head.steps >= 3)
    team.members[1].say(Stop())
    broken = team.head.news("broken")
    vector, version = team.head.now()
    assert version == broken.policy_version == team.head.steps
    team.head.wait(lambda: team.head.reports[-1].updates == version)
    assert_close(vector, alone(CARTPOLE, version).flat)


def test_ranks_know_of_how_many_updates_they_have_no_copy(team):
    team = team(CLASSIFIER, 3)
    team.head.at_step = lambda number: team.head.say(Stop()) if number == 8 else None
    team.form(state_every=3)
    for member in team.members[1:]:
        broken = member.news("broken")
        assert (broken.policy_version, broken.behind) == (6, 2)


def test_another_mode_ends_a_stage_and_the_learner_goes_on_by_itself(team):
    team = team(CLASSIFIER, 2)
    first, second = team.members
    team.form(state_every=1)
    second.news("copied")
    first.say(WorkMode(FREE, 2))
    assert second.news("broken").side == "previous"
    count = first.steps
    first.wait(lambda: first.steps > count + 3)
    assert isinstance(first.trainer.stepper, OwnStepper)
    assert first.heard.empty() or first.news("copied")
    second.say(WorkMode(FREE, 2))
    second.wait(lambda: second.steps > 3)
    assert isinstance(second.trainer.stepper, OwnStepper)


def test_another_order_ends_the_one_before_without_a_word_of_it(team):
    team = team(CLASSIFIER, 2)
    team.form()
    team.members[1].news("copied")
    team.form(generation=2)
    for member in team.members:
        while (news := member.news("ready", "copied", "over", "broken")).generation == 1:
            assert news.what != "over"
        assert news.what == "ready"


def test_finish_of_another_generation_is_passed_over(team):
    team = team(CLASSIFIER, 1)
    team.form(generation=3)
    team.head.say(Finish(2))
    for _ in range(3):
        assert team.head.news("copied", "over").what == "copied"
    team.head.say(Finish(3))
    assert team.head.news("over").generation == 3
    steps = team.head.steps
    team.head.say(Measure(2))
    while not isinstance(team.head.hear(), Blocks):
        pass
    assert team.head.steps == steps


def test_finish_is_passed_over_by_all_but_the_head(team):
    team = team(CLASSIFIER, 2)
    second = team.members[1]
    team.form(state_every=1)
    second.news("copied")
    second.say(Finish(1), Trace(1, 1.0))
    while not isinstance(second.hear(), Traced):
        pass
    for _ in range(3):
        assert second.news("copied", "over", "broken").what == "copied"
    team.head.say(Finish(1))
    for member in team.members:
        assert member.news("over", "broken").what == "over"
    team.form(generation=2)
    assert second.news("ready", "broken").what == "ready"


@pytest.mark.slow
def test_a_pause_holds_rank_0_and_nobody_times_out(team):
    team = team(CLASSIFIER, 2)
    team.form(idle_timeout_s=0.3)
    first, second = team.members
    second.news("copied")
    for member in team.members:
        member.say(LearnerPace(paused=True, max_updates_per_s=0.0))
    first.wait(lambda: len(first.reports) > 2 and first.reports[-1].updates == first.reports[-3].updates)
    steps, reports = first.steps, len(second.reports)
    second.wait(lambda: len(second.reports) > reports + 12)
    assert first.steps == steps
    for member in reversed(team.members):
        member.say(LearnerPace(paused=False, max_updates_per_s=0.0))
    first.wait(lambda: first.steps > steps + 2)
    first.say(LearnerPace(paused=True, max_updates_per_s=0.0))
    broken = second.news("broken")
    assert (broken.side, "no update for 0.3 s" in broken.why) == ("previous", True)
    assert first.news("broken").side == "next"  # though it is paused


def test_a_head_that_freezes_between_two_minibatches_is_late_like_any_neighbour(team, monkeypatch):
    team, thawed, stepped = team(CARTPOLE, 2), threading.Event(), []
    step = Pipelined.step

    def freezing(self, *arguments, **options):
        norm = step(self, *arguments, **options)
        stepped.append(options["left"])
        if len(stepped) == 6:  # the second one of the second update
            thawed.wait(20.0)
        return norm

    monkeypatch.setattr(Pipelined, "step", freezing)
    team.form(timeout_s=0.3, idle_timeout_s=60.0)
    broken = team.members[1].news("broken", timeout_s=10.0)
    assert (broken.side, stepped[-1]) == ("previous", 2)
    thawed.set()
    assert team.head.news("broken").side == "next"


def test_the_pace_is_kept(team):
    team = team(CLASSIFIER, 2)
    team.head.say(LearnerPace(paused=False, max_updates_per_s=0.5))
    team.form(state_every=1)
    team.members[1].news("copied")
    team.members[1].wait(lambda: len(team.members[1].reports) > 8)
    assert team.head.steps == 1


def test_a_neighbour_that_says_nothing_is_late(team):
    team = team(CLASSIFIER, 1)
    pipes = joined(2)
    order, _ = orders(team.blocks, 2, timeout_s=0.2)
    team.head.order(order, pipes[0])
    broken = team.head.news("broken")
    assert broken.side == "next"
    assert "0.2 s" in broken.why
    close_all(pipes[1:])


def test_stopping_leaves_nothing_behind(team):
    team = team(CLASSIFIER, 2)
    team.form(keys=KEYS)
    team.members[1].news("copied")
    assert isinstance(team.head, Hosted)


# --- orders that can't be carried out ------------------------------------------------------------


def test_orders_that_dont_fit_are_broken_at_once(team):
    team = team(CLASSIFIER, 1)
    wrong = [
        (orders(team.blocks + 1, 1)[0], {}, "blocks here, not"),
        (orders(team.blocks, 2)[0], {}, r"wants pipes \['next'\], not \[\]"),
        (orders(team.blocks, 1, microbatches=0)[0], {}, "cut into"),
        (orders(team.blocks, 1, backend="torch")[0], {}, "meeting"),
    ]
    for order, pipes, why in wrong:
        team.head.order(order, pipes)
        broken = team.head.news("ready", "broken")
        assert broken.what == "broken"
        assert re.search(why, broken.why), broken.why
    one, other = joined(2)
    team.head.order(orders(team.blocks, 1)[0], one)
    assert "not ['next']" in team.head.news("broken").why
    close_all([other])


def test_an_order_under_another_mode_is_refused(team):
    team = team(CLASSIFIER, 1, learner_mode=FREE)
    one, other = joined(2)
    team.head.order(orders(team.blocks, 2)[0], one)
    assert "without stages" in team.head.news("broken").why
    team.head.say(WorkMode(STAGES, 2))
    team.form(generation=2)
    assert team.head.news("ready", "broken").what == "ready"
    close_all([other])


def test_pipes_of_an_order_are_closed_when_blocks_cant_be_measured(monkeypatch):
    def measured(*_arguments):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(measure, "measured", measured)
    one, other = joined(2)
    (fd, ticket) = one["next"]
    replica = SimpleNamespace(take=lambda: None, publish=lambda: None)
    staging = StageRunner(None, replica, say=print, listen=lambda: None, paused=lambda: False)
    staging.end(stages=True)
    staging.hear(Measure(4), lambda: -1)
    staging.hear(StartStage(orders(4, 2)[0], (("next", ticket),)), lambda: fd)
    with pytest.raises(RuntimeError, match="no kernel image"):
        staging.turn(stages=True)
    staging.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    close_all([other])
