"""One owner's piece: who is waited for, who counts, who gets what."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.round_collector import RoundCollector
from p2pdrl.transport.protocol import Refusal

pytestmark = pytest.mark.looptime


async def total(contributions):
    """Weighted sum, in the order given."""
    out = np.zeros(contributions[0].vector.size, np.float32)
    for part in contributions:
        out += np.float32(part.weight) * part.vector
    return out


def gathering(members="abc", reduce=total, timeout=None, **options) -> RoundCollector:
    return RoundCollector(
        size=2,
        members=members,
        clock=LoopClock(),
        timeout=timeout if timeout is not None else AdaptiveTimeout(10.0),
        reduce=reduce,
        **{"first": 5, **options},
    )


def of(value, takes_s=0.0, wrong=None):
    """A fill that writes ``value``."""

    async def fill(out):
        await asyncio.sleep(takes_s)
        if wrong is not None:
            raise wrong
        out[:] = value

    return fill


def give(to, sender, value=1.0, number=5, weight=1.0, **options):
    return asyncio.create_task(to.contribute(number, sender, weight, 7, of(value, **options)))


async def test_all_get_the_same_result_once_all_have_come():
    here = gathering()
    first = [give(here, "c", 3.0), give(here, "a", 1.0, weight=2.0)]
    await asyncio.sleep(1)
    assert not any(task.done() for task in first)
    assert here.missing == ("b",)
    results = await asyncio.gather(*first, give(here, "b", 10.0))
    assert all(result.vector is results[0].vector for result in results)
    assert results[0].vector.tolist() == [15.0, 15.0]
    assert [part.sender for part in results[0].merged] == ["a", "b", "c"]
    assert all(part.vector.size == 0 for part in results[0].merged)
    assert results[0].missing == ()
    assert not results[0].late
    assert here.number == 6


async def test_rounds_follow_each_other():
    here = gathering("ab")
    for number in (5, 6, 7):
        tasks = [give(here, sender, float(number), number) for sender in "ab"]
        assert [(await task).vector.tolist() for task in tasks] == [[2.0 * number] * 2] * 2


async def test_what_comes_twice_counts_once():
    here = gathering("ab")
    tasks = [give(here, "a"), give(here, "a", 100.0), give(here, "b")]
    results = await asyncio.gather(*tasks)
    assert [result.vector.tolist() for result in results] == [[2.0, 2.0]] * 3
    assert not any(result.late for result in results)


async def test_a_failed_read_is_told_to_its_sender_who_may_try_again():
    here = gathering("ab")
    with pytest.raises(OSError, match="broken"):
        await give(here, "a", wrong=OSError("broken"))
    results = await asyncio.gather(give(here, "a", 4.0), give(here, "b"))
    assert results[0].vector.tolist() == [5.0, 5.0]


async def test_a_second_try_waits_for_the_first_and_steps_in():
    here = gathering("ab")
    stuck = give(here, "a", takes_s=1.0, wrong=OSError("broken"))
    again = give(here, "a", 4.0)
    await asyncio.gather(give(here, "b"), again)
    assert (await again).vector.tolist() == [5.0, 5.0]
    with pytest.raises(OSError, match="broken"):
        await stuck


async def test_backups_are_not_waited_for_and_hear_that_they_are_late():
    here = gathering(backups=1)
    results = await asyncio.gather(give(here, "a"), give(here, "b"))
    assert results[0].missing == ("c",)
    late = await give(here, "c", 100.0)
    assert late.late
    assert late.vector is results[0].vector


async def test_who_is_still_sending_when_the_round_closes_is_late():
    here = gathering(backups=1)
    slow = give(here, "c", 100.0, takes_s=1.0)
    results = await asyncio.gather(give(here, "a"), give(here, "b"))
    assert results[0].vector.tolist() == [2.0, 2.0]
    assert (await slow).late
    more = await asyncio.gather(give(here, "c", 9.0, 6), give(here, "a", 1.0, 6))
    assert more[0].vector.tolist() == [10.0, 10.0]


async def test_after_the_deadline_a_quorum_is_enough():
    timeout = AdaptiveTimeout(10.0)
    for _ in range(10):
        timeout.observe(0.2)
    here = gathering(quorum=0.6, timeout=timeout)
    began_s = LoopClock().monotonic()
    results = await asyncio.gather(give(here, "a"), give(here, "b"))
    assert LoopClock().monotonic() - began_s == pytest.approx(0.6)
    assert results[0].missing == ("c",)


async def test_the_quorum_may_also_be_reached_after_the_deadline():
    timeout = AdaptiveTimeout(10.0)
    for _ in range(10):
        timeout.observe(0.2)
    here = gathering(quorum=0.6, timeout=timeout)
    first = give(here, "a")
    await asyncio.sleep(2)
    assert not first.done()
    await give(here, "b")
    assert (await first).missing == ("c",)


async def test_without_a_quorum_all_hear_who_is_missing_and_the_round_begins_anew():
    here = gathering()
    tasks = [give(here, "a"), give(here, "b")]
    began_s = LoopClock().monotonic()
    for task in tasks:
        with pytest.raises(Refusal, match="round 5 lacks c") as caught:
            await task
        assert caught.value.status == 408
    assert LoopClock().monotonic() - began_s == pytest.approx(10.0)
    results = await asyncio.gather(*(give(here, sender, 2.0) for sender in "abc"))
    assert results[0].vector.tolist() == [6.0, 6.0]


async def test_old_rounds_get_the_last_result_and_future_ones_are_refused():
    here = gathering("ab")
    with pytest.raises(Refusal, match="ahead") as caught:
        await give(here, "a", number=6)
    assert caught.value.status == 409
    with pytest.raises(Refusal, match="gone"):
        await give(here, "a", number=4)
    results = await asyncio.gather(give(here, "a"), give(here, "b"))
    again = await give(here, "a", 77.0)
    assert again == results[0]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
async def test_senseless_weights_are_refused(weight):
    with pytest.raises(Refusal) as caught:
        await give(gathering(), "a", weight=weight)
    assert caught.value.status == 400


async def test_strangers_are_refused():
    with pytest.raises(Refusal, match="not a member"):
        await give(gathering(), "x")


async def test_closing_tells_all_who_wait_and_all_who_come():
    here = gathering()
    waiting = [give(here, "a"), give(here, "b", takes_s=1.0)]
    await asyncio.sleep(0.1)
    here.close("the view ended")
    here.close("again")
    for task in [*waiting, give(here, "c")]:
        with pytest.raises(Refusal, match="the view ended") as caught:
            await task
        assert caught.value.status == 409
    await here.closed()


async def test_closing_while_it_reduces_drops_the_result():
    done = asyncio.Event()

    async def slow(contributions):
        await asyncio.sleep(1)
        done.set()
        return await total(contributions)

    here = gathering("ab", reduce=slow)
    tasks = [give(here, "a"), give(here, "b")]
    await asyncio.sleep(0.5)
    here.close("stopped")
    for task in tasks:
        with pytest.raises(Refusal, match="stopped"):
            await task
    assert not done.is_set()
    await here.closed()
    assert done.is_set()


async def test_a_failing_reduction_is_told_to_all_and_the_round_may_be_tried_again():
    wrong = [ZeroDivisionError("a bug")]

    async def reduce(contributions):
        if wrong:
            raise wrong.pop()
        return await total(contributions)

    here = gathering("ab", reduce=reduce)
    for task in [give(here, "a"), give(here, "b")]:
        with pytest.raises(ZeroDivisionError):
            await task
    results = await asyncio.gather(give(here, "a"), give(here, "b"))
    assert results[0].vector.tolist() == [2.0, 2.0]


async def test_a_waiter_that_goes_away_takes_nobody_with_it():
    here = gathering("ab")
    waiter = give(here, "a", 3.0)
    await asyncio.sleep(0.1)
    waiter.cancel()
    result = await give(here, "b")
    assert result.vector.tolist() == [4.0, 4.0]


async def test_late_arrivals_teach_patience():
    timeout = AdaptiveTimeout(10.0, window=4)
    here = gathering("ab", backups=1, timeout=timeout)
    for number in range(5, 9):
        await give(here, "a", number=number)
        await asyncio.sleep(2)
        assert (await give(here, "b", number=number)).late
    assert timeout.deadline_s == pytest.approx(6.0)
