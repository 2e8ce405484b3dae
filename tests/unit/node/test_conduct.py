from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    GalaConfig,
    GradAverageConfig,
    LocalConfig,
    ServerSyncConfig,
    SgpConfig,
)
from p2pdrl.config.task import StopConfig
from p2pdrl.errors import ConfigError
from p2pdrl.node import settings
from p2pdrl.node.conduct import Conduct
from p2pdrl.node.counters import Counts
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting


class FakeFigures:
    """Reports of the living; None while one is unheard of."""

    reports: list | None = None
    newest: tuple[int, str] = (0, "")

    def living_reports(self):
        return self.reports

    def newest_mode(self):
        return self.newest


@pytest.fixture
def figures() -> FakeFigures:
    return FakeFigures()


@pytest.fixture
def conduct(parts, figures, membership, training) -> Conduct:
    parts.training = training
    parts.state = "training"
    parts.saving = SimpleNamespace(stop_setting=None)
    parts.ledger.follow(training.lineage)
    made = Conduct(parts, figures)
    membership.on_record = lambda record: made.record_changed()
    return made


def at(epoch: int, proposer) -> int:
    return settings.stamp(epoch, proposer.identity.node_id)


def stop_setting(**conditions) -> StopSetting:
    return StopSetting(StopConfig(**conditions), 500.0)


async def test_a_founder_writes_the_first_records(conduct, membership, training, parts, kinds):
    conduct.found(training, 500.0)
    await conduct.follow(training)
    assert training.used == [(training.task.strategy, at(1, membership))]
    assert training.stop_config == training.task.stop
    assert conduct.founded_at == 500.0
    assert parts.saving.stop_setting == StopSetting.of(training.task, 500.0)
    assert kinds() == ["mode"]
    conduct.found(training, 900.0)
    await conduct.follow(training)
    assert conduct.founded_at == 500.0
    assert len(training.used) == 1


async def test_without_records_nothing_happens(conduct, training):
    await conduct.follow(training)
    conduct.look(training)
    assert training.used == []
    assert training.shared == 1
    assert conduct.founded_at is None


async def test_the_mode_is_followed_once_per_record(conduct, membership, training):
    conduct.found(training, 0.0)
    await conduct.follow(training)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    await conduct.follow(training)
    await conduct.follow(training)
    assert [settings.epoch_of(epoch) for _, epoch in training.used] == [1, 2]
    assert training.used[-1][0] == LocalConfig()
    membership.propose(settings.MODE, ModeSetting.of(AdpsgdConfig(partners="ring")))
    await conduct.follow(training)
    assert training.used[-1] == (AdpsgdConfig(partners="ring"), at(3, membership))


async def test_two_founders_records_end_alike(conduct, membership, training, make_membership):
    stranger = make_membership(2)
    mine = ModeSetting.of(AdpsgdConfig(partners="ring"))
    theirs = ModeSetting.of(AdpsgdConfig(partners="exponential"))
    records = [membership.propose(settings.MODE, mine), stranger.propose(settings.MODE, theirs)]
    records += [
        membership.propose(settings.STOP, stop_setting(env_steps=10)),
        stranger.propose(settings.STOP, stop_setting(env_steps=20)),
    ]
    await conduct.follow(training)
    for record in records:
        membership.records.merge(record)
        stranger.records.merge(record)
    assert membership.records.all() == stranger.records.all()
    await conduct.follow(training)
    winner = max([membership, stranger], key=lambda one: one.identity.node_id)
    assert training.used[-1][0] == (mine if winner is membership else theirs).strategy
    assert training.stop_config.env_steps == (10 if winner is membership else 20)


async def test_the_window_follows_the_record(conduct, membership, training):
    for window in (30, 50):
        membership.propose(settings.STOP, stop_setting(window=window))
        await conduct.follow(training)
    assert training.windows == [30, 50]


async def test_the_halt_ends_training(conduct, membership, training, parts, kinds):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    await conduct.follow(training)
    membership.propose(
        settings.HALT, HaltSetting("env_steps", "100 of 100 steps are done", 1, membership.identity.node_id)
    )
    await conduct.follow(training)
    assert conduct.halted.is_set()
    assert training.paused
    assert (parts.halted, parts.state) == ("100 of 100 steps are done", "stopping")
    assert kinds() == ["halted"]


async def test_a_halt_of_another_stop_record_is_void(conduct, membership, training):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "old", 1, membership.identity.node_id))
    membership.propose(settings.STOP, stop_setting(env_steps=1000))
    await conduct.follow(training)
    assert not conduct.halted.is_set()
    assert training.stop_config.env_steps == 1000
    membership.propose(settings.HALT, HaltSetting("env_steps", "new", 2, membership.identity.node_id))
    await conduct.follow(training)
    assert conduct.halted.is_set()


async def test_a_halt_that_came_before_its_stop_record_waits(conduct, membership, training):
    membership.propose(settings.HALT, HaltSetting("time_s", "over", 1, membership.identity.node_id))
    await conduct.follow(training)
    assert not conduct.halted.is_set()
    membership.propose(settings.STOP, stop_setting(time_s=1.0))
    await conduct.follow(training)
    assert conduct.halted.is_set()


