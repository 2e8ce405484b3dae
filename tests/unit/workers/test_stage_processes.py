"""Stages in processes of their own, which die, freeze and meet over torch.distributed."""

from __future__ import annotations

import signal
import time

import msgspec
import numpy as np
import pytest

from p2pdrl.pipeline.plan import Rendezvous
from p2pdrl.workers.pipeline.protocol import Finish

from .pipes import joined
from .stage_learners import CLASSIFIER, Hosted, Spawned, build, orders

BLOCKS = 4


@pytest.fixture
def team():
    made = []

    def make(ranks, task=CLASSIFIER, hosted=()):
        made.extend(
            Hosted(build(task, seed=1 + rank)) if rank in hosted else Spawned(task, 1 + rank)
            for rank in range(ranks)
        )
        for rank, one in enumerate(made):
            one.start() if rank in hosted else one.begin()
        return made

    yield make
    for one in made:
        if isinstance(one, Spawned) and one.process.poll() is None:
            one.process.send_signal(signal.SIGCONT)
        one.close()


def form(team, **options):
    made = orders(BLOCKS, len(team), **options)
    circle = options.get("schedule") == "interleaved"
    for member, order, pipes in zip(
        team, made, joined(len(team), circle) if len(team) > 1 else [{}], strict=True
    ):
        member.order(order, pipes)


def at_once(member, what, within_s):
    begin_s = time.monotonic()
    news = member.news(what)
    assert time.monotonic() - begin_s < within_s
    return news


@pytest.mark.parametrize("hosted", [(0,), pytest.param((), marks=pytest.mark.slow)])
def test_processes_learn_die_and_go_on(team, hosted):
    """The first one is a thread of this process by default: to start another takes longer than the rest."""
    first, second = team = team(2, hosted=hosted)
    form(team)
    second.news("copied")
    first.say(Finish(1))
    overs = [member.news("over", "broken") for member in team]
    assert [news.what for news in overs] == ["over", "over"]
    version = overs[0].policy_version
    expected = build(CLASSIFIER, microbatches=4)
    for _ in range(version):
        expected.step()
    for member in team:
        vector, own = member.now()
        assert own == version
        np.testing.assert_allclose(vector, expected.flat, rtol=2e-5, atol=2e-6)

    form(team, generation=2)
    second.news("copied")
    second.process.kill()
    broken = at_once(first, "broken", 5.0)
    assert (broken.side, broken.generation) == ("next", 2)
    form([first], generation=3)
    assert first.news("copied").policy_version >= broken.policy_version


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 3), ("1f1b", 3), ("interleaved", 2)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whoever_dies_or_freezes_the_others_are_told_in_time(team, sign, schedule, ranks, rank):
    if rank >= ranks:
        pytest.skip("no such rank")
    team = team(ranks)
    stages = 4 if schedule == "interleaved" else ranks
    form(team, schedule=schedule, stages=stages, timeout_s=2.0, idle_timeout_s=2.0, state_every=5)
    for member in team:
        member.news("copied")
    team[rank].process.send_signal(sign)
    rest = [member for member in team if member is not team[rank]]
    for member in rest:
        at_once(member, "broken", 2.0 if sign == signal.SIGKILL else 5.0)
    form(rest, generation=2)
    for member in rest:
        member.news("copied")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_over_torch_distributed(team, killed):
    first, second = team = team(2)
    for generation in (1, 2):
        one, other = orders(
            BLOCKS,
            2,
            generation=generation,
            backend="torch",
            meeting=Rendezvous("127.0.0.1", 0),
            timeout_s=10.0,
        )
        first.order(one, {})
        port = first.news("meeting", "broken").port
        second.order(msgspec.structs.replace(other, meeting=Rendezvous("127.0.0.1", port)), {})
        assert second.news("copied", "broken").what == "copied"
        if killed:
            break
        first.say(Finish(generation))
        assert [member.news("over", "broken").what for member in team] == ["over", "over"]
    if killed:
        second.process.kill()
        at_once(first, "broken", 10.0)
        form([first], generation=3)
        first.news("copied")
        return
    version = first.now()[1]
    expected = build(CLASSIFIER, microbatches=4)
    for _ in range(version):
        expected.step()
    for member in team:
        np.testing.assert_allclose(member.now()[0], expected.flat, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_another_order_ends_a_wait_inside_torch(team, rank):
    """A neighbour is frozen, and the group would wait for it for long."""
    team = team(2)
    torch_orders = orders(BLOCKS, 2, backend="torch", timeout_s=30.0)
    port = 0
    for member, order in zip(team, torch_orders, strict=True):
        member.order(msgspec.structs.replace(order, meeting=Rendezvous("127.0.0.1", port)), {})
        port = port or member.news("meeting", "broken").port
    assert team[1].news("copied", "broken").what == "copied"
    team[1 - rank].process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)  # it is in the midst of an update
    form([team[rank]], generation=2)
    begin_s = time.monotonic()
    while team[rank].news("ready", "broken").generation == 1:
        pass
    assert time.monotonic() - begin_s < 3.0
    team[1 - rank].process.kill()
