"""Requests that wait for the core's answers."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.membership.messages import Welcome
from p2pdrl.membership.service import PendingRequests
from p2pdrl.transport.protocol import Refusal

pytestmark = pytest.mark.looptime

WELCOME = Welcome((), b"", "10.0.0.1")


async def test_answered_before_the_feeding_returns():
    pending = PendingRequests(10.0)
    assert await pending.ask(lambda token: pending.settle(token, WELCOME)) is WELCOME


async def test_each_gets_its_own_answer():
    pending, tokens = PendingRequests(10.0), []
    asked = [asyncio.create_task(pending.ask(tokens.append)) for _ in range(2)]
    await asyncio.sleep(0)
    pending.settle(tokens[1], Refusal(403, "you aren't known here"))
    pending.settle(tokens[0], WELCOME)
    pending.settle(tokens[0], Refusal(403, "too late"))
    assert await asked[0] is WELCOME
    with pytest.raises(Refusal, match="aren't known"):
        await asked[1]
    pending.settle(tokens[0], WELCOME)  # nobody waits for it any more


async def test_no_answer_is_a_refusal():
    pending, started_s = PendingRequests(10.0), asyncio.get_running_loop().time()
    with pytest.raises(Refusal) as caught:
        await pending.ask(lambda token: None)
    assert (caught.value.status, asyncio.get_running_loop().time() - started_s) == (503, 10.0)


async def test_closing_ends_the_waits():
    pending = PendingRequests(10.0)
    asked = asyncio.create_task(pending.ask(lambda token: None))
    await asyncio.sleep(0)
    pending.close()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_a_bug_in_the_core_leaves_nothing():
    pending = PendingRequests(10.0)

    def broken(token: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await pending.ask(broken)
    pending.settle(1, WELCOME)
