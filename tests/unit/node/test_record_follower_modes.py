"""The mode as the swarm's records say it: followed, proposed, refused, healed."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.config.node import LearnerConfig, NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import (
    AdpsgdConfig,
    GalaConfig,
    GradAverageConfig,
    LocalConfig,
    PipelineConfig,
    ServerSyncConfig,
    SgpConfig,
)
from p2pdrl.config.task import EnvConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.node import settings
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting

from .follower_fakes import at, stop_setting


async def test_the_mode_is_followed_once_per_record(follower, membership, training):
    follower.found(training, 0.0)
    await follower.follow(training)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    await follower.follow(training)
    await follower.follow(training)
    assert [settings.epoch_of(epoch) for _, epoch in training.used] == [1, 2]
    assert training.used[-1][0] == LocalConfig()
    membership.propose(settings.MODE, ModeSetting.of(AdpsgdConfig(partners="ring")))
    await follower.follow(training)
    assert training.used[-1] == (AdpsgdConfig(partners="ring"), at(3, membership))


async def test_it_follows_every_change(follower, membership, training, until):
    following = asyncio.create_task(follower.run(training))
    await asyncio.sleep(0)
    membership.propose(settings.PAUSE, PauseSetting(True))
    await until(lambda: training.paused)
    follower.found(training, 1.0)
    await until(lambda: training.used)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


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


async def test_a_change_of_mode_in_flight_holds_up_no_other_record(follower, membership, training, until):
    admission = Gated(training)
    follower.found(training, 1.0)
    following = asyncio.create_task(follower.run(training))
    await admission.entered.wait()
    membership.propose(settings.PAUSE, PauseSetting(True))
    await until(lambda: training.paused)
    membership.propose(settings.STOP, stop_setting(env_steps=7))
    await until(lambda: training.stop_config.env_steps == 7)
    membership.propose(settings.MODE, ModeSetting.of(LocalConfig()))
    membership.propose(settings.MODE, ModeSetting.of(SgpConfig()))
    admission.release.set()
    await until(lambda: len(training.used) == 2)
    assert training.used[-1] == (SgpConfig(), at(3, membership)), "those between are passed over"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_proposed_mode_is_the_swarms(follower, membership, training, events):
    record = follower.propose_mode(ServerSyncConfig(servers=2))
    await follower.follow(training)
    assert (record.epoch, record.proposer) == (1, membership.identity.node_id)
    assert training.used == [(ServerSyncConfig(servers=2), at(1, membership))]
    told = events.since(0)[-1]
    assert told["text"] == "mode is server-sync (servers=2) by me"
    assert told["options"] == {"servers": 2}
    assert (told["mode"], told["protocol"], told["epoch"]) == ("server-sync", "server_sync", 1)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (AdpsgdConfig(compression="topk"), "isn't an average"),
        (GradAverageConfig(backend="torch"), "trusted_network"),
    ],
)
async def test_what_cant_work_is_neither_proposed_nor_followed(
    follower, membership, training, events, strategy, says
):
    with pytest.raises(ConfigError, match=says):
        follower.propose_mode(strategy)
    assert membership.records.get(settings.MODE) is None
    # A peer that is less careful, or trusts its network:
    membership.propose(settings.MODE, ModeSetting.of(strategy))
    await follower.follow(training)
    assert training.used == [(LocalConfig(), at(1, membership))]
    [told] = events.since(0)
    assert told["kind"] == "mode-failed"
    assert says in told["text"]


async def test_a_mode_that_the_task_has_no_room_for_is_neither_proposed_nor_followed(
    follower, membership, training, kinds
):
    strategy = PipelineConfig(microbatches=500)
    with pytest.raises(ConfigError, match=r"task\.strategy\.microbatches: 500 .* 256 steps"):
        follower.propose_mode(strategy)
    membership.propose(settings.MODE, ModeSetting.of(strategy))
    await follower.follow(training)
    assert training.used == [(LocalConfig(), at(1, membership))]
    training.task = TaskConfig(env=EnvConfig(num_envs=64))
    follower.propose_mode(strategy)
    await follower.follow(training)
    assert training.used[-1][0] == strategy
    assert kinds() == ["mode-failed", "mode"]


async def test_stages_beyond_the_blocks_that_were_built_are_not_proposed(follower, membership, training):
    """A network of kind auto may have had more; a swarm that was told so makes the best of it."""
    strategy = PipelineConfig(stages=4)
    with pytest.raises(ConfigError, match=r"task\.strategy\.stages: .* this model has 3;"):
        follower.propose_mode(strategy)
    membership.propose(settings.MODE, ModeSetting.of(strategy))
    await follower.follow(training)
    assert training.used[-1][0] == strategy


async def test_own_keys_that_a_mode_leaves_without_effect_are_told(
    follower, membership, training, context, events
):
    learner = LearnerConfig(microbatches=4)
    context.config = Config(node=NodeConfig(learner=learner))
    follower.propose_mode(PipelineConfig())
    await follower.follow(training)
    assert training.used[-1][0] == PipelineConfig()
    told = events.since(0)[-1]
    assert told["kind"] == "keys-idle"
    assert told["text"].startswith("node.learner.microbatches has no effect under pipeline")


async def test_a_node_that_is_cut_over_devices_is_no_stage(follower, context):
    learner = LearnerConfig(split_devices=("cpu", "cpu"))
    context.config = Config(node=NodeConfig(learner=learner))
    with pytest.raises(ConfigError, match="split_devices: under pipeline"):
        follower.propose_mode(PipelineConfig())


async def test_a_strategy_that_this_node_cant_build_leaves_it_training_alone(
    follower, membership, training, context, kinds
):
    training.cannot = (SgpConfig,)
    membership.propose(settings.MODE, ModeSetting.of(SgpConfig()))
    await follower.follow(training)
    assert training.used == [(LocalConfig(), at(1, membership))]
    assert context.mode_error == "this node can't run mode gossip (sgp): it wants what isn't here"
    membership.propose(settings.MODE, ModeSetting.of(AdpsgdConfig()))
    await follower.follow(training)
    assert context.mode_error is None
    assert training.used[-1] == (AdpsgdConfig(), at(2, membership))
    assert kinds() == ["mode-failed", "mode"]


async def test_a_mode_too_long_to_be_told_is_refused_in_words(follower, membership):
    pinned = tuple(f"{number:064x}" for number in range(200))
    with pytest.raises(ConfigError, match="too many"):
        follower.propose_mode(ServerSyncConfig(servers=200, pinned=pinned))
    assert membership.records.get(settings.MODE) is None


async def test_no_mode_is_proposed_to_a_swarm_that_is_done(follower, membership, training):
    membership.propose(settings.STOP, stop_setting(env_steps=100))
    membership.propose(settings.HALT, HaltSetting("env_steps", "done", 1, membership.identity.node_id))
    await follower.follow(training)
    with pytest.raises(ConfigError, match="done"):
        follower.propose_mode(LocalConfig())


async def test_a_mode_of_a_newer_release_changes_nothing(follower, membership, training, context):
    follower.found(training, 0.0)
    await follower.follow(training)
    future = {"mode": "gossip", "strategy": {"name": "adpsgd", "telepathy": True}}
    membership.propose(settings.MODE, future)
    await follower.follow(training)
    assert len(training.used) == 1
    assert context.mode_error is None


@pytest.mark.parametrize("ahead", [1, 2])
async def test_a_partition_with_proposals_on_both_sides_heals_to_one_mode(
    follower, membership, training, make_membership, ahead
):
    """Last writer wins by (epoch, proposer): whoever proposed more often, or then the greater id."""
    other = make_membership(2)
    for side, strategy in ((membership, SgpConfig()), (other, GalaConfig())):
        for _ in range(ahead if side is membership else 1):
            side.propose(settings.MODE, ModeSetting.of(strategy))
    await follower.follow(training)
    records = [side.records.get(settings.MODE) for side in (membership, other)]
    for record in records:
        for side in (membership, other):
            side.records.merge(record)
    await follower.follow(training)
    winner = max(records, key=lambda record: (record.epoch, record.proposer))
    assert membership.records.get(settings.MODE) == other.records.get(settings.MODE) == winner
    assert training.used[-1][0] == settings.decode(winner.value, ModeSetting).strategy
    if ahead == 2:
        assert winner is records[0]


async def test_a_member_that_follows_a_newer_mode_is_asked_for_it(
    follower, membership, training, figures, clock
):
    """Gossip may have missed us; its report tells."""
    follower.found(training, 1.0)
    ours = at(1, membership)
    for newest, asked in ((0, 0), (ours, 0), (ours - 1, 0), (ours + 1, 1), (ours + 1, 1)):
        figures.newest = (newest, "b" * 32)
        follower.on_gossip_round(training)
        assert len(membership.asked) == asked
    clock.advance(2.5)
    follower.on_gossip_round(training)
    assert membership.asked == ["b" * 32] * 2, "at most every two seconds"
