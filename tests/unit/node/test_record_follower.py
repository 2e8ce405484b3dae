"""What the swarm's records make this node do: stop, halt, pause."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.strategy import AdpsgdConfig, LocalConfig
from p2pdrl.config.task import EvaluationConfig, StopConfig
from p2pdrl.ids import new_lineage
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.operators import Operator
from p2pdrl.node import settings
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.accounting.evaluations import Evaluation
from p2pdrl.node.settings import HaltSetting, ModeSetting, StopSetting

from .follower_fakes import at, stop_setting


async def test_a_founder_writes_the_first_records(follower, membership, training, context, kinds):
    follower.found(training, 500.0)
    await follower.follow(training)
    assert training.used == [(training.task.strategy, at(1, membership))]
    assert training.stop_config == training.task.stop
    assert follower.founded_at == 500.0
    assert context.checkpointer.stop_setting == StopSetting.of(training.task, 500.0)
    assert kinds() == ["mode"]
    follower.found(training, 900.0)
    await follower.follow(training)
    assert follower.founded_at == 500.0
    assert len(training.used) == 1


async def test_without_records_nothing_happens(follower, training):
    await follower.follow(training)
    follower.on_gossip_round(training)
    assert training.used == []
    assert training.shared == 1
    assert follower.founded_at is None


async def test_two_founders_records_end_alike(follower, membership, training, make_membership):
    stranger = make_membership(2)
    mine = ModeSetting.of(AdpsgdConfig(partners="ring"))
    theirs = ModeSetting.of(AdpsgdConfig(partners="exponential"))
    records = [membership.propose(settings.MODE, mine), stranger.propose(settings.MODE, theirs)]
    records += [
        membership.propose(settings.STOP, stop_setting(env_steps=10)),
        stranger.propose(settings.STOP, stop_setting(env_steps=20)),
    ]
    await follower.follow(training)
    for record in records:
        membership.records.merge(record)
        stranger.records.merge(record)
    assert membership.records.all() == stranger.records.all()
    await follower.follow(training)
    winner = max([membership, stranger], key=lambda one: one.identity.node_id)
    assert training.used[-1][0] == (mine if winner is membership else theirs).strategy
    assert training.stop_config.env_steps == (10 if winner is membership else 20)


@pytest.mark.parametrize(("rank", "kept"), [(None, [9.0]), (0, [9.0]), (1, [])])
async def test_returns_from_before_a_pipeline_are_dropped_where_another_trains(
    follower, training, rank, kept
):
    training.supervisor.returns.append(9.0)
    learner = training.supervisor
    learner.requests = SimpleNamespace(learner_mode=LearnerMode(stages=True))
    learner.stages = SimpleNamespace(order=None if rank is None else SimpleNamespace(rank=rank))
    follower.on_gossip_round(training)
    assert training.supervisor.returns == kept


async def test_the_window_follows_the_record(follower, membership, training):
    for window in (30, 50):
        membership.propose(settings.STOP, stop_setting(window=window))
        await follower.follow(training)
    assert training.windows == [30, 50]


async def test_the_halt_ends_training(follower, membership, training, context, kinds):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    await follower.follow(training)
    membership.propose(
        settings.HALT, HaltSetting("env_steps", "100 of 100 steps are done", 1, membership.identity.node_id)
    )
    await follower.follow(training)
    assert follower.halted.is_set()
    assert training.paused
    assert (context.halted, context.state) == ("100 of 100 steps are done", "stopping")
    assert kinds() == ["halted"]


async def test_a_halt_of_another_stop_record_is_void(follower, membership, training):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "old", 1, membership.identity.node_id))
    membership.propose(settings.STOP, stop_setting(env_steps=1000))
    await follower.follow(training)
    assert not follower.halted.is_set()
    assert training.stop_config.env_steps == 1000
    membership.propose(settings.HALT, HaltSetting("env_steps", "new", 2, membership.identity.node_id))
    await follower.follow(training)
    assert follower.halted.is_set()


async def test_a_halt_that_came_before_its_stop_record_waits(follower, membership, training):
    membership.propose(settings.HALT, HaltSetting("time_s", "over", 1, membership.identity.node_id))
    await follower.follow(training)
    assert not follower.halted.is_set()
    membership.propose(settings.STOP, stop_setting(time_s=1.0))
    await follower.follow(training)
    assert follower.halted.is_set()


async def test_who_sees_the_stop_condition_met_halts_the_swarm(follower, membership, training, context):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    await follower.follow(training)
    context.progress_tracker.credit(Counts(40))
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is None
    assert training.fractions == [0.4]
    context.progress_tracker.credit(Counts(130))
    follower.on_gossip_round(training)
    record = membership.records.get(settings.HALT)
    assert settings.decode(record.value, HaltSetting).stop_epoch == 1
    assert training.fractions == [0.4, 1.0]
    await follower.follow(training)
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is record


async def test_returns_are_judged_once_everybody_is_heard(follower, membership, training, figures):
    training.task = msgspec.structs.replace(training.task, evaluation=EvaluationConfig(every=0))
    report = SimpleNamespace(state="training", trains=True, episodes_in_window=3, mean_return=500.0)
    membership.propose(settings.STOP, stop_setting(mean_return=475.0, window=3))
    await follower.follow(training)
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is None
    figures.reports = [
        report,
        SimpleNamespace(state="training", trains=True, episodes_in_window=3, mean_return=100.0),
    ]
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is None
    figures.reports = [report, report]
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is not None


async def test_two_evaluations_in_a_row_end_training(follower, membership, training, context, figures):
    figures.reports = [
        SimpleNamespace(state="training", trains=True, episodes_in_window=3, mean_return=500.0)
    ]
    membership.propose(settings.STOP, stop_setting(mean_return=475.0, window=3))
    await follower.follow(training)
    for steps, mean, halted in [
        (10, 480.0, False),
        (20, 470.0, False),
        (30, 475.0, False),
        (40, 475.0, True),
    ]:
        context.evaluations.add("b" * 32, Evaluation(steps, 1, 30, mean, 5.0, 9.0, 1.0))
        follower.on_gossip_round(training)
        assert (membership.records.get(settings.HALT) is not None) == halted


async def test_time_is_counted_from_the_founding(follower, membership, training, clock):
    membership.propose(settings.STOP, StopSetting(StopConfig(time_s=60.0), clock.wall() - 50.0))
    await follower.follow(training)
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is None
    clock.advance(11.0)
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is not None


async def test_a_wall_clock_that_jumps_ends_no_swarm(follower, membership, training, clock):
    membership.propose(settings.STOP, StopSetting(StopConfig(time_s=60.0), clock.wall() - 50.0))
    await follower.follow(training)
    for jump_s in (3600.0, -7200.0):
        clock.jump(jump_s)
        await follower.follow(training)
        follower.on_gossip_round(training)
        assert membership.records.get(settings.HALT) is None
    clock.advance(11.0)
    follower.on_gossip_round(training)
    assert membership.records.get(settings.HALT) is not None


async def test_pause_and_resume_for_all(follower, training, context, kinds):
    follower.pause(paused=True)
    await follower.follow(training)
    await follower.follow(training)
    assert training.paused
    assert context.state == "paused"
    follower.pause(paused=False)
    await follower.follow(training)
    assert not training.paused
    assert context.state == "training"
    assert kinds() == ["paused", "resumed"]


async def test_an_old_pause_record_doesnt_undo_what_was_asked_of_this_node(follower, membership, training):
    follower.pause(paused=False)
    await follower.follow(training)
    follower.hold(training, paused=True)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    await follower.follow(training)
    assert training.paused


async def test_records_are_followed_while_nothing_else_does(follower, membership, training):
    """A node that waits for a learner is halted by a condition that came meanwhile."""
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.PAUSE, settings.PauseSetting(True))
    follower.on_gossip_round(training)
    assert training.paused
    assert training.stop_config.env_steps == 100
    membership.propose(settings.HALT, HaltSetting("env_steps", "done", 1, membership.identity.node_id))
    follower.on_gossip_round(training)
    assert follower.halted.is_set()


async def test_nothing_sets_a_halted_node_going_again(follower, membership, training):
    follower.pause(paused=False)
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "done", 1, membership.identity.node_id))
    await follower.follow(training)
    assert training.paused
    await follower.follow(training)
    follower.pause(paused=False)
    await follower.follow(training)
    assert training.paused


@pytest.mark.parametrize("key", [settings.MODE, settings.STOP, settings.PAUSE])
async def test_a_record_of_a_newer_release_is_left_alone(follower, membership, training, kinds, key):
    membership.propose(key, {"from": "the future"})
    await follower.follow(training)
    assert kinds() == ["record-unreadable"]
    assert training.used == []
    assert training.stop_config == training.task.stop


async def test_stamps_order_as_records_do():
    names = ["0" * 32, "00ff" + "0" * 28, "f" * 32]
    records = [(epoch, name) for epoch in (1, 2, 2**36) for name in names]
    stamps = [settings.stamp(*record) for record in records]
    assert stamps == sorted(set(stamps))
    assert max(stamps) < 2**53
    assert [settings.epoch_of(stamp) for stamp in stamps] == [epoch for epoch, _ in records]


async def test_an_unreadable_record_is_told_once(follower, membership, training, kinds):
    for key in (settings.MODE, settings.STOP, settings.PAUSE):
        membership.propose(key, {"from": "the future"})
    for _ in range(3):
        await follower.follow(training)
    assert kinds() == ["record-unreadable"] * 3
    membership.propose(settings.STOP, {"from": "farther"})
    await follower.follow(training)
    assert kinds() == ["record-unreadable"] * 4


async def test_another_swarms_records_change_nothing_however_great_they_are(
    follower, membership, training, make_membership
):
    stranger = make_membership(2)
    membership.follow("old")
    stranger.follow("new")
    follower.found(training, 500.0)
    await follower.follow(training)
    for _ in range(5):
        theirs = [
            stranger.propose(settings.MODE, ModeSetting.of(LocalConfig())),
            stranger.propose(settings.STOP, stop_setting(env_steps=0)),
        ]
    for record in theirs:
        membership.recall(record)
    await follower.follow(training)
    assert training.used == [(training.task.strategy, at(1, membership))]
    assert training.stop_config == training.task.stop


async def test_who_adopts_another_lineage_follows_its_records(
    follower, membership, training, make_membership
):
    stranger = make_membership(2)
    membership.follow("new")
    stranger.follow("old")
    membership.propose(settings.STOP, stop_setting(env_steps=7))
    await follower.follow(training)
    theirs = stranger.propose(settings.STOP, stop_setting(env_steps=100_000_000))
    follower.enter("old")
    assert membership.records.all() == ()
    follower.on_gossip_round(training)  # judges by no condition until the swarm's is there
    membership.recall(theirs)
    await follower.follow(training)
    assert training.stop_config.env_steps == 100_000_000


async def test_a_greater_lineage_that_a_member_reports_is_adopted_whatever_the_modes(
    follower, training, figures
):
    begun = []
    assert training.ready
    training.adoptions = SimpleNamespace(under_way=False, begin=lambda *what: begun.append(what))
    follower.on_gossip_round(training)
    assert begun == []
    figures.greater = ("d" * 32, "old", "lineage old has 9 steps, ours 1")
    follower.on_gossip_round(training)
    training.adoptions.under_way = True
    follower.on_gossip_round(training)
    assert begun == [figures.greater]


# In a swarm with operators


ROOT = Identity(b"r" * 32)


@pytest.fixture
def operated(make_membership, follower, context, training):
    """The follower's membership, of a swarm that an operator commands; its lineage is this node's own."""
    made = make_membership(1, [Operator(ROOT.public_key, "alice")])
    training.lineage = new_lineage(made.public_key)
    context.membership = made
    context.progress_tracker.follow(training.lineage)
    made.on_record = lambda record: follower.record_changed()
    follower.enter(training.lineage)
    return made


def commanded(membership, clock, key, value):
    record = membership.records.compose(key, value, ROOT, clock.wall())
    membership.submit(record)
    return record


async def test_a_members_halt_counts_where_the_stop_condition_is_met(follower, operated, training, context):
    operated.propose(settings.STOP, stop_setting(env_steps=100))
    stranger = Identity(b"s" * 32)
    version = operated.records.get(settings.STOP)
    halt = HaltSetting("env_steps", "done", version.epoch, version.proposer)
    operated.submit(operated.records.compose(settings.HALT, halt, stranger))
    await follower.follow(training)
    context.progress_tracker.credit(Counts(99))
    follower.on_gossip_round(training)
    assert not follower.halted.is_set()
    assert operated.records.get(settings.HALT).proposer == stranger.node_id
    context.progress_tracker.credit(Counts(100))
    follower.on_gossip_round(training)
    assert follower.halted.is_set()
    assert operated.records.get(settings.HALT).proposer == stranger.node_id, "said once is enough"


async def test_a_node_ends_by_what_it_knows_whatever_halt_is_held(
    follower, operated, training, context, clock
):
    operated.propose(settings.STOP, stop_setting(env_steps=100))
    commanded(operated, clock, settings.HALT, HaltSetting("command", "", 99, "0" * 32))
    await follower.follow(training)
    context.progress_tracker.credit(Counts(100))
    follower.on_gossip_round(training)
    assert follower.halted.is_set()


async def test_an_operators_halt_counts_at_once_and_not_for_ever(
    follower, operated, training, context, clock, kinds
):
    operated.propose(settings.STOP, stop_setting(env_steps=100))
    stop = operated.records.get(settings.STOP)
    halt = HaltSetting("command", "enough", stop.epoch, stop.proposer)
    commanded(operated, clock, settings.HALT, halt)
    clock.advance(601.0)
    await follower.follow(training)
    assert not follower.halted.is_set()
    assert kinds() == ["halt-passed-over"]
    commanded(operated, clock, settings.HALT, halt)
    await follower.follow(training)
    assert follower.halted.is_set()
    assert context.halted == f"halted by operator alice ({ROOT.node_id[:8]}): enough"


async def test_only_a_lineages_founder_writes_its_first_settings(
    follower, operated, training, context, events
):
    follower.enter(new_lineage(ROOT.public_key))
    follower.found(training, 500.0)
    assert operated.records.all() == ()
    assert [event["kind"] for event in events.since(0)] == ["settings-missing"] * 2
    follower.enter(training.lineage)
    follower.found(training, 500.0)
    assert [record.epoch for record in operated.records.all()] == [1, 1]


async def test_who_hears_that_the_swarm_is_done_before_it_trains_looks_itself(
    follower, operated, training, context
):
    operated.propose(settings.STOP, stop_setting(env_steps=100))
    version = operated.records.get(settings.STOP)
    halt = HaltSetting("env_steps", "done", version.epoch, version.proposer)
    operated.submit(operated.records.compose(settings.HALT, halt, Identity(b"s" * 32)))
    waiting = asyncio.create_task(follower.until_done())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    context.progress_tracker.credit(Counts(100))
    follower.record_changed()
    assert await asyncio.wait_for(waiting, 5) == "done"
