from __future__ import annotations

import msgspec
import pytest

from p2pdrl.group.compatibility import Summary, Verdict
from p2pdrl.strategies.admission import ExchangeAdmission
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.protocol import Refusal

MINE = Summary("me", "task", "layout", 3, "aa", 100, 50)


@pytest.fixture
def swarm() -> FakeSwarm:
    made = FakeSwarm("me", 3)
    made.says = MINE
    return made


def peer(**changes) -> Summary:
    return msgspec.structs.replace(MINE, node_id="peer", **changes)


def test_who_is_let_in(swarm):
    admission = ExchangeAdmission(swarm, 3, 10)
    assert admission.admit("peer", stopping=False) == MINE
    with pytest.raises(Refusal, match="503"):
        admission.admit("peer", stopping=True)
    swarm.held.add("peer")
    with pytest.raises(Refusal, match="403"):
        admission.admit("peer", stopping=False)
    swarm.held.clear()
    swarm.says = None
    with pytest.raises(Refusal, match="503"):
        admission.admit("peer", stopping=False)


def test_who_calls_is_judged_and_adopted_when_it_is_ahead(swarm):
    admission = ExchangeAdmission(swarm, 3, 10)
    assert admission.judge("peer", MINE, peer()) is Verdict.MIX
    assert admission.judge("peer", MINE, peer(policy_version=39)) is Verdict.BE_ADOPTED
    assert swarm.adoptions == []
    assert admission.judge("peer", MINE, peer(policy_version=61)) is Verdict.ADOPT
    assert swarm.adoptions == [("peer", "11 policy versions behind")]


@pytest.mark.parametrize(
    "changes", [{"task_hash": "x"}, {"layout_hash": "x"}, {"mode_epoch": 4}, {"policy_version": 2**40}]
)
def test_who_has_nothing_in_common_is_refused(swarm, changes):
    with pytest.raises(Refusal, match="409"):
        ExchangeAdmission(swarm, 3, 10).judge("peer", MINE, peer(**changes))


def test_a_strategy_of_an_earlier_epoch_refuses_while_its_node_changes(swarm):
    with pytest.raises(Refusal, match="other-mode"):
        ExchangeAdmission(swarm, 2, 10).judge("peer", MINE, peer())


@pytest.mark.parametrize(
    ("verdict", "theirs", "heard"),
    [
        ("mix", {}, "ok"),
        ("adopt", {}, "ahead"),
        ("be-adopted", {"policy_version": 90}, "behind"),
        ("be-adopted", {}, "failed"),  # it can't make us adopt what isn't ahead
        ("dance", {}, "failed"),
    ],
)
def test_what_a_called_peer_says(swarm, verdict, theirs, heard):
    assert ExchangeAdmission(swarm, 3, 10).heard("peer", MINE, peer(**theirs), verdict) == heard
    assert bool(swarm.adoptions) is (heard == "behind")
