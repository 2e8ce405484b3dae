"""The mode in force: strategies that follow each other, that fail, and that can't run here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import GradAverageConfig, LocalConfig, StrategyConfig
from p2pdrl.errors import ConfigError, PeerRefusedError
from p2pdrl.node import settings
from p2pdrl.strategies.pairwise import gossip
from p2pdrl.strategies.pairwise.gossip import GossipStrategy
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.transport.pipe import PipeReply
from p2pdrl.transport.protocol import Refusal

from .training_peers import GOSSIP


async def test_the_mode_changes_and_outcomes_stay(pair, until):
    one, two = pair
    for peer in pair:
        await peer.training.mode.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.outcomes.get("ok"))
    ok = one.training.outcomes["ok"]
    await two.training.mode.use(LocalConfig(), 2)
    assert (two.training.mode.strategy.mode, two.training.mode.epoch) == ("local", 2)
    meta = b"whatever"
    with pytest.raises(PeerRefusedError) as caught:
        await one.transport.call(two.address, two.id, gossip.ROUTE, meta, deadline_s=1.0)
    assert caught.value.status == 409
    await one.training.mode.use(GOSSIP, 2)
    assert one.training.outcomes["ok"] >= ok


async def test_a_bug_in_a_strategy_is_told(pair, monkeypatch):
    one = pair[0].training
    watch = asyncio.create_task(one.mode.watch())
    await one.mode.use(GOSSIP, 1)
    await one.mode.use(LocalConfig(), 2)
    await asyncio.sleep(0)
    assert not watch.done()

    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(GossipStrategy, "_next_partner", broken)
    await one.mode.use(GOSSIP, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 5)


async def test_a_bug_is_told_after_modes_that_follow_closely(pair, monkeypatch):
    one = pair[0].training
    watch = asyncio.create_task(one.mode.watch())
    await asyncio.sleep(0)
    change = one.crew.change

    async def dismiss_helpers_first(regime, epoch):
        await asyncio.sleep(0.01)
        await change(regime, epoch)

    await one.mode.use(LocalConfig(), 1)
    monkeypatch.setattr(one.mode, "_change", dismiss_helpers_first)
    await one.mode.use(GOSSIP, 2)  # before it is watched what came before
    await asyncio.sleep(0.01)

    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(GossipStrategy, "_next_partner", broken)
    await one.mode.use(GOSSIP, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 5)


async def test_rounds_are_counted_for_the_strategy_in_force(pair):
    one = pair[0].training
    await one.mode.use(GOSSIP, settings.stamp(1, one.swarm.node_id))
    one.swarm.round(RoundReport("ok", bytes_in=5))
    await one.mode.use(LocalConfig(), settings.stamp(2, one.swarm.node_id))
    documents = one.accounting.document(one.swarm.name_of)
    assert documents["adpsgd"]["rounds"]["ok"] >= 1
    assert [(step["epoch"], step["protocol"]) for step in one.accounting.walk()] == [
        (1, "adpsgd"), (2, "local")
    ]  # fmt: skip


class Unwilling(GossipStrategy):
    """Finds out as it starts that it can't run here."""

    stopped = 0

    async def start(self) -> None:
        await super().start()
        raise ConfigError("its port is taken")

    async def stop(self, timeout_s: float) -> None:
        Unwilling.stopped += 1
        await super().stop(timeout_s)


@pytest.mark.parametrize("when", ["built", "started"])
async def test_a_strategy_that_cant_run_here_leaves_the_node_alone(pair, monkeypatch, when):
    one = pair[0].training
    await one.mode.use(GOSSIP, 1)
    wanted: StrategyConfig = GradAverageConfig(backend="torch")
    if when == "started":
        wanted = GOSSIP
        monkeypatch.setattr("p2pdrl.node.mode.build", Unwilling)
    with pytest.raises(ConfigError):
        await one.mode.use(wanted, 2)
    assert (one.mode.strategy.mode, one.mode.config, one.mode.epoch) == ("local", LocalConfig(), 2)
    assert Unwilling.stopped == (when == "started")
    monkeypatch.undo()
    await one.mode.use(GOSSIP, 3)
    assert one.mode.strategy.mode == "gossip"
    assert one.outcomes.get("ok", 0) + one.outcomes.get("answered", 0) < 50, "no exchange counts twice"


class Slow(GossipStrategy):
    """Takes pipes, and asks for time to end."""

    ends_within_s = 7.0
    given_s: tuple[float, ...] = ()

    async def accept(self, incoming) -> PipeReply:
        return PipeReply(incoming.meta, lambda pipe: None)

    async def stop(self, timeout_s: float) -> None:
        Slow.given_s += (timeout_s,)
        await super().stop(timeout_s)


async def test_pipes_are_the_strategys_business(pair, monkeypatch):
    one = pair[0].training
    asked = SimpleNamespace(meta=b"a pipe please")
    await one.mode.use(GOSSIP, 1)
    with pytest.raises(Refusal, match="409: mode gossip has no use for pipes"):
        await one.mode.accept(asked)
    monkeypatch.setattr("p2pdrl.node.mode.build", Slow)
    await one.mode.use(GOSSIP, 2)
    assert (await one.mode.accept(asked)).meta == b"a pipe please"


async def test_a_strategy_may_ask_for_time_to_end_but_not_for_ever(pair, monkeypatch):
    one = pair[0].training
    Slow.given_s = ()
    for epoch, seconds in enumerate((7.0, 1e6, 0.0), 1):
        monkeypatch.setattr(Slow, "ends_within_s", seconds)
        with monkeypatch.context() as patch:
            patch.setattr("p2pdrl.node.mode.build", Slow)
            await one.mode.use(GOSSIP, epoch)
        await one.mode.use(LocalConfig(), epoch)
    assert Slow.given_s == (7.0, 15.0, 0.0)