async def test_who_sees_the_stop_condition_met_halts_the_swarm(conduct, membership, training, parts):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    await conduct.follow(training)
    parts.ledger.credit(Counts(40))
    conduct.look(training)
    assert membership.records.get(settings.HALT) is None
    assert training.fractions == [0.4]
    parts.ledger.credit(Counts(130))
    conduct.look(training)
    record = membership.records.get(settings.HALT)
    assert settings.decode(record.value, HaltSetting).stop_epoch == 1
    assert training.fractions == [0.4, 1.0]
    await conduct.follow(training)
    conduct.look(training)
    assert membership.records.get(settings.HALT) is record


async def test_returns_are_judged_once_everybody_is_heard(conduct, membership, training, figures):
    report = SimpleNamespace(state="training", episodes_in_window=3, mean_return=500.0)
    membership.propose(settings.STOP, stop_setting(mean_return=475.0, window=3))
    await conduct.follow(training)
    conduct.look(training)
    assert membership.records.get(settings.HALT) is None
    figures.reports = [report, SimpleNamespace(state="training", episodes_in_window=3, mean_return=100.0)]
    conduct.look(training)
    assert membership.records.get(settings.HALT) is None
    figures.reports = [report, report]
    conduct.look(training)
    assert membership.records.get(settings.HALT) is not None


async def test_time_is_counted_from_the_founding(conduct, membership, training, clock):
    membership.propose(settings.STOP, StopSetting(StopConfig(time_s=60.0), clock.wall() - 50.0))
    await conduct.follow(training)
    conduct.look(training)
    assert membership.records.get(settings.HALT) is None
    clock.advance(11.0)
    conduct.look(training)
    assert membership.records.get(settings.HALT) is not None


async def test_pause_and_resume_for_all(conduct, training, parts, kinds):
    conduct.pause(paused=True)
    await conduct.follow(training)
    await conduct.follow(training)
    assert training.paused
    assert parts.state == "paused"
    conduct.pause(paused=False)
    await conduct.follow(training)
    assert not training.paused
    assert parts.state == "training"
    assert kinds() == ["paused", "resumed"]


async def test_an_old_pause_record_doesnt_undo_what_was_asked_of_this_node(conduct, membership, training):
    conduct.pause(paused=False)
    await conduct.follow(training)
    conduct.hold(training, paused=True)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    await conduct.follow(training)
    assert training.paused


async def test_nothing_sets_a_halted_node_going_again(conduct, membership, training):
    conduct.pause(paused=False)
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "done", 1, membership.identity.node_id))
    await conduct.follow(training)
    assert training.paused
    await conduct.follow(training)
    conduct.pause(paused=False)
    await conduct.follow(training)
    assert training.paused


@pytest.mark.parametrize("key", [settings.MODE, settings.STOP, settings.PAUSE])
async def test_a_record_of_a_newer_release_is_left_alone(conduct, membership, training, kinds, key):
    membership.propose(key, {"from": "the future"})
    await conduct.follow(training)
    assert kinds() == ["record-unreadable"]
    assert training.used == []
    assert training.stop_config == training.task.stop


async def test_it_follows_every_change(conduct, membership, training, until):
    following = asyncio.create_task(conduct.run(training))
    await asyncio.sleep(0)
    membership.propose(settings.PAUSE, PauseSetting(True))
    await until(lambda: training.paused)
    conduct.found(training, 1.0)
    await until(lambda: training.used)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


# --- modes ----------------------------------------------------------------------------------------


class Gated:
    """A training whose change of mode waits until it is let go."""

    def __init__(self, training) -> None:
        self.entered, self.release = asyncio.Event(), asyncio.Event()
        self._use = training.mode.use
        training.mode.use = self.use

    async def use(self, strategy, epoch) -> None:
        self.entered.set()
        await self.release.wait()
        await self._use(strategy, epoch)


async def test_a_change_of_mode_in_flight_holds_up_no_other_record(conduct, membership, training, until):
    gate = Gated(training)
    conduct.found(training, 1.0)
    following = asyncio.create_task(conduct.run(training))
    await gate.entered.wait()
    membership.propose(settings.PAUSE, PauseSetting(True))
    await until(lambda: training.paused)
    membership.propose(settings.STOP, stop_setting(env_steps=7))
    await until(lambda: training.stop_config.env_steps == 7)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    membership.propose(settings.MODE, ModeSetting.of(SgpConfig()))
    gate.release.set()
    await until(lambda: len(training.used) == 2)
    assert training.used[-1] == (SgpConfig(), at(3, membership)), "those between are passed over"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_stamps_order_as_records_do():
    names = ["0" * 32, "00ff" + "0" * 28, "f" * 32]
    records = [(epoch, name) for epoch in (1, 2, 2**36) for name in names]
    stamps = [settings.stamp(*record) for record in records]
    assert stamps == sorted(set(stamps))
    assert max(stamps) < 2**53
    assert [settings.epoch_of(stamp) for stamp in stamps] == [epoch for epoch, _ in records]


