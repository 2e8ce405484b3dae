"""The heads of posts and answers, and whose answers are believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.http.headers import NO_TARGET, AnswerHead, RequestHead, check_answer
from p2pdrl.versions import BEFORE_RANGES, SPOKEN, ProtocolRange

US, PEER, OTHER = "a" * 32, "b" * 32, "c" * 32

ids = st.text("0123456789abcdef", min_size=32, max_size=32)
lengths = st.integers(0, 10**15 - 1)
spoken = st.tuples(st.integers(1, 999_999), st.integers(1, 999_999)).map(
    lambda ends: ProtocolRange(*sorted(ends))
)
requests = st.builds(
    RequestHead,
    path=st.just("/p2p/push"),
    sender=ids,
    target=ids | st.just(NO_TARGET),
    swarm=st.text("09azAZ_.-", min_size=1, max_size=64),
    meta_nbytes=lengths,
    vector_nbytes=lengths,
    protocol=st.integers(1, 999_999),
    spoken=spoken,
    hides=st.booleans(),
)
answers = st.builds(AnswerHead, sender=ids, meta_nbytes=lengths, vector_nbytes=lengths, spoken=spoken)


@given(requests)
def test_requests_go_there_and_back(head: RequestHead) -> None:
    assert RequestHead.from_headers(head.path, head.to_headers()) == head


@given(answers)
def test_answers_go_there_and_back(head: AnswerHead) -> None:
    assert AnswerHead.from_headers(head.to_headers()) == head


@given(requests, st.data())
def test_any_word_is_read_or_a_wire_error(head: RequestHead, data: st.DataObject) -> None:
    headers = head.to_headers()
    headers[data.draw(st.sampled_from([*headers]))] = data.draw(st.text(max_size=40))
    try:
        found = RequestHead.from_headers(head.path, headers)
    except WireError:
        return
    assert RequestHead.from_headers(head.path, found.to_headers()) == found


def request_to(target: str) -> RequestHead:
    return RequestHead(
        path="/p2p/push", sender=US, target=target, swarm="swarm", meta_nbytes=3, vector_nbytes=8
    )


def answer_of(sender: str) -> AnswerHead:
    return AnswerHead(sender=sender, meta_nbytes=0, vector_nbytes=0)


def test_a_request_says_who_calls_whom() -> None:
    headers = request_to(PEER).to_headers()
    assert headers == {
        "Content-Type": "application/x-p2pdrl",
        "P2PDRL-Protocol": str(SPOKEN.oldest),
        "P2PDRL-Protocols": SPOKEN.wire,
        "P2PDRL-Sender": US,
        "P2PDRL-Target": PEER,
        "P2PDRL-Swarm": "swarm",
        "P2PDRL-Meta-Length": "3",
        "P2PDRL-Vector-Length": "8",
    }


def test_who_tells_no_range_speaks_what_it_writes() -> None:
    headers = request_to(PEER).to_headers() | {"P2PDRL-Protocol": "5"}
    del headers["P2PDRL-Protocols"]
    assert RequestHead.from_headers("/p2p/push", headers).spoken == ProtocolRange(5, 5)
    answer = answer_of(PEER).to_headers()
    del answer["P2PDRL-Protocols"]
    assert AnswerHead.from_headers(answer).spoken == BEFORE_RANGES


def test_a_caller_hides_unless_it_says_otherwise() -> None:
    headers = request_to(PEER).to_headers()
    assert RequestHead.from_headers("/p2p/push", headers).hides
    for word, hides in (("1", False), ("0", True), ("yes", True), ("", True)):
        found = RequestHead.from_headers("/p2p/push", {**headers, "P2PDRL-Unencrypted": word})
        assert found.hides is hides


@pytest.mark.parametrize(("target", "sender"), [(PEER, PEER), (NO_TARGET, OTHER)])
@pytest.mark.parametrize("shown", ["theirs", None])
def test_the_answer_of_the_one_who_was_called_is_good(target: str, sender: str, shown: str | None) -> None:
    check_answer(answer_of(sender), request_to(target), sender if shown else None)


@pytest.mark.parametrize("shown", [OTHER, None])
def test_nobody_answers_in_place_of_another(shown: str | None) -> None:
    with pytest.raises(WireError, match="in place of"):
        check_answer(answer_of(OTHER), request_to(PEER), shown)


@pytest.mark.parametrize("target", [PEER, NO_TARGET])
def test_nobody_answers_in_another_s_name(target: str) -> None:
    with pytest.raises(WireError, match="in the name of"):
        check_answer(answer_of(PEER), request_to(target), OTHER)
