"""The mode in force: strategies that follow each other, that fail, and that can't run here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.strategy import GradAverageConfig, LocalConfig, StrategyConfig
from p2pdrl.errors import ConfigError, PeerRefusedError
from p2pdrl.node import settings
from p2pdrl.node.training import ActiveMode
from p2pdrl.strategies.gossip import adpsgd
from p2pdrl.strategies.gossip.adpsgd import AdpsgdStrategy
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.strategies.registry import build
from p2pdrl.transport.pipe.ticket import PipeReply
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
        await one.transport.call(two.address, two.id, adpsgd.ROUTE, meta, deadline_s=1.0)
    assert caught.value.status == 409
    await one.training.mode.use(GOSSIP, 2)
    assert one.training.outcomes["ok"] >= ok


@pytest.fixture
async def mode(pair):
    """Makes modes for the first of two nodes, with a way to build strategies that the test chooses."""
    made = []

    def make(build, change=None) -> ActiveMode:
        one = pair[0].training
        made.append(ActiveMode(one.context, change or one.learners.change, one.accounting, build))
        return made[-1]

    yield make
    for each in made:
        await each.stop()


class Broken(LocalStrategy):
    """Ends by a bug."""

    async def watch(self) -> None:
        raise ZeroDivisionError("a bug")


def either(config, context):
    """Broken where it is configured so."""
    return Broken() if config == BAD else build(config, context)


BAD = msgspec.structs.replace(GOSSIP, every_updates=7)


async def test_a_bug_in_a_strategy_is_told(mode):
    one = mode(either)
    watch = asyncio.create_task(one.watch())
    await one.use(GOSSIP, 1)
    await one.use(LocalConfig(), 2)
    await asyncio.sleep(0)
    assert not watch.done()
    await one.use(BAD, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 5)


async def test_a_bug_is_told_after_modes_that_follow_closely(pair, mode):
    async def dismiss_helpers_first(learner_mode, epoch):
        if epoch > 1:
            await asyncio.sleep(0.01)
        await pair[0].training.learners.change(learner_mode, epoch)

    one = mode(either, dismiss_helpers_first)
    watch = asyncio.create_task(one.watch())
    await asyncio.sleep(0)
    await one.use(LocalConfig(), 1)
    await one.use(GOSSIP, 2)  # before it is watched what came before
    await asyncio.sleep(0.01)
    await one.use(BAD, 3)
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


class Unwilling(AdpsgdStrategy):
    """Finds out as it starts that it can't run here."""

    stopped = 0

    async def start(self) -> None:
        await super().start()
        raise ConfigError("its port is taken")

    async def stop(self, timeout_s: float) -> None:
        Unwilling.stopped += 1
        await super().stop(timeout_s)


@pytest.mark.parametrize("when", ["built", "started"])
async def test_a_strategy_that_cant_run_here_leaves_the_node_alone(mode, when, monkeypatch):
    """One can't be built, the other finds out as it starts."""
    monkeypatch.setattr(Unwilling, "stopped", 0)
    wanted: StrategyConfig = GradAverageConfig(backend="torch") if when == "built" else BAD
    one = mode(lambda config, context: (Unwilling if config == BAD else build)(config, context))
    await one.use(GOSSIP, 1)
    with pytest.raises(ConfigError):
        await one.use(wanted, 2)
    assert (one.strategy.mode, one.config, one.epoch) == ("local", LocalConfig(), 2)
    assert Unwilling.stopped == (when == "started")
    await one.use(GOSSIP, 3)
    assert one.strategy.mode == "gossip"
    assert one.outcomes["ok"] + one.outcomes["answered"] < 50, "no exchange counts twice"


class Slow(AdpsgdStrategy):
    """Takes pipes, and asks for time to end."""

    ends_within_s = 7.0
    given_s: tuple[float, ...] = ()

    async def accept(self, incoming) -> PipeReply:
        return PipeReply(incoming.meta, lambda pipe: None)

    async def stop(self, timeout_s: float) -> None:
        Slow.given_s += (timeout_s,)
        await super().stop(timeout_s)


async def test_pipes_are_the_strategys_business(mode):
    asked = SimpleNamespace(meta=b"a pipe please")
    plain, taking = mode(build), mode(Slow)
    await plain.use(GOSSIP, 1)
    with pytest.raises(Refusal, match="409: mode gossip has no use for pipes"):
        await plain.accept(asked)
    await taking.use(GOSSIP, 2)
    assert (await taking.accept(asked)).meta == b"a pipe please"


async def test_a_strategy_may_ask_for_time_to_end_but_not_for_ever(mode, monkeypatch):
    Slow.given_s = ()
    for epoch, seconds in enumerate((7.0, 1e6, 0.0), 1):
        monkeypatch.setattr(Slow, "ends_within_s", seconds)
        one = mode(lambda config, context: (Slow if config == GOSSIP else build)(config, context))
        await one.use(GOSSIP, epoch)
        await one.use(LocalConfig(), epoch)
    assert Slow.given_s == (7.0, 15.0, 0.0)