async def test_a_proposed_mode_is_the_swarms(conduct, membership, training, events):
    record = conduct.propose_mode(ServerSyncConfig(servers=2))
    await conduct.follow(training)
    assert (record.epoch, record.proposer) == (1, membership.identity.node_id)
    assert training.used == [(ServerSyncConfig(servers=2), at(1, membership))]
    told = events.since(0)[-1]
    assert told["text"] == "mode is server-sync (server_sync) by me"
    assert (told["mode"], told["protocol"], told["epoch"]) == ("server-sync", "server_sync", 1)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (AdpsgdConfig(compression="topk"), "isn't an average"),
        (GradAverageConfig(backend="torch"), "trusted_network"),
    ],
)
async def test_what_cant_work_is_neither_proposed_nor_followed(
    conduct, membership, training, events, strategy, says
):
    with pytest.raises(ConfigError, match=says):
        conduct.propose_mode(strategy)
    assert membership.records.get(settings.MODE) is None
    # A peer that is less careful, or trusts its network:
    membership.propose(settings.MODE, ModeSetting.of(strategy))
    await conduct.follow(training)
    assert training.used == [(LocalConfig(), at(1, membership))]
    [told] = events.since(0)
    assert told["kind"] == "mode-failed"
    assert says in told["text"]


async def test_a_strategy_that_this_node_cant_build_leaves_it_training_alone(
    conduct, membership, training, parts, kinds
):
    training.cannot = (SgpConfig,)
    membership.propose(settings.MODE, ModeSetting.of(SgpConfig()))
    await conduct.follow(training)
    assert training.used == [(LocalConfig(), at(1, membership))]
    assert parts.mode_error == "this node can't run mode gossip (sgp): it wants what isn't here"
    membership.propose(settings.MODE, ModeSetting.of(AdpsgdConfig()))
    await conduct.follow(training)
    assert parts.mode_error is None
    assert training.used[-1] == (AdpsgdConfig(), at(2, membership))
    assert kinds() == ["mode-failed", "mode"]


async def test_a_mode_too_long_to_be_told_is_refused_in_words(conduct, membership):
    pinned = tuple(f"{number:064x}" for number in range(200))
    with pytest.raises(ConfigError, match="too many"):
        conduct.propose_mode(ServerSyncConfig(servers=200, pinned=pinned))
    assert membership.records.get(settings.MODE) is None


async def test_no_mode_is_proposed_to_a_swarm_that_is_done(conduct, membership, training):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "done", 1, membership.identity.node_id))
    await conduct.follow(training)
    with pytest.raises(ConfigError, match="done"):
        conduct.propose_mode(LocalConfig())


async def test_an_unreadable_record_is_told_once(conduct, membership, training, kinds):
    for key in (settings.MODE, settings.STOP, settings.PAUSE):
        membership.propose(key, {"from": "the future"})
    for _ in range(3):
        await conduct.follow(training)
    assert kinds() == ["record-unreadable"] * 3
    membership.propose(settings.STOP, {"from": "farther"})
    await conduct.follow(training)
    assert kinds() == ["record-unreadable"] * 4


async def test_a_mode_of_a_newer_release_changes_nothing(conduct, membership, training, parts):
    conduct.found(training, 0.0)
    await conduct.follow(training)
    future = {"mode": "gossip", "strategy": {"name": "adpsgd", "telepathy": True}}
    membership.propose(settings.MODE, future)
    await conduct.follow(training)
    assert len(training.used) == 1
    assert parts.mode_error is None


@pytest.mark.parametrize("ahead", [1, 2])
async def test_a_partition_with_proposals_on_both_sides_heals_to_one_mode(
    conduct, membership, training, make_membership, ahead
):
    """Last writer wins by (epoch, proposer): whoever proposed more often, or then the greater id."""
    other = make_membership(2)
    for side, strategy in ((membership, SgpConfig()), (other, GalaConfig())):
        for _ in range(ahead if side is membership else 1):
            side.propose(settings.MODE, ModeSetting.of(strategy))
    await conduct.follow(training)
    records = [side.records.get(settings.MODE) for side in (membership, other)]
    for record in records:
        for side in (membership, other):
            side.records.merge(record)
    await conduct.follow(training)
    winner = max(records, key=lambda record: (record.epoch, record.proposer))
    assert membership.records.get(settings.MODE) == other.records.get(settings.MODE) == winner
    assert training.used[-1][0] == settings.decode(winner.value, ModeSetting).strategy
    if ahead == 2:
        assert winner is records[0]


async def test_a_member_that_follows_a_newer_mode_is_asked_for_it(
    conduct, membership, training, figures, clock
):
    """Gossip may have missed us; its report tells."""
    conduct.found(training, 1.0)
    ours = at(1, membership)
    for newest, asked in ((0, 0), (ours, 0), (ours - 1, 0), (ours + 1, 1), (ours + 1, 1)):
        figures.newest = (newest, "b" * 32)
        conduct.look(training)
        assert len(membership.asked) == asked
    clock.advance(2.5)
    conduct.look(training)
    assert membership.asked == ["b" * 32] * 2, "at most every two seconds"
