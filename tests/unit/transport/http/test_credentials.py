"""What callers prove, and what they hold answers to."""

from __future__ import annotations

import dataclasses

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import WireError
from p2pdrl.transport.auth import SwarmKeys, is_nonce, new_nonce
from p2pdrl.transport.http.headers import NO_TARGET, AnswerHead, Credentials

US, PEER, OTHER = "a" * 32, "b" * 32, "c" * 32
KEYS = SwarmKeys(b"k" * 32)


def credentials(keys: SwarmKeys = KEYS) -> Credentials:
    return Credentials(US, "swarm", keys, ManualClock(wall_s=1234.5678))


def answer_of(sender: str) -> AnswerHead:
    return AnswerHead(sender=sender, meta_nbytes=0, vector_nbytes=0, nonce=new_nonce())


def test_a_request_says_who_calls_whom_and_when() -> None:
    head = credentials().head("/p2p/push", PEER, meta_nbytes=3, vector_nbytes=8)
    assert (head.sender, head.target, head.swarm, head.path) == (US, PEER, "swarm", "/p2p/push")
    assert (head.method, head.meta_nbytes, head.vector_nbytes, head.time) == ("POST", 3, 8, "1234.568")
    assert head.authentic(KEYS)
    assert not dataclasses.replace(head, method="GET").authentic(KEYS)


def test_each_request_has_a_nonce_of_its_own() -> None:
    one, two = (credentials(SwarmKeys(None)).head("/p2p/stream", None, method="GET") for _ in range(2))
    assert is_nonce(one.nonce)
    assert one.nonce != two.nonce
    assert (one.mac, one.target, one.method) == ("", NO_TARGET, "GET")


def test_the_answer_of_the_one_who_was_called_is_good() -> None:
    ours = credentials()
    request, unknown = ours.head("/p2p/push", PEER), ours.head("/p2p/push", None)
    ours.check(answer_of(PEER).sign(KEYS, request.nonce), request)
    ours.check(answer_of(OTHER).sign(KEYS, unknown.nonce), unknown)
    keyless = credentials(SwarmKeys(None))
    keyless.check(answer_of(PEER), keyless.head("/p2p/push", PEER))


@pytest.mark.parametrize("forged", ["no mac", "another key", "another request"])
def test_answers_that_prove_nothing_are_not_believed(forged: str) -> None:
    request = credentials().head("/p2p/push", PEER)
    answer = answer_of(PEER)
    if forged == "another key":
        answer = answer.sign(SwarmKeys(b"x" * 32), request.nonce)
    elif forged == "another request":
        answer = answer.sign(KEYS, new_nonce())
    with pytest.raises(WireError, match="isn't signed"):
        credentials().check(answer, request)


@pytest.mark.parametrize("keys", [KEYS, SwarmKeys(None)])
def test_nobody_answers_in_place_of_another(keys: SwarmKeys) -> None:
    ours = credentials(keys)
    request = ours.head("/p2p/push", PEER)
    answer = answer_of(OTHER)
    with pytest.raises(WireError, match="in place of"):
        ours.check(answer.sign(keys, request.nonce), request)
